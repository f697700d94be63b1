"""Evaluate how well rankers find the longest outputs of prompts that they were not fitted to.

    at random       a fifth of the longest fifth
    prompt length   longer prompts have longer outputs
    family          the mean of its task family; only with several families
    text            fitted to the texts of the other prompts
    N past          the mean log length of N other outputs of the prompt
    prior + N past  their posterior: see `streamrl.workload.length_posterior`
    hindsight       the mean log length of all other outputs of the prompt: the limit of any ranker of prompts

Each figure is for one output of each prompt, averaged over outputs. Its standard error is over
prompts, by bootstrap.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.ranker.score_files import PROMPT, TOKENS, KnownPrompt, ScoreFile, families_of
from streamrl.ranker.text_ranker import LEAST_PROMPTS, folds, held_out
from streamrl.workload.length_posterior import KnownGroup, Posterior
from streamrl.workload.simulated_ranker import recall_at

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

SHARES = (0.2, 0.1, 0.05)  # of the longest, as StreamRL reports them (arXiv 2504.15930, Table 4)
RESAMPLES = 200  # of prompts, for a standard error within 5 % of itself
POOLED = "all families"
"""All families together: a ranker that only distinguishes families looks good here."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one ranker on held-out prompts, by task family."""

    ranker: str
    recall: dict[str, dict[str, float]]
    """Share of the true longest outputs among the ranker's longest, by family and share."""
    recall_error: dict[str, dict[str, float]]
    """Standard errors of `recall` over prompts."""
    spearman: dict[str, float]
    """Rank correlation over all lengths, by family."""
    calibration: dict[str, float | None] = {}
    """Slope of log lengths over log expectations, 1 if expectations are calibrated; None if scores are not tokens."""
    num_prompts: dict[str, int]


LEAST_TEXTS = 2 * LEAST_PROMPTS
"""Prompts of a family, half of which a text ranker is fitted to."""


class OutputScores(msgspec.Struct, frozen=True):
    """Scores of a ranker for one output of each prompt of a family, and the true lengths."""

    scores: Floats
    """[prompts, outputs]; higher is longer."""
    lengths: npt.NDArray[np.int64]
    """[prompts, outputs]."""
    is_tokens: bool = False
    """Whether scores are log tokens."""


def evaluate(ranker: str, families: dict[str, OutputScores]) -> Evaluation:
    """Return the figures of one ranker.

    Raises:
        ValueError: no prompt has both a score and a length.
    """
    if not families:
        raise ValueError(f"ranker {ranker!r}: no prompt has both a score and a length")
    recalls = {family: _recalls(scored) for family, scored in families.items()}
    return Evaluation(
        ranker=ranker,
        recall={family: dict(_by_share(found)) for family, (found, _) in recalls.items()},
        recall_error={family: dict(_by_share(error)) for family, (_, error) in recalls.items()},
        spearman={family: _spearman(scored) for family, scored in families.items()},
        calibration={family: _slope(scored) for family, scored in families.items()},
        num_prompts={family: len(scored.lengths) for family, scored in families.items()},
    )


def rank_all(
    prompts: Sequence[KnownPrompt],
    num_past: Sequence[int],
    past: dict[str, list[int]] | None = None,
    priors: dict[str, dict[str, float]] | None = None,
    seed: int = 0,
) -> Iterator[Evaluation]:
    """Yield the figures of every ranker that the data allows, the trivial ones first.

    Args:
        prompts: prompts with their lengths.
        num_past: numbers of past outputs for rankers by history.
        past: past outputs by prompt, if they are not other outputs of the same model.
        priors: scores of other rankers by name and prompt; higher is longer.
        seed: seed of the folds.
    """
    families = dict(families_of(prompts))
    if len(families) > 1:
        families[POOLED] = [prompt for own in families.values() for prompt in own]
    has_texts = all(prompt.text is not None for prompt in prompts)
    if has_texts:
        found = {name: _scored(own, _prompt_lengths(own)) for name, own in families.items()}
        yield evaluate("prompt length", found)
    if len(families) > 1:
        yield evaluate("family", {POOLED: _scored(families[POOLED], _family_means(families))})
    known: dict[str, dict[str, Floats]] = {}
    if has_texts:
        enough = {name: own for name, own in families.items() if len(own) >= LEAST_TEXTS}
        if enough:
            known["text"] = {name: _text_scores(own, seed) for name, own in enough.items()}
        else:
            most = max(map(len, families.values()), default=0)
            logger.warning(
                f"ranker 'text' is left out: it needs {LEAST_TEXTS} prompts of one family, got at most {most}"
            )
    for name, scores in (priors or {}).items():
        known[name] = {
            family: np.array([scores[p.id] for p in own])
            for family, own in families.items()
            if all(p.id in scores for p in own)
        }
    for name, scored in known.items():
        found = {f: _scored(families[f], s, is_tokens=name == "text") for f, s in scored.items()}
        yield evaluate(name, found)
    for num in num_past:
        label = f"{num} past"
        able = {name: own for name, own in families.items() if _knows(own, num, past)}
        if not able:
            raise ValueError(_too_few(prompts, num, past))
        histories = {name: _histories(own, num, past) for name, own in able.items()}
        yield evaluate(
            label,
            {f: _scored(families[f], h.mean(axis=2), is_tokens=True) for f, h in histories.items()},
        )
        for name, scored in known.items():
            both = {
                f: _scored(
                    families[f], _posteriors(families[f], s, histories[f], seed), is_tokens=True
                )
                for f, s in scored.items()
                if f in histories
            }
            if both:
                yield evaluate(f"{name} + {label}", both)
    several = {name: own for name, own in families.items() if _knows(own, 1, None)}
    if several:
        found = {
            name: _scored(own, _histories(own, _num_outputs(own) - 1, None).mean(axis=2))
            for name, own in several.items()
        }
        yield evaluate("hindsight", found)


def evaluate_scores(
    scores: ScoreFile, column: str, lengths: dict[str, list[int]] | None
) -> Evaluation:
    """Evaluate a column of scores against the lengths in the same file, or against lengths by prompt.

    A higher score means a longer output. Prompts without a score or a length are left out.
    """
    scores.must_have(column, TOKENS if lengths is None else PROMPT)
    families: dict[str, list[KnownPrompt]] = {}
    found: dict[str, list[float]] = {}
    for index, row in enumerate(scores.rows):
        score = scores.number(index, column)
        if lengths is None:
            tokens = scores.tokens(index)
            known = [] if tokens is None else [tokens]
        else:
            known = lengths.get(row[PROMPT], [])
        if score is not None and known:
            family = scores.family(index)
            families.setdefault(family, []).append(KnownPrompt(str(index), family, None, known))
            found.setdefault(family, []).append(score)
    return evaluate(column, {f: _scored(families[f], np.array(s)) for f, s in found.items()})


def _scored(
    prompts: Sequence[KnownPrompt], scores: Floats, is_tokens: bool = False
) -> OutputScores:
    """Return scores with lengths of as many outputs as every prompt has; scores are by prompt or by output."""
    lengths = _lengths(prompts)
    if scores.ndim == 1:
        scores = np.broadcast_to(scores[:, None], lengths.shape)
    return OutputScores(scores, lengths, is_tokens)


def _lengths(prompts: Sequence[KnownPrompt]) -> npt.NDArray[np.int64]:
    num = _num_outputs(prompts)
    return np.array([prompt.lengths[:num] for prompt in prompts], dtype=np.int64)


def _num_outputs(prompts: Sequence[KnownPrompt]) -> int:
    """Return the number of outputs that every prompt has."""
    return min(len(prompt.lengths) for prompt in prompts)


def _knows(prompts: Sequence[KnownPrompt], num: int, past: dict[str, list[int]] | None) -> bool:
    """Return whether every prompt has `num` past outputs, without the one to rank."""
    if past is None:
        return _num_outputs(prompts) > num
    return all(len(past.get(prompt.id, ())) >= num for prompt in prompts)


def _too_few(prompts: Sequence[KnownPrompt], num: int, past: dict[str, list[int]] | None) -> str:
    fewest = min(prompts, key=lambda p: len(p.lengths if past is None else past.get(p.id, ())))
    has = len(fewest.lengths if past is None else past.get(fewest.id, ()))
    needed = num if past is not None else num + 1  # one more to rank
    return (
        f"{num} past samples need {needed} outputs of each prompt, but every family has a prompt with fewer, "
        f"such as {fewest.id!r} with {has}"
    )


def _logs(prompts: Sequence[KnownPrompt]) -> Floats:
    found: Floats = np.log(np.maximum(1, _lengths(prompts)))
    return found


def _prompt_lengths(prompts: Sequence[KnownPrompt]) -> Floats:
    return np.array([len(prompt.text or "") for prompt in prompts], dtype=np.float64)


def _family_means(families: dict[str, list[KnownPrompt]]) -> Floats:
    means = {name: float(_logs(own).mean()) for name, own in families.items() if name != POOLED}
    return np.array([means[prompt.family] for prompt in families[POOLED]])


def _text_scores(prompts: Sequence[KnownPrompt], seed: int) -> Floats:
    return held_out([prompt.text or "" for prompt in prompts], _logs(prompts).mean(axis=1), seed)


def _histories(
    prompts: Sequence[KnownPrompt], num: int, past: dict[str, list[int]] | None
) -> Floats:
    """Return the log lengths of `num` past outputs for each output [prompts, outputs, num]."""
    own = _logs(prompts)
    if past is None:
        num_outputs = own.shape[1]
        others = [
            [(which + 1 + k) % num_outputs for k in range(num)] for which in range(num_outputs)
        ]
        return own[:, others]
    logs = np.log(np.maximum(1, np.array([past[prompt.id][:num] for prompt in prompts])))
    return np.broadcast_to(logs[:, None, :], (*own.shape, num))


def _posteriors(
    prompts: Sequence[KnownPrompt], priors: Floats, histories: Floats, seed: int
) -> Floats:
    """Return the posterior of each output's log length [prompts, outputs]; slope and weight come from other prompts."""
    found = np.empty(histories.shape[:2])
    for fold, rest in folds(len(prompts), seed):
        posterior = Posterior()
        posterior.learn([_group(priors[i], histories[i].reshape(-1)) for i in rest])
        level = posterior.level
        assert level is not None, "a window was learnt"
        for i in fold:
            for which, past in enumerate(histories[i]):
                found[i, which] = posterior.blend(
                    float(priors[i]), len(past), float(past.sum() - len(past) * level)
                )
    return found


def _group(prior: float, lengths: Floats) -> KnownGroup:
    own = tuple(lengths.tolist())
    return KnownGroup(None, 1, (float(prior),) * len(own), (0.0,) * len(own), own)


def _recalls(scored: OutputScores) -> tuple[list[float], list[float]]:
    """Return recall and its standard error at each of `SHARES`."""
    rng = np.random.default_rng(0)
    num = len(scored.lengths)
    drawn = [rng.integers(0, num, num) for _ in range(RESAMPLES)]
    found = [_recall(scored.scores, scored.lengths, share) for share in SHARES]
    errors = [
        float(np.std([_recall(scored.scores[d], scored.lengths[d], share) for d in drawn], ddof=1))
        for share in SHARES
    ]
    return found, errors


def _recall(scores: Floats, lengths: npt.NDArray[np.int64], share: float) -> float:
    outputs = range(lengths.shape[1])
    return float(np.mean([recall_at(scores[:, k], lengths[:, k], share) for k in outputs]))


def _by_share(values: Sequence[float]) -> Iterator[tuple[str, float]]:
    return zip(map(str, SHARES), values, strict=True)


def _spearman(scored: OutputScores) -> float:
    outputs = range(scored.lengths.shape[1])
    return float(np.mean([spearman(scored.scores[:, k], scored.lengths[:, k]) for k in outputs]))


def _slope(scored: OutputScores) -> float | None:
    """Return the slope of log lengths over log expectations."""
    if not scored.is_tokens:
        return None
    x, y = scored.scores.reshape(-1), np.log(np.maximum(1, scored.lengths)).reshape(-1)
    spread = float(np.var(x))
    return float(np.mean((x - x.mean()) * (y - y.mean()))) / spread if spread else None


def spearman(scores: npt.NDArray[np.generic], lengths: npt.NDArray[np.generic]) -> float:
    """Return the rank correlation, with mean ranks for ties; 0 if either side is constant."""
    first, second = _mean_ranks(scores), _mean_ranks(lengths)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: npt.NDArray[np.generic]) -> Floats:
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, side="left")
    found: Floats = (below + np.searchsorted(ordered, values, side="right")) / 2
    return found

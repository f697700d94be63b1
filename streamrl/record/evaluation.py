"""Scores of evaluations, with their confidence intervals, and the difference of two on the same prompts.

| score   | value of a prompt with n rollouts, c of them solved                                        |
|---------|--------------------------------------------------------------------------------------------|
| avg@n   | the mean reward of its rollouts                                                            |
| pass@k  | 1 - C(n-c, k) / C(n, k): the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374)      |

A score is the mean over prompts. Prompts are independent, and rollouts of one prompt are not. So the
interval counts prompts (Miller 2024, arXiv 2411.00640). It is Wilson's (1927) if each prompt's value
is 0 or 1; otherwise it is Student's t interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import comb, pi, sqrt, tan
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple, TypeAlias

import msgspec

from streamrl.record.run_directory import read_lines
from streamrl.record.steady_state import student
from streamrl.runfile.evaluation_config import EvaluationConfig

EVALUATIONS = "evaluations.jsonl"
EVALUATED = "evaluation_rollouts.jsonl"
"""Files of a run directory: a line for each evaluation, and for each of its rollouts."""
OF_EVALUATION = "eval/"
"""Prefix of the scores among the figures that trackers get."""


Limits: TypeAlias = tuple[float, float]
"""Least and most possible value."""


class Score(msgspec.Struct, frozen=True):
    """A score and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class SourceScores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the prompts of one data source."""

    num_prompts: int
    scores: dict[str, Score]
    """As those of the evaluation; empty if all rollouts of these prompts failed."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one evaluation: a line of evaluations.jsonl."""

    step: int
    """Version that was evaluated."""
    time: float
    """Seconds from the start of the run to its end."""
    seconds: float
    """Seconds from the drawing of its prompts to its end."""
    num_prompts: int
    samples: int
    confidence: float
    scores: dict[str, Score]
    """By name, such as "avg@4" and "pass@1"."""
    sources: dict[str, SourceScores] = {}
    """By data source, in the order of the prompts. Empty if the prompts do not have several sources."""
    mean_tokens: float
    """Mean output tokens of a rollout."""
    truncated_share: float
    """Share of rollouts that the maximum length cut off."""
    num_failed: int = 0
    """Rollouts without a score, which are left out."""
    bounds: Limits | None = None
    """Least and most reward that a rollout can have; None if they are unknown."""
    rewards: dict[int, list[float]] = {}
    """By prompt, counted from 0: the rewards of its rollouts, in order of their numbers."""

    @property
    def main(self) -> str:
        """Name of the score that decides which version is best: avg@n."""
        return next(iter(self.scores))

    @property
    def figures(self) -> dict[str, float]:
        """Return its figures for trackers."""
        found = {"eval/mean_tokens": self.mean_tokens, "eval/truncated_share": self.truncated_share}
        for name, score in self.scores.items():
            found[OF_EVALUATION + name] = score.value
            found[f"{OF_EVALUATION}{name}/low"] = score.low
            found[f"{OF_EVALUATION}{name}/high"] = score.high
        for source, own in self.sources.items():
            for name, score in own.scores.items():
                found[f"{OF_EVALUATION}{source}/{name}"] = score.value
        return found


def best_step(results: Sequence[EvaluationResult]) -> int:
    """Return the step of the evaluation with the best avg@n; of equal ones the newest."""
    return max(results, key=lambda each: (each.scores[each.main].value, each.step)).step


class Difference(NamedTuple):
    """The difference of a score between two evaluations, over the prompts that both have."""

    score: Score
    num_prompts: int

    @property
    def is_clear(self) -> bool:
        """Whether its interval does not include 0."""
        return self.score.low > 0 or self.score.high < 0


def pass_at(k: int, num_solved: int, num_rollouts: int) -> float:
    """Return the unbiased estimate of the probability that one of `k` rollouts solves the prompt.

    Raises:
        ValueError: the prompt has fewer than `k` rollouts.
    """
    if num_rollouts < k:
        raise ValueError(f"pass@{k} needs {k} rollouts of a prompt, got {num_rollouts}")
    return 1 - comb(num_rollouts - num_solved, k) / comb(num_rollouts, k)


def values_of(
    rewards: dict[int, list[float]], config: EvaluationConfig
) -> dict[str, dict[int, float]]:
    """Return by name of a score its value for each prompt.

    A prompt whose rollouts failed counts for no score that needs more rollouts than it has.
    """
    found = {f"avg@{config.samples}": {p: fmean(each) for p, each in rewards.items() if each}}
    for k in config.ks:
        found[f"pass@{k}"] = {
            prompt: pass_at(k, sum(reward >= config.passes_at for reward in each), len(each))
            for prompt, each in rewards.items()
            if len(each) >= k
        }
    return {name: values for name, values in found.items() if values}


def passes_hint(result: EvaluationResult, config: EvaluationConfig) -> str:
    """Return a line if no reward, or every reward, of an evaluation counts as solved though rewards differ; else empty.

    Equal rewards give no hint: they are those of a policy that solves no prompt, or all. Nor do rewards whose known
    bounds have `passes_at` between them.
    """
    seen = {reward for own in result.rewards.values() for reward in own}
    least, most = result.bounds or (min(seen, default=0.0), max(seen, default=0.0))
    at, is_known = f"evaluation.passes_at is {config.passes_at:g}", result.bounds is not None
    if len(seen) > 1 and most < config.passes_at:
        told = f"no rollout counts as solved: {at}, and the highest {{}} {most:g}; lower it"
    elif len(seen) > 1 and least >= config.passes_at:
        told = f"every rollout counts as solved: {at}, and the lowest {{}} {least:g}; raise it"
    else:
        return ""
    if is_known:
        return told.format("possible reward is")
    return told.format("reward was") + " if that is not what solving a prompt means"


def scores_of(
    rewards: dict[int, list[float]], config: EvaluationConfig, bounds: Limits | None = None
) -> dict[str, Score]:
    """Return each score of an evaluation, avg@n first; empty if no rollout has a reward.

    Args:
        rewards: by prompt, those of its rollouts.
        config: the section of the run file.
        bounds: least and most reward that a rollout can have, if they are known.
    """
    each, limits = values_of(rewards, config), _limits(rewards, config, bounds)
    found = {name: mean_of(list(at.values()), config.confidence) for name, at in each.items()}
    return {name: _within(score, limits.get(name)) for name, score in found.items()}


def scores_by_source(
    rewards: dict[int, list[float]],
    sources: Sequence[str | None],
    config: EvaluationConfig,
    bounds: Limits | None = None,
) -> dict[str, SourceScores]:
    """Return the scores of each data source; empty if there are not several.

    Args:
        rewards: by prompt, those of its rollouts.
        sources: the source of each prompt. A prompt without one counts only in the scores of all.
        config: how prompts are scored.
        bounds: least and most reward that a rollout can have, if they are known.
    """
    prompts: dict[str, list[int]] = defaultdict(list)
    for prompt, source in enumerate(sources):
        if source is not None:
            prompts[source].append(prompt)
    if len(prompts) < 2:
        return {}
    return {
        source: SourceScores(
            num_prompts=len(own),
            scores=scores_of(
                {each: rewards[each] for each in own if each in rewards}, config, bounds
            ),
        )
        for source, own in prompts.items()
    }


def _limits(
    rewards: dict[int, list[float]], config: EvaluationConfig, bounds: Limits | None
) -> dict[str, Limits]:
    """Return the limits of scores: of pass@k, and of avg@n if rewards have bounds or each of them is 0 or 1."""
    found = {f"pass@{k}": (0.0, 1.0) for k in config.ks}
    if bounds is None and all(each in (0.0, 1.0) for own in rewards.values() for each in own):
        bounds = (0.0, 1.0)
    return found if bounds is None else {**found, f"avg@{config.samples}": bounds}


def _within(score: Score, limits: Limits | None) -> Score:
    """Return a score whose interval ends at its limits."""
    if limits is None:
        return score
    return Score(score.value, max(limits[0], score.low), min(limits[1], score.high))


def mean_of(values: Sequence[float], confidence: float) -> Score:
    """Return the mean of independent values with its confidence interval; without width for one value."""
    mean, num = fmean(values), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Score(mean, *wilson(mean, num, confidence))
    half = half_width(values, confidence)
    return Score(mean, mean - half, mean + half)


def half_width(values: Sequence[float], confidence: float) -> float:
    """Return half the width of Student's t interval of a mean; 0 for one value."""
    num = len(values)
    return 0.0 if num < 2 else quantile(confidence, num - 1) * stdev(values) / sqrt(num)


def wilson(share: float, num: int, confidence: float) -> tuple[float, float]:
    """Return the ends of Wilson's score interval of a share of `num` independent trials."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z * sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return max(0.0, middle - half), min(1.0, middle + half)


def quantile(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t distribution: exact for one and two degrees of freedom, else within 1 %."""
    tail = (1 + confidence) / 2
    match freedom:
        case 1:
            return tan(pi * (tail - 0.5))
        case 2:
            return (2 * tail - 1) / sqrt(2 * tail * (1 - tail))
    return student(freedom, NormalDist().inv_cdf(tail))


def difference(
    one: EvaluationResult, other: EvaluationResult, config: EvaluationConfig
) -> dict[str, Difference]:
    """Return by score how much `one` is above `other`, paired by prompt; both must have the same prompts.

    Paired differences leave out how much harder one prompt is than another, so their interval is
    narrower than those of both scores (Miller 2024, section 4).
    """
    ones, others = values_of(one.rewards, config), values_of(other.rewards, config)
    limits, less = (_limits(each.rewards, config, each.bounds) for each in (one, other))
    found = {}
    for name, values in ones.items():
        at = others.get(name, {})
        paired = [values[prompt] - at[prompt] for prompt in values if prompt in at]
        if paired:
            mean, half = fmean(paired), half_width(paired, config.confidence)
            score, both = Score(mean, mean - half, mean + half), None
            if name in limits and name in less:
                both = limits[name][0] - less[name][1], limits[name][1] - less[name][0]
            found[name] = Difference(_within(score, both), len(paired))
    return found


def by_prompt(rewards: Iterable[tuple[int, float]], samples: int) -> dict[int, list[float]]:
    """Return the rewards of rollouts by prompt; rollout r is of prompt r // samples."""
    found: dict[int, list[float]] = defaultdict(list)
    for rollout, reward in sorted(rewards):
        found[rollout // samples].append(reward)
    return dict(found)


def read_evaluations(directory: Path) -> list[EvaluationResult]:
    """Return the evaluations of a run that were not rolled back, in order; empty if there are none.

    Raises:
        ValueError: a line of evaluations.jsonl is not from a run.
    """
    path = directory / EVALUATIONS
    if not path.exists():
        return []
    try:
        return [msgspec.convert(line, EvaluationResult, str_keys=True) for line in read_lines(path)]
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: a line is not from a run: {error}") from None


class FinalScores(NamedTuple):
    """The last evaluations of two runs on the same prompts."""

    a: EvaluationResult
    b: EvaluationResult
    differences: dict[str, Difference]
    """By score: that of A minus that of B."""
    scored_unlike: tuple[str, ...] = ()
    """Keys of `[evaluation]` that scores depend on and whose values differ."""


def final_scores(a: Path, b: Path, config: EvaluationConfig) -> FinalScores:
    """Compare the last evaluations in two run directories; `config` is that of A.

    Raises:
        ValueError: a run has no evaluation, or their prompts or numbers of rollouts differ.
    """
    results = []
    for directory in (a, b):
        if not (found := read_evaluations(directory)):
            raise ValueError(f"{directory} has no evaluation")
        results.append(found[-1])
    one, other = results
    if one.samples != other.samples:
        raise ValueError(f"evaluation.samples is {one.samples} in A and {other.samples} in B")
    ours, theirs = _prompts_of(a, one.step), _prompts_of(b, other.step)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise ValueError(f"held-out prompt {number} of A is another one than that of B")
    return FinalScores(one, other, difference(one, other, config))


def _prompts_of(directory: Path, step: int) -> dict[int, object]:
    """Return the prompts of an evaluation by their numbers."""
    lines = read_lines(directory / EVALUATED)
    return {line["prompt_number"]: line["prompt"] for line in lines if line["step"] == step}

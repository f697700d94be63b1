"""How well rankers tell long rollouts from short ones, on held-out data, family by family.

A mixture of task families flatters any ranker, which then only has to tell the families apart; so every
figure is of one family. A figure is of one sample of each prompt, averaged over samples where a prompt has several.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from streamrl.workload.csv_rows import read_csv
from streamrl.workload.ranker import Lengths, Numbers, recall_at

SHARES = (0.2, 0.1, 0.05)  # of the longest: those that StreamRL (arXiv 2504.15930, Table 4) reports
FAMILY = (
    "family",
    "source",
    "dataset",
)  # columns that may name a row's task family, first one found
PROMPT, TOKENS, SCORE, MODEL = "prompt_id", "output_tokens", "score", "model"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What held-out data says of one ranker."""

    ranker: str
    recall: dict[str, dict[str, float]]
    """Share of the true longest that the ranker puts among its longest, by family and share."""
    spearman: dict[str, float]
    """Correlation of ranks over all lengths, by family."""
    num_prompts: dict[str, int]


class FamilySample(NamedTuple):
    """One rollout of each prompt of a family, and what a ranker says of it."""

    scores: Numbers
    lengths: Lengths


class ScoreFile(NamedTuple):
    """The rows of a CSV file."""

    path: Path
    rows: list[dict[str, str]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.rows[0])

    def must_have(self, *columns: str) -> None:
        """Raise `ValueError` naming the first of `columns` that is not there."""
        for column in columns:
            if column not in self.rows[0]:
                close = difflib.get_close_matches(column, self.columns, n=1)
                hint = (
                    f"; did you mean {close[0]}?" if close else f" among {', '.join(self.columns)}"
                )
                raise ValueError(f"{self.path}: no column {column!r}{hint}")

    def number(self, index: int, column: str) -> float | None:
        """Return a number, or None where the field is empty; rows are counted from 1."""
        text = self.rows[index][column]
        try:
            value = float(text) if text else None
        except ValueError:
            value = np.nan
        if value is not None and not np.isfinite(value):
            raise ValueError(f"{self.path}: row {index + 1}, {column}: no number: {text!r}")
        return value

    def family(self, index: int) -> str:
        """Return the task family of a row: the file's name where no column says it."""
        row = self.rows[index]
        found = next((row[column] for column in FAMILY if row.get(column)), None)
        return found or self.path.name.split(".")[0]


def read_table(path: Path, model: str | None = None) -> ScoreFile:
    """Read a file of scores or lengths; of one with several models only the rows of `model`.

    Raises:
        ValueError: naming the file, and what is wrong with it.
    """
    rows = read_csv(path)
    names = list(dict.fromkeys(row[MODEL] for row in rows if row.get(MODEL)))
    if model is not None:
        rows = [row for row in rows if row.get(MODEL) == model]
        if not rows:
            close = difflib.get_close_matches(model, names, n=1, cutoff=0.3)
            raise ValueError(
                f"{path}: no rows of model {model!r}; it has {', '.join(close or names)}"
            )
    elif len(names) > 1:
        raise ValueError(
            f"{path} has rows of {len(names)} models, such as {names[0]!r}: name one with --model"
        )
    if not rows:
        raise ValueError(f"{path} has no rows")
    return ScoreFile(path, rows)


def score_columns(scores: ScoreFile, chosen: Sequence[str], has_lengths_apart: bool) -> list[str]:
    """Return the columns that hold scores: those chosen, "score", or all where lengths are in another file."""
    if chosen:
        scores.must_have(*chosen)
        return list(chosen)
    if has_lengths_apart and SCORE not in scores.columns:
        return [c for c in scores.columns if c not in (PROMPT, TOKENS, MODEL, *FAMILY)]
    scores.must_have(SCORE)
    return [SCORE]


def evaluate_scores(
    scores: ScoreFile, column: str, lengths: dict[str, list[int]] | None
) -> Evaluation:
    """Evaluate a column of scores, higher for longer, on the lengths beside it or on those by prompt.

    Prompts without a score or a length are left out.
    """
    scores.must_have(column, TOKENS if lengths is None else PROMPT)
    pairs: dict[str, list[tuple[float, list[int]]]] = {}
    for index, row in enumerate(scores.rows):
        score = scores.number(index, column)
        if lengths is None:
            tokens = scores.number(index, TOKENS)
            found = [] if tokens is None else [int(tokens)]
        else:
            found = lengths.get(row[PROMPT], [])
        if score is not None and found:
            pairs.setdefault(scores.family(index), []).append((score, found))
    return _evaluate(column, {family: _samples(known) for family, known in pairs.items()})


def evaluate_history(lengths: ScoreFile, num_past: int) -> Evaluation:
    """Evaluate the mean of `num_past` other samples of the prompt, for each sample in turn.

    Raises:
        ValueError: a prompt has too few samples.
    """
    families: dict[str, dict[str, list[int]]] = {}
    lengths.must_have(PROMPT, TOKENS)
    for index, row in enumerate(lengths.rows):
        tokens = lengths.number(index, TOKENS)
        if tokens is not None:
            prompts = families.setdefault(lengths.family(index), {})
            prompts.setdefault(row[PROMPT], []).append(int(tokens))
    samples = {}
    for family, by_prompt in families.items():
        fewest = min(by_prompt, key=lambda prompt: len(by_prompt[prompt]))
        num = len(by_prompt[fewest])
        if num <= num_past:
            raise ValueError(
                f"{lengths.path}: {num_past} past samples and one to rank need {num_past + 1} of each "
                f"prompt, but {fewest!r} has {num}"
            )
        known = np.array([found[:num] for found in by_prompt.values()], dtype=np.int64)
        samples[family] = [
            FamilySample(_others(known, which, num_past), known[:, which]) for which in range(num)
        ]
    return _evaluate(f"{num_past} past sample{'s' * (num_past > 1)}", samples)


def lengths_by_prompt(tables: Iterable[ScoreFile]) -> dict[str, list[int]]:
    """Return the lengths of every prompt's samples.

    Raises:
        ValueError: a file lacks a column, or two files have the same prompt.
    """
    found: dict[str, list[int]] = {}
    for table in tables:
        table.must_have(PROMPT, TOKENS)
        own: dict[str, list[int]] = {}
        for index, row in enumerate(table.rows):
            tokens = table.number(index, TOKENS)
            if tokens is not None:
                own.setdefault(row[PROMPT], []).append(int(tokens))
        for prompt in own:
            if prompt in found:
                raise ValueError(f"{table.path}: another file has lengths of prompt {prompt!r} too")
        found |= own
    return found


def spearman(scores: Numbers | Lengths, lengths: Numbers | Lengths) -> float:
    """Return the correlation of ranks, of ties their mean rank; 0 where either is all the same."""
    first, second = _mean_ranks(scores), _mean_ranks(lengths)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: Numbers | Lengths) -> Numbers:
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, side="left")
    return (below + np.searchsorted(ordered, values, side="right")) / 2


def _others(known: Lengths, which: int, num_past: int) -> Numbers:
    """Return the mean of the samples that follow sample `which`, starting over at the last."""
    num = known.shape[1]
    means: Numbers = known[:, [(which + 1 + past) % num for past in range(num_past)]].mean(axis=1)
    return means


def _samples(known: list[tuple[float, list[int]]]) -> list[FamilySample]:
    """Return as many samples of a family as every prompt of it has."""
    scores = np.array([score for score, _ in known])
    num = min(len(lengths) for _, lengths in known)
    return [
        FamilySample(scores, np.array([lengths[which] for _, lengths in known]))
        for which in range(num)
    ]


def _evaluate(ranker: str, families: dict[str, list[FamilySample]]) -> Evaluation:
    if not families:
        raise ValueError(f"ranker {ranker!r}: no prompt has both a score and a length")
    return Evaluation(
        ranker=ranker,
        recall={
            family: {
                str(share): float(np.mean([recall_at(*sample, share) for sample in samples]))
                for share in SHARES
            }
            for family, samples in families.items()
        },
        spearman={
            family: float(np.mean([spearman(*sample) for sample in samples]))
            for family, samples in families.items()
        },
        num_prompts={family: len(samples[0].lengths) for family, samples in families.items()},
    )

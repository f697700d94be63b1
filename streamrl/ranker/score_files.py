"""CSV files of scores and of lengths, by prompt, task family and model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.workload.csv_rows import read_csv

FAMILY = (
    "family",
    "source",
    "dataset",
)  # columns that may name a row's task family, first one found
PROMPT, TOKENS, SCORE, MODEL = "prompt_id", "output_tokens", "score", "model"
MOST_TOKENS = 1e15
"""Of an output: as in tables that lengths are drawn from."""


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

    def tokens(self, index: int) -> int | None:
        """Return the length of a row's output, or None where the field is empty."""
        value = self.number(index, TOKENS)
        if value is not None and not 0 <= value <= MOST_TOKENS:
            text = f"{value:g} is no number from 0 to {MOST_TOKENS:.0e}"
            raise ValueError(f"{self.path}: row {index + 1}, {TOKENS}: {text}")
        return None if value is None else int(value)

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
            tokens = table.tokens(index)
            if tokens is not None:
                own.setdefault(row[PROMPT], []).append(tokens)
        for prompt in own:
            if prompt in found:
                raise ValueError(f"{table.path}: another file has lengths of prompt {prompt!r} too")
        found |= own
    return found


def scores_by_prompt(scores: ScoreFile, chosen: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the scores of every prompt, by column."""
    scores.must_have(PROMPT)
    found: dict[str, dict[str, float]] = {}
    for column in score_columns(scores, chosen, has_lengths_apart=True):
        own = found.setdefault(column, {})
        for index, row in enumerate(scores.rows):
            value = scores.number(index, column)
            if value is not None:
                own[row[PROMPT]] = value
    return found

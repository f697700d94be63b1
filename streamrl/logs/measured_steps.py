"""Steps that somebody measured, one row each: seconds by stage, and how much work they were."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import fmean

import msgspec

SECONDS = {
    "step_time": "from the end of one step to the end of the next",
    "generation": "from the first prompt of the step's batch to its last rollout, where nothing trains meanwhile",
    "rollout_time": "mean over rollouts, each from leaving the queue of its engine to its end",
    "busy": "in which a replica generates anything, the mean over replicas",
    "wait": "in which the trainer waits for rollouts",
    "score": "of all forward passes before training: old log-probabilities, reference, values",
    "reference": "those of `score` that are the reference's",
    "train": "of forward and backward passes with the optimizer step",
    "sync": "until replicas have the new weights",
    "other": "of the step beside its stages: data, rewards, logging",
}
"""Columns that are seconds of a step, and which."""
WORK = {
    "rollouts": "rollouts trained on",
    "output_tokens": "mean output tokens of a rollout",
    "longest_output": "output tokens of the longest",
    "prompt_tokens": "mean prompt tokens of a rollout",
    "total_tokens": "prompt and output tokens of all rollouts",
    "gpus": "GPUs of the whole run",
    "tokens_per_gpu_second": "prompt and output tokens that the step took a second and GPU",
}
"""Columns that say how much work a step was."""
COLUMNS = ("step", *SECONDS, *WORK)


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step; what nobody measured is None, never 0."""

    step: int
    step_time: float | None = None
    generation: float | None = None
    rollout_time: float | None = None
    busy: float | None = None
    wait: float | None = None
    score: float | None = None
    reference: float | None = None
    train: float | None = None
    sync: float | None = None
    other: float | None = None
    rollouts: float | None = None
    output_tokens: float | None = None
    longest_output: float | None = None
    prompt_tokens: float | None = None
    total_tokens: float | None = None
    gpus: float | None = None
    tokens_per_gpu_second: float | None = None

    @property
    def has_seconds(self) -> bool:
        """Whether it says how long anything took."""
        return any(getattr(self, name) is not None for name in SECONDS)


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one run, in order."""

    source: str
    """The file, and whose log it is."""
    framework: str
    steps: tuple[MeasuredStep, ...]
    is_asynchronous: bool | None = None
    """Whether generation went on beside training; None where the file does not tell."""
    notes: tuple[str, ...] = ()
    """What was read as what, where that could be read otherwise."""

    def values(self, column: str) -> list[float]:
        """Return a column's numbers; those of steps that lack it are left out."""
        found = [getattr(step, column) for step in self.steps]
        return [value for value in found if value is not None]

    def mean(self, column: str) -> float | None:
        """Return the mean of a column; None where no step has it."""
        values = self.values(column)
        return fmean(values) if values else None

    def has(self, column: str) -> bool:
        """Return whether any step has a column."""
        return bool(self.values(column))


def parse_steps(name: str, rows: Iterable[Mapping[str, str | None]]) -> list[MeasuredStep]:
    """Read rows whose columns are named as `COLUMNS` are; an empty cell is not known.

    Raises:
        ValueError: a column is none of them, none is of seconds, or a cell is no number.
    """
    rows = list(rows)
    header = list(rows[0]) if rows else []
    for column in header:
        if column not in COLUMNS:
            raise ValueError(
                f"{name}: no column {column!r} is known; there is {', '.join(COLUMNS)}"
            )
    if not set(header) & set(SECONDS):
        raise ValueError(f"{name}: has no column of seconds; there is {', '.join(SECONDS)}")
    steps = [_parse(name, number, row) for number, row in enumerate(rows, start=1)]
    _refuse_twice(name, steps)
    return steps


def _refuse_twice(name: str, steps: Iterable[MeasuredStep]) -> None:
    """Raise `ValueError` where two rows are of one step, which would weigh twice."""
    rows: dict[int, int] = {}
    for row, step in enumerate(steps, start=1):
        if step.step in rows:
            text = f"step {step.step} is told twice: in row {rows[step.step]}, then in row {row}"
            raise ValueError(f"{name}: {text}")
        rows[step.step] = row


def write_steps(steps: Iterable[MeasuredStep], source: str) -> str:
    """Return steps as CSV, with the columns that any of them has."""
    steps = list(steps)
    columns = [name for name in COLUMNS if any(getattr(each, name) is not None for each in steps)]
    text = io.StringIO()
    text.write(f"# Measured steps of {' '.join(source.split())}; seconds and tokens.\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for step in steps:
        writer.writerow([_shown(getattr(step, name)) for name in columns])
    return text.getvalue()


def _parse(name: str, number: int, row: Mapping[str, str | None]) -> MeasuredStep:
    found: dict[str, float] = {}
    for column, cell in row.items():
        if cell is None or not cell.strip():
            continue
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not (isfinite(value) and value >= 0):
            raise ValueError(
                f"{name}: row {number}: {column} must be a number from 0, got {cell!r}"
            )
        found[column] = value
    step = int(found.pop("step", number))
    return MeasuredStep(step=step, **found)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"

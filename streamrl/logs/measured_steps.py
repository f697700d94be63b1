"""Measured steps, one row each: seconds by stage and work, from a CSV file or from a trace."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import isfinite
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from streamrl.engine.messages import (
    HELD_OUT,
    UNFINISHED,
    CheckpointSaved,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    PushWeights,
    RunStarted,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerLost,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.steady_state import read_steps
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.runfile.escaping import visible
from streamrl.workload.data_files import TIME_UNITS, columns_in_seconds, parse_number

SECONDS = {
    "step_time": "from the end of one step to the end of the next",
    "generation": "from the first prompt of the step's batch to its last rollout, if no training runs at the same time",
    "rollout_time": "from leaving the engine's queue to the end of a rollout, as a mean over rollouts",
    "busy": "in which a replica generates, as a mean over replicas",
    "wait": "in which the trainer waits for rollouts",
    "score": "of all forward passes before training: old log-probabilities, reference, values",
    "reference": "of the reference model's forward passes, which are a part of `score`",
    "train": "of forward and backward passes with the optimizer step",
    "sync": "until replicas have the new weights",
    "other": "of the step outside its stages: data, rewards, logging",
}
"""Columns of seconds of a step, with their meaning."""
WORK = {
    "rollouts": "rollouts trained on",
    "output_tokens": "mean output tokens of a rollout",
    "longest_output": "output tokens of the longest rollout",
    "prompt_tokens": "mean prompt tokens of a rollout",
    "total_tokens": "prompt and output tokens of all rollouts",
    "tokens_per_rollout": "mean prompt and output tokens of a rollout",
    "tokens_per_second": "prompt and output tokens of the step, per second of it",
    "outputs_per_gpu_second": "output tokens, per second of `generation` and GPU that generates",
    "gpus": "GPUs of the whole run",
    "tokens_per_gpu_second": "prompt and output tokens of the step, per second and GPU",
    "informative_share": "share of the rollouts with a non-zero advantage; the trainer may skip the others",
}
"""Columns of the work of a step, with their meaning."""
COLUMNS = ("step", *SECONDS, *WORK)


class StepLengths(NamedTuple):
    """The workload of a step: all that a simulation of it may read."""

    step: int
    output_tokens: float | None
    """Mean output tokens of a rollout."""
    longest_output: float | None


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step; an unmeasured value is None, never 0."""

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
    tokens_per_rollout: float | None = None
    tokens_per_second: float | None = None
    outputs_per_gpu_second: float | None = None
    gpus: float | None = None
    tokens_per_gpu_second: float | None = None
    informative_share: float | None = None

    @property
    def has_seconds(self) -> bool:
        """Return whether any time was measured."""
        return any(getattr(self, name) is not None for name in SECONDS)

    @property
    def lengths(self) -> StepLengths:
        """Return the workload of the step, without anything that was measured in seconds."""
        return StepLengths(self.step, self.output_tokens, self.longest_output)


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one run, in order."""

    source: str
    """The file and its framework."""
    framework: str
    steps: tuple[MeasuredStep, ...]
    is_asynchronous: bool | None = None
    """Whether generation overlapped with training; None if the file does not show it."""
    notes: tuple[str, ...] = ()
    """Interpretations of ambiguous keys."""

    def values(self, column: str) -> list[float]:
        """Return a column's numbers, without steps that lack it."""
        found = [getattr(step, column) for step in self.steps]
        return [value for value in found if value is not None]

    def mean(self, column: str) -> float | None:
        """Return the mean of a column; None if no step has it."""
        values = self.values(column)
        return fmean(values) if values else None

    def has(self, column: str) -> bool:
        """Return whether any step has a column."""
        return bool(self.values(column))


def parse_steps(name: str, rows: Iterable[Mapping[str, str | None]]) -> list[MeasuredStep]:
    """Return steps from rows with columns named as in `COLUMNS`; an empty cell is unknown.

    The name of a column of seconds may end with another unit, such as `step_time_min`.

    Raises:
        ValueError: a column is unknown or there twice, no column has seconds, or a cell is not a number.
    """
    rows = list(rows)
    columns = columns_in_seconds(name, rows[0] if rows else (), SECONDS)
    for written, (column, _) in columns.items():
        if column not in COLUMNS:
            raise ValueError(
                f"{name}: unknown column {written!r}; the columns are {', '.join(COLUMNS)}. Those of seconds may end "
                f"with a unit ({', '.join(TIME_UNITS)}), such as step_time_min"
            )
    if not {column for column, _ in columns.values()} & set(SECONDS):
        raise ValueError(f"{name} has no column of seconds; add one of {', '.join(SECONDS)}")
    steps = [_parse(name, number, row, columns) for number, row in enumerate(rows, start=1)]
    _refuse_twice(name, steps)
    return steps


def _refuse_twice(name: str, steps: Iterable[MeasuredStep]) -> None:
    """Raise `ValueError` if two rows are of the same step, which would weigh twice."""
    rows: dict[int, int] = {}
    for row, step in enumerate(steps, start=1):
        if step.step in rows:
            text = f"step {step.step} appears twice: in row {rows[step.step]}, then in row {row}"
            raise ValueError(f"{name}: {text}")
        rows[step.step] = row


def write_steps(steps: Iterable[MeasuredStep], source: str) -> str:
    """Return steps as CSV, with the columns that any of them has."""
    steps = list(steps)
    columns = [name for name in COLUMNS if any(getattr(each, name) is not None for each in steps)]
    text = io.StringIO()
    text.write(f"# Measured steps of {visible(' '.join(source.split()))}; seconds and tokens.\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for step in steps:
        writer.writerow([_shown(getattr(step, name)) for name in columns])
    return text.getvalue()


def _parse(
    name: str,
    number: int,
    row: Mapping[str, str | None],
    columns: Mapping[str, tuple[str, float]],
) -> MeasuredStep:
    found: dict[str, float] = {}
    for written, cell in row.items():
        column, unit = columns[written]
        if cell is None or not cell.strip():
            continue
        try:
            value = parse_number(cell)
        except ValueError:
            value = -1.0
        if not (isfinite(value) and value >= 0):
            raise ValueError(
                f"{name}: row {number}: {written} must be a number of at least 0, got {cell!r}"
            )
        found[column] = value * unit
    step = int(found.pop("step", number))
    return MeasuredStep(step=step, **found)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.7g}"


TRAINER_COMMANDS = (Score, Train, Step)


def read_run_steps(
    trace: Trace, overhead: float = 0.0, *, takes_turns: bool = False
) -> list[MeasuredStep]:
    """Return the times of each step of the primary trainer, in order.

    Steps that were rolled back are left out, and so is the first step after each loss of the trainer:
    its seconds contain the restart. Evaluations for which training waits belong to no step.

    Args:
        trace: the trace of a run.
        overhead: seconds of a simulated step outside all stages; its trace has them in the optimizer step.
        takes_turns: whether generation and training alternate, so that generation has its own seconds.
    """
    reader = _Reader(overhead, takes_turns)
    for entry in trace.entries:
        reader.read(entry)
    steps = _without_evaluations(_with_busy(reader.steps, read_timeline(trace)), trace)
    return [step for step in steps if step.step not in reader.restarted]


def _without_evaluations(steps: list[MeasuredStep], trace: Trace) -> list[MeasuredStep]:
    """Subtract the seconds of evaluations from those of steps."""
    held = read_steps(trace).held
    return [
        replace(step, step_time=(step.step_time or 0.0) - seconds)
        for step, seconds in zip(steps, held or [0.0] * len(steps), strict=True)
    ]


def _with_busy(steps: list[MeasuredStep], timeline: Timeline) -> list[MeasuredStep]:
    """Add the generation time of replicas to each step."""
    if not timeline.replicas:
        return steps
    ends = list(accumulate(step.step_time or 0.0 for step in steps))
    busy = [0.0] * len(steps)
    for spans in timeline.replicas.values():
        for span in spans:
            if span.activity == "generate":
                _split_over_steps(span, ends, busy)
    num = len(timeline.replicas)
    return [replace(step, busy=each / num) for step, each in zip(steps, busy, strict=True)]


def _split_over_steps(span: Span, ends: list[float], busy: list[float]) -> None:
    """Split the seconds of a span over the steps that it overlaps."""
    start = span.start
    for place in range(bisect_right(ends, start), len(ends)):
        busy[place] += min(span.end, ends[place]) - start
        start = ends[place]
        if span.end <= start:
            return


class _Reader:
    """The steps that were not rolled back, and the seconds and the work of the current one."""

    def __init__(self, overhead: float, takes_turns: bool) -> None:
        self.steps: list[MeasuredStep] = []
        self.restarted: set[int] = set()
        """Steps in which the trainer was restarted. Each lasts from the end of the last step that was kept."""
        self._saved = 0
        """Version of the last checkpoint."""
        self._overhead = overhead
        self._takes_turns = takes_turns
        self._issued: deque[float] = deque()
        self._free_at = 0.0
        """End of the trainer's last command."""
        self._ended_at = 0.0
        """End of the step before."""
        self._ran: dict[int, float] = {}
        """Seconds of each rollout in aborted attempts."""
        self._loaded_at = 0.0
        self._pushed_at = 0.0
        self._prompts: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget what is known of a step only."""
        self._first_sent: float | None = None
        """Time at which the first rollout of the step was sent."""
        self._last_done: float | None = None
        self._seconds: dict[str, float] = {"score": 0.0, "train": 0.0, "sync": 0.0}
        self._load_time = 0.0
        self._latencies: list[float] = []
        self._trained: list[int] = []
        self._has: set[str] = set()

    def read(self, entry: Entry) -> None:
        self._take_event(entry)
        for command in entry.commands:
            match command:
                case Score() | Train() | Step() if command.trainer == LEADER:
                    self._issued.append(entry.time)
                    if isinstance(command, Train):
                        self._trained += command.rollouts
                case Generate() if command.rollout < HELD_OUT:
                    if self._first_sent is None:
                        self._first_sent = entry.time
                case PushWeights():
                    self._pushed_at = entry.time
                case _:
                    pass

    def _take_event(self, entry: Entry) -> None:
        event, now = entry.event, entry.time
        match event:
            case PromptsDrawn():
                for group in event.groups:
                    self._prompts.update(dict.fromkeys(group.rollouts, group.prompt_tokens))
            case Generated() if event.rollout < HELD_OUT:
                self._take_rollout(event, now)
            case Scored() if event.trainer == LEADER:
                self._end_work("score", now)
            case Trained() if event.trainer == LEADER:
                self._end_work("train", now)
            case Stepped() if event.trainer == LEADER:
                self._end_work("train", now)
                self._end_step(event.version, now)
            case WeightsPushed():
                self._has.add("sync")
                self._seconds["sync"] += now - self._pushed_at
            case WeightsLoaded():
                self._loaded_at = now
                self._load_time = max(self._load_time, event.load_time)
            case RunStarted(version):
                self._saved = version
            case CheckpointSaved(version, trainer) if trainer == LEADER:
                self._saved = version
            case TrainerLost(trainer) if trainer == LEADER:
                self._roll_back()
            case Failed(command) if (
                isinstance(command, TRAINER_COMMANDS) and command.trainer == LEADER
            ):
                if self._issued:
                    self._issued.popleft()
            case _:
                pass

    def _roll_back(self) -> None:
        """Return to the last checkpoint."""
        self._issued.clear()
        self.steps = [step for step in self.steps if step.step <= self._saved]
        self._ended_at = sum(step.step_time or 0.0 for step in self.steps)
        kept = {number for number in self.restarted if number <= self._saved}
        self.restarted = kept | {self._saved + 1}

    def _take_rollout(self, event: Generated, now: float) -> None:
        ran = self._ran.pop(event.rollout, 0.0) + event.run_time
        if event.finish in UNFINISHED:
            self._ran[event.rollout] = ran
            return
        self._latencies.append(ran)
        self._lengths[event.rollout] = event.tokens
        self._last_done = now

    def _end_work(self, stage: str, now: float) -> None:
        if self._issued:
            self._has.add(stage)
            self._seconds[stage] += now - max(self._issued.popleft(), self._free_at)
            self._free_at = now

    def _generation(self) -> float | None:
        """Return the seconds from the first rollout, after weights are loaded, to the last."""
        if not self._takes_turns or self._first_sent is None or self._last_done is None:
            return None
        began = max(self._first_sent, self._loaded_at)
        return self._last_done - began if began < self._last_done else None

    def _end_step(self, version: int, now: float) -> None:
        outputs = [self._lengths[r] for r in self._trained if r in self._lengths]
        prompts = [self._prompts[r] for r in self._trained if r in self._prompts]
        has = self._has
        self._seconds["train"] -= self._overhead
        seconds = {name: value for name, value in self._seconds.items() if name in has}
        if "sync" in seconds:
            seconds["sync"] += self._load_time
        self.steps.append(
            MeasuredStep(
                step=version,
                step_time=now - self._ended_at,
                generation=self._generation(),
                rollout_time=fmean(self._latencies) if self._latencies else None,
                **seconds,
                rollouts=len(outputs) or None,
                output_tokens=fmean(outputs) if outputs else None,
                longest_output=max(outputs) if outputs else None,
                prompt_tokens=fmean(prompts) if prompts else None,
                total_tokens=sum(outputs) + sum(prompts) if outputs else None,
            )
        )
        for rollout in self._trained:
            self._lengths.pop(rollout, None)
            self._prompts.pop(rollout, None)
        self._ended_at = self._free_at = now
        self._begin_step()

"""Which measured seconds tell of which stages, and what a factor is by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from statistics import median
from typing import NamedTuple

from streamrl.engine.presets import choose_system
from streamrl.hardware.calibration_file import StageName
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.report.words import listing
from streamrl.runfile.config import Run
from streamrl.sim.calibration.disagreement import takes_turns

BOUND_BY_GENERATION = 0.05
"""Share of a step that a trainer must wait for rollouts for its steps to tell how fast these are."""
OUTSIDE = 0.05
"""Chance that a factor is not in its interval."""

OF_GENERATION = ("generation", "busy", "rollout_time")
"""Columns that tell how fast generation is, the best first: how long rollouts run does not say how many run at once."""

Reader = Callable[[MeasuredStep], float | None]


class Target(NamedTuple):
    """Seconds that both worlds have, and the stages whose factor brings them together."""

    stages: tuple[StageName, ...]
    read: Reader
    fixed: Reader
    """What is no part of those stages: seconds of it count on neither side."""
    has_overhead: bool = False
    """Whether they hold the seconds of a step that are of no stage too, which count on neither side."""


def find_targets(run: Run, measured: MeasuredSteps, notes: list[str]) -> list[Target]:
    """Return what factors can be fitted to; what cannot be known is told in `notes`."""
    columns = _own_columns(run, measured)
    found = [Target((stage,), _column(name), no_seconds) for stage, name in columns.items()]
    passes: tuple[StageName, ...] = ("score",) if run.algorithm.needs_score else ()
    wanted: tuple[StageName, ...] = ("generation", *passes, "train")
    missing = tuple(stage for stage in wanted if stage not in columns)
    if not missing:
        return found
    if not measured.has("step_time"):
        notes.append(
            f"{listing(list(missing))}: not known, as neither these seconds nor whole steps were measured"
        )
        return found
    return found + _of_whole_steps(run, measured, missing, columns, notes)


def _own_columns(run: Run, measured: MeasuredSteps) -> dict[StageName, str]:
    """Return by stage the column of its own seconds, where they were measured."""
    columns: dict[StageName, str] = {"sync": "sync", "score": "score", "train": "train"}
    known = (name for name in OF_GENERATION if measured.has(name))
    columns["generation"] = next(known, OF_GENERATION[-1])
    if not run.algorithm.needs_score:
        del columns["score"]
    return {stage: column for stage, column in columns.items() if measured.has(column)}


def _of_whole_steps(
    run: Run,
    measured: MeasuredSteps,
    missing: tuple[StageName, ...],
    columns: dict[StageName, str],
    notes: list[str],
) -> list[Target]:
    """Return what whole steps tell of the stages that were not measured by themselves."""
    what = listing(list(missing))
    is_all = set(missing) >= {"generation", "train"}
    if is_all or missing == ("generation",):
        if not is_all and not takes_turns(run) and not _waits(measured):
            notes.append(
                f"generation: not known, as the trainer waits for it under {BOUND_BY_GENERATION:.0%} of a step"
            )
            return []
    elif overlaps(run) or columns.get("generation", "generation") != "generation":
        notes.append(f"{what}: not known, as it is not told apart from generation")
        return []
    one = "one factor for all, " if len(missing) > 1 else ""
    if overlaps(run):
        notes.append(
            f"{what}: {one}by whole steps, which wait for it; waiting itself is not decoding"
        )
        return [Target(missing, step_seconds, no_seconds)]
    notes.append(f"{what}: {one}by what steps have beside the stages that were measured")
    return [Target(missing, step_seconds, _sum_of(*columns.values()), has_overhead=True)]


def overlaps(run: Run) -> bool:
    """Return whether training goes on while anything is generated."""
    return not takes_turns(run) or choose_system(run.policies).streaming == "stream"


def _waits(measured: MeasuredSteps) -> bool:
    wait, step = measured.mean("wait"), measured.mean("step_time")
    return bool(wait and step and wait / step >= BOUND_BY_GENERATION)


def _column(name: str) -> Reader:
    def read(step: MeasuredStep) -> float | None:
        value: float | None = getattr(step, name)
        return value

    return read


def _sum_of(*names: str) -> Reader:
    def read(step: MeasuredStep) -> float | None:
        return sum(getattr(step, name) or 0.0 for name in names)

    return read


def no_seconds(step: MeasuredStep) -> float | None:
    """Return none of a step's seconds."""
    return 0.0


def step_seconds(step: MeasuredStep) -> float | None:
    """Return the seconds of a whole step."""
    return step.step_time


class StepPairs(NamedTuple):
    """Predicted and measured seconds of the same steps."""

    predicted: list[float]
    measured: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as long each step is predicted to take as it took."""
        return [p / m for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def ratio(self) -> float:
        """What a factor has to grow by: the median, as a step that stalls says nothing of a stage's speed."""
        return median(self.ratios)

    @property
    def error(self) -> float:
        """Median of the absolute relative errors."""
        return median(abs(ratio - 1) for ratio in self.ratios)

    def interval(self, factor: float) -> tuple[float, float] | None:
        """Return the 95 % interval of a factor by the scatter of its steps; None of too few."""
        found = interval_of_median(self.ratios)
        return None if found is None else (factor * found[0], factor * found[1])


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the values between which the median lies with 95 % or more, whatever their distribution; None of under six.

    Values k from either end have it between them unless k - 1 or fewer of them lie on one side of it (binomially).
    """
    num, rank, outside = len(values), 0, 0.0
    while rank < num // 2 and outside + 2 * comb(num, rank) / 2**num <= OUTSIDE:
        outside += 2 * comb(num, rank) / 2**num
        rank += 1
    if not rank:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def pair(
    read: Reader,
    predicted: Sequence[MeasuredStep],
    measured: Sequence[MeasuredStep],
    fixed: Reader = no_seconds,
    overheads: tuple[float, float] = (0.0, 0.0),
) -> StepPairs | None:
    """Return what both have of each step, less what is fixed and each side's overhead; None where no step has both."""
    both = [
        (_less(read, fixed, ours, overheads[0]), _less(read, fixed, theirs, overheads[1]))
        for ours, theirs in zip(predicted, measured, strict=True)
    ]
    known = [(p, m) for p, m in both if p is not None and m is not None and min(p, m) > 0]
    if not known:
        return None
    return StepPairs([p for p, _ in known], [m for _, m in known])


def _less(read: Reader, fixed: Reader, step: MeasuredStep, overhead: float) -> float | None:
    value = read(step)
    return None if value is None else value - (fixed(step) or 0.0) - overhead

"""Read the errors of predicted steps: profiles/errors/steps.toml, and combine the errors of stages.

Errors are logarithms of true over predicted seconds, on published steps whose source was left out. A
spread is the size that `coverage` of them stay below. `streamrl validate --output docs` computes the
file from docs/fidelity-residuals.csv.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from math import erf, log, sqrt
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile

PATH = PROFILES / "errors" / "steps.toml"
Stage = Literal["generation", "score", "train", "sync"]
"""generation: prefill and decode until the last rollout. score: passes for log-probs. train: forward, backward and
the optimizer step. sync: the wait for weights, with the switch of shared GPUs."""
STAGES: tuple[Stage, ...] = get_args(Stage)
Kind = Literal["dense", "mixture"]
Basis = Literal["measured", "tables", "datasheets"]
"""What most seconds of a step rest on. measured: this model on this machine. tables: operators that were measured.
datasheets: over a fifth of the seconds."""
Shares: TypeAlias = Mapping[Stage, float]


class StageErrors(ProfileTable, frozen=True, kw_only=True):
    """Errors of one stage."""

    rows: int
    sources: int
    own: float | None = None
    """Size that 80 % of the rows stay below; None without rows."""
    spread: dict[str, float]
    """The same, pulled towards that of all stages, by kind of model and for "all"."""


class StepErrors(ProfileTable, frozen=True, kw_only=True):
    """The file profiles/errors/steps.toml."""

    name: str
    source: str
    coverage: float
    """Share of errors that stay below a spread."""
    rows: int
    """Published steps with a prediction."""
    sources: int
    within_source: float
    """Correlation of the errors of one source."""
    priors: tuple[float, float]
    """Rows that a larger partition counts as, beside the rows of a smaller one: for stages, and for steps."""
    most_roofline: float
    """Largest share of rooflines in the seconds of a published stage to which nothing was fitted. Errors of stages include it."""
    sides: tuple[float, float]
    """Factors of all bands below and above their predictions. At most half of the share 1 - `coverage` of the published
    steps, and of the steps of left-out sources, is beyond either end."""
    stages: dict[Stage, StageErrors]
    correlation: dict[str, float]
    """By two stages, as in "generation train"."""
    factors: dict[str, float]
    """Error of steps relative to their stages' errors, by partition: "all", "dense", "dense, hopper" and so on."""

    def spread(self, stage: Stage, partition: Sequence[str]) -> float:
        """Return the spread of a stage, in a partition or the nearest larger one that is known."""
        return _nearest(self.stages[stage].spread, partition)

    def combined(self, shares: Shares, spreads: Shares) -> float:
        """Return the spread of a sum of stages, with the measured correlation of their errors.

        Args:
            shares: seconds of each stage relative to the sum; negative where seconds are subtracted.
            spreads: spread of each stage.
        """
        variance = sum(
            shares[one] * spreads[one] * shares[two] * spreads[two] * self.correlated(one, two)
            for one in shares
            for two in shares
        )
        return sqrt(max(0.0, variance))

    def correlated(self, one: Stage, two: Stage) -> float:
        """Return the correlation of the errors of two stages; 0 if no source has both."""
        if one == two:
            return 1.0
        return self.correlation.get(" ".join(sorted((one, two), key=STAGES.index)), 0.0)

    def factor(self, partition: Sequence[str]) -> float:
        """Return the factor of a partition, or that of the nearest larger one that is known."""
        return _nearest(self.factors, partition)

    def factors_of_sides(self, partition: Sequence[str]) -> tuple[float, float]:
        """Return the factors of a band below and above its prediction; both 1 for seconds that were measured."""
        if tuple(partition) == MEASURED_PATH:
            return 1.0, 1.0
        below, above = self.sides
        return below * self.factor(partition), above * self.factor(partition)

    def critical(self, replicas: Shares, trainer: Shares, spreads: Shares) -> dict[Stage, float]:
        """Return by how much of a step each stage moves it.

        If both sides work at the same time, the longer one sets the step. Either may be the longer one,
        by the errors of both (Clark 1961, The greatest of a finite set of random variables).

        Args:
            replicas: seconds of stages of the replicas, relative to the step.
            trainer: seconds of stages of the trainer, relative to the step.
            spreads: spread of each stage.
        """
        first, second = sum(replicas.values()), sum(trainer.values())
        together = min(first, second, max(0.0, first + second - 1))
        parts = (first, second)
        if together > 0:
            gap: dict[Stage, float] = {stage: share / first for stage, share in replicas.items()}
            for stage, share in trainer.items():
                gap[stage] = gap.get(stage, 0.0) - share / second
            sigma = self.combined(gap, spreads) / SPREAD_OF_NORMAL
            chance = _normal(log(first / second) / sigma) if sigma > 0 else float(first >= second)
            parts = (first - together * (1 - chance), second - together * chance)
        found: dict[Stage, float] = {}
        for side, total, part in ((replicas, first, parts[0]), (trainer, second, parts[1])):
            for stage, share in side.items():
                found[stage] = found.get(stage, 0.0) + share * part / (total or 1.0)
        whole = max(1.0, sum(found.values()))
        return {stage: share / whole for stage, share in found.items()}


ALL = "all"
"""The partition of all steps."""
MEASURED_PATH: tuple[Basis] = ("measured",)
"""The partition of seconds that were measured on the machine itself: they have the error of executed runs, as it is."""
SPREAD_OF_NORMAL = 1.2816
"""Share 0.8 of a normal distribution is within this many standard deviations."""


def _nearest(table: Mapping[str, float], partition: Sequence[str]) -> float:
    for end in range(len(partition), 0, -1):
        if (found := table.get(", ".join(partition[:end]))) is not None:
            return found
    return table[ALL]


def _normal(deviations: float) -> float:
    """Return the share of a normal distribution below a number of standard deviations."""
    return (1 + erf(deviations / sqrt(2))) / 2


CHECKED_PATH = PROFILES / "errors" / "checked.csv"
PAPER = "StreamRL's Figure 8"
"""The one group of steps in `CHECKED_PATH` that is of a figure; all others are of published runs."""


class Checked(NamedTuple):
    """Published steps that were compared with their bands."""

    group: str
    """"published" for runs, whose source was left out of the band. Otherwise a figure."""
    system: str
    """The system of `[policies]`."""
    steps: int
    within: int
    """Steps within their band."""


@functools.cache
def checked_steps(path: Path = CHECKED_PATH) -> tuple[Checked, ...]:
    """Read how many published steps of each system are within their bands."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            Checked(line["group"], line["system"], int(line["steps"]), int(line["within"]))
            for line in csv.DictReader(line for line in file if not line.startswith("#"))
        )


def checked_text(system: str, has_environments: bool) -> str:
    """Return how many published steps of a system are within their bands, for the end of a sentence.

    Args:
        system: the system of `[policies]`; "" for all systems together.
        has_environments: whether the run has environments; no published step has.
    """
    if has_environments:
        return "no published step with environments was compared"
    found = [each for each in checked_steps() if system in ("", each.system)]
    runs = [each for each in found if each.group != PAPER]
    figure = [each for each in found if each.group == PAPER and system]
    steps, within = sum(each.steps for each in runs), sum(each.within for each in runs)
    of = f"{system} steps" if system else "steps"
    told = f"{within} of {steps} published {of} are within it"
    if not steps:
        told = f"no published run of {system} was compared"
    return told + "".join(f"; in {PAPER}, {each.within} of {each.steps} are" for each in figure)


@functools.cache
def step_errors(path: Path = PATH) -> StepErrors:
    """Read the errors of steps; `ValueError` names the file and the key of an error."""
    return read_profile(path, StepErrors)

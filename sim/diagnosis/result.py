"""What a diagnosis says: only definitions, so that a report loads no simulator."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.record.assumed import Assumed
from streamrl.record.band import Band

Verdict = Literal["normal", "slow", "fast", "unknown"]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a step."""

    name: str
    predicted: float
    """Seconds for this run file on this hardware."""
    band: Band
    """Range in which a normal run is."""
    measured: float | None
    verdict: Verdict
    waste: float | None
    """Seconds above the upper end of the band."""
    is_of_other_work: bool
    """Whether it is so fast that its seconds cannot be of this run file."""

    @property
    def seconds(self) -> float:
        """Seconds of the stage: measured if known, else predicted."""
        return self.predicted if self.measured is None else self.measured


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change and what it is worth."""

    what: str
    settings: dict[str, object]
    """New values of the run file."""
    seconds: float
    """Seconds by which a step becomes shorter, with slow stages at the end of their normal range."""
    share: float
    """The same as a share of the step."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a run is normal, and what would help most."""

    source: str
    step: Stage
    stages: list[Stage]
    binds: str
    """The longest stage. A stage that was not measured counts with its prediction."""
    is_normal: bool
    has_stages: bool
    """Whether any stage was measured; if not, only the whole step is judged."""
    causes: list[str]
    """What to look at first where seconds are lost for a reason that the simulation does not show."""
    advice: list[Advice]
    """The three changes worth most by simulation."""
    doubtful: list[str]
    """Settings of the run file to check."""
    not_the_problem: list[str]
    assumed: list[Assumed] = []
    """Kernels and networks of the hardware that are neither measured nor stated in the run file."""
    notes: list[str]

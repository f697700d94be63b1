"""The result of an acceptance test: each measurement beside its expectation, and the plan before and after."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from streamrl.record.band import Band

Decision: TypeAlias = Literal["keep", "return"]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement beside the figure that the plan rests on."""

    name: str
    unit: Literal["s", "B/s"]
    expected: float
    measured: float
    """On the slowest GPU."""
    slowdown: float
    """Measured over expected time; above 1 the node is slower than planned."""
    changes: str
    """What it changes in the plan; empty if it changes nothing."""
    note: str = ""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan takes and costs. Bands include the model error."""

    step_time: float
    step_band: Band
    seconds: float
    """The whole run."""
    seconds_band: Band
    dollars: float
    dollars_band: Band
    decode_time: float | None = None
    """Seconds of the decode step that was measured; None if none was."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to keep a node."""

    plan: str
    """The run file of the plan."""
    gpu: str
    device: str
    """Name that the device reports."""
    num_gpus: int
    comparisons: list[Comparison]
    before: Outlook
    """With the profiles that made the plan."""
    after: Outlook
    """With the measured figures."""
    kept: list[str]
    """Figures that were not measured; the plan keeps them."""
    limit: float
    """Largest accepted increase of the plan's step, as a share."""
    decision: Decision
    reasons: list[str]
    profiles: str | None = None
    """The folder of scaled profiles, if it was kept."""
    minutes: float
    """Time that the test took."""

    @property
    def slowdown(self) -> float:
        """The plan's step with the measured figures, relative to the planned one."""
        return self.after.step_time / self.before.step_time

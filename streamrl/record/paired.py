"""How well two runs are told apart that took the same prompts, with the same lengths.

Step by step both have the same work, so that what makes a step long for both cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from streamrl.hardware.tables import Floats
from streamrl.record.batch_means import half_width
from streamrl.record.leader_steps import LeaderSteps
from streamrl.record.speed import Speed
from streamrl.record.steady_run import find_steady_so_far
from streamrl.runfile.config import Run


def ratio_half_width(one: Speed, other: Speed) -> float | None:
    """Return half the 95 % interval of the logarithm of two step times' ratio; None where too few steps count in both."""
    first = max(one.counted_steps[0], other.counted_steps[0])
    last = min(one.counted_steps[1], other.counted_steps[1])
    if last <= first:
        return None
    return half_width(
        relative(one.step_times[first - 1 : last]) - relative(other.step_times[first - 1 : last])
    )


def relative(values: Sequence[float] | Floats) -> Floats:
    """Return each value as a multiple of the mean of all."""
    found = np.asarray(values, dtype=float)
    multiples: Floats = found / found.mean()
    return multiples


def is_beyond_chance(one: Speed, other: Speed, ratio: float) -> bool | None:
    """Return whether two runs' figures differ by more than the interval of their ratio; None where that is not known."""
    width = ratio_half_width(one, other)
    return None if width is None else abs(log(ratio)) > width


@dataclass(frozen=True, kw_only=True)
class PairedSteps:
    """What counts of the steps of two runs that are simulated side by side."""

    first: int
    """First step that counts in both."""
    last: int
    half_width: float | None
    """Half the 95 % interval of the logarithm of their step times' ratio; None where too few steps count."""
    has_settled: bool
    """Whether the end of both transients was found."""

    def is_within(self, share: float) -> bool:
        """Whether the ratio is known within a share of itself, and both transients are over."""
        is_known = self.half_width is not None and self.half_width <= share
        return is_known and self.has_settled


def find_paired_steps(
    runs: Sequence[Run], made: Sequence[LeaderSteps], left_out: int, *, drifts: bool
) -> PairedSteps:
    """Find the steps that count in both of two runs, where either alone has settled; see `find_steady`."""
    found = [
        find_steady_so_far(run, steps, left_out, drifts=drifts)
        for run, steps in zip(runs, made, strict=True)
    ]
    first, last = max(each.first for each in found), min(each.last for each in found)
    width = None
    if last > first:
        one, other = (relative(steps.durations()[first:last]) for steps in made)
        width = half_width(one - other)
    return PairedSteps(
        first=min(first, last - 1) + 1,
        last=last,
        half_width=width,
        has_settled=all(each.has_settled for each in found),
    )

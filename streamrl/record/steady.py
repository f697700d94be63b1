"""The steady state of a run: which of its steps count, their mean time, and how well that is known.

    steps   1 … first      transient: replicas come up, nothing is generated ahead yet
            … last         the steady state: every figure of a run is taken over it
            … the end      what was under way when the record was cut, or winds down

The transient ends where the marginal standard error of what is left is least (MSER-5: White 1997, Franklin and White
2008), in the steps' seconds and in the rollouts generated meanwhile: whichever settles later. At least half of all
steps are kept; where the least lies there, the transient may go on. How well the mean is known, batch means say.

Where lengths drift there is no steady state: every step after the first counts, and the interval is that of the
scatter about the drift, which is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.hardware.tables import Floats
from streamrl.record.batch_means import LEAST_BATCHES, half_width

MSER_SIZE = 5
"""Values to a mean: what White found to settle the truncation best."""
NEGLIGIBLE = 1e-6
"""Standard error, as a share, below which steps are alike: what rounding leaves of equal ones is less."""
LEAST_STEPS = 20
"""Steps below which the end of a transient is not looked for: half of them must make up `LEAST_BATCHES` batches, and
of fewer than four means of five the least error is luck. `START` steps are left out then, at most half of them."""
START = 3
"""Steps at the start of a short run that are left out: where generation is ahead the first one fills replicas, and those
that follow are shorter than they will be; with them six steps are 13 to 17 % faster than the steady state, without 1 %."""


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What counts of a run's steps, and their mean time."""

    first: int
    """Steps at the start that are left out."""
    last: int
    """Steps from the start to the last one that counts."""
    step_time: float
    """Mean seconds of a step."""
    half_width: float | None
    """Half of its 95 % interval in seconds; None where too few steps count."""
    has_settled: bool = True
    """Whether the end of the transient was found."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean step time; None where too few steps count."""
        if self.half_width is None:
            return None
        return max(0.0, self.step_time - self.half_width), self.step_time + self.half_width

    def is_within(self, share: float) -> bool:
        """Whether the mean is known within a share of itself, and the transient is over."""
        is_known = self.half_width is not None and self.half_width <= share * self.step_time
        return is_known and self.has_settled


def find_steady(
    durations: Sequence[float] | Floats,
    generated: Sequence[float] = (),
    *,
    cycle: int = 1,
    left_out: int = 0,
    drifts: bool = False,
) -> Steady:
    """Find the steps that count.

    Args:
        durations: seconds of each step, at least one.
        generated: rollouts generated in each step's time.
        cycle: steps after which their make-up repeats; only whole cycles are compared.
        left_out: steps at the end that do not count where there are more of them.
        drifts: whether lengths drift over the whole run.
    """
    last = len(durations) - left_out if len(durations) > left_out + 1 else len(durations)
    first, has_settled = 0, True
    if drifts or last < max(LEAST_STEPS, 2 * MSER_SIZE * cycle):
        first = min(1 if drifts else START, last // 2)
    else:
        for values in (durations, generated):
            end, is_over = end_of_transient(_cycle_means(values[:last], cycle))
            first, has_settled = max(first, end * cycle), has_settled and is_over
    found = count_steps(durations, first, last, cycle=cycle, drifts=drifts)
    return replace(found, has_settled=has_settled)


def count_steps(
    durations: Sequence[float] | Floats,
    first: int,
    last: int,
    *,
    cycle: int = 1,
    drifts: bool = False,
) -> Steady:
    """Take the steps after `first` up to `last` for the steady state; see `find_steady` for the rest."""
    counted = np.asarray(durations[first:last], dtype=float)
    values = _without_trend(counted) if drifts else counted
    return Steady(
        first=first,
        last=last,
        step_time=float(counted.mean()),
        half_width=half_width(_cycle_means(values, cycle)),
    )


def end_of_transient(values: Sequence[float] | Floats) -> tuple[int, bool]:
    """Return how many values at the start belong to a transient, and whether it is over within their first half."""
    num = len(values) // MSER_SIZE
    if num < 2:
        return 0, True
    means = np.asarray(values[: num * MSER_SIZE], dtype=float).reshape(num, MSER_SIZE).mean(axis=1)
    left = np.arange(num, 0, -1)
    rest = means - means.mean()  # sums of squares keep their digits
    sums, squares = rest[::-1].cumsum()[::-1], (rest**2)[::-1].cumsum()[::-1]
    half = num // 2
    errors = (np.maximum(0.0, squares - sums**2 / left) / left**2)[: half + 1]
    place = int((errors <= errors.min() + (NEGLIGIBLE * values[-1]) ** 2).argmax())
    return place * MSER_SIZE, place < half


def _cycle_means(values: Sequence[float] | Floats, cycle: int) -> Floats:
    """Return the mean of each whole cycle."""
    num = len(values) // cycle
    means: Floats = np.asarray(values[: num * cycle], dtype=float).reshape(num, cycle).mean(axis=1)
    return means


def _without_trend(values: Floats) -> Floats:
    """Return values less the line through them."""
    if len(values) < LEAST_BATCHES:
        return values
    places = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(places @ values) / float(places @ places)
    rest: Floats = values - slope * places
    return rest

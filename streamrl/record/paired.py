"""How well the ratio of two runs' step times is known where both took the same prompts, with the same lengths."""

from __future__ import annotations

from math import log

import numpy as np

from streamrl.record.batch_means import half_width
from streamrl.record.speed import Speed


def ratio_half_width(one: Speed, other: Speed) -> float | None:
    """Return half the 95 % interval of the logarithm of two step times' ratio; None where too few steps count in both.

    Step by step both have the same work, so that what makes a step long for both cancels out.
    """
    first = max(one.counted_steps[0], other.counted_steps[0])
    last = min(one.counted_steps[1], other.counted_steps[1])
    if last <= first:
        return None
    ours, theirs = (np.array(each.step_times[first - 1 : last]) for each in (one, other))
    return half_width(ours / ours.mean() - theirs / theirs.mean())


def is_beyond_chance(one: Speed, other: Speed, ratio: float) -> bool | None:
    """Return whether two runs' figures differ by more than the interval of their ratio; None where that is not known."""
    width = ratio_half_width(one, other)
    return None if width is None else abs(log(ratio)) > width

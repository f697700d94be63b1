"""How well the mean of a sequence that goes on alike is known, where its values depend on those before them.

Non-overlapping batch means (Law, Simulation Modeling and Analysis, 9.5): means of long batches hardly depend on each
other, so their spread tells that of the whole mean. What dependence is left, their lag-1 correlation r tells: as in
Skart (Tafazzoli and Wilson 2011) the variance grows by (1 + r) / (1 - r), that of an autoregressive sequence. Where
r is below 0 nothing is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from streamrl.hardware.tables import Floats

BATCHES = 20
"""Batch means: fewer make Student's t wide, and 10 to 30 are what is gained by (Schmeiser 1982)."""
LEAST_BATCHES = 10
"""Below which a lag-1 correlation says nothing, so that there is no interval."""
MOST_CORRELATION = 0.9
"""Past which the variance of an autoregressive sequence cannot be told from so few batches."""
LEAST_FREEDOM = 3.0
ROUNDING = 1e-9
"""Share of the largest mean by which means that are alike differ for the order of their sums."""
NORMAL = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def half_width(values: Sequence[float] | Floats) -> float | None:
    """Return half the 95 % interval of a mean; None of fewer than `LEAST_BATCHES` values.

    Args:
        values: in order of time, without the transient.
    """
    means = _batch_means(np.asarray(values, dtype=float))
    num = len(means)
    if num < LEAST_BATCHES:
        return None
    variance = float(means.var(ddof=1))
    if sqrt(variance) <= ROUNDING * float(np.abs(means).max()):
        return 0.0
    correlation = min(max(0.0, _correlation(means)), MOST_CORRELATION)
    grows = (1 + correlation) / (1 - correlation)
    freedom = max(LEAST_FREEDOM, (num - 1) / grows)
    return student(freedom) * sqrt(variance * grows / num)


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t: Cornish and Fisher's expansion, within 0.1 % from 4 degrees on.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z, v = NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _batch_means(values: Floats) -> Floats:
    """Return the means of `BATCHES` batches or a few more; values at the start that fill none are left out."""
    size = max(1, len(values) // BATCHES)
    num = len(values) // size
    means: Floats = values[len(values) - num * size :].reshape(num, size).mean(axis=1)
    return means


def _correlation(means: Floats) -> float:
    """Return the lag-1 correlation, without the bias of so few: an estimate of r is low by (1 + 3 r) / n."""
    num, rest = len(means), means - means.mean()
    found = float(rest[1:] @ rest[:-1]) / float(rest @ rest)
    return (num * found + 1) / (num - 3)

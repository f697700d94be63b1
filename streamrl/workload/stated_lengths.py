"""Draw output lengths from stated figures, and describe lengths in a line.

The distribution is lognormal, cut off at the maximum: outputs of language models have many short lengths and a long
tail. Its mean counts outputs that were cut off at the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, exp, inf, log, sqrt

import numpy as np
import numpy.typing as npt

from streamrl.runfile.errors import RunError
from streamrl.runfile.length_words import KEY, StatedFigures

P95 = 1.6448536269514722
"""Normal quantile of 0.95."""
USUAL_SPREAD = 0.9
"""Standard deviation of the log lengths if no p95 is stated, amid those of profiles/lengths (0.5 to 1.2)."""
HALVINGS = 60
DRAWN = 1 << 14
"""Number of lengths from which statistics are computed."""
BARS = " ▁▂▃▄▅▆▇█"
NUM_BARS = 20

Lengths = npt.NDArray[np.int64]


class StatedLengths:
    """Lengths from a lognormal distribution with the stated figures. Those of a group may be alike."""

    def __init__(
        self, figures: StatedFigures, prompt_tokens: int, correlation: float = 0.0
    ) -> None:
        """Fit the distribution.

        Raises:
            RunError: no lognormal distribution has these figures.
        """
        self._most = inf if figures.max is None else float(figures.max)
        self._prompt_tokens = prompt_tokens
        self._correlation = correlation
        self._location, self._spread = _fitted(figures, self._most)

    def sample(
        self, rng: np.random.Generator, num_groups: int, group_size: int
    ) -> tuple[Lengths, Lengths]:
        """Return lengths [num_groups, group_size] and prompt tokens [num_groups]."""
        if self._correlation:
            normal = correlated(rng, num_groups, group_size, self._correlation)
            drawn = np.exp(self._location + self._spread * normal)
        else:
            drawn = rng.lognormal(self._location, self._spread, (num_groups, group_size))
        lengths = np.rint(np.clip(drawn, 1, self._most)).astype(np.int64)
        return lengths, np.full(num_groups, self._prompt_tokens)


def correlated(
    rng: np.random.Generator, num_groups: int, group_size: int, correlation: float
) -> npt.NDArray[np.float64]:
    """Return standard normal numbers [num_groups, group_size].

    Two numbers of a group have this correlation. Numbers of different groups are independent.
    """
    of_group = rng.standard_normal((num_groups, 1))
    own = rng.standard_normal((num_groups, group_size))
    return sqrt(correlation) * of_group + sqrt(1 - correlation) * own


def normal_shares(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the share of a standard normal distribution below each number."""
    shares = [0.5 + erf(number / sqrt(2)) / 2 for number in numbers.ravel().tolist()]
    return np.array(shares).reshape(numbers.shape)


def _fitted(figures: StatedFigures, most: float) -> tuple[float, float]:
    """Return the mean and the standard deviation of the log lengths."""
    try:
        return fitted_to_mean(figures.mean, figures.p95, P95, most, "p95")
    except ValueError as error:
        raise RunError(KEY, figures.mean, text=f"{KEY}: {error}") from None


def fitted_to_mean(
    mean: float, upper: float | None, normal: float, most: float, name: str
) -> tuple[float, float]:
    """Return the mean and the standard deviation of the logarithms of a lognormal variable.

    Args:
        mean: its mean, when it is cut off at `most`.
        upper: its upper quantile; None if it is unknown.
        normal: the normal quantile of the same share.
        most: its maximum.
        name: name of the upper quantile, for the error.

    Raises:
        ValueError: the mean is too small beside the upper quantile.
    """
    if upper is None:
        location = _root(
            lambda at: capped_mean(at, USUAL_SPREAD, most) - mean, -2.0, log(mean) + 20.0
        )
        return location, USUAL_SPREAD
    top = log(upper)
    least = capped_mean(top - normal * normal, normal, most)
    if mean < least:
        told = f"mean is {mean:g}; with {name} {upper:g} it must be at least {least:.0f}"
        raise ValueError(f"{told}: lower {name}")
    spread = _root(
        lambda spread: mean - capped_mean(top - normal * spread, spread, most), 1e-6, normal
    )
    return top - normal * spread, spread


def capped_mean(location: float, spread: float, most: float) -> float:
    """Return the mean of a lognormal variable that is cut off at `most`."""
    whole = exp(location + spread**2 / 2)
    if most == inf:
        return whole
    away = (log(most) - location) / spread
    return whole * _normal(away - spread) + most * (1 - _normal(away))


def _normal(value: float) -> float:
    return (1 + erf(value / sqrt(2))) / 2


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function is 0."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def described(lengths: Lengths) -> str:
    """Return the statistics of lengths, and their histogram as a row of bars."""
    middle, p95 = np.quantile(lengths, [0.5, 0.95])
    counts, edges = np.histogram(lengths, bins=NUM_BARS, range=(0, lengths.max()))
    heights = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
    bars = "".join(BARS[height] for height in heights)
    return (
        f"mean {lengths.mean():,.0f}, median {middle:,.0f}, p95 {p95:,.0f}, longest {lengths.max():,} tokens; "
        f"0 |{bars}| {edges[-1]:,.0f}"
    )

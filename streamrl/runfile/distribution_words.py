"""Read a distribution in words: "median 5.2 s, p99 81 s", "mean 20, p95 40, max 50", or one constant "4 s"."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streamrl.runfile.errors import RunError
from streamrl.runfile.units import Duration, count_of

QUANTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
"""Names of the upper quantiles that a text may state."""
MIDDLES = ("mean", "median")
NAMES = (*MIDDLES, *QUANTILES, "max")


class StatedDistribution(NamedTuple):
    """Figures of a lognormal distribution, in tokens, turns or seconds; or one constant."""

    middle: float
    """The mean or the median."""
    is_mean: bool
    upper: float | None = None
    """Value that `share` of all values do not exceed; None if it is not stated."""
    share: float = 0.95
    most: float | None = None
    """Larger values are cut off here; None if there is no maximum."""
    is_constant: bool = False


def read_distribution(key: str, text: str, *, is_time: bool) -> StatedDistribution:
    """Return the figures in a text.

    Args:
        key: key of the run file, for the error.
        text: the text, such as "median 5.2 s, p99 81 s".
        is_time: whether its figures are durations; else they are counts.

    Raises:
        RunError: a figure is missing, unknown, or too large or too small beside the others.
    """
    read: Callable[[str], float] = Duration.parse if is_time else count_of
    example = "'median 5 s, p99 80 s'" if is_time else "'mean 20, p95 40, max 50'"

    def wrong(reason: str) -> RunError:
        return RunError(key, text, text=f"{key} {text!r} {reason}; write one value, or {example}")

    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(" ")
        if name not in NAMES:
            name, value = "", part
        if name in found:
            raise wrong(f"states {name} twice" if name else "has several values without a name")
        try:
            found[name] = float(read(value.strip()))
        except ValueError as error:
            raise wrong(f"cannot be read: {error}") from None
    if "" in found:
        if len(found) > 1:
            raise wrong("has a value without a name")
        return StatedDistribution(found[""], is_mean=True, is_constant=True)
    middles = [name for name in MIDDLES if name in found]
    uppers = [name for name in QUANTILES if name in found]
    if len(middles) != 1 or len(uppers) > 1:
        raise wrong("needs mean or median, and at most one of p90, p95 and p99")
    middle, most = found[middles[0]], found.get("max")
    upper = found[uppers[0]] if uppers else None
    if middle <= 0 or (upper is not None and upper <= middle):
        raise wrong("needs 0 < mean or median < upper quantile")
    if most is not None and most < (middle if upper is None else upper):
        raise wrong("has a maximum below another figure")
    share = QUANTILES[uppers[0]] if uppers else QUANTILES["p95"]
    return StatedDistribution(middle, middles[0] == "mean", upper, share, most)

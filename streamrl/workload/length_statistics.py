"""Compute the statistics of output lengths: mean, quantiles, the share at the cap, and a histogram."""

from __future__ import annotations

from math import ceil, log10

import msgspec
import numpy as np
import numpy.typing as npt

NUM_BINS = 12
TAIL = 1.5
"""Multiple of the p95 above which lengths share one bin."""
STEPS = (1, 2, 2.5, 5, 10)
"""Widths of bins, times a power of ten."""

Lengths = npt.NDArray[np.int64]


class Bin(msgspec.Struct, frozen=True):
    """The outputs with more than `above` and at most `most` tokens."""

    above: int
    most: int
    share: float


class LengthStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of output lengths, in tokens."""

    rollouts: int
    mean: float
    median: float
    p95: float
    longest: int
    cap: int
    """The maximum of an output. If it is unknown, the longest one."""
    share_at_cap: float
    """Share of outputs that reach the cap."""
    bins: list[Bin]


def length_statistics(lengths: Lengths, cap: int | None = None) -> LengthStatistics:
    """Return the statistics of output lengths [num_rollouts].

    Args:
        lengths: tokens of each output, at least one.
        cap: maximum of an output. Longer ones are cut off there.
    """
    cut = lengths if cap is None else np.minimum(lengths, cap)
    longest = int(cut.max())
    most = longest if cap is None else cap
    return LengthStatistics(
        rollouts=len(cut),
        mean=float(cut.mean()),
        median=float(np.quantile(cut, 0.5)),
        p95=float(np.quantile(cut, 0.95)),
        longest=longest,
        cap=most,
        share_at_cap=float(np.mean(cut >= most)),
        bins=_bins(cut, longest, float(np.quantile(cut, 0.95))),
    )


def _bins(lengths: Lengths, longest: int, p95: float) -> list[Bin]:
    """Return bins of one width, and a wide last one for a tail far beyond the p95."""
    width = _width(min(longest, ceil(TAIL * p95)))
    num_bins = min(ceil(longest / width), ceil(TAIL * p95 / width) + 1)
    counts = np.bincount(np.minimum((lengths - 1) // width, num_bins - 1), minlength=num_bins)
    edges = [width * place for place in range(num_bins)] + [longest]
    return [
        Bin(above, most, float(count / len(lengths)))
        for above, most, count in zip(edges, edges[1:], counts, strict=False)
    ]


def _width(longest: int) -> int:
    """Return the smallest round width that needs at most `NUM_BINS` bins."""
    least = longest / NUM_BINS
    unit: int = 10 ** max(0, int(log10(max(least, 1))))
    return next(ceil(step * unit) for step in STEPS if step * unit >= least)

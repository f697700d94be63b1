"""Seconds of decode attention over longer contexts than a batch was measured with.

Tables end where a batch's cache filled the GPU or the sweep: 256 rollouts of eight key heads were measured with 512 tokens
each, 64 with 4,096. With the ratio to the roofline that they had at their last column, the launch and the start of each
rollout would be paid anew with every further token. What a token more takes depends on how many are read in all, as kernels
deal rollouts and pieces of their contexts out alike; so a row goes on as the one of fewer caches did at as many tokens:

    seconds(c, W) = seconds(c, V) + seconds(c', W) - seconds(c', V)

with V and W tokens in all, c caches, and c' those of the next smaller row, which was carried on before. No token more is
read faster than memory allows, and none slower than those before it on average.
"""

from __future__ import annotations

import numpy as np

from streamrl.hardware.tables import Floats


def carry_on(caches: Floats, columns: Floats, seconds: Floats, roofline: Floats) -> Floats:
    """Return seconds that go on behind the last measured column of each row.

    Args:
        caches: (rows,) that are read, increasing; rows differ in nothing else.
        columns: (columns,) tokens of context.
        seconds: (rows, columns), NaN where nothing was measured; each row has one at least.
        roofline: (rows, columns) at the peak.
    """
    carried = seconds.copy()
    for row in range(len(caches)):
        last = int(np.flatnonzero(~np.isnan(seconds[row]))[-1])
        if last == len(columns) - 1:
            continue
        smaller = max(0, row - 1)  # the smallest has its own last rate
        contexts = caches[row] / caches[smaller] * columns[last:]
        further = np.diff(_along(columns, carried[smaller], contexts))
        least = np.diff(roofline[row, last:])
        for step, column in enumerate(range(last, len(columns) - 1)):
            before = carried[row, column]
            most = before / roofline[row, column] * least[step]
            carried[row, column + 1] = before + max(least[step], min(further[step], most))
    return carried


def _along(columns: Floats, seconds: Floats, contexts: Floats) -> Floats:
    """Read a row at any context: straight lines between its columns, the last of them beyond."""
    is_known = ~np.isnan(seconds)
    places, values = columns[is_known], seconds[is_known]
    if len(places) == 1:
        slope = values[0] / places[0]
    else:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    beyond = slope * np.maximum(0.0, contexts - places[-1])
    found: Floats = np.interp(contexts, places, values) + beyond
    return found

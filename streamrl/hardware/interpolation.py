"""Interpolate and extrapolate the seconds of an operator table to any shape.

Seconds of decode attention over longer contexts than a batch was measured with.

Tables end where a batch's cache filled the GPU or the sweep: 256 rollouts of eight key heads were measured with 512 tokens
each, 64 with 4,096. With the ratio to the roofline that they had at their last column, the launch and the start of each
rollout would be paid anew with every further token. The cost of one more token
depends on the total number of tokens read, because kernels schedule rollouts and pieces of their contexts alike. So a
row continues like the row of fewer caches did at the same number of tokens:

    seconds(c, W) = seconds(c, V) + seconds(c', W) - seconds(c', V)

with V and W tokens in all, c caches, and c' those of the next smaller row, which was carried on before. No token more is
read faster than memory allows, and none slower than those before it on average.

Seconds between the measured shapes of a table, and beyond them.

Interpolated is how much longer than its roofline an operator takes: the logarithm of that ratio, linearly
in the logarithm of every axis. Outside the measured range the ratio of the nearest edge holds, which is an
extrapolation by roofline, and on a GPU that differs in bandwidth or FLOP/s the ratio is kept as well. Decode
attention over longer contexts than a batch was measured with: `streamrl.hardware.interpolation`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.operator_tables import OPERATORS, Floats, Peak, Table


def extrapolate_contexts(
    caches: Floats, columns: Floats, seconds: Floats, roofline: Floats
) -> Floats:
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


Bools: TypeAlias = NDArray[np.bool_]
NEAR = 1e-9  # of a logarithm: two such values are one


class Surface:
    """One table, ready to be asked for any shape."""

    def __init__(self, table: Table, peak: Peak) -> None:
        """Prepare a table that was measured on a GPU of this peak."""
        self.table = table
        self._operator = OPERATORS[table.facts.operator]
        self._roofline = self._operator.roofline(peak)
        axes = {name: table.rows[:, i] for i, name in enumerate(table.keys)}
        points = np.log(np.stack(self._operator.coordinates(axes), axis=1))
        grid = {name: values[:, None] for name, values in axes.items()}
        grid[table.facts.columns] = table.columns[None, :]
        rooflines = self._roofline(grid)
        ratios = np.log(table.seconds / rooflines)
        columns = np.log(table.columns)
        if self._operator.fills_holes:
            ratios = _fill(points, ratios, columns)
        self._tree = _grow(
            points, ratios, columns, rooflines if self._operator.reads_caches else None
        )

    def largest(self, axis: str) -> float:
        """Return the largest measured value of an axis of the rows."""
        return float(self.table.rows[:, self.table.keys.index(axis)].max())

    def seconds(
        self, shape: Mapping[str, float], columns: Floats, peak: Peak
    ) -> tuple[Floats, Bools]:
        """Return seconds at every column, and which columns are within the measured range.

        Args:
            shape: value of every axis of the rows.
            columns: (n,) values of the last axis.
            peak: of the GPU that is asked about. Kernels keep their ratio to the roofline there,
                collectives their seconds beside the wire.
        """
        point = self._operator.coordinates({name: np.array([v]) for name, v in shape.items()})
        ratio, is_inside = _descend(self._tree, [log(p[0]) for p in point], np.log(columns))
        axes = {name: np.array([value]) for name, value in shape.items()}
        axes[self.table.facts.columns] = columns
        theirs = self._operator.roofline(peak)(axes)
        if self._operator.is_collective:
            ours = self._roofline(axes)
            return np.exp(ratio) * ours + theirs - ours, is_inside
        return np.exp(ratio) * theirs, is_inside


@dataclass(frozen=True)
class _Leaf:
    """Ratios along the columns, of which those behind `last` were not measured."""

    columns: Floats
    ratios: Floats
    last: float


@dataclass(frozen=True)
class _Branch:
    """One axis: its values in order, and what is below each."""

    values: list[float]
    children: list[_Node]


_Node: TypeAlias = _Leaf | _Branch


def _grow(
    points: Floats, ratios: Floats, columns: Floats, rooflines: Floats | None = None
) -> _Node:
    """Sort rows into a tree, one axis a level; rows at one point become their median.

    Rows that differ in the last axis alone, caches, are carried on along the columns where `rooflines` are given.
    """
    if not points.shape[1]:
        is_measured = ~np.isnan(ratios).all(axis=0)
        measured = columns[is_measured]
        return _Leaf(measured, _medians(ratios[:, is_measured]), measured[-1])
    values = points[:, 0].round(9)
    levels = sorted(set(values.tolist()))
    parts = [values == level for level in levels]
    below = [None if rooflines is None else rooflines[part] for part in parts]
    children = [
        _grow(points[part, 1:], ratios[part], columns, under)
        for part, under in zip(parts, below, strict=True)
    ]
    if rooflines is not None and points.shape[1] == 1:
        children = _lengthened(levels, children, columns, rooflines[[p.argmax() for p in parts]])
    return _Branch(levels, children)


def _lengthened(
    caches: list[float], rows: list[_Node], columns: Floats, rooflines: Floats
) -> list[_Node]:
    """Return rows that go on to the last column; both axes are logarithms, as everywhere here."""
    leaves = [row for row in rows if isinstance(row, _Leaf)]
    ratios = np.full((len(leaves), len(columns)), np.nan)
    for i, leaf in enumerate(leaves):
        ratios[i, np.searchsorted(columns, leaf.columns)] = leaf.ratios
    seconds = np.exp(ratios) * rooflines
    carried = extrapolate_contexts(np.exp(caches), np.exp(columns), seconds, rooflines)
    longer = np.log(carried / rooflines)
    return [
        _Leaf(columns[~np.isnan(row)], row[~np.isnan(row)], leaf.last)
        for leaf, row in zip(leaves, longer, strict=True)
    ]


def _medians(ratios: Floats) -> Floats:
    """Return the median of each column over its measured rows, of which it has one at least.

    Tables have a row or two for a shape, which `np.nanmedian` takes a hundred times as long for.
    """
    ordered = np.sort(ratios, axis=0)  # NaN last
    num_measured = (~np.isnan(ratios)).sum(axis=0)
    places = np.arange(ratios.shape[1])
    low, high = ordered[(num_measured - 1) // 2, places], ordered[num_measured // 2, places]
    medians: Floats = (low + high) / 2
    return medians


def _descend(node: _Node, point: list[float], columns: Floats) -> tuple[Floats, Bools]:
    """Interpolate at a point: the two nearest branches of each level, weighed by distance."""
    if isinstance(node, _Leaf):
        is_inside = (columns >= node.columns[0] - NEAR) & (columns <= node.last + NEAR)
        return np.interp(columns, node.columns, node.ratios), is_inside
    value, values = point[0], node.values
    right = min(bisect_left(values, value - NEAR), len(values) - 1)
    if right == 0 or values[right] <= value + NEAR:
        ratio, is_inside = _descend(node.children[right], point[1:], columns)
        return ratio, is_inside & (abs(values[right] - value) <= NEAR)
    left = right - 1
    share = (value - values[left]) / (values[right] - values[left])
    low, is_low_inside = _descend(node.children[left], point[1:], columns)
    high, is_high_inside = _descend(node.children[right], point[1:], columns)
    return (1 - share) * low + share * high, is_low_inside & is_high_inside


def _fill(points: Floats, ratios: Floats, columns: Floats) -> Floats:
    """Estimate cells that were not measured: the mean of what interpolation along each axis gives."""
    is_hole = np.isnan(ratios)
    if not is_hole.any():
        return ratios
    estimates = [np.array([_mend(columns, row) for row in ratios])]
    for axis in range(points.shape[1]):
        _, lines = np.unique(np.delete(points, axis, axis=1).round(9), axis=0, return_inverse=True)
        estimate = np.full_like(ratios, np.nan)
        for line in np.unique(lines[is_hole.any(axis=1)]):
            members = np.flatnonzero(lines.ravel() == line)
            members = members[np.argsort(points[members, axis])]
            for column in np.flatnonzero(is_hole[members].any(axis=0)):
                mended = _mend(points[members, axis], ratios[members, column])
                estimate[members, column] = mended
        estimates.append(estimate)
    found = np.stack(estimates)
    count = (~np.isnan(found)).sum(axis=0)
    mean = np.nansum(found, axis=0) / np.maximum(count, 1)
    return np.where(is_hole & (count > 0), mean, ratios)


def _mend(places: Floats, values: Floats) -> Floats:
    """Interpolate the holes between measured values; those at the ends stay."""
    is_known = ~np.isnan(values)
    if not is_known.any():
        return values
    return np.interp(places, places[is_known], values[is_known], left=np.nan, right=np.nan)

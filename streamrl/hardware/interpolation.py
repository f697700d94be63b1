"""Interpolate and extrapolate the seconds of an operator table to any shape.

An operator's seconds are divided by its roofline. The logarithm of this ratio is interpolated linearly in
the logarithm of every axis. Outside the measured range, the ratio of the nearest edge is used. On a GPU
with other bandwidth or FLOP/s, the ratio stays the same. If the table states the seconds of a launch,
only the seconds beyond a launch are divided and interpolated.

Decode attention over longer contexts than measured is extrapolated differently. A table ends where the
KV cache of a batch filled the GPU or the sweep ended: 256 rollouts of eight key heads were measured with
512 tokens each, 64 with 4,096. A constant ratio would count the launch and the start of each rollout
again for every further token. Instead, the cost of one more token depends on the total number of tokens
read, because kernels schedule rollouts and pieces of their contexts in the same way. So a row continues
like the row with fewer caches at the same total number of tokens:

    seconds(c, W) = seconds(c, V) + seconds(c', W) - seconds(c', V)

with V and W total tokens, c caches, and c' the caches of the next smaller row, which was extended before.
One more token is never read faster than memory bandwidth allows, and never slower than the mean of
the tokens before it.
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
    """Return seconds with the columns after the last measured one of each row filled in.

    Args:
        caches: (rows,) number of caches that are read, increasing. Rows differ in nothing else.
        columns: (columns,) tokens of context.
        seconds: (rows, columns), NaN where nothing was measured. Each row has a measured value.
        roofline: (rows, columns) seconds at the peak.
    """
    carried = seconds.copy()
    for row in range(len(caches)):
        last = int(np.flatnonzero(~np.isnan(seconds[row]))[-1])
        if last == len(columns) - 1:
            continue
        smaller = max(0, row - 1)  # the first row continues with its own last rate
        contexts = caches[row] / caches[smaller] * columns[last:]
        further = np.diff(_along(columns, carried[smaller], contexts))
        least = np.diff(roofline[row, last:])
        for step, column in enumerate(range(last, len(columns) - 1)):
            before = carried[row, column]
            most = before / roofline[row, column] * least[step]
            carried[row, column + 1] = before + max(least[step], min(further[step], most))
    return carried


def _along(columns: Floats, seconds: Floats, contexts: Floats) -> Floats:
    """Return the seconds of a row at any context: linear between columns, and along the last line beyond them."""
    is_known = ~np.isnan(seconds)
    positions, values = columns[is_known], seconds[is_known]
    if len(positions) == 1:
        slope = values[0] / positions[0]
    else:
        slope = (values[-1] - values[-2]) / (positions[-1] - positions[-2])
    beyond = slope * np.maximum(0.0, contexts - positions[-1])
    interpolated: Floats = np.interp(contexts, positions, values) + beyond
    return interpolated


Bools: TypeAlias = NDArray[np.bool_]
NEAR = 1e-9  # logarithms that differ by less count as equal


class Surface:
    """An operator table that can be evaluated at any shape."""

    def __init__(self, table: Table, peak: Peak) -> None:
        """Prepare a table that was measured on a GPU with this peak."""
        self.table = table
        self._operator = OPERATORS[table.facts.operator]
        self._roofline = self._operator.roofline(peak)
        axes = {name: table.rows[:, i] for i, name in enumerate(table.keys)}
        points = np.log(np.stack(self._operator.coordinates(axes), axis=1))
        grid = {name: values[:, None] for name, values in axes.items()}
        grid[table.facts.columns] = table.columns[None, :]
        rooflines = self._roofline(grid)
        ratios = np.log(beyond_launch(table) / rooflines)
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
        """Return the seconds at every column, and which columns are within the measured range.

        Args:
            shape: value of every axis of the rows.
            columns: (n,) values of the last axis.
            peak: peak of the GPU in question. Kernels keep their ratio to the roofline on it;
                collectives keep the seconds that exceed the time on the wire.
        """
        point = self._operator.coordinates({name: np.array([v]) for name, v in shape.items()})
        ratio, is_inside = _descend(self._tree, [log(p[0]) for p in point], np.log(columns))
        axes = {name: np.array([value]) for name, value in shape.items()}
        axes[self.table.facts.columns] = columns
        theirs, launch = self._operator.roofline(peak)(axes), self.table.launch_time
        if self._operator.is_collective:
            ours = self._roofline(axes)
            return launch + np.exp(ratio) * ours + theirs - ours, is_inside
        return launch + np.exp(ratio) * theirs, is_inside


LEAST_BEYOND = 0.02
"""Share of a cell's seconds that counts as work if the cell is no longer than a launch."""


def beyond_launch(table: Table) -> Floats:
    """Return the seconds of every cell without its launch."""
    return np.maximum(table.seconds - table.launch_time, LEAST_BEYOND * table.seconds)


@dataclass(frozen=True)
class _Leaf:
    """Ratios along the columns; those after `last` are extrapolated."""

    columns: Floats
    ratios: Floats
    last: float


@dataclass(frozen=True)
class _Branch:
    """One axis: its values in order, and the subtree of each."""

    values: list[float]
    children: list[_Node]


_Node: TypeAlias = _Leaf | _Branch


def _grow(
    points: Floats, ratios: Floats, columns: Floats, rooflines: Floats | None = None
) -> _Node:
    """Return a tree of the rows with one level for each axis; rows at the same point become their median.

    With `rooflines`, rows that differ only in the last axis, the number of caches, are extrapolated along
    the columns.
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
        children = _extrapolated(levels, children, columns, rooflines[[p.argmax() for p in parts]])
    return _Branch(levels, children)


def _extrapolated(
    caches: list[float], rows: list[_Node], columns: Floats, rooflines: Floats
) -> list[_Node]:
    """Return rows that reach the last column. Caches and columns are logarithms, as in all of this tree."""
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
    """Return the median of each column over its measured rows; each column must have a measured row.

    `np.nanmedian` is a hundred times slower for the one or two rows that tables have for a shape.
    """
    ordered = np.sort(ratios, axis=0)  # NaN last
    num_measured = (~np.isnan(ratios)).sum(axis=0)
    positions = np.arange(ratios.shape[1])
    low, high = ordered[(num_measured - 1) // 2, positions], ordered[num_measured // 2, positions]
    medians: Floats = (low + high) / 2
    return medians


def _descend(node: _Node, point: list[float], columns: Floats) -> tuple[Floats, Bools]:
    """Return the ratios at a point, interpolated between the two nearest branches of each level."""
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
    """Return ratios with estimates for cells that were not measured: the mean of the interpolations along each axis."""
    is_hole = np.isnan(ratios)
    if not is_hole.any():
        return ratios
    estimates = [np.array([_fill_line(columns, row) for row in ratios])]
    for axis in range(points.shape[1]):
        _, lines = np.unique(np.delete(points, axis, axis=1).round(9), axis=0, return_inverse=True)
        estimate = np.full_like(ratios, np.nan)
        for line in np.unique(lines[is_hole.any(axis=1)]):
            members = np.flatnonzero(lines.ravel() == line)
            members = members[np.argsort(points[members, axis])]
            for column in np.flatnonzero(is_hole[members].any(axis=0)):
                filled = _fill_line(points[members, axis], ratios[members, column])
                estimate[members, column] = filled
        estimates.append(estimate)
    along_axes = np.stack(estimates)
    count = (~np.isnan(along_axes)).sum(axis=0)
    mean = np.nansum(along_axes, axis=0) / np.maximum(count, 1)
    return np.where(is_hole & (count > 0), mean, ratios)


def _fill_line(positions: Floats, values: Floats) -> Floats:
    """Return values with gaps between measured values interpolated; gaps at the ends remain NaN."""
    is_known = ~np.isnan(values)
    if not is_known.any():
        return values
    return np.interp(positions, positions[is_known], values[is_known], left=np.nan, right=np.nan)

"""A figure of the paper: its cells, our simulated values, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec


class FigureCell(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the paper and our value."""

    label: str
    paper: float
    ours: float

    @property
    def difference(self) -> float:
        """Return our value minus the paper's."""
        return self.ours - self.paper

    @property
    def error(self) -> float:
        """Return our value divided by the paper's, minus 1; 0 if both are 0."""
        return self.difference / abs(self.paper) if self.paper else self.difference

    @property
    def is_reversed(self) -> bool:
        """Return whether a ratio is above 1 in the paper and not here, or the other way round."""
        return (self.paper > 1) != (self.ours > 1)


def mean_error(cells: Sequence[FigureCell]) -> float:
    """Return the mean of the absolute relative errors."""
    return fmean(abs(cell.error) for cell in cells)


def largest_difference(cells: Sequence[FigureCell]) -> float:
    """Return the largest absolute difference from the paper."""
    return max(abs(cell.difference) for cell in cells)


class PaperFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure or table of the paper."""

    name: str
    title: str
    unit: str
    cells: list[FigureCell]
    target: str
    """The accuracy that it must reach."""
    is_met: bool
    found: str
    """What was found of the quantity that the target is about."""
    reversed: int | None = None
    """Of ratios of two systems: cells with the slower system as the faster one."""
    notes: list[str] = []
    """Our readings, and the reasons of misses."""

    @property
    def mape(self) -> float:
        """Return the mean of the absolute relative errors."""
        return mean_error(self.cells)

    @property
    def max_error(self) -> float:
        """Return the largest absolute relative error."""
        return max(abs(cell.error) for cell in self.cells)

    def describe(self) -> dict[str, object]:
        """Return the figure as a JSON object."""
        cells = [{**msgspec.structs.asdict(cell), "error": cell.error} for cell in self.cells]
        fields = msgspec.structs.asdict(self)
        return {**fields, "cells": cells, "mape": self.mape, "max_error": self.max_error}

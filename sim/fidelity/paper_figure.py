"""Define a figure of the paper: its cells beside simulated ones, and their errors."""

from __future__ import annotations

import msgspec


class FigureCell(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the paper and ours."""

    label: str
    paper: float
    ours: float

    @property
    def difference(self) -> float:
        """Ours less the paper's."""
        return self.ours - self.paper

    @property
    def error(self) -> float:
        """Ours over the paper's, less 1; 0 where both are 0."""
        return self.difference / abs(self.paper) if self.paper else self.difference


class PaperFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure or table of the paper."""

    name: str
    title: str
    unit: str
    cells: list[FigureCell]
    target: str
    """What it must reach."""
    is_met: bool
    notes: list[str] = []
    """Readings, and reasons of misses."""

    @property
    def mape(self) -> float:
        """Mean of the absolute relative errors."""
        return sum(abs(cell.error) for cell in self.cells) / len(self.cells)

    @property
    def max_error(self) -> float:
        """Largest absolute relative error."""
        return max(abs(cell.error) for cell in self.cells)

    def describe(self) -> dict[str, object]:
        """Return a JSON object."""
        cells = [{**msgspec.structs.asdict(cell), "error": cell.error} for cell in self.cells]
        fields = msgspec.structs.asdict(self)
        return {**fields, "cells": cells, "mape": self.mape, "max_error": self.max_error}

"""Figures of what profiles say: a few series over one axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.report.pictures.style import SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = tuple(colour.light for colour in SERIES)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a figure."""

    label: str
    places: list[float]
    values: list[float]
    is_unmeasured: bool = False
    """Whether most of it is a roofline."""

    @property
    def legend(self) -> str:
        """Name the line, and say where nothing was measured."""
        return f"{self.label} (unmeasured)" if self.is_unmeasured else self.label


def share_figure(
    series: Sequence[Series], *, over: str, share: str, title: str, path: Path | None = None
) -> Figure:
    """Draw shares of something over a logarithmic axis; write a .png or .svg file where a path is given."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for line, colour in zip(series, COLOURS * len(series), strict=False):
        style = "--" if line.is_unmeasured else "-"
        axes.plot(
            line.places,
            line.values,
            style,
            color=colour,
            marker="o",
            markersize=4,
            label=line.legend,
        )
    axes.set(xscale="log", xlabel=over, ylabel=share, title=title)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure

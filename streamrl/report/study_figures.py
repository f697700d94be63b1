"""Figures of a study: one metric over the first axis, a line or a group of bars for each other combination.

What the rows show stands under each figure, computed from them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator, PercentFormatter
from numpy.typing import NDArray

from streamrl.report.profile_figures import COLOURS
from streamrl.report.study_table import SHARES, MetricSeries, MetricTable, unit_of
from streamrl.runfile.grid import Axis

SIZE = (9.0, 5.2)  # inches above the text
LINE_HEIGHT = 0.2  # inches of a line of the text under the figure
WIDTH = 130  # characters of such a line
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")
MARKERS = ("o", "s", "^", "D")
MOST_INSIDE = 4  # lines that can be named without hiding one of them
MOST_LABELLED = 12  # bars that stay apart with their values above them
CROWDED = 60  # characters of tick labels that fit side by side
GROUP = 0.8  # share of the room between two points that bars take


def study_figure(
    table: MetricTable, title: str, sentences: Sequence[str], path: Path | None = None
) -> Figure:
    """Draw one metric of a study over sentences that say what it shows; write a .png or .svg file to a path."""
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, WIDTH)]
    foot = LINE_HEIGHT * (len(lines) + 1)
    height = SIZE[1] + foot
    engine = ConstrainedLayoutEngine(
        rect=(0, foot / height, 1, 1 - foot / height), w_pad=0.1, h_pad=0.08
    )
    figure = Figure(figsize=(SIZE[0], height), dpi=120, layout=engine)
    axes = figure.subplots()
    series = list(table.series())
    if table.axes[0].places:
        _draw_lines(axes, table, series)
    else:
        _draw_bars(axes, table, series)
    _dress(axes, table, title)
    if len(table.axes) > 1:
        _name_series(figure, axes, table, len(series))
    figure.text(
        0.015,
        0.5 * LINE_HEIGHT / height,
        _literal("\n".join(lines)),
        fontsize=9,
        va="bottom",
        linespacing=1.4,
    )
    if path is not None:
        figure.savefig(path)
    return figure


def places_of(axis: Axis) -> NDArray[np.float64]:
    """Give where the points of an axis are drawn."""
    if axis.drawn_as == "even":
        return np.arange(len(axis.points), dtype=float)
    return np.array(axis.places)


def tick_labels(axis: Axis) -> tuple[list[str], str]:
    """Give the labels of points without the unit that all have, and that unit."""
    labels = list(axis.point_labels)
    parts = [label.rpartition(" ") for label in labels]
    units = {unit for _, _, unit in parts}
    if len(labels) < 2 or len(units) > 1 or not all(value for value, _, _ in parts):
        return labels, ""
    return [value for value, _, _ in parts], units.pop()


def _draw_lines(axes: Axes, table: MetricTable, series: Sequence[MetricSeries]) -> None:
    places = places_of(table.axes[0])
    for one in series:
        at = list(one.spreads)
        middle = np.array([spread.median for spread in one.spreads.values()])
        colour, style = _style(one)
        axes.errorbar(
            places[at],
            middle,
            yerr=_bars(one),
            linestyle=LINES[style % len(LINES)],
            marker=MARKERS[style % len(MARKERS)],
            color=colour,
            markersize=4.5,
            capsize=3,
            elinewidth=1,
            label=_literal(one.label),
        )


def _draw_bars(axes: Axes, table: MetricTable, series: Sequence[MetricSeries]) -> None:
    width = GROUP / len(series)
    for index, one in enumerate(series):
        at = np.array(list(one.spreads), dtype=float)
        middle = [spread.median for spread in one.spreads.values()]
        colour, style = _style(one)
        bars = axes.bar(
            at + (index - (len(series) - 1) / 2) * width,
            middle,
            width * 0.92,
            yerr=_bars(one),
            capsize=3,
            color=colour,
            hatch=HATCHES[style % len(HATCHES)],
            edgecolor="white",
            error_kw={"elinewidth": 1},
            label=_literal(one.label),
        )
        if len(series) * len(table.points) <= MOST_LABELLED:
            axes.bar_label(bars, [_literal(table.format(v)) for v in middle], padding=2, fontsize=9)


def _bars(series: MetricSeries) -> NDArray[np.float64]:
    """Give how far the least and the most of the seeds lie from their median."""
    spreads = series.spreads.values()
    below = [spread.median - spread.least for spread in spreads]
    return np.array([below, [spread.most - spread.median for spread in spreads]])


def _style(series: MetricSeries) -> tuple[str, int]:
    """Give a series its colour by the second axis, and the number of its style by those beyond."""
    colour = COLOURS[series.rest[0] % len(COLOURS)] if series.rest else COLOURS[0]
    return colour, sum(series.rest[1:])


def _dress(axes: Axes, table: MetricTable, title: str) -> None:
    axis = table.axes[0]
    labels, unit = tick_labels(axis)
    if axis.drawn_as == "log":
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    is_crowded = sum(map(len, labels)) > CROWDED
    axes.set_xticks(places_of(axis), [_literal(label) for label in labels])
    if is_crowded:
        axes.tick_params(axis="x", rotation=25)
    axes.set_xlabel(_literal(f"{axis.title} ({unit})" if unit else axis.title))
    kind = unit_of(table.metric)
    axes.set_ylabel(_literal(f"{table.name} ({kind})" if kind else table.name))
    if table.metric in SHARES:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title(_literal(title), fontsize=12, wrap=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    if not axis.places:
        axes.set_ylim(bottom=0)


def _name_series(figure: Figure, axes: Axes, table: MetricTable, num_series: int) -> None:
    """Name the lines where there is room for it: beside the axes where there are many."""
    title = _literal(", ".join(axis.title for axis in table.axes[1:]))
    if num_series > MOST_INSIDE:
        figure.legend(
            title=title, loc="outside right upper", frameon=False, fontsize=9, title_fontsize=9
        )
    else:
        axes.legend(title=title, frameon=False, fontsize=9, title_fontsize=9)


def _literal(text: str) -> str:
    """Keep matplotlib from reading dollars as mathematics."""
    return text.replace("$", r"\$")

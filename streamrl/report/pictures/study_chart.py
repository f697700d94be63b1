"""Draw one metric of a study over its first axis: lines over numbers, grouped bars over names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10

from streamrl.report.pictures.drawing import (
    DASHES,
    SERIES,
    Drawing,
    Picture,
    scale,
    shortened,
    ticks,
    width_of,
)
from streamrl.report.study_table import MetricSeries, MetricTable, Spread, label_of, unit_of
from streamrl.report.words import NBSP
from streamrl.runfile.sweep import Axis

WIDTH, RIGHT = 900.0, 20.0
TOP, FLOOR = 30.0, 300.0  # upper and lower end of the plot area
MARGIN = 0.08  # of the values' range, above and below them
INSET = 36.0  # from the vertical axis to the first point of a numeric axis
LINE = 16.0  # from one row of labels to the next
LONGEST_LABEL = 260.0
MOST_TICKS = 8
GROUP = 0.8  # share of the distance between two points that bars take
MOST_LABELLED = 12  # bars that can have their values above them
FILLS = ("", "hatched", "level-2", "level-2 hatched")
"""Classes that distinguish bars of one colour."""


def study_picture(name: str, table: MetricTable, title: str, caption: str) -> Picture:
    """Draw the median of a metric, with a bar from the lowest to the highest seed at every point."""
    axis, series = table.axes[0], list(table.series())
    told = "; ".join(
        f"{label_of(table.axes, place)}: {table.format(spread.median)}"
        for place, spread in table.spreads.items()
    )
    drawing = Drawing(name, title, told, WIDTH)
    left, up = _draw_values(drawing, table)
    places = _places(axis, left)
    _draw_points(drawing, axis, places)
    if axis.places:
        for one in series:
            _draw_line(drawing, table, one, places, up)
    else:
        _draw_bars(drawing, table, series, places, up)
    return Picture(drawing, caption, _legend(table, series))


def _draw_values(drawing: Drawing, table: MetricTable) -> tuple[float, Callable[[float], float]]:
    """Draw the vertical axis; return its position and the function that maps values to positions."""
    least = min(spread.least for spread in table.spreads.values())
    high = max(spread.most for spread in table.spreads.values())
    low = least if table.axes[0].places else 0.0  # bars are lengths
    margin = MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    low, high = max(0.0, low - margin) if low else 0.0, high + margin
    values = ticks(low, high, MOST_TICKS)
    show = _percent if table.is_share else "{:,.10g}".format
    left = 16 + max(width_of(show(value)) for value in values)
    up = scale(low, high, FLOOR, TOP)
    drawing.ticks_beside(values, up, (left, WIDTH - RIGHT), show)
    drawing.line(left, FLOOR, WIDTH - RIGHT, FLOOR, "grid")
    unit = unit_of(table.metric)
    drawing.text(0, 14, f"↑ {table.name} ({unit})" if unit else f"↑ {table.name}", "small")
    return left, up


def _percent(share: float) -> str:
    return f"{100 * share:.10g}{NBSP}%"


def _places(axis: Axis, left: float) -> list[float]:
    """Return the position of each point of the axis."""
    right, count = WIDTH - RIGHT, len(axis.points)
    if axis.drawn_as == "even":
        slot = (right - left) / count
        return [left + slot * (index + 0.5) for index in range(count)]
    values = [log10(v) for v in axis.places] if axis.drawn_as == "log" else axis.places
    if count == 1:
        return [(left + right) / 2]
    return [*map(scale(values[0], values[-1], left + INSET, right - INSET), values)]


def _draw_points(drawing: Drawing, axis: Axis, places: Sequence[float]) -> None:
    """Write labels under the axis, each in the first row with enough room, and end the drawing there."""
    labels, unit = _without_unit(axis.point_labels)
    ends: list[float] = []
    for x, label in zip(places, labels, strict=True):
        text = shortened(label, min(LONGEST_LABEL, 2 * x, 2 * (WIDTH - x)))
        half = width_of(text) / 2 + 3
        row = next((row for row, end in enumerate(ends) if end <= x - half), len(ends))
        ends[row : row + 1] = [x + half]
        drawing.text(x, FLOOR + 4 + LINE * (row + 1), text, "muted small", "middle")
    drawing.height = FLOOR + LINE * (len(ends) + 1) + 12
    title = f"{axis.title} ({unit})" if unit else axis.title
    drawing.text(WIDTH - RIGHT, drawing.height - 4, f"{title} →", "small", "end")


def _without_unit(labels: Sequence[str]) -> tuple[list[str], str]:
    """Return the labels of points without their common unit, and that unit."""
    parts = [label.rpartition(" ") for label in labels]
    units = {unit for _, _, unit in parts}
    if len(labels) < 2 or len(units) > 1 or not all(value for value, _, _ in parts):
        return list(labels), ""
    return [value for value, _, _ in parts], units.pop()


def _draw_line(
    drawing: Drawing,
    table: MetricTable,
    series: MetricSeries,
    places: Sequence[float],
    up: Callable[[float], float],
) -> None:
    colour, dashes = _look(series)
    found = [(at, places[at], spread) for at, spread in series.spreads.items()]
    line = [(x, up(spread.median)) for _, x, spread in found]
    drawing.polyline(line, f"curve s-{colour} {DASHES[dashes]}".strip())
    for at, x, spread in found:
        if spread.most > spread.least:
            drawing.line(x, up(spread.least), x, up(spread.most), f"spread s-{colour}")
        told = _tooltip(table, series, at)
        drawing.dot(x, up(spread.median), 4.5, f"point s-{colour}", told)


def _draw_bars(
    drawing: Drawing,
    table: MetricTable,
    series: Sequence[MetricSeries],
    places: Sequence[float],
    up: Callable[[float], float],
) -> None:
    """Draw a group of bars at every point, with values above the bars if there is room."""
    room = GROUP * (WIDTH - RIGHT - places[0]) / (len(places) - 0.5)  # of a group
    texts = [table.format(spread.median) for one in series for spread in one.spreads.values()]
    width = room / len(series)
    is_labelled = len(texts) <= MOST_LABELLED and max(map(width_of, texts)) < width
    for index, one in enumerate(series):
        for at, spread in one.spreads.items():
            x = places[at] - room / 2 + index * width
            _draw_bar(drawing, one, (x, 0.92 * width), spread, up, _tooltip(table, one, at))
            if is_labelled:
                text, y = table.format(spread.median), up(spread.most) - 5
                drawing.text(x + 0.46 * width, y, text, "small", "middle")


def _draw_bar(
    drawing: Drawing,
    series: MetricSeries,
    columns: tuple[float, float],
    spread: Spread,
    up: Callable[[float], float],
    told: str,
) -> None:
    x, width = columns
    colour, fill = _look(series)
    box = (x, up(spread.median), width, FLOOR - up(spread.median))
    drawing.rectangle(*box, f"s-{colour} {FILLS[fill].removesuffix('hatched')}".strip(), told)
    if FILLS[fill].endswith("hatched"):
        drawing.rectangle(*box, "hatch", told)
    if spread.most > spread.least:
        middle = x + width / 2
        drawing.line(middle, up(spread.least), middle, up(spread.most), "whisker")


def _tooltip(table: MetricTable, series: MetricSeries, at: int) -> str:
    """Return the tooltip of a point."""
    spread = series.spreads[at]
    label = ", ".join(text for text in (table.points[at], series.label) if text)
    least, most = table.format(spread.least), table.format(spread.most)
    seeds = f", seeds from {least} to {most}" if spread.most > spread.least else ""
    return f"{label}: {table.format(spread.median)}{seeds}"


def _look(series: MetricSeries) -> tuple[int, int]:
    """Return the index of a series' colour (second axis) and of its dashes or fill (further axes)."""
    first, *others = series.rest or (0,)
    return first % len(SERIES), (first // len(SERIES) + sum(others)) % len(DASHES)


def _legend(table: MetricTable, series: Sequence[MetricSeries]) -> list[tuple[str, str]]:
    """Return the legend of the series, named by their axes; none for a single axis."""
    if len(table.axes) == 1:
        return []
    heading = ", ".join(axis.title for axis in table.axes[1:])
    return [("", f"{heading}:"), *((_swatch_class(table, one), one.label) for one in series)]


def _swatch_class(table: MetricTable, series: MetricSeries) -> str:
    colour, look = _look(series)
    is_line = bool(table.axes[0].places)
    return f"key s-{colour} {DASHES[look]}" if is_line else f"s-{colour} {FILLS[look]}".strip()

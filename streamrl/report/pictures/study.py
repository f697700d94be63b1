"""A study's metric over its first axis, a line for each combination of the others."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.report.page.study_json import Combination, RecordedStudy
from streamrl.report.pictures.drawing import Drawing, scale, shortened, ticks
from streamrl.report.run_tables import RATIOS, format_figure, format_share
from streamrl.report.study_table import name_of
from streamrl.report.words import dollars

WIDTH, HEIGHT = 900.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 20.0, 26.0, 56.0
NUM_COLOURS = 6  # lines that the style sheet can tell apart; more repeat with dashes
MARGIN = 0.08


def curves_figure(name: str, study: RecordedStudy, metric: str) -> Drawing:
    """Draw a metric, with a bar from the least to the most seed at every point."""
    axis, series = study.found.axes[0], study.series()
    spreads = [row.metrics[metric] for row in study.found.rows]
    low, high = min(s.least for s in spreads), max(s.most for s in spreads)
    margin = MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    told = "; ".join(
        f"{row.label}: {metric_text(metric, row.metrics[metric].median)}"
        for row in study.found.rows
    )
    title = f"{study.found.title}: {name_of(metric)}"
    drawing = Drawing(name, title, told, WIDTH, HEIGHT)
    up = scale(max(0.0, low - margin), high + margin, HEIGHT - BOTTOM, TOP)
    places = len(axis.labels)
    inset = (WIDTH - LEFT - RIGHT) / places / 2
    across = scale(0, max(1, places - 1), LEFT + inset, WIDTH - RIGHT - inset)
    for value in ticks(max(0.0, low - margin), high + margin):
        drawing.line(LEFT, up(value), WIDTH - RIGHT, up(value), "grid")
        drawing.text(LEFT - 8, up(value) + 4, metric_text(metric, value), "muted small", "end")
    for place, label in enumerate(axis.labels):
        middle = (HEIGHT - BOTTOM) + 18
        x = across(place)
        drawing.text(x, middle, shortened(label, 2 * inset + 10), "muted small", "middle")
    drawing.text(WIDTH - RIGHT, HEIGHT - 12, f"{axis.name} →", "small", "end")
    drawing.text(0, 14, f"↑ {name_of(metric)}", "small")
    for index, rows in enumerate(series.values()):
        _draw_line(drawing, study, metric, rows, index, across, up)
    return drawing


def _draw_line(
    drawing: Drawing,
    study: RecordedStudy,
    metric: str,
    rows: list[Combination],
    index: int,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> None:
    css = line_class(index)
    points = [(across(study.place(row)), row) for row in rows]
    drawing.polyline([(x, up(row.metrics[metric].median)) for x, row in points], f"curve {css}")
    for x, row in points:
        spread = row.metrics[metric]
        if spread.most > spread.least:
            drawing.line(x, up(spread.least), x, up(spread.most), f"spread {css}")
        told = (
            f"{row.label}: {metric_text(metric, spread.median)}, seeds from "
            f"{metric_text(metric, spread.least)} to {metric_text(metric, spread.most)}"
        )
        drawing.dot(x, up(spread.median), 4.5, f"point {css}", told)


def line_class(index: int) -> str:
    """Give the classes of the line of a series."""
    return f"s-{index % NUM_COLOURS}" + (" dashed" if index >= NUM_COLOURS else "")


def metric_text(metric: str, value: float) -> str:
    """Write a value of a metric for people."""
    if metric.startswith(("idle", "busy")):
        return format_share(value)
    if metric.startswith("cost"):
        return dollars(value)
    return format_figure(metric, value) if metric in RATIOS else f"{value:.3g}"

"""Bars of one figure over all options, with the band in which each may truly lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.report.pictures.drawing import Drawing, Picture, scale, shortened

WIDTH = 460.0
ROW = 44.0  # a line of text over a bar
BAR = 16.0
ROOM = 106.0  # right of the longest bar, for its value
OVERHANG = 3.0  # left of a label, for letters such as J that reach back


@dataclass(frozen=True)
class Bar:
    """One option's value, with its least and most."""

    label: str
    note: str
    value: float
    least: float
    most: float
    is_chosen: bool


def bars_picture(
    name: str, title: str, bars: Sequence[Bar], show: Callable[[float], str], better: str
) -> Picture:
    """Draw a bar a row, the whole range of its band as a line over its end."""
    told = "; ".join(f"{bar.label}: {show(bar.value)}" for bar in bars)
    drawing = Drawing(name, title, f"{better} is better. {told}.", WIDTH)
    most = max(max(bar.most, bar.value) for bar in bars)
    across = scale(0.0, most, 0.0, WIDTH - ROOM)
    for row, bar in enumerate(bars):
        _draw(drawing, row * ROW + 14, bar, across, show)
    drawing.height = len(bars) * ROW
    return Picture(drawing, f"{better} is better. The line over a bar's end is its band.")


def _draw(
    drawing: Drawing,
    top: float,
    bar: Bar,
    across: Callable[[float], float],
    show: Callable[[float], str],
) -> None:
    label = shortened(bar.label, 200)
    drawing.text(OVERHANG, top, label, "strong")
    space = WIDTH - 12 - len(label) * 8
    drawing.text(WIDTH, top, shortened(bar.note, space), "muted small", "end")
    y = top + 7
    told = f"{bar.label}: {show(bar.value)}, {show(bar.least)} to {show(bar.most)}"
    css = "bar chosen" if bar.is_chosen else "bar"
    drawing.rectangle(0, y, across(bar.value), BAR, css, told)
    end = across(bar.value)
    if bar.most > bar.least:
        middle, end = y + BAR / 2, max(end, across(bar.most))
        drawing.line(across(bar.least), middle, across(bar.most), middle, "whisker")
        for edge in (bar.least, bar.most):
            drawing.line(across(edge), middle - 4, across(edge), middle + 4, "whisker")
    drawing.text(end + 6, y + 13, show(bar.value), "strong")

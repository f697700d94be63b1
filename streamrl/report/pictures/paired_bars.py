"""Draw predicted next to measured seconds: two bars for each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamrl.report.pictures.drawing import Drawing, Picture, scale

WIDTH = 900.0
LEFT, RIGHT = 260.0, 150.0
ROW, BAR, GAP = 46.0, 14.0, 2.0
LEGEND = (("bar chosen", "measured"), ("bar", "predicted"))


class Pair(NamedTuple):
    """The seconds of one stage."""

    label: str
    measured: float
    predicted: float
    note: str
    """Text after the bars, such as the error."""


def pairs_picture(
    name: str, title: str, pairs: Sequence[Pair], show: Callable[[float], str]
) -> Picture:
    """Draw a measured and a predicted bar in each row."""
    told = "; ".join(
        f"{p.label}: measured {show(p.measured)}, predicted {show(p.predicted)}" for p in pairs
    )
    drawing = Drawing(name, title, told, WIDTH, len(pairs) * ROW)
    most = max([max(p.measured, p.predicted) for p in pairs], default=1.0) or 1.0
    across = scale(0.0, most, LEFT, WIDTH - RIGHT)
    for row, pair in enumerate(pairs):
        top = row * ROW + 6
        drawing.text(LEFT - 12, top + BAR + GAP + 3, pair.label, "", "end")
        for place, value, css in ((0, pair.measured, "bar chosen"), (1, pair.predicted, "bar")):
            y = top + place * (BAR + GAP)
            drawing.rectangle(
                LEFT, y, across(value) - LEFT, BAR, css, f"{pair.label} {show(value)}"
            )
            text = f"{show(value)} {pair.note}" if place else show(value)
            drawing.text(across(value) + 6, y + BAR - 2, text, "small" if place else "small strong")
    return Picture(drawing, "Seconds of a mean step, over the same steps.", LEGEND)

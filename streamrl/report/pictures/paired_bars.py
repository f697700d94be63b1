"""Draw predicted next to measured seconds: two bars for each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamrl.report.pictures.drawing import Drawing, Picture, scale

WIDTH, RIGHT = 460.0, 130.0
ROW, LABEL, BAR, GAP = 62.0, 16.0, 14.0, 2.0
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
    across = scale(0.0, most, 0.0, WIDTH - RIGHT)
    for row, pair in enumerate(pairs):
        top = row * ROW + LABEL
        drawing.text(0, top - 4, pair.label)
        for place, value, css in ((0, pair.measured, "bar chosen"), (1, pair.predicted, "bar")):
            y = top + 2 + place * (BAR + GAP)
            drawing.rectangle(0, y, across(value), BAR, css, f"{pair.label} {show(value)}")
            text = f"{show(value)} {pair.note}" if place else show(value)
            drawing.text(across(value) + 6, y + BAR - 2, text, "small" if place else "small strong")
    return Picture(drawing, "Seconds of a mean step, over the same steps.", LEGEND)

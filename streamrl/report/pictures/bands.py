"""How far each source of doubt may move a cost: a bar for each, and one for all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.report.pictures.drawing import Drawing, Picture, scale, ticks
from streamrl.report.words import dollars

WIDTH = 900.0
LEFT, RIGHT, TOP, ROW = 190.0, 70.0, 6.0, 34.0


@dataclass(frozen=True)
class Range:
    """Between which dollars a cost may lie, for one reason."""

    label: str
    least: float
    most: float
    is_total: bool = False
    """Whether it is all reasons together."""

    @property
    def told(self) -> str:
        """Say it in words."""
        return f"{self.label}: {dollars(self.least)} to {dollars(self.most)}"


def bands_picture(name: str, title: str, value: float, ranges: Sequence[Range]) -> Picture:
    """Draw ranges around a cost of `value` dollars."""
    told = "; ".join(each.told for each in ranges)
    bottom = TOP + ROW * len(ranges)
    drawing = Drawing(name, f"{title}: {dollars(value)}", told, WIDTH, bottom + 30)
    low, high = min(r.least for r in ranges), max(r.most for r in ranges)
    margin = 0.12 * (high - low)
    across = scale(low - margin, high + margin, LEFT, WIDTH - RIGHT)
    drawing.ticks_below(ticks(low - margin, high + margin), across, (TOP, bottom), dollars)
    for row, each in enumerate(ranges):
        start, end, y = across(each.least), across(each.most), TOP + row * ROW + 8
        drawing.text(LEFT - 12, y + 14, each.label, "", "end")
        css = "more" if each.is_total else "less"
        drawing.rectangle(start, y, max(end - start, 2.0), 18, css, each.told)
        if each.is_total:
            drawing.text(start - 6, y + 14, dollars(each.least), "strong", "end")
            drawing.text(end + 6, y + 14, dollars(each.most), "strong")
    drawing.line(across(value), TOP, across(value), bottom, "axis")
    return Picture(drawing, "How far each source of doubt may move them.")

"""What a figure would be if a price, a length or a speed were another: bars to both sides, the widest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.report.pictures.drawing import Drawing, Picture, scale, ticks
from streamrl.report.words import change

WIDTH = 900.0
LEFT, RIGHT, TOP = 200.0, 20.0, 8.0
ROW, BAR = 34.0, 20.0
ROOM = 1.4  # of the widest bar, so that what stands beside it fits
LEAST = 0.0005  # relative change that counts as one


@dataclass(frozen=True)
class Swing:
    """One thing that may be other than assumed."""

    what: str
    less: float | None
    """Relative change of the figure where it is less; None where nobody asked."""
    more: float | None
    note: str = ""
    """What would be chosen then, where that is another plan."""
    is_used: bool = True
    """Whether the figure is of something that uses it at all."""

    @property
    def width(self) -> float:
        """The larger change."""
        return max(abs(self.less or 0.0), abs(self.more or 0.0))


def tornado_picture(name: str, of: str, swings: Sequence[Swing], by: str, source: str) -> Picture:
    """Draw a row for each swing: what a figure would be `of` things that are less and more `by` so much."""
    ordered = sorted(swings, key=lambda swing: -swing.width)
    told = "; ".join(
        f"{s.what}: {by} less gives {_told(s.less)}, {by} more {_told(s.more)}" for s in ordered
    )
    height = TOP + ROW * len(ordered) + 30
    drawing = Drawing(
        name, f"{of[:1].upper()}{of[1:]}, if one thing were {by} less or more", told, WIDTH, height
    )
    reach = max([swing.width for swing in ordered] + [0.01]) * ROOM
    across = scale(-reach, reach, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(ordered)
    drawing.ticks_below(
        ticks(-reach, reach, 7), across, (TOP, bottom), lambda x: change(x) if x else "as planned"
    )
    for row, swing in enumerate(ordered):
        _draw(drawing, swing, TOP + row * ROW + (ROW - BAR) / 2, across, by)
    drawing.line(across(0.0), TOP, across(0.0), bottom, "axis")
    legend = (("less", f"{by} less"), ("more", f"{by} more"))
    return Picture(drawing, f"Each change alone; from {source}.", legend)


def _draw(
    drawing: Drawing, swing: Swing, y: float, across: Callable[[float], float], by: str
) -> None:
    """Draw both bars with their changes at the outer ends: over each other where both go one way, none without a change."""
    drawing.text(LEFT - 12, y + 15, swing.what, "", "end")
    if swing.width < LEAST:
        told = "no change" if swing.is_used else "no change: the plan uses none of it"
        drawing.text(across(0.0) + 8, y + 14, told, "muted small")
        return
    found = [(v, w) for v, w in ((swing.less, "less"), (swing.more, "more")) if v is not None]
    is_one_sided = len(found) == 2 and found[0][0] * found[1][0] > 0
    height = BAR / 2 if is_one_sided else BAR
    for row, (value, word) in enumerate(found):
        start, end = sorted((across(0.0), across(value)))
        told = f"{swing.what} {by} {word}: {change(value)}"
        top = y + row * height if is_one_sided else y
        drawing.rectangle(start, top, max(end - start, 1.0), height, word, told)
        if not is_one_sided:
            _label(drawing, across(value), y, change(value), value)
    if is_one_sided:
        farthest = max((value for value, _ in found), key=abs)
        both = ", ".join(f"{word} {change(value)}" for value, word in found)
        _label(drawing, across(farthest), y, both, farthest)


def _label(drawing: Drawing, x: float, y: float, text: str, value: float) -> None:
    """Write at the outer end of a bar."""
    if value < 0:
        drawing.text(x - 6, y + 14, text, "small", "end")
    else:
        drawing.text(x + 6, y + 14, text, "small")


def _told(value: float | None) -> str:
    return "unknown" if value is None else change(value)

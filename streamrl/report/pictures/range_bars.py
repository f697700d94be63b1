"""Draw bars with ranges: options with their uncertainty, cost ranges by source of error, and the sensitivity tornado."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.report.pictures.drawing import Drawing, Picture, scale, shortened, ticks
from streamrl.report.words import change, dollars

OPTION_WIDTH = 460.0
OPTION_ROW = 44.0  # a line of text above a bar
OPTION_BAR = 16.0
OPTION_ROOM = 106.0  # right of the longest bar, for its value
OVERHANG = 3.0  # left of a label, for letters such as J that extend to the left


@dataclass(frozen=True)
class Bar:
    """One option's value with its lowest and highest value."""

    label: str
    note: str
    value: float
    least: float
    most: float
    is_chosen: bool


def bars_picture(
    name: str, title: str, bars: Sequence[Bar], show: Callable[[float], str], better: str
) -> Picture:
    """Draw a bar in each row, with its range as a line over its end."""
    told = "; ".join(f"{bar.label}: {show(bar.value)}" for bar in bars)
    drawing = Drawing(name, title, f"{better} is better. {told}.", OPTION_WIDTH)
    most = max(max(bar.most, bar.value) for bar in bars)
    across = scale(0.0, most, 0.0, OPTION_WIDTH - OPTION_ROOM)
    for row, bar in enumerate(bars):
        _draw_option(drawing, row * OPTION_ROW + 14, bar, across, show)
    drawing.height = len(bars) * OPTION_ROW
    return Picture(drawing, f"{better} is better. The line over a bar's end is its band.")


def _draw_option(
    drawing: Drawing,
    top: float,
    bar: Bar,
    across: Callable[[float], float],
    show: Callable[[float], str],
) -> None:
    label = shortened(bar.label, 200)
    drawing.text(OVERHANG, top, label, "strong")
    space = OPTION_WIDTH - 12 - len(label) * 8
    drawing.text(OPTION_WIDTH, top, shortened(bar.note, space), "muted small", "end")
    y = top + 7
    told = f"{bar.label}: {show(bar.value)}, {show(bar.least)} to {show(bar.most)}"
    css = "bar chosen" if bar.is_chosen else "bar"
    drawing.rectangle(0, y, across(bar.value), OPTION_BAR, css, told)
    end = across(bar.value)
    if bar.most > bar.least:
        middle, end = y + OPTION_BAR / 2, max(end, across(bar.most))
        drawing.line(across(bar.least), middle, across(bar.most), middle, "whisker")
        for edge in (bar.least, bar.most):
            drawing.line(across(edge), middle - 4, across(edge), middle + 4, "whisker")
    drawing.text(end + 6, y + 13, show(bar.value), "strong")


COST_WIDTH = 900.0
COST_LEFT, COST_RIGHT, COST_TOP, COST_ROW = 190.0, 70.0, 6.0, 34.0


@dataclass(frozen=True)
class Range:
    """The range of a cost in dollars, for one reason."""

    label: str
    least: float
    most: float
    is_total: bool = False
    """Whether all reasons are included."""

    @property
    def told(self) -> str:
        """Return the range in words."""
        return f"{self.label}: {dollars(self.least)} to {dollars(self.most)}"


def bands_picture(name: str, title: str, value: float, ranges: Sequence[Range]) -> Picture:
    """Draw ranges around a cost of `value` dollars."""
    told = "; ".join(each.told for each in ranges)
    bottom = COST_TOP + COST_ROW * len(ranges)
    drawing = Drawing(name, f"{title}: {dollars(value)}", told, COST_WIDTH, bottom + 30)
    low, high = min(r.least for r in ranges), max(r.most for r in ranges)
    margin = 0.12 * (high - low)
    across = scale(low - margin, high + margin, COST_LEFT, COST_WIDTH - COST_RIGHT)
    drawing.ticks_below(ticks(low - margin, high + margin), across, (COST_TOP, bottom), dollars)
    for row, each in enumerate(ranges):
        start, end, y = across(each.least), across(each.most), COST_TOP + row * COST_ROW + 8
        drawing.text(COST_LEFT - 12, y + 14, each.label, "", "end")
        css = "more" if each.is_total else "less"
        drawing.rectangle(start, y, max(end - start, 2.0), 18, css, each.told)
        if each.is_total:
            drawing.text(start - 6, y + 14, dollars(each.least), "strong", "end")
            drawing.text(end + 6, y + 14, dollars(each.most), "strong")
    drawing.line(across(value), COST_TOP, across(value), bottom, "axis")
    return Picture(drawing, "How far each source of doubt may move them.")


TORNADO_WIDTH = 900.0
TORNADO_LEFT, TORNADO_RIGHT, TORNADO_TOP = 200.0, 20.0, 8.0
TORNADO_ROW, TORNADO_BAR = 34.0, 20.0
TORNADO_ROOM = 1.4  # of the widest bar, so that labels next to it fit
LEAST = 0.0005  # smallest relative change that is shown


@dataclass(frozen=True)
class Swing:
    """The effect of one assumption."""

    what: str
    less: float | None
    """Relative change of the figure for a lower value; None if it was not computed."""
    more: float | None
    note: str = ""
    """The plan that would be chosen then, if it is another one."""
    is_used: bool = True
    """Whether the figure depends on the assumption at all."""

    @property
    def width(self) -> float:
        """Return the larger change."""
        return max(abs(self.less or 0.0), abs(self.more or 0.0))


def tornado_picture(name: str, of: str, swings: Sequence[Swing], by: str, source: str) -> Picture:
    """Draw a row for each swing: the figure `of` an option, for each assumption lower and higher `by` a share."""
    ordered = sorted(swings, key=lambda swing: -swing.width)
    told = "; ".join(
        f"{s.what}: {by} less gives {_told(s.less)}, {by} more {_told(s.more)}" for s in ordered
    )
    height = TORNADO_TOP + TORNADO_ROW * len(ordered) + 30
    drawing = Drawing(
        name,
        f"{of[:1].upper()}{of[1:]}, if one thing were {by} less or more",
        told,
        TORNADO_WIDTH,
        height,
    )
    reach = max([swing.width for swing in ordered] + [0.01]) * TORNADO_ROOM
    across = scale(-reach, reach, TORNADO_LEFT, TORNADO_WIDTH - TORNADO_RIGHT)
    bottom = TORNADO_TOP + TORNADO_ROW * len(ordered)
    drawing.ticks_below(
        ticks(-reach, reach, 7),
        across,
        (TORNADO_TOP, bottom),
        lambda x: change(x) if x else "as planned",
    )
    for row, swing in enumerate(ordered):
        _draw_swing(
            drawing,
            swing,
            TORNADO_TOP + row * TORNADO_ROW + (TORNADO_ROW - TORNADO_BAR) / 2,
            across,
            by,
        )
    drawing.line(across(0.0), TORNADO_TOP, across(0.0), bottom, "axis")
    legend = (("less", f"{by} less"), ("more", f"{by} more"))
    return Picture(drawing, f"Each change alone; from {source}.", legend)


def _draw_swing(
    drawing: Drawing, swing: Swing, y: float, across: Callable[[float], float], by: str
) -> None:
    """Draw both bars with their changes at the outer ends. Bars in one direction overlap; no change draws no bar."""
    drawing.text(TORNADO_LEFT - 12, y + 15, swing.what, "", "end")
    if swing.width < LEAST:
        told = "no change" if swing.is_used else "no change: the plan uses none of it"
        drawing.text(across(0.0) + 8, y + 14, told, "muted small")
        return
    found = [(v, w) for v, w in ((swing.less, "less"), (swing.more, "more")) if v is not None]
    is_one_sided = len(found) == 2 and found[0][0] * found[1][0] > 0
    height = TORNADO_BAR / 2 if is_one_sided else TORNADO_BAR
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

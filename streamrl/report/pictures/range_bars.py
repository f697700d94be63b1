"""Draw bars with ranges: options with their uncertainty, cost ranges by source of error, and the sensitivity tornado."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple

from streamrl.report.pictures.drawing import Drawing, Picture, scale, shortened, ticks, width_of
from streamrl.report.words import change, round_dollars

OPTION_WIDTH = 460.0
OPTION_ROW = 44.0  # a line of text above a bar
OPTION_LINE = 14.0  # a further line of text
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
    """Draw a bar for each option, with its range as a line over its end. A long note has lines of its own."""
    told = "; ".join(f"{bar.label}: {show(bar.value)}" for bar in bars)
    drawing = Drawing(name, title, f"{better} is better. {told}.", OPTION_WIDTH)
    most = max(max(bar.most, bar.value) for bar in bars)
    across = scale(0.0, most, 0.0, OPTION_WIDTH - OPTION_ROOM)
    for bar in bars:
        top = drawing.height + OPTION_LINE
        for line in _draw_label(drawing, top, bar):
            top += OPTION_LINE
            drawing.text(OVERHANG, top, line, "muted small")
        _draw_option(drawing, top + 7, bar, across, show)
        drawing.height = top + OPTION_ROW - OPTION_LINE
    return Picture(drawing, f"{better} is better. The line over a bar's end is its band.")


def _draw_label(drawing: Drawing, top: float, bar: Bar) -> list[str]:
    """Write the name of an option with its note at the right, and return the lines of a note that is too long."""
    label = shortened(bar.label, 200)
    drawing.text(OVERHANG, top, label, "strong")
    if width_of(bar.note) <= OPTION_WIDTH - 12 - len(label) * 8:
        drawing.text(OPTION_WIDTH, top, bar.note, "muted small", "end")
        return []
    return wrap(bar.note, int(OPTION_WIDTH / width_of(" ")))


def _draw_option(
    drawing: Drawing,
    y: float,
    bar: Bar,
    across: Callable[[float], float],
    show: Callable[[float], str],
) -> None:
    """Draw the bar, its range and its value."""
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


class Layout(NamedTuple):
    """The room of a chart whose rows have a label each."""

    width: float
    left: float
    """Where bars begin."""
    right: float
    """Room beyond the bars."""
    above: float
    """Height of a label above its bar; 0 where labels are on the left."""
    most_ticks: int

    def write_label(self, drawing: Drawing, y: float, text: str) -> None:
        """Write the label of a bar whose upper end is at `y`."""
        if self.above:
            drawing.text(0, y - 5, text)
        else:
            drawing.text(self.left - 12, y + 14, text, "", "end")

    def draw_axis(self, drawing: Drawing, x: float, rows: Sequence[float], bottom: float) -> None:
        """Draw a line at `x` down to `bottom`, beside the bars that begin at `rows`; it spares labels above them."""
        if not self.above:
            drawing.line(x, rows[0] - 8, x, bottom, "axis")
            return
        for y in rows:
            drawing.line(x, y - 2, x, y + self.above + 2, "axis")


COST_WIDE, COST_NARROW = Layout(900.0, 190.0, 70.0, 0.0, 6), Layout(400.0, 40.0, 46.0, 18.0, 4)
"""On a desk, and on a phone, where labels are above the bars."""
COST_TOP, COST_ROW = 6.0, 34.0


@dataclass(frozen=True)
class Range:
    """The range of a cost in dollars, for one reason."""

    label: str
    least: float
    most: float
    is_total: bool = False
    """Whether all reasons are included."""

    def told(self, show: Callable[[float], str]) -> str:
        """Return the range in words."""
        return f"{self.label}: {show(self.least)} to {show(self.most)}"


def bands_picture(
    name: str, title: str, value: float, ranges: Sequence[Range], show: Callable[[float], str]
) -> Picture:
    """Draw ranges around a cost of `value` dollars, which `show` writes."""
    wide, narrow = (
        _bands_drawing(each_name, f"{title}: {show(value)}", value, ranges, show, layout)
        for each_name, layout in ((name, COST_WIDE), (f"{name}-narrow", COST_NARROW))
    )
    return Picture(wide, "How far each source of doubt may move them.", narrow=narrow)


def _bands_drawing(
    name: str,
    title: str,
    value: float,
    ranges: Sequence[Range],
    show: Callable[[float], str],
    layout: Layout,
) -> Drawing:
    row_height = COST_ROW + layout.above
    bottom = COST_TOP + row_height * len(ranges)
    told = "; ".join(each.told(show) for each in ranges)
    drawing = Drawing(name, title, told, layout.width, bottom + 30)
    low, high = min(r.least for r in ranges), max(r.most for r in ranges)
    margin = 0.12 * (high - low)
    across = scale(low - margin, high + margin, layout.left, layout.width - layout.right)
    marks = ticks(low - margin, high + margin, layout.most_ticks)
    drawing.ticks_below(marks, across, (COST_TOP, bottom), round_dollars)
    rows = [COST_TOP + row * row_height + 8 + layout.above for row in range(len(ranges))]
    for y, each in zip(rows, ranges, strict=True):
        layout.write_label(drawing, y, each.label)
        _draw_range(drawing, y, each, across, show)
    layout.draw_axis(drawing, across(value), rows, bottom)
    return drawing


def _draw_range(
    drawing: Drawing,
    y: float,
    each: Range,
    across: Callable[[float], float],
    show: Callable[[float], str],
) -> None:
    start, end = across(each.least), across(each.most)
    css = "more" if each.is_total else "less"
    drawing.rectangle(start, y, max(end - start, 2.0), 18, css, each.told(show))
    if each.is_total:
        drawing.text(start - 6, y + 14, show(each.least), "strong", "end")
        drawing.text(end + 6, y + 14, show(each.most), "strong")


TORNADO_WIDE, TORNADO_NARROW = Layout(900.0, 200.0, 20.0, 0.0, 7), Layout(400.0, 8.0, 8.0, 18.0, 5)
TORNADO_TOP, TORNADO_ROW, TORNADO_BAR = 8.0, 34.0, 20.0
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
    title = f"{of[:1].upper()}{of[1:]}, if one thing were {by} less or more"
    wide, narrow = (
        _tornado_drawing(each_name, title, ordered, by, layout)
        for each_name, layout in ((name, TORNADO_WIDE), (f"{name}-narrow", TORNADO_NARROW))
    )
    legend = (("less", f"{by} less"), ("more", f"{by} more"))
    return Picture(wide, f"Each change alone; from {source}.", legend, narrow)


def _tornado_drawing(
    name: str, title: str, ordered: Sequence[Swing], by: str, layout: Layout
) -> Drawing:
    told = "; ".join(
        f"{s.what}: {by} less gives {_told(s.less)}, {by} more {_told(s.more)}" for s in ordered
    )
    row_height = TORNADO_ROW + layout.above
    bottom = TORNADO_TOP + row_height * len(ordered)
    drawing = Drawing(name, title, told, layout.width, bottom + 30)
    reach = max([swing.width for swing in ordered] + [0.01]) * TORNADO_ROOM
    across = scale(-reach, reach, layout.left, layout.width - layout.right)
    drawing.ticks_below(
        ticks(-reach, reach, layout.most_ticks),
        across,
        (TORNADO_TOP, bottom),
        lambda x: change(x) if x else "as planned",
    )
    first = TORNADO_TOP + layout.above + (TORNADO_ROW - TORNADO_BAR) / 2
    rows = [first + row * row_height for row in range(len(ordered))]
    for y, swing in zip(rows, ordered, strict=True):
        layout.write_label(drawing, y, swing.what)
        _draw_swing(drawing, swing, y, across, by)
    layout.draw_axis(drawing, across(0.0), rows, bottom)
    return drawing


def _draw_swing(
    drawing: Drawing, swing: Swing, y: float, across: Callable[[float], float], by: str
) -> None:
    """Draw both bars with their changes at the outer ends. Bars in one direction overlap; no change draws no bar."""
    if swing.width < LEAST:
        told = "no change" if swing.is_used else "no change: unused"
        drawing.text(across(0.0) + 8, y + 14, told, "muted small")
        return
    found = [(v, w) for v, w in ((swing.less, "less"), (swing.more, "more")) if v is not None]
    moved = [(value, word) for value, word in found if abs(value) >= LEAST]
    is_one_sided = len(moved) == 2 and moved[0][0] * moved[1][0] > 0
    height = TORNADO_BAR / 2 if is_one_sided else TORNADO_BAR
    for row, (value, word) in enumerate(moved):
        start, end = sorted((across(0.0), across(value)))
        told = f"{swing.what} {by} {word}: {change(value)}"
        top = y + row * height if is_one_sided else y
        drawing.rectangle(start, top, max(end - start, 1.0), height, word, told)
        if not is_one_sided:
            _label(drawing, across(value), y, change(value), value)
    if is_one_sided:
        farthest = max((value for value, _ in moved), key=abs)
        both = ", ".join(f"{word} {change(value)}" for value, word in moved)
        _label(drawing, across(farthest), y, both, farthest)
    for value, word in found:
        if (value, word) not in moved:  # its text is on the side without a bar
            _label(drawing, across(0.0), y, f"{by} {word}: no change", -moved[0][0])


def _label(drawing: Drawing, x: float, y: float, text: str, value: float) -> None:
    """Write at the outer end of a bar."""
    if value < 0:
        drawing.text(x - 6, y + 14, text, "small", "end")
    else:
        drawing.text(x + 6, y + 14, text, "small")


def _told(value: float | None) -> str:
    return "unknown" if value is None else change(value)

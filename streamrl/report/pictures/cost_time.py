"""Draw the dollars of a whole run against its time: plans with names, others as small dots, and the front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from streamrl.report.pictures.drawing import (
    SMALL,
    Anchor,
    Box,
    Drawing,
    Picture,
    covers,
    line_box,
    scale,
    text_box,
    ticks,
    width_of,
)
from streamrl.report.words import dollars, round_dollars

WIDTH, HEIGHT = 900.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 28.0, 30.0, 54.0
MARGIN = 0.08  # of the range, around the outermost points
MINUTE, FEW_HOURS = 1 / 60, 2.0
"""Hours of a minute, and hours below which the axis is in minutes."""
PLACES: tuple[tuple[float, float, Anchor], ...] = (
    (11, -9, "start"),
    (11, 19, "start"),
    (-11, -9, "end"),
    (-11, 19, "end"),
    (11, -24, "start"),
    (-11, 34, "end"),
    (-11, -24, "end"),
    (11, 34, "start"),
    (11, -39, "start"),
    (-11, 49, "end"),
    (-11, -39, "end"),
    (11, 49, "start"),
)
"""Where the name of a point may be: the first place that covers no other name, no line and no edge."""
LEGEND = (("dot chosen", "recommended"), ("dot on-front", "an option"), ("dot", "another plan"))
BEYOND = ("dot beyond", "exceeds a limit")
FAR = 2.0  # times the largest value: a limit beyond is not drawn
CAPTION = (
    "Better is left and low. The dashed line joins the plans that no other one here beats in both. "
    "Model errors move all points together, mostly."
)


@dataclass(frozen=True)
class PlanPoint:
    """One plan."""

    name: str
    """Text next to its point; empty for a small dot."""
    told: str
    """Tooltip."""
    hours: float
    dollars: float
    is_chosen: bool = False


def cost_time_picture(
    name: str,
    points: Sequence[PlanPoint],
    deadline: float | None = None,
    budget: float | None = None,
) -> Picture:
    """Draw every plan at the hours and dollars of its whole run, with lines at the limits.

    Args:
        name: the name of the picture.
        points: the plans.
        deadline: most hours of the whole run.
        budget: most dollars of the whole run.
    """
    hours = _with_limit([p.hours for p in points], deadline)
    paid = _with_limit([p.dollars for p in points], budget)
    told = "; ".join(point.told for point in points if point.name)
    drawing = Drawing(name, "Cost against time of the whole run", told, WIDTH, HEIGHT)
    across = scale(*_range(hours), LEFT, WIDTH - RIGHT)
    up = scale(*_range(paid), HEIGHT - BOTTOM, TOP)
    _draw_axes(drawing, _range(hours), _range(paid), across, up)
    taken: list[Box] = []
    if deadline is not None and deadline in hours:
        taken += _draw_deadline(drawing, deadline, across(deadline))
    if budget is not None and budget in paid:
        taken += _draw_budget(drawing, budget, up(budget))
    has_limits = bool(taken)
    corners = [(across(p.hours), up(p.dollars)) for p in undominated(points)]
    front = list(_stairs(corners))
    drawing.polyline(front, "front")
    taken += [line_box(*ends) for ends in pairwise(front)]
    for point in sorted(points, key=lambda p: (p.is_chosen, bool(p.name))):
        kind = "dot on-front" if point.name else "dot"
        if point.hours > (deadline or inf) or point.dollars > (budget or inf):
            kind = "dot beyond"
        kind = "dot chosen" if point.is_chosen else kind
        size = 7 if point.name else 4
        drawing.dot(across(point.hours), up(point.dollars), size, kind, point.told)
    _write_names(drawing, points, across, up, taken)
    legend = LEGEND if any(not p.name for p in points) else LEGEND[:2]
    return Picture(drawing, CAPTION, (*legend, BEYOND) if has_limits else legend)


def _with_limit(values: list[float], limit: float | None) -> list[float]:
    """Return values with a limit among them, unless it is far above all of them."""
    return [*values, limit] if limit is not None and limit <= FAR * max(values) else values


def _draw_deadline(drawing: Drawing, hours: float, x: float) -> list[Box]:
    """Draw a line at the deadline, and return the space of both the line and its label."""
    text, y = f"deadline {hours:,.4g} hours", TOP + 12
    drawing.line(x, TOP, x, HEIGHT - BOTTOM, "limit")
    wide = width_of(text, SMALL)
    is_right = x - wide - 6 > LEFT
    drawing.text(x - 6 if is_right else x + 6, y, text, "small", "end" if is_right else "start")
    label = text_box(x - wide - 6, x, y) if is_right else text_box(x, x + wide + 6, y)
    return [label, line_box((x, TOP), (x, HEIGHT - BOTTOM))]


def _draw_budget(drawing: Drawing, paid: float, y: float) -> list[Box]:
    """Draw a line at the budget, and return the space of both the line and its label."""
    text = f"budget {dollars(paid)}"
    drawing.line(LEFT, y, WIDTH - RIGHT, y, "limit")
    drawing.text(LEFT + 6, y - 6, text, "small")
    label = text_box(LEFT, LEFT + 6 + width_of(text, SMALL), y - 6)
    return [label, line_box((LEFT, y), (WIDTH - RIGHT, y))]


def undominated(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """Return the plans that no other beats in both hours and dollars, the fastest first."""
    kept: list[PlanPoint] = []
    for point in sorted(points, key=lambda p: (p.hours, p.dollars)):
        if not kept or point.dollars < kept[-1].dollars:
            kept.append(point)
    return kept


def _stairs(corners: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the border of the area that the front beats."""
    for place, (x, y) in enumerate(corners):
        if place:
            yield x, corners[place - 1][1]
        yield x, y


def _draw_axes(
    drawing: Drawing,
    hours: tuple[float, float],
    paid: tuple[float, float],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> None:
    floor = HEIGHT - BOTTOM
    unit, word = (MINUTE, "minutes") if hours[1] < FEW_HOURS else (1.0, "hours")
    marks = [mark * unit for mark in ticks(hours[0] / unit, hours[1] / unit)]
    drawing.ticks_below(marks, across, (TOP, floor), lambda mark: f"{mark / unit:,.4g}")
    drawing.ticks_beside(ticks(*paid), up, (LEFT, WIDTH - RIGHT), round_dollars)
    drawing.text(WIDTH - RIGHT, HEIGHT - 10, f"{word} of the whole run", "small", "end")
    drawing.text(0, 14, "dollars of the whole run", "small")


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.1 * high or 1.0
    return max(0.0, low - margin), high + margin


def _write_names(
    drawing: Drawing,
    points: Sequence[PlanPoint],
    across: Callable[[float], float],
    up: Callable[[float], float],
    lines: Sequence[Box],
) -> None:
    """Write the names, each where it covers no other name, no line and not the edge of the drawing."""
    taken = [_dot_box(across(p.hours), up(p.dollars)) for p in points if p.name]
    taken += lines
    for point in sorted(points, key=lambda p: not p.is_chosen):
        if not point.name:
            continue
        x, y, wide = across(point.hours), up(point.dollars), width_of(point.name, SMALL + 1)
        for dx, dy, anchor in PLACES:
            start = x + dx if anchor == "start" else x + dx - wide
            box = text_box(start, start + wide, y + dy)
            if start >= LEFT and start + wide <= WIDTH and not covers(box, taken):
                break
        taken.append(box)
        drawing.text(x + dx, y + dy, point.name, "strong" if point.is_chosen else "", anchor)


def _dot_box(x: float, y: float) -> Box:
    """Return the space of a point with a name."""
    return x - 7, x + 7, y - 7, y + 7

"""Draw the dollars of a whole run against its time: plans with names, others as small dots, and the front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.report.pictures.drawing import (
    SMALL,
    Anchor,
    Drawing,
    Picture,
    scale,
    ticks,
    width_of,
)
from streamrl.report.words import dollars

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
)
"""Where the name of a point may stand: the first place that covers no other name and no edge."""
LEGEND = (("dot chosen", "recommended"), ("dot on-front", "an option"), ("dot", "another plan"))
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


def cost_time_picture(name: str, points: Sequence[PlanPoint]) -> Picture:
    """Draw every plan at the hours and dollars of its whole run."""
    told = "; ".join(point.told for point in points if point.name)
    drawing = Drawing(name, "Cost against time of the whole run", told, WIDTH, HEIGHT)
    across = scale(*_range([p.hours for p in points]), LEFT, WIDTH - RIGHT)
    up = scale(*_range([p.dollars for p in points]), HEIGHT - BOTTOM, TOP)
    _draw_axes(drawing, points, across, up)
    corners = [(across(p.hours), up(p.dollars)) for p in undominated(points)]
    drawing.polyline(list(_stairs(corners)), "front")
    for point in sorted(points, key=lambda p: (p.is_chosen, bool(p.name))):
        kind = "dot chosen" if point.is_chosen else "dot on-front" if point.name else "dot"
        size = 7 if point.name else 4
        drawing.dot(across(point.hours), up(point.dollars), size, kind, point.told)
    _write_names(drawing, points, across, up)
    return Picture(drawing, CAPTION, LEGEND if any(not p.name for p in points) else LEGEND[:2])


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
    points: Sequence[PlanPoint],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> None:
    floor = HEIGHT - BOTTOM
    hours, paid = _range([p.hours for p in points]), _range([p.dollars for p in points])
    unit, word = (MINUTE, "minutes") if hours[1] < FEW_HOURS else (1.0, "hours")
    marks = [mark * unit for mark in ticks(hours[0] / unit, hours[1] / unit)]
    drawing.ticks_below(marks, across, (TOP, floor), lambda mark: f"{mark / unit:,.4g}")
    drawing.ticks_beside(ticks(*paid), up, (LEFT, WIDTH - RIGHT), dollars)
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
) -> None:
    """Write the names, each where it covers neither another name nor the edge of the drawing."""
    taken = [(across(p.hours) - 7, across(p.hours) + 7, up(p.dollars)) for p in points if p.name]
    for point in sorted(points, key=lambda p: not p.is_chosen):
        if not point.name:
            continue
        x, y, wide = across(point.hours), up(point.dollars), width_of(point.name, SMALL + 1)
        for dx, dy, anchor in PLACES:
            start = x + dx if anchor == "start" else x + dx - wide
            box = (start, start + wide, y + dy - 4)
            if start >= LEFT and start + wide <= WIDTH and not _covers(box, taken):
                break
        taken.append(box)
        drawing.text(x + dx, y + dy, point.name, "strong" if point.is_chosen else "", anchor)


def _covers(box: tuple[float, float, float], taken: Sequence[tuple[float, float, float]]) -> bool:
    start, end, y = box
    return any(start < right and left < end and abs(y - at) < 14 for left, right, at in taken)

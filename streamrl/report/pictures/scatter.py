"""Speed against cost: every option with its mark, and the line of the undominated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from streamrl.report.pictures.drawing import (
    Anchor,
    Box,
    Drawing,
    Picture,
    covers,
    line_box,
    scale,
    text_box,
    ticks,
)
from streamrl.report.words import dollars, round_dollars

WIDTH, NARROW, HEIGHT = 900.0, 400.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 28.0, 52.0
NEAR = 20.0  # units that a point's mark takes: marks of closer points would overlap
BESIDE = 11.0  # units from a point to its mark
MARGIN = 0.08  # of the range, around the outermost points
CAPTION = "Each mark is an option, at its simulated or executed figures. The line joins those that none beats in both."
LEGEND = (("dot chosen", "chosen"), ("dot on-front", "on the front"), ("dot", "beaten in both"))


@dataclass(frozen=True)
class Point:
    """One option."""

    mark: str
    """Its number or letter."""
    label: str
    speed: float
    """Trained tokens per second."""
    cost: float
    """Dollars per million trained tokens."""
    is_chosen: bool


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both speed and cost, the fastest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.speed, point.cost)):
        if not kept or point.cost < kept[-1].cost:
            kept.append(point)
    return kept


def scatter_picture(name: str, points: Sequence[Point]) -> Picture:
    """Draw every option at its speed and cost."""
    front = front_of(points)
    told = "; ".join(
        f"{p.mark} {p.label}: {p.speed:,.0f} tokens/s at {dollars(p.cost)} per million"
        for p in points
    )
    title = "Speed against cost of every option"
    wide = Drawing(name, title, told, WIDTH, HEIGHT)
    narrow = Drawing(f"{name}-narrow", title, told, NARROW, HEIGHT)
    for drawing in (wide, narrow):
        _draw_points(drawing, points, front)
    return Picture(wide, CAPTION, LEGEND, narrow)


def _draw_points(drawing: Drawing, points: Sequence[Point], front: Sequence[Point]) -> None:
    across, up = _axes(drawing, points)
    corners = [(across(p.speed), up(p.cost)) for p in front]
    line = stairs(corners)
    drawing.polyline(line, "front")
    taken = [line_box(*ends) for ends in pairwise(line)]
    for cluster in _clusters(points, across, up, drawing.width):
        _draw_cluster(drawing, cluster, {p.mark for p in front}, across, up, taken)


def _axes(
    drawing: Drawing, points: Sequence[Point]
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    speeds, costs = [p.speed for p in points], [p.cost for p in points]
    end, most_ticks = drawing.width - RIGHT, 6 if drawing.width == WIDTH else 4
    across = scale(*_range(speeds), LEFT, end)
    up = scale(*_range(costs), HEIGHT - BOTTOM, TOP)
    floor = HEIGHT - BOTTOM
    marks = ticks(*_range(speeds), most_ticks)
    drawing.ticks_below(marks, across, (TOP, floor), "{:,.0f}".format)
    drawing.ticks_beside(ticks(*_range(costs)), up, (LEFT, end), round_dollars)
    label = "tokens trained on per second → (better: right and low)"
    drawing.text(end, HEIGHT - 10, label, "small", "end")
    drawing.text(0, 14, "↑ dollars per million tokens", "small")
    return across, up


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.1 * high or 1.0
    return low - margin, high + margin


def stairs(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the border of the area that the front beats, as steps from the fastest point to the slowest."""
    path = corners[:1]
    for (_, y1), (x2, y2) in pairwise(corners):
        path += [(x2, y1), (x2, y2)]
    return path


def _clusters(
    points: Sequence[Point],
    across: Callable[[float], float],
    up: Callable[[float], float],
    width: float,
) -> list[list[Point]]:
    """Group points whose marks would overlap; the marks of a group form a row at its rightmost point."""
    clusters = [[point] for point in points]

    def overlap(one: list[Point], other: list[Point]) -> bool:
        (x, y), (u, v) = (_place(each, across, up) for each in (one, other))
        first, second = _start(x, len(one), width), _start(u, len(other), width)
        is_beside = first < second + NEAR * len(other) and second < first + NEAR * len(one)
        return is_beside and abs(y - v) < NEAR

    while pair := next((p for p in combinations(clusters, 2) if overlap(*p)), None):
        one, other = pair
        clusters.remove(other)
        one += other
    return clusters


def _place(
    cluster: list[Point], across: Callable[[float], float], up: Callable[[float], float]
) -> tuple[float, float]:
    """Return the position of the rightmost point of a cluster."""
    right = max(cluster, key=lambda point: point.speed)
    return across(right.speed), up(right.cost)


def _marks_at(x: float, width: float) -> tuple[float, Anchor]:
    """Return the position and anchor of marks next to a point; at the right border, they are on its left."""
    return (x - BESIDE, "end") if x > width - RIGHT - 90 else (x + BESIDE, "start")


def _start(x: float, count: int, width: float) -> float:
    """Return the left end of the marks of `count` points."""
    beside, anchor = _marks_at(x, width)
    return beside - NEAR * count if anchor == "end" else beside


def _draw_cluster(
    drawing: Drawing,
    cluster: list[Point],
    front: set[str],
    across: Callable[[float], float],
    up: Callable[[float], float],
    taken: Sequence[Box],
) -> None:
    """Draw points and their marks, which are below their usual place if a line is there."""
    for point in sorted(cluster, key=lambda point: point.is_chosen):
        css = "dot chosen" if point.is_chosen else "dot on-front" if point.mark in front else "dot"
        told = f"{point.mark} {point.label}: {point.speed:,.0f} tokens/s, {dollars(point.cost)}"
        drawing.dot(across(point.speed), up(point.cost), 6, css, told)
    x, y = _place(cluster, across, up)
    marks = " ".join(point.mark for point in cluster)
    beside, baseline, anchor = _free_place(x, y, len(cluster), drawing.width, taken)
    drawing.text(beside, baseline, marks, "strong", anchor)


def _free_place(
    x: float, y: float, count: int, width: float, taken: Sequence[Box]
) -> tuple[float, float, Anchor]:
    """Return where the marks of `count` points are: beside the point, where no line is if there is such a place."""
    usual, wide = _marks_at(x, width), NEAR * count
    other: tuple[float, Anchor] = (
        (x - BESIDE, "end") if usual[1] == "start" else (x + BESIDE, "start")
    )
    for beside, anchor in (usual, other):
        left = beside - wide if anchor == "end" else beside
        for baseline in (y - 8, y + 18):
            is_inside = left >= LEFT and left + wide <= width
            if is_inside and not covers(text_box(left, left + wide, baseline), taken):
                return beside, baseline, anchor
    return usual[0], y - 8, usual[1]

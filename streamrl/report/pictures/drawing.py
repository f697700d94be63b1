"""A figure as shapes with classes: the template writes it as SVG, the style sheet gives it colours in light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil, floor, log10

SMALL, LARGE = 12, 14  # sizes of text, in units of a drawing
WIDTH_OF_CHARACTER = 0.56  # of its size, on average in the fonts that browsers take for sans-serif


@dataclass(frozen=True)
class Shape:
    """One SVG element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    title: str = ""
    """What a pointer that rests on it is told."""


@dataclass
class Drawing:
    """An SVG figure; every length is in units of its width."""

    name: str
    """Its id in the page."""
    title: str
    description: str
    """What it shows, for who cannot see it."""
    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def rectangle(
        self, x: float, y: float, width: float, height: float, css: str, title: str = ""
    ) -> None:
        """Add a rectangle, from its upper left corner."""
        box = {"x": x, "y": y, "width": max(width, 0.0), "height": height}
        self._add("rect", css, box, title=title)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """Add a straight line."""
        self._add("line", css, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})

    def polyline(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """Add a line through points."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(Shape("polyline", {"class": css, "points": text}))

    def dot(self, x: float, y: float, radius: float, css: str, title: str = "") -> None:
        """Add a circle."""
        self._add("circle", css, {"cx": x, "cy": y, "r": radius}, title=title)

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """Add text whose baseline is at `y`, and whose start, middle or end is at `x`."""
        attributes = {"class": f"t {css}".strip(), "text-anchor": anchor}
        place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
        self.shapes.append(Shape("text", {**place, **attributes}, text))

    def _add(self, tag: str, css: str, numbers: dict[str, float], title: str = "") -> None:
        attributes = {key: f"{value:.1f}" for key, value in numbers.items()}
        self.shapes.append(Shape(tag, {"class": css, **attributes}, title=title))


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Give the function that puts values from `low` to `high` between two places."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Give round values between two, at most so many."""
    span = high - low
    if span <= 0:
        return [low]
    size = 10 ** floor(log10(span / most))
    step = next(size * n for n in (1, 2, 2.5, 5, 10, 20) if span / (size * n) <= most - 1)
    first = ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, floor(high / step + 1e-9) + 1)]


def shortened(text: str, width: float, size: float = SMALL) -> str:
    """Cut text that would be wider, and end it in an ellipsis."""
    most = int(width / (size * WIDTH_OF_CHARACTER))
    return text if len(text) <= most else text[: most - 1].rstrip(" ,(") + "…"

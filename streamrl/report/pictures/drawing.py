"""A picture as shapes with classes: `svg` writes it into the report, `canvas` draws it with matplotlib, `style` colours both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Literal, TypeAlias

SMALL, LARGE = 12, 14  # sizes of text, in units of a drawing
WIDTH_OF_CHARACTER = 0.56  # of its size, on average in the fonts that browsers take for sans-serif

Anchor: TypeAlias = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box, from its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    css: str
    title: str = ""
    """What a pointer that rests on it is told."""


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    css: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    css: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text whose baseline is at `y`, and whose start, middle or end is at `x`."""

    x: float
    y: float
    text: str
    css: str = ""
    anchor: Anchor = "start"


Shape: TypeAlias = Rectangle | Polyline | Dot | Text


@dataclass
class Drawing:
    """Shapes, later ones over earlier ones; y grows downwards, and a unit is a pixel of the page or a point of print."""

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
        self.shapes.append(Rectangle(x, y, max(width, 0.0), height, css, title))

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """Add a straight line."""
        self.shapes.append(Polyline(((x1, y1), (x2, y2)), css))

    def polyline(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """Add a line through points."""
        self.shapes.append(Polyline(tuple(points), css))

    def dot(self, x: float, y: float, radius: float, css: str, title: str = "") -> None:
        """Add a circle."""
        self.shapes.append(Dot(x, y, radius, css, title))

    def text(self, x: float, y: float, text: str, css: str = "", anchor: Anchor = "start") -> None:
        """Add text whose baseline is at `y`, and whose start, middle or end is at `x`."""
        self.shapes.append(Text(x, y, text, css, anchor))

    def ticks_below(
        self,
        values: Iterable[float],
        across: Callable[[float], float],
        rows: tuple[float, float],
        show: Callable[[float], str],
        css: str = "grid",
    ) -> None:
        """Draw a line from the top to the bottom of `rows` at each value, and write it underneath."""
        top, bottom = rows
        for value in values:
            self.line(across(value), top, across(value), bottom, css)
            self.text(across(value), bottom + 18, show(value), "muted small", "middle")

    def ticks_beside(
        self,
        values: Iterable[float],
        up: Callable[[float], float],
        columns: tuple[float, float],
        show: Callable[[float], str],
    ) -> None:
        """Draw a line from the left to the right of `columns` at each value, and write it to its left."""
        left, right = columns
        for value in values:
            self.line(left, up(value), right, up(value), "grid")
            self.text(left - 8, up(value) + 4, show(value), "muted small", "end")


@dataclass(frozen=True)
class Picture:
    """A drawing, what is said under its title, and what its colours mean."""

    drawing: Drawing
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    """Classes of a swatch, and what it stands for; an entry without classes is a heading."""


SWATCH = (16.0, 12.0)
KEY_WIDTH = 28.0  # of the swatch of a line, so that its dashes can be told apart


def swatch(css: str, x: float = 0.0, y: float = 0.0) -> tuple[float, list[Shape]]:
    """Return the width and the shapes of a legend's sample of some classes, from its upper left corner.

    `key …` is a line with a point, `dot …` a point, `… hatched` a hatched box, all else a box.
    """
    width, height = SWATCH
    if not css:
        return 0.0, []
    if css.startswith("key "):
        _, colour, *dashes = css.split()
        ends = ((x, y + height / 2), (x + KEY_WIDTH, y + height / 2))
        point = Dot(x + KEY_WIDTH / 2, y + height / 2, 3.5, f"point {colour}")
        return KEY_WIDTH, [Polyline(ends, " ".join(["curve", colour, *dashes])), point]
    if css.startswith("dot"):
        return width, [Dot(x + width / 2, y + height / 2, 5.0, css)]
    box = Rectangle(x, y, width, height, css.removesuffix(" hatched"))
    hatch = Rectangle(x, y, width, height, "hatch")
    return width, [box, hatch] if css.endswith(" hatched") else [box]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function that puts values from `low` to `high` between two places."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two, at most so many."""
    span = high - low
    if span <= 0:
        return [low]
    size = 10 ** floor(log10(span / most))
    step = next(size * n for n in (1, 2, 2.5, 5, 10, 20) if span / (size * n) <= most - 1)
    first = ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, floor(high / step + 1e-9) + 1)]


def width_of(text: str, size: float = SMALL) -> float:
    """Return about how wide a text is."""
    return len(text) * size * WIDTH_OF_CHARACTER


def shortened(text: str, width: float, size: float = SMALL) -> str:
    """Cut text that would be wider, and end it in an ellipsis."""
    most = int(width / (size * WIDTH_OF_CHARACTER))
    return text if len(text) <= most else text[: most - 1].rstrip(" ,(") + "…"

"""Describe a picture as shapes with style classes, and write the shapes as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, floor, log10
from typing import Literal, NamedTuple, TypeAlias, TypedDict, assert_never


class Colour(NamedTuple):
    """One colour of a picture."""

    light: str
    dark: str


class Style(TypedDict, total=False):
    """Properties as in CSS; `fill` and `stroke` name a colour, or are none."""

    fill: str
    fill_opacity: float
    stroke: str
    stroke_opacity: float
    stroke_width: float
    stroke_dasharray: tuple[float, ...]
    font_size: float
    font_weight: int


# The palette of Okabe and Ito with neighbouring colours, which colour-blind people can distinguish.
# An activity, or a cause of waiting, has the same colour everywhere.
ACTIVITIES = {
    "generate": Colour("#0072B2", "#3d9bd9"),
    "train": Colour("#D55E00", "#D55E00"),
    "score": Colour("#E69F00", "#E69F00"),
    "sync": Colour("#009E73", "#009E73"),
    "push": Colour("#56B4E9", "#56B4E9"),
    "checkpoint": Colour("#F0E442", "#F0E442"),
    "start-up": Colour("#999999", "#8a929b"),
    "prefill": Colour("#003C5F", "#7f9fd6"),
    "recomputed-prefix": Colour("#5E2750", "#c08bb5"),
    "decode": Colour("#0072B2", "#2d8cc9"),
    "underfilled": Colour("#8EC1E5", "#24587c"),
    "verify": Colour("#6A3D9A", "#b295d6"),
    "failure": Colour("#000000", "#f5f7f9"),
    "switch": Colour("#E31A1C", "#f16b6d"),
    "kv-transfer": Colour("#FB9A99", "#b86b6a"),
    "resize": Colour("#5B3A1E", "#a5825f"),
    "skew": Colour("#CC79A7", "#CC79A7"),
    "pipeline": Colour("#C9C9C9", "#7d858e"),
    "staleness": Colour("#8A5A83", "#a9769f"),
    "verifier": Colour("#A6761D", "#A6761D"),
    "tool": Colour("#E7298A", "#ef6bb0"),
    "environment-start": Colour("#F4B6C2", "#8c4a5c"),
    "backpressure": Colour("#7FD0C0", "#7FD0C0"),
    "evaluate": Colour("#117733", "#4fae6f"),
    "evaluation": Colour("#A9D5B5", "#2f6b45"),
    "wind-down": Colour("#d9c79b", "#85764c"),
}
SERIES = (
    Colour("#0072b2", "#56b4e9"),
    Colour("#c75000", "#f0894a"),
    Colour("#00805d", "#3cc79d"),
    Colour("#a8437f", "#e58fc0"),
    Colour("#6b6f1d", "#cdd165"),
    Colour("#444c56", "#b7c0ca"),
)
"""For lines and groups of bars; dark enough to distinguish in print."""
COLOURS = {
    "paper": Colour("#ffffff", "#14181d"),
    "ink": Colour("#1b1f24", "#e8ebef"),
    "muted": Colour("#57606a", "#a3adb8"),
    "grid": Colour("#e6e9ed", "#2a3038"),
    "lane": Colour("#eef1f4", "#22282f"),
    "bar": Colour("#8fb3cf", "#43607a"),
    "best": Colour("#0072b2", "#3d9bd9"),
    "less": Colour("#4f9bcb", "#3d8fc4"),
    "more": Colour("#d98344", "#c9793c"),
    **{f"s-{index}": colour for index, colour in enumerate(SERIES)},
    **{f"c-{name}": colour for name, colour in ACTIVITIES.items()},
}
DASHES = ("", "dashed", "dotted", "dash-dot")
"""Classes that distinguish lines of one colour."""
LEVELS = 5
"""Number of shades of one colour."""
STYLES: dict[str, Style] = {
    "t": {"fill": "ink", "font_size": 13},
    "t small": {"font_size": 12},
    "t muted": {"fill": "muted"},
    "t strong": {"font_weight": 600},
    "grid": {"stroke": "grid", "stroke_width": 1},
    "grid over": {"stroke": "ink", "stroke_opacity": 0.13},
    "axis": {"stroke": "ink", "stroke_width": 1.2},
    "bar": {"fill": "bar"},
    "bar chosen": {"fill": "best"},
    "whisker": {"stroke": "ink", "stroke_width": 1.3, "stroke_opacity": 0.75},
    "less": {"fill": "less"},
    "more": {"fill": "more"},
    "lane": {"fill": "lane"},
    "plate": {"fill": "paper", "fill_opacity": 0.82},
    "front": {"fill": "none", "stroke": "best", "stroke_width": 1.6, "stroke_dasharray": (5, 4)},
    "dot": {"fill": "bar", "stroke": "paper", "stroke_width": 1.2},
    "dot on-front": {"fill": "paper", "stroke": "best", "stroke_width": 2.4},
    "dot beyond": {"fill": "paper", "stroke": "more", "stroke_width": 2.4},
    "limit": {"fill": "none", "stroke": "more", "stroke_width": 1.6},
    "dot chosen": {"fill": "best", "stroke": "paper"},
    "hatching": {"stroke": "paper", "stroke_width": 3.2, "stroke_opacity": 0.62},
    "curve": {"fill": "none", "stroke_width": 2},
    "dashed": {"stroke_dasharray": (6, 4)},
    "dotted": {"stroke_dasharray": (2, 3)},
    "dash-dot": {"stroke_dasharray": (8, 3, 2, 3)},
    "point": {"stroke": "paper", "stroke_width": 1},
    "spread": {"stroke_width": 1.5},
    **{f"c-{name}": {"fill": f"c-{name}"} for name in ACTIVITIES},
    **{f"s-{index}": {"fill": f"s-{index}"} for index in range(len(SERIES))},
    **{
        f"{kind} s-{index}": {"fill": "none", "stroke": f"s-{index}"}
        for kind in ("curve", "spread")
        for index in range(len(SERIES))
    },
    **{f"level-{n}": {"fill_opacity": 0.1 + 0.18 * n} for n in range(1, LEVELS + 1)},
}
"""Styles by the classes that a shape must have. `hatch` is a pattern of `hatching` lines; each renderer has its own."""


@cache
def style_of(css: str) -> Style:
    """Return the style of a shape's classes; a rule with more classes has priority."""
    classes, found = set(css.split()), Style()
    for selector in sorted(STYLES, key=lambda selector: len(selector.split())):
        if classes.issuperset(selector.split()):
            found.update(STYLES[selector])
    return found


def rules() -> dict[str, str]:
    """Return the declarations of the style sheet by selector, such as `.bar.chosen`."""
    return {
        "." + ".".join(selector.split()): " ".join(
            f"{key.replace('_', '-')}: {_css(key, value)};" for key, value in style.items()
        )
        for selector, style in STYLES.items()
    }


def _css(key: str, value: object) -> str:
    match value:
        case str():
            return f"var(--{value})" if value != "none" else value
        case tuple():
            return " ".join(map(str, value))
        case float():
            return f"{value:.3g}"
        case _:
            return f"{value}px" if key == "font_size" else str(value)


SMALL, LARGE = 12, 14  # font sizes, in units of a drawing
WIDTH_OF_CHARACTER = 0.56  # of the font size, on average for sans-serif fonts of browsers

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
    """Tooltip."""


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
    """One line of text with its baseline at `y` and its start, middle or end at `x`."""

    x: float
    y: float
    text: str
    css: str = ""
    anchor: Anchor = "start"


Shape: TypeAlias = Rectangle | Polyline | Dot | Text


@dataclass
class Drawing:
    """Shapes, later ones over earlier ones; y grows downwards, and a unit is a pixel or a point in print."""

    name: str
    """Its id in the page."""
    title: str
    description: str
    """Description for people who cannot see it."""
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
        """Add text with its baseline at `y` and its start, middle or end at `x`."""
        self.shapes.append(Text(x, y, text, css, anchor))

    def ticks_below(
        self,
        values: Iterable[float],
        across: Callable[[float], float],
        rows: tuple[float, float],
        show: Callable[[float], str],
        css: str = "grid",
    ) -> None:
        """Draw a line from the top to the bottom of `rows` at each value, with the value below it."""
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
        """Draw a line from the left to the right of `columns` at each value, with the value on its left."""
        left, right = columns
        for value in values:
            self.line(left, up(value), right, up(value), "grid")
            self.text(left - 8, up(value) + 4, show(value), "muted small", "end")


@dataclass(frozen=True)
class Picture:
    """A drawing with its title, caption and legend."""

    drawing: Drawing
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    """Classes of a swatch and its meaning; an entry without classes is a heading."""
    narrow: Drawing | None = None
    """The same for a small screen, if the drawing is too wide for one."""


SWATCH = (16.0, 12.0)
KEY_WIDTH = 28.0  # of the swatch of a line, so that its dashes are visible


def swatch(css: str, x: float = 0.0, y: float = 0.0) -> tuple[float, list[Shape]]:
    """Return the width and the shapes of a legend's swatch, from its upper left corner.

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
    """Return a function that maps values from `low` to `high` to positions from `start` to `end`."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round values between two."""
    span = high - low
    if span <= 0:
        return [low]
    size = 10 ** floor(log10(span / most))
    step = next(size * n for n in (1, 2, 2.5, 5, 10, 20) if span / (size * n) <= most - 1)
    first = ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, floor(high / step + 1e-9) + 1)]


def width_of(text: str, size: float = SMALL) -> float:
    """Return the approximate width of a text."""
    return len(text) * size * WIDTH_OF_CHARACTER


Box: TypeAlias = tuple[float, float, float, float]
"""Space of a text, a point or a line: its left and right end, its upper and lower end."""


def line_box(start: tuple[float, float], end: tuple[float, float]) -> Box:
    """Return the space of a horizontal or vertical line."""
    (x1, y1), (x2, y2) = start, end
    return min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)


def text_box(left: float, right: float, baseline: float) -> Box:
    """Return the space of a text."""
    return left, right, baseline - SMALL, baseline + 4


def covers(box: Box, taken: Iterable[Box]) -> bool:
    """Return whether a box covers a part of any other."""
    start, end, top, bottom = box
    return any(
        start < right and left < end and top < low and high < bottom
        for left, right, high, low in taken
    )


def shortened(text: str, width: float, size: float = SMALL) -> str:
    """Return text cut to a width, with an ellipsis at the end."""
    most = int(width / (size * WIDTH_OF_CHARACTER))
    return text if len(text) <= most else text[: most - 1].rstrip(" ,(") + "…"


class Element(NamedTuple):
    """One SVG element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    title: str = ""
    """Tooltip."""


def element(shape: Shape) -> Element:
    """Return the SVG element of a shape, with lengths rounded to a tenth of a unit."""
    match shape:
        case Rectangle():
            box = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height}
            return Element("rect", {"class": shape.css, **_written(box)}, title=shape.title)
        case Polyline():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return Element("polyline", {"class": shape.css, "points": points})
        case Dot():
            circle = {"cx": shape.x, "cy": shape.y, "r": shape.radius}
            return Element("circle", {"class": shape.css, **_written(circle)}, title=shape.title)
        case Text():
            css = {"class": f"t {shape.css}".strip(), "text-anchor": shape.anchor}
            return Element("text", {**_written({"x": shape.x, "y": shape.y}), **css}, shape.text)
        case _:
            assert_never(shape)


def _written(numbers: dict[str, float]) -> dict[str, str]:
    return {key: f"{value:.1f}" for key, value in numbers.items()}

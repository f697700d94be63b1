"""Draw a picture with matplotlib, in light colours: title, legend, drawing and caption.

Import this file only to draw, because it imports matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Literal, assert_never

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.patches import Rectangle as Box
from matplotlib.textpath import TextPath

from streamrl.report.pictures.drawing import (
    COLOURS,
    LARGE,
    SMALL,
    Anchor,
    Dot,
    Drawing,
    Picture,
    Polyline,
    Rectangle,
    Shape,
    Style,
    Text,
    style_of,
    swatch,
    width_of,
)

POINTS = 72.0  # per inch; a unit of a drawing is one point
DPI = 110
MARGIN = 18.0  # around everything
GAP = 12.0  # between title, legend, drawing and caption
LINE = 1.5  # height of a line, relative to its font size
HATCH = "////"
ANCHORS: dict[Anchor, Literal["left", "center", "right"]] = {
    "start": "left",
    "middle": "center",
    "end": "right",
}
CLEAR = (0.0, 0.0, 0.0, 0.0)


def draw(picture: Picture) -> Figure:
    """Return a figure that belongs to no window and changes no global state."""
    drawing = picture.drawing
    parts = [part for part in (_heading(picture), drawing, _foot(picture)) if part.height]
    width = drawing.width + 2 * MARGIN
    height = sum(part.height for part in parts) + (len(parts) - 1) * GAP + 2 * MARGIN
    figure = Figure(
        figsize=(width / POINTS, height / POINTS), dpi=DPI, facecolor=COLOURS["paper"].light
    )
    below = height - MARGIN
    for part in parts:
        below -= part.height
        box = (MARGIN / width, below / height, part.width / width, part.height / height)
        axes = figure.add_axes(box, xlim=(0, part.width), ylim=(part.height, 0))
        axes.set_axis_off()
        _draw_shapes(axes, part.shapes)
        below -= GAP
    return figure


def _heading(picture: Picture) -> Drawing:
    """Return the title, and the legend in as many rows as it needs."""
    made = Drawing("heading", "", "", picture.drawing.width)
    _write_lines(made, picture.drawing.title, LARGE, "strong")
    if picture.legend:
        made.height += GAP
    x = 0.0
    for css, name in picture.legend:
        wide, shapes = swatch(css)
        start = wide + 6 if shapes else 0.0
        room = start + _measure(name) + 18
        if x and x + room > made.width:
            x = 0.0
            made.height += LINE * SMALL
        made.shapes += swatch(css, x, made.height)[1]
        made.text(x + start, made.height + SMALL - 1, name, "small")
        x += room
    made.height += SMALL if picture.legend else 0.0
    return made


def _foot(picture: Picture) -> Drawing:
    """Return the caption, a paragraph for each of its lines."""
    made = Drawing("foot", "", "", picture.drawing.width)
    for paragraph in picture.caption.splitlines():
        _write_lines(made, paragraph, SMALL, "muted small")
    return made


def _write_lines(made: Drawing, text: str, size: float, css: str) -> None:
    """Add a text at the bottom, wrapped into lines."""
    for line in textwrap.wrap(text, int(made.width / width_of(" ", size))):
        made.text(0, made.height + size, line, css)
        made.height += LINE * size


def _measure(text: str) -> float:
    """Return the width of a text; dollar signs do not start mathematics."""
    return float(TextPath((0, 0), text.replace("$", r"\$"), size=SMALL).get_extents().width)


def _draw_shapes(axes: Axes, shapes: Sequence[Shape]) -> None:
    """Draw shapes in order. Adjacent boxes are drawn together, because a timeline has thousands."""
    order = 0
    for is_box, group in groupby(shapes, _is_box):
        if is_box:
            order += 1
            _draw_boxes(axes, [shape for shape in group if isinstance(shape, Rectangle)], order)
            continue
        for shape in group:
            order += 1
            _draw_shape(axes, shape, order)


def _is_box(shape: Shape) -> bool:
    return isinstance(shape, Rectangle) and shape.css != "hatch"


def _draw_boxes(axes: Axes, boxes: Sequence[Rectangle], order: int) -> None:
    corners = [
        [(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)]
        for b in boxes
    ]
    colours = [_colour(style_of(box.css), "fill") for box in boxes]
    # without antialiasing, neighbours have no visible seam
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, linewidths=0, antialiaseds=False, zorder=order),
        autolim=False,
    )


def _draw_shape(axes: Axes, shape: Shape, order: int) -> None:
    match shape:
        case Rectangle():
            axes.add_patch(_hatched(shape, order))
        case Polyline():
            axes.add_line(_line(shape, order))
        case Dot():
            axes.add_patch(_circle(shape, order))
        case Text():
            _write(axes, shape, order)
        case _:
            assert_never(shape)


def _hatched(shape: Rectangle, order: int) -> Box:
    return Box(
        (shape.x, shape.y),
        shape.width,
        shape.height,
        fill=False,
        linewidth=0,
        hatch=HATCH,
        edgecolor=_colour(style_of("hatching"), "stroke"),
        zorder=order,
    )


def _line(shape: Polyline, order: int) -> Line2D:
    """Return a line; matplotlib measures dashes in line widths."""
    style = style_of(shape.css)
    width = style["stroke_width"]
    dashes = [part / width for part in style.get("stroke_dasharray", ())]
    return Line2D(
        [x for x, _ in shape.points],
        [y for _, y in shape.points],
        color=_colour(style, "stroke"),
        linewidth=width,
        linestyle=(0, dashes) if dashes else "-",
        solid_capstyle="butt",
        clip_on=False,
        zorder=order,
    )


def _circle(shape: Dot, order: int) -> Circle:
    style = style_of(shape.css)
    return Circle(
        (shape.x, shape.y),
        shape.radius,
        facecolor=_colour(style, "fill"),
        edgecolor=_colour(style, "stroke"),
        linewidth=style["stroke_width"],
        zorder=order,
    )


def _write(axes: Axes, shape: Text, order: int) -> None:
    style = style_of(f"t {shape.css}")
    axes.text(
        shape.x,
        shape.y,
        shape.text,
        color=_colour(style, "fill"),
        fontsize=style["font_size"],
        fontweight="bold" if "font_weight" in style else "normal",
        horizontalalignment=ANCHORS[shape.anchor],
        parse_math=False,
        zorder=order,
    )


def _colour(style: Style, key: Literal["fill", "stroke"]) -> tuple[float, float, float, float]:
    name = style.get(key, "none")
    if name == "none":
        return CLEAR
    opacity = style.get("fill_opacity", 1.0) if key == "fill" else style.get("stroke_opacity", 1.0)
    red, green, blue = to_rgb(COLOURS[name].light)
    return red, green, blue, opacity

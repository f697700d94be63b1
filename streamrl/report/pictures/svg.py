"""Shapes of a drawing as SVG elements, for the template that writes them."""

from __future__ import annotations

from typing import NamedTuple, assert_never

from streamrl.report.pictures.drawing import Dot, Polyline, Rectangle, Shape, Text


class Element(NamedTuple):
    """One SVG element."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    title: str = ""
    """What a pointer that rests on it is told."""


def element(shape: Shape) -> Element:
    """Return the SVG element of a shape, its lengths with a tenth of a unit."""
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

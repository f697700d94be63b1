"""Colours and strokes by class, in light and dark: the report's style sheet and matplotlib both take them from here."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypedDict


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


# Okabe and Ito's palette and its neighbours, which the colour-blind can tell apart: an activity, or a
# cause that a GPU waits for, has one colour everywhere.
ACTIVITIES = {
    "generate": Colour("#0072B2", "#3d9bd9"),
    "train": Colour("#D55E00", "#D55E00"),
    "score": Colour("#E69F00", "#E69F00"),
    "sync": Colour("#009E73", "#009E73"),
    "push": Colour("#56B4E9", "#56B4E9"),
    "checkpoint": Colour("#F0E442", "#F0E442"),
    "start-up": Colour("#999999", "#8a929b"),
    "prefill": Colour("#003C5F", "#7f9fd6"),
    "decode": Colour("#0072B2", "#2d8cc9"),
    "underfilled": Colour("#8EC1E5", "#24587c"),
    "verify": Colour("#6A3D9A", "#b295d6"),
    "failure": Colour("#000000", "#f5f7f9"),
    "skew": Colour("#CC79A7", "#CC79A7"),
    "pipeline": Colour("#C9C9C9", "#7d858e"),
    "staleness": Colour("#8A5A83", "#a9769f"),
    "verifier": Colour("#A6761D", "#A6761D"),
    "backpressure": Colour("#7FD0C0", "#7FD0C0"),
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
"""Of lines and groups of bars; dark enough to be told apart on paper."""
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
"""Classes that tell lines of one colour apart."""
LEVELS = 5
"""Shades of one colour."""
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
"""By classes that a shape must have; `hatch` is a pattern of `hatching` lines, and each renderer has its own."""


@cache
def style_of(css: str) -> Style:
    """Return the style of a shape's classes; a rule that asks for more classes goes before one that asks for fewer."""
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

"""Draw figures over the steps of a run: one line each, at one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import isfinite
from typing import NamedTuple

import numpy as np

from streamrl.report.pictures.drawing import Drawing, Picture, scale, ticks

WIDTH, HEIGHT = 440.0, 220.0
LEFT, RIGHT, TOP, BELOW = 64.0, 12.0, 8.0, 40.0
MOST_POINTS = 200
"""Most points of a line; a longer run is shown as means of successive steps."""
HEADROOM = 0.05
APART = 5.0
"""Distance between the intervals of two curves at the same step."""


class Curve(NamedTuple):
    """A figure of every step."""

    label: str
    values: Sequence[float]
    css: str
    """Classes of its line."""
    intervals: Sequence[tuple[float, float]] = ()
    """Both ends of the interval of each value, drawn as vertical lines; empty for a curve without intervals."""


def curves_picture(
    name: str,
    title: str,
    steps: Sequence[int],
    curves: Sequence[Curve],
    show: Callable[[float], str],
) -> Picture:
    """Draw curves over the same steps; a value that is not a number leaves a gap.

    Raises:
        ValueError: there is no step, or a curve has a different number of values.
    """
    if not steps or any(len(curve.values) != len(steps) for curve in curves):
        raise ValueError(f"{name}: a curve needs a value for each of {len(steps)} steps")
    told = "; ".join(
        f"{curve.label}: {show(curve.values[0])} at step {steps[0]}, {show(curve.values[-1])} at step {steps[-1]}"
        for curve in curves
    )
    drawing = Drawing(name, title, told, WIDTH, HEIGHT)
    every = [[*curve.values, *chain.from_iterable(curve.intervals)] for curve in curves]
    values = [value for value in chain.from_iterable(every) if isfinite(value)] or [0.0]
    low, high = min(values), max(values)
    if min(values) >= 0 and low < 0.5 * high:
        low = 0.0
    margin = HEADROOM * (high - low)
    bottom = HEIGHT - BELOW
    up = scale(low, high + margin, bottom, TOP)
    across = scale(steps[0], steps[-1], LEFT, WIDTH - RIGHT)
    drawing.ticks_beside(ticks(low, high + margin, 5), up, (LEFT, WIDTH - RIGHT), show)
    whole = sorted({round(tick) for tick in ticks(steps[0], steps[-1])})
    drawing.ticks_below(whole, across, (TOP, bottom), lambda value: f"{value:,.0f}")
    for place, curve in enumerate(curves):
        _draw(drawing, steps, curve, across, up)
        _draw_intervals(drawing, steps, curve, (place - (len(curves) - 1) / 2) * APART, across, up)
    legend = [(f"key {curve.css}", curve.label) for curve in curves] if len(curves) > 1 else []
    return Picture(drawing, told, legend)


def _draw(
    drawing: Drawing,
    steps: Sequence[int],
    curve: Curve,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> None:
    """Draw one line, thinned out, with gaps at values that are not numbers."""
    parts = np.array_split(np.arange(len(steps)), min(MOST_POINTS, len(steps)))
    run: list[tuple[float, float]] = []
    for part in [*parts, np.array([], int)]:
        value = float(np.mean([curve.values[at] for at in part])) if len(part) else float("nan")
        if isfinite(value):
            run.append((across(float(np.mean([steps[at] for at in part]))), up(value)))
            continue
        if len(run) > 1:
            drawing.polyline(run, f"curve {curve.css}")
        elif run:
            drawing.dot(*run[0], 2.5, f"point {curve.css}")
        run = []


def _draw_intervals(
    drawing: Drawing,
    steps: Sequence[int],
    curve: Curve,
    shift: float,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> None:
    """Draw the interval of each value, with a point at the value, `shift` units to the right of its step."""
    for step, value, (low, high) in zip(steps, curve.values, curve.intervals, strict=False):
        if isfinite(value):
            x, colour = across(step) + shift, curve.css.split()[0]
            drawing.line(x, up(low), x, up(high), f"spread {colour}")
            drawing.dot(x, up(value), 2.5, f"point {colour}")

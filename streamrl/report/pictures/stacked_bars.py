"""Draw GPU time as stacked bars: shares of 100 % by run, and idle GPU-seconds of a step by cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from streamrl.record.attribution import BUSY, IDLE, UNDERFILLED
from streamrl.record.metrics import Metrics
from streamrl.report.bubbles import WORTH_SAYING, Bubbles, causes
from streamrl.report.pictures.drawing import (
    Anchor,
    Drawing,
    Picture,
    scale,
    shortened,
    ticks,
    width_of,
)
from streamrl.report.words import ACTIVITIES, CAUSES, percent, seconds

WIDTH, NARROW, RIGHT = 900.0, 400.0, 24.0
ROW, BAR = 56.0, 26.0
PAD = 10.0  # the background of a value is wider than its text


class Segment(NamedTuple):
    """A part of a bar."""

    kind: Literal["busy", "idle"]
    name: str
    """The activity, or the cause of waiting."""
    value: float


class Stack(NamedTuple):
    """One run's bar."""

    label: str
    note: str
    """Text at the end of the label's line."""
    segments: list[Segment]


def stacked_picture(
    name: str,
    title: str,
    told: str,
    stacks: Sequence[Stack],
    show: Callable[[float], str],
    unit: str,
    caption: str,
) -> Picture:
    """Draw a row for each stack at one scale, above an axis with its unit; `told` is for people who cannot see it."""
    wide, narrow = Drawing(name, title, told, WIDTH), Drawing(f"{name}-narrow", title, told, NARROW)
    for drawing in (wide, narrow):
        _draw_stacks(drawing, stacks, show, unit)
    return Picture(wide, caption, _legend(stacks), narrow)


def _draw_stacks(
    drawing: Drawing, stacks: Sequence[Stack], show: Callable[[float], str], unit: str
) -> None:
    most = max(sum(segment.value for segment in stack.segments) for stack in stacks)
    across = scale(0.0, most, 0.0, drawing.width - RIGHT)
    for row, stack in enumerate(stacks):
        _draw_row(drawing, row * ROW, stack, across, show)
    bottom = len(stacks) * ROW
    for value in ticks(0.0, most):
        drawing.line(across(value), bottom - 6, across(value), bottom, "axis")
        anchor: Anchor = "middle" if value else "start"
        drawing.text(across(value), bottom + 14, show(value), "muted small", anchor)
    drawing.text(drawing.width, bottom + 32, f"{unit} →", "small", "end")
    drawing.height = bottom + 36


def _draw_row(
    drawing: Drawing,
    top: float,
    stack: Stack,
    across: Callable[[float], float],
    show: Callable[[float], str],
) -> None:
    room = drawing.width - RIGHT - width_of(stack.note) - 40
    drawing.text(0, top + 14, shortened(stack.label, room), "strong")
    drawing.text(drawing.width - RIGHT, top + 14, stack.note, "muted", "end")
    total = 0.0
    for kind, name, value in stack.segments:
        x, width = across(total), across(total + value) - across(total)
        meaning = ACTIVITIES[name] if kind == "busy" else CAUSES[name]
        title = f"{name}, {kind}: {show(value)} of GPU-seconds ({meaning})"
        drawing.rectangle(x, top + 20, width, BAR, f"c-{name}", title)
        if kind == "idle":
            drawing.rectangle(x, top + 20, width, BAR, "hatch", title)
        plate = width_of(show(value)) + PAD
        if width > plate:
            middle = x + width / 2
            drawing.rectangle(middle - plate / 2, top + 24, plate, 18, "plate")
            drawing.text(middle, top + 37, show(value), "small", "middle")
        total += value


def _legend(stacks: Sequence[Stack]) -> list[tuple[str, str]]:
    """Return the names in any of the bars, in the same order for all pictures."""
    seen = {(kind, name) for stack in stacks for kind, name, _ in stack.segments}
    busy = [(f"c-{name}", name) for name in BUSY if ("busy", name) in seen]
    idle = [(f"c-{name} hatched", f"idle: {name}") for name in IDLE if ("idle", name) in seen]
    return [*busy, *idle]


LEAST_SHOWN = 0.0005  # smaller shares are rounding
SHARES_CAPTION = "Share of all GPU-seconds of the whole run. Busy is solid, idle is hatched."


def shares_picture(name: str, runs: Sequence[tuple[str, Metrics]]) -> Picture:
    """Draw a row for each run."""
    told = "; ".join(
        f"{label}: {percent(sum(m.busy.values()))} busy, {percent(sum(m.idle.values()))} idle"
        for label, m in runs
    )
    stacks = [
        Stack(label, f"{percent(sum(metrics.idle.values()))} idle", segments(metrics))
        for label, metrics in runs
    ]
    unit, title = "share of GPU-seconds", "Where GPU-seconds went"
    return stacked_picture(name, title, told, stacks, percent, unit, SHARES_CAPTION)


def segments(metrics: Metrics) -> list[Segment]:
    """Return the activities and waits of the run's GPUs as shares, in the same order for all runs."""
    busy = [Segment("busy", name, metrics.busy.get(name, 0.0)) for name in BUSY]
    idle = [Segment("idle", name, metrics.idle.get(name, 0.0)) for name in IDLE]
    return [segment for segment in (*busy, *idle) if segment.value > LEAST_SHOWN]


IDLE_CAPTION = (
    "What GPUs wait for in an average step, hatched, and what they decode in batches that are not full, solid; "
    "bubbles too small to be seen are left out."
)


def bubbles_picture(name: str, runs: Sequence[Bubbles]) -> Picture:
    """Draw a row for each run."""
    shown = causes(runs, WORTH_SAYING)
    stacks = [
        Stack(
            run.name,
            _note(run),
            [*(Segment("idle", cause, run.idle[cause]) for cause in shown), *_underfilled(run)],
        )
        for run in runs
    ]
    told = "; ".join(f"{stack.label}: {stack.note}" for stack in stacks)
    unit, title = "GPU-seconds a step", "GPU-seconds that a step loses, by cause"
    return stacked_picture(name, title, told, stacks, "{:,.0f}".format, unit, IDLE_CAPTION)


def _underfilled(run: Bubbles) -> list[Segment]:
    """Return the loss of decoding in underfilled batches, if it is known and visible."""
    lost = run.underfilled or 0.0
    return [Segment("busy", UNDERFILLED, lost)] if lost > WORTH_SAYING * run.gpu_seconds else []


def _note(run: Bubbles) -> str:
    return f"{percent(run.idle_share)} idle, step {seconds(run.step_time)}"

"""The idle GPU-seconds of a step by cause: a bar for each run, as long as its bubbles."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.report.bubbles import WORTH_SAYING, Bubbles, causes
from streamrl.report.pictures.drawing import Drawing, Picture
from streamrl.report.pictures.stacks import WIDTH, Segment, Stack, stacked_picture
from streamrl.report.words import percent, seconds

CAPTION = "What GPUs wait for in an average step; bubbles too small to be seen are left out."


def bubbles_picture(name: str, runs: Sequence[Bubbles]) -> Picture:
    """Draw a row for each run."""
    shown = causes(runs, WORTH_SAYING)
    stacks = [
        Stack(run.name, _note(run), [Segment("idle", cause, run.idle[cause]) for cause in shown])
        for run in runs
    ]
    told = "; ".join(f"{stack.label}: {stack.note}" for stack in stacks)
    drawing = Drawing(name, "Idle GPU-seconds of a step, by cause", told, WIDTH)
    return stacked_picture(drawing, stacks, "{:,.0f}".format, "idle GPU-seconds a step", CAPTION)


def _note(run: Bubbles) -> str:
    return f"{percent(run.idle_share)} idle, step {seconds(run.step_time)}"

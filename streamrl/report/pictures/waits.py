"""The GPU-seconds that a step loses, by cause: a bar for each run, as long as its bubbles."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.record.attribution import UNDERFILLED
from streamrl.report.bubbles import WORTH_SAYING, Bubbles, causes
from streamrl.report.pictures.drawing import Drawing, Picture
from streamrl.report.pictures.stacks import WIDTH, Segment, Stack, stacked_picture
from streamrl.report.words import percent, seconds

CAPTION = (
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
    drawing = Drawing(name, "GPU-seconds that a step loses, by cause", told, WIDTH)
    return stacked_picture(drawing, stacks, "{:,.0f}".format, "GPU-seconds a step", CAPTION)


def _underfilled(run: Bubbles) -> list[Segment]:
    """Return what decoding lost, where that is known and can be seen."""
    lost = run.underfilled or 0.0
    return [Segment("busy", UNDERFILLED, lost)] if lost > WORTH_SAYING * run.gpu_seconds else []


def _note(run: Bubbles) -> str:
    return f"{percent(run.idle_share)} idle, step {seconds(run.step_time)}"

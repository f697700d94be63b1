"""Where GPU-seconds went: a bar of 100 % for each run."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.metrics import Metrics
from streamrl.report.pictures.drawing import Drawing, Picture
from streamrl.report.pictures.stacks import WIDTH, Segment, Stack, stacked_picture
from streamrl.report.words import percent

LEAST_SHOWN = 0.0005  # smaller shares are rounding
CAPTION = "Share of all GPU-seconds of the whole run. Busy is solid, idle is hatched."


def shares_picture(name: str, runs: Sequence[tuple[str, Metrics]]) -> Picture:
    """Draw a row for each run."""
    told = "; ".join(
        f"{label}: {percent(sum(m.busy.values()))} busy, {percent(sum(m.idle.values()))} idle"
        for label, m in runs
    )
    drawing = Drawing(name, "Where GPU-seconds went", told, WIDTH)
    stacks = [
        Stack(label, f"{percent(sum(metrics.idle.values()), 1)} idle", segments(metrics))
        for label, metrics in runs
    ]
    return stacked_picture(drawing, stacks, percent, "share of GPU-seconds", CAPTION)


def segments(metrics: Metrics) -> list[Segment]:
    """Return what the run's GPUs did and waited for, as shares, in one order for all runs."""
    busy = [Segment("busy", name, metrics.busy.get(name, 0.0)) for name in BUSY]
    idle = [Segment("idle", name, metrics.idle.get(name, 0.0)) for name in IDLE]
    return [segment for segment in (*busy, *idle) if segment.value > LEAST_SHOWN]

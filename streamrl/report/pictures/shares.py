"""Where GPU-seconds went: a bar of 100 % for each run, busy solid and idle hatched."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.metrics import Metrics
from streamrl.report.pictures.drawing import Drawing, scale, shortened
from streamrl.report.words import ACTIVITIES, CAUSES, percent

WIDTH = 900.0
ROW, BAR = 56.0, 26.0
LEAST_LABELLED = 0.045  # share of a bar that has room for its number
LEAST_SHOWN = 0.0005  # smaller shares are rounding


def shares_figure(name: str, runs: Sequence[tuple[str, Metrics]]) -> Drawing:
    """Draw a row for each run."""
    told = "; ".join(
        f"{label}: {percent(sum(m.busy.values()))} busy, {percent(sum(m.idle.values()))} idle"
        for label, m in runs
    )
    drawing = Drawing(name, "Where GPU-seconds went", told, WIDTH)
    across = scale(0.0, 1.0, 0.0, WIDTH)
    for row, (label, metrics) in enumerate(runs):
        top = row * ROW
        drawing.text(0, top + 14, shortened(label, 700), "strong")
        idle = percent(sum(metrics.idle.values()), 1)
        drawing.text(WIDTH, top + 14, f"{idle} idle", "muted", "end")
        start = 0.0
        for kind, activity, share in segments(metrics):
            meaning = ACTIVITIES[activity] if kind == "busy" else CAUSES[activity]
            title = f"{activity}, {kind}: {percent(share, 1)} of GPU-seconds ({meaning})"
            x, width = across(start), across(share)
            drawing.rectangle(x, top + 20, width, BAR, f"c-{activity}", title)
            if kind == "idle":
                drawing.rectangle(x, top + 20, width, BAR, "hatch", title)
            if share >= LEAST_LABELLED:
                drawing.rectangle(x + width / 2 - 17, top + 24, 34, 18, "plate")
                middle = x + width / 2
                drawing.text(middle, top + 37, percent(share), "small", "middle")
            start += share
    drawing.height = len(runs) * ROW
    return drawing


def segments(metrics: Metrics) -> list[tuple[str, str, float]]:
    """Give busy or idle, activity or cause, and share, in one order for all runs."""
    busy = [("busy", name, metrics.busy.get(name, 0.0)) for name in BUSY]
    idle = [("idle", name, metrics.idle.get(name, 0.0)) for name in IDLE]
    return [segment for segment in (*busy, *idle) if segment[2] > LEAST_SHOWN]

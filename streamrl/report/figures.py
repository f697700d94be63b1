"""Draw pictures of runs and studies as matplotlib figures, and write the timeline and Chrome trace of a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.engine.trace import Trace
from streamrl.record.chrome_trace import CHROME_TRACE, chrome_trace
from streamrl.record.metrics import Metrics, measure
from streamrl.report.bubbles import Bubbles
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.jobs_timeline import Block, Lane, jobs_picture
from streamrl.report.pictures.stacked_bars import bubbles_picture, shares_picture
from streamrl.report.pictures.step_timeline import Steps, timeline_picture
from streamrl.report.pictures.study_chart import study_picture
from streamrl.report.study_table import MetricTable
from streamrl.runfile.result_files import replacing
from streamrl.sim.jobs.plan import ClusterPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMELINE = "timeline.png"
NUM_STEPS = 3  # of the default window: few enough that bubbles are visible


def timeline_figure(
    trace: Trace, path: Path | str | None = None, steps: Steps | None = None
) -> Figure:
    """Draw the activities of all sides from the first to the last of `steps`; write a .png or .svg file to a path.

    Without `steps` the window has a few steps of the steady state, so that bubbles are visible.

    Raises:
        ValueError: the trace has no finished step, or `steps` are outside it.
    """
    metrics, system = measure(trace), trace.run.policies.system
    window = _default_steps(metrics) if steps is None else steps
    return _draw(timeline_picture("timeline", system, trace, metrics, window), path)


def idle_figure(named: Mapping[str, Metrics], path: Path | str | None = None) -> Figure:
    """Draw the busy and idle shares of each run as one bar; write a .png or .svg file to a path."""
    return _draw(shares_picture("shares", list(named.items())), path)


def bubble_figure(runs: Sequence[Bubbles], path: Path | str | None = None) -> Figure:
    """Draw the idle GPU-seconds of a step by cause, one bar for each run; write a .png or .svg file to a path.

    Bubbles that are too small to see are left out.
    """
    return _draw(bubbles_picture("bubbles", runs), path)


def study_figure(
    table: MetricTable, title: str, sentences: Sequence[str], path: Path | str | None = None
) -> Figure:
    """Draw one metric of a study above sentences with its findings; write a .png or .svg file to a path."""
    return _draw(study_picture("study", table, title, "\n".join(sentences)), path)


def jobs_figure(plan: ClusterPlan, path: Path | str | None = None) -> Figure:
    """Draw the GPUs of each job over time for all ways of sharing; write a .png or .svg file to a path."""
    gpus = [{each.share: sum(each.gpus.values()) for each in job.shares} for job in plan.jobs]
    lanes = [
        Lane(
            f"{option.name} *" if option.name == plan.chosen else option.name,
            [
                Block(
                    each.job,
                    each.start,
                    each.end,
                    gpus[each.job][each.share],
                    each.kind == "switch",
                )
                for each in option.stretches
            ],
        )
        for option in plan.options
    ]
    title = f"GPUs of each job by way of sharing (* chosen: {plan.chosen})"
    names = [job.name for job in plan.jobs]
    return _draw(jobs_picture("jobs", title, names, lanes, sum(plan.gpus.values())), path)


def _default_steps(metrics: Metrics) -> Steps:
    first = metrics.counted_steps[0]
    return first, min(first + NUM_STEPS - 1, metrics.num_steps)


def _draw(picture: Picture, path: Path | str | None) -> Figure:
    from streamrl.report.pictures.canvas import draw

    figure = draw(picture)
    if path is not None:
        with replacing(Path(path)) as partial:
            figure.savefig(partial)
    return figure


def png_of(figure: Figure) -> bytes:
    """Return a figure as the bytes of a .png file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def views_of(trace: Trace) -> dict[str, bytes]:
    """Return the data of `timeline.png` and `chrome_trace.json` by name."""
    return {
        CHROME_TRACE: chrome_trace(trace),
        TIMELINE: png_of(timeline_figure(trace)),
    }

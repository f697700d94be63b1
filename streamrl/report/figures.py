"""Figures of runs: what each resource did when, and where GPU-seconds went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from numpy.typing import NDArray

from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.metrics import Metrics, measure
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.record.trace import Trace
from streamrl.report.bubbles import WORTH_SAYING, Bubbles, causes
from streamrl.runfile.config import Run

# Okabe and Ito's palette, which the colour-blind can tell apart; an activity has one colour everywhere.
ACTIVITY_COLOURS = {
    "generate": "#0072B2",
    "train": "#D55E00",
    "score": "#E69F00",
    "sync": "#009E73",
    "push": "#56B4E9",
    "checkpoint": "#F0E442",
    "start-up": "#999999",
}
BUSY_COLOURS = {
    "prefill": "#003C5F",
    "decode": ACTIVITY_COLOURS["generate"],
    "score": ACTIVITY_COLOURS["score"],
    "train": ACTIVITY_COLOURS["train"],
}
IDLE_COLOURS = {
    "start-up": ACTIVITY_COLOURS["start-up"],
    "failure": "#000000",
    "sync": ACTIVITY_COLOURS["sync"],
    "skew": "#CC79A7",
    "pipeline": "#C9C9C9",
    "staleness": "#8A5A83",
    "verifier": "#A6761D",
    "checkpoint": ACTIVITY_COLOURS["checkpoint"],
    "backpressure": "#7FD0C0",
    "wind-down": "#E8E8E8",
}
SIZE = (14.0, 8.0)  # inches: 1400 by 800 pixels
MOST_ROWS = 40  # replicas that stay readable at this size
NUM_STEPS = 3  # in the default window: few enough that bubbles have width
COLUMNS = 1600  # samples of the running count over the window: more than the figure has pixels
FAINTEST = 0.25  # shade of a replica that runs next to nothing: still unlike an idle one
THINNEST = 0.7  # points around a span, so that a short one does not vanish


def timeline_figure(
    trace: Trace, path: Path | None = None, steps: tuple[int, int] | None = None
) -> Figure:
    """Draw who did what when, from the first to the last of `steps`; write a .png or .svg file to a path.

    Without `steps` the window has a few after the warm-up, so that bubbles can be seen.

    Raises:
        ValueError: the trace has no finished step, or `steps` are none of its steps.
    """
    metrics, timeline = measure(trace), read_timeline(trace)
    first, last = _default_steps(trace, metrics) if steps is None else steps
    if not 1 <= first <= last <= metrics.num_steps:
        raise ValueError(f"steps must lie in 1 to {metrics.num_steps}, got {first} to {last}")
    stepped_at = np.cumsum([0.0, *metrics.step_times])
    window = (float(stepped_at[first - 1]), float(stepped_at[last]))
    figure = _new_figure()
    replicas, others = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    _draw_replicas(replicas, timeline, window, trained_on_replicas(trace.run, timeline))
    _draw_rows(others, [timeline.trainer, timeline.link], ["trainer", "link"], window)
    for axes in (replicas, others):
        axes.set_xlim(*window)
        _mark_steps(axes, stepped_at[first : last + 1])
    _name_steps(replicas, stepped_at, first, last)
    others.set_xlabel("seconds since the run's start")
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    figure.suptitle(
        f"{trace.run.policies.system}: median step {metrics.step_time:.4g} s, "
        f"{which} of {metrics.num_steps}"
    )
    figure.legend(
        handles=_activity_legend(timeline), loc="outside lower center", ncols=9, frameon=False
    )
    return _save(figure, path)


def idle_figure(named: Mapping[str, Metrics], path: Path | None = None) -> Figure:
    """Draw the busy and idle shares of each run as one bar; write a .png or .svg file where a path is given."""
    figure = _new_figure()
    axes = figure.subplots()
    for row, metrics in enumerate(named.values()):
        start = 0.0
        for shares, colours, hatch in (
            (metrics.busy, BUSY_COLOURS, ""),
            (metrics.idle, IDLE_COLOURS, "//"),
        ):
            for name, share in shares.items():
                _draw_share(axes, row, start, share, colours[name], hatch)
                start += share
    axes.set_yticks(range(len(named)), list(named), fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of all GPU-seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle("Where GPU-seconds went: busy solid, idle hatched")
    handles = _share_legend(list(named.values()))
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    return _save(figure, path)


def bubble_figure(runs: Sequence[Bubbles], path: Path | None = None) -> Figure:
    """Draw the idle GPU-seconds of a step by cause, one bar a run; write a .png or .svg file to a path.

    Bubbles too small to be seen are left out.
    """
    figure = Figure(figsize=(10.0, 5.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    bottoms = np.zeros(len(runs))
    for cause in causes(runs, WORTH_SAYING):
        heights = np.array([run.idle[cause] for run in runs])
        axes.bar(range(len(runs)), heights, 0.6, bottoms, color=IDLE_COLOURS[cause], label=cause)
        bottoms += heights
    for place, run in enumerate(runs):
        text = f"{run.idle_share:.0%} idle\nstep {run.step_time:.0f} s"
        axes.annotate(
            text, (place, bottoms[place]), (0, 4), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(runs)), [run.name.replace(" + ", "\n+ ") for run in runs])
    axes.set_ylim(0, 1.2 * bottoms.max())
    axes.set_ylabel("idle GPU-seconds a step")
    axes.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="waits for")
    return _save(figure, path)


def _new_figure() -> Figure:
    """Make a figure that belongs to no window and changes no global state."""
    return Figure(figsize=SIZE, dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.1))


def _save(figure: Figure, path: Path | None) -> Figure:
    if path is not None:
        figure.savefig(path)
    return figure


def _default_steps(trace: Trace, metrics: Metrics) -> tuple[int, int]:
    first = min(trace.run.warm_up_steps + 1, metrics.num_steps)
    return first, min(first + NUM_STEPS - 1, metrics.num_steps)


def trained_on_replicas(run: Run, timeline: Timeline) -> dict[int, list[Span]]:
    """Give what the trainer does on the GPUs that it shares with replicas, by replica."""
    if not run.shares_gpus:
        return {}
    work = [span for span in timeline.trainer if span.activity in ("score", "train")]
    shared = min(run.rollout.replicas, -(-run.trainer.num_gpus // run.rollout.tensor_parallel))
    return dict.fromkeys(range(shared), work)


def _draw_replicas(
    axes: Axes,
    timeline: Timeline,
    window: tuple[float, float],
    trained: Mapping[int, list[Span]],
) -> None:
    """Shade each replica by how many rollouts run on it, then lay its other activities over it."""
    shown = list(timeline.replicas)[:MOST_ROWS]
    counts = np.array([_running(timeline.rollouts.get(r, []), window) for r in shown])
    image = np.ones((len(shown), COLUMNS, 4))
    image[..., :3] = to_rgb(ACTIVITY_COLOURS["generate"])
    most = max(float(counts.max()), 1.0)
    image[..., 3] = np.where(counts > 0, FAINTEST + (1 - FAINTEST) * counts / most, 0.0)
    axes.imshow(
        image,
        extent=(*window, len(shown) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    others = [
        [s for s in timeline.replicas[r] if s.activity != "generate"] + trained.get(r, [])
        for r in shown
    ]
    _draw_rows(axes, others, [str(replica) for replica in shown], window)
    for edge in range(len(shown)):
        axes.axhline(edge - 0.5, color="white", linewidth=2)
    hidden = len(timeline.replicas) - len(shown)
    axes.set_ylabel(f"replica (first {MOST_ROWS}; {hidden} not shown)" if hidden else "replica")


def _running(spans: Sequence[Span], window: tuple[float, float]) -> NDArray[np.float64]:
    """Count the rollouts that run in the middle of each column of the window."""
    start, end = window
    middles = start + (np.arange(COLUMNS) + 0.5) * (end - start) / COLUMNS
    begun = np.searchsorted(np.sort([span.start for span in spans]), middles, side="right")
    ended = np.searchsorted(np.sort([span.end for span in spans]), middles, side="right")
    return (begun - ended).astype(np.float64)


def _draw_rows(
    axes: Axes, rows: list[list[Span]], names: list[str], window: tuple[float, float]
) -> None:
    """Draw spans as bars, one row for each list, from the top down."""
    for row, spans in enumerate(rows):
        seen = [span for span in spans if span.end > window[0] and span.start < window[1]]
        colours = [ACTIVITY_COLOURS[span.activity] for span in seen]
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in seen],
            (row - 0.4, 0.8),
            facecolors=colours,
            edgecolors=colours,
            linewidth=THINNEST,
        )
    every = 1 if len(names) <= 20 else 2
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_steps(axes: Axes, stepped_at: NDArray[np.float64]) -> None:
    for time in stepped_at:
        axes.axvline(time, color="black", linewidth=1, linestyle="--")


def _name_steps(axes: Axes, stepped_at: NDArray[np.float64], first: int, last: int) -> None:
    for step in range(first, last + 1):
        middle = (stepped_at[step - 1] + stepped_at[step]) / 2
        axes.text(middle, 1.01, f"step {step}", transform=axes.get_xaxis_transform(), ha="center")


def _activity_legend(timeline: Timeline) -> list[Patch]:
    """Name what the run has, a full and an emptying replica apart."""
    rows = [*timeline.replicas.values(), timeline.trainer, timeline.link]
    seen = {span.activity for spans in rows for span in spans if span.end > span.start}
    patches = []
    for name, colour in ACTIVITY_COLOURS.items():
        if name == "generate":
            patches.append(Patch(color=colour, label="generate, most rollouts"))
            patches.append(Patch(color=colour, alpha=FAINTEST, label="generate, fewest"))
        elif name in seen:
            patches.append(Patch(color=colour, label=name))
    return [*patches, Patch(facecolor="white", edgecolor="black", label="idle")]


def _draw_share(axes: Axes, row: int, start: float, share: float, colour: str, hatch: str) -> None:
    axes.barh(
        row,
        share,
        left=start,
        height=0.6,
        color=colour,
        hatch=hatch,
        edgecolor="white",
        linewidth=1,
    )
    if share >= 0.03:
        axes.text(
            start + share / 2,
            row,
            f"{share:.0%}",
            ha="center",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
        )


def _share_legend(runs: list[Metrics]) -> list[Patch]:
    """Name what any of the runs has."""
    busy = [name for name in BUSY if any(run.busy.get(name) for run in runs)]
    idle = [name for name in IDLE if any(run.idle.get(name) for run in runs)]
    return [
        *(Patch(facecolor=BUSY_COLOURS[name], label=name) for name in busy),
        *(
            Patch(
                facecolor=IDLE_COLOURS[name], hatch="//", edgecolor="white", label=f"idle: {name}"
            )
            for name in idle
        ),
    ]

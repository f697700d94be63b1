"""Draw the activities of every replica, trainer, link and verifier over some steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from math import ceil
from statistics import median
from typing import NamedTuple

import numpy as np

from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.decode_efficiency import read_parts
from streamrl.record.metrics import Metrics
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.report.pictures.drawing import (
    LEVELS,
    SMALL,
    Drawing,
    Picture,
    scale,
    shortened,
    ticks,
    width_of,
)
from streamrl.report.words import percent, seconds, step_seconds
from streamrl.runfile.gpu_pools import trainer_names
from streamrl.runfile.roles_config import (
    RolloutConfig,
    SecondaryTrainerConfig,
    TrainerConfig,
    VerifierConfig,
)

WIDTH, NARROW = 900.0, 400.0
LEFT, RIGHT, TOP = 88.0, 12.0, 20.0
MOST_ROWS = 32  # replicas that can be drawn in separate rows
ROW, HIGHEST, ROOM = (
    12.0,
    24.0,
    192.0,
)  # of a replica's row: lowest, highest, and of all rows if they are few
LANE, BELOW = 16.0, 22.0  # height of a trainer's or the link's row, and distance to the next
BELOW_ROWS = 40.0  # for the time scale
COLUMNS = 320  # samples of the running count over a step
SHORTEST = 1.2  # width of a span that would otherwise be invisible
Steps = tuple[int, int]
"""The first and the last of some successive steps."""


class Window(NamedTuple):
    """The time range of a picture."""

    steps: Steps
    start: float
    """End of the step before the first, in seconds since the run's start."""
    ends: list[float]
    """End of each step, in seconds since the run's start."""
    across: Callable[[float], float]
    """Maps instants to positions."""

    @property
    def end(self) -> float:
        """Return the end of the last step."""
        return self.ends[-1]

    @property
    def seconds(self) -> float:
        """Return its duration."""
        return self.end - self.start


def timeline_picture(
    name: str,
    label: str,
    trace: Trace,
    metrics: Metrics,
    steps: Steps,
    longest: float | None = None,
) -> Picture:
    """Draw the first to the last of `steps`; `longest` seconds fill the width, so that pictures compare.

    Raises:
        ValueError: `steps` are outside the run.
    """
    window, timeline = _window(metrics, steps, longest, WIDTH), read_timeline(trace)
    shown = _evenly(list(timeline.replicas), MOST_ROWS)
    lanes = lanes_of(trace.run.followers, trace.run.verifier, timeline)
    words = [
        *step_words(trace.run.followers, trace.run.verifier, timeline, window),
        *_underfilled_words(trace, timeline, window),
    ]
    if hidden := len(timeline.replicas) - len(shown):
        words.append(f"{hidden} of {len(timeline.replicas)} replicas are not drawn.")
    title = f"{label}: {_steps_text(window, metrics)}"
    wide, narrow = (
        Drawing(each_name, title, " ".join(words), width)
        for each_name, width in ((name, WIDTH), (f"{name}-narrow", NARROW))
    )
    for drawing in (wide, narrow):
        window = _window(metrics, steps, longest, drawing.width)
        _draw_rows(drawing, trace, timeline, shown, lanes, window)
        _draw_time(drawing, window, longest or window.seconds)
    legend = _legend([*timeline.replicas.values(), *lanes.values()])
    return Picture(wide, wide.description, legend, narrow)


def _draw_rows(
    drawing: Drawing,
    trace: Trace,
    timeline: Timeline,
    shown: list[int],
    lanes: dict[str, list[Span]],
    window: Window,
) -> None:
    """Draw the replicas, and each trainer, the link and the verifier below them."""
    height = min(HIGHEST, max(ROW, ROOM / max(1, len(shown))))
    _draw_replicas(drawing, trace, timeline, shown, window, height)
    bottom = TOP + len(shown) * height + 8
    for row, spans in lanes.items():
        _draw_lane(drawing, window, bottom, LANE)
        _draw_spans(drawing, spans, window, bottom, LANE)
        drawing.text(LEFT - 8, bottom + 12, shortened(row, LEFT - 8), "small", "end")
        bottom += BELOW
    drawing.height = bottom + BELOW_ROWS


def typical_step(metrics: Metrics) -> int:
    """Return the step nearest the median of the counted steps; the run's last one is avoided if possible."""
    first, last = metrics.counted_steps
    inner = range(first, max(first + 1, min(last + 1, metrics.num_steps)))
    middle = median(metrics.step_times[step - 1] for step in inner)
    return min(inner, key=lambda step: abs(metrics.step_times[step - 1] - middle))


def _window(metrics: Metrics, steps: Steps, longest: float | None, width: float) -> Window:
    first, last = steps
    if not 1 <= first <= last <= metrics.num_steps:
        raise ValueError(f"steps must be from 1 to {metrics.num_steps}, got {first} to {last}")
    ended_at = [*accumulate(metrics.step_times, initial=0.0)]
    start, ends = ended_at[first - 1], ended_at[first : last + 1]
    drawn = longest or ends[-1] - start
    return Window(steps, start, ends, scale(start, start + drawn, LEFT, width - RIGHT))


def _steps_text(window: Window, metrics: Metrics) -> str:
    first, last = window.steps
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    took = f"{seconds(window.seconds)} (mean step {step_seconds(metrics.step_time, None)})"
    return f"{which} of {metrics.num_steps}, {took}"


def lanes_of(
    followers: tuple[SecondaryTrainerConfig, ...], verifier: VerifierConfig, timeline: Timeline
) -> dict[str, list[Span]]:
    """Return the rows below the replicas by name: each trainer, the link, and verifiers with GPUs."""
    lanes = {
        name: timeline.trainers.get(trainer, [])
        for trainer, name in enumerate(trainer_names(followers))
    }
    lanes["link"] = timeline.link
    if verifier.num_gpus:
        lanes["verifier"] = timeline.verifier
    return lanes


def step_words(
    followers: tuple[SecondaryTrainerConfig, ...],
    verifier: VerifierConfig,
    timeline: Timeline,
    window: Window,
) -> Iterator[str]:
    """Yield sentences on how busy each resource was."""
    took = window.seconds
    shares = [_within(spans, window, "generate") / took for spans in timeline.replicas.values()]
    if shares:
        least, most = percent(min(shares)), percent(max(shares))
        these = "this step's" if len(window.ends) == 1 else "these steps'"
        yield f"Of {these} {seconds(took)}, replicas generate {least} to {most} each."
    for trainer, name in enumerate(trainer_names(followers)):
        shares_of = _shares_of(timeline.trainers.get(trainer, []), window)
        yield (
            f"The time of {name}: {shares_of}." if trainer else f"The trainer's time: {shares_of}."
        )
    if verifier.num_gpus:
        share = _within(timeline.verifier, window, "verify") / took
        yield f"Rewards are being computed for {percent(share)} of the time."
    yield f"The link carries weights for {seconds(_within(timeline.link, window, 'push'))}."


def _underfilled_words(trace: Trace, timeline: Timeline, window: Window) -> Iterator[str]:
    """Yield how much of the replicas' time full batches would save."""
    parts, kinds = read_parts(trace, (window.start, window.end)), trace.run.replica_kinds
    took = sum(
        _within(spans, window, "generate") * kinds[timeline.kinds.get(replica, 0)].gpus_per_replica
        for replica, spans in timeline.replicas.items()
    )
    if parts[0].source != "unknown" and took:
        share = sum(each.underfilled for each in parts) / took
        yield f"Full batches would not have needed {percent(share)} of the time in which they generate."


def _shares_of(spans: Sequence[Span], window: Window) -> str:
    """Return the activities of a trainer with their shares of the window."""
    done = sorted({span.activity for span in spans if _is_seen(span, window)})
    busy = {name: _within(spans, window, name) / window.seconds for name in done}
    idle = max(0.0, round(1 - sum(busy.values()), 9))
    parts = [f"{name} {percent(share)}" for name, share in busy.items()]
    return ", ".join([*parts, f"idle {percent(idle)}"])


def trained_on_replicas(
    rollout: RolloutConfig, trainer: TrainerConfig, shares_gpus: bool, timeline: Timeline
) -> dict[int, list[Span]]:
    """Return the primary trainer's spans on the GPUs that it shares with replicas, by replica."""
    if not shares_gpus:
        return {}
    spans = timeline.trainers.get(LEADER, [])
    work = [span for span in spans if span.activity in ("score", "train")]
    shared = min(rollout.replicas, -(-trainer.num_gpus // rollout.gpus_per_replica))
    return dict.fromkeys(range(shared), work)


def _legend(rows: Sequence[Sequence[Span]]) -> list[tuple[str, str]]:
    """Return the legend of all activities in the run; full and draining replicas are separate."""
    found = {span.activity: None for spans in rows for span in spans if span.end > span.start}
    shades = [
        (f"c-generate level-{LEVELS}", "generate, many rollouts"),
        ("c-generate level-1", "few"),
    ]
    rest = [(f"c-{name}", name) for name in found if name != "generate"]
    return [*shades, *rest, ("lane", "idle")]


def _is_seen(span: Span, window: Window) -> bool:
    return span.end > window.start and span.start < window.end


def _within(spans: Sequence[Span], window: Window, activity: str) -> float:
    """Return the seconds of an activity in the window."""
    return sum(
        max(0.0, min(span.end, window.end) - max(span.start, window.start))
        for span in spans
        if span.activity == activity
    )


def _evenly(replicas: list[int], most: int) -> list[int]:
    """Return at most `most` replicas, spread evenly over all."""
    if len(replicas) <= most:
        return replicas
    return [replicas[round(i * (len(replicas) - 1) / (most - 1))] for i in range(most)]


def _draw_replicas(
    drawing: Drawing,
    trace: Trace,
    timeline: Timeline,
    shown: list[int],
    window: Window,
    height: float,
) -> None:
    """Shade each replica by its number of running rollouts, and draw its other activities on top."""
    counts = {replica: _running(timeline.rollouts.get(replica, []), window) for replica in shown}
    most = max([1.0, *(float(count.max()) for count in counts.values())])
    trained = trained_on_replicas(
        trace.run.rollout, trace.run.trainer, trace.run.policies.shares_gpus, timeline
    )
    every = ceil((SMALL + 2) / height)
    for row, replica in enumerate(shown):
        y, inner = TOP + row * height + 1, height - 2
        _draw_lane(drawing, window, y, inner)
        for start, end, level, count in _stretches(counts[replica], window, most):
            x, told = window.across(start), f"replica {replica}: up to {count} rollouts"
            width = window.across(end) - x
            drawing.rectangle(x, y, width, inner, f"c-generate level-{level}", told)
        spans = [s for s in timeline.replicas[replica] if s.activity != "generate"]
        _draw_spans(drawing, spans + trained.get(replica, []), window, y, inner)
        if row % every == 0:
            drawing.text(LEFT - 8, y + inner / 2 + 4, f"replica {replica}", "muted small", "end")


def _running(spans: Sequence[Span], window: Window) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the number of running rollouts in the middle of each column of the window."""
    columns = COLUMNS * len(window.ends)
    middles = window.start + (np.arange(columns) + 0.5) * window.seconds / columns
    begun = np.searchsorted(np.sort([span.start for span in spans]), middles, side="right")
    ended = np.searchsorted(np.sort([span.end for span in spans]), middles, side="right")
    return (begun - ended).astype(np.float64)


def _stretches(
    counts: np.ndarray[tuple[int], np.dtype[np.float64]], window: Window, most: float
) -> Iterator[tuple[float, float, int, int]]:
    """Yield start, end, shade and largest count of each stretch of one shade."""
    levels = np.ceil(counts / most * LEVELS).astype(int).tolist()
    width = window.seconds / len(levels)
    place = 0
    for level, group in groupby(levels):
        length = len(list(group))
        if level:
            largest = int(counts[place : place + length].max())
            start = window.start + place * width
            yield start, start + length * width, level, largest
        place += length


def _draw_lane(drawing: Drawing, window: Window, y: float, height: float) -> None:
    left, right = window.across(window.start), window.across(window.end)
    drawing.rectangle(left, y, right - left, height, "lane")


def _draw_spans(
    drawing: Drawing, spans: Sequence[Span], window: Window, y: float, height: float
) -> None:
    for span in spans:
        if _is_seen(span, window) and span.end > span.start:
            start, end = max(span.start, window.start), min(span.end, window.end)
            width = max(window.across(end) - window.across(start), SHORTEST)
            told = f"{span.activity} {span.label}: {seconds(span.end - span.start)}"
            drawing.rectangle(window.across(start), y, width, height, f"c-{span.activity}", told)


def _draw_time(drawing: Drawing, window: Window, longest: float) -> None:
    """Draw a time scale from the first step's start below the rows, and the end of each step."""
    first, last = window.steps
    bottom, border = drawing.height - BELOW_ROWS, drawing.width - RIGHT
    since = scale(0.0, longest, LEFT, border)
    drawing.ticks_below(
        ticks(0.0, longest, 9 if drawing.width == WIDTH else 5),
        since,
        (TOP, bottom),
        lambda t: seconds(t) if t else "0",
        "grid over",
    )
    told = f"since step {first} began, {seconds(window.start)} after the run's start →"
    drawing.text(border, bottom + 36, told, "small", "end")
    left = LEFT
    for step, end in zip(range(first, last + 1), window.ends, strict=True):
        right, name = window.across(end), f"step {step}"
        drawing.line(right, TOP - 6, right, bottom, "axis")
        if right - left > width_of(name):
            drawing.text((left + right) / 2, TOP - 6, name, "small", "middle")
        left = right

"""One step of a run: what every replica, the trainer and the link did when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from statistics import median

import numpy as np

from streamrl.record.metrics import Metrics
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.record.trace import Trace
from streamrl.report.figures import trained_on_replicas
from streamrl.report.pictures.drawing import Drawing, scale, ticks
from streamrl.report.words import percent, seconds

WIDTH = 900.0
LEFT, TOP = 88.0, 6.0
MOST_ROWS = 24  # replicas that stay apart at this size
COLUMNS = 320  # samples of the running count over a step
LEVELS = 5  # shades of how many rollouts run
SHORTEST = 0.6  # width of a span that would vanish
Window = tuple[float, float]


def typical_step(metrics: Metrics, warm_up: int) -> int:
    """Give the number of the step nearest the median, warm-up and last step left out where others remain."""
    steps = range(1, metrics.num_steps + 1)
    inner = [step for step in steps if warm_up < step < metrics.num_steps] or list(steps)
    middle = median(metrics.step_times[step - 1] for step in inner)
    return min(inner, key=lambda step: abs(metrics.step_times[step - 1] - middle))


def window_of(metrics: Metrics, step: int) -> Window:
    """Give the instants at which a step begins, when the one before ends, and ends."""
    ended_at = [*accumulate(metrics.step_times, initial=0.0)]
    return ended_at[step - 1], ended_at[step]


def step_figure(name: str, label: str, trace: Trace, metrics: Metrics, longest: float) -> Drawing:
    """Draw a typical step; `longest` seconds fill the width, so that figures compare."""
    step = typical_step(metrics, trace.run.warm_up_steps)
    window, timeline = window_of(metrics, step), read_timeline(trace)
    shown = _evenly(list(timeline.replicas), MOST_ROWS)
    took = window[1] - window[0]
    title = f"{label}: step {step} of {metrics.num_steps}, {seconds(took)}"
    drawing = Drawing(name, title, " ".join(step_words(timeline, window)), WIDTH)
    across = scale(window[0], window[0] + longest, LEFT, WIDTH - 12)
    height = 12.0 if len(shown) > 8 else 18.0
    _draw_replicas(drawing, trace, timeline, shown, window, across, height)
    y = TOP + len(shown) * height + 8
    for row, spans in (("trainer", timeline.trainer), ("link", timeline.link)):
        drawing.rectangle(across(window[0]), y, across(window[1]) - LEFT, 16, "lane")
        _draw_spans(drawing, spans, window, across, (y, 16.0))
        drawing.text(LEFT - 8, y + 12, row, "small", "end")
        y += 22
    for value in ticks(0.0, longest, 9):
        x = across(window[0] + value)
        drawing.line(x, TOP, x, y, "grid over")
        drawing.text(x, y + 14, seconds(value) if value else "0", "muted small", "middle")
    drawing.line(across(window[1]), TOP, across(window[1]), y, "axis")
    drawing.height = y + 24
    return drawing


def step_words(timeline: Timeline, window: Window) -> Iterator[str]:
    """Say in sentences how busy each resource was."""
    took = window[1] - window[0]
    shares = []
    for spans in timeline.replicas.values():
        shares.append(_within(spans, window, "generate") / took)
    if shares:
        least, most = min(shares), max(shares)
        yield (
            f"Of this step's {seconds(took)}, replicas generate {percent(least)} to {percent(most)} each."
        )
    done = {s.activity for s in timeline.trainer if s.end > window[0] and s.start < window[1]}
    busy = sum(_within(timeline.trainer, window, name) / took for name in done)
    parts = [
        f"{name} {percent(_within(timeline.trainer, window, name) / took)}" for name in sorted(done)
    ]
    yield f"The trainer's time: {', '.join([*parts, f'idle {percent(max(0.0, 1 - busy))}'])}."
    yield f"The link carries weights for {seconds(_within(timeline.link, window, 'push'))}."


def activities_of(trace: Trace) -> list[str]:
    """Give what anybody does in a run, for the legend."""
    timeline = read_timeline(trace)
    rows = [*timeline.replicas.values(), timeline.trainer, timeline.link]
    found = {span.activity: None for spans in rows for span in spans if span.end > span.start}
    return [name for name in found if name != "generate"]


def _within(spans: Sequence[Span], window: Window, activity: str) -> float:
    return sum(
        max(0.0, min(span.end, window[1]) - max(span.start, window[0]))
        for span in spans
        if span.activity == activity
    )


def _evenly(replicas: list[int], most: int) -> list[int]:
    """Keep so many, spread evenly over all."""
    if len(replicas) <= most:
        return replicas
    return [replicas[round(i * (len(replicas) - 1) / (most - 1))] for i in range(most)]


def _draw_replicas(
    drawing: Drawing,
    trace: Trace,
    timeline: Timeline,
    shown: list[int],
    window: Window,
    across: Callable[[float], float],
    height: float,
) -> None:
    """Shade each replica by how many rollouts run, and lay over it what else it does."""
    counts = {replica: _running(timeline.rollouts.get(replica, []), window) for replica in shown}
    most = max([1.0, *(float(count.max()) for count in counts.values())])
    trained = trained_on_replicas(trace.run, timeline)
    every = 1 if len(shown) <= 8 else 4
    for row, replica in enumerate(shown):
        y = TOP + row * height
        drawing.rectangle(across(window[0]), y + 1, across(window[1]) - LEFT, height - 2, "lane")
        for start, end, level, count in _stretches(counts[replica], window, most):
            box = (across(start), y + 1, across(end) - across(start), height - 2)
            drawing.rectangle(
                *box, f"c-generate level-{level}", f"replica {replica}: up to {count} rollouts"
            )
        spans = [s for s in timeline.replicas[replica] if s.activity != "generate"]
        _draw_spans(drawing, spans + trained.get(replica, []), window, across, (y + 1, height - 2))
        if row % every == 0:
            drawing.text(LEFT - 8, y + height / 2 + 4, f"replica {replica}", "muted small", "end")


def _running(spans: Sequence[Span], window: Window) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Count the rollouts that run in the middle of each column of the window."""
    start, end = window
    middles = start + (np.arange(COLUMNS) + 0.5) * (end - start) / COLUMNS
    begun = np.searchsorted(np.sort([span.start for span in spans]), middles, side="right")
    ended = np.searchsorted(np.sort([span.end for span in spans]), middles, side="right")
    return (begun - ended).astype(np.float64)


def _stretches(
    counts: np.ndarray[tuple[int], np.dtype[np.float64]], window: Window, most: float
) -> Iterator[tuple[float, float, int, int]]:
    """Give start, end, shade and largest count of each stretch of one shade."""
    levels = np.ceil(counts / most * LEVELS).astype(int).tolist()
    width = (window[1] - window[0]) / COLUMNS
    place = 0
    for level, group in groupby(levels):
        length = len(list(group))
        if level:
            largest = int(counts[place : place + length].max())
            start = window[0] + place * width
            yield start, start + length * width, level, largest
        place += length


def _draw_spans(
    drawing: Drawing,
    spans: Sequence[Span],
    window: Window,
    across: Callable[[float], float],
    row: tuple[float, float],
) -> None:
    y, height = row
    for span in spans:
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if end > start:
            width = max(across(end) - across(start), SHORTEST)
            told = f"{span.activity} {span.label}: {seconds(span.end - span.start)}"
            drawing.rectangle(across(start), y, width, height, f"c-{span.activity}", told)

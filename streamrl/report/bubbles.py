"""Show what the GPUs of a run waited for in some of its steps, and how a change of policy affected that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
from rich.table import Table

from streamrl.engine.trace import Trace
from streamrl.record.attribution import IDLE, UNDERFILLED, attribute
from streamrl.record.charges import read_paid
from streamrl.record.metrics import measure
from streamrl.record.rollout_flow import read_flow
from streamrl.runfile.formatting import format_dollars, format_share

WORTH_SAYING = 0.005  # share of a step's GPU-seconds below which a bubble is not mentioned
LEAST_SECONDS = 1e-6  # of a GPU: less is rounding
SAME_TIME = 0.01  # relative difference of two step times that counts as equal


class Bubbles(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-seconds of an average step; `busy` and `idle` sum to `gpu_seconds`."""

    name: str
    step_time: float
    """Mean seconds of a step."""
    gpu_seconds: float
    busy: dict[str, float]
    """GPU-seconds by activity."""
    idle: dict[str, float]
    """GPU-seconds by cause."""
    goodput: float
    """Trained output tokens per second."""
    cost_per_million_tokens: float
    """Dollars per million trained tokens."""

    @property
    def idle_share(self) -> float:
        """Return the share of GPU-seconds in which a GPU waits."""
        return sum(self.idle.values()) / self.gpu_seconds

    @property
    def underfilled(self) -> float | None:
        """Return the GPU-seconds of decoding that full batches would save; None if unknown."""
        return self.busy.get(UNDERFILLED)


def read_bubbles(name: str, trace: Trace, steps: tuple[int, int]) -> Bubbles:
    """Return the average over the first to the last of `steps`. A step begins when the previous one ends.

    Raises:
        ValueError: `steps` are outside the trace.
    """
    (first, last), metrics, flow = steps, measure(trace), read_flow(trace)
    if not 1 <= first <= last <= metrics.num_steps:
        raise ValueError(f"steps must be from 1 to {metrics.num_steps}, got {first} to {last}")
    ended_at = [*accumulate(metrics.step_times, initial=0.0)]
    window, count = (ended_at[first - 1], ended_at[last]), last - first + 1
    seconds = window[1] - window[0]
    shares = attribute(trace, window)
    goodput = sum(flow.leader.made.num_tokens[first - 1 : last]) / seconds
    paid = read_paid(trace, *window)
    return Bubbles(
        name=name,
        step_time=seconds / count,
        gpu_seconds=shares.gpu_seconds / count,
        busy={key: share * shares.gpu_seconds / count for key, share in shares.busy.items()},
        idle={key: share * shares.gpu_seconds / count for key, share in shares.idle.items()},
        goodput=goodput,
        cost_per_million_tokens=paid.dollars_per_second / goodput * 1e6,
    )


def bubble_table(runs: Sequence[Bubbles]) -> Table:
    """Lay runs out side by side: idle GPU-seconds of a step by cause, then step time and cost."""
    table = Table(box=None, pad_edge=False)
    table.add_column("GPU-seconds a step", style="bold", no_wrap=True)
    for run in runs:
        table.add_column(run.name, justify="right")
    for cause in causes(runs):
        table.add_row(f"idle: {cause}", *(f"{run.idle[cause]:,.0f}" for run in runs))
    table.add_row("idle", *(f"{sum(run.idle.values()):,.0f}" for run in runs))
    table.add_row("busy", *(f"{sum(run.busy.values()):,.0f}" for run in runs))
    if any(run.underfilled is not None for run in runs):
        table.add_row(f"  {UNDERFILLED}", *(_known(run.underfilled) for run in runs))
    table.add_row("idle share", *(format_share(run.idle_share) for run in runs))
    table.add_row()
    table.add_row("step time, s", *(f"{run.step_time:,.0f}" for run in runs))
    table.add_row("goodput, tokens/s", *(f"{run.goodput:,.0f}" for run in runs))
    table.add_row(
        "$ per million tokens", *(format_dollars(run.cost_per_million_tokens) for run in runs)
    )
    return table


def _known(gpu_seconds: float | None) -> str:
    return "?" if gpu_seconds is None else f"{gpu_seconds:,.0f}"


def causes(runs: Sequence[Bubbles], least: float = 0.0) -> list[str]:
    """Return the causes for which any run waited during more than a share of its GPU-seconds."""
    return [
        cause
        for cause in IDLE
        if any(run.idle[cause] > least * run.gpu_seconds + LEAST_SECONDS for run in runs)
    ]


def bubble_notes(before: Bubbles, after: Bubbles) -> list[str]:
    """Return lines on how a change affected the step, each bubble, and the price."""
    notes = [_step_note(before, after), *_cause_notes(before, after), _price_note(before, after)]
    saved = sum(before.idle.values()) - sum(after.idle.values())
    if _is_as_long(before, after) and saved > WORTH_SAYING * before.gpu_seconds:
        notes.append(
            "Less idle, and yet hardly a shorter step: what GPUs do instead saves no time."
        )
    return [*notes, _rest_note(after)]


def _is_as_long(before: Bubbles, after: Bubbles) -> bool:
    return abs(after.step_time / before.step_time - 1) < SAME_TIME


def _step_note(before: Bubbles, after: Bubbles) -> str:
    took = f"{after.step_time:,.0f} s"
    if _is_as_long(before, after):
        return f"{after.name}: a step takes {took}, as long as with {before.name} (within 1 %)."
    change = after.step_time / before.step_time - 1
    return (
        f"{after.name}: a step takes {took} instead of {before.step_time:,.0f} s with {before.name} "
        f"({change * 100:+.0f} %)."
    )


def _cause_notes(before: Bubbles, after: Bubbles) -> Iterator[str]:
    """Yield lines on the bubbles that changed, largest first, and on underfilled batches."""
    pairs = {cause: (before.idle[cause], after.idle[cause]) for cause in IDLE}
    if before.underfilled is not None and after.underfilled is not None:
        pairs[UNDERFILLED] = (before.underfilled, after.underfilled)
    for cause, (old, new) in sorted(pairs.items(), key=lambda item: -abs(item[1][1] - item[1][0])):
        if abs(new - old) > WORTH_SAYING * before.gpu_seconds:
            verb = "shrinks" if new < old else "grows"
            yield f"  {cause} {verb} from {old:,.0f} to {new:,.0f} GPU-seconds a step"


def _rest_note(run: Bubbles) -> str:
    if run.idle_share < WORTH_SAYING:
        return "Hardly an idle GPU-second is left."
    cause, left = max(run.idle.items(), key=lambda item: item[1])
    share = format_share(left / run.gpu_seconds)
    return f"Largest bubble left: {cause}, {share} of all GPU-seconds."


def _price_note(before: Bubbles, after: Bubbles) -> str:
    return (
        f"  a million tokens trained on cost {format_dollars(after.cost_per_million_tokens)}, "
        f"before {format_dollars(before.cost_per_million_tokens)}"
    )

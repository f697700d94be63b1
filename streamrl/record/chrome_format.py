"""Chrome's trace format: what an event is, and the threads that a run is drawn on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from streamrl.record.timeline import Span

REPLICAS, TRAINERS, LINKS, VERIFIERS = 1, 2, 3, 4
PROCESSES = {REPLICAS: "replicas", TRAINERS: "trainers", LINKS: "links", VERIFIERS: "verifiers"}
MICROSECONDS = 1e6

Arguments: TypeAlias = dict[str, str | int | float]
Thread: TypeAlias = tuple[int, int]
"""Process, and thread of it."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One trace event: X slice, b and e ends of an async slice, C counter, i instant, M metadata.

    Every event says its thread: where `tid` is absent, Perfetto takes the thread numbered as the process is.
    """

    ph: Literal["X", "b", "e", "C", "i", "M"]
    name: str
    pid: int
    tid: int
    ts: float
    dur: float | None = None
    cat: str = ""
    id: int | None = None
    s: Literal["g", ""] = ""
    """Scope of an instant: g is the whole trace."""
    args: Arguments | None = None


def slice_event(span: Span, thread: Thread) -> TraceEvent:
    """Return a slice of a thread."""
    start, end = microseconds(span.start), microseconds(span.end)
    return TraceEvent(
        ph="X",
        name=span.activity,
        pid=thread[0],
        tid=thread[1],
        ts=start,
        dur=end - start,
        args={"what": span.label} if span.label else None,
    )


def rollout_event(
    ph: Literal["b", "e"], replica: int, attempt: int, ts: float, args: Arguments | None
) -> TraceEvent:
    """Return an end of a rollout's slice, which is of its replica."""
    return TraceEvent(
        ph=ph,
        name=f"rollouts of replica {replica}",
        cat="rollout",
        pid=REPLICAS,
        tid=replica,
        id=attempt,
        ts=ts,
        args=args,
    )


def name_thread(pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
    """Yield the name of a thread, and its place among the others."""
    yield metadata_event("thread_name", pid, tid, {"name": name})
    yield metadata_event("thread_sort_index", pid, tid, {"sort_index": tid})


def metadata_event(name: str, pid: int, tid: int, args: Arguments) -> TraceEvent:
    """Return what names a process or a thread, or gives it its place."""
    return TraceEvent(ph="M", name=name, pid=pid, tid=tid, ts=0.0, args=args)


def counter_event(name: str, pid: int, time: float, value: float) -> TraceEvent:
    """Return what a counter says from an instant on."""
    return TraceEvent(
        ph="C", name=name, pid=pid, tid=0, ts=microseconds(time), args={"value": value}
    )


def instant_event(name: str, time: float) -> TraceEvent:
    """Return a mark over the whole trace."""
    return TraceEvent(ph="i", name=name, pid=TRAINERS, tid=0, ts=microseconds(time), s="g")


def microseconds(seconds: float) -> float:
    """Return microseconds to the nanosecond, which is as fine as viewers go."""
    return round(max(seconds, 0.0) * MICROSECONDS, 3)

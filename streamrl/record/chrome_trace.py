"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    process     tracks
    replicas    a thread a replica with its activities; its rollouts as overlapping (async) slices; how many run on all,
                and on how many GPUs' worth a full batch would be missed, as counters
    trainers    a thread a trainer: score, train, checkpoint, failure; its version as a counter; an instant for each
                step of the one that leads
    links       pushes of weights
    verifiers   when any reward is computed, where verifiers have GPUs

Format: "Trace Event Format", Google, 2016; times are microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from streamrl.engine.messages import (
    Failed,
    Generate,
    Generated,
    ReplicaLost,
    RunStarted,
    Stepped,
    Train,
    TrainerLost,
    TrainerStarted,
)
from streamrl.engine.trainer_side import LEADER
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.record.trace import Trace, blaming_damage
from streamrl.record.underfilled import read_underfilled
from streamrl.runfile.config import Run
from streamrl.runfile.sides import trainer_names

MICROSECONDS = 1e6
REPLICAS, TRAINERS, LINKS, VERIFIERS = 1, 2, 3, 4
PROCESSES = {REPLICAS: "replicas", TRAINERS: "trainers", LINKS: "links", VERIFIERS: "verifiers"}

Arguments: TypeAlias = dict[str, str | int | float]


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


def chrome_trace(trace: Trace) -> bytes:
    """Encode a trace as Chrome trace JSON.

    Raises:
        ValueError: the trace is damaged.
    """
    with blaming_damage(trace):
        timeline = read_timeline(trace)
        events = sorted(_events(trace, timeline), key=attrgetter("ts"))
    return msgspec.json.encode(
        {
            "traceEvents": [*_names(timeline.replicas, trace.run), *events],
            "displayTimeUnit": "ms",
            "otherData": {"system": trace.run.policies.system, "world": trace.world},
        }
    )


def _events(trace: Trace, timeline: Timeline) -> Iterator[TraceEvent]:
    for replica, spans in timeline.replicas.items():
        yield from _slices(spans, REPLICAS, replica)
    for trainer, spans in timeline.trainers.items():
        yield from _slices(spans, TRAINERS, trainer)
    yield from _slices(timeline.link, LINKS, 0)
    if trace.run.verifier.num_gpus:
        yield from _slices(timeline.verifier, VERIFIERS, 0)
    yield from _rollouts(trace)
    yield from _running(span for spans in timeline.rollouts.values() for span in spans)
    yield from _underfilled(trace, timeline)
    yield from _versions(trace)


def _names(replicas: Iterable[int], run: Run) -> Iterator[TraceEvent]:
    """Name processes and threads, and keep replicas and trainers in order."""
    shown = {pid: name for pid, name in PROCESSES.items() if pid != VERIFIERS}
    if run.verifier.num_gpus:
        shown[VERIFIERS] = PROCESSES[VERIFIERS]
        yield _metadata("thread_name", VERIFIERS, 0, {"name": "verifier"})
    for pid, name in shown.items():
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    for replica in replicas:
        yield _metadata("thread_name", REPLICAS, replica, {"name": f"replica {replica}"})
        yield _metadata("thread_sort_index", REPLICAS, replica, {"sort_index": replica})
    for trainer, name in enumerate(trainer_names(run)):
        yield _metadata("thread_name", TRAINERS, trainer, {"name": name})
        yield _metadata("thread_sort_index", TRAINERS, trainer, {"sort_index": trainer})
    yield _metadata("thread_name", LINKS, 0, {"name": "push"})


def _metadata(name: str, pid: int, tid: int, args: Arguments) -> TraceEvent:
    return TraceEvent(ph="M", name=name, pid=pid, tid=tid, ts=0.0, args=args)


def _slices(spans: Iterable[Span], pid: int, tid: int) -> Iterator[TraceEvent]:
    for span in spans:
        start, end = _microseconds(span.start), _microseconds(span.end)
        yield TraceEvent(
            ph="X",
            name=span.activity,
            pid=pid,
            tid=tid,
            ts=start,
            dur=end - start,
            args={"what": span.label} if span.label else None,
        )


def _rollouts(trace: Trace) -> Iterator[TraceEvent]:
    """One async slice for each attempt that reported its end.

    Slices of a replica share one name: viewers make a track of each name, and there are too many rollouts
    for a track of their own. An attempt has an id of its own, as a rollout may be tried again.
    """
    staleness = _staleness(trace)
    replicas: dict[int, int] = {}
    attempt = 0
    for time, event, commands in trace.entries:
        if isinstance(event, Generated):
            attempt += 1
            args: Arguments = {
                "rollout": event.rollout,
                "tokens": event.tokens,
                "version": event.version,
                "finish": event.finish,
                "prefill_time": event.prefill_time,
            }
            if event.rollout in staleness and event.finish != "aborted":
                args["staleness"] = staleness[event.rollout]
            start = _microseconds(time - event.run_time)
            replica = replicas[event.rollout]
            yield _rollout("b", replica, attempt, start, args)
            yield _rollout("e", replica, attempt, _microseconds(time), None)
        for command in commands:
            if isinstance(command, Generate):
                replicas[command.rollout] = command.replica


def _rollout(
    ph: Literal["b", "e"], replica: int, attempt: int, ts: float, args: Arguments | None
) -> TraceEvent:
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


def _staleness(trace: Trace) -> dict[int, int]:
    """Return how many versions each rollout was behind when the leading trainer trained on it."""
    born: dict[int, int] = {}
    staleness: dict[int, int] = {}
    version = 0
    for _, event, commands in trace.entries:
        if isinstance(event, Generated) and event.tokens:
            born.setdefault(event.rollout, event.version)
        elif isinstance(event, Stepped | TrainerStarted) and event.trainer != LEADER:
            pass  # no replica loads it
        elif isinstance(event, RunStarted | Stepped | TrainerStarted):
            version = event.version
        for command in commands:
            if isinstance(command, Train) and command.trainer == LEADER:
                staleness.update((r, version - born[r]) for r in command.rollouts)
    return staleness


def _running(spans: Iterable[Span]) -> Iterator[TraceEvent]:
    """Count the rollouts that run on all replicas."""
    changes: dict[float, int] = {}
    for span in spans:
        changes[span.start] = changes.get(span.start, 0) + 1
        changes[span.end] = changes.get(span.end, 0) - 1
    running = 0
    for time in sorted(changes):
        running += changes[time]
        yield _counter("running rollouts", REPLICAS, time, running)


def _underfilled(trace: Trace, timeline: Timeline) -> Iterator[TraceEvent]:
    """Count the GPUs whose decoding full batches would not have needed; nothing where that is not known."""
    changes: dict[float, float] = defaultdict(float)
    kinds = trace.run.rollout.kinds
    for replica, lost in read_underfilled(trace).replicas.items():
        degree = kinds[timeline.kinds.get(replica, 0)].tensor_parallel
        for start, end, share in zip(*map(np.ndarray.tolist, lost), strict=True):
            changes[start] += share * degree
            changes[end] -= share * degree
    gpus = 0.0
    for time in sorted(changes):
        gpus += changes[time]
        yield _counter("underfilled GPUs", REPLICAS, time, round(gpus, 3))


def _versions(trace: Trace) -> Iterator[TraceEvent]:
    """Count policy versions, and mark what concerns the whole run."""
    names = ["policy version", *(f"version of {name}" for name in trainer_names(trace.run)[1:])]
    versions = [0] * len(names)
    for time, event, _ in trace.entries:
        match event:
            case RunStarted(version):
                versions[LEADER] = version
                yield _counter(names[LEADER], TRAINERS, time, version)
            case Stepped(version, trainer):
                versions[trainer] = version
                yield _counter(names[trainer], TRAINERS, time, version)
                if trainer == LEADER:
                    yield _instant(f"step {version}", time)
            case TrainerStarted(trainer, version) if version != versions[trainer]:
                versions[trainer] = version
                yield _counter(names[trainer], TRAINERS, time, version)
            case TrainerLost(trainer, reason):
                yield _instant(f"{trainer_names(trace.run)[trainer]} lost: {reason}", time)
            case ReplicaLost(replica, reason):
                yield _instant(f"replica {replica} lost: {reason}", time)
            case Failed(_, reason):
                yield _instant(f"failed: {reason}", time)
            case _:
                pass  # concerns one resource


def _counter(name: str, pid: int, time: float, value: float) -> TraceEvent:
    return TraceEvent(
        ph="C", name=name, pid=pid, tid=0, ts=_microseconds(time), args={"value": value}
    )


def _instant(name: str, time: float) -> TraceEvent:
    return TraceEvent(ph="i", name=name, pid=TRAINERS, tid=0, ts=_microseconds(time), s="g")


def _microseconds(seconds: float) -> float:
    """Return microseconds to the nanosecond, which is as fine as viewers go."""
    return round(max(seconds, 0.0) * MICROSECONDS, 3)

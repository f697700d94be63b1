"""Write a run as a Chrome trace for ui.perfetto.dev and chrome://tracing.

    process     tracks
    replicas    one thread for each replica: its activities, and its rollouts as overlapping (async) slices.
                Counters: running rollouts, and underfilled GPUs
    trainers    one thread for each trainer: score, train, checkpoint, failure. Counter: its version.
                An instant for each step of the primary trainer
    links       weight pushes
    verifiers   when any reward is computed, if verifiers have GPUs

Format: "Trace Event Format", Google, 2016. Times are in microseconds. A file of a running run is an array of
the same events. Its events may be out of order, and the closing bracket may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from streamrl.engine.messages import (
    UNFINISHED,
    Drop,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    RunStarted,
    Step,
    Stepped,
    Train,
    TrainerJoined,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
    TrainerStopped,
)
from streamrl.engine.trace import Entry, Trace, blaming_damage
from streamrl.engine.trainer_side import LEADER
from streamrl.record.decode_efficiency import (
    DecodingReader,
    FullBatches,
    Underfilled,
    lost_of,
    read_underfilled,
)
from streamrl.record.timeline import Span, Timeline, TimelineReader
from streamrl.runfile.formatting import counted
from streamrl.runfile.gpu_pools import trainer_names
from streamrl.runfile.roles_config import SecondaryTrainerConfig, VerifierConfig

REPLICAS, TRAINERS, LINKS, VERIFIERS = 1, 2, 3, 4
PROCESSES = {REPLICAS: "replicas", TRAINERS: "trainers", LINKS: "links", VERIFIERS: "verifiers"}
MICROSECONDS = 1e6

Arguments: TypeAlias = dict[str, str | int | float]
Thread: TypeAlias = tuple[int, int]
"""Number of a process, and number of its thread."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One trace event: X slice, b and e the begin and end of an async slice, C counter, i instant, M metadata.

    Every event has a `tid`. Without it, Perfetto uses the thread with the number of the process.
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
    """Scope of an instant: g for the whole trace."""
    args: Arguments | None = None


def slice_event(span: Span, thread: Thread) -> TraceEvent:
    """Return the event of a span on a thread."""
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
    """Return the begin or end of an attempt's slice on the thread of its replica; `attempt` is its id."""
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
    """Yield the events that name a thread and sort it by its number."""
    yield metadata_event("thread_name", pid, tid, {"name": name})
    yield metadata_event("thread_sort_index", pid, tid, {"sort_index": tid})


def metadata_event(name: str, pid: int, tid: int, args: Arguments) -> TraceEvent:
    """Return the event that names or sorts a process or a thread."""
    return TraceEvent(ph="M", name=name, pid=pid, tid=tid, ts=0.0, args=args)


def counter_event(name: str, pid: int, time: float, value: float) -> TraceEvent:
    """Return the event that sets a counter at `time` seconds."""
    return TraceEvent(
        ph="C", name=name, pid=pid, tid=0, ts=microseconds(time), args={"value": value}
    )


def instant_event(name: str, time: float) -> TraceEvent:
    """Return a mark across the whole trace at `time` seconds."""
    return TraceEvent(ph="i", name=name, pid=TRAINERS, tid=0, ts=microseconds(time), s="g")


def microseconds(seconds: float) -> float:
    """Return a time in microseconds, rounded to nanoseconds, the finest unit of the viewers."""
    return round(max(seconds, 0.0) * MICROSECONDS, 3)


BEFORE = 1e-6
"""Blocks are cut this many seconds before an event. So no other change happens at the instant of the cut."""


class ChromeReader:
    """Converts a trace block by block. It keeps only running activities and rollouts that wait for training."""

    def __init__(
        self,
        full: FullBatches,
        followers: tuple[SecondaryTrainerConfig, ...],
        verifier: VerifierConfig,
    ) -> None:
        """Set what is known before the first entry.

        Args:
            full: the throughput of full batches. Without decode curves, underfilled GPUs need the
                whole run; see `count_underfilled`.
            followers: sections of the secondary trainers.
            verifier: section of the verifiers.
        """
        self._full = full
        self._has_verifier = verifier.num_gpus > 0
        self._timeline = TimelineReader()
        self._decoding = DecodingReader()
        self._rollouts = _Rollouts()
        self._trainers = trainer_names(followers)
        self._versions = [0] * len(self._trainers)
        self._cut_at = -inf
        """Instant at which the last block ended."""
        self._cut: dict[Thread, Span] = {}
        """By thread: the span that continued at that instant."""
        self._named: set[int] = set()
        self._kinds: dict[int, int] = {}
        self._running = _Counter("running rollouts")
        self._underfilled = _Counter("underfilled GPUs")

    def names(self) -> Iterator[TraceEvent]:
        """Yield the names of processes and trainers' threads. Replicas are named when they start."""
        shown = {pid: name for pid, name in PROCESSES.items() if pid != VERIFIERS}
        if self._has_verifier:
            shown[VERIFIERS] = PROCESSES[VERIFIERS]
            yield metadata_event("thread_name", VERIFIERS, 0, {"name": "verifier"})
        for pid, name in shown.items():
            yield metadata_event("process_name", pid, 0, {"name": name})
            yield metadata_event("process_sort_index", pid, 0, {"sort_index": pid})
        for trainer, name in enumerate(self._trainers):
            yield from name_thread(TRAINERS, trainer, name)
        yield metadata_event("thread_name", LINKS, 0, {"name": "push"})

    def read(self, entries: Sequence[Entry]) -> Iterator[TraceEvent]:
        """Read the next entries of the trace, and yield the events that are complete."""
        self._timeline.read(entries)
        for entry in entries:
            yield from self._mark(entry)
            yield from self._rollouts.read(entry)

    def settle(self) -> Iterator[TraceEvent]:
        """Yield the events of spans that no later entry can change, and free their memory."""
        until = self._timeline.known_until - BEFORE
        if until > self._cut_at:
            yield from self._go_on(self._timeline.take(until))

    def finish(self) -> Iterator[TraceEvent]:
        """Yield the remaining events. Call this after the last entry."""
        yield from self._rollouts.finish()
        yield from self._go_on(self._timeline.finish(), is_last=True)

    def count_underfilled(self, underfilled: Underfilled) -> Iterator[TraceEvent]:
        """Yield the counter of underfilled GPUs from the underfilled seconds of a whole run."""
        self._enter_lost(underfilled)
        yield from self._underfilled.until(inf, inf)

    def _go_on(self, timeline: Timeline, *, is_last: bool = False) -> Iterator[TraceEvent]:
        """Yield the events of the next part of the timeline. A span that is cut is kept until it ends."""
        self._kinds = timeline.kinds
        for replica in timeline.replicas:
            if replica not in self._named:
                self._named.add(replica)
                yield from name_thread(REPLICAS, replica, f"replica {replica}")
        pieces: dict[Thread, list[Span]] = {thread: [] for thread in self._cut}
        pieces |= {(REPLICAS, r): _activities(spans) for r, spans in timeline.replicas.items()}
        pieces |= {(TRAINERS, t): spans for t, spans in timeline.trainers.items()}
        pieces[LINKS, 0] = timeline.link
        if self._has_verifier:
            pieces[VERIFIERS, 0] = timeline.verifier
        until = inf if is_last else timeline.end
        for thread, spans in pieces.items():
            yield from self._slices(thread, spans, until)
        for spans in timeline.rollouts.values():
            for span in spans:
                self._running.add(span.start, 1)
                self._running.add(span.end, -1)
        yield from self._running.until(until, self._cut_at)
        if self._full.curves:
            yield from self._lose(timeline, is_last=is_last)
        self._cut_at = timeline.end

    def _slices(self, thread: Thread, spans: Sequence[Span], until: float) -> Iterator[TraceEvent]:
        """Yield the slices of one thread, and join a span that the last block cut."""
        cut = self._cut.pop(thread, None)
        for number, span in enumerate(spans):
            if cut is not None and number == 0 and _goes_on(cut, span):
                span = span._replace(start=cut.start)
            elif cut is not None:
                yield slice_event(cut, thread)
            cut = None
            if span.end == until:
                cut = span
            else:
                yield slice_event(span, thread)
        if cut is not None and cut.end == until:
            self._cut[thread] = cut
        elif cut is not None:
            yield slice_event(cut, thread)

    def _lose(self, timeline: Timeline, *, is_last: bool) -> Iterator[TraceEvent]:
        """Yield the counter of underfilled GPUs for the time ranges that ended."""
        until = inf if is_last else timeline.end
        decoding = self._decoding.take(timeline, until)
        self._enter_lost(lost_of(decoding, self._full, self._kinds))
        begun = min(map(self._decoding.began_at, self._named), default=inf)
        yield from self._underfilled.until(inf if is_last else min(until, begun), inf)

    def _enter_lost(self, underfilled: Underfilled) -> None:
        for replica, lost in underfilled.replicas.items():
            degree = self._full.rollouts[self._kinds.get(replica, 0)].gpus_per_replica
            for start, end, share in zip(*map(np.ndarray.tolist, lost), strict=True):
                self._underfilled.add(start, share * degree)
                self._underfilled.add(end, -share * degree)

    def _mark(self, entry: Entry) -> Iterator[TraceEvent]:
        """Yield policy versions as counters, and events of the whole run as instants."""
        time, event, _ = entry
        match event:
            case RunStarted(version):
                yield self._count_version(LEADER, version, time)
            case Stepped(version, trainer):
                yield self._count_version(trainer, version, time)
                if trainer == LEADER:
                    yield instant_event(f"step {version}", time)
            case TrainerStarted(trainer, version) if version != self._versions[trainer]:
                yield self._count_version(trainer, version, time)
            case TrainerJoined(trainer):
                yield from self._name_joined(event)
                yield instant_event(f"{self._trainers[trainer]} joined", time)
            case TrainerResized(trainer, data_parallel):
                ranks = counted(data_parallel, "data-parallel rank")
                yield instant_event(f"{self._trainers[trainer]} has {ranks}", time)
            case TrainerStopped(trainer):
                yield instant_event(f"{self._trainers[trainer]} left", time)
            case TrainerLost(trainer, reason):
                yield instant_event(f"{self._trainers[trainer]} lost: {reason}", time)
            case ReplicaLost(replica, reason):
                yield instant_event(f"replica {replica} lost: {reason}", time)
            case Failed(_, reason):
                yield instant_event(f"failed: {reason}", time)
            case _:
                pass  # concerns one resource

    def _name_joined(self, event: TrainerJoined) -> Iterator[TraceEvent]:
        """Yield the thread name of a trainer that joined and is not in the run file."""
        if event.trainer == len(self._trainers):
            self._trainers.append(str(event.follower.get("name")))
            self._versions.append(0)
            yield from name_thread(TRAINERS, event.trainer, self._trainers[-1])

    def _count_version(self, trainer: int, version: int, time: float) -> TraceEvent:
        self._versions[trainer] = version
        name = f"version of {self._trainers[trainer]}" if trainer else "policy version"
        return counter_event(name, TRAINERS, time, version)


class _Rollouts:
    """Makes an async slice of each finished attempt, once its rollout is trained on or dropped.

    All slices of a replica have the same name, because viewers make a track for each name, and there are
    too many rollouts for that. Each attempt has its own id, because a rollout may have several attempts.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, int] = {}
        """By rollout: the replica that runs its attempt."""
        self._given_up: set[int] = set()
        """Rollouts that were dropped while an attempt ran."""
        self._num_attempts = 0
        self._ended: defaultdict[int, list[tuple[TraceEvent, TraceEvent]]] = defaultdict(list)
        """By rollout: begin and end events of each attempt."""
        self._born: dict[int, int] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._version = 0
        """Version of the primary trainer."""

    def read(self, entry: Entry) -> Iterator[TraceEvent]:
        """Read an entry, and yield the attempts of rollouts that it makes final."""
        time, event, commands = entry
        match event:
            case Generated():
                self._end(event, time)
                if event.rollout in self._given_up:
                    self._given_up.remove(event.rollout)
                    yield from self._emit(event.rollout)
            case Failed(Generate(rollout)):
                self._replicas.pop(rollout, None)
                self._given_up.discard(rollout)
            case PromptsDrawn():
                self._groups |= {drawn.group: drawn.rollouts for drawn in event.groups}
            case RunStarted(version):
                self._version = version
            case Stepped(version, trainer) | TrainerStarted(trainer, version):
                if trainer == LEADER:  # replicas load only its versions
                    self._version = version
            case _:
                pass  # changes no rollout
        for command in commands:
            match command:
                case Generate():
                    self._replicas[command.rollout] = command.replica
                case Train() if command.trainer == LEADER:
                    for rollout in command.rollouts:
                        yield from self._emit(rollout, is_trained=True)
                case Step() if command.trainer == LEADER:
                    for group in command.groups:
                        self._groups.pop(group, None)
                case Drop(group):
                    for rollout in self._groups.pop(group, ()):
                        yield from self._emit(rollout)
                        if rollout in self._replicas:
                            self._given_up.add(rollout)
                case _:
                    pass  # changes no rollout

    def finish(self) -> Iterator[TraceEvent]:
        """Yield the attempts of rollouts that were neither trained on nor dropped."""
        for rollout in list(self._ended):
            yield from self._emit(rollout)

    def _end(self, event: Generated, time: float) -> None:
        self._num_attempts += 1
        rollout, replica = event.rollout, self._replicas.pop(event.rollout)
        if event.tokens:
            self._born.setdefault(rollout, event.version)
        args: Arguments = {
            "rollout": rollout,
            "tokens": event.tokens,
            "version": event.version,
            "finish": event.finish,
            "prefill_time": event.prefill_time,
        }
        start = microseconds(time - event.run_time)
        both = (
            rollout_event("b", replica, self._num_attempts, start, args),
            rollout_event("e", replica, self._num_attempts, microseconds(time), None),
        )
        self._ended[rollout].append(both)

    def _emit(self, rollout: int, *, is_trained: bool = False) -> Iterator[TraceEvent]:
        """Yield the attempts of a rollout, with its staleness if it is trained on."""
        born = self._born.pop(rollout, None)
        for begin, end in self._ended.pop(rollout, ()):
            args = begin.args
            if is_trained and born is not None and args and args["finish"] not in UNFINISHED:
                args["staleness"] = self._version - born
            yield begin
            yield end


class _Counter:
    """Adds up changes, and yields the sum at each instant once no earlier change can arrive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changes: defaultdict[float, float] = defaultdict(int)
        self._value: float = 0

    def add(self, time: float, change: float) -> None:
        """Add a change at `time` seconds."""
        self._changes[time] += change

    def until(self, time: float, cut_at: float) -> Iterator[TraceEvent]:
        """Yield the sums at instants before `time`, except a sum that did not change at the instant of a cut."""
        for at in sorted(at for at in self._changes if at < time):
            change = self._changes.pop(at)
            self._value += change
            if change or at != cut_at:
                yield counter_event(self._name, REPLICAS, at, round(self._value, 3))


def _goes_on(cut: Span, span: Span) -> bool:
    return span.start == cut.end and span[2:] == cut[2:]


def _activities(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of a replica in order, without labels of rollouts, which have their own slices."""
    return sorted(s._replace(label="") if s.activity == "generate" else s for s in spans)


CHROME_TRACE = "chrome_trace.json"
"""File name in a run directory."""


def chrome_trace(trace: Trace) -> bytes:
    """Encode a trace as Chrome trace JSON, in order of time.

    Raises:
        ValueError: the trace is damaged.
    """
    with blaming_damage(trace):
        run = trace.run
        reader = ChromeReader(FullBatches.of(trace), run.followers, run.verifier)
        events = [*reader.names(), *reader.read(trace.entries), *reader.finish()]
        if not trace.decode:  # then the throughput of full batches comes from the whole run
            events += reader.count_underfilled(read_underfilled(trace))
    events.sort(key=_place)
    return msgspec.json.encode(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"system": trace.run.policies.system, "world": trace.world},
        }
    )


def _place(event: TraceEvent) -> tuple[bool, float]:
    return event.ph != "M", event.ts

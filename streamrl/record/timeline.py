"""Reconstruct from a trace the time span of each activity of each replica, trainer, link and verifier.

Figures draw these spans, and `attribution.py` adds them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    SaveCheckpoint,
    Score,
    Scored,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    StopTrainer,
    Train,
    Trained,
    TrainerLost,
    TrainerStarted,
    TrainerStopped,
    Verified,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import TrainerCommand
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.notebook import frame_of, html_table

if TYPE_CHECKING:
    from pandas import DataFrame

TRAINER_WORK: dict[type, str] = {
    StartTrainer: "start-up",
    StopTrainer: "checkpoint",
    Score: "score",
    Train: "train",
    Step: "train",
    SaveCheckpoint: "checkpoint",
}


class Span(NamedTuple):
    """One resource doing one thing from `start` to `end` seconds."""

    start: float
    end: float
    activity: str
    """start-up, generate, sync, score, train, checkpoint, failure, push or verify."""
    label: str = ""


Spans: TypeAlias = dict[int, list[Span]]
"""By replica or trainer."""


class Timeline(NamedTuple):
    """Every span of a run, or of a part of it, by resource and in order of time."""

    replicas: dict[int, list[Span]]
    """By replica: "generate" while a rollout runs, "sync" while weights are loaded, "start-up"; gaps are idle."""
    trainers: dict[int, list[Span]]
    """By trainer; gaps are idle. "failure" lasts from a loss until the trainer has restarted, or from a failure without
    a retry to the end of the trace."""
    link: list[Span]
    """"push" while weights are pushed."""
    verifier: list[Span]
    """"verify" while any reward is computed."""
    rollouts: dict[int, list[Span]]
    """By replica: one span for each attempt, labelled with its rollout. These spans overlap."""
    prefills: dict[int, list[Span]]
    """By replica: when prefixes of rollouts were computed. These are parts of its "generate" spans."""
    kinds: dict[int, int]
    """By replica: its kind, if it is not the first kind."""
    end: float

    def __repr__(self) -> str:
        counts = {"replica": len(self.replicas), "trainer": len(self.trainers)}
        sides = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()]
        return f"<Timeline of {' and '.join(sides)}: {format_duration(self.end)}>"

    def _repr_html_(self) -> str:
        """Return the seconds of each activity, added up over resources, as a table for a notebook."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for resource, span in self._spans():
            seconds[resource.split(" ")[0], span.activity] += span.end - span.start
        rows = [(*what, format_duration(spent)) for what, spent in seconds.items()]
        return html_table(repr(self).strip("<>"), rows, ("resource", "activity", "time of all"))

    def to_frame(self) -> DataFrame:
        """Return a row for each span: its resource, its activity, start, end and duration in seconds."""
        return frame_of(
            (
                {
                    "resource": resource,
                    **span._asdict(),
                    "seconds": span.end - span.start,
                }
                for resource, span in self._spans()
            ),
            ("resource", *Span._fields, "seconds"),
        )

    def _spans(self) -> Iterator[tuple[str, Span]]:
        """Yield the spans that do not overlap others of their resource."""
        for kind, by_number in (("replica", self.replicas), ("trainer", self.trainers)):
            for number, spans in by_number.items():
                yield from ((f"{kind} {number}", span) for span in spans)
        yield from (("link", span) for span in self.link)
        yield from (("verifier", span) for span in self.verifier)

    def starts(self) -> dict[int, float]:
        """Return the instant at which each replica began to start."""
        return {replica: spans[0].start for replica, spans in self.replicas.items()}


def read_timeline(trace: Trace) -> Timeline:
    """Return the timeline of a whole trace."""
    reader = TimelineReader()
    reader.read(trace.entries)
    return reader.finish()


class TimelineReader:
    """Pairs commands with the events that end them, block by block."""

    def __init__(self) -> None:
        self.now = 0.0
        """Instant of the last entry."""
        self._since = -inf
        """Instant up to which spans were returned."""
        self._attempts: dict[int, tuple[int, float]] = {}
        self._loading: dict[tuple[int, int], float] = {}
        """By replica and version: the instant of the command to load it."""
        self._rollouts: Spans = defaultdict(list)
        self._prefills: Spans = defaultdict(list)
        self._loads: Spans = defaultdict(list)
        self._starts: Spans = defaultdict(list)
        self._starting: dict[int, float] = {}
        self._kinds: dict[int, int] = {}
        self._lost: dict[int, float] = {}
        self._trainers: Spans = {}
        self._work: dict[int, Span] = {}
        self._link: list[Span] = []
        self._num_pushes = 0
        self._pushed_at = 0.0
        self._verifier: list[Span] = []
        self._num_verifying = 0
        self._verifying_since = 0.0

    def read(self, entries: Iterable[Entry]) -> None:
        """Read the next entries of the trace."""
        for entry in entries:
            self._end(entry)
            for command in entry.commands:
                self._begin(command, entry.time)
            self.now = entry.time

    @property
    def known_until(self) -> float:
        """The instant before which no later entry adds a span.

        Attempts, loads and pushes are reported only at their end. So this is at most the command of the
        oldest one in progress.
        """
        since = [sent_at for _, sent_at in self._attempts.values()]
        pushes = [self._pushed_at] if self._num_pushes else []
        return max(self._since, min([self.now, *since, *self._loading.values(), *pushes]))

    def take(self, until: float) -> Timeline:
        """Return the spans up to an instant that were not returned yet.

        A span that continues after the instant is cut there. The next call returns its rest.
        """
        for replica, start in self._starting.items():
            if start < until:
                self._starts[replica].append(Span(start, until, "start-up"))
        for trainer, work in self._work.items():
            if work.start < until:
                self._trainers[trainer].append(work._replace(end=until))
        if self._num_verifying and self._verifying_since < until:
            self._verifier.append(Span(self._verifying_since, until, "verify"))
        return self._take(until)

    def finish(self) -> Timeline:
        """Return the remaining spans. Activities without an end are assumed to end at the last entry."""
        for rollout in list(self._attempts):
            self._end_attempt(rollout, self.now)
        for replica in list(self._starting):
            self._end_start(replica, self.now)
        for trainer in list(self._work):
            self._end_work(trainer, self.now)
        if self._num_verifying:
            self._verifier.append(Span(self._verifying_since, self.now, "verify"))
        return self._take(self.now)

    def _take(self, until: float) -> Timeline:
        """Return the parts of all spans before an instant that were not returned yet."""
        since, self._since = self._since, until
        starts, rollouts, loads, prefills = (
            _take_each(spans, since, until)
            for spans in (self._starts, self._rollouts, self._loads, self._prefills)
        )
        return Timeline(
            replicas={
                replica: [*starts.get(replica, ()), *_activity(replica, rollouts, loads)]
                for replica in sorted({*starts, *rollouts, *loads})
            },
            trainers={t: _take(spans, since, until) for t, spans in self._trainers.items()},
            link=_take(self._link, since, until),
            verifier=_take(self._verifier, since, until),
            rollouts=rollouts,
            prefills={
                replica: _subtract(_union(spans), loads.get(replica, []))
                for replica, spans in prefills.items()
            },
            kinds=self._kinds,
            end=until,
        )

    def _begin(self, command: Command, now: float) -> None:
        match command:
            case Generate():
                self._attempts[command.rollout] = (command.replica, now)
            case StartReplica():
                self._starting[command.replica] = now
                if command.kind:
                    self._kinds[command.replica] = command.kind
            case LoadWeights():
                self._loading[command.replica, command.version] = now
            case PushWeights():
                self._num_pushes += 1
                self._pushed_at = now
            case StartTrainer() | StopTrainer() | Score() | Train() | Step() | SaveCheckpoint():
                self._begin_work(command, now)
            case Verify():
                self._num_verifying += 1
                if self._num_verifying == 1:
                    self._verifying_since = now
            case _:
                pass  # occupies no resource

    def _end(self, entry: Entry) -> None:
        event, now = entry.event, entry.time
        match event:
            case Generated():
                self._end_attempt(event.rollout, now, event.run_time, event.prefill_time)
            case Failed(command):
                self._end_failed(command, now)
            case WeightsLoaded():
                self._loading.pop((event.replica, event.version), None)
                label = f"v{event.version}"
                self._loads[event.replica].append(Span(now - event.load_time, now, "sync", label))
            case ReplicaStarted():
                self._end_start(event.replica, now)
            case ReplicaLost():
                self._lost[event.replica] = now
                self._end_start(event.replica, now)
            case WeightsPushed():
                self._end_push(event.version, now)
            case TrainerStarted() | Scored() | Trained() | Stepped() | CheckpointSaved():
                self._end_work(event.trainer, now)
            case TrainerStopped():
                self._end_work(event.trainer, now)
            case TrainerLost():
                self._lose_trainer(event.trainer, event.reason, now)
            case Verified():
                self._end_verify(now)
            case _:
                pass  # ends no activity

    def _end_failed(self, command: Command, now: float) -> None:
        match command:
            case Generate(rollout):
                self._end_attempt(rollout, now)
            case StartReplica(replica):
                self._lost[replica] = now
                self._end_start(replica, now)
            case LoadWeights(replica, version):
                self._loading.pop((replica, version), None)
            case PushWeights(version):
                self._end_push(version, now)
            case Verify():
                self._end_verify(now)
            case StartTrainer() | StopTrainer() | Score() | Train() | Step() | SaveCheckpoint():
                if command.trainer in self._work:  # else it was lost and has restarted
                    self._lose_trainer(command.trainer, type(command).__name__, now)
            case _:
                pass  # occupied no resource

    def _end_attempt(
        self, rollout: int, now: float, run_time: float | None = None, prefill_time: float = 0.0
    ) -> None:
        """Add the span of an attempt. Without a reported running time it lasts from its command to the replica's loss."""
        replica, sent_at = self._attempts.pop(rollout)
        start = sent_at if run_time is None else now - run_time
        end = min(now, self._lost.get(replica, now))
        if end > start:
            self._rollouts[replica].append(Span(start, end, "generate", str(rollout)))
        if prefill_time > 0:
            self._prefills[replica].append(Span(start, min(start + prefill_time, end), "prefill"))

    def _end_start(self, replica: int, now: float) -> None:
        start = self._starting.pop(replica, None)
        if start is not None:
            self._starts[replica].append(Span(start, now, "start-up"))

    def _end_push(self, version: int, now: float) -> None:
        self._num_pushes -= 1
        self._link.append(Span(self._pushed_at, now, "push", f"v{version}"))

    def _begin_work(self, command: TrainerCommand, now: float) -> None:
        """Begin an activity of a trainer. The "failure" of a lost trainer continues until it has restarted."""
        self._trainers.setdefault(command.trainer, [])
        if command.trainer not in self._work:
            activity = TRAINER_WORK[type(command)]
            self._work[command.trainer] = Span(now, inf, activity, _label(command))

    def _end_work(self, trainer: int, now: float) -> None:
        self._trainers[trainer].append(self._work.pop(trainer)._replace(end=now))

    def _lose_trainer(self, trainer: int, reason: str, now: float) -> None:
        """End the activity of a lost trainer, and begin its failure. Later events about lost work change nothing."""
        work = self._work.get(trainer)
        if work is not None and work.activity == "failure":
            return
        if work is not None:
            self._end_work(trainer, now)
        self._work[trainer] = Span(now, inf, "failure", reason)

    def _end_verify(self, now: float) -> None:
        self._num_verifying -= 1
        if not self._num_verifying and now > self._verifying_since:
            self._verifier.append(Span(self._verifying_since, now, "verify"))


def _label(command: TrainerCommand) -> str:
    match command:
        case Step(version):
            return f"step {version}"
        case Score(rollouts) | Train(rollouts):
            return f"{len(rollouts)} rollouts"
        case _:
            return ""


def _take_each(spans: Spans, since: float, until: float) -> Spans:
    """Remove and return the parts of spans between two instants, without resources that have none."""
    taken = {key: _take(of_one, since, until) for key, of_one in spans.items()}
    for key in [key for key, of_one in spans.items() if not of_one]:
        del spans[key]
    return {key: of_one for key, of_one in taken.items() if of_one}


def _take(spans: list[Span], since: float, until: float) -> list[Span]:
    """Remove from `spans` the parts between two instants and return them; later parts remain in `spans`."""
    taken, left = [], []
    for span in spans:
        if since <= span.start and span.end <= until:
            taken.append(span)
            continue
        start, end = max(span.start, since), max(span.end, since)
        if end > until:
            left.append(span._replace(start=max(start, until)))
        if start < until or end <= until:
            taken.append(span._replace(start=start, end=min(end, until)))
    spans[:] = left
    return taken


def _activity(replica: int, rollouts: Spans, loads: Spans) -> list[Span]:
    """Return when a replica loaded weights, and when a rollout ran on it otherwise."""
    of_loads = loads.get(replica, [])
    return sorted([*of_loads, *_subtract(_union(rollouts.get(replica, [])), of_loads)])


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans of one activity."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            start, end = merged[-1].start, max(merged[-1].end, span.end)
            merged[-1] = Span(start, end, span.activity)
        else:
            merged.append(span)
    return merged


def _subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Cut `holes`, which do not overlap each other, out of `spans`; both are in order of time."""
    rest: list[Span] = []
    first = 0
    for span in spans:
        start = span.start
        while first < len(holes) and holes[first].end <= start:
            first += 1
        for hole in holes[first:]:
            if hole.start >= span.end:
                break
            if hole.start > start:
                rest.append(span._replace(start=start, end=hole.start))
            start = max(start, hole.end)
        if start < span.end:
            rest.append(span._replace(start=start))
    return rest

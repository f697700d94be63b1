"""From a trace to what each resource did when: the spans that figures draw and attribution adds up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Failed,
    Generate,
    Generated,
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
    Train,
    Trained,
    TrainerLost,
    TrainerStarted,
    Verified,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trainer_side import TrainerCommand
from streamrl.record.trace import Entry, Trace

TRAINER_WORK: dict[type, str] = {
    StartTrainer: "start-up",
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


class Timeline(NamedTuple):
    """Every span of a run, by resource and in order of time."""

    replicas: dict[int, list[Span]]
    """generate where a rollout ran, sync where weights were loaded, start-up; gaps are idle."""
    trainers: dict[int, list[Span]]
    """failure from a trainer's loss until it is up again, or from what no retry mends to the end; gaps are idle."""
    link: list[Span]
    verifier: list[Span]
    """verify while any reward is computed."""
    rollouts: dict[int, list[Span]]
    """By replica: one span an attempt, labelled with its rollout; they overlap."""
    prefills: dict[int, list[Span]]
    """By replica: when the prefix of any rollout was computed; parts of its generate spans."""
    end: float

    def starts(self) -> dict[int, float]:
        """Return the instant at which each replica was asked for."""
        return {replica: spans[0].start for replica, spans in self.replicas.items()}


def read_timeline(trace: Trace) -> Timeline:
    """Reconstruct who did what when, from the trace alone."""
    reader = _Reader()
    for entry in trace.entries:
        reader.read(entry)
    end = trace.entries[-1].time if trace.entries else 0.0
    return reader.finish(end)


class _Reader:
    """Pairs commands with the events that end them."""

    def __init__(self) -> None:
        self._attempts: dict[int, tuple[int, float]] = {}
        self._rollouts: dict[int, list[Span]] = defaultdict(list)
        self._prefills: dict[int, list[Span]] = defaultdict(list)
        self._loads: dict[int, list[Span]] = defaultdict(list)
        self._starts: dict[int, Span] = {}
        self._starting: dict[int, float] = {}
        self._lost: dict[int, float] = {}
        self._trainers: dict[int, list[Span]] = {}
        self._work: dict[int, Span] = {}
        self._link: list[Span] = []
        self._pushed_at = 0.0
        self._verifier: list[Span] = []
        self._num_verifying = 0
        self._verifying_since = 0.0

    def read(self, entry: Entry) -> None:
        self._end(entry)
        for command in entry.commands:
            self._begin(command, entry.time)

    def finish(self, end: float) -> Timeline:
        for rollout in list(self._attempts):
            self._end_attempt(rollout, end)
        for replica, start in self._starting.items():
            self._starts[replica] = Span(start, self._lost.get(replica, end), "start-up")
        for trainer in list(self._work):
            self._end_work(trainer, end)
        if self._num_verifying:
            self._verifier.append(Span(self._verifying_since, end, "verify"))
        replicas = {
            replica: [self._starts[replica], *self._activity(replica)]
            for replica in sorted(self._starts)
        }
        prefills = {
            replica: _subtract(_union(spans), self._loads[replica])
            for replica, spans in self._prefills.items()
        }
        return Timeline(
            replicas=replicas,
            trainers=self._trainers,
            link=self._link,
            verifier=self._verifier,
            rollouts=dict(self._rollouts),
            prefills=prefills,
            end=end,
        )

    def _begin(self, command: Command, now: float) -> None:
        match command:
            case Generate():
                self._attempts[command.rollout] = (command.replica, now)
            case StartReplica():
                self._starting[command.replica] = now
            case PushWeights():
                self._pushed_at = now
            case StartTrainer() | Score() | Train() | Step() | SaveCheckpoint():
                self._begin_work(command, now)
            case Verify():
                self._num_verifying += 1
                if self._num_verifying == 1:
                    self._verifying_since = now
            case _:
                pass  # takes no resource's time

    def _end(self, entry: Entry) -> None:
        event, now = entry.event, entry.time
        match event:
            case Generated():
                self._end_attempt(event.rollout, now, event.run_time, event.prefill_time)
            case Failed(command):
                self._end_failed(command, now)
            case WeightsLoaded():
                label = f"v{event.version}"
                self._loads[event.replica].append(Span(now - event.load_time, now, "sync", label))
            case ReplicaStarted():
                start = self._starting.pop(event.replica)
                self._starts[event.replica] = Span(start, now, "start-up")
            case ReplicaLost():
                self._lost[event.replica] = now
            case WeightsPushed():
                self._link.append(Span(self._pushed_at, now, "push", f"v{event.version}"))
            case TrainerStarted() | Scored() | Trained() | Stepped() | CheckpointSaved():
                self._end_work(event.trainer, now)
            case TrainerLost():
                self._lose_trainer(event.trainer, event.reason, now)
            case Verified():
                self._end_verify(now)
            case _:
                pass  # ends nothing that takes a resource's time

    def _end_failed(self, command: Command, now: float) -> None:
        match command:
            case Generate(rollout):
                self._end_attempt(rollout, now)
            case StartReplica(replica):
                self._lost[replica] = now
            case PushWeights(version):
                self._link.append(Span(self._pushed_at, now, "push", f"v{version}"))
            case Verify():
                self._end_verify(now)
            case StartTrainer() | Score() | Train() | Step() | SaveCheckpoint():
                if command.trainer in self._work:  # else it is lost and up again
                    self._lose_trainer(command.trainer, type(command).__name__, now)
            case _:
                pass  # took no resource's time

    def _end_attempt(
        self, rollout: int, now: float, run_time: float | None = None, prefill_time: float = 0.0
    ) -> None:
        """An attempt whose running time nobody reported lasts from its command to its replica's loss."""
        replica, sent_at = self._attempts.pop(rollout)
        start = sent_at if run_time is None else now - run_time
        end = min(now, self._lost.get(replica, now))
        if end > start:
            self._rollouts[replica].append(Span(start, end, "generate", str(rollout)))
        if prefill_time > 0:
            self._prefills[replica].append(Span(start, min(start + prefill_time, end), "prefill"))

    def _begin_work(self, command: TrainerCommand, now: float) -> None:
        """A lost trainer that is started again stays in its failure until it is up."""
        self._trainers.setdefault(command.trainer, [])
        if command.trainer not in self._work:
            activity = TRAINER_WORK[type(command)]
            self._work[command.trainer] = Span(now, inf, activity, _label(command))

    def _end_work(self, trainer: int, now: float) -> None:
        self._trainers[trainer].append(self._work.pop(trainer)._replace(end=now))

    def _lose_trainer(self, trainer: int, reason: str, now: float) -> None:
        """What it did ends, and a failure begins; what was lost with it tells of its own end later."""
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

    def _activity(self, replica: int) -> list[Span]:
        """Where the replica loaded weights, and where else a rollout ran on it."""
        loads = self._loads[replica]
        running = _union(self._rollouts[replica])
        return sorted([*loads, *_subtract(running, loads)])


def _label(command: TrainerCommand) -> str:
    match command:
        case Step(version):
            return f"step {version}"
        case Score(rollouts) | Train(rollouts):
            return f"{len(rollouts)} rollouts"
        case _:
            return ""


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

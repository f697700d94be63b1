"""Count the replicas, trainers and rollouts of a run by state at each instant.

`attribution.py` finds the cause of idle time from these counts:

of the run         wanted, replicas, lost, has prompts, has last prompts, push, verifying, and
                   "replica X" by activity
of each trainer    its activities, and the waiting, ungenerated and unverified rollouts of its next step
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    DrawnGroup,
    Drop,
    Event,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    RunStarted,
    Skip,
    StartReplica,
    Stepped,
    StopReplica,
    Take,
    TrainerJoined,
    TrainerLost,
    TrainerStopped,
    Verified,
    Verify,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.timeline import Timeline


class CountChange(NamedTuple):
    """A change of the count named `what` at `time` seconds."""

    time: float
    what: str
    by: int
    trainer: int | None = None
    """The trainer whose count it is; None for a count of the run."""
    kind: int | None = None
    """The kind of replica whose count changes too; None if it is not a count of replicas."""


class Counts:
    """Every count at one instant."""

    def __init__(self, num_kinds: int, num_trainers: int) -> None:
        self.run: dict[str, int] = defaultdict(int)
        self.kinds: list[dict[str, int]] = [defaultdict(int) for _ in range(num_kinds)]
        """Counts of each kind of replica; `run` has their sum."""
        self.trainers: list[dict[str, int]] = [defaultdict(int) for _ in range(num_trainers)]

    def enter(self, change: CountChange) -> None:
        """Apply a change."""
        counts = self.run if change.trainer is None else self.trainers[change.trainer]
        counts[change.what] += change.by
        if change.kind is not None:
            self.kinds[change.kind][change.what] += change.by


class ChangeReader:
    """Reads the changes of the counts from a trace, block by block."""

    def __init__(self, trace: Trace) -> None:
        """Read the header of a trace; pass its entries to `read`."""
        run, joined, trainers = trace.run, trace.joined, range(trace.run.num_trainers)
        prompts = [run.as_seen_by(trainer).algorithm.prompts_per_step for trainer in trainers]
        self._sources: list[_Source] = [
            _RunChanges(run.rollout.replicas, run.algorithm.steps, is_endless=trace.is_endless),
            *(_RolloutChanges(n, prompts[n], n not in joined) for n in trainers),
        ]
        if run.verifier.pool is not None:
            self._sources.append(_VerifyingChanges())
        self._untaken = [
            CountChange(0.0, "wanted", own.replicas, kind=kind)
            for kind, own in enumerate(run.rollout.kinds)
        ]
        self._untaken += [CountChange(0.0, "away", 1, n) for n in trainers if n in joined]

    def read(self, entries: Sequence[Entry]) -> None:
        """Read the next entries of the trace."""
        for source in self._sources:
            self._untaken += source.read(entries)

    def take(self, timeline: Timeline) -> list[CountChange]:
        """Return all changes up to the end of the next part of the timeline, in order of time, each once."""
        changes = [*self._untaken, *_span_changes(timeline)]
        changes.sort(key=AT)
        num = bisect_right(changes, timeline.end, key=AT)
        self._untaken = changes[num:]
        return changes[:num]


AT = attrgetter("time")


class _Source(Protocol):
    """Reads changes of one kind."""

    def read(self, entries: Sequence[Entry]) -> Iterator[CountChange]: ...


def _span_changes(timeline: Timeline) -> Iterator[CountChange]:
    for replica, spans in timeline.replicas.items():
        kind = timeline.kinds.get(replica, 0)
        for span in spans:
            yield CountChange(span.start, f"replica {span.activity}", 1, kind=kind)
            yield CountChange(span.end, f"replica {span.activity}", -1, kind=kind)
    for trainer, spans in timeline.trainers.items():
        for span in spans:
            yield CountChange(span.start, span.activity, 1, trainer)
            yield CountChange(span.end, span.activity, -1, trainer)
    for span in timeline.link:
        yield CountChange(span.start, "push", 1)
        yield CountChange(span.end, "push", -1)


class _RunChanges:
    """Counts wanted, existing and lost replicas, and draws of prompts."""

    def __init__(self, replicas: int, steps: int, *, is_endless: bool) -> None:
        self._wanted = replicas
        self._kinds: dict[int, int] = {}
        """By replica: its kind."""
        self._prompts = _LastPrompts(None if is_endless else steps)

    def read(self, entries: Sequence[Entry]) -> Iterator[CountChange]:
        for time, event, commands in entries:
            match event:
                case PromptsDrawn():
                    yield CountChange(time, "has prompts", 1)
                case ReplicaLost(replica) | Failed(StartReplica(replica)):
                    yield CountChange(time, "replicas", -1, kind=self._kinds[replica])
                    yield CountChange(time, "lost", 1)
                case ReplicaStopped(replica) | Failed(StopReplica(replica)):
                    yield CountChange(time, "replicas", -1, kind=self._kinds[replica])
                case _:
                    pass  # changes no count of the run
            if isinstance(event, LEADS_TO_PROMPTS) and (by := self._prompts.change(event)):
                yield CountChange(time, "has last prompts", by)
            for command in commands:
                if isinstance(command, StartReplica):
                    self._kinds[command.replica] = command.kind
                    yield CountChange(time, "replicas", 1, kind=command.kind)
                elif isinstance(command, Resize):
                    yield CountChange(time, "wanted", command.num_replicas - self._wanted, kind=0)
                    self._wanted = command.num_replicas


LEADS_TO_PROMPTS = (PromptsDrawn, RunStarted, Stepped, CheckpointSaved, TrainerLost)
"""Events that may change whether the last prompts are drawn."""


class _LastPrompts:
    """Counts draws for the last step. A rollback of the primary trainer repeats its draws."""

    def __init__(self, last_step: int | None) -> None:
        self._last_step = last_step
        self._num_drawn = 0
        self._version = self._saved = 0

    def change(self, event: Event) -> int:
        """Return the change of the count by an event."""
        match event:
            case PromptsDrawn(step) if step == self._last_step:
                self._num_drawn += 1
                return 1
            case RunStarted(version):
                self._version = self._saved = version
            case Stepped(version, trainer) if trainer == LEADER:
                self._version = version
            case CheckpointSaved(version, trainer) if trainer == LEADER:
                self._saved = version
            case TrainerLost(trainer) if trainer == LEADER and self._version > self._saved:
                self._version, taken_back, self._num_drawn = self._saved, self._num_drawn, 0
                return -taken_back
            case _:
                pass  # draws nothing
        return 0


class _VerifyingChanges:
    """Counts the requested rewards that are not computed yet."""

    def read(self, entries: Sequence[Entry]) -> Iterator[CountChange]:
        for time, event, commands in entries:
            match event:
                case Verified() | Failed(Verify()):
                    yield CountChange(time, "verifying", -1)
                case _:
                    pass  # ends no reward
            for command in commands:
                if isinstance(command, Verify):
                    yield CountChange(time, "verifying", 1)


class _RolloutChanges:
    """Counts the rollouts that wait for a replica, and those that the next step of a trainer lacks."""

    def __init__(self, trainer: int, prompts_per_step: int, has_joined: bool) -> None:
        self._trainer = trainer
        self._has_joined = has_joined
        self._is_away = not has_joined
        """Whether the trainer has no GPUs."""
        self._rollouts = _Rollouts(prompts_per_step)

    def read(self, entries: Sequence[Entry]) -> Iterator[CountChange]:
        for time, event, commands in entries:
            self._see(event)
            if isinstance(event, PRESENCE) and (by := self._change_presence(event)):
                yield CountChange(time, "away", by, self._trainer)
            for command in commands:
                self._obey(command)
            for name, by in self._rollouts.changes():
                yield CountChange(time, name, by, self._trainer)

    def _change_presence(self, event: Event) -> int:
        """Return 1 if an event takes the trainer's GPUs away, -1 if it gives them back, else 0."""
        was_away = self._is_away
        match event:
            case RunStarted(away=away) if self._trainer in away:
                self._is_away = True
            case TrainerJoined(trainer) if trainer == self._trainer:
                self._has_joined, self._is_away = True, False
            case TrainerStopped(trainer) if trainer == self._trainer:
                self._is_away = True
                self._rollouts.give_back()
            case _:
                pass  # of another trainer
        return self._is_away - was_away

    def _see(self, event: Event) -> None:
        rollouts = self._rollouts
        match event:
            case Generated():
                is_aborted = event.finish == "aborted"
                rollouts.move(event.rollout, WAITING if is_aborted else UNVERIFIED)
            case Verified():
                rollouts.move(event.rollout, READY)
            case PromptsDrawn() if self._has_joined:
                for drawn in event.groups:
                    rollouts.draw(drawn)
            case Failed(Generate(rollout)):
                rollouts.move(rollout, WAITING)
            case Stepped() if event.trainer == self._trainer:
                rollouts.end_step()
            case TrainerLost() if event.trainer == self._trainer:
                rollouts.give_back()
            case _:
                pass  # changes no rollout

    def _obey(self, command: Command) -> None:
        match command:
            case Generate():
                self._rollouts.move(command.rollout, GENERATING)
            case Take() if command.trainer == self._trainer:
                self._rollouts.take(command.group)
            case Skip() if command.trainer == self._trainer:
                self._rollouts.forget(command.group)
            case Drop():
                self._rollouts.forget(command.group)
            case _:
                pass  # changes no rollout


PRESENCE = (RunStarted, TrainerJoined, TrainerStopped)
"""Events that may change whether a trainer has GPUs."""
WAITING, GENERATING, UNVERIFIED, READY = range(4)


class _Rollouts:
    """Counts the rollouts for one trainer by stage, with separate counts for its next step."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._groups: dict[int, DrawnGroup] = {}
        self._group: dict[int, int] = {}
        self._stage: dict[int, int] = {}
        self._taken: dict[int, None] = {}
        self._coming, self._other = [0] * 4, [0] * 4
        self._last_counts = {"waiting": 0, "ungenerated": 0, "unverified": 0}

    def draw(self, drawn: DrawnGroup) -> None:
        self._groups[drawn.group] = drawn
        for rollout in drawn.rollouts:
            self._group[rollout] = drawn.group
            self._stage[rollout] = WAITING
        self._other[WAITING] += len(drawn.rollouts)

    def move(self, rollout: int, stage: int) -> None:
        if rollout not in self._stage:
            return  # its group was dropped
        counts = self._coming if self._group[rollout] in self._taken else self._other
        counts[self._stage[rollout]] -= 1
        counts[stage] += 1
        self._stage[rollout] = stage

    def take(self, group: int) -> None:
        self._taken[group] = None
        for rollout in self._groups[group].rollouts:
            self._other[self._stage[rollout]] -= 1
            self._coming[self._stage[rollout]] += 1

    def give_back(self) -> None:
        """Return the groups of the next step to the other groups, because the trainer is lost."""
        for stage, count in enumerate(self._coming):
            self._other[stage] += count
        self._coming = [0] * 4
        self._taken.clear()

    def forget(self, group: int) -> None:
        if group not in self._groups:
            return  # trained on, or skipped, before it was dropped
        counts = self._coming if group in self._taken else self._other
        self._taken.pop(group, None)
        for rollout in self._groups.pop(group).rollouts:
            counts[self._stage.pop(rollout)] -= 1
            del self._group[rollout]

    def end_step(self) -> None:
        for group in list(self._taken):
            self.forget(group)

    def changes(self) -> Iterator[tuple[str, int]]:
        """Yield the changes of the counts since the last call.

        If the next step does not have all its groups yet, every rollout in progress may still belong to
        it. Then all of them count as lacking.
        """
        lacking = list(self._coming)
        if len(self._taken) < self._groups_per_step:
            lacking = [a + b for a, b in zip(self._coming, self._other, strict=True)]
        counts = {
            "waiting": self._coming[WAITING] + self._other[WAITING],
            "ungenerated": lacking[WAITING] + lacking[GENERATING],
            "unverified": lacking[UNVERIFIED],
        }
        for name, count in counts.items():
            if count != self._last_counts[name]:
                yield name, count - self._last_counts[name]
        self._last_counts = counts

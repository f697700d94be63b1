"""Count the replicas, trainers and rollouts of a run by state at each instant.

`attribution.py` finds the cause of idle time from these counts:

of the run         wanted, replicas, lost, has prompts, has last prompts, push, verifying, and
                   "replica X" by activity
of each trainer    its activities, and the waiting, ungenerated and unverified rollouts of its next step

Trainer 0 also has "added ranks": data-parallel ranks beyond those of the run file, negative for fewer.

Replicas on GPUs of the primary trainer count only while these GPUs are lent to them, or change sides.

A run with environments also has "acting" and "environments starting". A run with evaluations has
"evaluation", while training waits for one, and "replica evaluate".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from streamrl.engine.messages import (
    UNFINISHED,
    Act,
    CheckpointSaved,
    DrawEvaluation,
    Drop,
    EndEvaluation,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Generate,
    Generated,
    Lend,
    MachineReplaced,
    Observed,
    PromptsDrawn,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    RunStarted,
    Skip,
    StartReplica,
    Stepped,
    StopReplica,
    Take,
    TakenBack,
    TrainerJoined,
    TrainerLost,
    TrainerStopped,
    Verified,
    Verify,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.machines_away import MachinesAway
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.timeline import Timeline
from streamrl.record.trainer_ranks import RankReader


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

    def __init__(
        self, num_kinds: int, num_trainers: int, *, is_disaggregated: bool = False
    ) -> None:
        self.is_disaggregated = is_disaggregated
        """Whether some kinds of replicas only prefill, and the others only decode."""
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

    def lacks(self) -> tuple[bool, ...]:
        """Return for each trainer and each of `OF_ROLLOUTS` whether there are such rollouts."""
        return tuple([own[what] > 0 for own in self.trainers for what in OF_ROLLOUTS])


OF_ROLLOUTS = "waiting", "ungenerated", "unverified"
"""Counts of the rollouts of a trainer. They change most often."""


class ChangeReader(MessageReader):
    """Reads the changes of the counts from a trace, block by block."""

    def __init__(self, trace: Trace) -> None:
        """Read the header of a trace; pass its entries to `read`."""
        run, joined, trainers = trace.run, trace.joined, range(trace.run.num_trainers)
        prompts = [run.as_seen_by(trainer).algorithm.prompts_per_step for trainer in trainers]
        self._sources: list[_Source] = [
            _RunChanges(
                run.rollout.replicas,
                run.algorithm.steps,
                run.rollout.num_kinds,
                is_endless=trace.is_endless,
            ),
            *(
                _RolloutChanges(n, prompts[n], n not in joined, run.environment is not None)
                for n in trainers
            ),
        ]
        self._ranks = RankReader(run.trainer.data_parallel)
        if run.environment is not None:
            self._sources.append(_ActingChanges())
        if run.evaluation is not None:
            self._sources.append(_EvaluationChanges(is_waited_for=not run.evaluation.beside))
        if run.verifier.pool is not None:
            self._sources.append(_VerifyingChanges())
        self._untaken = [
            CountChange(0.0, "wanted", own.replicas, kind=kind)
            for kind, own in enumerate(run.rollout.kinds)
        ]
        self._lent_kind = run.rollout.num_kinds
        self._borrowed = run.rollout.replicas if run.trainer.borrows else 0
        """Replicas whose GPUs are the ranks that the trainer adds."""
        self._untaken += [CountChange(0.0, "away", 1, n) for n in trainers if n in joined]

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handlers of all messages that may change a count."""
        for source in self._sources:
            yield from source.handlers()
        yield from self._ranks.handlers()

    def take(self, timeline: Timeline) -> list[CountChange]:
        """Return all changes up to the end of the next part of the timeline, in order of time, each once."""
        changes = [*self._untaken, *_span_changes(timeline, self._lent_kind)]
        for source in self._sources:
            changes += source.changes
            source.changes.clear()
        changes += self._rank_changes()
        changes.sort(key=AT)
        num = bisect_right(changes, timeline.end, key=AT)
        self._untaken = changes[num:]
        return changes[:num]

    def _rank_changes(self) -> Iterator[CountChange]:
        """Yield the changes of the primary trainer's ranks that were not returned yet."""
        steps = [*pairwise(self._ranks.ranks)]
        for time, (before, after) in zip(self._ranks.since[1:], steps, strict=True):
            yield CountChange(time, "added ranks", after - before, LEADER)
            if self._borrowed:
                by = self._borrowed if after > before else -self._borrowed
                yield CountChange(time, "borrowed", by, kind=0)
        self._ranks.since[:-1] = []
        self._ranks.ranks[:-1] = []


AT = attrgetter("time")


class _Source(MessageReader):
    """Reads changes of one kind."""

    def __init__(self) -> None:
        self.changes: list[CountChange] = []


def _span_changes(timeline: Timeline, lent_kind: int) -> Iterator[CountChange]:
    for replica, spans in timeline.replicas.items():
        kind = timeline.kinds.get(replica, 0)
        for span in spans:
            if kind == lent_kind and span.activity == "start-up":
                continue  # the trainer has its GPUs
            yield CountChange(span.start, f"replica {span.activity}", 1, kind=kind)
            yield CountChange(span.end, f"replica {span.activity}", -1, kind=kind)
    for trainer, spans in timeline.trainers.items():
        for span in spans:
            yield CountChange(span.start, span.activity, 1, trainer)
            yield CountChange(span.end, span.activity, -1, trainer)
    for span in timeline.link:
        yield CountChange(span.start, "push", 1)
        yield CountChange(span.end, "push", -1)


class _RunChanges(_Source):
    """Counts wanted, existing and lost replicas, and draws of prompts."""

    def __init__(self, replicas: int, steps: int, lent_kind: int, *, is_endless: bool) -> None:
        super().__init__()
        self._lent_kind = lent_kind
        self._lent: dict[int, None] = {}
        """Replicas that have GPUs of the primary trainer."""
        self._wanted = replicas
        self._kinds: dict[int, int] = {}
        """By replica that has not stopped: its kind."""
        self._prompts = _LastPrompts(None if is_endless else steps)
        self._machines = MachinesAway()

    def handlers(self) -> Iterator[Handlers]:
        yield {
            PromptsDrawn: self._draw,
            **dict.fromkeys((RunStarted, Stepped, CheckpointSaved, TrainerLost), self._see_prompts),
            ReplicaLost: lambda event, time: self._lose(event.replica, time),
            ReplicaStopped: lambda event, time: self._stop(event.replica, time),
            ReplicaLeaving: self._leave,
            MachineReplaced: self._replace,
            Failed: self._fail,
            StartReplica: self._start,
            Resize: self._resize,
            Lend: self._lend,
            TakenBack: lambda event, time: self._end_lending(event.replica, time),
        }

    def _draw(self, event: PromptsDrawn, time: float) -> None:
        self.changes.append(CountChange(time, "has prompts", 1))
        self._see_prompts(event, time)

    def _see_prompts(self, event: Event, time: float) -> None:
        if by := self._prompts.change(event):
            self.changes.append(CountChange(time, "has last prompts", by))

    def _fail(self, event: Failed, time: float) -> None:
        match event.command:
            case StartReplica(replica):
                self._lose(replica, time)
            case StopReplica(replica):
                self._stop(replica, time)
            case _:
                pass  # changes no count of the run

    def _lose(self, replica: int, time: float) -> None:
        self._stop(replica, time)
        self.changes.append(CountChange(time, "lost", 1))

    def _stop(self, replica: int, time: float) -> None:
        kind = self._kinds.pop(replica)
        if kind == self._lent_kind:
            self._end_lending(replica, time)
            return
        self.changes.append(CountChange(time, "replicas", -1, kind=kind))
        if self._machines.end(replica) is not None:
            self.changes.append(CountChange(time, "wanted", -1, kind=kind))

    def _leave(self, event: ReplicaLeaving, time: float) -> None:
        """Record a notice. A replica that starts later is a replacement."""
        self._machines.leave(event.replica)
        self.changes.append(CountChange(time, "lost", 1))

    def _replace(self, event: MachineReplaced, time: float) -> None:
        if (kind := self._machines.replace(event.replica)) is not None:
            self.changes.append(CountChange(time, "wanted", 1, kind=kind))

    def _lend(self, command: Lend, time: float) -> None:
        if self._kinds.get(command.replica) != self._lent_kind:
            return  # the GPUs are its own
        self._lent[command.replica] = None
        self.changes.append(CountChange(time, "replicas", 1, kind=self._lent_kind))

    def _end_lending(self, replica: int, time: float) -> None:
        if replica in self._lent:
            del self._lent[replica]
            self.changes.append(CountChange(time, "replicas", -1, kind=self._lent_kind))

    def _start(self, command: StartReplica, time: float) -> None:
        self._kinds[command.replica] = command.kind
        if command.kind == self._lent_kind:
            return
        self._machines.begin(command.replica, command.kind)
        self.changes.append(CountChange(time, "replicas", 1, kind=command.kind))

    def _resize(self, command: Resize, time: float) -> None:
        by = command.num_replicas - self._wanted
        self.changes.append(CountChange(time, "wanted", by, kind=0))
        self._wanted = command.num_replicas


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


class _VerifyingChanges(_Source):
    """Counts the requested rewards that are not computed yet."""

    def handlers(self) -> Iterator[Handlers]:
        yield {
            Verify: lambda _, time: self._add(1, time),
            Verified: lambda _, time: self._add(-1, time),
            Failed: self._fail,
        }

    def _add(self, by: int, time: float) -> None:
        self.changes.append(CountChange(time, "verifying", by))

    def _fail(self, event: Failed, time: float) -> None:
        if isinstance(event.command, Verify):
            self._add(-1, time)


class _ActingChanges(_Source):
    """Counts the environments that start or act."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[int, str] = {}
        """By rollout: what its environment does."""

    def handlers(self) -> Iterator[Handlers]:
        yield {
            Act: self._begin,
            Observed: lambda event, time: self._end(event.rollout, time),
            Failed: self._fail,
        }

    def _begin(self, command: Act, time: float) -> None:
        what = self._running[command.rollout] = (
            "environments starting" if command.starts else "acting"
        )
        self.changes.append(CountChange(time, what, 1))

    def _end(self, rollout: int, time: float) -> None:
        self.changes.append(CountChange(time, self._running.pop(rollout), -1))

    def _fail(self, event: Failed, time: float) -> None:
        if isinstance(event.command, Act):
            self._end(event.command.rollout, time)


class _EvaluationChanges(_Source):
    """Counts evaluations for which training waits, and the replicas with rollouts of evaluations."""

    def __init__(self, *, is_waited_for: bool) -> None:
        super().__init__()
        self._is_waited_for = is_waited_for
        self._kinds: dict[int, int] = {}
        self._replicas: dict[int, int] = {}
        """By rollout of the evaluation: its replica."""
        self._num_on: Counter[int] = Counter()
        """Rollouts of the evaluation by replica."""

    def handlers(self) -> Iterator[Handlers]:
        yield {
            StartReplica: self._start,
            DrawEvaluation: lambda _, time: self._change(1, time),
            EndEvaluation: lambda _, time: self._change(-1, time),
            Evaluate: self._send,
            Evaluated: lambda event, time: self._end(event.rollout, time),
            Failed: self._fail,
        }

    def _start(self, command: StartReplica, _: float) -> None:
        self._kinds[command.replica] = command.kind

    def _change(self, by: int, time: float) -> None:
        if self._is_waited_for:
            self.changes.append(CountChange(time, "evaluation", by))

    def _send(self, command: Evaluate, time: float) -> None:
        self._replicas[command.rollout] = command.replica
        self._num_on[command.replica] += 1
        if self._num_on[command.replica] == 1:
            self._occupy(command.replica, 1, time)

    def _end(self, rollout: int, time: float) -> None:
        replica = self._replicas.pop(rollout)
        self._num_on[replica] -= 1
        if not self._num_on[replica]:
            del self._num_on[replica]
            self._occupy(replica, -1, time)

    def _fail(self, event: Failed, time: float) -> None:
        if isinstance(event.command, Evaluate):
            self._end(event.command.rollout, time)
        elif isinstance(event.command, DrawEvaluation):
            self._change(-1, time)

    def _occupy(self, replica: int, by: int, time: float) -> None:
        kind = self._kinds.get(replica, 0)
        self.changes.append(CountChange(time, "replica evaluate", by, kind=kind))


class _RolloutChanges(_Source):
    """Counts the rollouts that wait for a replica, and those that the next step of a trainer lacks.

    A rollout whose environment starts or acts counts as generating: it lacks output, and no replica.

    If the next step does not have all its groups yet, every rollout in progress may still belong to
    it. Then all of them count as lacking.
    """

    def __init__(
        self, trainer: int, prompts_per_step: int, has_joined: bool, has_turns: bool = False
    ) -> None:
        super().__init__()
        self._has_turns = has_turns
        """Whether rollouts have environments, and so may have several turns."""
        self._trainer = trainer
        self._prompts_per_step = prompts_per_step
        self._has_joined = has_joined
        self._is_away = not has_joined
        """Whether the trainer has no GPUs."""
        self._groups: dict[int, tuple[int, ...]] = {}
        """Rollouts of each group."""
        self._taken: dict[int, None] = {}
        """Groups of the next step."""
        self._places: dict[int, int] = {}
        """By rollout: its stage, plus `TAKEN` if its group is in the next step."""
        self._counts = [0] * 2 * TAKEN
        """Rollouts by place."""
        self._last = 0, 0, 0
        """The counts `OF_ROLLOUTS` at the last entry."""

    def handlers(self) -> Iterator[Handlers]:
        yield {
            Generated: self._end_attempt,
            Verified: self._end_verify,
            Generate: self._send,
            PromptsDrawn: self._draw,
            Failed: self._fail,
            Stepped: self._end_step,
            RunStarted: self._begin,
            TrainerJoined: self._join,
            TrainerStopped: self._stop,
            TrainerLost: self._lose,
            Take: self._take,
            Skip: self._skip,
            Drop: self._drop,
            Entry: self._end_entry,
        }
        if self._has_turns:
            yield {
                Observed: lambda event, _: self._move(event.rollout, WAITING),
                Act: lambda command, _: self._move(command.rollout, GENERATING),
                Verify: lambda command, _: self._move(command.rollout, UNVERIFIED),
            }

    def _end_entry(self, _entry: Entry, time: float) -> None:
        """Record the changes of the counts by all messages of an entry together."""
        waiting, generating, unverified, _, own_waiting, own_generating, lacks_reward, _ = (
            self._counts
        )
        lacks_output = own_waiting + own_generating
        if len(self._taken) < self._prompts_per_step:
            lacks_output += waiting + generating
            lacks_reward += unverified
        found = waiting + own_waiting, lacks_output, lacks_reward
        if found != self._last:
            for name, count, before in zip(OF_ROLLOUTS, found, self._last, strict=True):
                if count != before:
                    self.changes.append(CountChange(time, name, count - before, self._trainer))
            self._last = found

    # Rollouts -------------------------------------------------------------------------------------

    def _draw(self, event: PromptsDrawn, _: float) -> None:
        if self._has_joined:
            drawn = {group.group: group.rollouts for group in event.groups}
            rollouts = [*chain.from_iterable(drawn.values())]
            self._groups.update(drawn)
            first = GENERATING if self._has_turns else WAITING
            self._places.update(dict.fromkeys(rollouts, first))
            self._counts[first] += len(rollouts)

    def _send(self, command: Generate, _: float) -> None:
        self._move(command.rollout, GENERATING)

    def _end_attempt(self, event: Generated, _: float) -> None:
        is_over = event.finish not in UNFINISHED and not self._has_turns
        self._move(event.rollout, UNVERIFIED if is_over else WAITING)

    def _end_verify(self, event: Verified, _: float) -> None:
        self._move(event.rollout, READY)

    def _fail(self, event: Failed, _: float) -> None:
        if isinstance(event.command, Generate):
            self._move(event.command.rollout, WAITING)
        elif isinstance(event.command, Act):
            self._move(event.command.rollout, GENERATING)

    def _move(self, rollout: int, stage: int) -> None:
        before = self._places.get(rollout)
        if before is not None:  # else its group was dropped
            place = stage + TAKEN if before >= TAKEN else stage
            self._places[rollout] = place
            self._counts[before] -= 1
            self._counts[place] += 1

    # Groups ---------------------------------------------------------------------------------------

    def _take(self, command: Take, _: float) -> None:
        if command.trainer == self._trainer:
            self._taken[command.group] = None
            self._shift(command.group, TAKEN)

    def _give_back(self) -> None:
        """Return the groups of the next step to the other groups, because the trainer is lost."""
        for group in self._taken:
            self._shift(group, -TAKEN)
        self._taken.clear()

    def _shift(self, group: int, by: int) -> None:
        """Change the places of all rollouts of a group."""
        counts, places = self._counts, self._places
        for rollout in self._groups[group]:
            before = places[rollout]
            places[rollout] = before + by
            counts[before] -= 1
            counts[before + by] += 1

    def _skip(self, command: Skip, _: float) -> None:
        if command.trainer == self._trainer:
            self._forget(command.group)

    def _drop(self, command: Drop, _: float) -> None:
        self._forget(command.group)

    def _end_step(self, event: Stepped, _: float) -> None:
        is_own_step = event.trainer == self._trainer
        for group in list(self._taken) if is_own_step else ():
            self._forget(group)

    def _forget(self, group: int) -> None:
        """Remove a group, unless it was trained on, or skipped, before it was dropped."""
        self._taken.pop(group, None)
        for rollout in self._groups.pop(group, ()):
            self._counts[self._places.pop(rollout)] -= 1

    # The trainer ----------------------------------------------------------------------------------

    def _begin(self, event: RunStarted, time: float) -> None:
        if self._trainer in event.away:
            self._set_away(True, time)

    def _join(self, event: TrainerJoined, time: float) -> None:
        if event.trainer == self._trainer:
            self._has_joined = True
            self._set_away(False, time)

    def _stop(self, event: TrainerStopped, time: float) -> None:
        if event.trainer == self._trainer:
            self._set_away(True, time)
            self._give_back()

    def _lose(self, event: TrainerLost, _: float) -> None:
        if event.trainer == self._trainer:
            self._give_back()

    def _set_away(self, is_away: bool, time: float) -> None:
        """Record whether the trainer has no GPUs."""
        if by := is_away - self._is_away:
            self.changes.append(CountChange(time, "away", by, self._trainer))
        self._is_away = is_away


WAITING, GENERATING, UNVERIFIED, READY, TAKEN = range(5)
"""Stages of a rollout, and the number of stages."""

"""Follow every rollout of a trace from its tokens to the steps that trained on it.

Steps that were rolled back with a lost trainer are left out: their rollouts count as lost to that
trainer. The first step after the loss then lasts from the end of the last step that was kept. A
rollout is forgotten once every trainer has trained on it or dropped it. So memory holds only a few
numbers for each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from streamrl.engine.entities import kept_of
from streamrl.engine.messages import (
    Act,
    CheckpointSaved,
    DrawnGroup,
    Drop,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    RunStarted,
    Skip,
    Step,
    Stepped,
    Train,
    TrainerJoined,
    TrainerLost,
    TrainerStarted,
    TrainerStopped,
    Verified,
)
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import ABSENT, LEADER, ROLLED_BACK
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.long_column import LongColumn
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.selection import Selection

STARTED_OVER = "its environment was lost"
"""Reason: the episode of a rollout started over, so that its tokens are lost."""


class StepContents(NamedTuple):
    """The rollouts that a step trained on, as sums."""

    num_rollouts: int
    num_tokens: int
    """Their output tokens."""
    reward: float
    """Their mean reward; 0 if there are none."""
    behind: dict[int, int]
    """Rollouts by how many versions they were behind the newest version of the primary trainer when
    it trained on them.
    """


class StepHistory:
    """The steps of one trainer, as columns."""

    def __init__(self) -> None:
        self.ended_at = LongColumn[float]("d")
        """Instant at which each step ended."""
        self.num_rollouts = LongColumn[int]("q")
        self.num_tokens = LongColumn[int]("q")
        self.rewards = LongColumn[float]("d")
        self._behind: dict[int, LongColumn[int]] = {}
        """By versions behind: rollouts of each step. A column ends at the last step with such rollouts."""

    def __len__(self) -> int:
        return len(self.ended_at)

    def append(self, time: float, made: StepContents) -> None:
        """Add the step that ended at `time` seconds."""
        for lag, count in made.behind.items():
            column = self._behind.setdefault(lag, LongColumn("q"))
            column.extend([0] * (len(self) - len(column)))
            column.append(count)
        self.ended_at.append(time)
        self.num_rollouts.append(made.num_rollouts)
        self.num_tokens.append(made.num_tokens)
        self.rewards.append(made.reward)

    def staleness(self, first: int, last: int) -> Counter[int]:
        """Return the number of rollouts by versions behind, over the steps with indices `first` to `last` - 1."""
        counts = {lag: sum(column[first:last]) for lag, column in self._behind.items()}
        return Counter({lag: count for lag, count in counts.items() if count})

    def cut(self, length: int) -> StepContents:
        """Roll back all steps after the first `length`; return their sums, without a reward."""
        gone = StepContents(
            sum(self.num_rollouts[length:]),
            sum(self.num_tokens[length:]),
            0.0,
            dict(self.staleness(length, len(self))),
        )
        for seconds in (self.ended_at, self.rewards):
            seconds.cut(length)
        for counts in (self.num_rollouts, self.num_tokens, *self._behind.values()):
            counts.cut(length)
        return gone


RolloutsByGroup: TypeAlias = dict[int, tuple[int, ...]]


@dataclass(slots=True)
class TrainerFlow:
    """The steps of one trainer, and the rollouts that it trained on or lost."""

    made: StepHistory = field(default_factory=StepHistory)
    lost: Counter[str] = field(default_factory=Counter)
    """Rollouts that it never trains on, by reason."""

    has_joined: bool = True
    """False for a trainer that joins later, until it joins."""
    coming: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Rollouts of the next step, and the version of the primary trainer when it trained on them.
    """
    _groups: tuple[int, ...] = ()
    """Groups of the running step."""
    _first_version: int = 0
    _saved: int = 0
    """Steps at the last checkpoint."""
    _open: RolloutsByGroup = field(default_factory=dict)
    """Rollouts of groups that it has neither trained on nor dropped."""

    @property
    def version(self) -> int:
        """The version that its last step made."""
        return self._first_version + len(self.made)

    def step_times(self) -> list[float]:
        """Return the seconds of each step since the end of the step before it."""
        ended_at = self.made.ended_at
        return [b - a for a, b in zip([0.0, *ended_at], ended_at, strict=False)]

    def window(self, first: int, last: int) -> tuple[float, float]:
        """Return the instants at which step `first` begins and step `last` ends."""
        ended_at = self.made.ended_at
        return ended_at[first - 2] if first > 1 else 0.0, ended_at[last - 1]

    # Changes --------------------------------------------------------------------------------------

    def begin_at(self, version: int) -> None:
        """Set the version with which the trainer starts."""
        self._first_version = version

    def see_drawn(self, groups: RolloutsByGroup) -> None:
        """Record drawn groups."""
        if self.has_joined:
            self._open.update(groups)
        else:
            self.lost[ABSENT] += sum(map(len, groups.values()))

    def train(self, rollouts: tuple[int, ...], newest: int) -> None:
        """Record that rollouts are trained on, while the newest version of the primary trainer is `newest`."""
        self.coming.append((rollouts, newest))

    def begin_step(self, groups: tuple[int, ...]) -> None:
        """Record the groups of the step that begins."""
        self._groups = groups

    def end_step(self, time: float, made: StepContents) -> RolloutsByGroup:
        """Record that the step ended; return the groups that the trainer is done with."""
        self.made.append(time, made)
        self.coming = []
        still_open = self._open
        return {group: still_open.pop(group) for group in self._groups if group in still_open}

    def save(self, version: int) -> None:
        """Record that the trainer's checkpoint of `version` is on disk."""
        self._saved = version - self._first_version

    def leave_out(self, group: int, reason: str) -> tuple[int, ...]:
        """Record that the trainer dropped a group.

        Return the group's rollouts, or none if the trainer has trained on it or dropped it before.
        """
        rollouts = self._open.pop(group, ())
        if rollouts:
            self.lost[reason] += len(rollouts)
            gone = set(rollouts)
            self.coming = [
                (tuple(r for r in trained if r not in gone), newest)
                for trained, newest in self.coming
            ]
        return rollouts

    def fall_back(self) -> int:
        """Record that the trainer was lost: steps after its last checkpoint are rolled back. Return their tokens."""
        taken_back = self.made.cut(self._saved)
        if taken_back.num_rollouts:
            self.lost[ROLLED_BACK] += taken_back.num_rollouts
        self.coming = []
        return taken_back.num_tokens


class Flow(MessageReader):
    """Follows every rollout from its tokens to the steps that trained on it, block by block."""

    def __init__(self, num_trainers: int, joined: Container[int] = ()) -> None:
        """Start with `num_trainers` trainers, of which those in `joined` join later."""
        self.trainers = [TrainerFlow(has_joined=n not in joined) for n in range(num_trainers)]
        self.selection = Selection()
        """Trained rollouts compared with generated ones."""
        self._tokens: dict[int, int] = {}
        """Output tokens of each rollout that some trainer may still train on, or that a replica runs."""
        self._born: dict[int, int] = {}
        """By rollout with a token: the version that it started under."""
        self._rewards: dict[int, float] = {}
        self._running: set[int] = set()
        """Rollouts that a replica runs."""
        self._without_environment: set[int] = set()
        """Rollouts whose environment was lost since their last turn began."""
        self._unwanted: set[int] = set()
        """Running rollouts that no trainer needs any more."""
        self._drawn_for: dict[int, int] = {}
        """By group that some trainer has neither trained on nor dropped: the step for which it was drawn."""
        self._num_trainers: dict[int, int] = {}
        """Number of these trainers of each group."""
        self._lost_in: dict[int, tuple[int, str]] = {}
        """By open rollout that the primary trainer lost: the slot of that instant, and why."""
        self._newest = 0
        self._lost = IntervalSums[str]()
        """Tokens of rollouts that the primary trainer lost between its steps, by reason."""

    @property
    def leader(self) -> TrainerFlow:
        """The trainer whose versions replicas load."""
        return self.trainers[LEADER]

    def lost_tokens(self, start: float, end: float) -> dict[str, float]:
        """Return the output tokens of rollouts that the primary trainer lost between two of its steps, by reason.

        Tokens that a rollout kept after an abort count once, when the rollout is lost.
        """
        return {reason: num for reason, num in self._lost.between(start, end).items() if num}

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that changes a rollout or a step."""
        yield {
            Generated: self._end_attempt,
            Verified: self._end_verify,
            Stepped: self._end_step,
            PromptsDrawn: self._draw,
            CheckpointSaved: lambda event, _: self.trainers[event.trainer].save(event.version),
            RunStarted: self._begin,
            TrainerStarted: self._start_trainer,
            TrainerJoined: self._join,
            TrainerStopped: lambda event, _: self.trainers[event.trainer].fall_back(),
            TrainerLost: self._lose_trainer,
            Failed: self._fail,
            Generate: self._begin_attempt,
            Train: self._train,
            Step: lambda step, _: self.trainers[step.trainer].begin_step(step.groups),
            Skip: self._skip,
            Drop: self._drop,
        }

    # Trainers -------------------------------------------------------------------------------------

    def _begin(self, event: RunStarted, _: float) -> None:
        self._newest = event.version
        self.leader.begin_at(event.version)
        self.selection.begin_at(event.version)
        for saved in event.followers:
            self.trainers[saved.trainer].begin_at(saved.version)

    def _start_trainer(self, event: TrainerStarted, _: float) -> None:
        if event.trainer == LEADER:
            self._newest = event.version

    def _join(self, event: TrainerJoined, _: float) -> None:
        self.trainers[event.trainer].has_joined = True

    def _lose_trainer(self, event: TrainerLost, time: float) -> None:
        tokens = self.trainers[event.trainer].fall_back()
        if event.trainer == LEADER:
            self.selection.take_back(self.leader.version, ROLLED_BACK)
            self._lose(self._lost.slot_of(time), ROLLED_BACK, tokens)

    def _train(self, command: Train, _: float) -> None:
        self.trainers[command.trainer].train(command.rollouts, self._newest)

    def _end_step(self, event: Stepped, time: float) -> None:
        trainer = self.trainers[event.trainer]
        done = trainer.end_step(time, self._sum_up(trainer.coming))
        if event.trainer == LEADER:
            self._newest = event.version
            self._select(event.version, done)
            self._lost.marks.append(time)
        self._finish(done)

    def _sum_up(self, coming: Iterable[tuple[tuple[int, ...], int]]) -> StepContents:
        """Return the sums over the rollouts of a step.

        Raises:
            KeyError: a rollout was never drawn, or has no token or no reward.
        """
        behind, tokens = Counter[int](), 0
        rewards: list[float] = []
        for rollouts, newest in coming:
            for born, num in Counter(map(self._born.__getitem__, rollouts)).items():
                behind[max(0, newest - born)] += num  # a rolled-back version may be newer
            tokens += sum(map(self._tokens.__getitem__, rollouts))
            rewards += map(self._rewards.__getitem__, rollouts)
        reward = sum(rewards) / len(rewards) if rewards else 0.0
        return StepContents(len(rewards), tokens, reward, dict(behind))

    def _select(self, version: int, done: RolloutsByGroup) -> None:
        """Record the rollouts of a step of the primary trainer, by the step for which they were drawn."""
        by_step: dict[int, list[int]] = {}
        for group, rollouts in done.items():
            by_step.setdefault(self._drawn_for[group], []).extend(rollouts)
        for drawn_for, own in by_step.items():
            tokens, rewards = sum(map(self._tokens.__getitem__, own)), 0.0
            for reward in map(self._rewards.__getitem__, own):
                rewards += reward
            self.selection.train(version, drawn_for, len(own), tokens, rewards)

    # Rollouts -------------------------------------------------------------------------------------

    def _draw(self, event: PromptsDrawn, _: float) -> None:
        groups = {drawn.group: drawn.rollouts for drawn in event.groups}
        for trainer in self.trainers:
            trainer.see_drawn(groups)
        num_joined = sum(trainer.has_joined for trainer in self.trainers)
        self._drawn_for.update(dict.fromkeys(groups, event.step))
        self._num_trainers.update(dict.fromkeys(groups, num_joined))
        self._tokens.update(dict.fromkeys(chain.from_iterable(groups.values()), 0))
        for drawn in event.groups:
            if drawn.kept:
                self._keep(drawn)

    def _keep(self, drawn: DrawnGroup) -> None:
        """Record the tokens that rollouts kept from before a resume."""
        for rollout, tokens, version in kept_of(drawn):
            self._tokens[rollout], self._born[rollout] = tokens, version

    def _begin_attempt(self, command: Generate, time: float) -> None:
        rollout = command.rollout
        self._running.add(rollout)
        if self._without_environment and rollout in self._without_environment:
            self._without_environment.remove(rollout)
            if not command.prefix:
                self._start_over(rollout, time)

    def _start_over(self, rollout: int, time: float) -> None:
        """Forget the tokens of an episode whose environment was lost."""
        self._lose(self._lost.slot_of(time), STARTED_OVER, self._tokens[rollout])
        self._tokens[rollout] = 0
        self._born.pop(rollout, None)

    def _end_attempt(self, event: Generated, _: float) -> None:
        rollout, tokens = event.rollout, event.tokens
        new = tokens - self._tokens[rollout]
        self._tokens[rollout] = tokens
        if new and rollout not in self._born:
            self._born[rollout] = event.version
        if rollout in self._lost_in:
            self._lose(*self._lost_in[rollout], new)
        self._stop(rollout)

    def _end_verify(self, event: Verified, _: float) -> None:
        if event.rollout in self._tokens:  # else no trainer needs it
            self._rewards[event.rollout] = event.reward

    def _fail(self, event: Failed, _: float) -> None:
        if isinstance(event.command, Generate):
            self._stop(event.command.rollout)
        elif isinstance(event.command, Act) and event.command.rollout in self._tokens:
            self._without_environment.add(event.command.rollout)

    def _stop(self, rollout: int) -> None:
        self._running.discard(rollout)
        if rollout in self._unwanted:
            self._unwanted.remove(rollout)
            self._forget([rollout])

    def _skip(self, command: Skip, time: float) -> None:
        self._leave_out(command.group, command.trainer, command.reason, time)

    def _drop(self, command: Drop, time: float) -> None:
        for trainer in range(len(self.trainers)):
            self._leave_out(command.group, trainer, command.reason, time)

    def _leave_out(self, group: int, trainer: int, reason: str, time: float) -> None:
        rollouts = self.trainers[trainer].leave_out(group, reason)
        if not rollouts:
            return
        if trainer == LEADER:
            drawn_for, slot = self._drawn_for[group], self._lost.slot_of(time)
            for rollout in rollouts:
                tokens, reward = self._tokens[rollout], self._rewards.get(rollout)
                self._lost_in[rollout] = slot, reason
                self._lose(slot, reason, tokens)
                self.selection.leave_out(drawn_for, reason, tokens, reward)
        self._finish({group: rollouts})

    def _finish(self, done: RolloutsByGroup) -> None:
        """Record that a trainer is done with groups; forget rollouts that no trainer needs and no replica runs."""
        running, num_trainers, gone = self._running, self._num_trainers, list[int]()
        for group, rollouts in done.items():
            num_trainers[group] -= 1
            if not num_trainers[group]:
                del num_trainers[group], self._drawn_for[group]
                gone += rollouts
        self._unwanted.update(running.intersection(gone))
        self._forget([rollout for rollout in gone if rollout not in running])

    def _forget(self, rollouts: Iterable[int]) -> None:
        if self._without_environment:
            self._without_environment.difference_update(rollouts)
        columns: list[dict[int, Any]] = [self._tokens, self._born, self._rewards, self._lost_in]
        for column in filter(None, columns):
            for rollout in rollouts:
                column.pop(rollout, None)

    def _lose(self, slot: int, reason: str, tokens: int) -> None:
        if tokens:
            self._lost.add(slot, {reason: tokens})


def read_flow(trace: Trace) -> Flow:
    """Follow every rollout from its tokens to the steps that trained on it."""
    flow = Flow(trace.run.num_trainers, trace.joined)
    flow.read(trace.entries)
    return flow

"""Follow every rollout of a trace from its tokens to the steps that trained on it.

Steps that were rolled back with a lost trainer are left out: their rollouts count as lost to that
trainer. The first step after the loss then lasts from the end of the last step that was kept. A
rollout is forgotten once every trainer has trained on it or dropped it. So memory holds only a few
numbers for each step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.engine.entities import kept_of
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
from streamrl.record.selection import Selection


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
        self.ended_at = array("d")
        """Instant at which each step ended."""
        self.num_rollouts = array("q")
        self.num_tokens = array("q")
        self.rewards = array("d")
        self._behind: dict[int, array[int]] = {}
        """By versions behind: rollouts of each step. A column ends at the last step with such rollouts."""

    def __len__(self) -> int:
        return len(self.ended_at)

    def append(self, time: float, made: StepContents) -> None:
        """Add the step that ended at `time` seconds."""
        for lag, count in made.behind.items():
            column = self._behind.setdefault(lag, array("q"))
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
            del seconds[length:]
        for counts in (self.num_rollouts, self.num_tokens, *self._behind.values()):
            del counts[length:]
        return gone


@dataclass(slots=True)
class OpenRollout:
    """The state of a rollout that some trainer may still train on, or that is still generated."""

    tokens: int = 0
    born: int | None = None
    """Version that it started under; None before its first token."""
    reward: float | None = None
    runs: bool = False
    lost_in: int | None = None
    """Slot of the instant at which the primary trainer lost it; None if it was not lost."""
    lost_for: str = ""
    """Why the primary trainer lost it."""
    drawn_for: int = 0
    """The step for which it was drawn."""
    num_trainers: int = 0
    """Number of trainers that have neither trained on it nor dropped it."""


@dataclass(slots=True)
class TrainerFlow:
    """The steps of one trainer, and the rollouts that it trained on or lost."""

    made: StepHistory = field(default_factory=StepHistory)
    lost: Counter[str] = field(default_factory=Counter)
    """Rollouts that it never trains on, by reason."""

    has_joined: bool = True
    """False for a trainer that joins later, until it joins."""
    _coming: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Rollouts of the next step, and the version of the primary trainer when it trained on them.
    """
    _groups: tuple[int, ...] = ()
    """Groups of the running step."""
    _first_version: int = 0
    _saved: int = 0
    """Steps at the last checkpoint."""
    _open: dict[int, tuple[int, ...]] = field(default_factory=dict)
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

    def see_drawn(self, drawn: DrawnGroup) -> None:
        """Record a drawn group."""
        if self.has_joined:
            self._open[drawn.group] = drawn.rollouts
        else:
            self.lost[ABSENT] += len(drawn.rollouts)

    def train(self, rollouts: tuple[int, ...], newest: int) -> None:
        """Record that rollouts are trained on, while the newest version of the primary trainer is `newest`."""
        self._coming.append((rollouts, newest))

    def begin_step(self, groups: tuple[int, ...]) -> None:
        """Record the groups of the step that begins."""
        self._groups = groups

    def end_step(self, time: float, known: dict[int, OpenRollout]) -> list[int]:
        """Record that the step ended; return the rollouts that the trainer is done with."""
        self.made.append(time, _make(self._coming, known))
        self._coming = []
        groups = [self._open.pop(group, ()) for group in self._groups]
        return [rollout for rollouts in groups for rollout in rollouts]

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
            self._coming = [
                (tuple(r for r in trained if r not in gone), newest)
                for trained, newest in self._coming
            ]
        return rollouts

    def fall_back(self) -> int:
        """Record that the trainer was lost: steps after its last checkpoint are rolled back. Return their tokens."""
        taken_back = self.made.cut(self._saved)
        if taken_back.num_rollouts:
            self.lost[ROLLED_BACK] += taken_back.num_rollouts
        self._coming = []
        return taken_back.num_tokens


class Flow:
    """Follows every rollout from its tokens to the steps that trained on it, block by block."""

    def __init__(self, num_trainers: int, joined: Container[int] = ()) -> None:
        """Start with `num_trainers` trainers, of which those in `joined` join later."""
        self.trainers = [TrainerFlow(has_joined=n not in joined) for n in range(num_trainers)]
        self._rollouts: dict[int, OpenRollout] = {}
        self.selection = Selection()
        """Trained rollouts compared with generated ones."""
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

    def read(self, entries: Iterable[tuple[float, Event, list[Command]]]) -> None:
        """Read the next entries of the trace."""
        for time, event, commands in entries:
            self._see(event, time)
            for command in commands:
                self._obey(command, time)

    def _see(self, event: Event, time: float) -> None:
        match event:
            case Generated():
                self._end_attempt(event)
            case Verified():
                if (rollout := self._rollouts.get(event.rollout)) is not None:
                    rollout.reward = event.reward
            case Stepped(version, trainer):
                self._end_step(version, trainer, time)
            case PromptsDrawn(groups=groups):
                for drawn in groups:
                    self._draw(drawn, event.step)
            case CheckpointSaved(version, trainer):
                self.trainers[trainer].save(version)
            case RunStarted(version):
                self._newest = version
                self.leader.begin_at(version)
                self.selection.begin_at(version)
                for saved in event.followers:
                    self.trainers[saved.trainer].begin_at(saved.version)
            case TrainerStarted(trainer, version) if trainer == LEADER:
                self._newest = version
            case TrainerJoined(trainer):
                self.trainers[trainer].has_joined = True
            case TrainerStopped(trainer):
                self.trainers[trainer].fall_back()
            case TrainerLost(trainer):
                tokens = self.trainers[trainer].fall_back()
                if trainer == LEADER:
                    self.selection.take_back(self.leader.version, ROLLED_BACK)
                    self._lose(self._lost.slot_of(time), ROLLED_BACK, tokens)
            case Failed(Generate(number)):
                self._stop(number)
            case _:
                pass  # changes no rollout

    def _obey(self, command: Command, time: float) -> None:
        match command:
            case Generate():
                self._rollouts[command.rollout].runs = True
            case Train(rollouts, trainer):
                self.trainers[trainer].train(rollouts, self._newest)
            case Step(_, groups, trainer):
                self.trainers[trainer].begin_step(groups)
            case Skip(group, trainer, reason):
                self._leave_out(group, trainer, reason, time)
            case Drop(group, reason):
                for trainer in range(len(self.trainers)):
                    self._leave_out(group, trainer, reason, time)
            case _:
                pass  # changes nothing in any trainer's steps

    # Rollouts -------------------------------------------------------------------------------------

    def _draw(self, drawn: DrawnGroup, step: int) -> None:
        for trainer in self.trainers:
            trainer.see_drawn(drawn)
        num_joined = sum(trainer.has_joined for trainer in self.trainers)
        for rollout in drawn.rollouts:
            self._rollouts[rollout] = OpenRollout(drawn_for=step, num_trainers=num_joined)
        for rollout, tokens, version in kept_of(drawn):
            self._rollouts[rollout].tokens, self._rollouts[rollout].born = tokens, version

    def _end_attempt(self, event: Generated) -> None:
        rollout = self._rollouts[event.rollout]
        new, rollout.tokens = event.tokens - rollout.tokens, event.tokens
        if new and rollout.born is None:
            rollout.born = event.version
        if rollout.lost_in is not None:
            self._lose(rollout.lost_in, rollout.lost_for, new)
        self._stop(event.rollout)

    def _stop(self, number: int) -> None:
        rollout = self._rollouts[number]
        rollout.runs = False
        if not rollout.num_trainers:
            del self._rollouts[number]

    def _end_step(self, version: int, trainer: int, time: float) -> None:
        done = self.trainers[trainer].end_step(time, self._rollouts)
        if trainer == LEADER:
            self._newest = version
            self._select(version, done)
            self._lost.marks.append(time)
        self._finish(done)

    def _select(self, version: int, done: Iterable[int]) -> None:
        """Record the rollouts of a step of the primary trainer, by the step for which they were drawn."""
        sums: dict[int, tuple[int, int, float]] = {}
        for number in done:
            rollout = self._rollouts[number]
            num, tokens, reward = sums.get(rollout.drawn_for, (0, 0, 0.0))
            assert rollout.reward is not None, "it was trained on"
            sums[rollout.drawn_for] = num + 1, tokens + rollout.tokens, reward + rollout.reward
        for drawn_for, of_step in sums.items():
            self.selection.train(version, drawn_for, *of_step)

    def _leave_out(self, group: int, trainer: int, reason: str, time: float) -> None:
        rollouts = self.trainers[trainer].leave_out(group, reason)
        if trainer == LEADER:
            slot = self._lost.slot_of(time)
            for number in rollouts:
                rollout = self._rollouts[number]
                rollout.lost_in, rollout.lost_for = slot, reason
                self._lose(slot, reason, rollout.tokens)
                self.selection.leave_out(rollout.drawn_for, reason, rollout.tokens, rollout.reward)
        self._finish(rollouts)

    def _finish(self, rollouts: Iterable[int]) -> None:
        """Record that a trainer is done with rollouts; forget those that no trainer needs and no replica runs."""
        for number in rollouts:
            rollout = self._rollouts[number]
            rollout.num_trainers -= 1
            if not rollout.num_trainers and not rollout.runs:
                del self._rollouts[number]

    def _lose(self, slot: int, reason: str, tokens: int) -> None:
        if tokens:
            self._lost.add(slot, {reason: tokens})


def read_flow(trace: Trace) -> Flow:
    """Follow every rollout from its tokens to the steps that trained on it."""
    flow = Flow(trace.run.num_trainers, trace.joined)
    flow.read(trace.entries)
    return flow


def _make(coming: list[tuple[tuple[int, ...], int]], known: dict[int, OpenRollout]) -> StepContents:
    """Return the sums over the rollouts of a step.

    Raises:
        KeyError: a rollout was never drawn, or has no token or no reward.
    """
    behind = Counter[int]()
    tokens, rewards = 0, []
    for numbers, newest in coming:
        for number in numbers:
            rollout = known[number]
            if rollout.born is None or rollout.reward is None:
                raise KeyError(number)
            behind[max(0, newest - rollout.born)] += 1  # a rolled-back version may be newer
            tokens += rollout.tokens
            rewards.append(rollout.reward)
    reward = sum(rewards) / len(rewards) if rewards else 0.0
    return StepContents(len(rewards), tokens, reward, dict(behind))

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
    """What a step was made of."""

    num_rollouts: int
    num_tokens: int
    """Output tokens of them."""
    reward: float
    """Mean of them; 0 of none."""
    behind: dict[int, int]
    """Rollouts by how many versions they were behind the newest version of the primary trainer when
    it trained on them.
    """


class StepHistory:
    """The steps so far, from the first on."""

    def __init__(self) -> None:
        self.ended_at = array("d")
        """Instant of each."""
        self.num_rollouts = array("q")
        self.num_tokens = array("q")
        self.rewards = array("d")
        self._behind: dict[int, array[int]] = {}
        """By versions behind: rollouts of each step; those after the last that has any are left out."""

    def __len__(self) -> int:
        return len(self.ended_at)

    def append(self, time: float, made: StepContents) -> None:
        """Enter what the step was made of that ended at `time` seconds."""
        for lag, count in made.behind.items():
            column = self._behind.setdefault(lag, array("q"))
            column.extend([0] * (len(self) - len(column)))
            column.append(count)
        self.ended_at.append(time)
        self.num_rollouts.append(made.num_rollouts)
        self.num_tokens.append(made.num_tokens)
        self.rewards.append(made.reward)

    def staleness(self, first: int, last: int) -> Counter[int]:
        """Return rollouts by versions behind, of the steps at places `first` to `last`, that one left out."""
        counts = {lag: sum(column[first:last]) for lag, column in self._behind.items()}
        return Counter({lag: count for lag, count in counts.items() if count})

    def cut(self, length: int) -> StepContents:
        """Take all steps back but the first `length`; return what those were made of together, less their reward."""
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
    """What is known of a rollout that may still be trained on."""

    tokens: int = 0
    born: int | None = None
    """Version that it started under; None before its first token."""
    reward: float | None = None
    runs: bool = False
    lost_in: int | None = None
    """Slot of the instant at which the primary trainer lost it; None where it was not lost."""
    lost_for: str = ""
    """Why, where it was."""
    drawn_for: int = 0
    """Step that it was drawn for."""
    num_trainers: int = 0
    """Those that have neither trained on it nor given it up."""


@dataclass(slots=True)
class TrainerFlow:
    """The steps of one trainer, and what they were made of."""

    made: StepHistory = field(default_factory=StepHistory)
    lost: Counter[str] = field(default_factory=Counter)
    """Rollouts that it never trains on, by reason."""

    is_there: bool = True
    """False of one that joins later, until it does."""
    _coming: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Rollouts of the coming step, and the version of the primary trainer when it trained on them.
    """
    _groups: tuple[int, ...] = ()
    """Groups of the step under way."""
    _first_version: int = 0
    _saved: int = 0
    """Steps at the last checkpoint."""
    _open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rollouts of groups that it has neither trained on nor given up."""

    @property
    def version(self) -> int:
        """The version that its last step has made."""
        return self._first_version + len(self.made)

    def step_times(self) -> list[float]:
        """Return the seconds of each step: those since the one before it."""
        ended_at = self.made.ended_at
        return [b - a for a, b in zip([0.0, *ended_at], ended_at, strict=False)]

    def window(self, first: int, last: int) -> tuple[float, float]:
        """Return the instants at which the time of step `first` begins and that of step `last` ends."""
        ended_at = self.made.ended_at
        return ended_at[first - 2] if first > 1 else 0.0, ended_at[last - 1]

    # Changes --------------------------------------------------------------------------------------

    def begin_at(self, version: int) -> None:
        """Enter the version that the run begins with."""
        self._first_version = version

    def see_drawn(self, drawn: DrawnGroup) -> None:
        """Enter that a group was drawn."""
        if self.is_there:
            self._open[drawn.group] = drawn.rollouts
        else:
            self.lost[ABSENT] += len(drawn.rollouts)

    def train(self, rollouts: tuple[int, ...], newest: int) -> None:
        """Record that rollouts are trained on, while the newest version of the primary trainer is `newest`."""
        self._coming.append((rollouts, newest))

    def begin_step(self, groups: tuple[int, ...]) -> None:
        """Enter what the step under way is made of."""
        self._groups = groups

    def end_step(self, time: float, known: dict[int, OpenRollout]) -> list[int]:
        """Enter that the coming step is made; return the rollouts that the trainer is done with."""
        self.made.append(time, _make(self._coming, known))
        self._coming = []
        groups = [self._open.pop(group, ()) for group in self._groups]
        return [rollout for rollouts in groups for rollout in rollouts]

    def save(self, version: int) -> None:
        """Enter that its checkpoint of `version` is on disk."""
        self._saved = version - self._first_version

    def leave_out(self, group: int, reason: str) -> tuple[int, ...]:
        """Enter that it never trains on a group; return its rollouts, none where it has, or has given it up before."""
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
        """Enter that it is lost, and with it every step after its last checkpoint; return their tokens."""
        taken_back = self.made.cut(self._saved)
        if taken_back.num_rollouts:
            self.lost[ROLLED_BACK] += taken_back.num_rollouts
        self._coming = []
        return taken_back.num_tokens


class Flow:
    """Follows every rollout from its tokens to the steps that trained on it, block by block."""

    def __init__(self, num_trainers: int, joined: Container[int] = ()) -> None:
        """Take how many trainers there are, and which of them join later."""
        self.trainers = [TrainerFlow(is_there=n not in joined) for n in range(num_trainers)]
        self._rollouts: dict[int, OpenRollout] = {}
        self.selection = Selection()
        """What was trained on beside what was generated."""
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
        """Take the entries that come after those before."""
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
                self.trainers[trainer].is_there = True
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
                pass  # says nothing of rollouts

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
                pass  # says nothing of who trains on what

    # Rollouts -------------------------------------------------------------------------------------

    def _draw(self, drawn: DrawnGroup, step: int) -> None:
        for trainer in self.trainers:
            trainer.see_drawn(drawn)
        num_there = sum(trainer.is_there for trainer in self.trainers)
        for rollout in drawn.rollouts:
            self._rollouts[rollout] = OpenRollout(drawn_for=step, num_trainers=num_there)
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
        """Record which rollouts a step of the primary trainer contains, by the step that they were drawn for."""
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
        """Enter that a trainer is done with rollouts; forget those that all are done with and that no more run."""
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
    """Put together what a step was made of.

    Raises:
        KeyError: something was trained on that was never drawn, or has no token or no reward.
    """
    behind = Counter[int]()
    tokens, rewards = 0, []
    for numbers, newest in coming:
        for number in numbers:
            rollout = known[number]
            if rollout.born is None or rollout.reward is None:
                raise KeyError(number)
            behind[max(0, newest - rollout.born)] += 1  # of lost versions: none
            tokens += rollout.tokens
            rewards.append(rollout.reward)
    reward = sum(rewards) / len(rewards) if rewards else 0.0
    return StepContents(len(rewards), tokens, reward, dict(behind))

"""What a trace says of its rollouts: from their tokens to the steps of every trainer that trained on them.

Steps that a trainer's loss took back are left out: their rollouts count as lost to it, and the step that comes
after the loss has taken all the time since the last one that stayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Drop,
    Generated,
    PromptsDrawn,
    RunStarted,
    Skip,
    Step,
    Stepped,
    Train,
    TrainerLost,
    TrainerStarted,
    Verified,
)
from streamrl.engine.trainer_side import LEADER, ROLLED_BACK
from streamrl.record.trace import Trace


@dataclass(slots=True)
class TrainerFlow:
    """The steps of one trainer, and what they were made of."""

    stepped_at: list[float] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    """Rollouts of each step."""
    lost: Counter[str] = field(default_factory=Counter)
    """Rollouts that it never trains on, by reason."""
    lost_at: list[tuple[float, list[int]]] = field(default_factory=list)
    """Instant at which rollouts were lost to it, and which."""

    _behind: list[Counter[int]] = field(default_factory=list)
    _coming: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Rollouts of the coming step, and the leader's version when they were trained on."""
    _groups: tuple[int, ...] = ()
    """Groups of the step under way."""
    _first_version: int = 0
    _saved: int = 0
    """Steps at the last checkpoint."""
    _open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rollouts of groups that it has neither trained on nor given up."""

    @property
    def staleness(self) -> Counter[int]:
        """Rollouts by how many versions of the leader they were behind its newest when trained on."""
        return self.staleness_of(0, len(self._behind))

    def staleness_of(self, first: int, last: int) -> Counter[int]:
        """Return the same of the steps at places `first` to `last`, that one left out."""
        found = Counter[int]()
        for behind in self._behind[first:last]:
            found.update(behind)
        return found

    def step_times(self) -> list[float]:
        """Return the seconds of each step: those since the one before it."""
        return [b - a for a, b in zip([0.0, *self.stepped_at], self.stepped_at, strict=False)]

    def window(self, first: int, last: int) -> tuple[float, float]:
        """Return the instants at which the time of step `first` begins and that of step `last` ends."""
        return self.stepped_at[first - 2] if first > 1 else 0.0, self.stepped_at[last - 1]

    # Changes --------------------------------------------------------------------------------------

    def begin_at(self, version: int) -> None:
        """Enter the version that the run begins with."""
        self._first_version = version

    def see_drawn(self, group: int, rollouts: tuple[int, ...]) -> None:
        """Enter that a group was drawn."""
        self._open[group] = rollouts

    def train(self, rollouts: tuple[int, ...], newest: int) -> None:
        """Enter that rollouts are trained on, while the leader's newest version is `newest`."""
        self._coming.append((rollouts, newest))

    def begin_step(self, groups: tuple[int, ...]) -> None:
        """Enter what the step under way is made of."""
        self._groups = groups

    def end_step(self, time: float, born: dict[int, int]) -> None:
        """Enter that the coming step is made; `born` are the versions that rollouts started under."""
        self.stepped_at.append(time)
        self.trained.append([r for rollouts, _ in self._coming for r in rollouts])
        behind = Counter[int]()
        for rollouts, newest in self._coming:
            behind.update(max(0, newest - born[r]) for r in rollouts)  # of lost versions: none
        self._behind.append(behind)
        self._coming = []
        for group in self._groups:
            self._open.pop(group, None)

    def save(self, version: int) -> None:
        """Enter that its checkpoint of `version` is on disk."""
        self._saved = version - self._first_version

    def leave_out(self, group: int, reason: str, time: float) -> None:
        """Enter that it never trains on a group, unless it has, or has given it up before."""
        rollouts = self._open.pop(group, None)
        if rollouts is None:
            return
        self.lost[reason] += len(rollouts)
        self.lost_at.append((time, list(rollouts)))
        gone = set(rollouts)
        self._coming = [
            (tuple(r for r in trained if r not in gone), newest) for trained, newest in self._coming
        ]

    def fall_back(self, time: float) -> None:
        """Enter that it is lost, and with it every step after its last checkpoint."""
        taken_back = [rollout for step in self.trained[self._saved :] for rollout in step]
        if taken_back:
            self.lost[ROLLED_BACK] += len(taken_back)
            self.lost_at.append((time, taken_back))
        for steps in (self.stepped_at, self.trained, self._behind):
            del steps[self._saved :]
        self._coming = []


@dataclass(slots=True)
class Flow:
    """What a trace says of its rollouts."""

    trainers: list[TrainerFlow]
    generated: list[tuple[float, int]] = field(default_factory=list)
    """Instant and new tokens of each attempt."""
    tokens: dict[int, int] = field(default_factory=dict)
    rewards: dict[int, float] = field(default_factory=dict)

    @property
    def leader(self) -> TrainerFlow:
        """The trainer whose versions replicas load."""
        return self.trainers[LEADER]

    def num_tokens(self, steps: Iterable[Sequence[int]]) -> int:
        """Return the output tokens of all rollouts of some steps."""
        return sum(self.tokens.get(rollout, 0) for rollouts in steps for rollout in rollouts)


def read_flow(trace: Trace) -> Flow:
    """Follow every rollout from its tokens to the steps that trained on it."""
    flow = Flow([TrainerFlow() for _ in trace.run.trainers])
    born: dict[int, int] = {}
    newest = 0
    for time, event, commands in trace.entries:
        match event:
            case RunStarted(version):
                newest = version
                flow.leader.begin_at(version)
            case Generated():
                new = event.tokens - flow.tokens.get(event.rollout, 0)
                flow.generated.append((time, new))
                flow.tokens[event.rollout] = event.tokens
                if new:
                    born.setdefault(event.rollout, event.version)
            case Verified():
                flow.rewards[event.rollout] = event.reward
            case Stepped(version, trainer):
                flow.trainers[trainer].end_step(time, born)
                newest = version if trainer == LEADER else newest
            case PromptsDrawn(groups=groups):
                for drawn in groups:
                    for each in flow.trainers:
                        each.see_drawn(drawn.group, drawn.rollouts)
            case CheckpointSaved(version, trainer):
                flow.trainers[trainer].save(version)
            case TrainerStarted(trainer, version) if trainer == LEADER:
                newest = version
            case TrainerLost(trainer):
                flow.trainers[trainer].fall_back(time)
            case _:
                pass  # says nothing of rollouts
        for command in commands:
            _enter(command, flow, newest, time)
    return flow


def _enter(command: Command, flow: Flow, newest: int, time: float) -> None:
    match command:
        case Train(rollouts, trainer):
            flow.trainers[trainer].train(rollouts, newest)
        case Step(_, groups, trainer):
            flow.trainers[trainer].begin_step(groups)
        case Skip(group, trainer, reason):
            flow.trainers[trainer].leave_out(group, reason, time)
        case Drop(group, reason):
            for each in flow.trainers:
                each.leave_out(group, reason, time)
        case _:
            pass  # says nothing of who trains on what

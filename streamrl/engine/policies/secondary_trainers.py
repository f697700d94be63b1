"""Trainers besides the leading one: what they skip of the stream, and how they join and leave a running job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from streamrl.engine.engine import Policy
from streamrl.engine.messages import Command, Skip, StopTrainer
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide


class SkipOutsideShare:
    """Let a trainer that follows give up what is outside its share, as it comes, before it takes any of it."""

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return the groups that are given up."""
        trainer = state.trainers[self.trainer]
        if not trainer.outside:
            return ()
        found = list(trainer.outside.values())
        return [Skip(group.id, trainer.id, reason) for group, reason in found]


class StopDetached:
    """End a trainer that was detached, once it has ended what it did and is saved.

    A save that fails does not hold it up: it stands before this in the order of policies, and is tried as often as any.
    """

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return its end, where that is due."""
        trainer = state.trainers[self.trainer]
        if not trainer.is_away or not trainer.is_up or trainer.command is not None:
            return ()
        return (StopTrainer(trainer.id),)


class JoinedTrainers:
    """Let each trainer that joined later decide as those that a run begins with."""

    def __init__(self, num_first: int, build: Callable[[TrainerSide], Sequence[Policy]]) -> None:
        """Take how many trainers a run begins with, and what makes the policies of another one."""
        self._num_first = num_first
        self._build = build
        self._policies: list[Sequence[Policy]] = []
        """Of each that joined, in order."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what they do."""
        return self._decide(state) if len(state.trainers) > self._num_first else ()

    def _decide(self, state: State) -> Iterator[Command]:
        for trainer in state.trainers[self._num_first + len(self._policies) :]:
            self._policies.append(self._build(trainer))
        for policies in self._policies:
            for policy in policies:
                yield from policy.decide(state)

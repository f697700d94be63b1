"""Which groups a trainer leaves to others, because its share of the stream has no place for them."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, Skip
from streamrl.engine.state import State


class LeaveOutShare:
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

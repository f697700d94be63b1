"""Secondary trainers: which groups they skip, and how they join and leave a running job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from streamrl.engine.engine import Policy
from streamrl.engine.messages import Command, Generated, Skip, StopTrainer, Verified
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide


class SkipOutsideShare:
    """Let a secondary trainer skip complete groups outside its share, before it takes any of them."""

    ignores = (Generated,)

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return the skips."""
        trainer = state.trainers[self.trainer]
        if not trainer.outside:
            return ()
        found = list(trainer.outside.values())
        return [Skip(group.id, trainer.id, reason) for group, reason in found]


class StopDetached:
    """Stop a detached trainer once it is idle and saved.

    A failed save does not delay this policy: checkpoints come earlier in the order of policies and
    have their own limit of attempts.
    """

    ignores = (Generated, Verified)

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return the stop, if it is due."""
        trainer = state.trainers[self.trainer]
        if not trainer.is_away or not trainer.is_up or trainer.command is not None:
            return ()
        return (StopTrainer(trainer.id),)


class JoinedTrainers:
    """Run the policies of each trainer that joined later, as for the initial trainers."""

    def __init__(self, num_first: int, build: Callable[[TrainerSide], Sequence[Policy]]) -> None:
        """Take the number of initial trainers, and a function that builds the policies of another one."""
        self._num_first = num_first
        self._build = build
        self._policies: list[Sequence[Policy]] = []
        """Policies of each trainer that joined, in order."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield their commands."""
        return () if self.is_at_rest(state) else self._decide(state)

    def is_at_rest(self, state: State) -> bool:
        """Return whether no trainer has joined."""
        return len(state.trainers) == self._num_first

    def _decide(self, state: State) -> Iterator[Command]:
        for trainer in state.trainers[self._num_first + len(self._policies) :]:
            self._policies.append(self._build(trainer))
        for policies in self._policies:
            for policy in policies:
                yield from policy.decide(state)

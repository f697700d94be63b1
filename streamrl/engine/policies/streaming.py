"""When the trainer works on what: batch by batch, or in micro-batches as rollouts arrive.

The gradient of a step is the sum over its micro-batches, so both give the same weights; streaming only
begins earlier. Where rollouts need forward passes first (reference, critic, proximal policy), these run
as soon as the trainer is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from streamrl.engine.entities import Rollout
from streamrl.engine.messages import Command, Score, Step, Train
from streamrl.engine.state import State


class Stream:
    """Train on micro-batches as soon as `fill` rollouts are there to fill the trainer's GPUs."""

    def __init__(self, fill: int, most: int) -> None:
        self.fill = fill
        """Rollouts that keep every data-parallel rank busy."""
        self.most = most
        """Rollouts in one command, so that the trainer can turn to what arrives meanwhile."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return the trainer's next work when it is free."""
        if state.trainer_command is not None or not state.trainer_is_ready or state.is_stopping:
            return ()
        if state.batch.num_in_gradient == state.rollouts_per_step:
            return (Step(state.version + 1),)
        if self._is_worth_it(state, state.batch.trainable, state.batch.num_in_gradient):
            return (Train(_ids(state.batch.trainable, self.most)),)
        if self._is_worth_it(
            state, state.batch.unscored, state.batch.num_in_gradient + len(state.batch.trainable)
        ):
            return (Score(_ids(state.batch.unscored, self.most)),)
        return ()

    def _is_worth_it(self, state: State, line: deque[Rollout], num_ahead: int) -> bool:
        """Return whether `line` fills the GPUs, or is all that the step still lacks."""
        if not line:
            return False
        return len(line) >= min(self.fill, state.rollouts_per_step - num_ahead)


class WholeBatch:
    """Train on a step's rollouts only once all of them are ready and every replica is in sync."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Rollouts in one command."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return the trainer's next work when it is free and the batch is whole."""
        num_ready = (
            len(state.batch.unscored) + len(state.batch.trainable) + state.batch.num_in_gradient
        )
        if num_ready < state.rollouts_per_step or not state.trainer_is_free:
            return ()
        if state.is_stopping or not state.is_synced:
            return ()
        if state.batch.unscored:
            return (Score(_ids(state.batch.unscored, self.most)),)
        if state.batch.trainable:
            return (Train(_ids(state.batch.trainable, self.most)),)
        return (Step(state.version + 1),)


def _ids(line: deque[Rollout], most: int) -> tuple[int, ...]:
    return tuple(rollout.id for rollout in islice(line, most))

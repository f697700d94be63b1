"""When the trainer works on what: batch by batch, or in micro-batches as rollouts arrive.

The gradient of a step is the sum over its micro-batches, so both give the same weights; streaming only
begins earlier. Where rollouts need forward passes first (reference, critic, proximal policy), these run
as soon as the trainer is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from streamrl.entities import Rollout
from streamrl.messages import Command, Score, Step, Train
from streamrl.state import State


class Stream:
    """Train on micro-batches as soon as `fill` rollouts are there to fill the trainer's GPUs."""

    def __init__(self, fill: int, most: int) -> None:
        self.fill = fill
        """Rollouts that keep every data-parallel rank busy."""
        self.most = most
        """Rollouts in one command, so that the trainer can turn to what arrives meanwhile."""

    def decide(self, state: State) -> Iterator[Command]:
        """Yield the trainer's next work when it is free."""
        if not state.trainer_is_free or state.is_stopping:
            return
        if state.num_in_gradient == state.rollouts_per_step:
            yield Step(state.version + 1)
        elif self._is_worth_it(state, state.trainable, state.num_in_gradient):
            yield Train(_ids(state.trainable, self.most))
        elif self._is_worth_it(state, state.unscored, state.num_in_gradient + len(state.trainable)):
            yield Score(_ids(state.unscored, self.most))

    def _is_worth_it(self, state: State, line: deque[Rollout], num_ahead: int) -> bool:
        """Say whether `line` fills the GPUs, or is all that the step still lacks."""
        num_lacking = state.rollouts_per_step - num_ahead
        return bool(line) and len(line) >= min(self.fill, num_lacking)


class WholeBatch:
    """Train on a step's rollouts only once all of them are ready and every replica is in sync."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Rollouts in one command."""

    def decide(self, state: State) -> Iterator[Command]:
        """Yield the trainer's next work when it is free and the batch is whole."""
        if not state.trainer_is_free or state.is_stopping or not state.is_synced:
            return
        num_ready = len(state.unscored) + len(state.trainable) + state.num_in_gradient
        if num_ready < state.rollouts_per_step:
            return
        if state.unscored:
            yield Score(_ids(state.unscored, self.most))
        elif state.trainable:
            yield Train(_ids(state.trainable, self.most))
        else:
            yield Step(state.version + 1)


def _ids(line: deque[Rollout], most: int) -> tuple[int, ...]:
    return tuple(rollout.id for rollout in islice(line, most))

"""When rewards are computed, and when the trainer works on rollouts: as they arrive, or batch by batch.

The gradient of a step is the sum over its micro-batches. So both modes give the same weights;
streaming only begins earlier. If rollouts need forward passes first (reference, critic, proximal
policy), these run as soon as the trainer is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from streamrl.engine.entities import Rollout
from streamrl.engine.messages import Command, Generated, Score, Step, Train, Verified, Verify
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide


class VerifyOnArrival:
    """Request a rollout's reward as soon as it is generated."""

    ignores = (Verified,)

    def decide(self, state: State) -> Iterable[Command]:
        """Return a command for each that has arrived."""
        return [Verify(rollout.id) for rollout in state.unverified] if state.unverified else ()


class Stream:
    """Train as soon as enough rollouts are ready to give every data-parallel rank a micro-batch."""

    ignores = (Generated,)

    def __init__(self, trainer: int, micro_batch: int, most_fills: int) -> None:
        self.trainer = trainer
        self.micro_batch = micro_batch
        """Rollouts that keep one data-parallel rank busy."""
        self.most_fills = most_fills
        """Maximum micro-batches of each rank in one command, so that the trainer soon sees new arrivals."""

    def decide(self, state: State) -> Iterable[Command]:
        """Return the trainer's next work when it is free."""
        if self.is_at_rest(state):
            return ()
        trainer = state.trainers[self.trainer]
        batch, needed = trainer.batch, trainer.rollouts_per_step
        fill = trainer.data_parallel * self.micro_batch
        most = self.most_fills * fill
        num_trained, num_trainable = len(batch.in_gradient), len(batch.trainable)
        if num_trained == needed:
            return (_step(trainer),)
        if num_trainable and num_trainable >= min(fill, needed - num_trained):
            return (Train(_ids(batch.trainable, most), trainer.id),)
        num_unscored = len(batch.unscored)
        if num_unscored and num_unscored >= min(fill, needed - num_trained - num_trainable):
            return (Score(_ids(batch.unscored, most), trainer.id),)
        return ()

    def is_at_rest(self, state: State) -> bool:
        """Return whether the trainer can start nothing."""
        trainer = state.trainers[self.trainer]
        return not trainer.is_free or state.is_stopping or trainer.is_away


class WholeBatch:
    """Train on a step's rollouts once all of them are ready and every replica is in sync."""

    def __init__(
        self, trainer: int, most: int, shares_gpus: bool = False, before_more: int | None = None
    ) -> None:
        self.trainer = trainer
        self.most = most
        """Maximum rollouts in one command."""
        self.before_more = before_more or most
        """The same while GPUs of replicas may still join, which they do between two commands."""
        self.shares_gpus = shares_gpus
        """Whether it also waits until nothing is generated. Surplus rollouts of a step may still
        run then.
        """
        self.ignores = () if shares_gpus else (Generated,)

    def decide(self, state: State) -> Iterable[Command]:
        """Return the trainer's next command when it is free and the batch is complete."""
        trainer = state.trainers[self.trainer]
        batch = trainer.batch
        num_ready = len(batch.unscored) + len(batch.trainable) + len(batch.in_gradient)
        if num_ready < trainer.rollouts_per_step or not trainer.is_free:
            return ()
        if state.is_stopping or (trainer.leads and not state.is_synced):
            return ()
        if self.shares_gpus and state.is_generating:
            return ()
        may_join = trainer.borrowable and not trainer.has_borrowed
        most = self.before_more if may_join else self.most
        if batch.unscored:
            return (Score(_ids(batch.unscored, most), trainer.id),)
        if batch.trainable:
            return (Train(_ids(batch.trainable, most), trainer.id),)
        return (_step(trainer),)

    def is_at_rest(self, state: State) -> bool:
        """Return whether the trainer can start nothing."""
        return not state.trainers[self.trainer].is_free or state.is_stopping


def _step(trainer: TrainerSide) -> Step:
    return Step(trainer.version + 1, tuple(trainer.batch.groups), trainer.id)


def _ids(line: deque[Rollout], most: int) -> tuple[int, ...]:
    return tuple([rollout.id for rollout in islice(line, most)])

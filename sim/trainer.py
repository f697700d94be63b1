"""The simulated trainer: one command at a time, each for as long as its tokens cost."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any

import simpy

from sim.surroundings import Surroundings
from streamrl.engine.messages import (
    CheckpointSaved,
    Event,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerStarted,
)

Work = Generator[simpy.Event, Any, None]


class Trainer:
    """One process: take the next work, do it, and again."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._inbox = simpy.Store(around.env)
        self._passes_until = -inf
        around.env.process(self._run())

    def start(self, command: StartTrainer) -> None:
        """Come up with the initial weights."""
        self._inbox.put(self._work(self._around.run_file.trainer.start_time, TrainerStarted(0)))

    def score(self, command: Score) -> None:
        """Run the forward passes that training needs first."""
        self._inbox.put(self._compute(self._around.costs.score_time, Scored(command.rollouts)))

    def train(self, command: Train) -> None:
        """Run forward and backward passes."""
        self._inbox.put(self._compute(self._around.costs.train_time, Trained(command.rollouts)))

    def step(self, command: Step) -> None:
        """Reduce the gradient and update the weights."""
        self._inbox.put(self._work(self._around.costs.optimizer_time, Stepped(command.version)))

    def save(self, command: SaveCheckpoint) -> None:
        """Write a checkpoint in no time: the host does it while the GPUs go on."""
        self._inbox.put(self._work(0.0, CheckpointSaved(command.version)))

    def _run(self) -> Work:
        while True:
            work: Work = yield self._inbox.get()
            yield from work

    def _work(self, seconds: float, event: Event) -> Work:
        yield self._around.env.timeout(seconds)
        self._around.emit(event)

    def _compute(self, time_of: Callable[..., float], event: Scored | Trained) -> Work:
        """Run passes over rollouts; those that follow others without a break find the pipeline full."""
        rollouts = [self._around.rollouts[rollout] for rollout in event.rollouts]
        lengths = [rollout.prompt_tokens + rollout.length for rollout in rollouts]
        is_continued = self._around.env.now == self._passes_until
        yield from self._work(time_of(lengths, is_continued=is_continued), event)
        self._passes_until = self._around.env.now

"""A simulated trainer: one command at a time, each for as long as its tokens cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from math import inf
from typing import Any

import simpy

from sim.costs.trainer_costs import TrainerCosts
from sim.surroundings import Surroundings
from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
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

    def __init__(self, around: Surroundings, trainer_id: int, costs: TrainerCosts) -> None:
        self._around = around
        self._costs = costs
        self._start_time = around.run_file.trainers[trainer_id].start_time
        self._inbox = simpy.Store(around.env)
        self._passes_until = -inf
        self._under_way: deque[Command] = deque()
        self.id = trainer_id
        self.has_stopped = False
        self._process = around.env.process(self._run())

    def start(self, command: StartTrainer) -> None:
        """Come up with the weights of a version."""
        started = TrainerStarted(command.trainer, command.version)
        self._take(command, self._work(self._start_time, started))

    def score(self, command: Score) -> None:
        """Run the forward passes that training needs first."""
        scored = Scored(command.rollouts, command.trainer)
        self._take(command, self._compute(self._costs.score_time, scored))

    def train(self, command: Train) -> None:
        """Run forward and backward passes."""
        trained = Trained(command.rollouts, command.trainer)
        self._take(command, self._compute(self._costs.train_time, trained))

    def step(self, command: Step) -> None:
        """Reduce the gradient and update the weights."""
        stepped = Stepped(command.version, command.trainer)
        self._take(command, self._work(self._costs.optimizer_time, stepped))

    def save(self, command: SaveCheckpoint) -> None:
        """Write a checkpoint in no time: the host does it while the GPUs go on."""
        self._take(command, self._work(0.0, CheckpointSaved(command.version, command.trainer)))

    def stop(self) -> list[Command]:
        """End here and now; return what was asked for and is lost."""
        self.has_stopped = True
        self._process.interrupt("stopped")
        return list(self._under_way)

    def _take(self, command: Command, work: Work) -> None:
        """Begin with a command, after those before it."""
        self._under_way.append(command)
        self._inbox.put(work)

    def _run(self) -> Work:
        try:
            while True:
                work: Work = yield self._inbox.get()
                yield from work
        except simpy.Interrupt:
            return  # stopped

    def _work(self, seconds: float, event: Event) -> Work:
        yield self._around.env.timeout(seconds)
        self._under_way.popleft()
        self._around.emit(event)

    def _compute(self, time_of: Callable[..., float], event: Scored | Trained) -> Work:
        """Run passes over rollouts; those that follow others without a break find the pipeline full."""
        rollouts = [self._around.rollouts[rollout] for rollout in event.rollouts]
        lengths = [rollout.prompt_tokens + rollout.length for rollout in rollouts]
        is_continued = self._around.env.now == self._passes_until
        yield from self._work(time_of(lengths, is_continued=is_continued), event)
        self._passes_until = self._around.env.now

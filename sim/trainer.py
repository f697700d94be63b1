"""A simulated trainer: it executes one command at a time, and the duration depends on the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import simpy

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Event,
    ResizeTrainer,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerResized,
    TrainerStarted,
)
from streamrl.sim.costs.costs import TrainerCosts
from streamrl.sim.world_interface import WorldInterface

Work = Generator[simpy.Event, Any, None]


class Trainer:
    """One process: take the next command, execute it, and repeat."""

    def __init__(self, around: WorldInterface, trainer_id: int, costs: TrainerCosts) -> None:
        self._around = around
        self._costs = costs
        self._start_time = around.run_file.trainers[trainer_id].start_time
        self._data_parallel = around.run_file.trainers[trainer_id].data_parallel
        self._inbox = simpy.Store(around.env)
        self._line = costs.line()
        self._time = around.cores.time_of("training")
        self._under_way: deque[Command] = deque()
        self.id = trainer_id
        self.has_stopped = False
        self._process = around.env.process(self._run())

    def start(self, command: StartTrainer) -> None:
        """Start with the weights of a version."""
        self._data_parallel = command.data_parallel or self._data_parallel
        started = TrainerStarted(command.trainer, command.version)
        self._take(command, self._work(self._start_time, started))

    def resize(self, command: ResizeTrainer, costs: TrainerCosts) -> None:
        """Add or remove ranks, and continue with the costs of all of them."""
        self._take(command, self._change(command, costs))

    def score(self, command: Score) -> None:
        """Run the forward passes that come before training."""
        scored = Scored(command.rollouts, command.trainer)
        self._take(command, self._compute(self._line.score, scored))

    def train(self, command: Train) -> None:
        """Run forward and backward passes."""
        trained = Trained(command.rollouts, command.trainer)
        self._take(command, self._compute(self._line.train, trained))

    def step(self, command: Step) -> None:
        """Reduce the gradient and update the weights."""
        self._take(command, self._update(Stepped(command.version, command.trainer)))

    def save(self, command: SaveCheckpoint) -> None:
        """Write a checkpoint in zero time, because the host does it while the GPUs continue."""
        self._take(command, self._work(0.0, CheckpointSaved(command.version, command.trainer)))

    def stop(self) -> list[Command]:
        """Stop now, and return the commands that are lost."""
        self.has_stopped = True
        self._process.interrupt("stopped")
        return list(self._under_way)

    def _take(self, command: Command, work: Work) -> None:
        """Queue a command after those before it."""
        self._under_way.append(command)
        self._inbox.put(work)

    def _run(self) -> Work:
        try:
            while True:
                work: Work = yield self._inbox.get()
                yield from work
        except simpy.Interrupt:
            self._time.leave()  # stopped

    def _work(self, seconds: float, event: Event) -> Work:
        yield self._time.work(seconds)
        self._under_way.popleft()
        self._around.emit(event)

    def _change(self, command: ResizeTrainer, costs: TrainerCosts) -> Work:
        resizing, after = self._around.costs.resizing, command.data_parallel
        assert resizing is not None, "only a run file with trainer.resize changes ranks"
        now = self._around.env.now
        passes_left = self._line.finish(now) - now  # of a step that has begun
        seconds = passes_left + resizing.time(self._data_parallel, after)
        self._costs, self._line, self._data_parallel = costs, costs.line(), after
        yield from self._work(seconds, TrainerResized(command.trainer, after))

    def _update(self, event: Stepped) -> Work:
        """Let the pipelines drain, and update the weights."""
        now = self._around.env.now
        seconds = self._line.finish(now) - now + self._costs.step_time
        yield from self._work(seconds, event)

    def _compute(
        self, put_through: Callable[[list[int], float], float], event: Scored | Trained
    ) -> Work:
        """Run passes over rollouts until the first stage is free; the pipeline continues with them in the background."""
        rollouts = self._around.rollouts
        lengths = [rollouts[rollout].sequence_tokens for rollout in event.rollouts]
        now = self._around.env.now
        yield from self._work(put_through(lengths, now) - now, event)

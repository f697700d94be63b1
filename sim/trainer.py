"""The simulated trainer: one command at a time, each for as long as its tokens cost."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, assert_never

import simpy

from streamrl.engine.messages import (
    CheckpointSaved,
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

if TYPE_CHECKING:
    from sim.world import SimWorld

Work = StartTrainer | Score | Train | Step | SaveCheckpoint


class Trainer:
    """One process: take a command, work for its time, report."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._inbox = simpy.Store(world.env)
        world.env.process(self._run())

    def begin(self, command: Work) -> None:
        """Queue a command."""
        self._inbox.put(command)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self._world.env
        passes_until = float("-inf")
        while True:
            command: Work = yield self._inbox.get()
            is_pass = isinstance(command, Score | Train)
            yield env.timeout(self._time_of(command, is_continued=env.now == passes_until))
            if is_pass:
                passes_until = env.now
            self._world.emit(_result(command))

    def _time_of(self, command: Work, *, is_continued: bool) -> float:
        """Give a command's seconds; passes that follow others without a break find the pipeline full."""
        costs = self._world.costs
        match command:
            case StartTrainer():
                return self._world.run_file.trainer.start_time
            case Score(rollouts):
                return costs.score_time(
                    self._world.sequence_lengths(rollouts), is_continued=is_continued
                )
            case Train(rollouts):
                return costs.train_time(
                    self._world.sequence_lengths(rollouts), is_continued=is_continued
                )
            case Step():
                return costs.optimizer_time
            case SaveCheckpoint():
                return 0.0  # written by the host while the GPUs go on
            case _:
                assert_never(command)


def _result(command: Work) -> TrainerStarted | Scored | Trained | Stepped | CheckpointSaved:
    match command:
        case StartTrainer():
            return TrainerStarted(0)
        case Score(rollouts):
            return Scored(rollouts)
        case Train(rollouts):
            return Trained(rollouts)
        case Step(version):
            return Stepped(version)
        case SaveCheckpoint(version):
            return CheckpointSaved(version)
        case _:
            assert_never(command)

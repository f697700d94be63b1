"""The trainer on the controller's side: each method carries out one command and returns the event that it ends in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from executor.buffer import RolloutBuffer
from executor.carriers.handles import Handle
from executor.record import Checkpoint, RunDirectory
from executor.samples import Manifest
from executor.trainer.advantages import NO_BASELINE
from executor.trainer.estimator import AdvantageEstimator
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

Figures = dict[str, float]

T = TypeVar("T")


class Trainer:
    """A `TrainerWorker` at the other end of a handle, what its samples are made of, and where its figures go."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        estimator: AdvantageEstimator,
        directory: RunDirectory,
        now: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._estimator = estimator
        self._directory = directory
        self._now = now
        self._handle: Handle | None = None

    async def start(
        self, command: StartTrainer, handle: Handle, checkpoint: Checkpoint | None
    ) -> TrainerStarted:
        """Come up behind `handle`, with the initial weights or those of a checkpoint."""
        await self.stop()
        self._handle = handle
        baseline = NO_BASELINE if checkpoint is None else checkpoint.baseline
        self._estimator.baseline = baseline
        path = None if checkpoint is None else str(checkpoint.path)
        return TrainerStarted(command.trainer, await self._call("start", path, returns=int))

    async def score(self, command: Score) -> Scored:
        """Run the forward passes that training needs first."""
        with self._buffer.hold(command.rollouts):
            samples = self._estimator.samples(command.rollouts)
            await self._call("score", samples, returns=Figures)
        return Scored(command.rollouts, command.trainer)

    async def train(self, command: Train) -> Trained:
        """Run forward and backward passes."""
        with self._buffer.hold(command.rollouts):
            samples = self._estimator.samples(command.rollouts)
            await self._call("train", samples, returns=Figures)
        return Trained(command.rollouts, command.trainer)

    async def step(self, command: Step) -> Stepped:
        """Update the weights, and write down what the step was made of."""
        figures = await self._call("step", command.version, returns=Figures)
        trained = self._buffer.rollouts_of(command.groups)
        self._directory.write_step(
            {
                "step": command.version,
                "time": self._now(),
                "reward": sum(buffered.reward for buffered in trained) / len(trained),
                "output_tokens": sum(buffered.num_tokens for buffered in trained),
                "unscored": sum(buffered.fault is not None for buffered in trained),
                **figures,
            }
        )
        self._estimator.end_step(command.groups)
        return Stepped(command.version, command.trainer)

    async def save(self, command: SaveCheckpoint) -> CheckpointSaved:
        """Write a checkpoint, which is complete or not there."""
        path = self._directory.checkpoint_path(command.version)
        await self._call("save", str(path), returns=type(None))
        baseline = self._estimator.baseline
        self._directory.finish_checkpoint(command.version, command.groups_done, baseline)
        return CheckpointSaved(command.version, command.trainer)

    async def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights to a directory that replicas read, and return what they need to."""
        return await self._call("push", version, str(directory), returns=Manifest)

    async def stop(self) -> None:
        """End the worker, where one has come up."""
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()

    async def _call(self, method: str, *arguments: object, returns: type[T]) -> T:
        assert self._handle is not None, "the engine trains only after TrainerStarted"
        return await self._handle.call(method, *arguments, returns=returns)

"""The trainer on the controller's side: each method carries out one command and returns the event that it ends in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from streamrl.engine.trainer_side import LEADER
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.checkpoints import Checkpoint, Position, TrainerRecord
from streamrl.executor.launchers.handles import Handle, remote
from streamrl.executor.roles import Manifest, TrainerRole
from streamrl.executor.trainer.advantages import AdvantageEstimator
from streamrl.executor.trainer.step_record import step_figures, step_samples
from streamrl.runfile.algorithms import NO_BASELINE
from streamrl.runfile.config import Run


class Trainer:
    """A `TrainerWorker` at the other end of a handle, what its samples are made of, and where its figures go."""

    def __init__(
        self,
        run: Run,
        buffer: RolloutBuffer,
        estimator: AdvantageEstimator,
        record: TrainerRecord,
        now: Callable[[], float],
    ) -> None:
        self._run = run
        self._buffer = buffer
        self._estimator = estimator
        self.record = record
        self._now = now
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Of the step under way, by what the worker was asked for."""
        self._num_trained = 0
        """Rollouts of the coming step."""
        self._leads: dict[int, int] = {}
        """By rollout of the coming step: the leader's version when it was to be trained on."""
        self._stepped_at = 0.0
        """When the last step ended; of none when the run began."""
        self._handle: Handle | None = None
        self._remote: TrainerRole | None = None

    async def start(
        self, command: StartTrainer, handle: Handle, checkpoint: Checkpoint | None
    ) -> TrainerStarted:
        """Come up behind `handle`, with the initial weights or those of a checkpoint, be it of another version by its own count."""
        await self.stop()
        self._handle = handle
        self._remote = remote(TrainerRole, handle)
        baseline = NO_BASELINE if checkpoint is None else checkpoint.position.baseline
        self._estimator.baseline = baseline
        self._seconds.clear()
        self._num_trained = 0
        self._leads.clear()
        path, version = (
            (None, 0) if checkpoint is None else (str(checkpoint.path), checkpoint.version)
        )
        if version == command.version:
            return TrainerStarted(command.trainer, await self._worker.start(path))
        return TrainerStarted(command.trainer, await self._worker.start(path, command.version))

    def become(self, other: Trainer) -> None:
        """Train from the next start on by the settings of another, which has ended or will."""
        self._run = other._run
        self._estimator = AdvantageEstimator(other._run.algorithm, self._buffer)

    async def score(self, command: Score) -> Scored:
        """Run the forward passes that training needs first."""
        with self._buffer.hold(command.rollouts), self._timed("score_time"):
            await self._worker.score(self._estimator.samples(command.rollouts))
        return Scored(command.rollouts, command.trainer)

    def see_leader(self, command: Train, version: int) -> None:
        """Take note of the leader's version at the time of a command, which its work may begin after."""
        self._leads.update(dict.fromkeys(command.rollouts, version))

    async def train(self, command: Train) -> Trained:
        """Run forward and backward passes."""
        with self._buffer.hold(command.rollouts), self._timed("train_time"):
            for portion in self._portions(command.rollouts):
                await self._worker.train(self._estimator.samples(portion))
        return Trained(command.rollouts, command.trainer)

    def _portions(self, rollouts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield rollouts so that none of what you get is cut by an optimizer step within the batch."""
        size = self._run.rollouts_per_update
        while rollouts:
            room = len(rollouts) if size is None else size - self._num_trained % size
            yield rollouts[:room]
            self._num_trained += len(rollouts[:room])
            rollouts = rollouts[room:]

    async def step(self, command: Step) -> Stepped:
        """Update the weights, and write down what the step was made of."""
        with self._timed("optimizer_time"):
            figures = await self._worker.step(command.version)
        trained, now = self._buffer.rollouts_of(command.groups), self._now()
        step_statistics = {}
        if command.trainer == LEADER:
            step_statistics = self._buffer.step_statistics.take(
                self._buffer.records_of(command.groups)
            )
        self.record.write_step(
            {
                "step": command.version,
                "time": now,
                "step_time": now - self._stepped_at,
                **step_figures(
                    trained, self._staleness_of(command.groups), self._run.rollout.max_tokens
                ),
                **self._buffer.workload.figures,
                **step_statistics,
                "learning_rate": self._run.algorithm.learning_rate,
                **self._seconds,
                **figures,
            }
        )
        self._seconds.clear()
        self._num_trained = 0
        self._sample(command)
        self._estimator.end_step(command.groups)
        for group in command.groups:
            self._buffer.leave(group, command.trainer)
        self._stepped_at = now
        return Stepped(command.version, command.trainer)

    def _staleness_of(self, groups: tuple[int, ...]) -> list[int]:
        """Return how many versions each rollout was behind the leader, in order; of a version that was lost none."""
        return [
            max(0, self._leads.pop(number) - self._buffer.rollouts[number].born)
            for number in self._buffer.numbers_of(groups)
        ]

    def _sample(self, command: Step) -> None:
        """Write down some of what the step was trained on, for people to read."""
        count = self._run.execute.samples_per_step
        if count:
            self.record.write_samples(
                lambda: step_samples(
                    self._buffer,
                    command.groups,
                    command.version,
                    count,
                    self._run.rollout.max_tokens,
                    self._estimator.advantage,
                )
            )

    async def save(self, command: SaveCheckpoint) -> CheckpointSaved:
        """Write a checkpoint, which is complete or not there."""
        path = self.record.checkpoints.path_of(command.version)
        await self._worker.save(str(path))
        self.record.checkpoints.finish(
            Position(
                version=command.version,
                groups_done=command.groups_done,
                done_ahead=command.done_ahead,
                baseline=self._estimator.baseline,
            )
        )
        return CheckpointSaved(command.version, command.trainer)

    async def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights to a directory that replicas read, and return what they need to."""
        return await self._worker.push(version, str(directory))

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`, where a worker has come up."""
        if self._remote is not None:
            await self._remote.sleep()

    async def wake(self) -> None:
        """Be ready to train again, where a worker has come up."""
        if self._remote is not None:
            await self._remote.wake()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds that you take to those of this step."""
        began_at = self._now()
        yield
        self._seconds[name] += self._now() - began_at

    def kill(self, reason: str) -> None:
        """Let the worker be lost, where one has come up."""
        if self._handle is not None:
            self._handle.kill(reason)

    async def stop(self) -> None:
        """End the worker, where one has come up."""
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()

    @property
    def _worker(self) -> TrainerRole:
        assert self._remote is not None, "the engine trains only after StartTrainer"
        return self._remote

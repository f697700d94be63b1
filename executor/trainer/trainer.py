"""The controller side of the trainer: each method carries out one command and returns its event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamrl.engine.messages import (
    CheckpointSaved,
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
from streamrl.engine.trainer_side import LEADER
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.checkpoints import Checkpoint, Position, TrainerRecord
from streamrl.executor.launchers.handles import Handle, remote
from streamrl.executor.roles import BroadcastRank, Manifest, TrainerRole
from streamrl.executor.trainer.advantages import AdvantageEstimator
from streamrl.executor.trainer.step_record import step_figures, step_samples
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.algorithms import NO_BASELINE
from streamrl.runfile.config import Run


@dataclass(frozen=True)
class StepSettings:
    """Settings of one trainer that the controller needs for its steps."""

    algorithm: AlgorithmConfig
    rollouts_per_update: int | None
    """Rollouts between two optimizer steps; None: one optimizer step for each batch."""
    samples_per_step: int
    """Rollouts of each step that are recorded for people to read."""

    @classmethod
    def of(cls, run: Run) -> StepSettings:
        """Return the settings of the primary trainer of a run file; see `Run.as_seen_by` for another trainer."""
        return cls(run.algorithm, run.rollouts_per_update, run.execute.samples_per_step)


class Trainer:
    """A `TrainerWorker` behind a handle, the source of its samples, and the record of its figures."""

    def __init__(
        self,
        settings: StepSettings,
        buffer: RolloutBuffer,
        record: TrainerRecord,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._estimator = AdvantageEstimator(settings.algorithm, buffer)
        self.record = record
        self._now = now
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the current step, by kind of work."""
        self._num_trained = 0
        """Number of rollouts in the current step so far."""
        self._primary_versions: dict[int, int] = {}
        """By rollout of the current step: the primary trainer's version when the rollout was sent to train on."""
        self._stepped_at = 0.0
        """When the last step ended; before the first step, when the run began."""
        self._identity = object()
        self._handle: Handle | None = None
        self._remote: TrainerRole | None = None

    async def start(
        self, command: StartTrainer, handle: Handle, checkpoint: Checkpoint | None
    ) -> TrainerStarted:
        """Start the worker behind `handle` with the initial weights, or with those of a checkpoint.

        The checkpoint may have another version number: that of the trainer that wrote it.
        """
        await self.stop()
        self._identity = object()
        self._handle = handle
        self._remote = remote(TrainerRole, handle)
        baseline = NO_BASELINE if checkpoint is None else checkpoint.position.baseline
        self._estimator.baseline = baseline
        self._seconds.clear()
        self._num_trained = 0
        self._primary_versions.clear()
        path, version = (
            (None, 0) if checkpoint is None else (str(checkpoint.path), checkpoint.version)
        )
        if version == command.version:
            return TrainerStarted(command.trainer, await self._worker.start(path))
        return TrainerStarted(command.trainer, await self._worker.start(path, command.version))

    async def resize(
        self, command: ResizeTrainer, change: Callable[[Handle, int], Awaitable[Handle]]
    ) -> TrainerResized:
        """Let `change` add or remove ranks of the worker; the trainer continues where it is."""
        assert self._handle is not None, "the engine must send StartTrainer first"
        self._handle = await change(self._handle, command.data_parallel)
        self._remote = remote(TrainerRole, self._handle)
        return TrainerResized(command.trainer, command.data_parallel)

    def become(self, other: Trainer) -> None:
        """Use the settings of another trainer, which has ended or will end, from the next start on."""
        self._settings = other._settings
        self._estimator = AdvantageEstimator(other._settings.algorithm, self._buffer)

    async def score(self, command: Score) -> Scored:
        """Run the forward passes that training needs first."""
        with self._buffer.hold(command.rollouts), self._timed("score_time"):
            await self._worker.score(self._estimator.samples(command.rollouts))
        return Scored(command.rollouts, command.trainer)

    def note_primary_version(self, command: Train, version: int) -> None:
        """Record the primary trainer's version at the time of a command; its work may begin later."""
        self._primary_versions.update(dict.fromkeys(command.rollouts, version))

    async def train(self, command: Train) -> Trained:
        """Run forward and backward passes."""
        with self._buffer.hold(command.rollouts), self._timed("train_time"):
            for portion in self._portions(command.rollouts):
                await self._worker.train(self._estimator.samples(portion))
        return Trained(command.rollouts, command.trainer)

    def _portions(self, rollouts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield portions of the rollouts, so that no portion extends over an optimizer step within the batch."""
        size = self._settings.rollouts_per_update
        while rollouts:
            room = len(rollouts) if size is None else size - self._num_trained % size
            yield rollouts[:room]
            self._num_trained += len(rollouts[:room])
            rollouts = rollouts[room:]

    async def step(self, command: Step) -> Stepped:
        """Update the weights, and record the figures of the step."""
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
                    trained, self._staleness_of(command.groups), self._buffer.workload.max_tokens
                ),
                **self._buffer.workload.figures,
                **step_statistics,
                "learning_rate": self._settings.algorithm.learning_rate,
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
        """Return by how many versions each rollout was behind the primary trainer, in order; at least 0."""
        return [
            max(0, self._primary_versions.pop(number) - self._buffer.rollouts[number].born)
            for number in self._buffer.numbers_of(groups)
        ]

    def _sample(self, command: Step) -> None:
        """Record some rollouts of the step for people to read."""
        count = self._settings.samples_per_step
        if count:
            self.record.write_samples(
                lambda: step_samples(
                    self._buffer,
                    command.groups,
                    command.version,
                    count,
                    self._buffer.workload.max_tokens,
                    self._estimator.advantage,
                )
            )

    async def save(self, command: SaveCheckpoint) -> CheckpointSaved:
        """Write a checkpoint, which is either complete or absent."""
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
        """Write the weights to a directory that replicas read, and return their manifest."""
        return await self._worker.push(version, str(directory))

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        """Pack the weights in the memory of the worker, and return their manifest."""
        return await self._worker.pack(version, kept)

    async def listen(self) -> str:
        """Open the rendezvous of a group in the worker, and return its address."""
        return await self._worker.listen()

    async def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version to a group."""
        await self._worker.send(version, seat)

    @property
    def worker(self) -> object:
        """The identity of the worker; another object after each start, and the same after a change of ranks."""
        return self._identity

    @property
    def handle(self) -> Handle | None:
        """The handle of the worker; another one after each start and each change of ranks."""
        return self._handle

    async def sleep(self) -> None:
        """Free the device's memory until `wake`, if a worker has started."""
        if self._remote is not None:
            await self._remote.sleep()

    async def wake(self) -> None:
        """Allocate the device's memory again, if a worker has started."""
        if self._remote is not None:
            await self._remote.wake()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those of this step."""
        began_at = self._now()
        yield
        self._seconds[name] += self._now() - began_at

    def kill(self, reason: str) -> None:
        """Kill the worker, if one has started."""
        if self._handle is not None:
            self._handle.kill(reason)

    async def stop(self) -> None:
        """End the worker, if one has started."""
        handle, self._handle = self._handle, None
        if handle is not None:
            await handle.close()

    @property
    def _worker(self) -> TrainerRole:
        assert self._remote is not None, "the engine must send StartTrainer first"
        return self._remote

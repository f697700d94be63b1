"""The replica and the trainer with a stopwatch: they do what they always do, and say how long each part took."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from streamrl.executor.roles import Manifest, ReplicaRole, TrainerRole
from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.rollout.stopwatch import Stopwatch
from streamrl.executor.trainer.learner import Learner
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker

R = TypeVar("R")


class TimedReplicaRole(ReplicaRole, Protocol):
    """A replica that says how long its forward passes took."""

    async def pads_context(self) -> bool:
        """Return whether decode steps pad every rollout to the longest."""

    async def prefill_tokens(self) -> int:
        """Return the most new prefix tokens of a pass in which all others decode."""

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call."""


class TimedTrainerRole(TrainerRole, Protocol):
    """A trainer that says how long the work of each call took."""

    async def seconds(self) -> list[float]:
        """Return the seconds of each call since the last time, in order."""


class TimedReplica(ReplicaWorker, TimedReplicaRole):
    """A replica whose engine times its forward passes."""

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Begin to serve, and to time."""
        checksum = await super().start(manifest, version)
        await self._engine.time_passes()
        return checksum

    async def pads_context(self) -> bool:
        """Return whether decode steps pad every rollout to the longest."""
        return self._engine.pads_context

    async def prefill_tokens(self) -> int:
        """Return the most new prefix tokens of a pass in which all others decode."""
        return self._engine.prefill_tokens

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call; the last one has no end, so it is left out."""
        return await self._engine.passes()


class TimedTrainer(TrainerWorker, TimedTrainerRole):
    """A trainer that records how long the work of each call took, the way to it and back left out."""

    def __init__(self, config: TrainerSettings) -> None:
        super().__init__(config)
        self._stopwatch = Stopwatch(config.device)
        self._seconds: list[float] = []

    async def seconds(self) -> list[float]:
        """Return the seconds of each call since the last time, in order."""
        seconds, self._seconds = self._seconds, []
        return seconds

    async def _run(self, work: Callable[[Learner], R], thread: Executor | None = None) -> R:
        def timed(learner: Learner) -> R:
            start = self._stopwatch.mark()
            result = work(learner)
            self._seconds.append(self._stopwatch.between(start, self._stopwatch.mark()))
            return result

        return await super()._run(timed, thread)

"""The replica and the trainer of a run, with a stopwatch that times each pass or call.

They import torch, so only worker processes import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from streamrl.executor.profiling.timed_roles import TimedReplicaRole, TimedTrainerRole
from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.inference_engine import TimedPass
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.rollout.stopwatch import Stopwatch
from streamrl.executor.trainer.learner import Learner
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker

R = TypeVar("R")


class TimedReplica(ReplicaWorker, TimedReplicaRole):
    """A replica whose engine times its forward passes."""

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Start the replica, and start timing its passes."""
        checksum = await super().start(manifest, version)
        await self._engine.time_passes()
        return checksum

    async def pads_context(self) -> bool:
        """Return whether decode steps pad every rollout to the longest one."""
        return self._engine.pads_context

    async def prefill_tokens(self) -> int:
        """Return the maximum number of new prefix tokens in a pass that also decodes."""
        return self._engine.prefill_tokens

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call, without the last pass, which has no end time."""
        return await self._engine.passes()


class TimedTrainer(TrainerWorker, TimedTrainerRole):
    """A trainer that records the seconds of the work of each call, without the transport of the call."""

    def __init__(self, config: TrainerSettings) -> None:
        super().__init__(config)
        self._stopwatch = Stopwatch(config.device)
        self._seconds: list[float] = []

    async def seconds(self) -> list[float]:
        """Return the seconds of each call since the last request, in order."""
        seconds, self._seconds = self._seconds, []
        return seconds

    async def _run(self, work: Callable[[Learner], R], thread: Executor | None = None) -> R:
        def timed(learner: Learner) -> R:
            start = self._stopwatch.mark()
            result = work(learner)
            self._seconds.append(self._stopwatch.between(start, self._stopwatch.mark()))
            return result

        return await super()._run(timed, thread)

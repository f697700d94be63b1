"""Simulated failures: when the GPUs of a replica or a trainer give out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any

import numpy as np
import simpy

from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import failures_per_gpu_day
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.replica import Replica
from streamrl.sim.surroundings import Surroundings
from streamrl.sim.trainer import Trainer

STREAM, TRAINER_STREAM = 0xFA11, 0xFA12
"""Keep draws of failures apart from those of lengths and prompts, whatever the seed."""
REASON = "a GPU failed"


def time_to_failure(run: Run, num_gpus: int, *stream: int, trainer: int | None = None) -> float:
    """Return the seconds that `num_gpus` of a trainer, or of a replica, work before one fails: infinitely many at a rate of 0.

    Exponential with mean 1 / (rate x GPUs), from a stream of its own, so that replica 3 of a seed fails after the
    same time whatever the others do.
    """
    rate = failures_per_gpu_day(run, trainer) * num_gpus / SECONDS_PER_DAY
    if not rate:
        return inf
    return float(np.random.default_rng([run.seed, *stream]).exponential(1 / rate))


class Failures:
    """Watches replicas and trainers, and has each lost when its time has come."""

    def __init__(
        self,
        around: Surroundings,
        lose_replica: Callable[[int, str], None],
        lose_trainer: Callable[[int, str], None],
    ) -> None:
        self._around = around
        self._lose_replica = lose_replica
        self._lose_trainer = lose_trainer
        self._num_started: dict[int, int] = {}
        """How often each trainer was started."""

    def watch(self, replica: Replica) -> None:
        """Let a replica that begins to serve fail later, if it is still there then."""
        run = self._around.run_file.of_kind(replica.kind)
        seconds = time_to_failure(run, run.rollout.gpus_per_replica, STREAM, replica.id)
        if seconds < inf:
            self._around.env.process(self._fail(replica, seconds, self._lose_replica))

    def watch_trainer(self, trainer: Trainer) -> None:
        """Let a trainer that is started fail later, where trainers do."""
        run = self._around.run_file
        if not failures_per_gpu_day(run, trainer.id):
            return
        count = self._num_started[trainer.id] = self._num_started.get(trainer.id, 0) + 1
        num_gpus = run.trainers[trainer.id].num_gpus
        stream = (TRAINER_STREAM, trainer.id, count)
        seconds = time_to_failure(run, num_gpus, *stream, trainer=trainer.id)
        if seconds < inf:
            self._around.env.process(self._fail(trainer, seconds, self._lose_trainer))

    def _fail(
        self, who: Replica | Trainer, seconds: float, lose: Callable[[int, str], None]
    ) -> Generator[simpy.Event, Any, None]:
        yield self._around.env.timeout(seconds)
        if not who.has_stopped:
            lose(who.id, REASON)

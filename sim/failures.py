"""Simulated failures: when a replica's GPUs give out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import Any

import numpy as np
import simpy

from sim.replica import Replica
from sim.surroundings import Surroundings
from streamrl.runfile.config import Run

SECONDS_PER_DAY = 86_400.0
STREAM = (
    0xFA11  # keeps draws of failures apart from those of lengths and prompts, whatever the seed
)
REASON = "a GPU failed"


def time_to_failure(run: Run, replica: int) -> float:
    """Return the seconds that a replica serves before one of its GPUs fails: infinitely many at a rate of 0.

    Exponential with mean 1 / (rate x GPUs of the replica), from a stream of its own, so that replica 3 of
    a seed fails after the same time whatever the others do.
    """
    rate = run.failures.per_gpu_day * run.rollout.tensor_parallel / SECONDS_PER_DAY
    if not rate:
        return inf
    return float(np.random.default_rng([run.seed, STREAM, replica]).exponential(1 / rate))


class Failures:
    """Watches replicas, and has each lost when its time has come."""

    def __init__(self, around: Surroundings, lose: Callable[[int, str], None]) -> None:
        self._around = around
        self._lose = lose

    def watch(self, replica: Replica) -> None:
        """Let a replica that begins to serve fail later, if it is still there then."""
        seconds = time_to_failure(self._around.run_file, replica.id)
        if seconds < inf:
            self._around.env.process(self._fail(replica, seconds))

    def _fail(self, replica: Replica, seconds: float) -> Generator[simpy.Event, Any, None]:
        yield self._around.env.timeout(seconds)
        if not replica.has_stopped:
            self._lose(replica.id, REASON)

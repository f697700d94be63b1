"""The cores of this machine that processes may use, and how the roles of a run share them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from streamrl.executor.carriers.local_gpus import device_of
from streamrl.hardware.host_cores import threads_of_each
from streamrl.runfile.config import Run

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of CPU time that a container has in each period, and that period, in cgroup v2; "max" where it has all."""


def usable_cores() -> int:
    """Return the cores that this process may use: those of its affinity, and no more than its container's share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _allowed(QUOTA)))


def roles_on_cores(run: Run) -> int:
    """Return how many processes of a run compute on the CPU: replicas at the start, ranks of trainers that learn, reward models."""
    return sum(number for number, pool in _roles(run) if device_of(run, pool) == "cpu")


def _roles(run: Run) -> Iterator[tuple[int, str]]:
    """Yield how many processes of a kind there are, each with their pool."""
    for kind in run.rollout.kinds:
        yield kind.replicas, kind.pool
    for number, trainer in enumerate(run.trainers):
        if not run.only_counts(number):
            yield trainer.num_gpus, trainer.pool
    if run.verifier.pool is not None:
        yield run.verifier.workers, run.verifier.pool


def threads_of(run: Run) -> int:
    """Return the CPU threads of each worker process; where all have GPUs, weights are written and checked with them."""
    if run.execute.threads is not None:
        return run.execute.threads
    if run.execute.deterministic:
        return 1
    roles = roles_on_cores(run) or sum(number for number, _ in _roles(run))
    return threads_of_each(usable_cores(), roles)


def _allowed(quota: Path) -> int:
    """Return the cores that a quota is worth, a part of one counted whole."""
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return ceil(int(allowed) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return 10**6

"""How often GPUs of a side fail: those of a spot pool are taken away beside all that break."""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple

from streamrl.runfile.config import Run
from streamrl.runfile.units import SECONDS_PER_DAY


def failures_per_gpu_day(run: Run, trainer: int | None = None) -> float:
    """Return the failures of one GPU in 24 hours, of a trainer by its number or, where absent, of the replicas."""
    if trainer is None:
        breaks, pool = run.failures.per_gpu_day, run.rollout.pool
    else:
        breaks = run.failures.per_gpu_day if run.failures.trainers else 0.0
        pool = run.trainers[trainer].pool
    return breaks + run.cluster.pools[pool].spot_failures_per_gpu_day


def replica_failures_per_day(run: Run) -> float:
    """Return the failures of all GPUs that generate, of every kind of replica, in 24 hours."""
    kinds = (run.of_kind(kind) for kind in range(run.rollout.num_kinds))
    return sum(failures_per_gpu_day(own) * own.rollout.num_gpus for own in kinds)


class Losses(NamedTuple):
    """What a whole run loses on average, of the two that each stop it beyond `policies.max_restarts`."""

    mean: float
    what: str

    @property
    def most(self) -> int:
        """Upper estimate of the losses: three standard deviations of a Poisson count above the mean."""
        return ceil(self.mean + 3 * sqrt(self.mean))


def expected_losses(run: Run, step_time: float) -> Losses:
    """Return the losses of replicas, or of the trainer that leads where there are more of them."""
    days = run.algorithm.steps * step_time / SECONDS_PER_DAY
    of_replicas = replica_failures_per_day(run)
    of_trainer = failures_per_gpu_day(run, 0) * run.trainer.num_gpus  # that leads
    return max(
        Losses(of_replicas * days, "replicas"), Losses(of_trainer * days, "times the trainer")
    )


def can_fail(run: Run) -> bool:
    """Return whether any simulated GPU may fail."""
    kinds = (failures_per_gpu_day(run.of_kind(kind)) for kind in range(run.rollout.num_kinds))
    trainers = (failures_per_gpu_day(run, trainer) for trainer in range(run.num_trainers))
    return any(rate > 0 for rate in (*kinds, *trainers))

"""How often GPUs of a side fail: those of a spot pool are taken away beside all that break.

A spot machine that is taken away after a warning is no loss of a replica: the replica is emptied and stopped in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, sqrt
from typing import NamedTuple

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.runfile.simulation_config import FailuresConfig
from streamrl.runfile.units import SECONDS_PER_DAY


def replica_gpu_failures_per_day(failures: FailuresConfig, pool: PoolConfig) -> float:
    """Return the failures of one GPU of a replica in 24 hours, without those that are announced."""
    return failures.per_gpu_day + (0.0 if pool.spot_warning else pool.spot_failures_per_gpu_day)


def notices_per_gpu_day(pool: PoolConfig) -> float:
    """Return how often a GPU of a replica is taken away after a warning, in 24 hours."""
    return pool.spot_failures_per_gpu_day if pool.spot_warning else 0.0


def trainer_gpu_failures_per_day(failures: FailuresConfig, pool: PoolConfig) -> float:
    """Return the failures of one GPU of a trainer in 24 hours."""
    breaks = failures.per_gpu_day if failures.trainers else 0.0
    return breaks + pool.spot_failures_per_gpu_day


def replica_failures_per_day(
    failures: FailuresConfig, kinds: Iterable[RolloutConfig], pools: Mapping[str, PoolConfig]
) -> float:
    """Return the failures of all GPUs that generate, of every kind of replica, in 24 hours."""
    return sum(
        replica_gpu_failures_per_day(failures, pools[own.pool]) * own.num_gpus for own in kinds
    )


def replica_notices_per_day(
    kinds: Iterable[RolloutConfig], pools: Mapping[str, PoolConfig]
) -> float:
    """Return how often machines of replicas are taken away after a warning, of all kinds, in 24 hours."""
    return sum(notices_per_gpu_day(pools[own.pool]) * own.num_gpus for own in kinds)


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
    pools = run.cluster.pools
    of_replicas = replica_failures_per_day(run.failures, run.rollout.kinds, pools)
    of_one = trainer_gpu_failures_per_day(run.failures, pools[run.trainer.pool])
    of_trainer = of_one * run.trainer.num_gpus  # that leads
    return max(
        Losses(of_replicas * days, "replicas"), Losses(of_trainer * days, "times the trainer")
    )


def can_fail(run: Run) -> bool:
    """Return whether any simulated GPU may fail."""
    failures, pools = run.failures, run.cluster.pools
    of_kinds = (replica_gpu_failures_per_day(failures, pools[k.pool]) for k in run.rollout.kinds)
    of_trainers = (trainer_gpu_failures_per_day(failures, pools[t.pool]) for t in run.trainers)
    notices = (notices_per_gpu_day(pools[kind.pool]) for kind in run.rollout.kinds)
    return any(rate > 0 for rate in (*of_kinds, *of_trainers, *notices))

"""How often GPUs of a side fail: those of a spot pool are taken away beside all that break."""

from __future__ import annotations

from streamrl.runfile.config import Run


def failures_per_gpu_day(run: Run, trainer: int | None = None) -> float:
    """Return the failures of one GPU in 24 hours, of a trainer by its number or, where absent, of the replicas."""
    if trainer is None:
        breaks, pool = run.failures.per_gpu_day, run.rollout.pool
    else:
        breaks = run.failures.per_gpu_day if run.failures.trainers else 0.0
        pool = run.trainers[trainer].pool
    return breaks + run.cluster.pools[pool].spot_failures_per_gpu_day


def can_fail(run: Run) -> bool:
    """Return whether any GPU that is simulated may fail."""
    kinds = (failures_per_gpu_day(run.of_kind(kind)) for kind in range(run.num_kinds))
    trainers = (failures_per_gpu_day(run, trainer) for trainer in range(run.num_trainers))
    return any(rate > 0 for rate in (*kinds, *trainers))

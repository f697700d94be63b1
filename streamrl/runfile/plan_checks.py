"""Raises `ValueError` where `[plan]` asks for what cannot be."""

from __future__ import annotations

from math import isfinite

from streamrl.runfile.config import Run

LISTS = (
    *("rollout_pools", "trainer_pools", "rollout_gpus", "trainer_gpus"),
    *("rollout_tensor_parallel", "trainer_tensor_parallel", "pipeline_parallel"),
    *("expert_parallel", "micro_batch", "zero", "systems", "max_staleness", "dispatch"),
    "sync_modes",
)
LEAST = {"max_staleness": 0}
"""Least entry of a list of numbers; 1 where it is not named."""


def check_plan(run: Run) -> None:
    """Raise `ValueError` where a list is empty, a pool unknown, or a number out of bounds."""
    plan = run.plan
    for key in ("simulations", "finalists", "seeds", "steps", "unit"):
        value = getattr(plan, key)
        if value is not None and value < 1:
            raise ValueError(f"plan.{key} must be at least 1, got {value}")
    for key in ("budget_per_hour", "budget_per_step"):
        value = getattr(plan, key)
        if value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"plan.{key} must be above 0 dollars, got {value}")
    for key in LISTS:
        _check_list(key, getattr(plan, key), run)


def _check_list(key: str, entries: list[int] | list[str] | None, run: Run) -> None:
    if entries is None:
        return
    if not entries:
        raise ValueError(f"plan.{key} is empty: leave it out, or name what is open")
    for entry in entries:
        if key.endswith("_pools") and entry not in run.cluster.pools:
            raise ValueError(
                f"plan.{key} names {entry!r}, which is none of the pools {sorted(run.cluster.pools)}"
            )
        least = LEAST.get(key, 1)
        if isinstance(entry, int) and entry < least:
            raise ValueError(f"plan.{key} must be {least} or more, got {entry}")

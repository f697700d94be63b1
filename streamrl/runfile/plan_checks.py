"""Raises `RunError` where a list of `[plan]` asks for what cannot be."""

from __future__ import annotations

from math import inf

from streamrl.runfile.bounds import MOST_DRAFTED
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError

LISTS = (
    *("rollout_pools", "trainer_pools", "rollout_gpus", "trainer_gpus"),
    *("rollout_pipeline_parallel", "rollout_data_parallel", "speculative"),
    *("rollout_tensor_parallel", "trainer_tensor_parallel", "pipeline_parallel"),
    *(
        "expert_parallel",
        "expert_tensor_parallel",
        "context_parallel",
        "micro_batch",
        "zero",
        "systems",
        "max_staleness",
        "dispatch",
    ),
    *("sync_modes", "order", "recompute", "max_running"),
)
LEAST = {"max_staleness": 0, "speculative": 0}
"""Least entry of a list of numbers; 1 where it is not named."""
MOST = {"speculative": MOST_DRAFTED}
"""Largest entry, where there is one."""


def check_plan(run: Run) -> None:
    """Raise `RunError` where a list is empty, or names an unknown pool or a number out of bounds."""
    for name in LISTS:
        _check_list(name, getattr(run.plan, name), run)
    if run.plan.speculative is not None and run.rollout.speculative is None:
        key, named = "plan.speculative", run.plan.speculative
        text = (
            f"{key}={named} needs rollout.speculative: nobody knows but you what drafts, and how many of its tokens "
            "are accepted"
        )
        raise RunError(key, named, None, text, ("rollout.speculative.acceptance",))


def _check_list(name: str, entries: list[int] | list[str] | None, run: Run) -> None:
    key = f"plan.{name}"
    if entries is not None and not entries:
        text = f"{key} is empty, got []: leave it out, or name what is open"
        raise RunError(key, entries, list, text)
    bounds = Bounds(LEAST.get(name, 1), MOST.get(name, inf))
    for entry in entries or []:
        if name.endswith("_pools") and entry not in run.cluster.pools:
            text = f"{key} names {entry!r}, which is none of the pools {sorted(run.cluster.pools)}"
            raise RunError(key, entries, OneOf(sorted(run.cluster.pools)), text)
        if isinstance(entry, int) and not bounds.hold(entry):
            raise RunError(key, entries, bounds, f"{key} must be {bounds}, got {entry}")

"""Reset the start values of a run file that `streamrl plan` replaces, where they contradict the rest of it.

A run file for planning names the model, the work and the offer. Its layout is only a start: pools of the sides, replicas,
degrees and system. A start that does not fit is no reason to refuse the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.runfile.checks import check_run
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.findings import changed, toml, value_of
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.roles_config import TrainerConfig

REPLICA_KEYS = ("replicas", "tensor_parallel", "pipeline_parallel", "data_parallel")
TRAINER_KEYS = (
    *("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"),
    *("expert_parallel", "micro_batch"),
)
BY_LIST = {
    "policies.dispatch": "dispatch",
    "policies.order": "order",
    "policies.max_staleness": "max_staleness",
    "sync.mode": "sync_modes",
    "trainer.expert_tensor_parallel": "expert_tensor_parallel",
    "verifier.pool": "reward_pools",
}
"""Keys that a plan replaces only if this key of `[plan]` lists their values. Else it keeps them."""
SYSTEMS: tuple[SystemName, ...] = ("stream-async", "one-step-async", "stream-sync", "colocated")
"""Systems to start from if the run's own contradicts a key that stays, in the order in which they are tried."""
OF_SIDE = ("trainer.pool", "rollout.pool", "rollout.others")
"""Keys behind an error of `cluster.links`, which says that two sides have no link."""
_OTHER_REPLICAS = re.compile(r"^rollout\.others\b.*")


def fill_start(table: dict[str, Any]) -> list[str]:
    """Add start values that a run file must have to its table, and return the keys that were absent."""
    cluster = table.get("cluster")
    pools = cluster.get("pools") if isinstance(cluster, dict) else None
    if not isinstance(pools, dict) or not pools:
        return []
    first, *_ = pools
    absent = []
    for key, value in (("rollout.pool", first), ("rollout.replicas", 1), ("trainer.pool", first)):
        section, name = key.split(".")
        place = table.setdefault(section, {})
        if isinstance(place, dict) and name not in place:
            place[name] = value
            absent.append(key)
    return absent


def with_fitting_start(run: Run) -> Run:
    """Return a run in which no start value that a plan replaces contradicts the rest.

    Values that fit stay, because plans try them too.

    Raises:
        RunError: a key that plans keep is wrong.
    """
    try:
        return _with_fitting_layout(run)
    except RunError as error:
        for system in SYSTEMS:
            try:
                return _with_fitting_layout(changed(run, {"policies.system": system}))
            except RunError:
                continue
        raise error


def differing_start(stated: Run, fitting: Run) -> list[str]:
    """Return the start values of a run file that another start replaces, as `--set` takes them."""
    keys = ["policies.system", *start_values(stated.trainer, stated.plan, stated.cluster.pools)]
    values = {key: value_of(stated, key) for key in keys}
    return [
        f"{key}={toml(value)}" for key, value in values.items() if value != value_of(fitting, key)
    ]


def _with_fitting_layout(run: Run) -> Run:
    """Reset keys of pools and degrees one by one, until the run passes all checks."""
    fresh = start_values(run.trainer, run.plan, run.cluster.pools)
    while True:
        try:
            check_run(run)
            return run
        except RunError as error:
            keys = (key for key in _keys_of(error) if key in fresh)
            key = next((key for key in keys if value_of(run, key) != fresh[key]), None)
            if key is None:
                raise
            run = changed(run, {key: fresh[key]})


def _keys_of(error: RunError) -> Iterator[str]:
    """Yield the keys that an error names, its own first."""
    for key in (error.key, *error.others):
        yield _OTHER_REPLICAS.sub("rollout.others", key)
    if error.key == "cluster.links":
        yield from OF_SIDE


def start_values(
    trainer: TrainerConfig, plan: PlanConfig, pools: Mapping[str, PoolConfig]
) -> dict[str, Any]:
    """Return the keys that a plan replaces, each with a value that fits if the others have theirs."""
    pool = max(pools, key=lambda name: pools[name].num_gpus, default=None)
    found: dict[str, Any] = {f"trainer.{key}": 1 for key in TRAINER_KEYS}
    found |= {f"rollout.{key}": 1 for key in REPLICA_KEYS}
    found |= {
        "rollout.others": (),
        "rollout.pool": pool,
        "rollout.expert_parallel": 1,
        "trainer.pool": pool,
        "trainer.data_parallel": trainer.expert_tensor_parallel or 1,
        "trainer.pipeline_parallel": 2 if trainer.virtual_stages > 1 else 1,
        "verifier.workers": 1,
    }
    first = {key: (getattr(plan, name) or [None])[0] for key, name in BY_LIST.items()}
    return found | {key: value for key, value in first.items() if value is not None}

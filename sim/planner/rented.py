"""What a plan rents of an offer, as its run file has it."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.sides_config import RolloutConfig, TrainerConfig


def with_rent(run: Run) -> Run:
    """Return the run with as many nodes as both sides use of pools that are rented, and all of those that are owned.

    Nothing is open any more; where not all GPUs of these nodes are rented, `[plan]` says how many are.
    """
    needs: Counter[str] = Counter()
    sides: list[RolloutConfig | TrainerConfig] = [*run.rollout.kinds, run.trainer]
    for side in sides:
        taken = needs[side.pool]
        needs[side.pool] = max(taken, side.num_gpus) if run.shares_gpus else taken + side.num_gpus
    pools = {
        name: pool if pool.owned else replace(pool, nodes=-(-needs[name] // pool.gpus_per_node))
        for name, pool in run.cluster.pools.items()
        if needs[name] or pool.owned
    }
    links = [link for link in run.cluster.links if set(link.between) <= set(pools)]
    plan = PlanConfig(staleness_cost=run.plan.staleness_cost)
    rented = {name: pool.num_gpus for name, pool in pools.items() if not pool.owned}
    if any(num_gpus > needs[name] for name, num_gpus in rented.items()):  # a part of a node
        generate = sum(kind.num_gpus for kind in run.rollout.kinds)
        gpus = {"rollout_gpus": [generate], "trainer_gpus": [run.trainer.num_gpus]}
        plan = replace(plan, **gpus)
    return replace(run, cluster=replace(run.cluster, pools=pools, links=links), plan=plan)

"""What a plan rents of an offer, as its run file has it."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig


def with_rent(run: Run) -> Run:
    """Return the run with the pools of both sides alone, and as many nodes as they use.

    Nothing is open any more; where not all GPUs of these nodes are rented, `[plan]` says how many are.
    """
    needs: Counter[str] = Counter()
    for side in (run.rollout, run.trainer):
        taken = needs[side.pool]
        needs[side.pool] = max(taken, side.num_gpus) if run.shares_gpus else taken + side.num_gpus
    pools = {
        name: replace(pool, nodes=-(-needs[name] // pool.gpus_per_node))
        for name, pool in run.cluster.pools.items()
        if needs[name]
    }
    links = [link for link in run.cluster.links if set(link.between) <= set(pools)]
    plan = PlanConfig()
    if any(
        pool.num_gpus > needs[name] for name, pool in pools.items()
    ):  # of a node a part is rented
        gpus = {"rollout_gpus": [run.rollout.num_gpus], "trainer_gpus": [run.trainer.num_gpus]}
        plan = replace(plan, **gpus)
    return replace(run, cluster=replace(run.cluster, pools=pools, links=links), plan=plan)

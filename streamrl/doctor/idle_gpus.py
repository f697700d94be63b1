"""Check that all GPUs of the pools are used, and report the cost of idle ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from streamrl.hardware.profiles import price_of
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Changes, Finding, Fix
from streamrl.runfile.gpu_pools import gpus_used, sides_of
from streamrl.runfile.keys import join_key, pool_key, trainer_key
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig, VerifierConfig


def find(run: Run) -> Iterator[Finding]:
    """Find pools with unused GPUs, unless `[plan]` says that the pools are an offer."""
    for name, pool in run.cluster.pools.items():
        used = gpus_used(sides_of(run), name)
        price = price_of(pool)
        text = f"pool {name!r}: {used} of {pool.num_gpus} GPUs used, ${used * price:,.2f} an hour"
        idle = pool.num_gpus - used
        if not idle:
            yield _finding("ok", name, text)
        elif pool.owned:
            yield _finding(
                "ok", name, f"{text}; the others are owned, so they cost the same when unused"
            )
        elif replace(run.plan, staleness_cost=0.0) != PlanConfig():
            yield _finding("ok", name, f"{text}; the others are only offered, as [plan] says")
        elif run.policies.resize == "adjust" and run.rollout.pool == name:
            yield _finding("ok", name, f"{text}; the others are reserved for policies.resize")
        else:
            text += f"; {idle} are idle and cost ${idle * price:,.2f} an hour"
            yield _finding("warning", name, text)


def fix_of(name: str) -> Fix:
    """Return the fix for idle GPUs of a pool."""

    def candidates(run: Run) -> Iterator[Changes]:
        pool, used = run.cluster.pools[name], gpus_used(sides_of(run), name)
        if not used:
            yield {join_key("cluster.pools", name): None}
            return
        yield from _fewer(name, pool, used)
        idle = pool.num_gpus - used
        yield from _more_replicas(name, idle, run.rollout)
        yield from _more_ranks(name, idle, run.trainers)
        yield from _more_workers(name, idle, run.verifier)

    def effect(run: Run) -> str:
        if name not in run.cluster.pools:
            return "no GPU of this pool is paid for"
        used, pool = gpus_used(sides_of(run), name), run.cluster.pools[name]
        return f"{used} of {pool.num_gpus} GPUs used"

    return Fix(candidates, f"rent fewer GPUs in cluster.pools.{name}, or use them", effect)


def _fewer(name: str, pool: PoolConfig, used: int) -> Iterator[Changes]:
    """Yield fewer nodes, or smaller nodes if there is only one."""
    if used % pool.gpus_per_node == 0:
        yield {pool_key(name, "nodes"): used // pool.gpus_per_node}
    if pool.nodes == 1:
        yield {pool_key(name, "gpus_per_node"): used}


def _more_replicas(name: str, idle: int, rollout: RolloutConfig) -> Iterator[Changes]:
    if rollout.pool == name:
        yield {"rollout.replicas": rollout.replicas + idle // rollout.gpus_per_replica}


def _more_ranks(name: str, idle: int, trainers: Iterable[TrainerConfig]) -> Iterator[Changes]:
    for number, trainer in enumerate(trainers):
        if trainer.pool == name:
            ranks = trainer.num_gpus // trainer.data_parallel
            key = f"{trainer_key(number)}.data_parallel"
            yield {key: trainer.data_parallel + idle // ranks}


def _more_workers(name: str, idle: int, verifier: VerifierConfig) -> Iterator[Changes]:
    if verifier.pool == name and verifier.gpus_per_worker:
        yield {"verifier.workers": verifier.workers + idle // verifier.gpus_per_worker}


def _finding(level: str, pool: str, text: str) -> Finding:
    return Finding(
        level="ok" if level == "ok" else "warning",
        topic="divisibility",
        name=f"pool-{pool}",
        text=text,
    )

"""Check that all GPUs of the pools are used, and report the cost of idle ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from streamrl.hardware.profiles import price_of
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.findings import Changes, Finding, Fix
from streamrl.runfile.gpu_pools import Claim, Side, claims_of, gpus_used, sides_of
from streamrl.runfile.keys import join_key, pool_key
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig, VerifierConfig


def find(
    pools: Mapping[str, PoolConfig], sides: Sequence[Side], plan: PlanConfig, resized: str | None
) -> Iterator[Finding]:
    """Find pools with unused GPUs, unless `[plan]` says that the pools are an offer.

    Args:
        pools: those of the run file.
        sides: what uses their GPUs.
        plan: `[plan]` of the run file.
        resized: the pool whose other GPUs are reserved for replicas that are added; None where none are.
    """
    for name, pool in pools.items():
        used = gpus_used(sides, name)
        price = price_of(pool)
        text = f"pool {name!r}: {used} of {pool.num_gpus} GPUs used, ${used * price:,.2f} an hour"
        idle = pool.num_gpus - used
        if not idle:
            yield _finding("ok", name, text)
        elif pool.owned:
            yield _finding(
                "ok", name, f"{text}; the others are owned, so they cost the same when unused"
            )
        elif replace(plan, staleness_cost=0.0) != PlanConfig():
            yield _finding("ok", name, f"{text}; the others are only offered, as [plan] says")
        elif name == resized:
            yield _finding("ok", name, f"{text}; the others are reserved for policies.resize")
        else:
            text += f"; {idle} are idle and cost ${idle * price:,.2f} an hour"
            yield _finding("warning", name, text)


def fix_of(name: str) -> Fix:
    """Return the fix for idle GPUs of a pool."""
    return Fix(
        lambda run: _fewer_or_used(
            name,
            run.cluster.pools[name],
            gpus_used(sides_of(run), name),
            claims_of((run.rollout,), run.trainers, run.verifier),
        ),
        f"rent fewer GPUs in cluster.pools.{name}, or use them",
        lambda run: _use_of(run.cluster.pools.get(name), gpus_used(sides_of(run), name)),
    )


def _fewer_or_used(
    name: str, pool: PoolConfig, used: int, claims: Iterable[Claim]
) -> Iterator[Changes]:
    """Yield a smaller pool, then sections that claim the idle GPUs too."""
    if not used:
        yield {join_key("cluster.pools", name): None}
        return
    yield from _fewer(name, pool, used)
    for claim in claims:
        if claim.pool == name:
            yield from _more(claim, pool.num_gpus - used)


def _use_of(pool: PoolConfig | None, used: int) -> str:
    if pool is None:
        return "no GPU of this pool is paid for"
    return f"{used} of {pool.num_gpus} GPUs used"


def _fewer(name: str, pool: PoolConfig, used: int) -> Iterator[Changes]:
    """Yield fewer nodes, or smaller nodes if there is only one."""
    if used % pool.gpus_per_node == 0:
        yield {pool_key(name, "nodes"): used // pool.gpus_per_node}
    if pool.nodes == 1:
        yield {pool_key(name, "gpus_per_node"): used}


def _more(claim: Claim, idle: int) -> Iterator[Changes]:
    """Yield as many more replicas, ranks or workers as the idle GPUs hold."""
    match claim.section:
        case RolloutConfig() as rollout:
            replicas = rollout.replicas + idle // rollout.gpus_per_replica
            yield {f"{claim.key}.replicas": replicas}
        case TrainerConfig() as trainer:
            ranks = trainer.num_gpus // trainer.data_parallel
            yield {f"{claim.key}.data_parallel": trainer.data_parallel + idle // ranks}
        case VerifierConfig() as verifier:
            if verifier.gpus_per_worker:
                workers = verifier.workers + idle // verifier.gpus_per_worker
                yield {f"{claim.key}.workers": workers}


def _finding(level: str, pool: str, text: str) -> Finding:
    return Finding(
        level="ok" if level == "ok" else "warning",
        topic="divisibility",
        name=f"pool-{pool}",
        text=text,
    )

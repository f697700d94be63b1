"""What spot machines save against the same machines on demand: pairs of simulations with the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from streamrl.record.evaluation import half_width
from streamrl.record.whole_run import WholeRun
from streamrl.runfile.cluster_config import ClusterConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import replica_notices_per_day
from streamrl.runfile.files import decode_run, encode_run
from streamrl.runfile.units import SECONDS_PER_DAY, Duration
from streamrl.sim.parallel import answers
from streamrl.sim.planner.plan import SpotSavings
from streamrl.sim.steady_state import UnfinishedError, measure_steady

NUM_SEEDS = 6
"""Pairs of simulations: enough for an interval, in a few seconds."""
CONFIDENCE = 0.95


class _Totals(NamedTuple):
    seconds: float
    dollars: float


def on_demand(cluster: ClusterConfig) -> ClusterConfig:
    """Return the pools with their spot machines on demand: at their price, and without interruptions."""
    pools = {name: _without_interruptions(pool) for name, pool in cluster.pools.items()}
    found: ClusterConfig = replace(cluster, pools=pools)
    return found


def _without_interruptions(pool: PoolConfig) -> PoolConfig:
    if pool.on_demand_price is None:
        return pool
    found: PoolConfig = replace(
        pool,
        price=pool.on_demand_price,
        price_source=None,
        on_demand_price=None,
        spot_failures_per_gpu_day=0.0,
        spot_warning=Duration(0.0),
        spot_replacement_time=Duration(0.0),
    )
    return found


def spot_savings(planned: Run, pool: Executor, num_seeds: int = NUM_SEEDS) -> SpotSavings | None:
    """Simulate a run on its spot machines and on demand, with several seeds each.

    None if no used pool has an `on_demand_price`.
    """
    pools, kinds = planned.cluster.pools, planned.rollout.kinds
    used = [own.pool for own in kinds] + [own.pool for own in planned.trainers]
    if all(pools[name].on_demand_price is None for name in used):
        return None
    seeds = [planned.seed + number for number in range(num_seeds)]
    both = planned, replace(planned, cluster=on_demand(planned.cluster))
    runs = [replace(each, seed=seed) for seed in seeds for each in both]
    try:
        found = answers(pool, _totals_of, map(encode_run, runs))
    except UnfinishedError as error:
        return SpotSavings(reason=str(error))
    return _compare(found[::2], found[1::2], replica_notices_per_day(kinds, pools))


def _compare(
    spot: Sequence[_Totals], demand: Sequence[_Totals], notices_per_day: float
) -> SpotSavings:
    shares = [1 - one.dollars / other.dollars for one, other in zip(spot, demand, strict=True)]
    mean, half = fmean(shares), half_width(shares, CONFIDENCE)
    seconds = fmean(each.seconds for each in spot)
    return SpotSavings(
        share=mean,
        interval=(mean - half, mean + half),
        dollars=fmean(each.dollars for each in spot),
        dollars_on_demand=fmean(each.dollars for each in demand),
        seconds=seconds,
        seconds_on_demand=fmean(each.seconds for each in demand),
        num_notices=notices_per_day * seconds / SECONDS_PER_DAY,
        num_seeds=len(spot),
    )


def _totals_of(run: bytes) -> _Totals:
    whole: WholeRun | None = measure_steady(decode_run(run)).whole_run
    if whole is None:
        raise UnfinishedError("stops before its last step")
    return _Totals(whole.wall_time, whole.dollars)

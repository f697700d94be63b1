"""Find cheaper plans that the search leaves out: trainers with little free memory, and parts of a node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.runfile.config import Run
from streamrl.sim.planner.plan import OverMemoryLimit
from streamrl.sim.planner.plan_settings import describe, settings_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate


class BetterPlan(NamedTuple):
    """A plan whose objective is more than `ALIKE` below the chosen plan's."""

    candidate: Candidate
    gain: float
    """Share by which its objective is below the chosen plan's, on the same prompts."""


def find_with_fuller_memory(
    search: Search, chosen: int, pool: Executor, watch: Callable[[], None]
) -> OverMemoryLimit | None:
    """Return the best plan whose trainer uses more GPU memory than the search allows, or None.

    It has the chosen plan's system and pools. The result is None if no such plan is clearly better,
    or if no time is left.
    """
    run = _alike(search, chosen)
    found = _find(search, run, chosen, pool, watch, tight=True)
    if found is None:
        return None
    side = trainer_side(resolve(found.candidate.apply(run)).trainer)
    return OverMemoryLimit(
        choice=describe(run.cluster.pools, found.candidate),
        settings=settings_of(found.candidate),
        gain=found.gain,
        memory=side.need / side.capacity,
    )


def find_on_partial_nodes(
    search: Search, chosen: int, pool: Executor, watch: Callable[[], None]
) -> Candidate | None:
    """Return the best plan on the GPUs of one node of each pool, or None.

    It has the chosen plan's system and pools. The result is None if no such plan is clearly better,
    or if no time is left.
    """
    run = _alike(search, chosen)
    nodes = {name: replace(each, nodes=1) for name, each in run.cluster.pools.items()}
    run = replace(run, cluster=replace(run.cluster, pools=nodes))
    found = _find(search, run, chosen, pool, watch, tight=False)
    return None if found is None else found.candidate


def _alike(search: Search, chosen: int) -> Run:
    """Return the run of a search, limited to the system and pools of one plan."""
    run, (replicas, trainer, mode) = search.space.run, search.space.candidate(chosen)
    alike = replace(
        run.plan,
        systems=[mode.system],
        rollout_pools=list(replicas.pools),
        trainer_pools=[trainer.pool],
        reward_pools=None if mode.rewards is None else [mode.rewards.pool],
    )
    return replace(run, plan=alike)


def _find(
    search: Search,
    run: Run,
    chosen: int,
    pool: Executor,
    watch: Callable[[], None],
    *,
    tight: bool,
) -> BetterPlan | None:
    """Simulate the best plan of a run by estimate on the prompts of the search; return it if it is clearly better."""
    if search.is_late:
        return None
    try:
        other = Search.open(run, search.deadline, tight=tight)
    except ValueError:  # no plan fits
        return None
    other.estimates.take_paces(search.estimates)
    other.settle(pool, [])
    scores, value = other.scores(), search.value(chosen)
    best = int(np.argmin(scores))
    if scores[best] >= value:
        return None
    other.simulate(pool, [best], watch)
    if best not in other.ranking():  # it exceeds a budget or does not finish
        return None
    gain = 1 - other.value(best) / value
    return BetterPlan(other.space.candidate(best), gain) if gain > ALIKE else None

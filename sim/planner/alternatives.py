"""Find better plans that the search leaves out: trainers with little free memory, parts of a node, and what nothing runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.record.steady_state import Speed
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.plan_config import PlanConfig
from streamrl.sim.planner.layouts import sizes
from streamrl.sim.planner.objective import Figure, Spend, faster_goal
from streamrl.sim.planner.options import recommended_of
from streamrl.sim.planner.plan import OverMemoryLimit
from streamrl.sim.planner.plan_settings import describe, settings_of
from streamrl.sim.planner.scores import best_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate, Space, gpus_by_pool
from streamrl.sim.planner.target_rules import TargetRules

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
TRIED = 1
"""Plans beyond those of the search that are simulated at a time, by cost and by time."""
NO_TIME = "no time was left to search for it"
NONE_BETTER = "none that was tried is better"


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
    run, plan = search.space.run, _alike(search, chosen)
    found = _find(search, plan, chosen, pool, watch)
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
    search: Search,
    names: Collection[str],
    rivals: Sequence[Speed],
    pool: Executor,
    watch: Callable[[], None],
) -> Candidate | str:
    """Return the plan to choose if parts of a node could be rented, or the reason why there is none.

    All systems and both sides are estimated, with every number of GPUs up to a node. The best ones by
    cost are simulated, then faster ones that cost little more, if by their lowest estimate they are worth a row.

    Args:
        search: the search on whole nodes.
        names: pools of which parts may be rented.
        rivals: the recommended and the cheapest plan, simulated on the prompts of the search. There
            is no result if one of them is cheaper and faster, or if it is not clearly better than
            the first.
        pool: simulates.
        watch: called after each simulation.
    """
    run = search.space.run
    counts = list(_counts(run.cluster.pools))
    wider = replace(run.plan, rollout_gpus=counts, trainer_gpus=counts)
    is_limited = search.space.rules is not None
    return _best_beyond(
        search, wider, is_limited, lambda space: _uses_parts(space, names), rivals, pool, watch
    )


def find_run_by_nothing(
    search: Search, rivals: Sequence[Speed], pool: Executor, watch: Callable[[], None]
) -> Candidate | str | None:
    """Return the plan to choose if a target could run it, or the reason why there is none.

    The plans that no target can run are estimated too. The arguments and the steps are those of
    `find_on_partial_nodes`. The result is None if the search has such plans itself, or if the run file names what is
    to run the plan.
    """
    plan, rules = search.space.run.plan, search.space.rules
    if rules is None or plan.target is not None:
        return None
    return _best_beyond(
        search, plan, False, lambda space: _is_run_by_nothing(space, rules), rivals, pool, watch
    )


def _best_beyond(
    search: Search,
    wider: PlanConfig,
    runnable: bool,
    wanted: Callable[[Space], Mask],
    rivals: Sequence[Speed],
    pool: Executor,
    watch: Callable[[], None],
) -> Candidate | str:
    """Return the plan to choose among plans that a search leaves out, or the reason why there is none.

    Args:
        search: the search.
        wider: the section `[plan]` that has them too.
        runnable: leave out plans that no target can run.
        wanted: returns which plans of the wider space to look at.
        rivals: see `find_on_partial_nodes`.
        pool: simulates.
        watch: called after each simulation.
    """
    if search.is_late:
        return NO_TIME
    try:
        other = search.beside(wider, runnable=runnable)
    except ValueError as error:  # no plan fits, or there are too many
        return f"they could not be searched: {error}"
    among, plan = wanted(other.space), search.space.run.plan
    spends = [search.spend_of(rival) for rival in rivals]
    _simulate_best(other, among, spends, pool, watch)
    if not (known := _known(other)):
        return _why_none(other, among)
    if plan.takes_faster:
        least = min(other.spend_of(speed).whole for speed in known.values())
        other.aim_at(faster_goal(plan, least))
    _simulate_best(other, among, spends, pool, watch)
    other.aim_at(plan)
    known = _known(other)
    cheapest = min(known, key=lambda index: other.spend_of(known[index]).whole)
    best = (recommended_of(other, known), cheapest)
    worth = (index for index in best if _is_worth(other.spend_of(known[index]), spends))
    return next(map(other.space.candidate, worth), NONE_BETTER)


def _why_none(search: Search, among: Mask) -> str:
    """Return why no plan among some can be compared."""
    if not among.any():
        return "the offer and [plan] have none"
    if search.speeds or search.unfinished:
        return str(search.nothing_left(search.speeds.values()))
    return NO_TIME if search.is_late else NONE_BETTER


def _counts(pools: Mapping[str, PoolConfig]) -> Iterator[int]:
    """Yield every number of GPUs up to the largest node, and the usual numbers of every pool."""
    most = max(pool.gpus_per_node for pool in pools.values())
    usual = {count for pool in pools.values() for count in sizes(pool, None)}
    yield from sorted(usual.union(range(1, most + 1)))


def _uses_parts(space: Space, names: Collection[str]) -> Mask:
    """Return which plans have a part of a node in a pool. Pools with a unit are kept to it."""
    pools, listed = space.run.cluster.pools, list(space.run.cluster.pools)
    is_shared = np.array([mode.system == "colocated" for mode in space.modes])[space.of_mode]
    sides = (
        np.array([gpus_by_pool(each.kinds, listed) for each in space.replicas])[space.of_replicas],
        np.array([gpus_by_pool([each], listed) for each in space.trainers])[space.of_trainer],
    )
    used = np.where(is_shared[:, None], np.maximum(*sides), sides[0] + sides[1])
    nodes = np.array([pool.gpus_per_node if name in names else 1 for name, pool in pools.items()])
    units = np.array([pool.unit or 1 for pool in pools.values()])
    is_rentable = np.all([(side % units == 0).all(axis=1) for side in sides], axis=0)
    found: Mask = (used % nodes > 0).any(axis=1) & is_rentable
    return found


def _is_run_by_nothing(space: Space, rules: TargetRules) -> Mask:
    """Return which plans no target of some rules can run."""
    pairs = rules.pairs(space.replicas, space.trainers)
    every = np.ones((len(space.replicas), len(space.trainers)), dtype=bool)
    found = np.ones(len(space), dtype=bool)
    for place, mode in enumerate(space.modes):
        able, own = pairs.open_to(mode, every, Counter()), space.of_mode == place
        found[own] = ~able[space.of_replicas[own], space.of_trainer[own]]
    return found


def _simulate_best(
    search: Search,
    among: Mask,
    rivals: Sequence[Spend[float]],
    pool: Executor,
    watch: Callable[[], None],
) -> None:
    """Simulate a few steps of the best plans by estimate among some, unless by their lowest estimate none is worth a row."""

    def pick(order: list[int], scores: Floats) -> list[int]:
        is_open = among & _is_worth(search.least_spends(), rivals)
        those = [i for i in best_of(np.where(is_open, scores, np.inf)) if is_open[i]]
        return list(islice(search.unlike(those, scores), TRIED))

    if not search.is_late:
        search.simulate(pool, search.refine(pool, pick, num_batches=1), watch)


def _known(search: Search) -> dict[int, Speed]:
    """Return the simulated plans that keep the limits of `[plan]`."""
    return {index: search.speeds[index] for index in search.ranking()}


def _is_worth(ours: Spend[Figure], rivals: Sequence[Spend[float]]) -> Mask:
    """Whether a plan, or each plan, is clearly cheaper or faster than the first rival, and no rival beats it in both."""
    first, *_ = rivals
    worth = ours.whole < (1 - ALIKE) * first.whole
    worth |= ours.seconds < (1 - ALIKE) * first.seconds
    for each in rivals:
        worth &= (ours.whole < each.whole) | (ours.seconds < each.seconds)
    return np.asarray(worth)


def _alike(search: Search, chosen: int) -> PlanConfig:
    """Return the section `[plan]` of a search, limited to the system and pools of one plan."""
    replicas, trainer, mode = search.space.candidate(chosen)
    alike: PlanConfig = replace(
        search.space.run.plan,
        systems=[mode.system],
        rollout_pools=list(replicas.pools),
        trainer_pools=[trainer.pool],
        reward_pools=None if mode.rewards is None else [mode.rewards.pool],
    )
    return alike


def _find(
    search: Search,
    plan: PlanConfig,
    chosen: int,
    pool: Executor,
    watch: Callable[[], None],
) -> BetterPlan | None:
    """Return the best plan by estimate whose trainer leaves little memory free, if as simulated it is clearly better."""
    if search.is_late:
        return None
    try:
        is_limited = search.space.rules is not None
        other = search.beside(plan, tight=True, runnable=is_limited)
    except ValueError:  # no plan fits
        return None
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

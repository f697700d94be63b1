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
from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.sim.planner.layouts import sizes
from streamrl.sim.planner.objective import beats, faster_goal
from streamrl.sim.planner.options import recommended_of
from streamrl.sim.planner.plan import OverMemoryLimit
from streamrl.sim.planner.plan_settings import describe, settings_of
from streamrl.sim.planner.scores import best_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate, Space, gpus_by_pool
from streamrl.sim.planner.target_rules import TargetRules

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
TRIED = 4
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
    search: Search,
    names: Collection[str],
    rivals: Sequence[Speed],
    pool: Executor,
    watch: Callable[[], None],
) -> Candidate | str:
    """Return the plan to choose if parts of a node could be rented, or the reason why there is none.

    All systems and both sides are estimated again, with every number of GPUs up to a node. The best
    ones by cost are simulated, then faster ones that cost little more.

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

    All plans are estimated again, with those that no target can run. The arguments and the steps are those of
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
        run = replace(search.space.run, plan=wider)
        other = Search.open(run, search.deadline, runnable=runnable)
    except ValueError as error:  # no plan fits, or there are too many
        return f"they could not be searched: {error}"
    other.estimates.take_paces(search.estimates)
    among, plan = wanted(other.space), search.space.run.plan
    _simulate_best(other, among, pool, watch)
    if not (known := _known(other)):
        return _why_none(other, among)
    if plan.takes_faster:
        least = min(other.spend_of(speed).whole for speed in known.values())
        other.aim_at(faster_goal(plan, least))
    _simulate_best(other, among, pool, watch)
    other.aim_at(plan)
    known = _known(other)
    cheapest = min(known, key=lambda index: other.spend_of(known[index]).whole)
    best = (recommended_of(other, known), cheapest)
    worth = (index for index in best if _is_worth(other, known[index], rivals))
    return next(map(other.space.candidate, worth), NONE_BETTER)


def _why_none(search: Search, among: Mask) -> str:
    """Return why no plan among some can be compared."""
    if not among.any():
        return "the offer and [plan] have none"
    if not search.speeds and not search.unfinished:
        return NO_TIME
    return str(search.nothing_left(search.speeds.values()))


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


def _simulate_best(search: Search, among: Mask, pool: Executor, watch: Callable[[], None]) -> None:
    """Simulate a few steps of the best plans by estimate among some."""

    def pick(order: list[int], scores: Floats) -> list[int]:
        those = [i for i in best_of(np.where(among, scores, np.inf)) if among[i]]
        return list(islice(search.unlike(those, scores), TRIED))

    if not search.is_late:
        search.simulate(pool, search.refine(pool, pick, num_batches=1), watch)


def _known(search: Search) -> dict[int, Speed]:
    """Return the simulated plans that keep the limits of `[plan]`."""
    return {index: search.speeds[index] for index in search.ranking()}


def _is_worth(search: Search, speed: Speed, rivals: Sequence[Speed]) -> bool:
    """Whether a plan is clearly cheaper or faster than the first rival, and no rival beats it in both."""
    ours, others = search.spend_of(speed), [search.spend_of(rival) for rival in rivals]
    is_better = (
        ours.whole < (1 - ALIKE) * others[0].whole or ours.seconds < (1 - ALIKE) * others[0].seconds
    )
    return is_better and not any(beats(other, ours) for other in others)


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
        is_limited = search.space.rules is not None
        other = Search.open(run, search.deadline, tight=tight, runnable=is_limited)
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

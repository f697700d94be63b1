"""Find how the chosen plan changes with other lengths, prices, bandwidth or training speed.

Each change is planned again by estimate, among the plans that may become the best. If another plan
is clearly better, both are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.record.steady_state import Speed
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.runfile.units import SECONDS_PER_HOUR, Bandwidth
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.planner.estimates import Estimates, Floats
from streamrl.sim.planner.layouts import Degrees, Replicas, sizes
from streamrl.sim.planner.objective import value_of
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate, Space, price_per_second
from streamrl.sim.planner.trial import Trial, Unfinished, run_all, short_speed_of, shortened

SHARE = 0.2
"""Relative size of each change, about the error of a guess."""
IS_AHEAD = 0.98
"""Another plan counts as better if its objective is below this share of the chosen plan's.
Estimates have an error of this size. Plans that cost about the same are ordered by simplicity.
"""
NOT_SLOWER = 1.02
"""Another plan counts as equally fast up to this ratio of its step time to the chosen plan's."""
TOUCHES = 1e-6
"""Smallest relative shift between two plans for which a change counts as the reason that one is
better.
"""
CONTENDS = (1 + SHARE) / (1 - SHARE)
"""Largest ratio of a plan's objective to the best at which such a change of prices could make it
the best.
"""


class Shift(NamedTuple):
    """One change of the run file, such as longer outputs."""

    what: str
    run: Run
    touches: Callable[[Candidate], bool] = lambda candidate: True
    """Whether a plan uses the changed thing."""


class Verdict(NamedTuple):
    """The effect of a change on the choice."""

    what: str
    value: float
    """Ratio of the objective after the change to that before. It is the chosen plan's, or the other
    plan's if the chosen one no longer fits.
    """
    still_fits: bool
    """Whether the chosen plan can still run."""
    other: Candidate | None
    """The plan to choose instead."""
    other_value: float
    """Ratio of its objective to the chosen plan's before the change."""
    is_used: bool
    """Whether the chosen or the other plan uses the changed thing."""


class _Look(NamedTuple):
    """Estimates after a change."""

    shift: Shift
    ratio: float
    """Ratio of the chosen plan's objective after the change to that before."""
    chosen: Candidate | None
    """The chosen plan, perhaps with offloading now; None if it no longer fits."""
    other: Candidate | None


def shifts(run: Run) -> Iterator[Shift]:
    """Yield the changes: lengths, training speed, bandwidth and prices, each 20 % lower and higher."""
    cluster = run.cluster
    for factor, name in ((1 - SHARE, f"-{SHARE:.0%}"), (1 + SHARE, f"+{SHARE:.0%}")):
        if (lengths := run.workload.lengths) is not None:
            workload = replace(run.workload, lengths=_scaled(lengths, factor))
            rollout = _with_longest(run.rollout, factor)
            yield Shift(f"lengths {name}", replace(run, rollout=rollout, workload=workload))
        faster = replace(run, costs=_with_speed(run.costs, factor))
        yield Shift(f"speed of training (MFU) {name}", faster)
        if cluster.links:
            wider = replace(run, cluster=_with_bandwidth(cluster, factor))
            yield Shift(f"bandwidth of links {name}", wider, _crosses_a_link)
        for pool in cluster.pools:
            repriced = replace(run, cluster=_with_price(cluster, pool, factor))
            yield Shift(f"price of {pool} {name}", repriced, _rents(pool))


def _crosses_a_link(candidate: Candidate) -> bool:
    return candidate.replicas.pools != (candidate.trainer.pool,)


def _rents(pool: str) -> Callable[[Candidate], bool]:
    return lambda candidate: pool in candidate.pools


def _scaled(lengths: LengthsConfig, factor: float) -> LengthsConfig:
    scale_to = None if lengths.scale_to is None else lengths.scale_to * factor
    return replace(lengths, scale=lengths.scale * factor, scale_to=scale_to)


def _with_longest(rollout: RolloutConfig, factor: float) -> RolloutConfig:
    """Scale the maximum length like the lengths, which keeps the shape of their distribution."""
    return replace(rollout, max_tokens=max(1, round(rollout.max_tokens * factor)))


def _with_speed(costs: CostsConfig, factor: float) -> CostsConfig:
    return replace(costs, training_factor=costs.training_factor * factor)


def _with_bandwidth(cluster: ClusterConfig, factor: float) -> ClusterConfig:
    links = [replace(link, bandwidth=Bandwidth(link.bandwidth * factor)) for link in cluster.links]
    return replace(cluster, links=links)


def _with_price(cluster: ClusterConfig, name: str, factor: float) -> ClusterConfig:
    pool = cluster.pools[name]
    price = price_per_second(pool) * SECONDS_PER_HOUR * factor
    return replace(cluster, pools={**cluster.pools, name: replace(pool, price=price)})


def judge(
    search: Search, chosen: int, pool: Executor, watch: Callable[[], None] = lambda: None
) -> list[Verdict]:
    """Plan again for every change; `watch` is called after each simulation.

    The effect of a change is the ratio of a few steps simulated with and without it. Changes are
    left out if time does not suffice.
    """
    run = search.space.run
    looks = [_look(shift, search, chosen, pool) for shift in shifts(run) if not search.is_late]
    trials = [
        ((place, who), Trial(shortened(look.shift.run, run.seed), who))
        for place, look in enumerate(looks)
        if look.other is not None
        for who in (look.chosen, look.other)
        if who is not None
    ]
    speeds = run_all(pool, short_speed_of, trials, watch, search.deadline)
    before = search.value(chosen)
    finished: dict[tuple[int, Candidate | None], Speed] = {
        key: speed for key, speed in speeds.items() if not isinstance(speed, Unfinished)
    }
    simulated = {
        (place, who): value_of(run.plan, speed) / before
        for (place, who), speed in finished.items()
        if not (
            run.plan.takes_faster and _is_slower(speed, finished.get((place, looks[place].chosen)))
        )
    }
    return [
        _verdict(
            look,
            look.ratio,
            simulated.get((place, look.chosen)),
            simulated.get((place, look.other)),
        )
        for place, look in enumerate(looks)
    ]


def _is_slower(speed: Speed, chosen: Speed | None) -> bool:
    """Whether a plan takes clearly longer than the chosen one after a change."""
    return chosen is not None and speed.step_time > NOT_SLOWER * chosen.step_time


def _verdict(
    look: _Look, estimate: float, value: float | None, other_value: float | None
) -> Verdict:
    """Compare the simulated objectives of the chosen plan and of the plan that is better by estimate."""
    value = estimate if value is None else value
    what = look.shift.what
    if look.chosen is None:
        value = other_value or estimate
        return Verdict(what, value, False, look.other, value, True)
    touches = look.shift.touches
    if other_value is None or not is_ahead(other_value, value):
        return Verdict(what, value, True, None, value, touches(look.chosen))
    is_used = touches(look.chosen) or (look.other is not None and touches(look.other))
    return Verdict(what, value, True, look.other, other_value, is_used)


def is_ahead(other: float, chosen: float) -> bool:
    """Whether a plan's objective is low enough to choose it instead of another."""
    return other <= IS_AHEAD * chosen


def _look(shift: Shift, search: Search, chosen: int, pool: Executor) -> _Look:
    """Estimate all plans after a change. Only lengths and training speed change stage times."""
    run = search.space.run
    if (shift.run.workload, shift.run.costs) != (run.workload, run.costs):
        return _look_at_stages(shift, search, chosen, pool)
    shifted = search.estimates.shifted(shift.run.cluster)
    before, after = _values(search.estimates), _values(shifted)
    best, candidate = _best(run.plan, shifted, chosen), search.space.candidate
    gains = after[best] / before[best] < (1 - TOUCHES) * after[chosen] / before[chosen]
    has_other = gains and is_ahead(after[best], after[chosen])
    ratio = float(after[chosen] / before[chosen])
    return _Look(shift, ratio, candidate(chosen), candidate(best) if has_other else None)


def _look_at_stages(shift: Shift, search: Search, chosen: int, pool: Executor) -> _Look:
    """Estimate plans with other stage times. The replicas of the best plans are simulated.

    The set of plans that fit may differ.
    """
    run = search.space.run
    try:
        narrowed = replace(shift.run, plan=_narrowed(shift.run.plan, search, chosen))
        kept = search.space.candidate(chosen).trainer
        after = Search.open(narrowed, search.deadline, kept=kept)
    except ValueError:  # no plan near the best fits any more; the verdict reports this
        return _Look(shift, 1.0, None, None)
    after.estimates.take_paces(search.estimates)
    after.open_mixed(search.space.candidate(chosen))
    place = after.space.find(search.space.candidate(chosen))
    after.settle(pool, [] if place is None else [place])
    values, candidate = _values(after.estimates), after.space.candidate
    best = _best(run.plan, after.estimates, place)
    if place is None:
        return _Look(shift, 1.0, None, candidate(best))
    has_other = is_ahead(values[best], values[place])
    ratio = float(values[place] / _values(search.estimates)[chosen])
    return _Look(shift, ratio, candidate(place), candidate(best) if has_other else None)


def _best(plan: PlanConfig, estimates: Estimates, chosen: int | None) -> int:
    """Return the plan with the best objective that can be rented. If speed decided the choice, slower plans are left out."""
    values = _values(estimates)
    can_be_rented = _rentable(plan, estimates.space)
    if can_be_rented.any():
        values = np.where(can_be_rented, values, np.inf)
    if plan.takes_faster and chosen is not None:
        steps = estimates.estimate().step
        values = np.where(steps <= NOT_SLOWER * steps[chosen], values, np.inf)
    return int(np.argmin(values))


def _rentable(plan: PlanConfig, space: Space) -> NDArray[np.bool_]:
    """Return which plans have sizes that their pools are rented in: another pool may have been the reason for a size."""
    pools = space.run.cluster.pools

    def is_size(side: Replicas | Degrees, stated: list[int] | None) -> bool:
        return stated is not None or side.num_gpus in sizes(pools[side.pool], plan.unit)

    replicas = [
        all(is_size(kind, plan.rollout_gpus) for kind in each.kinds) for each in space.replicas
    ]
    trainers = [is_size(each, plan.trainer_gpus) for each in space.trainers]
    found: NDArray[np.bool_] = (
        np.array(replicas)[space.of_replicas] & np.array(trainers)[space.of_trainer]
    )
    return found


def _narrowed(plan: PlanConfig, search: Search, chosen: int) -> PlanConfig:
    """Limit the section `[plan]` to the pools, sizes and systems of the chosen plan and of plans near the best."""
    space, values = search.space, _values(search.estimates)
    near = np.append(np.nonzero(values <= CONTENDS * values.min())[0], chosen)
    trainers = [space.trainers[i] for i in np.unique(space.of_trainer[near])]
    fleets = [space.replicas[i] for i in np.unique(space.of_replicas[near])]
    replicas = [kind for fleet in fleets for kind in fleet.kinds]
    modes = [space.modes[i] for i in np.unique(space.of_mode[near])]
    rewards = [mode.rewards for mode in modes if mode.rewards is not None]
    return replace(
        plan,
        rollout_pools=sorted({side.pool for side in replicas}),
        trainer_pools=sorted({side.pool for side in trainers}),
        rollout_gpus=sorted({side.num_gpus for side in replicas}),
        trainer_gpus=sorted({side.num_gpus for side in trainers}),
        micro_batch=sorted({side.micro_batch for side in trainers}),
        context_parallel=sorted({1, *(side.context_parallel for side in trainers)}),
        systems=list(dict.fromkeys(mode.system for mode in modes)),
        reward_pools=sorted({side.pool for side in rewards}) or None,
        reward_gpus=sorted({side.num_gpus for side in rewards}) or None,
    )


def _values(estimates: Estimates) -> Floats:
    """Estimate the objective of every plan, without its limits."""
    return estimates.values(estimates.estimate().step)

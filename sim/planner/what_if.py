"""Estimate plans near the front for other lengths, caps and links, and choose among them by the rule of `[plan]`.

The grid is computed once, with closed forms. The hours of a plan at a point of the grid are

    simulated hours without a change  x  estimate at the point / estimate without a change

so errors that both estimates share cancel. Without a change an option has the total of its own simulation. Prices, the value of an hour and a deadline need no grid. The report
page has the grid and the same rule in JavaScript.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace as replace_fields
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.profiles import price_of
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.record.charges import PaidGpus
from streamrl.record.whole_run import WholeRun, steps_for_one
from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.runfile.units import SECONDS_PER_HOUR, Bandwidth
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.planner.estimates import Estimates, SyncTimes, sync_times
from streamrl.sim.planner.objective import distance_to_front
from streamrl.sim.planner.plan import GpuShare, WhatIf, WhatIfPlan
from streamrl.sim.planner.plan_description import whole_run_of
from streamrl.sim.planner.plan_settings import describe, settings_of
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Space
from streamrl.sim.planner.trial import counted_batches, open_trial, shortened

Floats = NDArray[np.float64]
LENGTHS = (0.5, 0.7, 1.0, 1.4, 2.0)
CAPS = (0.5, 1.0, 2.0)
LINKS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Factors of the grid. Lengths matter most, so they have most points."""
MOST_PLANS = 40
"""Plans of the grid. More plans make the page larger, and few of them would ever be chosen."""
MOST_BATCHES = 1
"""Batches of each estimate. Both estimates of a ratio have the same prompts."""


# The rule ---------------------------------------------------------------------------------------


class WhatIfQuestion(NamedTuple):
    """One position of all sliders."""

    lengths: int
    cap: int
    links: int
    """Places in the grid."""
    prices: Mapping[str, float]
    value_of_hour: float = 0.0
    deadline: float | None = None
    """Hours."""
    most_rollout: int | None = None
    most_trainer: int | None = None
    """Most GPUs that generate, and that train; None for any number."""


class PricedPlan(NamedTuple):
    """One plan at a position of the sliders."""

    place: int
    hours: float
    dollars: float


def unchanged_question(grid: WhatIf) -> WhatIfQuestion:
    """Return the question that the run file asks."""
    return WhatIfQuestion(*grid.unchanged, grid.prices, grid.value_of_hour, grid.deadline)


def priced_plans(grid: WhatIf, question: WhatIfQuestion) -> list[PricedPlan]:
    """Return the hours and dollars of every plan that fits and has at most the allowed GPUs."""
    found = []
    for place, plan in enumerate(grid.plans):
        hours = plan.hours[question.lengths][question.cap][question.links]
        is_small = plan.rollout_gpus <= (question.most_rollout or plan.rollout_gpus)
        is_small &= plan.trainer_gpus <= (question.most_trainer or plan.trainer_gpus)
        if hours is not None and is_small:
            rent = sum(count * question.prices[pool] for pool, count in plan.paid.items())
            found.append(PricedPlan(place, hours, hours * rent + plan.other_dollars))
    return found


def recommend(grid: WhatIf, question: WhatIfQuestion) -> PricedPlan | None:
    """Return the plan that the rule of `[plan]` chooses, or None if no plan fits.

    Plans that miss the deadline are left out; if none keeps it, the fastest is chosen. A value of an
    hour is added to the dollars. Otherwise the fastest plan is chosen that costs at most
    `tolerance` more than the cheapest.
    """
    plans = priced_plans(grid, question)
    if not plans:
        return None
    if question.deadline is not None:
        in_time = [plan for plan in plans if plan.hours <= question.deadline]
        if not in_time:
            return min(plans, key=lambda plan: plan.hours)
        plans = in_time
    return _by_objective(grid.objective, plans, question, grid.tolerance)


def _by_objective(
    objective: ObjectiveName, plans: list[PricedPlan], question: WhatIfQuestion, tolerance: float
) -> PricedPlan:
    if objective == "step-time":
        return min(plans, key=lambda plan: plan.hours)
    if objective == "pareto":
        return min(plans, key=lambda plan: plan.hours * plan.dollars)
    if question.value_of_hour > 0:
        worth = question.value_of_hour
        return min(plans, key=lambda plan: plan.dollars + worth * plan.hours)
    most = (1 + tolerance) * min(plan.dollars for plan in plans)
    return min((plan for plan in plans if plan.dollars <= most), key=lambda plan: plan.hours)


# The grid ---------------------------------------------------------------------------------------


def make_grid(search: Search, race: Race, chosen: int, pool: Executor) -> WhatIf | None:
    """Return the grid of a finished search, or None if the chosen plan has no whole run."""
    (metrics, *_) = race.steady[chosen]
    if metrics.whole_run is None:
        return None
    run = search.space.run
    kept = _near_front(search, race, chosen)
    totals = dict(_totals(race, kept))
    hours = _unchanged_hours(search, race, chosen, metrics.whole_run)
    hours |= {index: whole.wall_time / SECONDS_PER_HOUR for index, whole in totals.items()}
    space = search.space.only([search.space.candidate(index) for index in kept])
    points = _points(search.space)
    links = LINKS if run.cluster.links else (1.0,)
    syncs = [_sync_at(space, factor) for factor in links]
    jobs = [_Job(shortened(point, run.seed), space, syncs) for point in points.runs]
    found = list(pool.map(_estimate, jobs))
    base = found[points.unchanged].steps[:, links.index(1.0)]
    ratios = [each.steps / base[:, None] for each in found]
    shape = (len(points.lengths), len(points.caps))
    setup = run.cluster.billing.setup_time / SECONDS_PER_HOUR
    grid = WhatIf(
        lengths=points.lengths,
        caps=points.caps,
        links=list(links),
        unchanged=(*divmod(points.unchanged, len(points.caps)), links.index(1.0)),
        mean_tokens=np.reshape([each.mean_tokens for each in found], shape).tolist(),
        bandwidth=min((float(link.bandwidth) for link in run.cluster.links), default=None),
        gpus={name: each.gpu for name, each in run.cluster.pools.items()},
        prices={name: price_of(each) for name, each in run.cluster.pools.items()},
        objective=run.plan.objective,
        tolerance=run.plan.tolerance if run.plan.takes_faster else 0.0,
        value_of_hour=run.plan.value_of_hour,
        deadline=None if run.plan.deadline is None else run.plan.deadline / SECONDS_PER_HOUR,
        plans=[
            _plan(
                search,
                index,
                hours[index],
                _nested(ratios, place, hours[index], setup, shape),
                totals.get(index),
            )
            for place, index in enumerate(kept)
        ],
    )
    return _pruned(_settled(_agreeing(grid)))


def _totals(race: Race, indices: Iterable[int]) -> Iterator[tuple[int, WholeRun]]:
    """Yield the totals of the plans that were simulated as long as the chosen one."""
    for index in indices:
        speeds = race.as_known(index)
        whole = whole_run_of(speeds, race.search.space.run.cluster) if speeds else None
        if whole is not None:
            yield index, whole


def _agreeing(grid: WhatIf) -> WhatIf:
    """Remove estimates that look faster than the fastest option, or cheaper than the cheapest one.

    The search did not prefer them, so these estimates are too low.
    """
    question = unchanged_question(grid)
    limit = inf if question.deadline is None else question.deadline
    plans = [plan for plan in priced_plans(grid, question) if plan.hours <= limit]
    known = [plan for plan in plans if grid.plans[plan.place].has_total]
    if not known:
        return grid
    fastest, cheapest = (min(getattr(p, key) for p in known) for key in ("hours", "dollars"))
    out = {
        plan.place
        for plan in plans
        if not grid.plans[plan.place].has_total
        and (plan.hours < fastest or plan.dollars < cheapest)
    }
    kept = [plan for place, plan in enumerate(grid.plans) if place not in out]
    return replace(grid, plans=kept)


def _pruned(grid: WhatIf) -> WhatIf:
    """Remove estimates that another plan beats at every point with at most as many GPUs."""
    hours = np.array([plan.hours for plan in grid.plans], dtype=float)
    hours = np.where(np.isnan(hours), np.inf, hours)
    kept = [place for place, plan in enumerate(grid.plans) if plan.has_total]
    order = sorted(
        (place for place, plan in enumerate(grid.plans) if not plan.has_total),
        key=lambda place: sum(grid.plans[place].paid.values()),
    )
    for place in order:
        if not any(_beats(grid.plans[o], hours[o], grid.plans[place], hours[place]) for o in kept):
            kept.append(place)
    return replace(grid, plans=[grid.plans[place] for place in sorted(kept)])


def _beats(one: WhatIfPlan, hours: Floats, other: WhatIfPlan, other_hours: Floats) -> bool:
    is_smaller = all(count <= other.paid.get(pool, 0.0) for pool, count in one.paid.items())
    is_smaller &= one.rollout_gpus <= other.rollout_gpus and one.trainer_gpus <= other.trainer_gpus
    is_cheap = one.other_dollars <= other.other_dollars
    return is_smaller and is_cheap and bool((hours <= other_hours).all())


def _nested(
    ratios: Sequence[Floats], place: int, hours: float, setup: float, shape: tuple[int, int]
) -> list[list[list[float | None]]]:
    """Return the hours of one plan by lengths, cap and links. Hours of set-up do not change."""
    steps = hours - setup
    flat = [
        [
            None if np.isnan(ratio) else float(f"{setup + steps * ratio:.5g}")
            for ratio in each[place]
        ]
        for each in ratios
    ]
    return [flat[first * shape[1] : (first + 1) * shape[1]] for first in range(shape[0])]


def _settled(grid: WhatIf) -> WhatIf:
    """Remove the plans that the rule would choose without a change, although simulations decided otherwise.

    These are estimates that are too low, and plans that differ by chance.
    """
    while (best := recommend(grid, unchanged_question(grid))) is not None and best.place != 0:
        plans = priced_plans(grid, unchanged_question(grid))
        chosen, cheapest = plans[0], min(plans, key=lambda plan: plan.dollars)
        is_dear = chosen.dollars > (1 + grid.tolerance) * cheapest.dollars
        out = cheapest.place if is_dear else best.place
        kept = [plan for place, plan in enumerate(grid.plans) if place != out]
        grid = replace(grid, plans=kept)
    return grid


def _near_front(search: Search, race: Race, chosen: int) -> list[int]:
    """Return the chosen plan, the plans beside it, and the best layout of other sizes and systems near the front."""
    seconds = _corrected_steps(search)
    for index, speed in search.speeds.items():
        seconds[index] = speed.step_time
    seconds[list(search.unfinished)] = np.inf
    dollars = seconds * search.space.prices
    first = list(dict.fromkeys([chosen, *race.steady, *race.beside]))
    sizes = _sizes(search.space)
    best: dict[object, int] = {sizes[index]: index for index in reversed(first)}
    for index in np.argsort(seconds, kind="stable").tolist():
        size = sizes[index]
        if size not in best and np.isfinite(seconds[index]) and _is_known(search, index):
            best[size] = index
    others = np.array([index for index in best.values() if index not in first], dtype=int)
    far = distance_to_front(seconds[others], dollars[others]) if len(others) else np.zeros(0)
    order = others[np.argsort(far, kind="stable")].tolist()
    return [*first, *order][:MOST_PLANS]


def _is_known(search: Search, index: int) -> bool:
    """Return whether a plan's generation was simulated. Others have only a lower bound, which looks too good."""
    return index in search.speeds or not search.estimates.asked([index], 1)


def _sizes(space: Space) -> list[tuple[object, ...]]:
    """Return the GPUs of each side and the system of every plan."""
    generate = [
        tuple((kind.pool, kind.num_gpus) for kind in replicas.kinds) for replicas in space.replicas
    ]
    train = [(trainer.pool, trainer.num_gpus) for trainer in space.trainers]
    systems = [mode.system for mode in space.modes]
    parts = (space.of_replicas, space.of_trainer, space.of_mode)
    places = zip(*(part.tolist() for part in parts), strict=True)
    return [(generate[one], train[other], systems[mode]) for one, other, mode in places]


def _corrected_steps(search: Search) -> Floats:
    """Return the estimated seconds of every plan, corrected by the simulations of its system."""
    steps = search.estimates.estimate().step
    return np.array(steps * search.usual_over()[search.space.of_mode])


def _unchanged_hours(search: Search, race: Race, chosen: int, whole: WholeRun) -> dict[int, float]:
    """Return the hours of the whole run of every plan.

    Those of simulated plans are the chosen plan's, times the ratio of their steps on the same prompts.
    """
    plan, corrected = search.space.run.plan, _corrected_steps(search)
    own = search.speeds[chosen].step_time
    ratios = dict(enumerate(corrected / own))
    for index in search.speeds:
        ours, theirs = race.pair(index, chosen)
        more = steps_for_one(plan, ours[0].mean_staleness)
        less = steps_for_one(plan, theirs[0].mean_staleness)
        ratios[index] = ours[0].step_time / theirs[0].step_time * more / less
    ratios[chosen] = 1.0
    return {
        index: float(whole.wall_time_of(whole.seconds * ratio)) / SECONDS_PER_HOUR
        for index, ratio in ratios.items()
    }


def _other_dollars(search: Search, index: int, wall_time: float) -> float:
    """Return the dollars of a whole run by estimate, besides the rent of its wall time."""
    run, step = search.space.run, search.estimates.estimate().step
    price, billing = float(search.space.prices[index]), run.cluster.billing
    seconds = (wall_time - billing.setup_time) / (1 + billing.failed_share)
    egress = float(search.estimates.egress(step)[index]) * run.algorithm.steps
    ratios = search.estimates.billed(step, np.zeros(len(step)), run.plan)
    ratio = float(np.broadcast_to(ratios, step.shape)[index])
    return (price * seconds + egress) * ratio - price * wall_time


def _plan(
    search: Search,
    index: int,
    hours: float,
    grid: list[list[list[float | None]]],
    whole: WholeRun | None,
) -> WhatIfPlan:
    """Return a plan of the grid; `whole` is the total of its own simulation, if it has one."""
    run, candidate = search.space.run, search.space.candidate(index)
    paid = PaidGpus.of(candidate.apply(run)).by_pool
    speed = search.speeds.get(index)
    other = _other_dollars(search, index, hours * SECONDS_PER_HOUR)
    if whole is not None:
        prices = run.cluster.pools
        rent = sum(count * price_of(prices[name]) for name, count in paid.items()) * hours
        other = whole.dollars - rent
    rewards = candidate.mode.rewards
    return WhatIfPlan(
        choice=describe(run.cluster.pools, candidate),
        settings=settings_of(candidate),
        generate=[
            GpuShare(pool=k.pool, num_gpus=k.num_gpus, tensor_parallel=k.tensor_parallel)
            for k in candidate.replicas.kinds
        ],
        rewards=rewards and GpuShare(pool=rewards.pool, num_gpus=rewards.num_gpus),
        rollout_gpus=sum(kind.num_gpus for kind in candidate.replicas.kinds),
        trainer_gpus=candidate.trainer.num_gpus,
        paid={name: float(count) for name, count in paid.items()},
        mean_staleness=_lag(search, index),
        other_dollars=round(other, 2),
        is_simulated=speed is not None,
        has_total=whole is not None,
        hours=grid,
    )


def _lag(search: Search, index: int) -> float:
    """Return the mean staleness of a plan. Without a simulation it is the mean of its system's simulations."""
    if index in search.speeds:
        return search.speeds[index].mean_staleness
    mode = search.space.of_mode[index]
    known = [
        speed.mean_staleness
        for other, speed in search.speeds.items()
        if search.space.of_mode[other] == mode
    ]
    return float(np.mean(known)) if known else search.least_lag(index)


class _Points(NamedTuple):
    """The run files of the grid, by lengths and then cap."""

    lengths: list[float]
    caps: list[int]
    runs: list[Run]
    unchanged: int


def _points(space: Space) -> _Points:
    run = space.run
    lengths, rollout = run.workload.lengths, run.rollout
    factors = [1.0] if lengths is None else list(LENGTHS)
    caps = [round(rollout.max_tokens * factor) for factor in CAPS]
    works = [replace(run.workload, lengths=_scaled(lengths, factor)) for factor in factors]
    runs = [
        replace(run, workload=work, rollout=replace(rollout, max_tokens=cap))
        for work, cap in product(works, caps)
    ]
    return _Points(factors, caps, runs, factors.index(1.0) * len(caps) + CAPS.index(1.0))


def _scaled(lengths: LengthsConfig | None, factor: float) -> LengthsConfig | None:
    if lengths is None:
        return None
    scale_to = None if lengths.scale_to is None else lengths.scale_to * factor
    scaled: LengthsConfig = replace(lengths, scale=lengths.scale * factor, scale_to=scale_to)
    return scaled


class _Job(NamedTuple):
    """One point of the grid."""

    base: bytes
    """The encoded run file."""
    space: Space
    """The plans, as the run file without a change has them."""
    syncs: list[SyncTimes]
    """Times of the weight sync of all plans, by factor of the links. They do not depend on lengths."""


class _Found(NamedTuple):
    """Estimates at one point."""

    mean_tokens: float
    steps: Floats
    """Seconds of a step by plan and factor of the links; not a number where a plan does not fit."""


def _estimate(job: _Job) -> _Found:
    """Estimate the plans at one point of the grid."""
    batches = counted_batches(job.base, MOST_BATCHES)
    drawn = [length for batch in batches for draw in batch.drawn for length in draw.lengths]
    space = replace_fields(job.space, run=open_trial(job.base)[0])
    found = np.full((len(space), len(job.syncs)), np.nan)
    fitting = [place for place in range(len(space)) if _fits(space, place)]
    if fitting:
        kept = space.only([space.candidate(place) for place in fitting])
        own = [SyncTimes(*(times[fitting] for times in sync)) for sync in job.syncs]
        estimates = Estimates(kept, batches, own[0])
        for column, sync in enumerate(own):
            found[fitting, column] = estimates.with_sync(sync).estimate().step
    return _Found(float(np.mean(drawn)), found)


def _fits(space: Space, index: int) -> bool:
    """Return whether both sides of a plan fit their memory."""
    run, candidate = space.run, space.candidate(index)
    side = trainer_side(resolve(candidate.apply(run)).trainer)
    fits = candidate.replicas.fits(resolve(run).replica, run.cluster.pools)
    return fits and side.need <= side.capacity


def _sync_at(space: Space, factor: float) -> SyncTimes:
    """Return the sync times of all plans if links have another bandwidth."""
    if factor == 1.0:
        return sync_times(space)
    cluster = space.run.cluster
    links = [replace(link, bandwidth=Bandwidth(link.bandwidth * factor)) for link in cluster.links]
    return sync_times(space.priced(replace(cluster, links=links)))

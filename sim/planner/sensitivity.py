"""Find how the chosen plan changes with other lengths, prices, bandwidth or training speed.

The objective after a change comes from a few simulated steps with and without it, on the same
prompts. A price changes no seconds, so its effect is computed from GPU-hours. Estimates only propose
another plan; it is simulated with the change too before it is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.record.billing import adds_nothing
from streamrl.record.charges import PaidGpus
from streamrl.record.run_comparison import is_beyond_chance
from streamrl.record.steady_state import START, Speed, over_steps, with_costs
from streamrl.record.whole_run import whole_time, with_bill
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import SystemName
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.estimates import Estimates, Floats
from streamrl.sim.planner.objective import Spend, limits_of, value_of
from streamrl.sim.planner.race import FINAL_STEPS
from streamrl.sim.planner.search import FIRST_LOOK, Search
from streamrl.sim.planner.shifts import Shift, shifts
from streamrl.sim.planner.space import Candidate, find_trainers
from streamrl.sim.planner.trial import (
    Trial,
    Unfinished,
    counted_batches,
    open_trial,
    portions_of,
    shortened,
)

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
LEAST = 0.001
"""Smallest relative effect of a link or price that is reported."""
CHANCE = 0.02
"""Largest effect in the wrong direction that counts as chance without a longer simulation, such as
a faster trainer that makes a plan dearer. Where steps overlap, a few steps differ by this much.
"""
IN_TURNS, OVERLAPPING = 4, 6
"""Steps to simulate if generation and training take turns, and if they overlap. In the first case
all but the first count, because each step starts with idle replicas. In the second, `START` steps
are left out.
"""
UNSURE = 0.03
"""Largest effect of other lengths on a cost per token that is simulated for longer where steps overlap, because its
direction is not known before.
"""
STREAMING = 2 * FINAL_STEPS
"""Steps to simulate of plans that stream ahead. The first quarter does not count, because these steps
use up or fill the buffer between the stages. On nine small offers, effects over steps 4 to 8 were up
to 10 points from those over 60 steps.
"""
ROOM = (1.0, 0.9, 0.75)
"""Shares of its limits that another plan may need by estimate, where the chosen plan exceeds one as simulated. The best of
each share is simulated, because an estimate may be a tenth too low.
"""
ROUNDS, MOST_PICKS = 3, 20
"""Most times that generation of proposed plans is simulated to correct the estimates. The second
value is the number of plans that are tried until one fits in memory.
"""
PROPORTIONAL = "all plans use only this pool, so costs scale with its price"
UNUSED = "the plan uses none of it, and no plan that does is better then"
NO_DOLLARS = "the objective contains no dollars"
NO_EFFECT = f"the effect on the objective is below {LEAST:.1%}"

Mask: TypeAlias = NDArray[np.bool_]


class Effect(NamedTuple):
    """Ratios of a plan after a change to the chosen plan before it, over the same steps."""

    value: float
    """Of the objectives."""
    seconds: float
    """Of the step times."""
    dollars: float
    """Of the costs of a step."""
    bill: float
    """Of the bills of the whole run, which may have set-up, minimum terms and storage."""


SAME = Effect(1.0, 1.0, 1.0, 1.0)
"""The ratios of a change without an effect."""


class Verdict(NamedTuple):
    """The effect of a change on the choice."""

    shift: Shift
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
    is_estimate: bool = False
    """Whether `value` comes from closed forms, because no time was left to simulate it."""
    breaks: tuple[str, ...] = ()
    """Keys of `[plan]` whose limits the chosen plan exceeds after the change."""
    seconds: float = 1.0
    dollars: float = 1.0
    """Ratios of the time of a step and of the bill of the whole run, of the same plan as `value`."""
    effect: Effect | None = None
    """Ratios of the chosen plan; None if the change was not simulated, or if the plan no longer fits."""
    other_effect: Effect | None = None
    """Ratios of the other plan."""

    @property
    def what(self) -> str:
        """The change, such as "lengths +20%"."""
        return self.shift.what


class Judgement(NamedTuple):
    """The effects of all changes."""

    verdicts: list[Verdict]
    left_out: dict[str, str]
    """Things whose change cannot change the choice or its objective, each with the reason."""
    idle: list[Verdict]
    """The effects of those among them that other plans use."""


def judge(
    search: Search,
    chosen: int,
    spend: Spend[float],
    pool: Executor,
    watch: Callable[[], None] = lambda: None,
) -> Judgement:
    """Compute the effect of every change.

    Changes that were not simulated when the time ends have estimated effects.

    Args:
        search: the finished search.
        chosen: the recommended plan.
        spend: its dollars and seconds without a change, over all its simulated steps.
        pool: simulates.
        watch: called after each simulation.
    """
    run = search.space.run
    left_out = dict(_left_out(search))
    looks = [_look(s, search, chosen) for s in shifts(run) if s.thing not in left_out]
    looks = _settled(looks, search, pool)
    paired = list(_simulate(looks, search, pool, watch))
    paired = _with_way_out(paired, search, spend, pool, watch)
    found = [(look.shift, _verdict(look, search, spend, *pair)) for look, pair in paired]
    left_out |= _without_effect(found)
    verdicts = [each for shift, each in found if shift.thing not in left_out]
    return Judgement(verdicts, left_out, [each for _, each in found if each not in verdicts])


def trials_after_changes(search: Search, index: int) -> dict[int, Trial]:
    """Return the simulations of a plan that `judge` will ask for if this plan is chosen."""
    left_out = dict(_left_out(search))
    changes = [shift for shift in shifts(search.space.run) if shift.thing not in left_out]
    candidate = search.space.candidate(index)
    looks = [_Look(each, index, candidate, search.estimates) for each in changes]
    fitting = [look for look in looks if _fits(look.shift, candidate)]
    return {place: trial for (place, _), trial in _own_trials(fitting, search).items()}


def effects_of(
    search: Search,
    asked: Sequence[tuple[int, Shift]],
    pool: Executor,
    watch: Callable[[], None] = lambda: None,
) -> list[Effect | None]:
    """Return the ratios of plans after changes to themselves before; None where a plan does not fit or no time is left.

    All are simulated at once, for as many steps as the plans without the change. An effect below `CHANCE` may be chance.
    """
    looks = []
    for index, shift in asked:
        candidate: Candidate | None = search.space.candidate(index)
        if candidate is not None and not _fits(shift, candidate):
            candidate = _variant(shift, candidate)
        looks.append(_Look(shift, index, candidate, search.estimates))  # they are not read here
    speeds = _speeds(_own_trials(looks, search, FINAL_STEPS), search, pool, watch)
    return [_pair(look, search, speeds, place)[0] for place, look in enumerate(looks)]


def estimated_effects(search: Search, shift: Shift, plans: Sequence[int]) -> list[Effect]:
    """Return the estimated ratios of plans after a change to the same plans before."""
    corrections, plan, found = _corrections(search), search.space.run.plan, []
    for estimates in (search.estimates, _after(shift, search)):
        figures = _Expected.of(search, estimates, corrections)
        dollars = figures.steps * estimates.space.prices + estimates.egress(figures.steps)
        bill = dollars * estimates.billed(figures.steps, search.lags, plan)
        found.append((figures.values, figures.steps, dollars, bill))
    ratios = [_ratio(after, before) for before, after in zip(*found, strict=True)]
    return [Effect(*(float(each[index]) for each in ratios)) for index in plans]


def _ratio(after: Floats, before: Floats) -> Floats:
    """Return the ratios of two figures of all plans; 1 where a plan costs nothing."""
    return np.divide(after, before, out=np.ones(len(before)), where=before > 0)


def spend_after(search: Search, before: Spend[float], effect: Effect) -> Spend[float]:
    """Return the dollars and seconds of a plan after a change, given those before."""
    setup = search.space.run.cluster.billing.setup_time
    return Spend(
        before.per_step * effect.dollars,
        before.per_day * effect.dollars / effect.seconds,
        before.whole * effect.bill,
        setup + (before.seconds - setup) * effect.seconds,
    )


# What is left out ---------------------------------------------------------------------------------


def _left_out(search: Search) -> Iterator[tuple[str, str]]:
    """Yield the things whose change has no effect on any plan, or the same effect on all plans."""
    run = search.space.run
    plan, is_limited = run.plan, bool(limits_of(run.plan))
    used = {pool for plans in search.space.replicas for pool in plans.pools}
    used |= {trainer.pool for trainer in search.space.trainers}
    used |= {name for name, pool in run.cluster.pools.items() if pool.owned}
    used |= {mode.rewards.pool for mode in search.space.modes if mode.rewards is not None}
    for shift in shifts(run):
        if shift.kind == "price" and plan.objective == "step-time" and not is_limited:
            yield shift.thing, NO_DOLLARS
        elif used == {shift.pool} and not is_limited and not plan.value_of_hour:
            yield shift.thing, PROPORTIONAL


def _without_effect(verdicts: Sequence[tuple[Shift, Verdict]]) -> dict[str, str]:
    """Return the prices and links whose changes have no effect, neither lower nor higher."""
    found: dict[str, str] = {}
    for shift, _ in verdicts:
        those = [verdict for each, verdict in verdicts if each.thing == shift.thing]
        is_idle = all(v.other is None and not v.breaks and abs(v.value - 1) < LEAST for v in those)
        if is_idle and shift.kind in ("links", "price"):
            found[shift.thing] = NO_EFFECT if any(v.is_used for v in those) else UNUSED
    return found


# Estimates ----------------------------------------------------------------------------------------


class _Look(NamedTuple):
    """Estimates of all plans after a change."""

    shift: Shift
    chosen_index: int
    """Index of the chosen plan."""
    chosen: Candidate | None
    """The chosen plan, perhaps with offloading now; None if it no longer fits."""
    estimates: Estimates
    ratio: float = 1.0
    """Estimated ratio of the chosen plan's objective after the change to that before."""
    seconds: float = 1.0
    """Estimated ratio of its step time."""
    other: int | None = None
    """The plan that is better by estimate."""
    slower: float = 1.0
    """Simulated ratio of the chosen plan's step time, relative to the estimated one."""
    is_over: bool = False
    """Whether the chosen plan exceeds a limit after the change, as simulated."""


def _look(shift: Shift, search: Search, chosen: int) -> _Look:
    """Estimate all plans after a change, and check whether the chosen one still fits."""
    candidate: Candidate | None = search.space.candidate(chosen)
    if candidate is not None and not _fits(shift, candidate):
        candidate = _variant(shift, candidate)
    return _picked(_Look(shift, chosen, candidate, _after(shift, search)), search)


def _after(shift: Shift, search: Search) -> Estimates:
    """Return the estimates after a change, with all corrections that the search learned."""
    if shift.kind == "lengths":
        base = shortened(shift.run, shift.run.seed)
        return search.estimates.with_batches(counted_batches(base))
    if shift.kind == "training":
        return search.estimates.with_costs(shift.run.costs)
    return search.estimates.shifted(shift.run.cluster)


def _fits(shift: Shift, candidate: Candidate) -> bool:
    """Return whether both sides of a plan fit in memory. Only longer outputs need more."""
    if shift.kind != "lengths" or shift.factor < 1:
        return True
    try:
        Costs.load(candidate.apply(shift.run))
    except ValueError:
        return False
    return True


def _variant(shift: Shift, candidate: Candidate) -> Candidate | None:
    """Return a plan of the same layout that fits, perhaps with offloading or smaller micro-batches, or None."""
    trainer = candidate.trainer
    plan = replace(
        shift.run.plan,
        trainer_pools=[trainer.pool],
        trainer_gpus=[trainer.num_gpus],
        trainer_tensor_parallel=[trainer.tensor_parallel],
        pipeline_parallel=[trainer.pipeline_parallel],
        context_parallel=[trainer.context_parallel],
    )
    try:
        found = find_trainers(replace(shift.run, plan=plan), Counter())
    except ValueError:  # no trainer fits
        return None
    alike = [each for each in found if each.layout == trainer.layout]
    alike.sort(key=lambda each: (each.split != trainer.split, each.offload != trainer.offload))
    variants = (candidate._replace(trainer=each) for each in alike)
    return next((each for each in variants if _fits(shift, each)), None)


def _settled(looks: list[_Look], search: Search, pool: Executor) -> list[_Look]:
    """Simulate the generation of the picked plans, and pick again by corrected estimates."""
    for _ in range(ROUNDS):
        picks = list(dict.fromkeys(look.other for look in looks if look.other is not None))
        estimates = search.estimates
        if search.is_late or not (estimates.asked(picks, 1) or estimates.unchecked(picks)):
            break
        search.refine(pool, partial(_these, picks), FIRST_LOOK)
        looks = [_picked(k._replace(estimates=_after(k.shift, search)), search) for k in looks]
    return looks


def _these(picks: list[int], order: list[int], scores: Floats) -> list[int]:
    return picks


def _picked(look: _Look, search: Search) -> _Look:
    """Return a look with the best plan by corrected estimates, if it is clearly better and fits."""
    places, ratio, seconds = _best_by_estimate(look, search)
    return look._replace(ratio=ratio, seconds=seconds, other=next(iter(places), None))


def _best_by_estimate(
    look: _Look, search: Search, room: float = 1.0
) -> tuple[Iterator[int], float, float]:
    """Return the plans that are clearly better and fit, the best first, and the chosen plan's ratios of objective and seconds.

    They need at most the share `room` of each limit.
    """
    plan, chosen, corrections = search.space.run.plan, look.chosen_index, _corrections(search)
    before = _Expected.of(search, search.estimates, corrections)
    after = _Expected.of(search, look.estimates, look.slower * corrections)
    ratio = float(after.values[chosen] / before.values[chosen])
    keeps = after.excess <= room * np.maximum(1.0, before.excess[chosen])
    is_open = keeps.copy()
    if look.chosen is not None and keeps[chosen] and not look.is_over:
        is_open &= after.values <= IS_AHEAD * after.values[chosen]
        if look.shift.kind in ("price", "links"):
            is_open &= after.values / before.values < (1 - TOUCHES) * ratio
    if plan.takes_faster:
        is_open &= after.steps <= NOT_SLOWER * after.steps[chosen]
    is_open[chosen] = False
    places = np.nonzero(is_open)[0]
    order = places[np.argsort(after.values[places], kind="stable")][:MOST_PICKS].tolist()
    fitting = (i for i in order if _fits(look.shift, search.space.candidate(i)))
    return fitting, ratio, float(after.steps[chosen] / before.steps[chosen])


class _Expected(NamedTuple):
    """Corrected estimates of every plan."""

    steps: Floats
    """Seconds of a step."""
    values: Floats
    """The objective."""
    excess: Floats
    """Largest ratio of a figure to its limit; 0 without limits."""

    @classmethod
    def of(cls, search: Search, estimates: Estimates, corrections: Floats) -> _Expected:
        """Return the figures by estimates with other lengths, costs or prices."""
        steps = estimates.estimate().step * corrections
        values = estimates.values(steps, search.lags, search.space.run.plan)
        return cls(steps, values, search.excess_of(steps, estimates))


def _corrections(search: Search) -> Floats:
    """Return the ratio of simulated to estimated step time of every plan.

    Plans without a simulation have the median ratio of their system.
    """
    estimated, space = search.estimates.estimate().step, search.space
    own = {index: speed.step_time / estimated[index] for index, speed in search.speeds.items()}
    of_systems: dict[SystemName, list[float]] = defaultdict(lambda: [])
    for index, ratio in own.items():
        of_systems[space.candidate(index).mode.system].append(ratio)
    usual = [median(of_systems[mode.system] or [1.0]) for mode in space.modes]
    found: Floats = np.array(usual)[space.of_mode]
    found[list(own)] = list(own.values())
    return found


# Simulations --------------------------------------------------------------------------------------


_Pair: TypeAlias = tuple[Effect | None, Effect | None]
"""Ratios of the chosen and of the other plan, each None if it was not simulated."""
_Key: TypeAlias = tuple[int, Candidate]
"""Index of a change and the plan that is simulated with it."""
UNCHANGED = -1
"""Index of the simulation without a change."""


def _simulate(
    looks: Sequence[_Look], search: Search, pool: Executor, watch: Callable[[], None]
) -> Iterator[tuple[_Look, _Pair]]:
    """Simulate the chosen plan and the other plan after each change, the chosen one first."""
    trials = _own_trials(looks, search)
    unsure = _longer_at_once(looks, search)
    trials |= unsure
    for place, look in enumerate(looks):
        if look.other is not None and not _is_known(look, search, look.other):
            other = search.space.candidate(look.other)
            trials[place, other] = _trial(look, search, other)
    if any(_matters(look, search) and _streams_ahead(look, search) for look in looks):
        run, own = search.space.run, search.space.candidate(looks[0].chosen_index)
        steps = 2 * STREAMING if unsure else STREAMING
        unchanged = _in_portions(shortened(run, run.seed, steps), own)
        trials = {(UNCHANGED, own): unchanged, **trials}
    speeds = _speeds(trials, search, pool, watch)
    pairs = [_pair(look, search, speeds, place) for place, look in enumerate(looks)]
    return zip(looks, _checked(looks, pairs, search, pool, watch), strict=True)


def _own_trials(
    looks: Sequence[_Look], search: Search, streaming: int = STREAMING
) -> dict[_Key, Trial]:
    """Return the simulations of the chosen plan after each change, or of the plan of each look."""
    return {
        (place, look.chosen): _trial(look, search, look.chosen, streaming)
        for place, look in enumerate(looks)
        if look.chosen is not None and _matters(look, search)
    }


def _longer_at_once(looks: Sequence[_Look], search: Search) -> dict[_Key, Trial]:
    """Return the simulations of the chosen plan after changes whose effect is doubtful by estimate already.

    They have as many steps as `_checked` asks for, so that no shorter simulation comes first.
    """
    seed = search.space.run.seed
    return {
        (place, look.chosen): _in_portions(
            shortened(look.shift.run, seed, 2 * STREAMING), look.chosen
        )
        for place, look in enumerate(looks)
        if look.chosen is not None and _matters(look, search) and _streams_ahead(look, search)
        if _is_doubtful(look, search, look.ratio)
    }


def _speeds(
    trials: Mapping[_Key, Trial], search: Search, pool: Executor, watch: Callable[[], None]
) -> dict[_Key, Speed]:
    """Return the figures of the simulations that end in time."""
    found = search.speeds_of(pool, trials, watch, search.deadline)
    return {key: each for key, each in found.items() if not isinstance(each, Unfinished)}


def _trial(look: _Look, search: Search, candidate: Candidate, streaming: int = STREAMING) -> Trial:
    """Return the simulation of a plan after a change, over few steps unless the chosen plan streams ahead."""
    is_price = look.shift.kind == "price"  # it changes no seconds, and `_ratios` applies it
    run = search.space.run if is_price else look.shift.run
    most = open_trial(search.base)[0].simulate.max_steps
    if _streams_ahead(look, search):
        return _in_portions(shortened(run, run.seed, streaming), candidate)
    steps = OVERLAPPING if _overlaps(search, look.chosen_index, candidate) else IN_TURNS
    return _in_portions(shortened(run, run.seed, min(most, steps)), candidate)


def _streams_ahead(look: _Look, search: Search) -> bool:
    """Return whether the steps of the chosen plan overlap without a barrier for weights."""
    system = search.space.system(look.chosen_index)
    return bool(system.staleness_bound) and not system.halts_for_sync


def _in_portions(base: bytes, candidate: Candidate) -> Trial:
    """Return the simulation of a plan for the steps of an encoded run file, of a huge plan in portions."""
    run, _ = open_trial(base)
    return Trial(base, candidate, portions=portions_of(candidate.apply(run)))


def _overlaps(search: Search, chosen: int, candidate: Candidate) -> bool:
    """Return whether the chosen plan or another one generates for later steps while it trains."""
    space = search.space
    systems = (space.system(chosen), space.systems[space.modes.index(candidate.mode)])
    return any(system.staleness_bound for system in systems)


def _matters(look: _Look, search: Search) -> bool:
    """Return whether a change may change the seconds of the chosen plan by more than `LEAST`."""
    shift = look.shift
    if shift.kind != "links":
        return shift.kind != "price"
    stages = search.estimates.estimate()
    sync, step = float(stages.sync[look.chosen_index]), float(stages.step[look.chosen_index])
    is_used = look.chosen is not None and shift.touches(look.chosen)
    return is_used and abs(1 / shift.factor - 1) * sync >= LEAST * step


def _is_known(look: _Look, search: Search, index: int) -> bool:
    """Return whether a change leaves the seconds of a plan that the search simulated unchanged."""
    shift = look.shift
    is_same = shift.kind == "price" or (
        shift.kind == "links" and not shift.touches(search.space.candidate(index))
    )
    return is_same and index in search.speeds


def _pair(look: _Look, search: Search, speeds: Mapping[_Key, Speed], place: int) -> _Pair:
    """Return the ratios of the chosen and the other plan from the simulations that there are."""
    before, own = search.speeds[look.chosen_index], search.space.candidate(look.chosen_index)
    if _streams_ahead(look, search):
        before = speeds.get((UNCHANGED, own), before)
    ours = None
    if look.chosen is not None and (place, look.chosen) in speeds:
        after = speeds[place, look.chosen]
        ours = _ratios(look, search, before, after, look.chosen)
    elif look.chosen is not None and not _matters(look, search):
        ours = _ratios(look, search, before, before, look.chosen)
    if look.other is None:
        return ours, None
    other = search.space.candidate(look.other)
    speed = speeds.get((place, other))
    if speed is None and _is_known(look, search, look.other):
        speed = search.speeds[look.other]
    return ours, None if speed is None else _ratios(look, search, before, speed, other)


def _ratios(
    look: _Look, search: Search, before: Speed, after: Speed, candidate: Candidate
) -> Effect:
    """Return the ratios of a plan after a change to the chosen plan before it."""
    last = min(len(before.step_times), len(after.step_times), after.counted_steps[1])
    first = min(_first_counted(look, search, candidate, last), last)
    run, plan = search.space.run, search.space.run.plan
    before, after = over_steps(before, first, last), over_steps(after, first, last)
    if look.shift.kind == "price":
        rents = [
            PaidGpus.of(candidate.apply(each)).dollars_per_second for each in (look.shift.run, run)
        ]
        after = _repriced(after, rents[0] / rents[1] if rents[1] else 1.0)
    before = _billed(before, search.space.candidate(look.chosen_index).apply(run))
    after = _billed(after, candidate.apply(look.shift.run))
    dollars = after.cost_per_step / before.cost_per_step if before.cost_per_step else 1.0
    return Effect(
        value_of(plan, after) / value_of(plan, before),
        after.step_time / before.step_time,
        dollars,
        dollars * after.steady_billing_ratio / before.steady_billing_ratio,
    )


def _first_counted(look: _Look, search: Search, candidate: Candidate, last: int) -> int:
    """Return the first of `last` simulated steps that counts in a comparison with the chosen plan."""
    if _streams_ahead(look, search):
        return max(1 + START, last // 4 + 1)
    return 1 + START if _overlaps(search, look.chosen_index, candidate) else 2


def _billed(speed: Speed, planned: Run) -> Speed:
    """Return the figures of a plan with the bill of a whole run of such steps."""
    if adds_nothing(planned.cluster):
        return speed
    return with_bill(planned.cluster, speed, whole_time(planned, speed), PaidGpus.of(planned))


def _repriced(speed: Speed, factor: float) -> Speed:
    """Return the figures with other prices of the GPUs."""
    tokens = speed.cost_per_step / (speed.cost_per_million_tokens or 1.0) * 1e6
    return with_costs(speed, factor * (speed.cost_per_step - speed.egress_per_step), tokens)


# Ways out -----------------------------------------------------------------------------------------


def _with_way_out(
    paired: Sequence[tuple[_Look, _Pair]],
    search: Search,
    spend: Spend[float],
    pool: Executor,
    watch: Callable[[], None],
) -> list[tuple[_Look, _Pair]]:
    """Find another plan where the chosen one exceeds a limit only as simulated, so that estimates saw none.

    Estimates of the change are corrected by the chosen plan's simulation. The best plans that keep the limits by them
    are simulated.
    """
    found = []
    for look, (ours, theirs) in paired:
        is_over = ours is not None and bool(_broken(search, spend, ours))
        if ours is None or not is_over or search.is_late:
            found.append((look, (ours, theirs)))
            continue
        if theirs is not None and not _broken(search, spend, theirs):
            found.append((look, (ours, theirs)))
            continue
        early = search.spend_of(search.speeds[look.chosen_index])
        later = spend.seconds / early.seconds  # all simulated steps against the first few
        over = look._replace(is_over=True, slower=later * ours.seconds / look.seconds)
        found.append(_first_way_out(over, ours, search, spend, pool, watch))
    return found


def _first_way_out(
    look: _Look,
    ours: Effect,
    search: Search,
    spend: Spend[float],
    pool: Executor,
    watch: Callable[[], None],
) -> tuple[_Look, _Pair]:
    """Return the first plan by corrected estimates that keeps the limits after a change, as simulated; else no other plan."""
    picked = [next(_best_by_estimate(look, search, room)[0], None) for room in ROOM]
    places = list(dict.fromkeys(place for place in picked if place is not None))
    own = search.space.candidate(look.chosen_index)
    candidates = [search.space.candidate(place) for place in places]
    wanted = {candidate: _trial(look, search, candidate) for candidate in candidates}
    if _streams_ahead(look, search):
        run = search.space.run
        wanted[own] = _in_portions(shortened(run, run.seed, STREAMING), own)
    simulated = search.speeds_of(pool, wanted, watch, search.deadline)
    before = simulated.get(own, search.speeds[look.chosen_index])
    for place, candidate in zip(places, candidates, strict=True):
        speed = simulated.get(candidate)
        if isinstance(speed, Speed) and isinstance(before, Speed):
            theirs = _ratios(look, search, before, speed, candidate)
            if not _broken(search, spend, theirs):
                return look._replace(other=place), (ours, theirs)
    return look._replace(other=None), (ours, None)


# Signs ----------------------------------------------------------------------------------------------


def _checked(
    looks: Sequence[_Look],
    pairs: Sequence[_Pair],
    search: Search,
    pool: Executor,
    watch: Callable[[], None],
) -> list[_Pair]:
    """Replace effects that may be chance: those in the wrong direction by none, small ones without a known direction by longer ones.

    Small ones in the wrong direction are chance; the others are simulated for longer.
    """
    odd = {
        place: ours
        for place, (look, (ours, _)) in enumerate(zip(looks, pairs, strict=True))
        if ours is not None and _is_doubtful(look, search, ours.value)
    }
    longer = [
        place
        for place, ours in odd.items()
        if abs(ours.value - 1) >= CHANCE or not _is_contrary(looks[place].shift, search, ours.value)
    ]
    found = _simulate_longer([looks[place] for place in longer], search, pool, watch)
    known = dict(zip(longer, found, strict=True))
    return [
        (known.get(place) or _without_effect_of(look.shift, ours), theirs)
        if place in odd
        else (ours, theirs)
        for place, (look, (ours, theirs)) in enumerate(zip(looks, pairs, strict=True))
    ]


def _without_effect_of(shift: Shift, ratios: Effect | None) -> Effect:
    """Return ratios without an effect on the objective. Other lengths still change the time and dollars of a step."""
    return SAME if ratios is None or shift.kind != "lengths" else ratios._replace(value=1.0)


def _is_doubtful(look: _Look, search: Search, ratio: float) -> bool:
    """Return whether an effect is in the wrong direction, or small where no direction is known."""
    if look.shift.kind == "lengths" and _is_per_token(search):
        own = search.space.candidate(look.chosen_index)
        return _overlaps(search, look.chosen_index, own) and abs(ratio - 1) < UNSURE
    return _is_contrary(look.shift, search, ratio)


def _is_per_token(search: Search) -> bool:
    return search.space.run.plan.objective == "cost-per-million-tokens"


def _is_contrary(shift: Shift, search: Search, ratio: float) -> bool:
    """Return whether an effect has the direction that only chance or a rare interaction explains.

    The cost of a token may rise or fall with the lengths.
    """
    if shift.kind == "price":
        return False
    rises = (ratio - 1) * (shift.factor - 1) > 0
    if shift.kind == "lengths":
        return not rises and not _is_per_token(search)
    return rises


def _simulate_longer(
    looks: Sequence[_Look], search: Search, pool: Executor, watch: Callable[[], None]
) -> list[Effect]:
    """Return the ratios of the chosen plan over more steps; none for an effect in the wrong direction that may be chance."""
    if not looks:
        return []
    run, own = search.space.run, search.space.candidate(looks[0].chosen_index)
    steps = 2 * STREAMING if _streams_ahead(looks[0], search) else FINAL_STEPS
    trials = {UNCHANGED: _in_portions(shortened(run, run.seed, steps), own)}
    for place, look in enumerate(looks):
        base = shortened(look.shift.run, run.seed, steps)
        trials[place] = _in_portions(base, look.chosen or own)
    speeds = search.speeds_of(pool, trials, watch, search.deadline)
    before, found = speeds.get(UNCHANGED), []
    for place, look in enumerate(looks):
        after, ratios = speeds.get(place), SAME
        if isinstance(before, Speed) and isinstance(after, Speed):
            ratios = _ratios(look, search, before, after, look.chosen or own)
            is_odd = _is_contrary(look.shift, search, ratios.value)
            if is_odd and not is_beyond_chance(after, before, ratios.value):
                ratios = _without_effect_of(look.shift, ratios)
        found.append(ratios)
    return found


# Verdicts -----------------------------------------------------------------------------------------


def _verdict(
    look: _Look,
    search: Search,
    spend: Spend[float],
    ours: Effect | None,
    theirs: Effect | None,
) -> Verdict:
    """Compare the chosen plan with the one that is better by estimate."""
    own = search.space.candidate(look.chosen_index)
    other = None if look.other is None else search.space.candidate(look.other)
    shift, is_estimate = look.shift, ours is None
    if look.chosen is None:
        found = theirs or SAME
        return Verdict(
            shift=shift,
            value=found.value,
            still_fits=False,
            other=None if theirs is None else other,
            other_value=found.value,
            is_used=True,
            seconds=found.seconds,
            dollars=found.bill,
        )
    breaks = () if ours is None else _broken(search, spend, ours)
    if other is None or theirs is None or not _is_better(search, spend, ours, theirs, breaks):
        other, theirs = None, None
    found = ours or Effect(look.ratio, look.seconds, look.seconds, look.seconds)
    return Verdict(
        shift=shift,
        value=found.value,
        still_fits=True,
        other=other,
        other_value=found.value if theirs is None else theirs.value,
        is_used=any(shift.touches(plan) for plan in (own, other) if plan is not None),
        is_estimate=is_estimate,
        breaks=breaks,
        seconds=found.seconds,
        dollars=found.bill,
        effect=ours,
        other_effect=theirs,
    )


def _is_better(
    search: Search,
    spend: Spend[float],
    ours: Effect | None,
    theirs: Effect,
    breaks: tuple[str, ...],
) -> bool:
    """Return whether another plan, as simulated, is to be chosen after a change."""
    if ours is None or _broken(search, spend, theirs):
        return False
    if search.space.run.plan.takes_faster and theirs.seconds > NOT_SLOWER * ours.seconds:
        return False
    return bool(breaks) or is_ahead(theirs.value, ours.value)


def is_ahead(other: float, chosen: float) -> bool:
    """Return whether a plan's objective is low enough to choose it instead of another."""
    return other <= IS_AHEAD * chosen


def _broken(search: Search, before: Spend[float], after: Effect) -> tuple[str, ...]:
    """Return the keys of the limits that a plan exceeds after a change, and the chosen plan not before."""
    spend = spend_after(search, before, after)
    return tuple(
        f"plan.{limit.key}"
        for limit in limits_of(search.space.run.plan)
        if spend[limit.place] > limit.most >= before[limit.place]
    )

"""Plan a run: choose the GPUs of each side, their parallelism and the mode, and report the cost with its error.

This is `streamrl plan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.hardware.profiles import price_of
from streamrl.hardware.resolved import resolve
from streamrl.record.steady_state import Speed
from streamrl.runfile.checks import check_run
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.failure_rates import expected_losses
from streamrl.runfile.keys import TRAINER, pool_key
from streamrl.runfile.plan_config import ObjectiveName, PlanConfig, limits_by_key
from streamrl.runfile.roles_config import LendingConfig, RolloutConfig
from streamrl.runfile.staleness_study import read_staleness_model
from streamrl.runfile.units import Duration
from streamrl.sim.costs.corrections import framework_sources
from streamrl.sim.parallel import worker_pool
from streamrl.sim.planner.alternatives import (
    find_on_partial_nodes,
    find_run_by_nothing,
    find_with_fuller_memory,
)
from streamrl.sim.planner.bottleneck import RelaxedLimit, find_binding, find_gains
from streamrl.sim.planner.choice_after import NewChoice, choices_after, with_choices
from streamrl.sim.planner.disaggregation import (
    planned_disaggregation,
    with_prefill_replicas,
    without_prefill_replicas,
)
from streamrl.sim.planner.episode_worth import find_worths
from streamrl.sim.planner.first_answer import EstimatedPlan
from streamrl.sim.planner.first_plan import first_plan_of
from streamrl.sim.planner.layouts import rents_whole_nodes
from streamrl.sim.planner.lending import planned_borrowing, planned_lending, with_borrowing
from streamrl.sim.planner.modes import Scope, keep_to_framework
from streamrl.sim.planner.objective import UNITS, check_free_plans, faster_goal
from streamrl.sim.planner.options import (
    JUST_ABOVE,
    MUCH_FASTER,
    WORTH_MORE,
    Options,
    OtherRows,
    describe_rows,
    numbers_of,
)
from streamrl.sim.planner.plan import (
    RUN_BY_NOTHING,
    Change,
    Figure,
    OverMemoryLimit,
    Plan,
    PlanFrame,
    PlannedFramework,
    WhatIf,
    Worth,
)
from streamrl.sim.planner.plan_description import (
    PlanDescription,
    at_worst_text,
    drafts_text,
    objective_band,
    partial_nodes,
    whole_run_of,
)
from streamrl.sim.planner.plan_settings import describe, own_candidate, settings_of
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.sensitivity import Judgement, Verdict, judge, trials_after_changes
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.spot_savings import spot_savings
from streamrl.sim.planner.take import digest_of, with_restarts
from streamrl.sim.planner.trial import Unfinished, open_trial
from streamrl.sim.planner.what_if import make_grid
from streamrl.targets.verdicts import TARGETS, verdict_of

if TYPE_CHECKING:
    from pandas import DataFrame

Result = TypeVar("Result")
MOST_RETURNS = 3
"""Most times that finalists are compared again because a what-if suggests other plans."""
FASTEST_MIXED = 4
"""Plans with two kinds of replicas that are simulated for the row of the fastest plan."""
NOT_JUDGED = Judgement([], {}, [])
"""The sensitivity of a plan if no time is left for it."""


class Planned(NamedTuple):
    """The result of planning."""

    run: Run
    """The run file with the allocation filled in."""
    plan: Plan

    def __repr__(self) -> str:
        return repr(self.plan)

    def _repr_html_(self) -> str:
        """Return the plan as a table for a notebook."""
        return self.plan._repr_html_()

    def to_frame(self, what: PlanFrame = "options") -> DataFrame:
        """Return a data frame of the plan; see `Plan.to_frame`."""
        return self.plan.to_frame(what)


def make_plan(
    run: Run,
    watch: Callable[[int, str], None] = lambda *_: None,
    *,
    shows_own: bool = True,
    first: EstimatedPlan | None = None,
) -> Planned:
    """Choose a plan among everything that a run's offer and its section `[plan]` leave open, on all cores.

    Faults that the run file plans are left out of the search and of the plan's file. Replicas of two
    kinds are not searched for episodes of several turns. Prefill replicas of the run file are not
    searched either: the chosen plan is simulated once more with them.

    Args:
        run: the run file.
        watch: called with the number of finished simulations and the name of the current phase.
            Phases are: simulating, finalists, faster plans, the chosen plan, what if, options,
            near plans.
        shows_own: whether the layout of the run file is a row of the answer.
        first: the plan that a first answer recommended, to say what became of it.

    Raises:
        ValueError: no plan fits, or none is within budget. The error names the constraint.
        RuntimeError: no plan reaches the run's last step.
        RunError: the run file has several trainers, or a pool has no price.
    """
    _check_trainers(run.num_trainers)
    _check_prices(run.cluster.pools, run.plan.objective)
    started_at = time.perf_counter()
    mixes = run.plan.mixes_replicas and run.environment is None
    plan = replace(run.plan, mixes_replicas=mixes)
    rollout, wanted = without_prefill_replicas(run.rollout), run.rollout
    trainer = replace(run.trainer, resize=(), borrows=False)
    constant = replace(run, faults=(), lending=None, rollout=rollout, trainer=trainer)
    scope = keep_to_framework(replace(constant, plan=plan))
    search = Search.open(scope.run, started_at + run.plan.time_limit)
    check_free_plans(run.cluster.pools, run.plan, search.space.prices)
    with worker_pool() as pool:
        sections = run.rollout, run.trainer, run.policies, run.sync, run.verifier
        has_own = shows_own and not wanted.prefill_kinds
        own = own_candidate(*sections, run.environment) if has_own else None
        progress = _Progress(watch)
        planned = _plan(
            scope,
            search,
            pool,
            progress,
            started_at,
            own,
            first,
            run.lending,
            run.trainer.borrows,
            wanted,
        )
    return planned._replace(plan=replace(planned.plan, offer=digest_of(run)))


def _check_trainers(num_trainers: int) -> None:
    if num_trainers > 1:
        text = f"plan chooses for one trainer, the run file has {num_trainers}"
        raise RunError(TRAINER, num_trainers, text=text)


def _check_prices(pools: Mapping[str, PoolConfig], objective: ObjectiveName) -> None:
    """Raise `RunError` if the objective needs dollars and a pool has no price.

    Own GPUs need no price beside others that have one; see `check_free_plans`.
    """
    has_price = any(map(price_of, pools.values()))
    for name, pool in pools.items():
        is_exempt = pool.owned and has_price
        if objective != "step-time" and not price_of(pool) and not is_exempt:
            key = pool_key(name, "price")
            text = (
                f"{key} is 0, and plans that cost nothing cannot be told apart by "
                f"plan.objective={objective!r}: set a price, or plan for 'step-time'"
            )
            raise RunError(key, 0.0, Bounds(0.0, excludes_least=True), text)


def _plan(
    scope: Scope,
    search: Search,
    pool: Executor,
    progress: _Progress,
    started_at: float,
    own: Candidate | None,
    first: EstimatedPlan | None,
    lending: LendingConfig | None,
    borrows: bool,
    wanted: RolloutConfig,
) -> Planned:
    run = scope.run
    search.run(pool, progress.on("simulating"))
    race = Race(search)
    if run.plan.takes_faster:
        _look_for_faster(search, race, pool, progress)
    chosen, judged = _choose(search, race, pool, progress)
    first_chosen, worths = chosen, _start_worths(race, chosen, pool, progress)
    _look_for_fastest(search, pool, progress)
    _look_for_cheapest(search, pool, progress)
    _look_for_much_faster(search, chosen, pool, progress)
    _look_for_just_dearer(search, race, chosen, pool, progress)
    named = [each for each in (own, None if first is None else first.candidate) if each is not None]
    chosen, judged = _settle(search, race, pool, progress, chosen, judged, named)
    search.aim_at(run.plan)
    whole_nodes = _whole_nodes(run.plan, run.cluster.pools)
    if chosen != first_chosen:
        worths = _start_worths(race, chosen, pool, progress)
    near = _look_near(search, race, chosen, whole_nodes, pool, progress.on("near plans"))
    options, others = Options(search, race, chosen), OtherRows(race, chosen)
    if own is not None:
        others.add("your own file", own)
    if isinstance(near.parts, str):
        others.leave_out("on parts of a node", near.parts)
    elif near.parts is not None:
        others.add("on parts of a node", near.parts)
    if isinstance(near.run_by_nothing, Candidate):
        others.add(RUN_BY_NOTHING, near.run_by_nothing)
    rows = options.rows(others.simulate(pool, progress.on("options")))
    offered = [row.index for row in rows[1:] if row.search is search and row.is_offered]
    changed = choices_after(search, race, chosen, judged, offered, pool, progress.on("what if"))
    judged = with_choices(judged, changed)
    objective, (metrics, *_) = run.plan.objective, race.steady[chosen]
    planned = race.planned(chosen)
    losses = expected_losses(planned, metrics.step_time)
    planned = replace(planned, policies=with_restarts(planned.policies, losses))
    check_run(planned)
    lent = planned_lending(planned, lending, metrics.step_time, pool)
    if lent is not None and lent.is_taken:
        planned = replace(planned, lending=lending)
    borrowed = planned_borrowing(planned, borrows, metrics.step_time, pool)
    if borrowed is not None and borrowed.is_taken:
        planned = with_borrowing(planned)
    apart = planned_disaggregation(planned, wanted, metrics.step_time, pool)
    if apart is not None and apart.is_taken:
        planned = replace(
            planned, rollout=with_prefill_replicas(planned.rollout, apart.num_prefill)
        )
    spot = spot_savings(planned, pool)
    value, bounds = search.value_of(metrics), search.bounds()
    found, whole = (
        PlanDescription(search, race, chosen),
        whole_run_of(race.steady[chosen], run.cluster),
    )
    table, numbers = describe_rows(rows), numbers_of(rows, search)
    plan = Plan(
        whole_run=whole,
        allocation=found.chosen,
        objective=Figure(
            name=objective,
            value=value,
            median=median(map(search.value_of, race.steady[chosen])),
            unit=UNITS[objective],
            band=objective_band(search, chosen, race.steady[chosen]),
        ),
        candidates=len(search.space),
        systems=list(dict.fromkeys(mode.system for mode in search.space.modes)),
        whole_nodes=whole_nodes,
        partial_nodes=partial_nodes(run, planned),
        lending=lent,
        borrowing=borrowed,
        disaggregation=apart,
        spot=spot,
        limits=limits_by_key(run.plan),
        simulated=len(search.speeds),
        ruled_out=int((bounds > value).sum()),
        seconds=time.perf_counter() - started_at,
        open_gap=found.open_gap(),
        time_limit=float(run.plan.time_limit),
        steps_in_time=race.steps_in_time(chosen),
        why=found.why(),
        at_worst=at_worst_text(run.plan, table),
        options=table,
        just_dearer=options.just_dearer(rows),
        left_out=[*options.left_out(rows), *others.left_out],
        infeasible={reason: count for reason, count in search.space.cut.items() if count},
        binding=find_binding(search.estimates, chosen, metrics, near.gains, worths.result()),
        worths=worths.result(),
        lower_bound=min(value, float(bounds.min())),
        gap=max(0.0, value / float(bounds.min()) - 1),
        own_bound=min(value, float(bounds[chosen])),
        runners_up=found.runners_up(numbers),
        pareto=found.pareto(),
        sensitivity=[
            _change(search, chosen, verdict, value, numbers, changed.get(verdict.what))
            for verdict in judged.verdicts
        ],
        not_varied=judged.left_out,
        tighter=near.tighter,
        staleness_cost=run.plan.staleness_cost,
        staleness_model=_staleness_model(
            run.plan.staleness_study, run.algorithm.corrected_by or "none"
        ),
        stages=metrics.stages,
        tiers=metrics.tiers,
        uncertainty=metrics.uncertainty,
        steps=open_trial(search.base)[0].simulate.max_steps,
        what_if=near.what_if,
        framework=_of_framework(planned, scope),
        carried_by=[verdict_of(planned, name) for name in TARGETS],
        first=None if first is None else first_plan_of(search, race, chosen, first, numbers),
        drafts=drafts_text(run.rollout.speculative, run.plan.speculative),
    )
    return Planned(planned, plan)


class _Near(NamedTuple):
    """What is known of plans near the chosen one."""

    gains: Mapping[RelaxedLimit, float]
    """Share of a step that each relaxed limit saves."""
    tighter: OverMemoryLimit | None
    """A better plan with less free memory."""
    parts: Candidate | str | None
    """A plan on parts of a node, or why there is none; None if parts are not searched for."""
    run_by_nothing: Candidate | str | None
    """A better plan that no target can run, or why there is none; None if none is searched for."""
    what_if: WhatIf | None
    """The grid of the report page."""


def _look_near(
    search: Search,
    race: Race,
    chosen: int,
    whole_nodes: Sequence[str],
    pool: Executor,
    watch: Callable[[], None],
) -> _Near:
    """Look at plans near the chosen one: four tasks in threads, because each mostly waits for simulations.

    This is left out of plans with episodes, whose simulations take long; see `_start_worths`.
    """
    if search.space.run.environment is not None:
        return _Near({}, None, None, None, None)
    rivals = [search.speeds[i] for i in (chosen, race.cheapest) if i is not None]
    threads = ThreadPoolExecutor()
    try:
        gains = threads.submit(find_gains, race, chosen, pool, watch)
        tighter = threads.submit(find_with_fuller_memory, search, chosen, pool, watch)
        grid = threads.submit(make_grid, search, race, chosen, pool)
        parts: Candidate | str | None = None
        if whole_nodes:
            parts = find_on_partial_nodes(search, whole_nodes, rivals, pool, watch)
        unrun = find_run_by_nothing(search, rivals, pool, watch)
        return _Near(gains.result(), tighter.result(), parts, unrun, grid.result())
    finally:  # after Ctrl-C the workers end, and then these threads
        threads.shutdown(wait=False, cancel_futures=True)


def _start_worths(
    race: Race, chosen: int, pool: Executor, progress: _Progress
) -> Future[list[Worth]]:
    """Begin to find the effects of more of each resource of episodes; none for a plan without them.

    It is done in a thread beside the simulations of other plans, of which often one runs alone.
    """
    search = race.search
    if search.space.run.environment is None:
        return _in_thread(lambda: [])
    metrics, watch = race.steady[chosen][0], progress.on("near plans")
    return _in_thread(lambda: find_worths(search, chosen, metrics, pool, watch))


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Begin work in a thread of its own."""
    helper = ThreadPoolExecutor(1)
    result = helper.submit(work)
    helper.shutdown(wait=False)
    return result


def _whole_nodes(plan: PlanConfig, pools: Mapping[str, PoolConfig]) -> list[str]:
    """Return the pools of which plans rent only whole nodes by default; none if `[plan]` has the GPUs of a side."""
    return [name for name, pool in pools.items() if rents_whole_nodes(plan, pool)]


def _of_framework(planned: Run, scope: Scope) -> PlannedFramework | None:
    name = planned.framework.name
    if name is None:
        return None
    facts = list(framework_sources(resolve(planned)))
    return PlannedFramework(name=name, facts=facts, left_out=scope.left_out)


def _look_for_faster(search: Search, race: Race, pool: Executor, progress: _Progress) -> None:
    """Find the cheapest plan, then search for the fastest that costs little more.

    The search keeps the second objective as its goal.
    """
    cheapest = race.find_cheapest(pool, progress.on("finalists"))
    if search.is_late:
        return
    race.aim_at_faster(cheapest)
    search.run(pool, progress.on("faster plans"))


def _look_for_fastest(search: Search, pool: Executor, progress: _Progress) -> None:
    """Simulate plans that may be faster than all others, for the row of the fastest plan.

    Plans with two kinds of replicas come after the best ones of one kind.
    """
    if search.is_late:
        return
    plan, watch = search.space.run.plan, progress.on("options")
    with search.judged_by(replace(plan, objective="step-time", value_of_hour=0.0)):
        search.simulate(pool, search.next_round(pool), watch)
        if not search.is_late:
            search.simulate(pool, search.faster_mixed(pool, FASTEST_MIXED), watch)


def _look_for_cheapest(search: Search, pool: Executor, progress: _Progress) -> None:
    """Simulate plans that may be cheaper than all others, for the row of the cheapest plan.

    A search for cost has found it already.
    """
    plan = search.space.run.plan
    is_found = plan.objective not in ("step-time", "pareto") and not plan.value_of_hour
    if search.is_late or is_found or not search.space.prices.any():
        return
    with search.judged_by(replace(plan, objective="cost-per-million-tokens", value_of_hour=0.0)):
        search.simulate(pool, search.next_round(pool), progress.on("options"))


def _look_for_much_faster(search: Search, chosen: int, pool: Executor, progress: _Progress) -> None:
    """Simulate plans that may be the cheapest much faster than the chosen plan, for the row of a faster plan."""
    plan, limit = (
        search.space.run.plan,
        MUCH_FASTER * search.spend_of(search.speeds[chosen]).seconds,
    )
    if search.is_late or not search.space.prices.any():
        return
    goal = replace(plan, objective="cost-per-million-tokens", value_of_hour=0.0)
    with search.judged_by(replace(goal, deadline=Duration(limit), tolerance=0.0)):
        if search.ranking():  # else no plan may be so fast
            search.simulate(pool, search.next_round(pool), progress.on("options"))


def _look_for_just_dearer(
    search: Search, race: Race, chosen: int, pool: Executor, progress: _Progress
) -> None:
    """Simulate plans that may be much faster than the chosen plan and cost just more than `plan.tolerance` allows."""
    plan, cheapest = search.space.run.plan, race.cheapest
    if search.is_late or cheapest is None or not plan.takes_faster:
        return
    spends = [search.spend_of(search.speeds[index]) for index in (cheapest, chosen)]
    most = [spends[1].seconds / WORTH_MORE, *([plan.deadline] if plan.deadline else [])]
    wider = replace(plan, tolerance=JUST_ABOVE * plan.tolerance, deadline=Duration(min(most)))
    with search.judged_by(faster_goal(wider, spends[0].whole)):
        search.simulate(pool, search.next_round(pool), progress.on("options"))


def _choose(
    search: Search, race: Race, pool: Executor, progress: _Progress
) -> tuple[int, Judgement]:
    """Choose a plan and simulate it until its step time is known.

    A what-if may suggest a plan that is better already without the change. Then the finalists are
    compared again. A plan that is chosen again keeps its what-ifs.
    """
    judged_plan = None
    for _ in range(MOST_RETURNS):
        best = race.run(pool, progress.on("finalists"))
        ahead = _look_ahead(search, best, pool)
        chosen = race.settle(pool, best, progress.on("the chosen plan"))
        ahead.result()
        if chosen == judged_plan:
            break
        if search.is_late:
            return chosen, NOT_JUDGED
        judged, judged_plan = _judge(search, race, chosen, pool, progress), chosen
        named = (each.other for each in judged.verdicts)
        others = (search.space.find(other) for other in named if other is not None)
        new = [i for i in dict.fromkeys(others) if i is not None and i not in search.speeds]
        search.simulate(pool, new, progress.on("what if"))
        ranking = search.ranking()
        if not any(search.value(i) < search.value(chosen) for i in new if i in ranking):
            break
    return chosen, judged


def _look_ahead(search: Search, best: int, pool: Executor) -> Future[dict[int, Speed | Unfinished]]:
    """Simulate the what-ifs of a plan with episodes in a thread, while its steady state keeps one core busy for long."""
    if search.space.run.environment is None:
        return _in_thread(dict)
    trials = trials_after_changes(search, best)
    return _in_thread(lambda: search.speeds_of(pool, trials, lambda: None, search.deadline))


def _judge(
    search: Search, race: Race, chosen: int, pool: Executor, progress: _Progress
) -> Judgement:
    """Plan again for each what-if, by the objective of the run file."""
    with search.judged_by(search.space.run.plan):
        return judge(search, chosen, race.spend(chosen), pool, progress.on("what if"))


def _settle(
    search: Search,
    race: Race,
    pool: Executor,
    progress: _Progress,
    chosen: int,
    judged: Judgement,
    named: Sequence[Candidate],
) -> tuple[int, Judgement]:
    """Simulate the options and the named plans for as long as the chosen plan; choose one of them if it is better."""
    for _ in range(MOST_RETURNS):
        wanted = _wanted(search, race, chosen, named)
        search.simulate(pool, [i for i in wanted if i not in search.speeds], progress.on("options"))
        wanted = [i for i in wanted if i in search.speeds]
        is_last = not wanted
        if wanted:
            is_last = not race.stand_beside(pool, chosen, wanted, progress.on("options"))
        race.take_cheaper()
        better = race.better_beside(chosen)
        if better is not None:
            chosen = race.settle(pool, better, progress.on("the chosen plan"))
            judged = NOT_JUDGED if search.is_late else _judge(search, race, chosen, pool, progress)
        elif is_last:
            break
    return chosen, judged


def _wanted(search: Search, race: Race, chosen: int, named: Sequence[Candidate]) -> list[int]:
    """Return the options and named plans that have fewer simulated steps than the chosen plan."""
    places = [search.space.index_of(each) for each in named]
    with search.judged_by(search.space.run.plan):
        wanted = Options(search, race, chosen).wanted()
        if search.goal.objective == "pareto":
            wanted += PlanDescription(search, race, chosen).on_front()
    wanted += [place for place in places if place is not None]
    ended = (index for index in dict.fromkeys(wanted) if index not in search.unfinished)
    return [index for index in ended if not race.as_known(index)]


class _Progress:
    """Counts simulations, perhaps of several threads."""

    def __init__(self, watch: Callable[[int, str], None]) -> None:
        self._watch = watch
        self._done = 0
        self._lock = Lock()

    def on(self, what: str) -> Callable[[], None]:
        """Report the start of a phase, and return the function to call after each of its simulations."""
        self._watch(self._done, what)

        def tell() -> None:
            with self._lock:
                self._done += 1
                self._watch(self._done, what)

        return tell


def _change(
    search: Search,
    chosen: int,
    verdict: Verdict,
    value: float,
    numbers: Mapping[int, int],
    new: NewChoice | None,
) -> Change:
    """Describe a what-if: the effect on the chosen plan, and the plan to choose instead."""
    other, other_value = verdict.other, verdict.other_value
    if new is not None:
        other, other_value = search.space.candidate(new.plan), new.effect.value
    text = describe(search.space.run.cluster.pools, other or search.space.candidate(chosen))
    place = chosen if other is None else search.space.index_of(other)
    gain = 1 - other_value / verdict.value
    return Change(
        what=verdict.what,
        value=value * verdict.value,
        still_fits=verdict.still_fits,
        choice=text,
        is_other=other is not None,
        option=None if place is None else numbers.get(place),
        relation="" if new is None else new.relation,
        reason="" if new is None else new.reason,
        settings={} if other is None else settings_of(other),
        is_used=verdict.is_used,
        is_estimate=verdict.is_estimate,
        note=verdict.shift.note(search.space.run),
        breaks=list(verdict.breaks),
        gain=gain,
        time_ratio=verdict.seconds,
        cost_ratio=verdict.dollars,
    )


def _staleness_model(study: str | None, correction: str) -> str:
    """Return the line that a staleness study fitted for a correction; empty without a study."""
    return "" if study is None else str(read_staleness_model(study, correction))

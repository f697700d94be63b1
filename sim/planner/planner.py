"""`streamrl plan`: which GPUs, how many on each side, in which parallelism and mode, at what cost, how sure."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np

from sim.planner.binding import find_binding
from sim.planner.objective import UNITS, front, value_of, values_of
from sim.planner.search import MOST_SIMULATED, Search
from sim.planner.sensitivity import Verdict, judge, shifts
from sim.planner.space import Candidate
from sim.planner.trial import SEARCH_STEPS, Trial, metrics_of, run_all
from streamrl.record.metrics import SECONDS_PER_HOUR, Speed
from streamrl.record.paired import is_beyond_chance
from streamrl.report.plan import Change, Choice, Figure, Plan, PlannedSide, Runner, plan_text
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.trainers import TRAINER

RUNNERS_UP = 8
"""Plans that are named beside the chosen one."""


class Planned(NamedTuple):
    """What planning gives."""

    run: Run
    """The run file with the allocation filled in."""
    plan: Plan


def make_plan(run: Run, watch: Callable[[int, int, str], None] = lambda *_: None) -> Planned:
    """Choose among everything that a run's offer and its section `[plan]` leave open, on all cores.

    `watch` is told how many simulations are done, at most how many there will be, and what they are for.

    Raises:
        ValueError: nothing fits, or nothing within budget: the constraint is named.
        RunError: the run file has several trainers.
    """
    _check_trainers(run)
    started_at = time.perf_counter()
    search = Search.open(run)
    with ProcessPoolExecutor() as pool:
        return _plan(run, search, pool, _Progress(run, watch), started_at)


def _check_trainers(run: Run) -> None:
    if run.num_trainers > 1:
        text = f"plan chooses for one trainer, the run file has {run.num_trainers}"
        raise RunError(TRAINER, run.num_trainers, text=text)


def _plan(
    run: Run, search: Search, pool: Executor, progress: _Progress, started_at: float
) -> Planned:
    ranking = search.run(pool, progress.on("simulating"))
    chosen = ranking[0]
    verdicts = judge(search, chosen, pool, progress.on("what if"))
    trial = Trial(search.base, search.space.candidate(chosen))
    metrics = run_all(pool, metrics_of, [(chosen, trial)])[chosen]
    planned = search.space.candidate(chosen).apply(run)
    check_run(planned)
    objective = run.plan.objective
    value, bounds = value_of(objective, search.speeds[chosen][0]), _bounds(search)
    plan = Plan(
        allocation=_choice(search, chosen),
        objective=Figure(
            name=objective, value=value, median=search.value(chosen), unit=UNITS[objective]
        ),
        candidates=len(search.space),
        simulated=len(search.speeds),
        ruled_out=int((bounds > value).sum()),
        seconds=time.perf_counter() - started_at,
        infeasible={reason: count for reason, count in search.space.cut.items() if count},
        binding=find_binding(search.estimates, chosen, search.speeds[chosen][0]),
        lower_bound=float(bounds.min()),
        gap=value / float(bounds.min()) - 1,
        own_bound=float(bounds[chosen]),
        runners_up=[_runner(search, index, chosen) for index in ranking[1 : 1 + RUNNERS_UP]],
        pareto=_pareto(search),
        sensitivity=[_change(search, chosen, verdict) for verdict in verdicts],
        tiers=metrics.tiers,
        uncertainty=metrics.uncertainty,
        steps=min(run.simulate.max_steps, SEARCH_STEPS),
    )
    return Planned(planned, plan)


class _Progress:
    """Counts simulations."""

    def __init__(self, run: Run, watch: Callable[[int, int, str], None]) -> None:
        plan = run.plan
        self._most = MOST_SIMULATED + (plan.finalists + 1) * plan.seeds
        self._most += 2 * sum(1 for _ in shifts(run))
        self._watch = watch
        self._done = 0

    def on(self, what: str) -> Callable[[], None]:
        """Return what is to be called after each simulation."""

        def tell() -> None:
            self._done += 1
            self._watch(self._done, self._most, what)

        return tell


def _bounds(search: Search) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the objective that no steady step of each plan goes below."""
    estimates, objective = search.estimates, search.space.run.plan.objective
    bounds = estimates.bound()
    return values_of(objective, bounds, search.space.prices, estimates.tokens)


def _choice(search: Search, index: int) -> Choice:
    """Describe a simulated plan."""
    candidate, speeds = search.space.candidate(index), search.speeds[index]
    ranges = [_range(value_of(search.space.run.plan.objective, speed), speed) for speed in speeds]
    return Choice(
        rollout=_side(search.space.run, candidate, "rollout"),
        trainer=_side(search.space.run, candidate, "trainer"),
        settings=settings_of(candidate),
        dollars_per_hour=float(search.space.prices[index]) * SECONDS_PER_HOUR,
        step_time=speeds[0].step_time,
        step_time_interval=speeds[0].step_time_interval,
        median_step_time=speeds[0].median_step_time,
        steps=len(speeds[0].step_times),
        note=speeds[0].note,
        cost_per_step=speeds[0].cost_per_step,
        cost_per_million_tokens=speeds[0].cost_per_million_tokens,
        least=min(least for least, _ in ranges),
        most=max(most for _, most in ranges),
        num_seeds=len(ranges),
        estimate=float(search.estimates.estimate().step[index]),
    )


def _range(value: float, speed: Speed) -> tuple[float, float]:
    """Return what the interval of the step time leaves open of an objective that grows with it."""
    if speed.step_time_interval is None:
        return value, value
    least, most = (seconds / speed.step_time for seconds in speed.step_time_interval)
    return value * least, value * most


def _runner(search: Search, index: int, chosen: int) -> Runner:
    """Describe a plan that was not chosen, compared on the same prompts and over as many steps."""
    behind = search.behind(index, chosen)
    (one, *_), (other, *_) = search.pair(index, chosen)
    longer = search.speeds[chosen][0].step_time / other.step_time
    return Runner(
        choice=_scaled(_choice(search, index), one, longer),
        value=search.value(index),
        behind=behind,
        is_beyond_chance=is_beyond_chance(one, other, 1 + behind),
    )


def _scaled(choice: Choice, speed: Speed, factor: float) -> Choice:
    """Return a plan with the seconds and dollars that its paired run stands for, as the chosen plan's are known.

    A few steps from a start are shorter than those of a steady state, for both plans alike.
    """
    return msgspec.structs.replace(
        choice,
        step_time=speed.step_time * factor,
        step_time_interval=None,
        median_step_time=speed.median_step_time * factor,
        cost_per_step=speed.cost_per_step * factor,
        cost_per_million_tokens=speed.cost_per_million_tokens * factor,
    )


def _side(run: Run, candidate: Candidate, section: str) -> PlannedSide:
    side = candidate.replicas if section == "rollout" else candidate.trainer
    degrees = {key: int(value) for key, value in side._asdict().items() if key not in ("pool",)}
    return PlannedSide(
        pool=side.pool,
        gpu=run.cluster.pools[side.pool].gpu,
        num_gpus=side.num_gpus,
        degrees=degrees,
    )


def settings_of(candidate: Candidate) -> dict[str, str | int | bool]:
    """Return the keys of the run file that a plan sets."""
    mode = candidate.mode
    found: dict[str, str | int | bool | None] = {
        **{f"rollout.{key}": value for key, value in candidate.replicas._asdict().items()},
        **{f"trainer.{key}": value for key, value in candidate.trainer._asdict().items()},
        "policies.system": mode.system,
        "policies.max_staleness": mode.max_staleness,
        "policies.dispatch": mode.dispatch,
        "sync.mode": mode.sync_mode,
    }
    return {key: value for key, value in found.items() if value is not None}


def _pareto(search: Search) -> list[Choice]:
    """Return the simulated plans that none beats in seconds and dollars of a step, the fastest first."""
    if search.space.run.plan.objective != "pareto":
        return []
    indices = search.ranking()
    speeds = [search.speeds[i][0] for i in indices]
    points = [(speed.step_time, speed.cost_per_step) for speed in speeds]
    return [_choice(search, indices[place]) for place in front(points)]


def _change(search: Search, chosen: int, verdict: Verdict) -> Change:
    other = verdict.other
    text = describe(search.space.run, other or search.space.candidate(chosen))
    gain = 1 - verdict.other_value / verdict.value
    return Change(
        what=verdict.what,
        value=verdict.value,
        still_fits=verdict.still_fits,
        choice=text,
        is_other=other is not None,
        gain=gain,
    )


def describe(run: Run, candidate: Candidate) -> str:
    """Return a plan in a line."""
    rollout, trainer = (_side(run, candidate, name) for name in ("rollout", "trainer"))
    return plan_text(rollout, trainer, settings_of(candidate))

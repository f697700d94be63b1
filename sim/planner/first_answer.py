"""Answer within seconds: the cheapest plan, the fastest, and the fastest that costs little more, by estimates.

Estimates are closed forms, corrected by a few simulated steps of the plans that are named. `make_plan` then compares
plans by simulation.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.record.steady_state import Speed
from streamrl.record.whole_run import steps_for_one
from streamrl.runfile.config import Run
from streamrl.sim.planner.objective import spend_of
from streamrl.sim.planner.plan_description import describe
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate

Floats = NDArray[np.float64]
TOLERANCE = 0.1
"""Share by which the recommended plan may cost more than the cheapest."""
CHEAPEST, FASTER, FASTEST = "cheapest", "fastest within 10 % of it", "fastest"


class EstimatedPlan(NamedTuple):
    """One plan of a first answer."""

    what: str
    choice: str
    """Who generates and who trains, in a line."""
    seconds: float
    """Of the whole run."""
    dollars: float
    """Of the whole run."""
    step_time: float
    """Seconds of a step."""
    simulated_steps: int
    """Steps of it that were simulated; 0 where its figures are closed forms alone."""
    candidate: Candidate


class FirstAnswer(NamedTuple):
    """The plans that a decision is between, before the search."""

    plans: list[EstimatedPlan]
    num_plans: int
    """Plans that fit, all of which were estimated."""
    seconds: float
    """That the answer took."""

    @property
    def recommended(self) -> EstimatedPlan:
        """The fastest plan that costs little more than the cheapest."""
        return next(plan for plan in self.plans if plan.what == FASTER)


def first_answer(run: Run, pool: Executor, most_seconds: float) -> FirstAnswer:
    """Estimate all plans of a run's offer; simulate a few steps of the plans to name while time is left.

    Raises:
        ValueError: nothing fits.
    """
    began = time.perf_counter()
    search = Search.open(run, began + most_seconds)
    search.settle(pool, [])
    while True:
        named = _name(search)
        new = [
            i
            for i in dict.fromkeys(named.values())
            if i not in search.speeds and i not in search.unfinished
        ]
        if not new or search.is_late:
            break
        search.simulate(pool, new, lambda: None)
    plans = [_estimated(search, what, index) for what, index in named.items()]
    return FirstAnswer(plans, len(search.space), time.perf_counter() - began)


def _name(search: Search) -> dict[str, int]:
    """Return the plan of each kind, by what was simulated of it, else by estimate."""
    seconds, dollars = _figures(search)
    usable = np.ones(len(seconds), dtype=bool)
    usable[list(search.unfinished)] = False
    cheapest = int(np.where(usable, dollars, np.inf).argmin())
    little_more = usable & (dollars <= (1 + TOLERANCE) * dollars[cheapest])
    return {
        CHEAPEST: cheapest,
        FASTER: int(np.where(little_more, seconds, np.inf).argmin()),
        FASTEST: int(np.where(usable, seconds, np.inf).argmin()),
    }


def _figures(search: Search) -> tuple[Floats, Floats]:
    """Return seconds and dollars of a step of every plan, as if no rollout was stale."""
    space, estimates = search.space, search.estimates
    seconds = estimates.estimate().step.copy()
    dollars = seconds * space.prices + estimates.egress(seconds)
    steps = steps_for_one(space.run.plan, np.zeros(len(seconds)))
    for index, speed in search.speeds.items():
        seconds[index], dollars[index] = speed.step_time, speed.cost_per_step
    return seconds * steps, dollars * steps


def _estimated(search: Search, what: str, index: int) -> EstimatedPlan:
    run, candidate = search.space.run, search.space.candidate(index)
    seconds, dollars = _figures(search)
    speed = search.speeds.get(index)
    whole_seconds, whole_dollars = _whole(run, speed, float(seconds[index]), float(dollars[index]))
    return EstimatedPlan(
        what=what,
        choice=describe(run.cluster.pools, candidate),
        seconds=whole_seconds,
        dollars=whole_dollars,
        step_time=float(seconds[index]),
        simulated_steps=0 if speed is None else len(speed.step_times),
        candidate=candidate,
    )


def _whole(run: Run, speed: Speed | None, seconds: float, dollars: float) -> tuple[float, float]:
    """Return seconds and dollars of all steps."""
    if speed is None:
        return run.algorithm.steps * seconds, run.algorithm.steps * dollars
    spend = spend_of(run, speed)
    return spend.seconds, spend.whole

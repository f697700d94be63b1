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

from streamrl.runfile.config import Run
from streamrl.sim.planner.objective import decide
from streamrl.sim.planner.plan_description import describe
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Candidate

Floats = NDArray[np.float64]


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
    """The cheapest, the fastest that costs little more, and the fastest."""
    num_plans: int
    """Plans that fit, all of which were estimated."""
    seconds: float
    """That the answer took."""

    @property
    def recommended(self) -> EstimatedPlan:
        """The fastest plan that costs little more than the cheapest."""
        return self.plans[1]


def first_answer(run: Run, pool: Executor, most_seconds: float) -> FirstAnswer:
    """Estimate all plans of a run's offer; simulate a few steps of the plans to name while time is left.

    Raises:
        ValueError: nothing fits.
    """
    began = time.perf_counter()
    search = Search.open(run, began + most_seconds)
    while True:
        search.refine(pool, lambda *_: [*dict.fromkeys(_name(search, _figures(search)).values())])
        figures = _figures(search)
        named = _name(search, figures)
        new = [i for i in dict.fromkeys(named.values()) if i not in search.speeds]
        if not new or search.is_late:
            break
        search.simulate(pool, new, lambda: None)
    plans = [_estimated(search, what, index, figures) for what, index in named.items()]
    return FirstAnswer(plans, len(search.space), time.perf_counter() - began)


class _Figures(NamedTuple):
    """Seconds and dollars of a step of every plan: simulated where they are, else estimated."""

    seconds: Floats
    dollars: Floats


def _figures(search: Search) -> _Figures:
    seconds = search.estimates.estimate().step.copy()
    dollars = seconds * search.space.prices + search.estimates.egress(seconds)
    for index, speed in search.speeds.items():
        seconds[index], dollars[index] = speed.step_time, speed.cost_per_step
    return _Figures(seconds, dollars)


def _name(search: Search, figures: _Figures) -> dict[str, int]:
    """Return the plan of each kind, among those that keep the limits, where any does, and that finish."""
    is_out = search.over_limits() > 1
    is_out &= not is_out.all()
    is_out[list(search.unfinished)] = True
    seconds, dollars = (np.where(is_out, np.inf, each) for each in figures)
    tolerance = search.space.run.plan.tolerance
    cheapest, faster, fastest = decide(seconds, dollars, tolerance)
    return {
        "cheapest": cheapest,
        f"fastest within {tolerance:.0%} of it": faster,
        "fastest": fastest,
    }


def _estimated(search: Search, what: str, index: int, figures: _Figures) -> EstimatedPlan:
    speed, candidate = search.speeds.get(index), search.space.candidate(index)
    steps = search.space.run.algorithm.steps
    whole = steps * float(figures.seconds[index]), steps * float(figures.dollars[index])
    if speed is not None:
        spend = search.spend_of(speed)
        whole = spend.seconds, spend.whole
    return EstimatedPlan(
        what=what,
        choice=describe(search.space.run.cluster.pools, candidate),
        seconds=whole[0],
        dollars=whole[1],
        step_time=float(figures.seconds[index]),
        simulated_steps=0 if speed is None else len(speed.step_times),
        candidate=candidate,
    )

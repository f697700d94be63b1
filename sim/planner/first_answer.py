"""Find the cheapest plan, the fastest, and the fastest that costs little more, within seconds.

The figures are closed forms. A few simulated steps of the reported plans correct them. `make_plan`
then compares plans by simulation.
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
    """One line with the GPUs that generate and train."""
    seconds: float
    """Seconds of the whole run."""
    dollars: float
    """Dollars of the whole run."""
    step_time: float
    """Seconds of a step."""
    simulated_steps: int
    """Steps that were simulated; 0 if all its figures are closed forms."""
    candidate: Candidate


class FirstAnswer(NamedTuple):
    """The plans to decide between, before the search."""

    plans: list[EstimatedPlan]
    """The cheapest plan, the fastest that costs little more, and the fastest."""
    num_plans: int
    """Plans that fit. All of them were estimated."""
    seconds: float
    """Seconds until this answer was ready."""

    @property
    def recommended(self) -> EstimatedPlan:
        """The fastest plan that costs little more than the cheapest."""
        return self.plans[1]


def first_answer(run: Run, pool: Executor, most_seconds: float) -> FirstAnswer:
    """Estimate all plans of a run's offer, and simulate a few steps of the best ones while time is left.

    Raises:
        ValueError: no plan fits.
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
    """Seconds and dollars of a step of every plan: simulated if known, else estimated."""

    seconds: Floats
    dollars: Floats


def _figures(search: Search) -> _Figures:
    seconds = search.estimates.estimate().step.copy()
    dollars = seconds * search.space.prices + search.estimates.egress(seconds)
    for index, speed in search.speeds.items():
        seconds[index], dollars[index] = speed.step_time, speed.cost_per_step
    return _Figures(seconds, dollars)


def _name(search: Search, figures: _Figures) -> dict[str, int]:
    """Return the best plan of each kind. Plans that exceed a limit count only if all do; unfinished plans never."""
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

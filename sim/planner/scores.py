"""What every plan of a space may take, by the objective: bounds, estimates corrected by simulations, and what breaks a limit."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamrl.record.speed import Speed
from streamrl.record.whole_run import steps_for_one
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.planner.bound import Estimates, StageSeconds
from streamrl.sim.planner.limits import Spend, excess, keeps_limits, limits_of
from streamrl.sim.planner.objective import distance_to_front, value_of
from streamrl.sim.planner.ranking import classes_of
from streamrl.sim.planner.simplicity import complexities
from streamrl.sim.planner.space import Space

Floats = NDArray[np.float64]
SURPRISE, REMEMBERED = {"ahead": 0.85, "streams": 0.95, "whole": 0.97}, 8
"""How far below its estimate a plan may come before simulations of its system tell, and how many of those count."""
LEAST_LAG = 0.4
"""Share of the bound on staleness that rollouts of a system which generates ahead have on average, at least."""
SLACK = 0.005
"""What a plan's idle stages count, so that of plans that are alike the one with most room comes first."""


@dataclass(kw_only=True)
class Scores:
    """Judges the plans of a space without simulating them."""

    space: Space
    estimates: Estimates
    _over: dict[SystemName, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )
    """Simulated steps over their estimates, the last ones of each system."""

    def __post_init__(self) -> None:
        """Tell apart what the plans of the space are."""
        self._take(self.space)

    def _take(self, space: Space) -> None:
        """Take a space, and count what there is to set up for each of its plans."""
        self.space = space
        self.complexity = complexities(space)
        bounds = np.array([system.staleness_bound for system in space.systems])
        self._lags: Floats = LEAST_LAG * bounds[space.of_mode]
        """Versions that the rollouts of each plan are behind on average, at least."""
        self._class_codes = classes_of(space)
        """Of each plan a number for its system and pools."""

    def value_of(self, speed: Speed) -> float:
        """Return the objective of a simulation."""
        return value_of(self.space.run.plan, speed)

    def bounds(self) -> Floats:
        """Return the objective that no steady step of each plan goes below."""
        return self.estimates.values(self.estimates.bound())

    def scores(self) -> Floats:
        """Estimate the least objective that every plan may have; what breaks a budget comes after all others."""
        stages = self.estimates.estimate()
        steps = self._least_steps(stages)
        if self.space.run.plan.objective == "pareto":
            values = distance_to_front(steps, self._dollars(steps))
        else:
            values = self.estimates.values(steps, self._lags)
        values = values * (1 + SLACK * (stages.training + stages.sync) / stages.step)
        over = self._over_limits(steps)
        return np.where(over > 1, values.max() * over, values)

    def _least_steps(self, stages: StageSeconds) -> Floats:
        """Return the least seconds that a step of every plan may take."""
        steps: Floats = stages.step * self._least_over()[self.space.of_mode]
        return steps

    def _dollars(self, steps: Floats) -> Floats:
        return steps * self.space.prices + self.estimates.egress(steps)

    def _over_limits(self, steps: Floats) -> Floats:
        """Return how many times as much as it may every plan takes whose steps take so long; up to 1 it keeps all limits."""
        run = self.space.run
        if not limits_of(run):
            return np.zeros(len(self.space))
        dollars = self._dollars(steps)
        num_steps = run.algorithm.steps * steps_for_one(run.plan, self._lags)
        per_day = dollars / steps * SECONDS_PER_DAY
        spend = Spend(dollars, per_day, num_steps * dollars, num_steps * steps)
        found: Floats = np.asarray(excess(run, spend))
        return found

    def _least_over(self) -> Floats:
        """Return, by mode, the share of its estimate that a simulated step may take."""
        return np.array([self._least_of(mode.system, i) for i, mode in enumerate(self.space.modes)])

    def _least_of(self, name: SystemName, mode: int) -> float:
        system = self.space.systems[mode]
        kind = "whole" if system.streaming == "whole-batch" else "streams"
        if system.staleness_bound and not system.halts_for_sync:
            kind = "ahead"
        seen = self._over[name]
        if len(seen) < REMEMBERED // 2:
            return min(SURPRISE[kind], *seen, 1.0)
        return min(1.0, *seen)

    def is_affordable(self, speed: Speed) -> bool:
        """Whether a simulated plan keeps to the budgets and the deadline of `[plan]`."""
        return keeps_limits(self.space.run, speed)

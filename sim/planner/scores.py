"""Score every plan without simulating it, by bounds, corrected estimates and complexity."""

from __future__ import annotations

from collections import defaultdict, deque
from copy import copy
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from streamrl.engine.presets import System
from streamrl.record.billing import rented_time
from streamrl.record.steady_state import Speed
from streamrl.record.whole_run import steps_for_one, whole_time
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.planner.estimates import Estimates, StageSeconds
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import Mode
from streamrl.sim.planner.objective import (
    Spend,
    distance_to_front,
    excess,
    keeps_limits,
    limits_of,
    spend_of,
    value_of,
)
from streamrl.sim.planner.space import Space

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
LOOKED_AT = 4000
"""Plans from which a round chooses, the best by estimate."""


def classes_of(space: Space) -> Indices:
    """Return a class number for each plan. Plans of one class have the same system and pools."""
    kinds = [(mode.system, mode.rewards and mode.rewards.pool) for mode in space.modes]
    systems = {kind: place for place, kind in enumerate(kinds)}
    codes = np.array([systems[kind] for kind in kinds])[space.of_mode]
    sides: tuple[tuple[list[tuple[str, ...]], NDArray[np.int32]], ...] = (
        ([each.pools for each in space.replicas], space.of_replicas),
        ([(each.pool,) for each in space.trainers], space.of_trainer),
    )
    for pools, of_side in sides:
        names = {name: place for place, name in enumerate(dict.fromkeys(pools))}
        codes = codes * len(names) + np.array([names[name] for name in pools])[of_side]
    return codes


def best_of(scores: Floats) -> list[int]:
    """Return the indices of the lowest scores, in rising order."""
    count = min(LOOKED_AT, len(scores))
    places = np.argpartition(scores, count - 1)[:count]
    order: list[int] = places[np.argsort(scores[places], kind="stable")].tolist()
    return order


def within(order: list[int], scores: Floats, reach: float) -> list[int]:
    """Return the plans whose score is within a factor `reach` of the best."""
    return [index for index in order if scores[index] <= reach * scores[order[0]]]


Counts = NDArray[np.int64]


def complexities(space: Space) -> Counts:
    """Count the features to set up for each plan of a space.

    Each of these counts as one: a parallel degree above one, ZeRO 3, offloading, a further pool, a
    further kind of replica. Each step of staleness, streaming, a length ranker, delta sync and
    speculative decoding count too.
    """
    replicas = np.array([_of_replicas(each) for each in space.replicas])
    trainers = np.array([_of_trainer(each) for each in space.trainers])
    modes = np.array(list(map(_of_mode, space.modes, space.systems)))
    generating = [each.pools for each in space.replicas]
    pools = np.array(
        [[len({*names, train.pool}) for train in space.trainers] for names in generating]
    )
    sides = replicas[space.of_replicas] + trainers[space.of_trainer]
    apart = pools[space.of_replicas, space.of_trainer] - 1
    counted: Counts = sides + modes[space.of_mode] + apart
    return counted


def _of_replicas(replicas: Replicas) -> int:
    degrees = [
        degree
        for kind in replicas.kinds
        for degree in (
            *(kind.tensor_parallel, kind.expert_parallel),
            *(kind.pipeline_parallel, kind.data_parallel),
        )
    ]
    drafts = bool(replicas.drafted)
    return sum(degree > 1 for degree in degrees) + len(replicas.kinds) - 1 + drafts


def _of_trainer(trainer: Degrees) -> int:
    degrees = (
        *(trainer.tensor_parallel, trainer.pipeline_parallel),
        *(trainer.expert_parallel, trainer.expert_tensor_parallel or 1),
        trainer.context_parallel,
    )
    return sum(degree > 1 for degree in degrees) + (trainer.zero == 3) + trainer.offload


def _of_mode(mode: Mode, system: System) -> int:
    is_plain = mode.dispatch in (None, DEFAULT_DISPATCH)
    streams = system.streaming == "stream"
    return system.staleness_bound + streams + (not is_plain) + (mode.sync_mode == "delta")


SURPRISE, REMEMBERED = {"ahead": 0.85, "streams": 0.95, "whole": 0.97}, 8
"""Lowest ratio of a simulated step to its estimate that is expected before simulations of the same
system exist. The second value is the number of simulations that count later.
"""
LEAST_LAG = 0.4
"""Lowest mean staleness of a system that generates ahead, as a share of its bound."""
SLACK = 0.005
"""Weight of training and sync in the score. Among similar plans, the one whose stages are idle most
comes first.
"""


@dataclass(kw_only=True)
class Scores:
    """Scores the plans of a space without simulating them."""

    space: Space
    estimates: Estimates
    _over: dict[SystemName, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )
    """The last ratios of simulated to estimated step time, by system."""
    goal: PlanConfig = field(init=False)
    """The objective and limits in use: the section `[plan]`, or a later goal of the search."""

    def __post_init__(self) -> None:
        """Start with the goal of `[plan]` and compute the properties of all plans."""
        self.goal = self.space.run.plan
        self._take(self.space)

    def _take(self, space: Space) -> None:
        """Replace the space, and compute the complexity, staleness and class of each plan."""
        self.space = space
        self.complexity = complexities(space)
        bounds = np.array([system.staleness_bound for system in space.systems])
        self.lags: Floats = LEAST_LAG * bounds[space.of_mode]
        """Lowest mean staleness of each plan, in versions."""
        self._class_codes = classes_of(space)
        """Class of each plan, by its system and pools."""

    def value_of(self, speed: Speed) -> float:
        """Return the objective of a simulation."""
        return value_of(self.goal, speed)

    def second_value_of(self, speed: Speed) -> float:
        """Return the value that orders plans of the same objective: seconds, or dollars if the objective is time."""
        steps = steps_for_one(self.goal, speed.mean_staleness)
        if self.goal.objective == "step-time":
            return speed.cost_per_step * steps
        return speed.step_time * steps

    def spend_of(self, speed: Speed) -> Spend[float]:
        """Return the dollars and seconds of a simulation."""
        return spend_of(whole_time(self.space.run, speed), speed)

    def bounds(self) -> Floats:
        """Return a lower bound on the objective of each plan in the steady state."""
        return self.estimates.values(self.estimates.bound(), plan=self.goal)

    def scores(self) -> Floats:
        """Estimate the lowest possible objective of every plan. Plans that exceed a limit come after all others."""
        stages = self.estimates.estimate()
        steps = self._least_steps(stages)
        if self.goal.objective == "pareto":
            spends = self._spends(steps)
            values = distance_to_front(spends.seconds, spends.whole)
        else:
            values = self.estimates.values(steps, self.lags, self.goal)
        values = values * (1 + SLACK * (stages.training + stages.sync) / stages.step)
        over = self.excess_of(steps)
        return np.where(over > 1, values.max() * over, values)

    def _least_steps(self, stages: StageSeconds) -> Floats:
        """Return the lowest expected seconds of a step of every plan."""
        steps: Floats = stages.step * self._least_over()[self.space.of_mode]
        return steps

    def _dollars(self, steps: Floats, estimates: Estimates | None = None) -> Floats:
        estimates = estimates or self.estimates
        return steps * estimates.space.prices + estimates.egress(steps)

    def excess_of(self, steps: Floats, estimates: Estimates | None = None) -> Floats:
        """Return the largest ratio of a figure to its limit for every plan.

        A plan with at most 1 keeps all limits.

        Args:
            steps: seconds of a step of each plan.
            estimates: the source of prices and egress; that of the search by default.
        """
        if not limits_of(self.goal):
            return np.zeros(len(self.space))
        found: Floats = np.asarray(excess(self.goal, self._spends(steps, estimates)))
        return found

    def _spends(self, steps: Floats, estimates: Estimates | None = None) -> Spend[Floats]:
        """Estimate the dollars and seconds of every plan, given its seconds of a step; see `excess_of`."""
        estimates = estimates or self.estimates
        dollars = self._dollars(steps, estimates)
        num_steps = self.space.run.algorithm.steps * steps_for_one(self.goal, self.lags)
        per_day = dollars / steps * SECONDS_PER_DAY
        whole = num_steps * dollars * estimates.billed(steps, self.lags, self.goal)
        seconds = rented_time(self.space.run.cluster.billing, num_steps * steps)
        return Spend(dollars, per_day, whole, seconds)

    def least_spends(self) -> Spend[Floats]:
        """Return the lowest expected dollars and seconds of every plan."""
        return self._spends(self._least_steps(self.estimates.estimate()))

    def take_ratios(self, other: Scores) -> None:
        """Copy the ratios of simulated to estimated step time that were seen in another search on the same prompts."""
        self._over.update((name, copy(ratios)) for name, ratios in other._over.items())

    def over_limits(self) -> Floats:
        """Return the largest ratio of an estimated figure to its limit for every plan.

        A plan with at most 1 keeps all limits.
        """
        return self.excess_of(self.estimates.estimate().step)

    def usual_over(self) -> Floats:
        """Return, by mode, the median ratio of a simulated step to its estimate; 1 if none was simulated."""
        seen = [self._over[mode.system] for mode in self.space.modes]
        return np.array([median(ratios) if ratios else 1.0 for ratios in seen])

    def least_lag(self, index: int) -> float:
        """Return the lowest mean staleness of a plan, in versions."""
        return float(self.lags[index])

    def _least_over(self) -> Floats:
        """Return, by mode, the lowest expected ratio of a simulated step to its estimate."""
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

    def keeps_limits(self, speed: Speed) -> bool:
        """Whether a simulated plan keeps the limits of `[plan]`, even if the goal is another one."""
        return keeps_limits(self.space.run.plan, self.spend_of(speed))

    def is_affordable(self, speed: Speed) -> bool:
        """Whether a simulated plan keeps the limits of the goal."""
        return keeps_limits(self.goal, self.spend_of(speed))

"""The planner: screen every plan by estimate, simulate those that may be best, choose by what was simulated.

    space ─► bounds and estimates of all plans ─► the best by estimate are simulated, round by round; each
    simulation corrects the estimates of plans like it ─► the finalists for longer ─► the best until its step time is known

Estimates only say what is worth a simulation. The objective is that of `streamrl simulate` on the plan's file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from sim.planner.bound import Estimates
from sim.planner.objective import distance_to_front, value_of, values_of
from sim.planner.space import Space
from sim.planner.trial import (
    Trial,
    generation_of,
    open_trial,
    run_all,
    shortened,
    speed_of,
    whole,
)
from streamrl.record.metrics import Speed
from streamrl.runfile.config import Run
from streamrl.workload.workload import Draw

Floats = NDArray[np.float64]
ROUND = 8
"""Plans simulated before estimates are corrected again: enough to keep a few cores busy."""
LOOKED_AT = 4000
"""Plans, the best by estimate, among which a round chooses."""
FIRST_LOOK = 1
"""Batches from which replicas' seconds are taken for a first ranking."""
NEAR, NEARER = 1.1, 1.05
"""How far from the best estimate a plan may be whose replicas are simulated on one batch, and on all: while
some are only bounded from below many look good, and one batch may be 5 % longer than another."""
MOST_SIMULATED = 16
"""Plans that are simulated: twice `ROUND`, after which estimates that simulations have corrected bring up no better."""
FINAL_STEPS = 24
"""Most steps by which finalists are told apart: as paired comparisons need no more, the chosen one alone has all."""
MARGIN = 1.03
"""A plan whose estimate is worse than the best simulated one by this is not simulated any more: estimates of
plans that matter err by 1 to 2 %."""
SLACK = 0.005
"""What a plan's idle stages count, so that of plans that are alike the one with most room comes first."""


@dataclass(kw_only=True)
class Search:
    """What has been found out about the plans of a space."""

    space: Space
    estimates: Estimates
    base: bytes
    """The run file as trials of the search take it."""
    speeds: dict[int, list[Speed]] = field(default_factory=dict)
    """What the longest simulations of a plan gave: of a finalist one for each seed, of another its few steps."""
    short: dict[int, Speed] = field(default_factory=dict)
    """What the few steps of each simulated plan gave, on the same prompts for all."""
    finals: dict[int, list[Speed]] = field(default_factory=dict)
    """What those of finalists gave that tell them apart, one for each seed."""

    @classmethod
    def open(cls, run: Run) -> Search:
        """Find all plans and estimate them.

        Raises:
            ValueError: no plan is left, or costs are missing.
        """
        space = Space.open(run)
        base = shortened(run, run.seed)
        return cls(space=space, estimates=Estimates(space, _draw(base)), base=base)

    # Values ---------------------------------------------------------------------------------------

    def value(self, index: int) -> float:
        """Return the objective of a simulated plan: the median over its seeds."""
        objective = self.space.run.plan.objective
        return median(value_of(objective, speed) for speed in self.speeds[index])

    def behind(self, index: int, other: int) -> float:
        """Return the share by which a plan's objective is above another's, both simulated for as long."""
        objective = self.space.run.plan.objective
        ours, theirs = (
            median(value_of(objective, speed) for speed in speeds)
            for speeds in self.pair(index, other)
        )
        return ours / theirs - 1

    def pair(self, index: int, other: int) -> tuple[list[Speed], list[Speed]]:
        """Return simulations of two plans on the same prompts for as many steps: those of finalists, or of the search."""
        if index in self.finals and other in self.finals:
            return self.finals[index], self.finals[other]
        return [self.short[index]], [self.short[other]]

    def scores(self) -> Floats:
        """Estimate the objective of every plan; what breaks `budget_per_step` comes after all others."""
        plan, stages, prices = self.space.run.plan, self.estimates.estimate(), self.space.prices
        dollars = stages.step * prices
        if plan.objective == "pareto":
            values = distance_to_front(stages.step, dollars)
        else:
            values = values_of(plan.objective, stages.step, prices, self.estimates.tokens)
        values = values * (1 + SLACK * (stages.training + stages.sync) / stages.step)
        if plan.budget_per_step is not None:
            over = np.maximum(1.0, dollars / plan.budget_per_step)
            values = np.where(over > 1, values.max() * over, values)
        return values

    def is_affordable(self, index: int) -> bool:
        """Whether a simulated plan keeps to `plan.budget_per_step`."""
        budget = self.space.run.plan.budget_per_step
        return (
            budget is None or median(speed.cost_per_step for speed in self.speeds[index]) <= budget
        )

    def ranking(self) -> list[int]:
        """Return the simulated plans within budget, the best first."""
        kept = [index for index in self.speeds if self.is_affordable(index)]
        return sorted(kept, key=lambda index: (self.value(index), index))

    # Rounds ---------------------------------------------------------------------------------------

    def run(self, pool: Executor, watch: Callable[[], None]) -> list[int]:
        """Simulate until no other plan is likely to be better; return the simulated plans, the best first.

        `watch` is called after every simulation, of which there are at most `MOST_SIMULATED` plus one for each
        finalist and seed.

        Raises:
            ValueError: no plan keeps to `plan.budget_per_step`.
        """
        plan = self.space.run.plan
        while chosen := self.next_round(pool, MOST_SIMULATED - len(self.speeds)):
            self.simulate(pool, chosen, watch)
        ranking = self.ranking()
        finalists = ranking[: plan.finalists]
        if not finalists:
            cheapest = min(
                median(speed.cost_per_step for speed in speeds) for speeds in self.speeds.values()
            )
            raise ValueError(
                f"plan.budget_per_step {plan.budget_per_step:g}: the cheapest plan that was simulated costs "
                f"{cheapest:.4g} dollars a step"
            )
        for place in range(plan.seeds):
            self.compare(pool, finalists, place, watch)
        order = sorted(finalists, key=self.value)
        for index in order:
            self.settle_value(pool, index, watch)
            if self.is_affordable(index):
                break
        else:
            index = order[0]
        return [index, *(other for other in (*order, *ranking[len(order) :]) if other != index)]

    def next_round(self, pool: Executor, most: int) -> list[int]:
        """Return the plans to simulate next, none where no other is likely to be better."""
        count = min(ROUND, most)
        self._refine(pool, lambda order, scores: _within(order, scores, NEAR), FIRST_LOOK)
        self._refine(pool, lambda order, scores: _within(order, scores, NEARER))
        return self._refine(pool, lambda order, scores: self._pick(order, scores, count))

    def _refine(
        self,
        pool: Executor,
        pick: Callable[[list[int], Floats], list[int]],
        num_batches: int | None = None,
    ) -> list[int]:
        """Simulate the replicas of what is picked, on all batches or on the first, until the pick has no others."""
        measured = _measured_batches(self.base)[:num_batches]
        while True:
            scores = self.scores()
            picked = pick(_best(scores), scores)
            asked = self.estimates.asked(picked, len(measured))
            if not asked:
                return picked
            batches = tuple(measured)
            trials = [(a, Trial(self.base, self.estimates.like(a), batches)) for a in asked]
            for which, found in run_all(pool, generation_of, trials).items():
                self.estimates.learn(which, found)

    def settle(self, pool: Executor, indices: list[int]) -> None:
        """Let replicas of the best plans by estimate be simulated on a batch, those of `indices` on all."""
        self._refine(pool, lambda order, scores: _within(order, scores, NEARER), FIRST_LOOK)
        self._refine(pool, lambda order, scores: indices)

    def _pick(self, order: list[int], scores: Floats, count: int) -> list[int]:
        """Take the best by estimate that are worth a simulation; of a Pareto set from one end to the other.

        Of plans that differ only in how the trainer splits its GPUs and what is sent, the best by estimate is
        taken and no other: which of two is better, closed forms say as well as a simulation.
        """
        ranking, is_pareto = self.ranking(), self.space.run.plan.objective == "pareto"
        limit = np.inf
        if ranking or is_pareto:
            limit = MARGIN * (1.0 if is_pareto else self.value(ranking[0]))
        seen = {self._shape(index) for index in self.speeds}
        chosen: dict[Hashable, int] = {}
        for index in order:
            if scores[index] > limit or (len(chosen) == count and not is_pareto):
                break
            if (shape := self._shape(index)) not in seen:
                chosen.setdefault(shape, index)
        return self._spread(list(chosen.values()), count) if is_pareto else list(chosen.values())

    def _spread(self, indices: list[int], count: int) -> list[int]:
        """Take plans from the fastest to the slowest, as far apart as they are many."""
        steps = self.estimates.estimate().step
        ordered = sorted(indices, key=lambda index: steps[index])
        places = np.linspace(0, len(ordered) - 1, min(count, len(ordered)))
        return [ordered[place] for place in np.unique(places.round().astype(int))]

    def _shape(self, index: int) -> Hashable:
        replicas, trainer, mode = self.space.candidate(index)
        return replicas, trainer.pool, trainer.num_gpus, mode._replace(sync_mode="full")

    def simulate(self, pool: Executor, indices: Iterable[int], watch: Callable[[], None]) -> None:
        """Simulate a few steps of plans and learn from them."""
        trials = [(i, Trial(self.base, self.space.candidate(i))) for i in indices]
        for index, speed in run_all(pool, speed_of, trials, watch).items():
            self.speeds[index] = [speed]
            self.short[index] = speed
            self.estimates.learn_step(index, speed.step_time)

    def compare(
        self, pool: Executor, indices: Iterable[int], place: int, watch: Callable[[], None]
    ) -> None:
        """Simulate finalists longer, on one of the seeds."""
        run = self.space.run
        base = shortened(run, run.seed + place, FINAL_STEPS)
        trials = [(i, Trial(base, self.space.candidate(i))) for i in indices]
        for index, speed in run_all(pool, speed_of, trials, watch).items():
            self.finals.setdefault(index, []).append(speed)
            self.speeds[index] = self.finals[index]

    def settle_value(self, pool: Executor, index: int, watch: Callable[[], None]) -> None:
        """Simulate a plan until its step time is known, on every seed."""
        run, candidate = self.space.run, self.space.candidate(index)
        seeds = range(run.seed, run.seed + run.plan.seeds)
        trials = [(seed, Trial(whole(run, seed), candidate)) for seed in seeds]
        self.speeds[index] = list(run_all(pool, speed_of, trials, watch).values())


def _best(scores: Floats) -> list[int]:
    """Return the places of the least scores, the least first."""
    count = min(LOOKED_AT, len(scores))
    places = np.argpartition(scores, count - 1)[:count]
    order: list[int] = places[np.argsort(scores[places], kind="stable")].tolist()
    return order


def _within(order: list[int], scores: Floats, reach: float) -> list[int]:
    """Return the plans whose score is near the best."""
    return [index for index in order if scores[index] <= reach * scores[order[0]]]


def _measured_batches(base: bytes) -> range:
    """Return the batches that the steps of a trial that count train on."""
    run, _ = open_trial(base)
    most = run.simulate.max_steps
    return range(min(1, most - 1), most)


def _draw(base: bytes) -> list[list[Draw]]:
    run, workload = open_trial(base)
    size = run.algorithm.prompts_per_step
    return [workload.draw(batch * size, size) for batch in _measured_batches(base)]

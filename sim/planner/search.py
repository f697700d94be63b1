"""The planner: screen every plan by estimate, simulate those that may be best, choose by what was simulated.

    space ─► bounds and estimates of all plans ─► the best of each system and pools, then whatever may be better than
    the best so far, round by round; each simulation corrects the estimates of plans like it ─► finalists for longer
    ─► of those that cost about the same the simplest ─► that one until its step time is known

Estimates only say what is worth a simulation. The objective is that of `streamrl simulate` on the plan's file.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.planner.bound import Estimates, StageSeconds
from sim.planner.generation_time import DealtBatch
from sim.planner.limits import Spend, excess, keeps_limits, limits_of, unmet
from sim.planner.objective import distance_to_front, value_of
from sim.planner.simplicity import complexities
from sim.planner.space import Space
from sim.planner.train_time import FallingLengths
from sim.planner.trial import (
    Trial,
    counted_steps,
    generation_of,
    open_trial,
    run_all,
    shortened,
    timed_speed_of,
    training_error_of,
)
from streamrl.record.speed import Speed
from streamrl.record.whole_run import steps_for_one
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.workload.workload import Draw

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
ROUND = 8
"""Plans simulated before estimates are corrected again: enough to keep a few cores busy."""
LOOKED_AT = 4000
"""Plans, the best by estimate, among which a round chooses."""
FIRST_LOOK, FIRST_ROUNDS = 1, 4
"""Batches from which replicas' seconds are taken for a first ranking, and rounds after which a first plan of each system
is settled on: later ones are told by its simulation too."""
NEAR, NEARER = 1.1, 1.05
"""How far from the best estimate a plan may be whose replicas are simulated on one batch, and on all: while
some are only bounded from below many look good, and one batch may be 5 % longer than another."""
MARGIN = 0.01
"""Share by which no plan that was not simulated may be better, by its lower estimate, than the best that was."""
ALIKE = 0.02
"""Share of the objective within which plans cost about the same, so that the simplest of them is run."""
SURPRISE, REMEMBERED = {"ahead": 0.85, "streams": 0.95, "whole": 0.97}, 8
"""How far below its estimate a plan may come before simulations of its system tell, and how many of those count."""
LEAST_LAG = 0.4
"""Share of the bound on staleness that rollouts of a system which generates ahead have on average, at least."""
SLACK = 0.005
"""What a plan's idle stages count, so that of plans that are alike the one with most room comes first."""


@dataclass(kw_only=True)
class Search:
    """What has been found out about the plans of a space."""

    space: Space
    estimates: Estimates
    base: bytes
    """The run file as trials of the search take it."""
    deadline: float
    """Instant of `time.perf_counter` after which nothing more is simulated."""
    speeds: dict[int, Speed] = field(default_factory=dict)
    """What the few steps of each simulated plan gave, on the same prompts for all."""
    seconds: dict[int, float] = field(default_factory=dict)
    """What each of these simulations took of this machine."""
    has_converged: bool = False
    """Whether no plan that was not simulated may be better by more than `MARGIN`."""
    _over: dict[SystemName, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )
    """Simulated steps over their estimates, the last ones of each system."""

    def __post_init__(self) -> None:
        """Count what there is to set up for each plan."""
        self.complexity = complexities(self.space)

    @classmethod
    def open(cls, run: Run, deadline: float = float("inf"), *, tight: bool = False) -> Search:
        """Find all plans and estimate them; `tight` ones are those whose trainers leave too little room otherwise.

        Raises:
            ValueError: no plan is left, or costs are missing.
        """
        base = shortened(run, run.seed)
        batches = _draw(base)
        falling = [FallingLengths(DealtBatch.of(batch).lengths) for batch in batches]
        space = Space.open(run, falling, tight=tight)
        return cls(space=space, estimates=Estimates(space, batches), base=base, deadline=deadline)

    @property
    def is_late(self) -> bool:
        """Whether `plan.time_limit` has passed."""
        return time.perf_counter() > self.deadline

    # Values ---------------------------------------------------------------------------------------

    def value(self, index: int) -> float:
        """Return the objective of a simulated plan over the few steps of the search."""
        return self.value_of(self.speeds[index])

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
        if system.max_staleness and not system.halts_for_sync:
            kind = "ahead"
        seen = self._over[name]
        if len(seen) < REMEMBERED // 2:
            return min(SURPRISE[kind], *seen, 1.0)
        return min(1.0, *seen)

    @cached_property
    def _lags(self) -> Floats:
        """Versions that the rollouts of each plan are behind on average, at least."""
        bounds = np.array([system.max_staleness for system in self.space.systems])
        found: Floats = LEAST_LAG * bounds[self.space.of_mode]
        return found

    def is_affordable(self, speed: Speed) -> bool:
        """Whether a simulated plan keeps to the budgets and the deadline of `[plan]`."""
        return keeps_limits(self.space.run, speed)

    def ranking(self) -> list[int]:
        """Return the simulated plans within budget, the best first."""
        kept = [index for index, speed in self.speeds.items() if self.is_affordable(speed)]
        return sorted(kept, key=lambda index: (self.value(index), index))

    # Rounds ---------------------------------------------------------------------------------------

    def run(self, pool: Executor, watch: Callable[[], None]) -> list[int]:
        """Simulate until no other plan may be better by more than the margin; return the simulated plans, the best first.

        `watch` is called after every simulation.

        Raises:
            ValueError: no plan keeps to the budgets and the deadline of `[plan]`.
        """
        self._look_at_each(pool, watch)
        while not self.is_late:
            if not (chosen := self.next_round(pool)):
                self.has_converged = True
                break
            self.simulate(pool, chosen, watch)
        ranking = self.ranking()
        if not ranking:
            raise unmet(self.space.run, self.speeds.values())
        return ranking

    def _look_at_each(self, pool: Executor, watch: Callable[[], None]) -> None:
        """Simulate the best plan of each system on each pair of pools, but where all of those are known to be worse."""
        wanted = self._refine(
            pool, lambda order, scores: self.best_of_each(scores), FIRST_LOOK, FIRST_ROUNDS
        )
        bounds, classes = self.bounds(), self._class_codes
        least = {i: float(bounds[classes == classes[i]].min()) for i in wanted}
        while wanted:
            ranking = self.ranking()
            is_judged = ranking and self.space.run.plan.objective != "pareto"
            best = self.value(ranking[0]) if is_judged else np.inf
            self.simulate(pool, [i for i in wanted[:ROUND] if least[i] <= best], watch)
            wanted = [] if self.is_late else wanted[ROUND:]

    def best_of_each(self, scores: Floats) -> list[int]:
        """Return the best plan by estimate of each system, the fastest of all, and the best of each system on each pair of pools."""
        found = [int(places[np.argmin(scores[places])]) for places in self._classes]
        order = sorted(found, key=lambda index: float(scores[index]))
        of_systems: dict[SystemName, int] = {}
        for index in order:
            of_systems.setdefault(self.space.candidate(index).mode.system, index)
        fastest = int(np.argmin(self.estimates.estimate().step))
        return list(dict.fromkeys([*of_systems.values(), fastest, *order]))

    @cached_property
    def _classes(self) -> list[Indices]:
        """The plans of each system on each pair of pools."""
        codes = self._class_codes
        return [np.nonzero(codes == code)[0] for code in np.unique(codes)]

    @cached_property
    def _class_codes(self) -> Indices:
        """Of each plan a number for its system and pools."""
        space = self.space
        pools = {name: place for place, name in enumerate(space.run.cluster.pools)}
        systems = {mode.system: place for place, mode in enumerate(space.modes)}
        codes = np.array([systems[mode.system] for mode in space.modes])[space.of_mode]
        for sides, of_side in (
            (space.replicas, space.of_replicas),
            (space.trainers, space.of_trainer),
        ):
            codes = codes * len(pools) + np.array([pools[side.pool] for side in sides])[of_side]
        return codes

    def next_round(self, pool: Executor) -> list[int]:
        """Return the plans to simulate next, none where no other may be better by more than the margin."""
        self._refine(pool, lambda order, scores: _within(order, scores, NEAR), FIRST_LOOK)
        self._refine(pool, lambda order, scores: _within(order, scores, NEARER))
        return self._refine(pool, self._pick)

    def least_open(self) -> float:
        """Return the least objective that a plan may have whose like was not simulated."""
        scores = self.scores()
        return next((float(scores[i]) for i in self.unlike(_best(scores), scores)), np.inf)

    def settle(self, pool: Executor, indices: list[int]) -> None:
        """Let replicas of the best plans by estimate be simulated on a batch, those of `indices` on all."""
        self._refine(pool, lambda order, scores: _within(order, scores, NEARER), FIRST_LOOK)
        self._refine(pool, lambda order, scores: indices)

    def _refine(
        self,
        pool: Executor,
        pick: Callable[[list[int], Floats], list[int]],
        num_batches: int | None = None,
        most_rounds: float = np.inf,
    ) -> list[int]:
        """Look closer at the sides of what is picked, on all batches or on the first, until the pick has no others."""
        first, last = counted_steps(open_trial(self.base)[0])
        measured = range(first - 1, last)[:num_batches]
        for num_rounds in count():
            scores = self.scores()
            picked = pick(_best(scores), scores)
            passes = self.estimates.unchecked(picked)
            asked = self.estimates.asked(picked, len(measured))
            if self.is_late or num_rounds >= most_rounds or not (passes or asked):
                break
            batches = tuple(measured)
            for one, error in self._ask(pool, training_error_of, passes, batches[:1]):
                self.estimates.learn_passes(one, error)
            for which, found in self._ask(pool, generation_of, asked, batches):
                self.estimates.learn(which, found)
        return picked

    def _ask(
        self,
        pool: Executor,
        work: Callable[[Trial], Answer],
        wanted: Mapping[Key, int],
        batches: tuple[int, ...],
    ) -> Iterable[tuple[Key, Answer]]:
        """Let batches of plans be gone through, and return each answer with what asked for it."""
        trials = [
            (k, Trial(self.base, self.space.candidate(i), batches)) for k, i in wanted.items()
        ]
        return run_all(pool, work, trials, until=self.deadline).items()

    def _pick(self, order: list[int], scores: Floats) -> list[int]:
        """Take the best by estimate that may be better than the best so far, or as good and simpler.

        Of plans that differ only in how the trainer splits its GPUs and what is sent, the best by estimate is
        taken and no other: which of two is better, closed forms say as well as a simulation. Of a Pareto set plans are
        taken from one end to the other.
        """
        ranking, plan = self.ranking(), self.space.run.plan
        if plan.objective == "pareto":
            return self._spread([i for i in self.unlike(order, scores) if scores[i] <= 1 + MARGIN])
        if not ranking:
            over = self._over_limits(self._least_steps(self.estimates.estimate()))
            kept = [i for i in order if over[i] <= 1]
            return list(self.unlike(kept, scores))[:ROUND]
        best = ranking[0]
        worth = scores.copy()
        worth[self.complexity < self.complexity[best]] *= (1 - MARGIN) / (1 + ALIKE)
        limit = (1 - MARGIN) * self.value(best)
        wanted = sorted((i for i in order if worth[i] < limit), key=lambda i: worth[i])
        return list(self.unlike(wanted, scores))[:ROUND]

    def in_order(self) -> list[int]:
        """Return the plans that are best by estimate, the best first."""
        return _best(self.scores())

    def unlike(self, order: Iterable[int], scores: Floats) -> Iterator[int]:
        """Yield plans like none that was simulated, or came before, and those that are clearly better by estimate."""
        least: dict[Hashable, float] = {}
        for index in self.speeds:
            shape = self._shape(index)
            least[shape] = min(least.get(shape, np.inf), scores[index])
        for index in order:
            shape = self._shape(index)
            if scores[index] < (1 - MARGIN) * least.get(shape, np.inf):
                least[shape] = scores[index]
                yield index

    def _shape(self, index: int) -> Hashable:
        replicas, trainer, mode = self.space.candidate(index)
        return replicas, trainer.pool, trainer.num_gpus, mode._replace(sync_mode="full")

    def _spread(self, indices: list[int]) -> list[int]:
        """Take plans from the fastest to the slowest, as far apart as they are many."""
        steps = self.estimates.estimate().step
        ordered = sorted(indices, key=lambda index: steps[index])
        places = np.linspace(0, len(ordered) - 1, min(ROUND, len(ordered)))
        return [ordered[place] for place in np.unique(places.round().astype(int))]

    def simulate(self, pool: Executor, indices: Iterable[int], watch: Callable[[], None]) -> None:
        """Simulate a few steps of plans and learn from them."""
        trials = [(i, Trial(self.base, self.space.candidate(i))) for i in indices]
        estimated = self.estimates.estimate().step
        until = self.deadline
        for index, timed in run_all(pool, timed_speed_of, trials, watch, until).items():
            speed, self.seconds[index] = timed
            self.speeds[index] = speed
            mode = self.space.modes[self.space.of_mode[index]]
            self._over[mode.system].append(speed.step_time / estimated[index])
            self.estimates.learn_step(index, speed.step_time)


def _best(scores: Floats) -> list[int]:
    """Return the places of the least scores, the least first."""
    most = min(LOOKED_AT, len(scores))
    places = np.argpartition(scores, most - 1)[:most]
    order: list[int] = places[np.argsort(scores[places], kind="stable")].tolist()
    return order


def _within(order: list[int], scores: Floats, reach: float) -> list[int]:
    """Return the plans whose score is near the best."""
    return [index for index in order if scores[index] <= reach * scores[order[0]]]


def _draw(base: bytes) -> list[list[Draw]]:
    """Return the batches that the steps of a trial that count train on."""
    run, workload = open_trial(base)
    size, (first, last) = run.algorithm.prompts_per_step, counted_steps(run)
    return [workload.draw(batch * size, size) for batch in range(first - 1, last)]

"""Search for the best plan: estimate every plan, simulate those that may be best, and compare the results.

Planning has these steps:

1. Compute bounds and estimates of all plans.
2. Simulate the best plan of each system on each pair of pools.
3. Simulate plans that may be better than the best so far, round by round. Each simulation corrects
   the estimates of similar plans.
4. Simulate the finalists for longer, and the cheapest of them until its cost is known.
5. If `plan.tolerance` is set, repeat this for the fastest plan that costs little more.
6. Simulate the chosen plan until its step time is known.

This module does steps 1 to 3, and `race.py` the others. Estimates only decide which plans are
simulated. The objective of a plan is the one that `streamrl simulate` computes for its file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.resolved import resolve
from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import SystemName
from streamrl.sim.planner.estimates import Estimates
from streamrl.sim.planner.layouts import Degrees, Replicas, can_mix, mixed_fleets
from streamrl.sim.planner.objective import unmet
from streamrl.sim.planner.reward_replicas import least_gpus
from streamrl.sim.planner.scores import Scores, best_of, within
from streamrl.sim.planner.space import Candidate, Space
from streamrl.sim.planner.stage_times import DealtBatch, FallingLengths
from streamrl.sim.planner.trial import (
    Trial,
    Unfinished,
    counted_batches,
    counted_steps,
    generation_of,
    open_trial,
    portions_of,
    run_all,
    short_speed_of,
    shortened,
    timed_speed_of,
    training_error_of,
)

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
ROUND = 4
"""Plans that are simulated before estimates are corrected again. Four keep two cores busy, and of eight the last ones
were often not needed any more.
"""
CLASSES = 8
"""Plans of different classes that are simulated before classes with higher bounds are left out."""
FINAL_SHARE = 0.2
"""Share of `plan.time_limit` that is reserved for finalists."""
FIRST_LOOK, FIRST_SHARE = 1, 0.3
"""Batches whose generation is simulated for a first ranking. The second value is a share of
`plan.time_limit`. After it, the first plan of each system is chosen even if another may be better.
"""
NEAR, NEARER = 1.1, 1.05
"""Ratio to the best estimate up to which a plan's replicas are simulated on one batch, and on all.
The first is larger: plans with only a lower bound look good, and one batch may be 5 % longer than
another.
"""
MARGIN, OF_EPISODES = 0.01, 0.05
"""The search ends when no plan without a simulation may be better than the best by more than this
share. Its lower estimate decides. The second value is for episodes of several turns, whose
simulations take longer and whose estimates have a larger error.
"""
ALIKE = 0.02
"""Plans within this share of the objective cost about the same, and the simplest is chosen."""
MIXED, NEIGHBOURS = 4, 400
"""Best replicas to which a second kind is added. The second value is the number of plans whose
trainers and modes they are combined with.
"""


@dataclass(kw_only=True)
class Search(Scores):
    """The simulated plans of a space and the rules that choose the next ones."""

    base: bytes
    """The encoded run file of the search's trials."""
    deadline: float
    """Value of `time.perf_counter` after which no further simulation starts."""
    most_rollouts: float = np.inf
    """Rollouts after which no further simulation starts. Unlike the deadline, it is the same on a busy machine."""
    num_rollouts: float = field(default=0, init=False)
    """Rollouts that were simulated."""
    speeds: dict[int, Speed] = field(default_factory=dict)
    """Speed of each simulated plan over a few steps. All plans have the same prompts."""
    portions: dict[int, int] = field(default_factory=dict)
    """Number of portions of each simulated plan, of which one was simulated."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Estimated time to simulate each of these plans as a whole on this machine, from its portion's
    time.
    """
    unfinished: dict[int, Unfinished] = field(default_factory=dict)
    """Plans whose simulation stopped before the run's last step. They must not be chosen."""
    has_converged: bool = False
    """Whether no plan without a simulation may be better than the best by more than `MARGIN`."""
    _of_trials: dict[Trial, Speed | Unfinished] = field(
        default_factory=dict, init=False, repr=False
    )
    """Figures of each simulation over a few steps, because later questions ask for some of them again."""

    @classmethod
    def open(
        cls,
        run: Run,
        deadline: float = float("inf"),
        *,
        most_rollouts: float = np.inf,
        tight: bool = False,
        kept: Degrees | None = None,
        runnable: bool | None = None,
    ) -> Search:
        """Find all plans and estimate them.

        Args:
            run: the run file.
            deadline: value of `time.perf_counter` after which no further simulation starts.
            most_rollouts: rollouts after which no further simulation starts.
            tight: use only plans that the search usually leaves out because their trainers leave
                too little memory free.
            kept: a trainer whose layout is kept even if others on the same GPUs are faster.
            runnable: leave out plans that no target can run; by default, if a target can run any.

        Raises:
            ValueError: no plan fits, or costs are missing.
        """
        base = shortened(run, run.seed)
        batches = counted_batches(base)
        falling = [FallingLengths(DealtBatch.of(batch.trained).lengths) for batch in batches]
        space = Space.open(run, falling, tight=tight, kept=kept, runnable=runnable)
        estimates = Estimates(space, batches)
        return cls(
            space=space,
            estimates=estimates,
            base=base,
            deadline=deadline,
            most_rollouts=most_rollouts,
        )

    def only(self, candidate: Candidate) -> Search:
        """Return a search with a single plan, to describe it."""
        space = self.space.only([candidate])
        estimates = Estimates(space, counted_batches(self.base))
        return Search(space=space, estimates=estimates, base=self.base, deadline=self.deadline)

    def beside(self, plan: PlanConfig, *, tight: bool = False, runnable: bool) -> Search:
        """Return a search by another section `[plan]`, estimated by all that this search has learned.

        Both have the same prompts. See `open` for the arguments and errors.
        """
        run, batches = replace(self.space.run, plan=plan), self.estimates.trained_on
        rules = self.space.rules
        space = Space.open(run, batches, tight=tight, runnable=runnable, rules=rules)
        estimates = Estimates(space, counted_batches(self.base))
        estimates.take_learned(self.estimates)
        other = Search(space=space, estimates=estimates, base=self.base, deadline=self.deadline)
        other.take_ratios(self)
        return other

    @property
    def margin(self) -> float:
        """Share by which a plan without a simulation must seem better to be simulated."""
        return MARGIN if self.space.run.environment is None else OF_EPISODES

    @property
    def is_late(self) -> bool:
        """Whether `plan.time_limit` has passed."""
        return time.perf_counter() > self.deadline

    @property
    def is_spent(self) -> bool:
        """Whether as many rollouts were simulated as may be."""
        return self.num_rollouts >= self.most_rollouts

    @property
    def search_end(self) -> float:
        """Value of `time.perf_counter` at which the search ends, so that time is left to compare the best plans."""
        return self.deadline - FINAL_SHARE * self.space.run.plan.time_limit

    # Values ---------------------------------------------------------------------------------------

    def aim_at(self, goal: PlanConfig) -> None:
        """Compare plans by another goal from now on."""
        self.goal = goal

    @contextmanager
    def judged_by(self, goal: PlanConfig) -> Iterator[None]:
        """Compare plans by another goal within a `with` block."""
        own, self.goal = self.goal, goal
        try:
            yield
        finally:
            self.goal = own

    def value(self, index: int) -> float:
        """Return the objective of a simulated plan over the few steps of the search."""
        return self.value_of(self.speeds[index])

    def ranking(self) -> list[int]:
        """Return the simulated plans that finish within budget, from the best to the worst."""
        kept = [
            index
            for index, speed in self.speeds.items()
            if index not in self.unfinished and self.is_affordable(speed)
        ]
        return sorted(kept, key=lambda index: (self.value(index), index))

    # Rounds ---------------------------------------------------------------------------------------

    def run(self, pool: Executor, watch: Callable[[], None]) -> list[int]:
        """Simulate until no other plan may be better by more than the margin; return the ranking.

        `watch` is called after every simulation.

        Raises:
            ValueError: no plan keeps the budgets and the deadline of `[plan]`.
            RuntimeError: no plan finishes.
        """
        self._converge(pool, watch)
        if self.has_converged and self.mix():
            self._converge(pool, watch)
        ranking = self.ranking()
        if not ranking:
            raise self.nothing_left(self.speeds.values())
        return ranking

    def go_on(self, pool: Executor, watch: Callable[[], None]) -> bool:
        """Search again after plans turned out not to finish; return whether any plan is left."""
        self._converge(pool, watch)
        return bool(self.ranking())

    def _converge(self, pool: Executor, watch: Callable[[], None]) -> None:
        self.has_converged = False
        self._look_at_each(pool, watch)
        while time.perf_counter() < self.search_end:
            if not (chosen := self.next_round(pool)):
                self.has_converged = True
                break
            self.simulate(pool, chosen, watch)

    def nothing_left(self, speeds: Iterable[Speed]) -> Exception:
        """Return the error that no plan keeps the limits, or that none finishes if there are no speeds."""
        if spends := [self.spend_of(speed) for speed in speeds]:
            return unmet(self.goal, spends)
        some = next(iter(self.unfinished.values()))
        return RuntimeError(f"no plan that was simulated comes to its end: {some.reason}")

    def give_up(self, index: int, reason: Unfinished) -> None:
        """Record that a plan does not finish, so that it cannot be chosen."""
        self.unfinished[index] = reason

    def mix(self) -> bool:
        """Open plans with two kinds of replicas, built from the best plans; return whether there are any."""
        space, run, near = self.space, self.space.run, self._near()
        if not can_mix(run.plan, run.policies):
            return False
        trainers = np.unique(space.of_trainer[near]).tolist()
        modes = np.unique(space.of_mode[near]).tolist()
        good = dict.fromkeys(space.candidate(index).replicas for index in near)
        those = [space.trainers[each] for each in trainers]
        replica, pools, best = resolve(run).replica, run.cluster.pools, list(good)[:MIXED]
        others = least_gpus([space.modes[each].rewards for each in modes])
        fleets = mixed_fleets(replica, pools, run.plan, best, those, others)
        return self.widen(fleets, trainers, modes)

    def faster_mixed(self, pool: Executor, most: int) -> list[int]:
        """Open plans with two kinds of replicas, and return at most `most` that may be better than the best.

        Their generation is simulated on one batch.
        """
        first, ranking = len(self.space), self.ranking()
        if not ranking or not self.mix():
            return []
        limit = (1 - self.margin) * self.value(ranking[0])

        def pick(order: list[int], scores: Floats) -> list[int]:
            new = (index for index in order if index >= first and scores[index] < limit)
            return list(islice(self.unlike(new, scores), most))

        return self.refine(pool, pick, FIRST_LOOK)

    def open_mixed(self, candidate: Candidate) -> None:
        """Open a plan with two kinds of replicas.

        Plans that differ only in how the trainer fits its memory are opened too.
        """
        (replicas, trainer, mode), run = candidate, self.space.run
        alike = [p for p, each in enumerate(self.space.trainers) if each.split == trainer.split]
        fits = replicas.fits(resolve(run).replica, run.cluster.pools)
        if replicas.beside is not None and fits and alike and mode in self.space.modes:
            self.widen([replicas], alike, [self.space.modes.index(mode)])

    def widen(
        self, replicas: Sequence[Replicas], trainers: Sequence[int], modes: Sequence[int]
    ) -> bool:
        """Open plans with more replicas, for some trainers and modes; return whether there are any."""
        space = self.space.widened(replicas, trainers, modes) if replicas else self.space
        if len(space) == len(self.space):
            return False
        self.estimates.widen(space)
        self._take(space)
        return True

    def _near(self) -> list[int]:
        """Return the plans near the best that are not colocated, simulated ones first."""
        order = [*self.ranking(), *best_of(self.scores())[:NEIGHBOURS]]
        return [i for i in order if self.space.candidate(i).mode.system != "colocated"]

    def _look_at_each(self, pool: Executor, watch: Callable[[], None]) -> None:
        """Simulate the best plan of each system and pools that has no simulated plan yet.

        A class is skipped if its bounds are above the best simulated plan.
        """
        wanted = self.refine(
            pool,
            lambda order, scores: self.best_of_each(scores),
            FIRST_LOOK,
            self.deadline - (1 - FIRST_SHARE) * self.space.run.plan.time_limit,
        )
        bounds, classes = self.bounds(), self._class_codes
        looked_at = {classes[index] for index in (*self.speeds, *self.unfinished)}
        wanted = [index for index in wanted if classes[index] not in looked_at]
        least = {i: float(bounds[classes == classes[i]].min()) for i in wanted}
        while wanted:
            ranking = self.ranking()
            is_judged = ranking and self.goal.objective != "pareto"
            best = self.value(ranking[0]) if is_judged else np.inf
            self.simulate(pool, [i for i in wanted[:CLASSES] if least[i] <= best], watch)
            wanted = [] if self.is_late else wanted[CLASSES:]

    def best_of_each(self, scores: Floats) -> list[int]:
        """Return the best plans by estimate, without duplicates.

        First comes the best of each system, then the fastest of all, then the best of each system
        on each pair of pools.
        """
        codes = self._class_codes
        classes = [np.nonzero(codes == code)[0] for code in np.unique(codes)]
        found = [int(places[np.argmin(scores[places])]) for places in classes]
        order = sorted(found, key=lambda index: float(scores[index]))
        of_systems: dict[SystemName, int] = {}
        for index in order:
            of_systems.setdefault(self.space.candidate(index).mode.system, index)
        fastest = int(np.argmin(self.estimates.estimate().step))
        return list(dict.fromkeys([*of_systems.values(), fastest, *order]))

    def next_round(self, pool: Executor) -> list[int]:
        """Return the plans to simulate next, or none if no other plan may be better by more than the margin."""
        self.refine(pool, lambda order, scores: within(order, scores, NEAR), FIRST_LOOK)
        self.refine(pool, lambda order, scores: within(order, scores, NEARER))
        return self.refine(pool, self._pick)

    def least_open(self) -> float:
        """Return the lowest expected objective among plans without a similar simulated plan."""
        scores = self.scores()
        return next((float(scores[i]) for i in self.unlike(best_of(scores), scores)), np.inf)

    def settle(self, pool: Executor, indices: list[int]) -> None:
        """Simulate the generation of the best plans by estimate on one batch, and that of `indices` on all batches."""
        self.refine(pool, lambda order, scores: within(order, scores, NEARER), FIRST_LOOK)
        self.refine(pool, lambda order, scores: indices)

    def refine(
        self,
        pool: Executor,
        pick: Callable[[list[int], Floats], list[int]],
        num_batches: int | None = None,
        until: float = np.inf,
    ) -> list[int]:
        """Simulate the stages of the picked plans until the corrected estimates pick no new ones.

        Generation is simulated on all batches, or on the first `num_batches`. The loop also ends at
        `until`, a value of `time.perf_counter`, and when the search has no time left.
        """
        first, last = counted_steps(open_trial(self.base)[0].simulate.max_steps)
        measured = range(first - 1, last)[:num_batches]
        while True:
            scores = self.scores()
            picked = pick(best_of(scores), scores)
            passes = self.estimates.unchecked(picked)
            asked = self.estimates.asked(picked, len(measured))
            is_over = self.is_spent or time.perf_counter() > min(until, self.deadline)
            if is_over or not (passes or asked):
                return picked
            batches = tuple(measured)
            for one, error in self._ask(pool, training_error_of, passes, batches[:1]):
                self.estimates.learn_passes(one, error)
            for which, found in self._ask(pool, generation_of, asked, batches):
                self.estimates.learn(which, found)

    def _ask(
        self,
        pool: Executor,
        work: Callable[[Trial], Answer],
        wanted: Mapping[Key, int],
        batches: tuple[int, ...],
    ) -> Iterable[tuple[Key, Answer]]:
        """Run `work` on batches of plans, and return each answer with its key."""
        trials = [
            (k, Trial(self.base, self.space.candidate(i), batches)) for k, i in wanted.items()
        ]
        trials = list(self._within_work(trials, len(batches)))
        return run_all(pool, work, trials, until=self.deadline).items()

    def _within_work(
        self, trials: Iterable[tuple[Key, Trial]], num_batches: int
    ) -> Iterator[tuple[Key, Trial]]:
        """Yield trials of some batches, each with its key, until `most_rollouts` are simulated."""
        for key, trial in trials:
            if self.is_spent:
                return
            rollouts = self.space.run.algorithm.rollouts_per_step
            self.num_rollouts += num_batches * rollouts / trial.portions
            yield key, trial

    def _pick(self, order: list[int], scores: Floats) -> list[int]:
        """Choose the best plans by estimate that may be better than the best so far, or equal and faster.

        Some plans differ only in the trainer's parallelism and the sync mode. Only the best of them
        by estimate is taken, because closed forms compare these as well as a simulation. Plans of a
        Pareto set are taken in order from one end to the other.
        """
        ranking = self.ranking()
        if self.goal.objective == "pareto":
            return self._spread(
                [i for i in self.unlike(order, scores) if scores[i] <= 1 + self.margin]
            )
        if not ranking:
            over = self.excess_of(self._least_steps(self.estimates.estimate()))
            kept = [i for i in order if over[i] <= 1]
            return list(self.unlike(kept, scores))[:ROUND]
        best = ranking[0]
        worth = self._worth(scores, best)
        limit = (1 - self.margin) * self.value(best)
        wanted = sorted((i for i in order if worth[i] < limit), key=lambda i: worth[i])
        return list(self.unlike(wanted, scores))[:ROUND]

    def _worth(self, scores: Floats, best: int) -> Floats:
        """Return the scores, lowered for plans that are faster than the best.

        Such a plan may cost a little more. If the objective is time, cheaper plans are treated so.
        Scores stay unchanged if a later goal looks for faster plans anyway.
        """
        if self.goal.takes_faster or self.goal.objective == "pareto":
            return scores
        steps = self.estimates.estimate().step
        other = self._dollars(steps) if self.goal.objective == "step-time" else steps
        worth = scores.copy()
        worth[other < (1 - ALIKE) * other[best]] *= (1 - self.margin) / (1 + ALIKE)
        return worth

    def in_order(self) -> list[int]:
        """Return the plans that are best by estimate, from the best to the worst."""
        return best_of(self.scores())

    def unlike(self, order: Iterable[int], scores: Floats) -> Iterator[int]:
        """Yield plans that are unlike all simulated plans and all plans yielded before.

        A similar plan is also yielded if it is clearly better by estimate.
        """
        least: dict[Hashable, float] = {}
        for index in (*self.speeds, *self.unfinished):
            shape = self._shape(index)
            least[shape] = min(least.get(shape, np.inf), scores[index])
        for index in order:
            shape = self._shape(index)
            if scores[index] < (1 - self.margin) * least.get(shape, np.inf):
                least[shape] = scores[index]
                yield index

    def _shape(self, index: int) -> Hashable:
        replicas, trainer, mode = self.space.candidate(index)
        return replicas, trainer.pool, trainer.num_gpus, mode._replace(sync_mode="full")

    def _spread(self, indices: list[int]) -> list[int]:
        """Return evenly spaced plans between the fastest and the slowest."""
        steps = self.estimates.estimate().step
        ordered = sorted(indices, key=lambda index: steps[index])
        places = np.linspace(0, len(ordered) - 1, min(ROUND, len(ordered)))
        return [ordered[place] for place in np.unique(places.round().astype(int))]

    def simulate(self, pool: Executor, indices: Iterable[int], watch: Callable[[], None]) -> None:
        """Simulate a few steps of plans and learn from them."""
        steps = open_trial(self.base)[0].simulate.max_steps
        trials = dict(self._within_work([(i, self._trial(i)) for i in indices], steps))
        estimated = self.estimates.estimate().step
        found = run_all(pool, timed_speed_of, trials.items(), watch, self.deadline)
        for index, (speed, seconds) in found.items():
            if isinstance(speed, Unfinished):
                self.give_up(index, speed)
                continue
            self.portions[index] = trials[index].portions
            self._of_trials[trials[index]] = speed
            self.seconds[index] = seconds * self.portions[index]
            self.speeds[index] = speed
            mode = self.space.modes[self.space.of_mode[index]]
            self._over[mode.system].append(speed.step_time / estimated[index])
            self.estimates.learn_step(index, speed.step_time)

    def speeds_of(
        self,
        pool: Executor,
        wanted: Mapping[Key, Trial],
        watch: Callable[[], None],
        until: float,
    ) -> dict[Key, Speed | Unfinished]:
        """Return the figures of trials over a few steps; a trial that is known is not simulated again.

        Trials that did not start by `until`, a value of `time.perf_counter`, are left out.
        """
        new = dict.fromkeys(trial for trial in wanted.values() if trial not in self._of_trials)
        self._of_trials |= run_all(
            pool, short_speed_of, [(each, each) for each in new], watch, until
        )
        known = self._of_trials
        return {key: known[trial] for key, trial in wanted.items() if trial in known}

    def _trial(self, index: int) -> Trial:
        candidate = self.space.candidate(index)
        return Trial(self.base, candidate, portions=portions_of(candidate.apply(self.space.run)))

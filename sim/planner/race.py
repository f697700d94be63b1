"""Run the last rounds of planning.

Compare the finalists for longer on the same prompts, choose the best, and simulate its steady state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from math import inf
from statistics import median
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from streamrl.record.billing import adds_nothing
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import Metrics
from streamrl.record.relations import may_be_chance
from streamrl.record.run_comparison import is_beyond_chance, ratio_half_width
from streamrl.record.steady_state import Speed, over_steps, with_step_time
from streamrl.record.whole_run import whole_time, with_bill
from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.sim.planner.objective import (
    Spend,
    excess,
    faster_goal,
    keeps_limits,
    limits_of,
)
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import (
    EPISODE_STEPS,
    SEARCH_STEPS,
    Trial,
    Unfinished,
    metrics_of,
    run_all,
    shortened,
    whole,
)

Key = TypeVar("Key", bound=Hashable)
FINAL_STEPS = 16
"""Most steps by which finalists are compared. Comparisons on the same prompts need no more."""
LONGER_STEPS = 32
"""Most steps by which the cost of a faster plan is compared with the cheapest plan's."""
EQUAL = 4
"""Significant digits to which objectives are compared. Paired steps are no more exact."""
CONTENDS = 1.08
"""Largest ratio of a finalist's objective to the best one's, over the few steps of the search."""
MAY_BE_CHANCE = 0.05
"""Largest share of the objective that may be chance. A plan further behind is never alike, however wide its interval is.
"""
SETTLING = 0.5
"""Share of `plan.time_limit` for which the chosen plan may be simulated after the limit."""
MEASURING = 1.3
"""Time to simulate a step with all measurements, relative to one of the search."""
SPARE = 3
"""Further plans to try if all finalists exceed a budget over the whole run."""


class Race:
    """Longer simulations of the best plans of a search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.finals: dict[int, list[Speed]] = {}
        """Per finalist: the speed over the compared steps, one per seed."""
        self.steady: dict[int, list[Metrics]] = {}
        """Per plan that may be chosen: the steady state, one per seed."""
        self.beside: dict[int, Metrics] = {}
        """Per plan for comparison: the figures over as many steps, with the run's own seed."""
        self.cheapest: int | None = None
        """The plan whose cost `plan.tolerance` refers to, once the search looks for faster plans.
        """
        self.faster_goal: PlanConfig | None = None
        """The goal of the search for faster plans, once it has begun."""
        self._limited: dict[int, Run] = {}
        """Run file of each full simulation, with the number of steps that time allowed."""

    # Rounds ---------------------------------------------------------------------------------------

    def run(self, pool: Executor, watch: Callable[[], None]) -> int:
        """Return the plan to choose.

        Among plans with about the same objective it is the faster one, or the cheaper one if the
        objective is time.
        """
        search, most = self.search, self.search.space.run.plan.finalists
        ranking = search.ranking()
        limit = CONTENDS * search.value(ranking[0])
        contenders = [index for index in ranking[:most] if search.value(index) <= limit]
        order = sorted(ranking, key=lambda index: search.second_value_of(search.speeds[index]))
        near = [i for i in order if search.value(i) <= (1 + 2 * ALIKE) * search.value(ranking[0])]
        self._compare(pool, dict.fromkeys([*contenders, *near[:1]]), watch)
        others = self._that_may_finish(pool, watch)
        while not self.finals and (index := next(others, None)) is not None:
            self._compare(pool, [index], watch)
        return self._choose()

    def find_cheapest(self, pool: Executor, watch: Callable[[], None]) -> int:
        """Return the plan to choose by cost. `plan.tolerance` refers to it from now on.

        It keeps the limits of `[plan]` over all of its steps, not only over the first few.
        """
        cheapest = self.run(pool, watch)
        if limits_of(self.search.space.run.plan):
            cheapest = self.settle(pool, cheapest, watch)
        self.cheapest = cheapest
        return cheapest

    def aim_at_faster(self, cheapest: int) -> None:
        """Let the search look for the fastest plan from now on that costs little more than this one."""
        search, before = self.search, self.faster_goal
        spend = search.spend_of(search.speeds[cheapest])
        self.faster_goal = faster_goal(search.space.run.plan, spend.whole)
        if before is None or search.goal == before:  # else it has another goal by now
            search.aim_at(self.faster_goal)

    def settle(self, pool: Executor, index: int, watch: Callable[[], None]) -> int:
        """Simulate a plan until its step time is known, on every seed, and return it if it keeps the budget.

        If it exceeds a budget or does not finish, the next plan is tried.

        Raises:
            ValueError: all plans exceed a budget or the deadline of `[plan]`.
            RuntimeError: no plan finishes.
        """
        ranking = sorted(self.finals, key=self.value)
        finalists = [index, *(other for other in ranking if other != index)]
        others = self._that_may_finish(pool, watch)
        for each in chain(finalists, self._most_spare(SPARE), others):
            self._compare(pool, [each], watch)
            if each in self.finals and self._stays_tolerable(pool, each, watch):
                self._simulate_whole(pool, each, watch)
            steady = self.steady.get(each, ())
            if steady and self._keep_own_limits(steady) and self.is_tolerable(each):
                return each
        raise self.search.nothing_left(chain.from_iterable(self.steady.values()))

    def _keep_own_limits(self, speeds: Iterable[Speed]) -> bool:
        """Whether simulations keep the limits of `[plan]`, whatever the goal of the search is."""
        search = self.search
        return all(keeps_limits(search.space.run.plan, search.spend_of(each)) for each in speeds)

    def _that_may_finish(self, pool: Executor, watch: Callable[[], None]) -> Iterator[int]:
        """If some plans did not finish, yield the plans not tried yet, the best first, while time is left.

        After the last one the search goes on, because it left out plans that looked worse than those
        that did not finish.
        """
        search, tried = self.search, set[int]()
        while search.unfinished and not search.is_late:
            done = tried | self._limited.keys()
            if all(index in done for index in search.ranking()) and not search.go_on(pool, watch):
                return
            left = (index for index in search.ranking() if index not in done)
            if (index := next(left, None)) is None:
                return
            tried.add(index)
            yield index

    def _most_spare(self, count: int) -> Iterator[int]:
        """Yield plans that are not finalists, those furthest below their limits first."""
        search, plan = self.search, self.search.space.run.plan
        others = [index for index in search.ranking() if index not in self.finals]
        others.sort(key=lambda index: excess(plan, search.spend_of(search.speeds[index])))
        yield from others[:count] if limits_of(plan) else []

    def _compare(self, pool: Executor, indices: Iterable[int], watch: Callable[[], None]) -> None:
        search = self.search
        run, new = search.space.run, [index for index in indices if index not in self.finals]
        for seed in range(run.seed, run.seed + run.plan.seeds):
            base, until = shortened(run, seed, FINAL_STEPS), search.deadline
            trials = {i: Trial(base, search.space.candidate(i)) for i in new}
            found = search.speeds_of(pool, trials, watch, until)
            for index in new:
                speed = found.get(index)
                if isinstance(speed, Unfinished):
                    self.give_up(index, speed)
                elif speed is not None:
                    self.finals.setdefault(index, []).append(speed)
        self.finals = {i: s for i, s in self.finals.items() if i not in search.unfinished}

    def _choose(self) -> int:
        if not self.finals:
            raise self.search.nothing_left(())
        ranking = sorted(self.open_finals() or self.finals, key=self.value)
        alike = [i for i in ranking if self.is_alike(i, ranking[0])]
        least = min(map(self._second_value, alike))
        ties = [i for i in alike if self._second_value(i) <= (1 + ALIKE) * least]
        best = [i for i in ties if not any(self.dominates(other, i) for other in ranking)]
        return min(best or ties, key=self._preference)

    def open_finals(self) -> list[int]:
        """Return the finalists that keep the limits and cost at most `plan.tolerance` more than the cheapest plan."""
        return [index for index in self.finals if self._is_open(index)]

    def _is_open(self, index: int) -> bool:
        """Whether a finalist keeps the limits and costs at most `plan.tolerance` more than the cheapest plan."""
        return self._keeps_limits(index) and self.is_tolerable(index)

    def _keeps_limits(self, index: int) -> bool:
        return all(map(self.search.keeps_limits, self.finals[index]))

    def is_tolerable(self, index: int) -> bool:
        """Whether a plan costs at most `plan.tolerance` more than the cheapest, over the same steps."""
        if self.cheapest is None:
            return True
        dollars, _ = self.ratios(index, self.cheapest)
        return dollars <= 1 + self.search.space.run.plan.tolerance

    def is_near_tolerance(self, index: int) -> bool:
        """Whether chance alone may decide if a plan costs at most `plan.tolerance` more than the cheapest."""
        if self.cheapest in (None, index):
            return False
        dollars, _ = self.ratios(index, self.cheapest)
        (one, *_), (other, *_) = self.pair(index, self.cheapest)
        limit = 1 + self.search.space.run.plan.tolerance
        return may_be_chance(dollars, limit, ratio_half_width(one, other))

    def just_above_tolerance(self) -> list[int]:
        """Return the plans with more steps than the search needs that are above `plan.tolerance` within chance."""
        known = dict.fromkeys([*self.known(), *filter(self._keeps_limits, self.finals)])
        return [i for i in known if not self.is_tolerable(i) and self.is_near_tolerance(i)]

    def give_up(self, index: int, reason: Unfinished) -> None:
        """Record that a plan does not finish, so that it cannot be chosen and `plan.tolerance` refers to another."""
        self.search.give_up(index, reason)
        self.finals.pop(index, None)
        if index == self.cheapest:
            self.cheapest = self._cheapest_left()
            if self.cheapest is not None and self.faster_goal is not None:
                self.aim_at_faster(self.cheapest)

    def _cheapest_left(self) -> int | None:
        """Return the cheapest plan that finishes and keeps the limits of `[plan]`, over the few steps of the search."""
        search = self.search
        left = {i: s for i, s in search.speeds.items() if i not in search.unfinished}
        spends = {i: search.spend_of(s).whole for i, s in left.items() if search.keeps_limits(s)}
        return min(spends, key=spends.__getitem__, default=None)

    def _stays_tolerable(self, pool: Executor, index: int, watch: Callable[[], None]) -> bool:
        """Whether a finalist is still tolerable over more steps.

        If steps overlap, later steps are longer than the first ones.
        """
        if self.cheapest is None or index == self.cheapest:
            return True
        if not self.is_tolerable(index):
            return False
        run, candidate = self.search.space.run, self.search.space.candidate
        most = min(run.simulate.max_steps, LONGER_STEPS)
        base = whole(replace(run, simulate=replace(run.simulate, max_steps=most)), run.seed)
        new = [each for each in (index, self.cheapest) if not self.as_known(each)]
        trials = [(each, Trial(base, candidate(each))) for each in new]
        self._take_beside(run_all(pool, metrics_of, trials, watch))
        return index in self.finals and self.is_tolerable(index)

    def _second_value(self, index: int) -> float:
        """Return the value that orders plans of the same objective: seconds, or dollars if the objective is time."""
        return median(map(self.search.second_value_of, self.finals[index]))

    def _preference(self, index: int) -> tuple[int, float, float]:
        """Return the key that orders plans of about the same objective.

        The simplest comes first, then the better one. Of equal plans the cheapest comes first.
        """
        dollars = median(speed.cost_per_step for speed in self.finals[index])
        return int(self.search.complexity[index]), float(f"{self.value(index):.{EQUAL}g}"), dollars

    def _simulate_whole(self, pool: Executor, index: int, watch: Callable[[], None]) -> None:
        """Simulate a plan on every seed, in parallel, until its step time is known."""
        run, candidate = self._in_time(index), self.search.space.candidate(index)
        if index in self.steady:
            return
        self._limited[index] = run
        known = self.beside.get(index)
        seeds = range(run.seed, run.seed + run.plan.seeds)
        if known is not None and len(known.step_times) <= LONGER_STEPS and len(seeds) == 1:
            self.steady[index] = [known]  # it ended because its step time was known
            return
        trials = [(seed, Trial(whole(run, seed), candidate)) for seed in seeds]
        of_seeds = run_all(pool, metrics_of, trials, watch).values()
        finished = [metrics for metrics in of_seeds if not isinstance(metrics, Unfinished)]
        if len(finished) == len(of_seeds):
            self.steady[index] = finished
        else:
            self.give_up(index, next(m for m in of_seeds if isinstance(m, Unfinished)))

    def stand_beside(
        self, pool: Executor, chosen: int, indices: Iterable[int], watch: Callable[[], None]
    ) -> bool:
        """Simulate plans with the run's own seed, for at most as many steps as the chosen one.

        Return whether all were simulated. Plans that did not start within `SETTLING` of
        `plan.time_limit` after the limit are left out.
        """
        new = {i: self.search.space.candidate(i) for i in indices if not self.as_known(i)}
        found = self.simulate_as_long(pool, chosen, new, watch)
        self._take_beside(found)
        return len(found) == len(new)

    def _take_beside(self, found: Mapping[int, Metrics | Unfinished]) -> None:
        for index, metrics in found.items():
            if isinstance(metrics, Unfinished):
                self.give_up(index, metrics)
            else:
                self.beside[index] = metrics

    def simulate_as_long(
        self,
        pool: Executor,
        chosen: int,
        candidates: Mapping[Key, Candidate],
        watch: Callable[[], None],
    ) -> dict[Key, Metrics | Unfinished]:
        """Simulate plans for at most as many steps as the chosen one, and return those that started in time.

        Plans with episodes are simulated for `EPISODE_STEPS`, and compared over the steps that both have.
        """
        run = self._limited[chosen]
        most = min(run.simulate.max_steps, len(self.steady[chosen][0].step_times))
        if run.environment is not None:
            most = min(most, EPISODE_STEPS)
        base = whole(replace(run, simulate=replace(run.simulate, max_steps=most)), run.seed)
        trials = [(key, Trial(base, candidate)) for key, candidate in candidates.items()]
        until = max(time.perf_counter(), self.search.deadline) + SETTLING * run.plan.time_limit
        return run_all(pool, metrics_of, trials, watch, until)

    def as_known(self, index: int) -> list[Metrics]:
        """Return the figures of a plan by seed, the run's own first; empty if only a few steps were simulated."""
        if index in self.steady:
            return self.steady[index]
        return [self.beside[index]] if index in self.beside else []

    def known(self) -> list[int]:
        """Return the plans with as many steps as the chosen one that keep the limits."""
        plans = dict.fromkeys([*self.steady, *self.beside])
        return [i for i in plans if self.search.keeps_limits(self.as_known(i)[0])]

    def take_cheaper(self) -> None:
        """Let `plan.tolerance` refer to the cheapest plan that was simulated for long."""
        known = self.known()
        if (cheapest := self.cheapest) in known:
            self.cheapest = min(known, key=lambda index: self.ratios(index, cheapest)[0])

    def spend(self, index: int) -> Spend[float]:
        """Return the dollars and seconds of a plan that was simulated for as long as the chosen one."""
        return self.search.spend_of(self.as_known(index)[0])

    def better_beside(self, chosen: int) -> int | None:
        """Return the plan to choose instead, among those with as many steps as the chosen one, or None.

        It is clearly better, or it is both cheaper and faster by more than chance. The few steps of
        the search differ from the steady state, and more so if steps overlap.
        """
        kept = [index for index in self.known() if self.is_tolerable(index)]
        if not kept:
            return None
        behind = {index: self.behind(index, chosen) for index in kept}
        best = min(kept, key=lambda index: behind[index])
        if chosen not in kept or behind[best] < -ALIKE:
            return best
        ahead = [index for index in kept if self.dominates(index, chosen)]
        return min(ahead, key=lambda index: behind[index], default=None)

    def dominates(self, index: int, other: int) -> bool:
        """Whether a plan is both cheaper and faster than another, by more than chance."""
        if index == other:
            return False
        (one, *_), (another, *_) = self.pair(index, other)
        return all(_is_below(ratio, one, another) for ratio in self.ratios(index, other))

    def ratios(self, index: int, other: int) -> tuple[float, float]:
        """Return the ratios of a plan's dollars and time to another's; see `ratios_of`."""
        return ratios_of(*self._sources(index, other))

    def ahead_over_few_steps(self, chosen: int) -> list[int]:
        """Return the finalists that need more steps, because they may be better than they were judged.

        Over the steps that both have, they are cheaper and faster than the chosen plan, or clearly
        cheaper than the cheapest plan.
        """
        short = [i for i in self.finals if not self.as_known(i) and self._keeps_limits(i)]
        cheapest = self.cheapest
        return [
            index
            for index in short
            if self.dominates(index, chosen)
            or (cheapest is not None and self.ratios(index, cheapest)[0] < 1 - ALIKE)
        ]

    def _in_time(self, index: int) -> Run:
        """Return the run with at most the steps that time allows, estimated from the simulations of the search."""
        search, run = self.search, self.search.space.run
        a_step = MEASURING * search.seconds[index] / len(search.speeds[index].step_times)
        room = max(SEARCH_STEPS, int(SETTLING * run.plan.time_limit / a_step))
        if room >= run.simulate.max_steps:
            return run
        return replace(run, simulate=replace(run.simulate, max_steps=room))

    def steps_in_time(self, index: int) -> int | None:
        """Return the steps of a plan that time allowed, if its interval did not reach the target; else None."""
        most = self._limited[index].simulate.max_steps
        is_cut = most < self.search.space.run.simulate.max_steps
        return most if is_cut and len(self.steady[index][0].step_times) > most else None

    def planned(self, index: int) -> Run:
        """Return the run file of a chosen plan. Simulating it reproduces its figures."""
        is_cut = self.steps_in_time(index) is not None
        base = self._limited[index] if is_cut else self.search.space.run
        return self.search.space.candidate(index).apply(base)

    # Values ---------------------------------------------------------------------------------------

    def value(self, index: int) -> float:
        """Return the objective of a finalist: the median over its seeds."""
        return median(map(self.search.value_of, self.finals[index]))

    def is_alike(self, index: int, best: int) -> bool:
        """Whether a finalist costs about as much as the best one, or a difference up to `MAY_BE_CHANCE` may be chance."""
        behind = self.behind(index, best)
        (one, *_), (other, *_) = self.pair(index, best)
        return behind <= ALIKE or (
            behind <= MAY_BE_CHANCE and is_beyond_chance(one, other, 1 + behind) is False
        )

    def behind(self, index: int, other: int) -> float:
        """Return the share by which a plan's objective is above another's, over the same steps."""
        ours, theirs = (
            median(map(self.search.value_of, speeds)) for speeds in self.pair(index, other)
        )
        return ours / theirs - 1

    def pair(self, index: int, other: int) -> tuple[list[Speed], list[Speed]]:
        """Return simulations of two plans on the same prompts, over the steps that count in both.

        They are of the steady state if both have it. Otherwise they are of the finalists, or of the
        search.
        """
        return paired(*self._sources(index, other))

    def simulated(self, index: int) -> Sequence[Speed]:
        """Return the longest simulations of a plan by seed."""
        return self.as_known(index) or self.finals.get(index) or [self.search.speeds[index]]

    def _sources(self, index: int, other: int) -> tuple[Simulated, Simulated]:
        ours: Sequence[Speed] = self.as_known(index)
        theirs: Sequence[Speed] = self.as_known(other)
        if not (ours and theirs):
            are_finalists = index in self.finals and other in self.finals
            of_few = {i: [self.search.speeds[i]] for i in (index, other)}
            found = self.finals if are_finalists else of_few
            ours, theirs = found[index], found[other]
        return Simulated(self.search, index, ours), Simulated(self.search, other, theirs)


class Simulated(NamedTuple):
    """A plan of a search, with its simulations by seed."""

    search: Search
    plan: int
    speeds: Sequence[Speed]

    def over(self, place: int, first: int, last: int) -> Speed:
        """Return the figures of one simulation over some of its steps."""
        return self._billed(over_steps(self.speeds[place], first, last))

    def with_step_time(self, place: int, seconds: float) -> Speed:
        """Return the figures of one simulation for another mean step."""
        return self._billed(with_step_time(self.speeds[place], seconds))

    def _billed(self, speed: Speed) -> Speed:
        space = self.search.space
        if adds_nothing(space.run.cluster):
            return speed
        run = space.candidate(self.plan).apply(space.run)
        return with_bill(run.cluster, speed, whole_time(run, speed), PaidGpus.of(run))

    def spends(self, speeds: Iterable[Speed]) -> list[Spend[float]]:
        """Return the dollars and seconds of simulations of the plan."""
        return [self.search.spend_of(speed) for speed in speeds]


def paired(one: Simulated, other: Simulated) -> tuple[list[Speed], list[Speed]]:
    """Return the simulations of two plans by seed, over the steps that count in both.

    Simulations without a common step are returned as they are.
    """
    pairs = list(zip(one.speeds, other.speeds, strict=False))
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    for place, (speed, rival) in enumerate(pairs):
        first = max(speed.counted_steps[0], rival.counted_steps[0])
        last = min(speed.counted_steps[1], rival.counted_steps[1])
        if first <= last and speed.counted_steps != (first, last):
            ours[place] = one.over(place, first, last)
        if first <= last and rival.counted_steps != (first, last):
            theirs[place] = other.over(place, first, last)
    return ours, theirs


def ratios_of(one: Simulated, other: Simulated) -> tuple[float, float]:
    """Return the ratios of a plan's dollars and time of the whole run to another's, over common steps.

    They are ratios of the medians over seeds. The first ratio is 1 if both plans are free, and
    infinite if only the other one is.
    """
    ours, theirs = paired(one, other)
    spends, rivals = one.spends(ours), other.spends(theirs)

    def ratio(key: str) -> float:
        value, rival = (median(getattr(each, key) for each in found) for found in (spends, rivals))
        return float(value / rival) if rival else (inf if value else 1.0)

    return ratio("whole"), ratio("seconds")


def _is_below(ratio: float, one: Speed, other: Speed) -> bool:
    """Whether a ratio of two plans is below 1 by more than its interval, or by `ALIKE` if it has none."""
    if ratio_half_width(one, other) is None:
        return ratio < 1 - ALIKE
    return ratio < 1 and bool(is_beyond_chance(one, other, ratio))

"""Run the last rounds of planning.

Compare the finalists for longer on the same prompts, choose the best, and simulate its steady state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from itertools import chain
from statistics import median

from msgspec.structs import replace

from streamrl.record.metrics import Metrics
from streamrl.record.run_comparison import is_beyond_chance
from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.sim.planner.objective import excess, limits_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.trial import (
    SEARCH_STEPS,
    Trial,
    Unfinished,
    metrics_of,
    run_all,
    short_speed_of,
    shortened,
    steady_speed_of,
    whole,
)

FINAL_STEPS = 16
"""Most steps by which finalists are compared. Comparisons on the same prompts need no more."""
LONGER_STEPS = 32
"""Most steps by which the cost of a faster plan is compared with the cheapest plan's."""
EQUAL = 4
"""Significant digits to which objectives are compared. Paired steps are no more exact."""
CONTENDS = 1.08
"""Largest ratio of a finalist's objective to the best one's, over the few steps of the search."""
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
        self.beside: dict[int, Speed] = {}
        """Per plan for comparison: the speed over as many steps, with the run's own seed."""
        self.cheapest: int | None = None
        """The plan whose cost `plan.tolerance` refers to, once the search looks for faster plans.
        """
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
        for index in self._that_may_finish():
            if self.finals:
                break
            self._compare(pool, [index], watch)
        return self._choose()

    def find_cheapest(self, pool: Executor, watch: Callable[[], None]) -> int:
        """Return the plan to choose by cost. `plan.tolerance` refers to it from now on."""
        self.cheapest = self.run(pool, watch)
        return self.cheapest

    def settle(self, pool: Executor, index: int, watch: Callable[[], None]) -> int:
        """Simulate a plan until its step time is known, on every seed, and return it if it keeps the budget.

        If it exceeds a budget or does not finish, the next plan is tried.

        Raises:
            ValueError: all plans exceed a budget or the deadline of `[plan]`.
            RuntimeError: no plan finishes.
        """
        ranking = sorted(self.finals, key=self.value)
        finalists = [index, *(other for other in ranking if other != index)]
        for each in chain(finalists, self._most_spare(SPARE), self._that_may_finish()):
            self._compare(pool, [each], watch)
            if each in self.finals and self._stays_tolerable(pool, each, watch):
                compared = () if self.cheapest is None else (self.cheapest,)
                self._simulate_whole(pool, (each, *compared), watch)
            steady = self.steady.get(each, ())
            if steady and all(map(self.search.keeps_limits, steady)) and self.is_tolerable(each):
                return each
        raise self.search.nothing_left(chain.from_iterable(self.steady.values()))

    def _that_may_finish(self) -> Iterator[int]:
        """If some plans did not finish, yield the plans not tried yet, the best first, while time is left."""
        for index in self.search.ranking():
            if self.search.is_late or not self.search.unfinished:
                return
            if index not in self._limited and index not in self.search.unfinished:
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
            known = search.whole_speeds if base == search.base else {}
            trials = [(i, Trial(base, search.space.candidate(i))) for i in new if i not in known]
            found = {**known, **run_all(pool, short_speed_of, trials, watch, until)}
            for index in new:
                speed = found.get(index)
                if isinstance(speed, Unfinished):
                    search.give_up(index, speed)
                elif speed is not None:
                    self.finals.setdefault(index, []).append(speed)
        self.finals = {i: s for i, s in self.finals.items() if i not in search.unfinished}

    def _choose(self) -> int:
        if not self.finals:
            raise self.search.nothing_left(())
        kept = [i for i in self.finals if self._is_open(i)]
        ranking = sorted(kept or self.finals, key=self.value)
        alike = [i for i in ranking if self.is_alike(i, ranking[0])]
        least = min(map(self._second_value, alike))
        ties = [i for i in alike if self._second_value(i) <= (1 + ALIKE) * least]
        return min(ties, key=self._preference)

    def _is_open(self, index: int) -> bool:
        """Whether a finalist keeps the limits and costs at most `plan.tolerance` more than the cheapest plan."""
        return all(map(self.search.keeps_limits, self.finals[index])) and self.is_tolerable(index)

    def is_tolerable(self, index: int) -> bool:
        """Whether a plan costs at most `plan.tolerance` more than the cheapest, over the same steps."""
        if self.cheapest is None:
            return True
        ours, theirs = (
            median(self.search.spend_of(speed).whole for speed in speeds)
            for speeds in self.pair(index, self.cheapest)
        )
        return ours <= (1 + self.search.space.run.plan.tolerance) * theirs

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
        self._take_beside(run_all(pool, short_speed_of, trials, watch))
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

    def _simulate_whole(
        self, pool: Executor, indices: Iterable[int], watch: Callable[[], None]
    ) -> None:
        """Simulate plans on every seed, in parallel, until their step times are known."""
        new = [index for index in dict.fromkeys(indices) if index not in self.steady]
        trials = [(key, trial) for index in new for key, trial in self._whole_trials(index)]
        found = run_all(pool, metrics_of, trials, watch)
        for index in new:
            of_seeds = [metrics for (which, _), metrics in found.items() if which == index]
            finished = [metrics for metrics in of_seeds if not isinstance(metrics, Unfinished)]
            if len(finished) == len(of_seeds):
                self.steady[index] = finished
            else:
                self.search.give_up(index, next(m for m in of_seeds if isinstance(m, Unfinished)))
                self.finals.pop(index, None)

    def _whole_trials(self, index: int) -> Iterator[tuple[tuple[int, int], Trial]]:
        run, candidate = self._in_time(index), self.search.space.candidate(index)
        self._limited[index] = run
        for seed in range(run.seed, run.seed + run.plan.seeds):
            yield (index, seed), Trial(whole(run, seed), candidate)

    def stand_beside(
        self, pool: Executor, chosen: int, indices: Iterable[int], watch: Callable[[], None]
    ) -> bool:
        """Simulate plans with the run's own seed, for at most as many steps as the chosen one.

        Return whether all were simulated. Plans that did not start within `SETTLING` of
        `plan.time_limit` after the limit are left out.
        """
        run, candidate = self._limited[chosen], self.search.space.candidate
        most = min(run.simulate.max_steps, len(self.steady[chosen][0].step_times))
        run = replace(run, simulate=replace(run.simulate, max_steps=most))
        new = [index for index in indices if not self.as_known(index)]
        trials = [(index, Trial(whole(run, run.seed), candidate(index))) for index in new]
        until = max(time.perf_counter(), self.search.deadline) + SETTLING * run.plan.time_limit
        found = run_all(pool, steady_speed_of, trials, watch, until)
        self._take_beside(found)
        return len(found) == len(new)

    def _take_beside(self, found: Mapping[int, Speed | Unfinished]) -> None:
        for index, speed in found.items():
            if isinstance(speed, Unfinished):
                self.search.give_up(index, speed)
                self.finals.pop(index, None)
            else:
                self.beside[index] = speed

    def as_known(self, index: int) -> list[Speed]:
        """Return the steady speed of a plan by seed, the run's own first; empty if only a few steps were simulated."""
        if index in self.steady:
            return [*self.steady[index]]
        return [self.beside[index]] if index in self.beside else []

    def better_beside(self, chosen: int) -> int | None:
        """Return the best plan with as many steps as the chosen one if it is clearly better, else None.

        The few steps of the search differ from the steady state, and more so if steps overlap.
        """
        speeds = {index: self.as_known(index)[0] for index in (*self.beside, *self.steady)}
        values = {index: self.search.value_of(speed) for index, speed in speeds.items()}
        kept = [
            index
            for index, speed in speeds.items()
            if self.search.keeps_limits(speed) and self.is_tolerable(index)
        ]
        best = min(kept, key=lambda index: values[index], default=chosen)
        return best if values[best] < (1 - ALIKE) * values[chosen] else None

    def cheapest_beside(self, chosen: int) -> int:
        """Return the plan with the best goal among the chosen plan and those with as many steps."""
        kept = [
            i for i in (*self.beside, *self.steady) if self.search.keeps_limits(self.as_known(i)[0])
        ]
        return min([chosen, *kept], key=lambda index: self.search.value_of(self.as_known(index)[0]))

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
        """Whether a finalist costs about as much as the best one, or the difference may be chance."""
        behind = self.behind(index, best)
        (one, *_), (other, *_) = self.pair(index, best)
        return behind <= ALIKE or is_beyond_chance(one, other, 1 + behind) is False

    def behind(self, index: int, other: int) -> float:
        """Return the share by which a plan's objective is above another's, over the same steps."""
        ours, theirs = (
            median(map(self.search.value_of, speeds)) for speeds in self.pair(index, other)
        )
        return ours / theirs - 1

    def pair(self, index: int, other: int) -> tuple[list[Speed], list[Speed]]:
        """Return simulations of two plans on the same prompts and for as many steps.

        They are of the steady state if both have it. Otherwise they are of the finalists, or of the
        search.
        """
        ours, theirs = self.as_known(index), self.as_known(other)
        if num := min(len(ours), len(theirs)):
            return ours[:num], theirs[:num]
        if index in self.finals and other in self.finals:
            return self.finals[index], self.finals[other]
        return [self.search.speeds[index]], [self.search.speeds[other]]

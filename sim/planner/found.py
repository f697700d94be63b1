"""What planning has found, as a plan file has it: the chosen plan, why it was chosen, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sim.planner.objective import front, value_of
from sim.planner.race import Race
from sim.planner.search import Search
from sim.planner.simplicity import complexity
from sim.planner.space import Candidate
from streamrl.engine.systems import System, choose_system
from streamrl.record.paired import is_beyond_chance
from streamrl.record.rent import SECONDS_PER_HOUR
from streamrl.record.speed import Speed
from streamrl.report.plan import SHORT, Beside, Choice, PlannedSide, Runner, plan_text
from streamrl.runfile.config import Run

DEGREES = ("replicas", *SHORT, "micro_batch", "zero", "offload")
NOTABLY = 1.1
"""Times as fast as the chosen plan from which on it is said of one that is as good."""
RUNNERS_UP = 8
"""Plans that are named beside the chosen one."""


class Found:
    """Puts what was simulated into the words of a plan file."""

    def __init__(self, search: Search, race: Race, chosen: int) -> None:
        self._search, self._race, self._index = search, race, chosen
        self.chosen = self._choice(chosen, race.steady[chosen])

    def open_gap(self) -> float | None:
        """Return how much better a plan may be that was not simulated; None where the search found that none is."""
        search = self._search
        if search.has_converged:
            return None
        return max(0.0, 1 - search.least_open() / search.value(self._index))

    def why(self) -> str:
        """Say why this plan is chosen and no other that costs about as much."""
        race, chosen = self._race, self._index
        best = min(race.finals, key=race.value)
        alike = [index for index in race.finals if race.is_alike(index, best)]
        if best == chosen or chosen not in alike:
            return "the best of all that were simulated"
        times = race.finals[chosen][0].step_time / race.finals[best][0].step_time
        faster = f", which is {times:.2g} times as fast" if times > NOTABLY else ""
        return (
            f"the simplest of {len(alike)} plans that are about as good: "
            f"{race.behind(chosen, best):.1%} behind the best, {self._text(best)}{faster}"
        )

    def beside(self) -> list[Beside]:
        """Return what a choice is always seen beside: the best synchronous, the best colocated and the fastest plan."""
        search = self._search
        ranking = [self._index, *(i for i in search.ranking() if i != self._index)]
        kinds: dict[str, Callable[[int], bool]] = {
            "best synchronous": lambda index: not self._system(index).max_staleness,
            "best colocated": lambda index: self._mode(index) == "colocated",
        }
        found = []
        for what, is_kind in kinds.items():
            index = next(filter(is_kind, ranking), None)
            found.append(Beside(what=what, runner=None if index is None else self._runner(index)))
        fastest = min(ranking, key=lambda index: search.speeds[index].step_time)
        found.append(Beside(what="fastest", runner=self._runner(fastest)))
        return found

    def runners_up(self) -> list[Runner]:
        """Return the plans that come next, the best first."""
        race, others = self._race, [i for i in self._search.ranking() if i != self._index]
        finals = sorted((i for i in others if i in race.finals), key=race.value)
        order = [*finals, *(i for i in others if i not in race.finals)]
        return [self._runner(index) for index in order[:RUNNERS_UP]]

    def pareto(self) -> list[Choice]:
        """Return the simulated plans that none beats in seconds and dollars of a step, the fastest first."""
        search = self._search
        if search.space.run.plan.objective != "pareto":
            return []
        indices = search.ranking()
        speeds = [search.speeds[i] for i in indices]
        points = [(speed.step_time, speed.cost_per_step) for speed in speeds]
        return [self._choice(indices[place], [speeds[place]]) for place in front(points)]

    def _system(self, index: int) -> System:
        mode = self._search.space.candidate(index).mode
        return choose_system(mode.apply(self._search.space.run).policies)

    def _mode(self, index: int) -> str:
        return self._search.space.candidate(index).mode.system

    def _text(self, index: int) -> str:
        return describe(self._search.space.run, self._search.space.candidate(index))

    def _choice(self, index: int, speeds: list[Speed]) -> Choice:
        """Describe a simulated plan."""
        search = self._search
        run, candidate, (speed, *_) = search.space.run, search.space.candidate(index), speeds
        ranges = [_range(value_of(run.plan, each), each) for each in speeds]
        return Choice(
            rollout=side_of(run, candidate, "rollout"),
            trainer=side_of(run, candidate, "trainer"),
            settings=settings_of(candidate),
            dollars_per_hour=float(search.space.prices[index]) * SECONDS_PER_HOUR,
            step_time=speed.step_time,
            step_time_interval=speed.step_time_interval,
            median_step_time=speed.median_step_time,
            steps=len(speed.step_times),
            note=speed.note,
            cost_per_step=speed.cost_per_step,
            cost_per_million_tokens=speed.cost_per_million_tokens,
            mean_staleness=speed.mean_staleness,
            complexity=complexity(run, candidate),
            least=min(least for least, _ in ranges),
            most=max(most for _, most in ranges),
            num_seeds=len(ranges),
            estimate=float(search.estimates.estimate().step[index]),
        )

    def _runner(self, index: int) -> Runner:
        """Describe a plan compared with the chosen one on the same prompts and over as many steps."""
        race, search = self._race, self._search
        if index == self._index:
            return Runner(
                choice=self.chosen, value=search.value_of(race.steady[index][0]), behind=0.0
            )
        behind = race.behind(index, self._index)
        (one, *_), (other, *_) = race.pair(index, self._index)
        longer = race.steady[self._index][0].step_time / other.step_time
        value = search.value_of(race.steady[self._index][0]) * (1 + behind)
        return Runner(
            choice=_scaled(self._choice(index, [one]), longer),
            value=value,
            behind=behind,
            is_beyond_chance=is_beyond_chance(one, other, 1 + behind),
        )


def _range(value: float, speed: Speed) -> tuple[float, float]:
    """Return what the interval of the step time leaves open of an objective that grows with it."""
    if speed.step_time_interval is None:
        return value, value
    least, most = (seconds / speed.step_time for seconds in speed.step_time_interval)
    return value * least, value * most


def _scaled(choice: Choice, factor: float) -> Choice:
    """Return a plan with the seconds and dollars that its paired run stands for, as the chosen plan's are known.

    A few steps are other than those of a steady state, for both plans alike.
    """
    return msgspec.structs.replace(
        choice,
        step_time=choice.step_time * factor,
        step_time_interval=None,
        median_step_time=choice.median_step_time * factor,
        cost_per_step=choice.cost_per_step * factor,
        cost_per_million_tokens=choice.cost_per_million_tokens * factor,
    )


def side_of(run: Run, candidate: Candidate, section: str) -> PlannedSide:
    """Describe the side of a plan."""
    side = candidate.replicas if section == "rollout" else candidate.trainer
    return PlannedSide(
        pool=side.pool,
        gpu=run.cluster.pools[side.pool].gpu,
        num_gpus=side.num_gpus,
        degrees={key: int(value) for key, value in side._asdict().items() if key in DEGREES},
    )


def settings_of(candidate: Candidate) -> dict[str, str | int | bool]:
    """Return the keys of the run file that a plan sets."""
    mode = candidate.mode
    found: dict[str, str | int | bool | None] = {
        **{f"rollout.{key}": value for key, value in candidate.replicas._asdict().items()},
        **{f"trainer.{key}": value for key, value in candidate.trainer._asdict().items()},
        "policies.system": mode.system,
        "policies.max_staleness": mode.max_staleness,
        "policies.dispatch": mode.dispatch,
        "policies.order": mode.order,
        "sync.mode": mode.sync_mode,
    }
    return {key: value for key, value in found.items() if value is not None}


def describe(run: Run, candidate: Candidate) -> str:
    """Return a plan in a line."""
    rollout, trainer = (side_of(run, candidate, name) for name in ("rollout", "trainer"))
    return plan_text(rollout, trainer, settings_of(candidate))

"""Describe the result of a search for the plan file: the chosen plan, the reason, and the plans compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import exp, hypot
from statistics import median

import msgspec
from msgspec.structs import replace

from streamrl.hardware.profiles import price_of
from streamrl.record.band import Band, ModelError, band_of, hull
from streamrl.record.metrics import Metrics, StepBands, bands_of_speed
from streamrl.record.run_comparison import is_beyond_chance, ratio_half_width
from streamrl.record.steady_state import Speed
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.costs.curves import accepted_tokens
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.model_errors import estimated_error
from streamrl.sim.planner.objective import front, value_of
from streamrl.sim.planner.plan import SHORT, Choice, ComparedPlan, PlannedSide, RunnerUp, plan_text
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.reward_replicas import RewardReplicas
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate


def drafts_text(drafts: SpeculativeConfig | None, counts: Sequence[int] | None) -> str:
    """Describe the acceptance that plans assume for speculative decoding; empty if no plan may draft.

    Args:
        drafts: the section `rollout.speculative`.
        counts: numbers of drafted tokens that a plan may choose, `plan.speculative`.
    """
    if drafts is None or counts is None:
        return ""
    assert drafts.acceptance is not None, "check_run wants it"
    made = {
        tokens: accepted_tokens(replace(drafts, tokens=tokens)) for tokens in counts if tokens > 0
    }
    each = ", ".join(f"{tokens} drafted make {of:.2f} tokens a step" for tokens, of in made.items())
    drafter = drafts.model or "the model's own layer for multi-token prediction"
    return (
        f"drafts of {drafter} are accepted with probability {drafts.acceptance:g} each where all before were, "
        f"as rollout.speculative.acceptance says{f': {each}' if each else ''}"
    )


DEGREES = ("replicas", *SHORT, "micro_batch", "zero", "offload")
SCALED = ("step_time", "median_step_time", "cost_per_step", "cost_per_million_tokens")
"""Figures of a finalist that are scaled from the chosen plan's. The factor is their ratio over the
steps that both share.
"""
MUCH_FASTER, MOST_FASTER = 0.75, 2
"""A plan is much faster if its step time is below this share of the last reported plan's. The
second value is the most plans reported so.
"""
RUNNERS_UP = 8
"""Most plans that are reported after the chosen one."""


class PlanDescription:
    """Describes simulated plans for the plan file."""

    def __init__(
        self, search: Search, race: Race, chosen: int, cheapest: int | None = None
    ) -> None:
        """Take the indices of the chosen plan and of the cheapest one, which is the chosen one by default."""
        self._search, self._race, self._index = search, race, chosen
        self._cheapest = chosen if cheapest is None else cheapest
        self._errors: dict[int, ModelError] = {}
        self.chosen = self._choice(chosen, race.steady[chosen])

    def open_gap(self) -> float | None:
        """Return how much better a plan without a simulation may be, or None if the search converged."""
        search = self._search
        if search.has_converged:
            return None
        return max(0.0, 1 - float(search.least_open()) / search.value(self._index))

    def why(self) -> str:
        """Return why this plan is chosen, and not another one of about the same cost."""
        if self._search.space.run.plan.takes_faster:
            return self._why_faster()
        race, chosen = self._race, self._index
        best = min(race.finals, key=race.value)
        alike = [index for index in race.finals if race.is_alike(index, best)]
        if best == chosen or chosen not in alike:
            return "the best of all that were simulated"
        return (
            f"the {self._better_in_second(best)} of {len(alike)} plans that are about as good: "
            f"{race.behind(chosen, best):.1%} behind the best, {self._text(best)}"
        )

    def _why_faster(self) -> str:
        """Return how much more the chosen plan costs than the cheapest, and how much faster it is."""
        tolerance, cheapest = self._search.space.run.plan.tolerance, self._cheapest
        if cheapest == self._index:
            return f"the cheapest: no plan that costs at most {tolerance:.0%} more is faster"
        dearer = self._race.behind(self._index, cheapest)
        times = 1 / self._ratio("step_time", self._index, cheapest)
        return (
            f"the fastest that costs at most {tolerance:.0%} more than the cheapest: {dearer:.1%} dearer, "
            f"{times:.2g} times as fast as {self._text(cheapest)}"
        )

    def _better_in_second(self, best: int) -> str:
        """Return the property in which the chosen plan is better than one with about the same objective."""
        key = "cost_per_step" if self._search.goal.objective == "step-time" else "step_time"
        if self._ratio(key, self._index, best) > 1 - ALIKE:
            return "simplest"
        return "cheapest" if key == "cost_per_step" else "fastest"

    def beside(self) -> list[ComparedPlan]:
        """Return the plans for comparison: the best of each kind, and the cheapest if another is chosen."""
        kinds, known = self._kinds(), self._race.as_known
        if kinds["fastest"] is not None and known(kinds["fastest"]):
            those = [index for index in self._ranking() if known(index)]
            kinds["fastest"] = min(those, key=lambda index: known(index)[0].step_time)
        named = [self._beside(what, index) for what, index in kinds.items()]
        faster = (index for index in self._faster() if index not in kinds.values())
        return [*named, *(self._beside("faster", index) for index in islice(faster, MOST_FASTER))]

    def _beside(self, what: str, index: int | None) -> ComparedPlan:
        if index is None:
            return ComparedPlan(what=what, runner=None)
        if not self._race.as_known(index) and index not in self._race.finals:
            return ComparedPlan(what=what, runner=None, not_simulated=self._text(index))
        return ComparedPlan(what=what, runner=self._runner(index))

    def wanted(self) -> list[int]:
        """Return the plans for comparison, which need as many simulated steps as the chosen one."""
        found = [index for index in self._kinds().values() if index is not None]
        if self._search.space.run.plan.objective == "pareto":
            speeds = self._search.speeds
            points = [(speeds[i].step_time, speeds[i].cost_per_step) for i in self._ranking()]
            found += [self._ranking()[place] for place in front(points)]
        return list(dict.fromkeys(found))

    def _kinds(self) -> dict[str, int | None]:
        """Return the best plan of each kind, by the comparison of finalists or by the few steps of the search."""
        ranking, speeds = self._ranking(), self._search.speeds
        kinds: dict[str, Callable[[int], bool]] = {
            **({"cheapest": lambda index: index == self._cheapest} if self._is_faster else {}),
            "best synchronous": lambda index: not self._search.space.system(index).staleness_bound,
            "best colocated": lambda index: self._mode(index) == "colocated",
        }
        found = {what: next(filter(is_kind, ranking), None) for what, is_kind in kinds.items()}
        return {**found, "fastest": min(ranking, key=lambda index: speeds[index].step_time)}

    def _faster(self) -> Iterator[int]:
        """Yield plans that are much faster than the chosen one, the cheapest first.

        Each is also much faster than the one before it.
        """
        known = [self._index, *self._known()]
        points = {i: (self._times(i, "step_time"), self._times(i, "cost_per_step")) for i in known}
        by_cost = sorted(known, key=lambda index: points[index][1])
        last = 1.0
        for index in by_cost:
            if points[index][0] < MUCH_FASTER * last:
                last = points[index][0]
                yield index

    def _ranking(self) -> list[int]:
        return [self._index, *self._others()]

    def runners_up(self) -> list[RunnerUp]:
        """Return the best other plans, among those with more simulated steps than the search needs."""
        found = [self._runner(index) for index in self._known()[:RUNNERS_UP]]
        return sorted(found, key=lambda runner: runner.behind)

    def _others(self) -> list[int]:
        """Return all other plans, finalists first, each group ordered from the best."""
        race, others = self._race, [i for i in self._search.ranking() if i != self._index]
        finals = sorted((i for i in others if i in race.finals), key=race.value)
        return [*finals, *(i for i in others if i not in race.finals)]

    def _known(self) -> list[int]:
        """Return the other plans that are finalists, or have as many steps as the chosen plan."""
        race = self._race
        return [i for i in self._others() if race.as_known(i) or i in race.finals]

    def pareto(self) -> list[Choice]:
        """Return the plans that no other beats in seconds and dollars of a step, the fastest first."""
        if self._search.space.run.plan.objective != "pareto":
            return []
        indices = [self._index, *self._known()]
        points = [(self._times(i, "step_time"), self._times(i, "cost_per_step")) for i in indices]
        return [self._runner(indices[place]).choice for place in front(points)]

    def _times(self, index: int, key: str) -> float:
        """Return the ratio of a figure to the chosen plan's, on the same prompts: the median over seeds."""
        return 1.0 if index == self._index else self._ratio(key, index, self._index)

    def _ratio(self, key: str, index: int, other: int) -> float:
        """Return the ratio of a figure to another plan's, on the same prompts: the median over seeds."""
        ours, theirs = (
            median(getattr(speed, key) for speed in speeds)
            for speeds in self._race.pair(index, other)
        )
        return float(ours / theirs)

    @property
    def _is_faster(self) -> bool:
        """Whether the chosen plan is not the cheapest, but costs little more and is faster."""
        return self._search.space.run.plan.takes_faster and self._cheapest != self._index

    def _mode(self, index: int) -> str:
        return self._search.space.candidate(index).mode.system

    def _text(self, index: int) -> str:
        return describe(self._search.space.run.cluster.pools, self._search.space.candidate(index))

    def _choice(self, index: int, speeds: Sequence[Speed]) -> Choice:
        """Describe a simulated plan."""
        search = self._search
        run, candidate, (speed, *_) = search.space.run, search.space.candidate(index), speeds
        ranges = [_range(value_of(run.plan, each), each) for each in speeds]
        return Choice(
            rollout=side_of(run.cluster.pools, candidate, "rollout"),
            trainer=side_of(run.cluster.pools, candidate, "trainer"),
            verifier=reward_side_of(run.cluster.pools, candidate.mode.rewards),
            settings=settings_of(candidate),
            dollars_per_hour=float(search.space.prices[index]) * SECONDS_PER_HOUR,
            verifier_dollars_per_hour=_reward_price(run.cluster.pools, candidate.mode.rewards),
            step_time=speed.step_time,
            step_time_interval=speed.step_time_interval,
            median_step_time=speed.median_step_time,
            steps=len(speed.step_times),
            note=speed.note,
            cost_per_step=speed.cost_per_step,
            cost_per_million_tokens=speed.cost_per_million_tokens,
            mean_staleness=speed.mean_staleness,
            model_error=self._error(index, speed),
            **self._bands(index, speeds)._asdict(),
            complexity=int(search.complexity[index]),
            least=min(least for least, _ in ranges),
            most=max(most for _, most in ranges),
            num_seeds=len(ranges),
            estimate=float(search.estimates.estimate().step[index]),
        )

    def _error(self, index: int, speed: Speed) -> ModelError:
        """Return the model error of a simulation, or that of its plan by estimate if it was not measured in full."""
        if isinstance(speed, Metrics) and speed.model_error is not None:
            return speed.model_error
        if index not in self._errors:
            self._errors[index] = estimated_error(self._search, index)
        return self._errors[index]

    def _bands(self, index: int, speeds: Sequence[Speed]) -> StepBands:
        """Return the bands of the figures of a step, over all seeds."""
        bands = [bands_of_speed(speed, self._error(index, speed)) for speed in speeds]
        return StepBands(*(hull(of_seeds) for of_seeds in zip(*bands, strict=True)))

    def _runner(self, index: int) -> RunnerUp:
        """Describe a plan compared with the chosen one, on the same prompts and over as many steps.

        These are steady steps if the plan has them.
        """
        race, search = self._race, self._search
        if index == self._index:
            return RunnerUp(
                choice=self.chosen, value=search.value_of(race.steady[index][0]), behind=0.0
            )
        behind = race.behind(index, self._index)
        (one, *more), (other, *_) = race.pair(index, self._index)
        choice = self._choice(index, [one, *more])
        width = ratio_half_width(one, other)
        if not race.as_known(index):
            choice = self._scaled(choice, index, behind, width)
        return RunnerUp(
            choice=choice,
            value=search.value_of(race.steady[self._index][0]) * (1 + behind),
            behind=behind,
            behind_interval=None if width is None else _around(1 + behind, width),
            is_beyond_chance=is_beyond_chance(one, other, 1 + behind),
        )

    def _scaled(self, choice: Choice, index: int, behind: float, width: float | None) -> Choice:
        """Return a finalist with the chosen plan's figures, scaled.

        The factor is the ratio of both plans over the steps that they share.
        """
        ours = self.chosen
        figures = {key: getattr(ours, key) * self._times(index, key) for key in SCALED}
        value = self._search.value_of(self._race.steady[self._index][0]) * (1 + behind)
        interval = None
        if width is not None and ours.step_time_interval is not None:
            own = (ours.step_time_interval[1] / ours.step_time) - 1
            step = figures["step_time"]
            interval = step * (1 - hypot(own, width)), step * (1 + hypot(own, width))
        assert choice.model_error is not None, "every plan has one"
        band = band_of(figures["step_time"], interval, choice.model_error)
        bands = {
            f"{key}_band": Band(
                low=figures[key] * band.low / figures["step_time"],
                high=figures[key] * band.high / figures["step_time"],
            )
            for key in ("step_time", "cost_per_step", "cost_per_million_tokens")
        }
        return msgspec.structs.replace(
            choice,
            **figures,
            **bands,
            step_time_interval=interval,
            note="",
            least=value,
            most=value,
        )


def _around(ratio: float, width: float) -> tuple[float, float]:
    """Return the ends of the interval of `ratio - 1`, given half the width of the interval of log(ratio)."""
    return ratio * exp(-width) - 1, ratio * exp(width) - 1


def _range(value: float, speed: Speed) -> tuple[float, float]:
    """Return the range of an objective that is proportional to the step time, from the step time's interval."""
    least, most = speed.spread
    return value * least, value * most


def side_of(pools: Mapping[str, PoolConfig], candidate: Candidate, section: str) -> PlannedSide:
    """Describe one side of a plan: "rollout" or "trainer"."""
    kinds: Sequence[Replicas | Degrees] = (candidate.trainer,)
    if section == "rollout":
        kinds = candidate.replicas.kinds
    found: PlannedSide | None = None
    for side in reversed(kinds):
        found = PlannedSide(
            pool=side.pool,
            gpu=pools[side.pool].gpu,
            num_gpus=side.num_gpus,
            degrees=_degrees(side),
            beside=found,
        )
    assert found is not None
    return found


def reward_side_of(
    pools: Mapping[str, PoolConfig], rewards: RewardReplicas | None
) -> PlannedSide | None:
    """Describe the GPUs of a plan that compute rewards; None if none does."""
    if rewards is None:
        return None
    return PlannedSide(
        pool=rewards.pool,
        gpu=pools[rewards.pool].gpu,
        num_gpus=rewards.num_gpus,
        degrees={"workers": rewards.workers, "gpus_per_worker": rewards.gpus_per_worker},
    )


def _reward_price(pools: Mapping[str, PoolConfig], rewards: RewardReplicas | None) -> float:
    """Return the dollars per hour of the GPUs that compute rewards."""
    return 0.0 if rewards is None else rewards.num_gpus * price_of(pools[rewards.pool])


def _degrees(side: Replicas | Degrees) -> dict[str, int]:
    own = side._asdict().items()
    return {key: int(value) for key, value in own if key in DEGREES and value is not None}


def settings_of(candidate: Candidate) -> dict[str, str | int | float | bool]:
    """Return the keys of the run file that a plan sets."""
    mode = candidate.mode
    found: dict[str, str | int | float | bool | None] = {
        **{f"rollout.{key}": value for key, value in candidate.replicas.own.items()},
        **{
            f"rollout.others.{place}.{key}": value
            for place, kind in enumerate(candidate.replicas.kinds[1:])
            for key, value in kind.own.items()
        },
        **_drafts(candidate.replicas.drafted),
        **{f"trainer.{key}": value for key, value in candidate.trainer._asdict().items()},
        "policies.system": mode.system,
        "policies.max_staleness": mode.max_staleness,
        "policies.dispatch": mode.dispatch,
        "policies.order": mode.order,
        "sync.mode": mode.sync_mode,
        **_verifier_keys(mode.rewards),
    }
    return {key: value for key, value in found.items() if value is not None}


def _verifier_keys(rewards: RewardReplicas | None) -> dict[str, str | int]:
    return (
        {}
        if rewards is None
        else {f"verifier.{k}": value for k, value in rewards._asdict().items()}
    )


def _drafts(drafted: int | None) -> dict[str, int | bool | None]:
    if drafted is None:
        return {}
    key = "rollout.speculative"
    return {f"{key}.enabled": drafted > 0, f"{key}.tokens": drafted or None}


def describe(pools: Mapping[str, PoolConfig], candidate: Candidate) -> str:
    """Return one line that describes a plan."""
    rollout, trainer = (side_of(pools, candidate, name) for name in ("rollout", "trainer"))
    rewards = reward_side_of(pools, candidate.mode.rewards)
    return plan_text(rollout, trainer, settings_of(candidate), rewards)

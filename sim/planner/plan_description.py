"""Describe the result of a search for the plan file: the chosen plan, the reason, and the plans compared with it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import exp, hypot
from statistics import median

import msgspec
from msgspec.structs import replace

from streamrl.hardware.profiles import price_of
from streamrl.record.band import Band, ModelError, band_of, hull
from streamrl.record.billing import uncounted
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import Metrics, StepBands, bands_of_speed
from streamrl.record.run_comparison import is_beyond_chance, ratio_half_width
from streamrl.record.steady_state import FEW_STEPS, Speed
from streamrl.record.whole_run import WholeRun
from streamrl.runfile.cluster_config import ClusterConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.formatting import listing
from streamrl.runfile.plan_config import PlanConfig, limit_words
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.costs.curves import accepted_tokens
from streamrl.sim.planner.model_errors import estimated_error
from streamrl.sim.planner.objective import aim_of, front, limits_of, value_of
from streamrl.sim.planner.plan import Choice, PartialNode, PlanOption, RunnerUp
from streamrl.sim.planner.plan_settings import (
    describe,
    group_of,
    reward_side_of,
    settings_of,
    side_of,
)
from streamrl.sim.planner.race import Race, Simulated
from streamrl.sim.planner.reward_replicas import RewardReplicas
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate
from streamrl.targets.back_ends import back_end_settings


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


SCALED = ("step_time", "median_step_time", "cost_per_step", "cost_per_million_tokens")
"""Figures of a finalist that are scaled from the chosen plan's. The factor is their ratio over the
steps that both share.
"""
RUNNERS_UP = 5
"""Most groups of plans that are reported after the options."""


def _grouped(members: list[RunnerUp], option: int | None) -> RunnerUp:
    """Return the best of a group with the others as its variants."""
    best, *others = sorted(members, key=lambda runner: runner.behind)
    return msgspec.structs.replace(best, variants=others, variant_of=option)


class PlanDescription:
    """Describes simulated plans for the plan file."""

    def __init__(self, search: Search, race: Race, chosen: int) -> None:
        """Take the index of the chosen plan."""
        self._search, self._race, self._index = search, race, chosen
        self._cheapest = chosen if race.cheapest is None else race.cheapest
        self.chosen = choice_of(search, chosen, race.steady[chosen])

    def open_gap(self) -> float | None:
        """Return how much better a plan without a simulation may be, or None if the search converged."""
        search, goal = self._search, self._race.faster_goal or self._search.goal
        if search.has_converged:
            return None
        with search.judged_by(goal):  # the search that was cut
            return max(0.0, 1 - float(search.least_open()) / search.value(self._index))

    def why(self) -> str:
        """Return why this plan is chosen, and not another one of about the same cost."""
        if self._search.space.run.plan.takes_faster:
            return self._why_faster()
        race, chosen = self._race, self._index
        rivals = race.open_finals()
        best = min([chosen, *rivals], key=lambda index: race.behind(index, chosen))
        alike = [index for index in rivals if race.is_alike(index, best)]
        if best == chosen or chosen not in alike:
            plan = self._search.space.run.plan
            limit = "" if plan.deadline is None else " and meet the deadline"
            return f"{aim_of(plan)} of all that were simulated{limit}"
        return (
            f"the {self._better_in_second(best)} of {len(alike)} plans that are about as good: "
            f"{race.behind(chosen, best):.1%} behind the best, {self._text(best)}"
        )

    def _why_faster(self) -> str:
        """Return how much more the chosen plan costs than the cheapest, and how much faster it is."""
        plan, cheapest = self._search.space.run.plan, self._cheapest
        tolerance = plan.tolerance
        kept = "" if plan.deadline is None else " of those that meet the deadline"
        if cheapest == self._index and self._race.faster_goal is None:
            return "the cheapest; the time of the search (plan.time_limit) ended before faster plans were searched"
        if cheapest == self._index and not self._search.has_converged:
            return "the cheapest; the time of the search (plan.time_limit) ended while faster plans were searched"
        if cheapest == self._index:
            return f"the cheapest{kept}; none that costs at most {tolerance:.0%} more is faster{self._just_dearer()}"
        dollars, seconds = self._race.ratios(self._index, cheapest)
        if abs(dollars - 1) <= ALIKE and seconds > 1 - ALIKE:
            return (
                f"the simplest of the plans that are about as cheap and as fast: {dollars - 1:+.1%} in cost and "
                f"{seconds - 1:+.1%} in time against {self._text(cheapest)}{self._just_dearer()}"
            )
        is_sure = not self._race.is_near_tolerance(self._index)
        return (
            f"the fastest that costs at most {tolerance:.0%} more than the cheapest{kept}: {dollars - 1:.1%} dearer"
            f"{'' if is_sure else ' (within chance of that limit)'}, {1 / seconds:.2g} times as fast as "
            f"{self._text(cheapest)}{self._just_dearer()}"
        )

    def _just_dearer(self) -> str:
        """Return the fastest plan that is above `plan.tolerance` only within chance; empty if there is none."""
        race, chosen = self._race, self._index
        above = {i: race.ratios(i, chosen)[1] for i in race.just_above_tolerance()}
        faster = {index: seconds for index, seconds in above.items() if seconds < 1 - ALIKE}
        if not faster:
            return ""
        index = min(faster, key=faster.__getitem__)
        return (
            f"; within chance, a plan that takes {1 - faster[index]:.0%} less time is within that limit too: "
            f"{self._text(index)}"
        )

    def _better_in_second(self, best: int) -> str:
        """Return the property in which the chosen plan is better than one with about the same objective."""
        key = "cost_per_step" if self._search.goal.objective == "step-time" else "step_time"
        if self._ratio(key, self._index, best) > 1 - ALIKE:
            return "simplest"
        return "cheapest" if key == "cost_per_step" else "fastest"

    def runners_up(self, rows: Mapping[int, int]) -> list[RunnerUp]:
        """Return the best other plans, grouped: plans on the same GPUs in the same system are one.

        Only plans with more simulated steps than the search needs are returned.

        Args:
            rows: number of each option by its index. Options are left out.
        """
        like = {self._group(index): number for index, number in reversed(list(rows.items()))}
        groups: dict[Hashable, list[RunnerUp]] = {}
        for index in self._known():
            if index not in rows:
                groups.setdefault(self._group(index), []).append(self._runner(index))
        found = [_grouped(members, like.get(group)) for group, members in groups.items()]
        return sorted(found, key=lambda runner: runner.behind)[:RUNNERS_UP]

    def _group(self, index: int) -> Hashable:
        return group_of(self._search.space.candidate(index))

    def _known(self) -> list[int]:
        """Return the other plans that are finalists, or have as many steps as the chosen plan."""
        race = self._race
        others = [index for index in self._search.ranking() if index != self._index]
        return [i for i in others if race.as_known(i) or i in race.finals]

    def on_front(self) -> list[int]:
        """Return the plans that no other beats in time and dollars, over the few steps of the search."""
        ranking = self._search.ranking()
        spends = [self._search.spend_of(self._search.speeds[index]) for index in ranking]
        points = [(spend.seconds, spend.whole) for spend in spends]
        return [ranking[place] for place in front(points)]

    def pareto(self) -> list[Choice]:
        """Return the plans that no other beats in time and dollars of the whole run, the fastest first."""
        if self._search.space.run.plan.objective != "pareto":
            return []
        indices = [self._index, *self._known()]
        ratios = [self._race.ratios(index, self._index) for index in indices]
        points = [(seconds, dollars) for dollars, seconds in ratios]
        return [self._runner(indices[place]).choice for place in front(points)]

    def _times(self, index: int, key: str) -> float:
        """Return the ratio of a figure to the chosen plan's, on the same prompts: the median over seeds."""
        return 1.0 if index == self._index else self._ratio(key, index, self._index)

    def _ratio(self, key: str, index: int, other: int) -> float:
        """Return the ratio of a figure to another plan's, on the same prompts: the median over seeds.

        If the other plan's GPUs are free, the ratio of dollars is 1.
        """
        ours, theirs = (
            median(getattr(speed, key) for speed in speeds)
            for speeds in self._race.pair(index, other)
        )
        return float(ours / theirs) if theirs else 1.0

    def _text(self, index: int) -> str:
        return describe(self._search.space.run.cluster.pools, self._search.space.candidate(index))

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
        (one, *_), (other, *_) = race.pair(index, self._index)
        choice = choice_of(search, index, race.simulated(index))
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

        The factor is the ratio of both plans over the steps that they share. If the chosen plan's
        GPUs are free, dollars are the finalist's own.
        """
        ours = self.chosen
        figures = {
            key: getattr(ours, key) * self._times(index, key)
            if getattr(ours, key)
            else getattr(choice, key)
            for key in SCALED
        }
        value = self._search.value_of(self._race.steady[self._index][0]) * (1 + behind)
        _, most = self._race.steady[self._index][0].spread
        step, error = figures["step_time"], hypot(most - 1, FEW_STEPS if width is None else width)
        sampled = step * max(0.0, 1 - error), step * (1 + error)
        has_interval = width is not None and ours.step_time_interval is not None
        assert choice.model_error is not None, "every plan has one"
        band = band_of(step, sampled, choice.model_error)
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
            step_time_interval=sampled if has_interval else None,
            note="",
            least=value,
            most=value,
        )


def choice_of(search: Search, index: int, speeds: Sequence[Speed]) -> Choice:
    """Describe a simulated plan of a search, given its speeds by seed."""
    run, candidate, (speed, *_) = search.space.run, search.space.candidate(index), speeds
    ranges = [_range(value_of(run.plan, each), each) for each in speeds]
    return Choice(
        rollout=side_of(run.cluster.pools, candidate, "rollout"),
        trainer=side_of(run.cluster.pools, candidate, "trainer"),
        verifier=reward_side_of(run.cluster.pools, candidate.mode.rewards),
        settings=settings_of(candidate) | _back_ends(run, candidate),
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
        model_error=_error_of(search, index, speed),
        **_bands_of(search, index, speeds)._asdict(),
        complexity=int(search.complexity[index]),
        least=min(least for least, _ in ranges),
        most=max(most for _, most in ranges),
        num_seeds=len(ranges),
        estimate=float(search.estimates.estimate().step[index]),
    )


def objective_band(search: Search, index: int, speeds: Sequence[Speed]) -> Band:
    """Return the range in which the objective of a plan may truly be, over all seeds."""
    plan, bands = Simulated(search, index, speeds), []
    for place, speed in enumerate(speeds):
        step = bands_of_speed(speed, _error_of(search, index, speed)).step_time_band
        low, high = (plan.with_step_time(place, seconds) for seconds in (step.low, step.high))
        bands.append(Band(low=search.value_of(low), high=search.value_of(high)))
    return hull(bands)


def at_worst_text(plan: PlanConfig, options: Sequence[PlanOption]) -> str:
    """Return which limits of `[plan]` the first option exceeds at the high end of its band, and who keeps them; empty if it keeps all."""
    chosen, *others = options
    if not (told := _exceeded(plan, chosen)):
        return ""
    kept = [
        str(each.number)
        for each in others
        if each.is_offered and not each.note and not _exceeded(plan, each)
    ]
    names = f"option{'s' if len(kept) > 1 else ''} {listing(kept)}"
    what = "that limit" if len(told) == 1 else "those limits"
    ending = f"{names} keep{'' if len(kept) > 1 else 's'} {what} even then" if kept else ""
    ending = ending or f"no option of the table is sure to keep {what}"
    return f"at the high end of its band it {' and '.join(told)}; {ending}"


def _exceeded(plan: PlanConfig, option: PlanOption) -> list[str]:
    """Return the limits of `[plan]` that a plan exceeds at the high end of its band, in words."""
    whole = option.whole_run
    highs = {
        "budget_per_step": option.choice.cost_per_step_band,
        "budget": whole.dollars_band,
        "deadline": whole.wall_time_band,
    }
    return [
        f"{limit.tell(band.high)}, more than {limit_words(limit.key, limit.most)}"
        for limit in limits_of(plan)
        if (band := highs.get(limit.key)) is not None and band.high > limit.most
    ]


def partial_nodes(offer: Run, planned: Run) -> list[PartialNode]:
    """Return the nodes that a plan rents in part. Pools with a unit are left out, because their users chose it."""
    pools = {} if offer.plan.unit is not None else planned.cluster.pools
    used = PaidGpus.of(planned).by_pool
    return [
        PartialNode(pool=name, num_gpus=rest, gpus_per_node=pool.gpus_per_node)
        for name, pool in pools.items()
        if not pool.owned and pool.unit is None and pool.gpu != "cpu"
        if (rest := round(used.get(name, 0.0)) % pool.gpus_per_node)
    ]


def _back_ends(base: Run, candidate: Candidate) -> dict[str, str | int | float | bool]:
    """Return the keys of back ends that a plan for execute sets."""
    if base.plan.target != "execute":
        return {}
    planned = candidate.apply(base)
    return {**back_end_settings(planned.rollout, planned.trainer, planned.execute)}


def _reward_price(pools: Mapping[str, PoolConfig], rewards: RewardReplicas | None) -> float:
    """Return the dollars per hour of the GPUs that compute rewards."""
    return 0.0 if rewards is None else rewards.num_gpus * price_of(pools[rewards.pool])


def _error_of(search: Search, index: int, speed: Speed) -> ModelError:
    """Return the model error of a simulation, or that of its plan by estimate if it was not measured in full."""
    if isinstance(speed, Metrics) and speed.model_error is not None:
        return speed.model_error
    return estimated_error(search, index)


def _bands_of(search: Search, index: int, speeds: Sequence[Speed]) -> StepBands:
    """Return the bands of the figures of a step, over all seeds."""
    bands = [bands_of_speed(speed, _error_of(search, index, speed)) for speed in speeds]
    return StepBands(*(hull(of_seeds) for of_seeds in zip(*bands, strict=True)))


def whole_run_of(of_seeds: Sequence[Metrics], offer: ClusterConfig) -> WholeRun | None:
    """Return the totals with the run's own seed, and bands that hold those of all seeds.

    A plan has only the pools that it uses. The offer says which keys of the bill are set.
    """
    found = [metrics.whole_run for metrics in of_seeds if metrics.whole_run is not None]
    bands = {
        key: hull([band for whole in found if (band := getattr(whole, key)) is not None])
        for key in ("seconds_band", "dollars_band")
    }
    return replace(found[0], **bands, uncounted=uncounted(offer)) if found else None


def _around(ratio: float, width: float) -> tuple[float, float]:
    """Return the ends of the interval of `ratio - 1`, given half the width of the interval of log(ratio)."""
    return ratio * exp(-width) - 1, ratio * exp(width) - 1


def _range(value: float, speed: Speed) -> tuple[float, float]:
    """Return the range of an objective that is proportional to the step time, from the step time's interval."""
    least, most = speed.spread
    return value * least, value * most

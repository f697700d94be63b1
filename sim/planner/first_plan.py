"""Say what became of the plan that the first answer recommended, once plans were compared by simulation."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from streamrl.record.relations import relation_text
from streamrl.record.run_comparison import ratio_half_width
from streamrl.sim.planner.first_answer import EstimatedPlan
from streamrl.sim.planner.options import broken_limits
from streamrl.sim.planner.plan import FirstPlan
from streamrl.sim.planner.plan_settings import describe
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import ALIKE, Search


def first_plan_of(
    search: Search, race: Race, chosen: int, first: EstimatedPlan, numbers: Mapping[int, int]
) -> FirstPlan:
    """Compare the plan that the first answer recommended with the one that was chosen.

    Args:
        search: the finished search.
        race: its longer simulations.
        chosen: the recommended plan.
        first: the recommended plan of the first answer.
        numbers: the number of each option, by the index of its plan.
    """
    index = search.space.index_of(first.candidate)
    pools, own = search.space.run.cluster.pools, search.space.candidate(chosen)
    if index != chosen and describe(pools, own) == describe(pools, first.candidate):
        index = chosen  # they differ in settings that no text about a plan names
    known = [] if index is None else race.as_known(index)
    plan = FirstPlan(
        choice=first.choice,
        estimated_dollars=first.dollars,
        estimated_wall_time=first.seconds,
        option=None if index is None else numbers.get(index),
    )
    if index is None or not known:
        return plan
    spend = race.spend(index)
    dollars, seconds = race.ratios(index, chosen)
    (one, *_), (other, *_) = race.pair(index, chosen)
    free = not search.space.prices.any()
    return replace(
        plan,
        dollars=spend.whole,
        wall_time=spend.seconds,
        relation=relation_text(None if free else dollars, seconds, ratio_half_width(one, other)),
        reason=_reason(search, race, index, chosen),
    )


def _reason(search: Search, race: Race, index: int, chosen: int) -> str:
    """Return why the rule of the plan did not choose it; empty if it did."""
    plan = search.space.run.plan
    if index == chosen:
        return ""
    if limits := broken_limits(plan, race.spend(index)):
        return f"it {limits}"
    if not plan.takes_faster:
        behind = race.behind(index, chosen)
        if behind <= ALIKE:
            return "it is about as good by plan.objective, and not simpler"
        return f"it is {behind:.1%} behind by plan.objective"
    cheapest = race.cheapest
    if cheapest is not None and not race.is_tolerable(index):
        dollars, _ = race.ratios(index, cheapest)
        return f"it costs {dollars - 1:.1%} more than the cheapest (plan.tolerance {plan.tolerance:.0%})"
    return "it is not clearly faster" if race.ratios(index, chosen)[1] < 1 else "it is slower"

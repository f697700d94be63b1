"""Ask after each what-if which option the rule of the plan would choose.

The rule is that of the search: the fastest plan that costs at most `plan.tolerance` more than the cheapest, or the best
by `plan.objective`. Each option has its ratios to the recommended plan over all its simulated steps, times the effect of
the change on it, as simulated over a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from streamrl.record.relations import relation_text
from streamrl.runfile.plan_config import PlanConfig
from streamrl.sim.planner.objective import Spend, keeps_limits
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.sensitivity import (
    Effect,
    Judgement,
    Verdict,
    effects_of,
    estimated_effects,
    spend_after,
)
from streamrl.sim.planner.shifts import Shift

NO_OPTION = -1
"""Stands for a plan that is better by estimate and is no option."""
UNSURE = 1.08
"""Ratio up to which an estimated effect on two plans may differ from the simulated one. Outputs 20 % longer took one plan
6 % longer than estimated, because GPU memory limited its generation.
"""


class Figures(NamedTuple):
    """One plan after a change."""

    plan: int
    spend: Spend[float]
    value: float
    """Its objective, relative to that of the recommended plan before the change."""


class NewChoice(NamedTuple):
    """Another plan that the rule chooses after a change."""

    plan: int
    effect: Effect
    """Ratios to the recommended plan before the change."""
    relation: str
    """Its dollars and time after the change against those of the recommended plan, in words."""
    reason: str
    """Why the rule chooses it."""


def choices_after(
    search: Search,
    race: Race,
    chosen: int,
    judged: Judgement,
    options: Sequence[int],
    pool: Executor,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, NewChoice]:
    """Return the new choice of each what-if, by the name of the change. A change that keeps the choice has none.

    Args:
        search: the finished search.
        race: its longer simulations.
        chosen: the recommended plan.
        judged: the effects of all changes on it, and better plans by estimate.
        options: further plans that were simulated for as long.
        pool: simulates.
        watch: called after each simulation.
    """
    standing = {index: _standing(search, race, index, chosen) for index in (chosen, *options)}
    verdicts = [*judged.verdicts, *judged.idle]
    known = [each for each in verdicts if each.effect is not None]
    close = [(each.shift, {*_close(search, standing, each.shift)}) for each in known]
    asked = [(index, shift) for index in options for shift, plans in close if index in plans]
    found = effects_of(search, asked, pool, watch)
    effects: dict[int, dict[str, Effect]] = {index: {} for index in options}
    for (index, shift), effect in zip(asked, found, strict=True):
        if effect is not None:
            effects[index][shift.what] = effect
    named = ((each, _choice(search, standing, chosen, each, effects)) for each in known)
    return {verdict.what: choice for verdict, choice in named if choice is not None}


def with_choices(judged: Judgement, changed: Mapping[str, NewChoice]) -> Judgement:
    """Return a judgement with the changes of all things that alter the choice, also of those that the chosen plan does not use."""
    things = {each.shift.thing for each in judged.idle if each.what in changed}
    verdicts = [*judged.verdicts, *(each for each in judged.idle if each.shift.thing in things)]
    left_out = {thing: why for thing, why in judged.left_out.items() if thing not in things}
    return Judgement(verdicts, left_out, [])


class _Standing(NamedTuple):
    """One plan before a change, over all its simulated steps."""

    spend: Spend[float]
    ratios: Effect
    """To the recommended plan."""


def _standing(search: Search, race: Race, index: int, chosen: int) -> _Standing:
    own, spend = race.spend(chosen), race.spend(index)
    dollars, seconds = race.ratios(index, chosen)
    per_step = spend.per_step / own.per_step if own.per_step else 1.0
    value = 1.0 if index == chosen else 1 + race.behind(index, chosen)
    paired = Spend(spend.per_step, spend.per_day, own.whole * dollars, own.seconds * seconds)
    return _Standing(paired, Effect(value, seconds, per_step, dollars))


def _close(search: Search, standing: Mapping[int, _Standing], shift: Shift) -> Iterator[int]:
    """Yield the plans that the rule may choose after a change, or that may be the cheapest then, by estimate."""
    plan = search.space.run.plan
    estimated = estimated_effects(search, shift, list(standing))
    found = [
        _after(search, index, standing[index], effect)
        for index, effect in zip(standing, estimated, strict=True)
    ]
    least = min(each.spend.whole for each in found)
    value = min(each.value for each in found)
    for each in found:
        is_cheap = each.spend.whole <= (1 + plan.tolerance) * UNSURE * least
        if is_cheap if plan.takes_faster else each.value <= UNSURE * value:
            yield each.plan


def _after(search: Search, index: int, standing: _Standing, effect: Effect) -> Figures:
    spend = spend_after(search, standing.spend, effect)
    return Figures(index, spend, standing.ratios.value * effect.value)


def _choice(
    search: Search,
    standing: Mapping[int, _Standing],
    chosen: int,
    verdict: Verdict,
    effects: Mapping[int, Mapping[str, Effect]],
) -> NewChoice | None:
    """Return the option that the rule chooses after a change; None if it is the recommended plan, or no option."""
    assert verdict.effect is not None, "it was simulated"
    plan = search.space.run.plan
    own = _after(search, chosen, standing[chosen], verdict.effect)
    found = [own]
    is_option = verdict.other is not None and search.space.index_of(verdict.other) in standing
    if verdict.other_effect is not None and not is_option:
        found.append(_after(search, NO_OPTION, standing[chosen], verdict.other_effect))
    for index, of_option in effects.items():
        if (effect := of_option.get(verdict.what)) is not None:
            found.append(_after(search, index, standing[index], effect))
    best = best_of(plan, found, chosen)
    if best is None or best.plan in (chosen, NO_OPTION):
        return None
    before, after = standing[best.plan].ratios, effects[best.plan][verdict.what]
    ratios = Effect(*(one * other for one, other in zip(before, after, strict=True)))
    free = not own.spend.whole
    relation = relation_text(
        None if free else best.spend.whole / own.spend.whole,
        best.spend.seconds / own.spend.seconds,
    )
    return NewChoice(best.plan, ratios, relation, _reason(plan, found, own, best))


def best_of(
    plan: PlanConfig, found: Sequence[Figures], chosen: int | None = None
) -> Figures | None:
    """Return the plan that the rule of a search chooses; None if no plan keeps the limits.

    The recommended plan stays unless another one is better by more than `ALIKE`, as in the search.
    """
    kept = [each for each in found if keeps_limits(plan, each.spend)]
    if not kept:
        return None
    figure = _value
    if plan.takes_faster:
        kept, figure = _tolerable(plan, kept), _seconds
    best = min(kept, key=figure)
    own = next((each for each in kept if each.plan == chosen), None)
    return best if own is None or figure(best) < (1 - ALIKE) * figure(own) else own


def _value(figures: Figures) -> float:
    return figures.value


def _seconds(figures: Figures) -> float:
    return figures.spend.seconds


def _tolerable(plan: PlanConfig, found: Sequence[Figures]) -> list[Figures]:
    """Return the plans that cost at most `plan.tolerance` more than the cheapest."""
    most = (1 + plan.tolerance) * min(each.spend.whole for each in found)
    return [each for each in found if each.spend.whole <= most]


def _reason(plan: PlanConfig, found: Sequence[Figures], own: Figures, best: Figures) -> str:
    """Return why the rule of a plan chooses another one."""
    if not keeps_limits(plan, own.spend):
        return "it keeps the limits of [plan] then, and the recommended plan does not"
    if not plan.takes_faster:
        return f"{1 - best.value / own.value:.1%} better by plan.objective then"
    kept = [each for each in found if keeps_limits(plan, each.spend)]
    least = min(each.spend.whole for each in kept)
    if own not in _tolerable(plan, kept):
        return f"the recommended plan costs {own.spend.whole / least - 1:.1%} more than the cheapest then"
    if best.spend.whole <= own.spend.whole:
        return "it is both cheaper and faster then"
    return f"it is faster, and costs {best.spend.whole / least - 1:.1%} more than the cheapest then"

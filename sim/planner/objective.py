"""Compute the objective of plans, and check them against the budgets and the deadline of `[plan]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, assert_never

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.profiles import price_of
from streamrl.record.steady_state import Speed
from streamrl.record.whole_run import WholeTime, steps_for_one, whole_dollars
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.formatting import long_time
from streamrl.runfile.keys import pool_key
from streamrl.runfile.plan_config import COSTS, ObjectiveName, PlanConfig
from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

Floats = NDArray[np.float64]
UNITS: dict[ObjectiveName, str] = {
    "cost-per-million-tokens": "dollars per million tokens trained on",
    "cost-per-step": "dollars per mean step",
    "step-time": "seconds per mean step",
    "pareto": "seconds x dollars per mean step",
}


def aim_of(plan: PlanConfig) -> str:
    """Return what the best plan is by `plan.objective` and `plan.value_of_hour`: "the cheapest"."""
    if plan.value_of_hour and plan.objective != "step-time":
        return "the best with the cost of waiting (plan.value_of_hour)"
    if plan.objective in COSTS:
        return "the cheapest"
    return "the fastest" if plan.objective == "step-time" else "the best"


def check_free_plans(pools: Mapping[str, PoolConfig], plan: PlanConfig, prices: Floats) -> None:
    """Raise `RunError` if plans on owned GPUs alone cost nothing, and the objective needs dollars.

    Args:
        pools: the offer.
        plan: the section `[plan]`.
        prices: dollars a second of all plans.
    """
    if plan.objective == "step-time" or prices.all():
        return
    name = next(name for name, pool in pools.items() if not price_of(pool))
    key = pool_key(name, "price")
    text = (
        f"{key} is 0, and plans on your own GPUs alone cost nothing: set a price, such as that of their power, or "
        "plan.objective='step-time'"
    )
    raise RunError(key, 0.0, Bounds(0.0, excludes_least=True), text)


def value_of(plan: PlanConfig, speed: Speed) -> float:
    """Return the objective of a simulated plan.

    For the Pareto set it is the product of seconds and dollars. All values are scaled to the
    progress of a step without staleness (`plan.staleness_cost`). Dollars are those of the bill of a
    run of mean steps, for each of its steps. They include those of waiting (`plan.value_of_hour`),
    also for set-up and failed attempts.
    """
    steps, billed = steps_for_one(plan, speed.mean_staleness), speed.steady_billing_ratio
    rented = speed.step_time * speed.rented_ratio
    waiting = plan.value_of_hour / SECONDS_PER_HOUR * rented
    match plan.objective:
        case "cost-per-million-tokens":
            paid = billed + waiting / speed.cost_per_step if waiting else billed
            return speed.cost_per_million_tokens * paid * steps
        case "cost-per-step":
            return (speed.cost_per_step * billed + waiting) * steps
        case "step-time":
            return speed.step_time * steps
        case "pareto":
            return rented * speed.cost_per_step * billed * steps**2
        case _:
            assert_never(plan.objective)


def values_of(
    plan: PlanConfig,
    seconds: Floats,
    prices: Floats,
    tokens_per_step: float,
    lags: Floats,
    egress: Floats,
    billed: Floats | float = 1.0,
    rented: Floats | float = 1.0,
) -> Floats:
    """Estimate the objective of every plan.

    Args:
        plan: the section `[plan]`.
        seconds: seconds of a step.
        prices: dollars a second.
        tokens_per_step: output tokens that a step trains on.
        lags: mean staleness in versions.
        egress: dollars a step for traffic between pools.
        billed: bill of the whole run, relative to these dollars.
        rented: time until the end of the whole run, relative to the seconds of its steps.
    """
    steps: Floats = steps_for_one(plan, np.asarray(lags))
    seconds, dollars = seconds * steps, (seconds * prices + egress) * steps * billed
    waiting = plan.value_of_hour / SECONDS_PER_HOUR * seconds * rented
    match plan.objective:
        case "cost-per-million-tokens":
            return (dollars + waiting) / tokens_per_step * 1e6
        case "cost-per-step":
            return dollars + waiting
        case "step-time":
            return seconds
        case "pareto":
            return seconds * rented * dollars
        case _:
            assert_never(plan.objective)


def decide(seconds: Floats, dollars: Floats, tolerance: float) -> tuple[int, int, int]:
    """Return the indices of three plans: the cheapest, the fastest within `tolerance` of its cost, and the fastest."""
    cheapest = int(dollars.argmin())
    little_more = dollars <= (1 + tolerance) * dollars[cheapest]
    return cheapest, int(np.where(little_more, seconds, np.inf).argmin()), int(seconds.argmin())


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto-optimal points, by rising first coordinate."""
    order = sorted(range(len(points)), key=lambda place: points[place])
    kept: list[int] = []
    for place in order:
        if not kept or points[place][1] < points[kept[-1]][1]:
            kept.append(place)
    return kept


def distance_to_front(seconds: Floats, dollars: Floats) -> Floats:
    """Return the factor by which each plan is away from the Pareto set.

    It is 1 on the set. A plan with 1.1 reaches the set if its seconds and dollars are divided by
    1.1. A plan whose GPUs are free has the dollars of any other one of them.
    """
    order = np.lexsort((dollars, seconds))
    best = np.minimum.accumulate(dollars[order])
    is_front = np.concatenate(([True], best[1:] < best[:-1]))
    corners = order[is_front]
    farthest = np.ones(len(seconds))
    for corner in corners:
        dearer = dollars / dollars[corner] if dollars[corner] else np.where(dollars, np.inf, 1.0)
        above = np.minimum(seconds / seconds[corner], dearer)
        np.maximum(farthest, above, out=farthest)
    return farthest


Mask = NDArray[np.bool_]
Figure = TypeVar("Figure", float, Floats)

RENTS = (
    ("budget_per_hour", "an hour", SECONDS_PER_HOUR),
    ("budget_per_day", "a day", SECONDS_PER_DAY),
)
"""Budgets that the price of the GPUs alone may exceed, before any simulation."""
OVER = "more than plan.{}"


class Spend(NamedTuple, Generic[Figure]):
    """The figures that limits apply to, of one plan or of all."""

    per_step: Figure
    """Dollars of a mean step."""
    per_day: Figure
    """Dollars of a day in the steady state."""
    whole: Figure
    """Dollars of the whole run."""
    seconds: Figure
    """Seconds of the whole run, with set-up and failed attempts."""


class Ceiling(NamedTuple):
    """One limit that is set in `[plan]`."""

    key: str
    most: float
    place: int
    """Index of the field of `Spend` that it limits."""
    tell: Callable[[float], str]


def _dollars(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


TELL: dict[str, Callable[[float], str]] = {
    "budget_per_step": lambda value: f"costs {value:.4g} dollars a step",
    "budget_per_day": lambda value: f"costs {_dollars(value)} dollars a day",
    "budget": lambda value: f"costs {_dollars(value)} dollars for the whole run",
    "deadline": lambda value: f"takes {long_time(value)} for the whole run",
}
"""Text for a figure, by the key of its limit. The keys are in the order of `Spend`."""


def within_rent(plan: PlanConfig, prices: Floats, cut: Counter[str]) -> Mask:
    """Return which plans have a rent within the budgets, given dollars a second; `cut` counts the others.

    Raises:
        ValueError: no plan has. The error contains the lowest price.
    """
    kept = np.ones(len(prices), dtype=bool)
    for key, time, seconds in RENTS:
        budget = getattr(plan, key)
        breaks = prices * seconds > (np.inf if budget is None else budget)
        cut[OVER.format(key)] += int((kept & breaks).sum())
        kept &= ~breaks
        if breaks.all():
            least = prices.min() * seconds
            raise ValueError(
                f"plan.{key} {budget:g}: the cheapest plan that fits costs {least:.2f} dollars {time}"
            )
    return kept


def limits_of(plan: PlanConfig) -> list[Ceiling]:
    """Return the limits on simulated plans. `budget_per_hour` is left out, because it limits the rent beforehand."""
    return [
        Ceiling(key, float(most), place, tell)
        for place, (key, tell) in enumerate(TELL.items())
        if (most := getattr(plan, key)) is not None
    ]


def spend_of(time: WholeTime, speed: Speed) -> Spend[float]:
    """Return the dollars and seconds of a simulated plan, given the time of its whole run."""
    per_day = speed.cost_per_step / speed.step_time * SECONDS_PER_DAY
    return Spend(speed.cost_per_step, per_day, whole_dollars(speed, time), time.rented)


def excess(plan: PlanConfig, spend: Spend[Figure]) -> Figure | float:
    """Return the largest ratio of a figure to its limit; 0 without limits."""
    most: Figure | float = 0.0
    for limit in limits_of(plan):
        most = np.maximum(most, spend[limit.place] / limit.most)
    return most


def beats(one: Spend[float], other: Spend[float]) -> bool:
    """Whether a plan costs no more than another, and takes no longer."""
    return one.whole <= other.whole and one.seconds <= other.seconds


def faster_goal(plan: PlanConfig, least: float) -> PlanConfig:
    """Return the goal of a search for the fastest plan that costs little more than `least` dollars."""
    most = (1 + plan.tolerance) * least
    budget = most if plan.budget is None else min(most, plan.budget)
    changed: PlanConfig = replace(plan, objective="step-time", budget=budget)
    return changed


def keeps_limits(plan: PlanConfig, spend: Spend[float]) -> bool:
    """Return whether a simulated plan keeps all limits."""
    return float(excess(plan, spend)) <= 1


def unmet(plan: PlanConfig, spends: Sequence[Spend[float]]) -> ValueError:
    """Return the error for the case that no plan keeps the limits, with the figures of the cheapest or fastest plan."""
    limits = limits_of(plan)
    broken = [limit for limit in limits if min(s[limit.place] for s in spends) > limit.most]
    if broken:
        return ValueError("; ".join(_tell_least(limit, spends) for limit in broken))
    keys = " and ".join(map(limit_text, limits))
    cheapest = min(spends, key=lambda spend: spend.whole)
    fastest = min(spends, key=lambda spend: spend.seconds)
    told = [f"{_dollars(s.whole)} dollars and {long_time(s.seconds)}" for s in (cheapest, fastest)]
    return ValueError(
        f"{keys}: no plan that was simulated keeps all; the cheapest takes {told[0]} for the whole run, "
        f"the fastest {told[1]}"
    )


def _tell_least(limit: Ceiling, spends: Sequence[Spend[float]]) -> str:
    best = "fastest" if limit.key == "deadline" else "cheapest"
    least = min(spend[limit.place] for spend in spends)
    return f"{limit_text(limit)}: the {best} plan that was simulated {limit.tell(least)}"


def limit_text(limit: Ceiling) -> str:
    """Return the key of a limit and its value: "plan.deadline 3.00 days"."""
    shown = long_time(limit.most) if limit.key == "deadline" else f"{limit.most:g}"
    return f"plan.{limit.key} {shown}"

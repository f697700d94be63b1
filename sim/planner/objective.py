"""What a plan is judged by: the figure that is made least, estimated for all plans or read from a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from streamrl.record.speed import Speed
from streamrl.record.whole_run import steps_for_one
from streamrl.runfile.plan_config import ObjectiveName, PlanConfig

Floats = NDArray[np.float64]
UNITS: dict[ObjectiveName, str] = {
    "cost-per-million-tokens": "dollars per million tokens trained on",
    "cost-per-step": "dollars per mean step",
    "step-time": "seconds per mean step",
    "pareto": "seconds x dollars per mean step",
}


def value_of(plan: PlanConfig, speed: Speed) -> float:
    """Read a simulation.

    The Pareto set is searched for the least product of seconds and dollars. All are those of as much progress as a step
    whose rollouts are not behind makes (`plan.staleness_cost`).
    """
    steps = steps_for_one(plan, speed.mean_staleness)
    match plan.objective:
        case "cost-per-million-tokens":
            return speed.cost_per_million_tokens * steps
        case "cost-per-step":
            return speed.cost_per_step * steps
        case "step-time":
            return speed.step_time * steps
        case "pareto":
            return speed.step_time * speed.cost_per_step * steps**2
        case _:
            assert_never(plan.objective)


def values_of(
    plan: PlanConfig,
    seconds: Floats,
    prices: Floats,
    tokens_per_step: float,
    lags: Floats,
    egress: Floats,
) -> Floats:
    """Estimate the objective of every plan.

    Args:
        plan: the section `[plan]`.
        seconds: of a step.
        prices: dollars a second.
        tokens_per_step: output tokens that a step trains on.
        lags: mean staleness.
        egress: dollars a step for what crosses links.
    """
    steps: Floats = steps_for_one(plan, np.asarray(lags))
    seconds, dollars = seconds * steps, (seconds * prices + egress) * steps
    match plan.objective:
        case "cost-per-million-tokens":
            return dollars / tokens_per_step * 1e6
        case "cost-per-step":
            return dollars
        case "step-time":
            return seconds
        case "pareto":
            return seconds * dollars
        case _:
            assert_never(plan.objective)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points that no other is below in both coordinates, by rising first coordinate."""
    order = sorted(range(len(points)), key=lambda place: points[place])
    kept: list[int] = []
    for place in order:
        if not kept or points[place][1] < points[kept[-1]][1]:
            kept.append(place)
    return kept


def distance_to_front(seconds: Floats, dollars: Floats) -> Floats:
    """Return by what factor each plan is away from the Pareto set: 1 on it, 1.1 where a tenth less would reach it."""
    order = np.lexsort((dollars, seconds))
    best = np.minimum.accumulate(dollars[order])
    is_front = np.concatenate(([True], best[1:] < best[:-1]))
    corners = order[is_front]
    farthest = np.ones(len(seconds))
    for corner in corners:
        above = np.minimum(seconds / seconds[corner], dollars / dollars[corner])
        np.maximum(farthest, above, out=farthest)
    return farthest

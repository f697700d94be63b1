"""Which plans of a space to look at: the best by their scores, those near the best, those of each kind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.sim.planner.space import Space

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
LOOKED_AT = 4000
"""Plans, the best by estimate, among which a round chooses."""


def classes_of(space: Space) -> Indices:
    """Return a number for the system and the pools of each plan."""
    systems = {mode.system: place for place, mode in enumerate(space.modes)}
    codes = np.array([systems[mode.system] for mode in space.modes])[space.of_mode]
    sides: tuple[tuple[list[tuple[str, ...]], NDArray[np.int32]], ...] = (
        ([each.pools for each in space.replicas], space.of_replicas),
        ([(each.pool,) for each in space.trainers], space.of_trainer),
    )
    for pools, of_side in sides:
        names = {name: place for place, name in enumerate(dict.fromkeys(pools))}
        codes = codes * len(names) + np.array([names[name] for name in pools])[of_side]
    return codes


def best_of(scores: Floats) -> list[int]:
    """Return the places of the least scores, the least first."""
    count = min(LOOKED_AT, len(scores))
    places = np.argpartition(scores, count - 1)[:count]
    order: list[int] = places[np.argsort(scores[places], kind="stable")].tolist()
    return order


def within(order: list[int], scores: Floats, reach: float) -> list[int]:
    """Return the plans whose score is near the best."""
    return [index for index in order if scores[index] <= reach * scores[order[0]]]

"""Roles that compute at the same time on one host's cores: how much of its speed each keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias

Work: TypeAlias = Callable[[], Awaitable[list[float]]]
"""Does some work, and returns the seconds of each part of it."""
LEAST_PASSES = 4
"""Training passes of a trainer that has no company: it has no end of its own."""


class PartTimes(NamedTuple):
    """Mean seconds of a part of each role's work; 0 where there is no such role."""

    generating: float
    training: float


async def side_by_side(generate: Sequence[Work], train: Work | None) -> PartTimes:
    """Let replicas generate at the same time, all as much, and a trainer train for as long as they do.

    Means, not medians: where there are more roles than cores most steps take as long as alone, and some wait for a turn.
    """
    generating = asyncio.gather(*(work() for work in generate))
    passes: list[float] = []
    while train is not None and not (generating.done() and len(passes) >= LEAST_PASSES):
        found = await train()
        if not generating.done() or len(passes) < LEAST_PASSES:
            passes += found  # not one that had company for a part of it
    steps = [mean(seconds) for seconds in await generating]
    return PartTimes(mean(steps or [0.0]), mean(passes or [0.0]))

"""Measure contention: the speed that roles keep when they compute at the same time on one host's cores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias

Work: TypeAlias = Callable[[], Awaitable[list[float]]]
"""Does some work, and returns the seconds of each part of it."""
LEAST_PASSES = 4
"""Training passes that are made, as a trainer has no end of its own; and how often replicas begin again for them."""


class PartTimes(NamedTuple):
    """Mean seconds of a part of each role's work; 0 where there is no such role."""

    generating: float
    training: float


async def run_concurrently(generate: Sequence[Work], train: Work | None) -> PartTimes:
    """Let replicas generate at the same time, all as much, and a trainer train for as long as they do.

    Replicas begin again until the trainer has made a few passes in their company; if each outlasts them, one counts as it
    is. One that was never as full as all are meant to be is left out. Means, not medians: where there are more roles than cores most steps take as long as alone, and some wait for a turn.
    """
    if not generate:
        passes = [mean(await train()) for _ in range(LEAST_PASSES)] if train else [0.0]
        return PartTimes(0.0, mean(passes))
    steps: list[float] = []
    passes, last = [], [0.0]
    for _ in range(LEAST_PASSES):
        generating = asyncio.gather(*(work() for work in generate))
        while train is not None and not generating.done():
            last = await train()
            if not generating.done():
                passes += last
        steps += [mean(seconds) for seconds in await generating if seconds]
        if steps and (train is None or len(passes) >= LEAST_PASSES):
            break
    if not steps:
        raise RuntimeError(
            "no decode step had all rollouts of a batch: other work keeps the cores busy; try again, or a smaller --max-running"
        )
    return PartTimes(mean(steps), mean(passes or last))

"""Measure contention: the slowdown of roles that compute at the same time on the cores of one host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from statistics import mean
from typing import NamedTuple, TypeAlias, TypeVar

Work: TypeAlias = Callable[[], Awaitable[list[float]]]
"""Does some work, and returns the seconds of each step or pass."""
Result = TypeVar("Result")
LEAST_PASSES = 4
"""Minimum number of training passes, and maximum number of times that replicas generate again to cover them."""


class PartTimes(NamedTuple):
    """Mean seconds of a decode step and of a training pass; 0 if there is no such role."""

    generating: float
    training: float


async def run_concurrently(generate: Sequence[Work], train: Work | None) -> PartTimes:
    """Run replicas and a trainer at the same time; return the mean seconds of their steps and passes.

    All replicas generate the same amount, and repeat it until the trainer has made a few passes meanwhile. If a pass
    takes longer than their work, the last pass counts although it ended later. A replica that never ran its full batch
    is left out.

    The result has means, not medians. With more roles than cores, most steps take as long as alone, and a few wait for
    a core.
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
    return PartTimes(_mean_step(steps), mean(passes or last))


async def run_beside(
    generate: Work, train: Work | None, others: Coroutine[None, None, Result]
) -> tuple[PartTimes, Result]:
    """Repeat the work of a replica and of a trainer until `others` ends; return their mean seconds and its result.

    Work that ends later is left out, unless it is the first.
    """
    running = asyncio.ensure_future(others)

    async def repeat(work: Work) -> list[float]:
        seconds = await work()
        while not running.done():
            last = await work()
            seconds += [] if running.done() else last
        return seconds

    works = [generate] if train is None else [generate, train]
    try:
        steps, *passes = await asyncio.gather(*map(repeat, works))
    finally:
        running.cancel()
    return PartTimes(_mean_step(steps), mean(passes[0]) if passes else 0.0), await running


def _mean_step(steps: Sequence[float]) -> float:
    if not steps:
        raise RuntimeError(
            "no decode step had all rollouts of a batch, because other work keeps the cores busy. "
            "Try again, or set a smaller --max-running"
        )
    return mean(steps)

"""The replicas of a reward model as their controller sees them: each takes what waits, and is replaced where it is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from streamrl.executor.launchers.handles import Handle, WorkerLostError, remote
from streamrl.executor.roles import Exchange, ModelScore, RewardRole

Start = Callable[[int], Awaitable[Handle]]
"""Starts the process of a replica by its number."""


class Waiting(NamedTuple):
    """An exchange without its score."""

    exchange: Exchange
    score: asyncio.Future[float]


class RewardPool:
    """Scores what comes on whichever replica is idle, first come, first served.

    What a replica was asked for when it is lost fails; whoever asked tries again, and another replica comes up in its
    place. A replica that does not come up fails what it would have scored, so that nobody waits for ever.
    """

    def __init__(self, start: Start, num_replicas: int, max_rollouts_per_call: int) -> None:
        self._start = start
        self._num_replicas = num_replicas
        self._most = max_rollouts_per_call
        self._waiting: deque[Waiting] = deque()
        self._has_come = asyncio.Event()
        self._handles: dict[int, Handle] = {}
        """Of replicas that are up, or come up."""
        self._under_way: dict[int, list[Waiting]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Let replicas come up, unless they do."""
        if not self._tasks:
            numbers = range(self._num_replicas)
            self._tasks = [asyncio.create_task(self._serve(number)) for number in numbers]

    async def score(self, exchange: Exchange) -> float:
        """Return the score of an exchange.

        Raises:
            RuntimeError: it has none, or the replica that computed it was lost.
        """
        waiting = Waiting(exchange, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._has_come.set()
        return await waiting.score

    def handles(self) -> list[Handle]:
        """Return handles on the replicas that are up, those with work first."""
        numbers = sorted(self._handles, key=lambda number: number not in self._under_way)
        return [self._handles[number] for number in numbers]

    def close(self) -> None:
        """End every replica at once, and fail all that waits."""
        for task in self._tasks:
            task.cancel()
        for handle in self._handles.values():
            handle.kill("was ended")
        lost = [*self._waiting, *(each for batch in self._under_way.values() for each in batch)]
        _fail(lost, RuntimeError("it was ended"))
        self._tasks.clear()
        self._waiting.clear()
        self._under_way.clear()
        self._handles.clear()

    async def _serve(self, number: int) -> None:
        """Score with one replica, and with those that replace it."""
        role: RewardRole | None = None
        while True:
            error: Exception | None = None
            if role is None:
                try:
                    role = await self._come_up(number)
                except Exception as failure:  # whoever would have been scored hears of it
                    error = failure
            batch = await self._take()
            try:
                if error is not None or role is None:
                    raise RuntimeError(f"no reward model comes up: {error}")
                self._under_way[number] = batch
                _answer(batch, await role.score([each.exchange for each in batch]))
            except Exception as failure:  # becomes `Failed` where it is waited for
                _fail(batch, failure)
                if isinstance(failure, WorkerLostError):
                    self._handles.pop(number, None)
                    role = None
            finally:
                self._under_way.pop(number, None)

    async def _come_up(self, number: int) -> RewardRole:
        handle = self._handles[number] = await self._start(number)
        role = remote(RewardRole, handle)
        try:
            await role.start()
        except BaseException:
            self._handles.pop(number, None)
            handle.kill("did not come up")
            raise
        return role

    async def _take(self) -> list[Waiting]:
        """Wait until somebody waits, and return as many as one call has room for."""
        while not self._waiting:
            self._has_come.clear()
            await self._has_come.wait()
        count = min(self._most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]


def _answer(batch: list[Waiting], scores: list[ModelScore]) -> None:
    """Give each its score, or say why it has none.

    Raises:
        ValueError: there are not as many.
    """
    for waiting, found in zip(batch, scores, strict=True):
        if waiting.score.done():  # who waited for it has given up
            continue
        if found.score is None:
            waiting.score.set_exception(
                RuntimeError(f"the reward model cannot score it: {found.fault}")
            )
        else:
            waiting.score.set_result(found.score)


def _fail(batch: list[Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.score.done():
            waiting.score.set_exception(RuntimeError(f"reward model: {error}"))

"""Distribute exchanges over the replicas of a reward model, and replace replicas that are lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from streamrl.executor.launchers.handles import Handle, remote
from streamrl.executor.roles import Exchange, ModelScore, RewardRole

Start = Callable[[int], Awaitable[Handle]]
"""Starts the process of the replica with this number."""


class Waiting(NamedTuple):
    """An exchange that waits for its score."""

    exchange: Exchange
    score: asyncio.Future[float]


class _Replica(NamedTuple):
    """A running replica of the reward model."""

    role: RewardRole
    handle: Handle


class RewardPool:
    """Scores exchanges in order of arrival, each on the next idle replica.

    When a replica is lost, its current exchanges fail, and callers may repeat them. Another replica replaces it. A
    replica that is lost while it is idle fails nothing. If a replica does not start, the exchanges that it would score
    fail, so that no caller waits forever.
    """

    def __init__(self, start: Start, num_replicas: int, max_rollouts_per_call: int) -> None:
        self._start = start
        self._num_replicas = num_replicas
        self._most = max_rollouts_per_call
        self._waiting: deque[Waiting] = deque()
        self._has_arrived = asyncio.Event()
        self._handles: dict[int, Handle] = {}
        """Handles of replicas that run or start."""
        self._under_way: dict[int, list[Waiting]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the replicas, if they are not running yet."""
        if not self._tasks:
            numbers = range(self._num_replicas)
            self._tasks = [asyncio.create_task(self._serve(number)) for number in numbers]

    async def score(self, exchange: Exchange) -> float:
        """Return the score of an exchange.

        Raises:
            RuntimeError: it has no score, or the replica that computed it was lost.
        """
        waiting = Waiting(exchange, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._has_arrived.set()
        return await waiting.score

    def handles(self) -> list[Handle]:
        """Return the handles of running replicas, those with work first."""
        numbers = sorted(self._handles, key=lambda number: number not in self._under_way)
        return [self._handles[number] for number in numbers]

    def close(self) -> None:
        """Kill all replicas, and fail all waiting exchanges."""
        for task in self._tasks:
            task.cancel()
        for handle in self._handles.values():
            handle.kill("was ended")
        lost = [*self._waiting, *(each for batch in self._under_way.values() for each in batch)]
        _fail(lost, RuntimeError("the run ended before it was scored"))
        self._tasks.clear()
        self._waiting.clear()
        self._under_way.clear()
        self._handles.clear()

    async def _serve(self, number: int) -> None:
        """Score with one replica and, if it is lost, with its replacements."""
        has_scored = True
        while True:
            if not has_scored:  # else one that dies whenever it is idle would start forever
                await self._arrival()
            try:
                replica = await self._start_replica(number)
            except Exception as error:  # reported to the callers of the next batch
                failure = RuntimeError(f"a replica of the reward model does not start: {error}")
                _fail(await self._take(), failure)
                continue
            has_scored = False
            while batch := await self._take(replica):
                self._under_way[number] = batch
                try:
                    _answer(batch, await replica.role.score([each.exchange for each in batch]))
                    has_scored = True
                except Exception as failure:  # becomes `Failed` in the caller
                    _fail(batch, failure)
                    has_scored = True
                finally:
                    self._under_way.pop(number, None)
            self._handles.pop(number, None)

    async def _start_replica(self, number: int) -> _Replica:
        handle = self._handles[number] = await self._start(number)
        replica = _Replica(remote(RewardRole, handle), handle)
        try:
            await replica.role.start()
        except BaseException:
            self._handles.pop(number, None)
            handle.kill("did not start")
            raise
        handle.watch(lambda error: self._has_arrived.set())
        return replica

    async def _take(self, replica: _Replica | None = None) -> list[Waiting]:
        """Wait for exchanges, and return as many as fit in one call; none if the replica is lost."""
        await self._arrival(replica)
        if replica is not None and replica.handle.is_lost:
            return []
        count = min(self._most, len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    async def _arrival(self, replica: _Replica | None = None) -> None:
        """Wait until an exchange waits, or the replica is lost."""
        while not self._waiting and not (replica is not None and replica.handle.is_lost):
            self._has_arrived.clear()
            await self._has_arrived.wait()


def _answer(batch: list[Waiting], scores: list[ModelScore]) -> None:
    """Set the score of each exchange, or the reason why it has none.

    Raises:
        ValueError: the replica returned another number of scores.
    """
    for waiting, result in zip(batch, scores, strict=True):
        if waiting.score.done():  # the caller was cancelled
            continue
        if result.score is None:
            waiting.score.set_exception(
                RuntimeError(f"the reward model cannot score it: {result.fault}")
            )
        else:
            waiting.score.set_result(result.score)


def _fail(batch: list[Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.score.done():
            waiting.score.set_exception(RuntimeError(f"reward model: {error}"))

"""What a replica is sent after a load was commanded starts under what it brings, however long the weights take to come."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from streamrl.engine.messages import Generate, LoadWeights
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.launchers.handles import Handle, WorkerLostError
from streamrl.executor.roles import Loaded, Manifest
from streamrl.executor.rollout.replica import Replica


class NotingHandle(Handle):
    """Notes what it is called with, and answers loads."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.killed: list[str] = []

    async def call(self, method: str, *arguments: object, returns: Any) -> Any:
        self.calls.append(method)
        if method == "generate":
            raise RuntimeError("nothing is generated here")
        return Loaded(0.0, "sum")

    def kill(self, reason: str) -> None:
        self.killed.append(reason)

    async def close(self) -> None:
        pass


class EmptyBuffer:
    """Holds one rollout that nobody has begun."""

    finish = None
    kept = 0, 0

    def __init__(self) -> None:
        self.rollouts = dict.fromkeys(range(10))

    def hold(self, rollouts: list[int]) -> EmptyBuffer:
        return self

    def __enter__(self) -> list[EmptyBuffer]:
        return [self]

    def __exit__(self, *error: object) -> None:
        pass

    def room(self, buffered: object) -> int:
        return 1

    def request(self, command: Generate) -> object:
        return object()


def replica(buffer: EmptyBuffer | None = None) -> tuple[Replica, NotingHandle]:
    handle = NotingHandle()
    return Replica(handle, cast(RolloutBuffer, buffer or EmptyBuffer())), handle


def test_rollouts_wait_until_a_commanded_load_is_sent() -> None:
    async def go() -> None:
        made, handle = replica()
        arrived: asyncio.Future[Manifest | None] = asyncio.get_running_loop().create_future()
        load = asyncio.create_task(made.load(LoadWeights(0, 1, drain=False), arrived))
        generate = asyncio.create_task(made.generate(Generate(3, 0, 0)))
        await asyncio.sleep(0.01)
        assert handle.calls == []
        arrived.set_result(Manifest(version=1, buckets=[]))
        await asyncio.wait([load, generate])
        assert handle.calls == ["load", "generate"]

    asyncio.run(go())


def test_a_rollout_that_is_dropped_while_weights_load_ends_without_tokens() -> None:
    async def go() -> None:
        buffer = EmptyBuffer()
        made, handle = replica(buffer)
        arrived: asyncio.Future[Manifest | None] = asyncio.get_running_loop().create_future()
        load = asyncio.create_task(made.load(LoadWeights(0, 1, drain=False), arrived))
        generate = asyncio.create_task(made.generate(Generate(3, 0, 0)))
        await asyncio.sleep(0.01)
        buffer.rollouts.clear()
        arrived.set_result(Manifest(version=1, buckets=[]))
        assert (await generate).finish == "aborted"
        await load
        assert handle.calls == ["load"]

    asyncio.run(go())


def test_rollouts_that_are_commanded_with_a_load_follow_it() -> None:
    async def go() -> None:
        made, handle = replica()
        arrived: asyncio.Future[Manifest | None] = asyncio.get_running_loop().create_future()
        arrived.set_result(Manifest(version=1, buckets=[]))
        commands = [made.load(LoadWeights(0, 1, drain=False), arrived)]
        commands += [made.generate(Generate(rollout, 0, 0)) for rollout in range(3)]  # type: ignore[list-item]
        await asyncio.gather(*commands, return_exceptions=True)
        assert handle.calls == ["load", "generate", "generate", "generate"]

    asyncio.run(go())


def test_a_replica_that_weights_do_not_reach_is_lost() -> None:
    async def go() -> None:
        made, handle = replica()
        arrived: asyncio.Future[Manifest | None] = asyncio.get_running_loop().create_future()
        arrived.set_exception(ConnectionError("no way there"))
        with pytest.raises(WorkerLostError, match="no way there"):
            await made.load(LoadWeights(0, 1, drain=False), arrived)
        assert handle.killed and handle.calls == []

    asyncio.run(go())


def test_weights_that_were_never_pushed_are_an_error() -> None:
    async def go() -> None:
        made, handle = replica()
        arrived: asyncio.Future[Manifest | None] = asyncio.get_running_loop().create_future()
        arrived.set_result(None)
        with pytest.raises(ValueError, match="version 1 were never pushed"):
            await made.load(LoadWeights(0, 1, drain=False), arrived)
        assert not handle.killed and handle.calls == []

    asyncio.run(go())

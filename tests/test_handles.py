"""Handles: the same calls whether a role lives in this process or in one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest

from streamrl.executor.launchers import handles, processes
from streamrl.executor.launchers.handles import (
    Handle,
    InProcess,
    LocalProcess,
    WorkerLostError,
    remote,
)
from streamrl.executor.launchers.processes import Begin, fork, spawn
from streamrl.executor.roles import AnswerError, reason_of
from tests.small_roles import Point
from tests.verifying import wait_until_gone

ROLE = "tests.small_roles:Counter"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nurseries import nothing that takes seconds."""
    monkeypatch.setattr(processes, "COMMON", ("tests.small_roles",))


async def in_process(log: Path) -> Handle:
    return InProcess(ROLE, {"first": 3})


async def local(log: Path) -> Handle:
    return await LocalProcess.start(ROLE, {"first": 3}, log, {})


async def forked(log: Path) -> Handle:
    return await LocalProcess.start(ROLE, {"first": 3}, log, {}, begin=fork)


Start = Callable[[Path], Awaitable[Handle]]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
carriers = pytest.mark.parametrize(
    "start", [in_process, local, pytest.param(forked, marks=on_linux)]
)
begins = pytest.mark.parametrize("begin", [spawn, pytest.param(fork, marks=on_linux)])


@carriers
def test_calls_keep_state_types_and_order(start: Start, tmp_path: Path) -> None:
    async def go() -> None:
        handle = await start(tmp_path / "log")
        try:
            assert [await handle.call("count", returns=int) for _ in range(2)] == [3, 4]
            moved = await handle.call("move", Point(1, 0.5), 2, returns=Point)
            assert moved == Point(3, 0.5)
            calls = [handle.call("wait", n, 0.3 - n / 10, returns=list[int]) for n in range(3)]
            assert max(await asyncio.gather(*calls), key=len) == [0, 1, 2]
        finally:
            await handle.close()

    asyncio.run(go())


class CounterRole(Protocol):
    """What of it is called by contract."""

    async def count(self) -> int: ...

    async def move(self, point: Point, by: int = 1) -> Point: ...


@carriers
def test_a_contract_makes_calls_of_the_types_that_it_declares(start: Start, tmp_path: Path) -> None:
    async def go() -> None:
        handle = await start(tmp_path / "log")
        try:
            role = remote(CounterRole, handle)
            assert await role.count() == 3
            assert await role.move(by=2, point=Point(1, 0.5)) == Point(3, 0.5)
            with pytest.raises(TypeError, match="by_how_much"):
                await role.move(Point(1, 0.5), by_how_much=2)  # type: ignore[call-arg]
            assert not hasattr(role, "wait")
        finally:
            await handle.close()

    asyncio.run(go())


@carriers
def test_an_error_reaches_the_caller_and_the_role_lives_on(start: Start, tmp_path: Path) -> None:
    async def go() -> int:
        handle = await start(tmp_path / "log")
        try:
            with pytest.raises(Exception, match="no such thing") as it:
                await handle.call("fail", returns=type(None))
            assert isinstance(it.value, KeyError | AnswerError)
            assert reason_of(it.value) == "KeyError: 'no such thing'"  # wherever it happened
            return await handle.call("count", returns=int)
        finally:
            await handle.close()

    assert asyncio.run(go()) == 3


@begins
def test_a_dead_worker_fails_pending_and_later_calls(begin: Begin, tmp_path: Path) -> None:
    async def go() -> None:
        handle = await LocalProcess.start(ROLE, {"first": 0}, tmp_path / "log", {}, begin=begin)
        await handle.call("count", returns=int)
        pending = asyncio.ensure_future(handle.call("wait", 0, 60.0, returns=list[int]))
        await asyncio.sleep(0.1)
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="status -9"):
            await pending
        with pytest.raises(WorkerLostError):
            await handle.call("count", returns=int)
        await handle.close()

    asyncio.run(go())


@carriers
def test_a_role_that_is_killed_or_can_do_nothing_any_more_fails_pending_and_later_calls(
    start: Start, tmp_path: Path
) -> None:
    async def go(end: Callable[[Handle], Awaitable[None]], told: str) -> None:
        handle = await start(tmp_path / "log")
        await handle.call("count", returns=int)
        pending = asyncio.ensure_future(handle.call("wait", 0, 60.0, returns=list[int]))
        await asyncio.sleep(0.1)
        await end(handle)
        for call in (pending, handle.call("count", returns=int)):
            with pytest.raises(WorkerLostError, match=told):
                await asyncio.wait_for(call, timeout=10)
        await handle.close()

    async def kill(handle: Handle) -> None:
        handle.kill("was in the way")

    async def break_down(handle: Handle) -> None:
        with pytest.raises(WorkerLostError, match="no GPU is left"):
            await handle.call("break_down", returns=type(None))

    asyncio.run(go(kill, "was in the way"))
    asyncio.run(go(break_down, "can do nothing any more: .*no GPU is left"))


@begins
def test_closing_leaves_no_process_even_in_the_middle_of_a_call(
    begin: Begin, tmp_path: Path
) -> None:
    async def go() -> int:
        handle = await LocalProcess.start(ROLE, {"first": 0}, tmp_path / "log", {}, begin=begin)
        await handle.call("count", returns=int)
        call = asyncio.ensure_future(handle.call("wait", 0, 60.0, returns=list[int]))
        await asyncio.sleep(0.1)
        await handle.close()
        with pytest.raises(WorkerLostError, match="was closed"):
            await call
        return handle.pid

    wait_until_gone([asyncio.run(go())], 5.0)


@begins
@pytest.mark.parametrize(("method", "status"), [("compute", 0), ("block", -signal.SIGKILL)])
def test_closing_ends_a_worker_that_computes_and_kills_one_that_hangs(
    method: str, status: int, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "block":
        monkeypatch.setattr(handles, "CLOSE_TIME", 0.5)  # it never leaves by itself

    async def go() -> int | None:
        handle = await LocalProcess.start(ROLE, {"first": 0}, tmp_path / "log", {}, begin=begin)
        await handle.call("count", returns=int)
        call = asyncio.ensure_future(handle.call(method, returns=type(None)))
        await asyncio.sleep(0.3)
        await handle.close()
        with pytest.raises(WorkerLostError):
            await call
        return handle.exit_status

    assert asyncio.run(go()) == status


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from streamrl.executor.launchers import processes
from streamrl.executor.launchers.handles import LocalProcess

async def go():
    begin = getattr(processes, sys.argv[2])
    handle = await LocalProcess.start(ROLE, {"first": 0}, Path(os.devnull), {}, begin=begin)
    await handle.call("count", returns=int)
    handle.send_signal(signal.SIGSTOP)
    print(handle.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

ROLE = sys.argv[1]
processes.COMMON = (ROLE.partition(":")[0],)
asyncio.run(go())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
@begins
def test_a_worker_that_stands_still_dies_with_its_controller(begin: Begin) -> None:
    words = [sys.executable, "-c", PARENT, ROLE, begin.__name__]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_gone([int(done.stdout)], 5)

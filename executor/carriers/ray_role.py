"""The actor that a role lives in on a Ray cluster: serves calls as `streamrl.executor.carriers.worker` does, over Ray.

Ray pickles what an actor is called with; that is bytes here, always, in which a role's own data is MessagePack. This module
imports nothing that computes: what a role needs is imported once its environment is set.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec

from streamrl.executor.carriers.wire import Answer, Call, encode
from streamrl.executor.carriers.worker import failure, make_role, typed_arguments

GATHER_TIME = 0.01
"""Seconds from one sending of answers to the next: Ray takes a millisecond of two processes for each thing that it
brings. Who answers alone, as at a barrier, waits for nobody."""


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """Where an actor lives."""

    node: str
    """Ray's id of its node."""
    address: str
    """IP address that the other nodes reach it at."""
    free_port: int
    pid: int


class RayRole:
    """One role; it has none until `begin`."""

    def __init__(self) -> None:
        self._role: Any = None
        self._next = 1
        """Number of the calls that begin next: Ray may bring them in another order."""
        self._early: dict[int, asyncio.Future[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self._is_answered = asyncio.Event()

    async def where(self) -> bytes:
        """Say where this is."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return msgspec.msgpack.encode(Whereabouts(node, address, port, os.getpid()))

    async def begin(self, role_path: str, config: bytes, directory: str, log: str) -> None:
        """Make the role from its configuration, in the driver's directory; its output goes to a file, where both are here."""
        with suppress(OSError):
            os.chdir(directory)  # to which paths of a run file are relative
        with suppress(OSError):
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        _talk_over(msgspec.msgpack.decode(await self.where(), type=Whereabouts).address)
        module, _, _ = role_path.partition(":")
        await asyncio.to_thread(importlib.import_module, module)  # for long: pings are answered
        self._role = make_role(role_path, msgspec.msgpack.decode(config))

    async def take(self, number: int, calls: bytes) -> None:
        """Begin calls, which were made after those of every smaller number."""
        if number != self._next:
            turn = self._early[number] = asyncio.get_running_loop().create_future()
            await turn
        for call in msgspec.msgpack.decode(calls, type=list[Call]):
            task = asyncio.ensure_future(self._run(call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._next = number + 1
        waiting = self._early.pop(self._next, None)
        if waiting is not None:
            waiting.set_result(None)

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield answers as they come, those that come soon after others together."""
        clock = asyncio.get_running_loop().time
        sent_at = clock() - GATHER_TIME
        while True:
            await self._is_answered.wait()
            await asyncio.sleep(max(0.0, sent_at + GATHER_TIME - clock()))
            sent_at = clock()
            answers, self._answers = self._answers, []
            self._is_answered.clear()
            yield msgspec.msgpack.encode(answers)

    async def ping(self) -> None:
        """Give a sign of life."""

    async def suffer(self, number: int) -> None:
        """Send this process a signal, for faults that are planned."""
        os.kill(os.getpid(), signal.Signals(number))

    async def _run(self, call: Call) -> None:
        try:
            method: Callable[..., Any] = getattr(self._role, call.method)
            result = await method(*typed_arguments(method, call.arguments))
            answer = Answer(call.id, "result", encode(result))
        except Exception as error:
            traceback.print_exc()
            answer = failure(call, error)
        self._answers.append(answer)
        self._is_answered.set()


def _talk_over(address: str) -> None:
    """Let ranks talk over the network that Ray does: the name of this machine often stands for its loopback."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name

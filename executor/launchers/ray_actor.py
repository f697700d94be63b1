"""Run a role in a Ray actor: the actor itself and the controller's handle on it.

The actor serves calls over Ray, as `streamrl.executor.launchers.worker` does over a socket. Ray pickles the arguments
of its calls. Here they are always bytes that contain MessagePack. This module does not import torch: the libraries of a
role are imported after its environment is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError

from streamrl.executor.launchers.handles import (
    FACTOR,
    PATIENCE,
    PING_TIME,
    Config,
    Handle,
    Heartbeat,
    WorkerLostError,
)
from streamrl.executor.launchers.worker import (
    Answer,
    Call,
    answer_ping,
    decode,
    encode,
    failure,
    make_role,
    typed_arguments,
)

GATHER_TIME = 0.01
"""Minimum seconds between two sendings of answers. Each message costs about 1 ms of CPU time in two of Ray's processes.
A single answer, such as at a barrier, is sent at once."""


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """Node, address, free port and process id of an actor."""

    node: str
    """Ray's id of its node."""
    address: str
    """IP address at which other nodes reach it."""
    free_port: int
    pid: int


class RayRole:
    """An actor that runs one role, which `begin` creates."""

    def __init__(self) -> None:
        self._role: Any = None
        self._next = 1
        """Number of the message whose calls begin next; Ray may deliver messages in another order."""
        self._early: dict[int, asyncio.Future[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[Answer] = []
        self._is_answered = asyncio.Event()

    async def where(self) -> bytes:
        """Return the encoded `Whereabouts` of this actor."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return msgspec.msgpack.encode(Whereabouts(node, address, port, os.getpid()))

    async def begin(
        self,
        role_path: str,
        config: bytes,
        directory: str,
        search: list[str],
        log: str,
        umask: int,
    ) -> None:
        """Create the role in the driver's directory, with its output in `log`, if these paths exist on this node.

        Modules are also searched for in the driver's `search` path, after this process's own.
        """
        os.umask(umask)
        with suppress(OSError):
            os.chdir(directory)  # paths in a run file are relative to it
        sys.path += [path for path in search if path not in sys.path]
        with suppress(OSError):
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        _talk_over(msgspec.msgpack.decode(await self.where(), type=Whereabouts).address)
        module, _, _ = role_path.partition(":")
        await asyncio.to_thread(importlib.import_module, module)  # in a thread, to answer pings
        self._role = make_role(role_path, msgspec.msgpack.decode(config))

    async def take(self, number: int, calls: bytes) -> None:
        """Begin the calls of one message; wait until those of all smaller numbers have begun."""
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
        """Yield answers as they arrive, at most one batch per `GATHER_TIME`."""
        clock = asyncio.get_running_loop().time
        sent_at = clock() - GATHER_TIME
        while True:
            await self._is_answered.wait()
            await asyncio.sleep(max(0.0, sent_at + GATHER_TIME - clock()))
            sent_at = clock()
            answers, self._answers = self._answers, []
            self._is_answered.clear()
            yield msgspec.msgpack.encode(answers)

    async def ping(self) -> bytes:
        """Return the encoded answer to a ping at once, as a sign of life."""
        return msgspec.msgpack.encode(answer_ping(self._role))

    async def suffer(self, number: int) -> None:
        """Send this process a signal, for planned faults."""
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
    """Make ranks use the network interface that Ray uses; the host name often resolves to loopback."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


T = TypeVar("T")


class RayActor(Handle):
    """A role in its own process on a node of the Ray cluster."""

    def __init__(
        self,
        actor: Any,
        name: str,
        patience: float = PATIENCE,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap an actor of `RayRole`.

        Args:
            actor: Ray's handle on the actor.
            name: name of the role in messages.
            patience: seconds without a sign of life after which the actor is killed.
            let_go: called at the end, to release the resources reserved for the actor.
        """
        self._actor = actor
        self._name = name
        self._patience = patience
        self._let_go = let_go
        self._waiting: set[asyncio.Future[Any]] = set()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        """Pending calls, by number."""
        self._outbox: list[Call] = []
        """Calls made since the last send, which are sent in one message."""
        self._num_calls = self._num_sent = 0
        self._heartbeat = Heartbeat(None, patience)
        self._beating: asyncio.Task[None] | None = None
        self._has_begun = False
        self.whereabouts: Whereabouts | None = None

    async def locate(self) -> Whereabouts:
        """Wait until the actor has started, and return its whereabouts.

        Raises:
            WorkerLostError: it does not start in time, for example because its node has died.
        """
        limit = FACTOR * self._patience
        watch = asyncio.get_running_loop().call_later(
            limit, self.kill, f"did not start within {limit:.0f} s"
        )
        try:
            answer = await self._await(self._actor.where.remote())
        finally:
            watch.cancel()
        self.whereabouts = msgspec.msgpack.decode(answer, type=Whereabouts)
        return self.whereabouts

    async def begin(self, role_path: str, config: Config, log: str, umask: int) -> None:
        """Create the role from its configuration, and watch for signs of life from now on."""
        self._beating = asyncio.create_task(self._beat())
        await self._await(
            self._actor.begin.remote(
                role_path, bytes(encode(config)), str(Path.cwd()), list(sys.path), log, umask
            )
        )
        self._has_begun = True
        self._keep(self._listen())

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Send the call now and wait for its result."""
        if self._lost is not None:
            raise self._lost
        self._num_calls += 1
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answered
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(Call(self._num_calls, method, list(arguments)))
        return self._result_of(await answered, returns)

    def send_signal(self, number: signal.Signals) -> None:
        """Ask the actor to send its own process a signal."""
        self._actor.suffer.remote(int(number))

    def kill(self, reason: str) -> None:
        """Kill the actor, and record the reason."""
        self._lose(reason)

    async def close(self) -> None:
        """Kill the actor; anything that must survive has been saved elsewhere."""
        self.watch(None)
        self._lose("was closed")

    def _send(self) -> None:
        """Send all queued calls in one message."""
        calls, self._outbox = self._outbox, []
        if self._lost is None:
            self._num_sent += 1
            self._keep(self._await(self._actor.take.remote(self._num_sent, bytes(encode(calls)))))

    async def _listen(self) -> None:
        """Deliver answers to their callers while the actor is alive."""
        stream = self._actor.answers.remote()
        while self._lost is None:
            try:
                ref = await anext(stream)
            except RayError as error:
                self._lose_to(error)
                return
            for answer in decode(await self._await(ref), list[Answer]):
                answered = self._answers.pop(answer.id)
                if not answered.done():  # a cancelled caller does not wait any more
                    answered.set_result(answer)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background until the actor is lost; other code reports its errors."""
        task = asyncio.ensure_future(_until_lost(work))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _lose_to(self, error: RayError) -> None:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        self._lose(f"is lost: {first}")

    async def _await(self, ref: Any) -> Any:
        """Wait for a result from Ray; an error of Ray means that the role is lost."""
        if self._lost is not None:
            raise self._lost
        waiting = asyncio.ensure_future(_result(ref))
        self._waiting.add(waiting)
        try:
            return await waiting
        except RayError as error:
            self._lose_to(error)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
        finally:
            self._waiting.discard(waiting)
        assert self._lost is not None
        raise self._lost

    async def _beat(self) -> None:
        """Ping every `PING_TIME`; kill the actor when it has been silent for too long."""
        while not self._heartbeat.is_over:
            if self._heartbeat.is_asked_for():
                self._keep(self._ping())
            await asyncio.sleep(PING_TIME)
        self.kill(f"gave no sign of life for {self._heartbeat.silence:.0f} s and was killed")

    async def _ping(self) -> None:
        with contextlib.suppress(RayError):
            answer = decode(await _result(self._actor.ping.remote()), Answer)
            self._heartbeat.answer(self._has_begun)
            self._check_alive(answer)
            return
        self._lose("is lost: its process or its node has ended")

    def _lose(self, how: str) -> None:
        """Kill the actor, and fail every pending and later call."""
        if self._lost is not None:
            return
        self._lost = WorkerLostError(f"the actor of {self._name} {how}")
        self._tell_loss(self._lost)
        if self._beating is not None:
            self._beating.cancel()
        for waiting in self._waiting:
            if waiting is not asyncio.current_task():
                waiting.cancel()
        for answered in self._answers.values():
            if not answered.done():
                answered.set_exception(self._lost)
        self._answers.clear()
        with contextlib.suppress(RayError, ValueError):  # it is dead already
            ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(RayError, ValueError):
            self._let_go()


async def _until_lost(work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(WorkerLostError):
        await work


async def _result(ref: Any) -> Any:
    return await ref

"""A handle on a role that lives in an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError

from streamrl.executor.carriers.handles import Config, Handle, WorkerLostError
from streamrl.executor.carriers.heartbeat import PATIENCE, PING_TIME, Heartbeat
from streamrl.executor.carriers.ray_role import Whereabouts
from streamrl.executor.carriers.wire import Answer, Call, decode, encode

T = TypeVar("T")


class RayActor(Handle):
    """A role in a process of its own on some node of the cluster."""

    def __init__(
        self,
        actor: Any,
        name: str,
        patience: float = PATIENCE,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Take an actor of `RayRole`.

        Args:
            actor: Ray's handle on it.
            name: of the role, for messages.
            patience: seconds without a sign of life after which it is killed.
            let_go: gives back what was reserved for it.
        """
        self._actor = actor
        self._name = name
        self._let_go = let_go
        self._waiting: set[asyncio.Future[Any]] = set()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        """Calls that wait, by number."""
        self._outbox: list[Call] = []
        """Calls of this moment, which are sent together."""
        self._num_calls = self._num_sent = 0
        self._heartbeat = Heartbeat(None, patience)
        self._beating: asyncio.Task[None] | None = None
        self._has_begun = False
        self.whereabouts: Whereabouts | None = None

    async def locate(self) -> Whereabouts:
        """Wait until the actor lives, and return where."""
        self.whereabouts = msgspec.msgpack.decode(
            await self._await(self._actor.where.remote()), type=Whereabouts
        )
        return self.whereabouts

    async def begin(self, role_path: str, config: Config, log: str) -> None:
        """Make the role from its configuration, and watch over it from now on."""
        self._beating = asyncio.create_task(self._beat())
        await self._await(
            self._actor.begin.remote(role_path, bytes(encode(config)), str(Path.cwd()), log)
        )
        self._has_begun = True
        self._keep(self._listen())

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Send the call now, wait for its result."""
        if self._lost is not None:
            raise self._lost
        self._num_calls += 1
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answered
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(Call(self._num_calls, method, list(arguments)))
        return self._result_of(await answered, returns)

    @property
    def is_lost(self) -> bool:
        """Whether it is known that nothing more comes from it."""
        return self._lost is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Let the process suffer a signal, which it sends itself."""
        self._actor.suffer.remote(int(number))

    def kill(self, reason: str) -> None:
        """Kill the process, and say why it is lost."""
        self._lose(reason)

    async def close(self) -> None:
        """Kill the process: what it holds lies elsewhere, or is nobody's any more."""
        self._lose("was closed")

    def _send(self) -> None:
        """Send the calls of this moment."""
        calls, self._outbox = self._outbox, []
        if self._lost is None:
            self._num_sent += 1
            self._keep(self._await(self._actor.take.remote(self._num_sent, bytes(encode(calls)))))

    async def _listen(self) -> None:
        """Hand answers to those who wait for them, as long as the actor lives."""
        stream = self._actor.answers.remote()
        while self._lost is None:
            try:
                ref = await anext(stream)
            except RayError as error:
                self._lose_to(error)
                return
            for answer in decode(await self._await(ref), list[Answer]):
                answered = self._answers.pop(answer.id)
                if not answered.done():  # else its caller was cancelled
                    answered.set_result(answer)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something beside, until this is lost; its errors are told elsewhere."""
        task = asyncio.ensure_future(_until_lost(work))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _lose_to(self, error: RayError) -> None:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        self._lose(f"is lost: {first}")

    async def _await(self, ref: Any) -> Any:
        """Wait for what Ray brings; an error of Ray's is the role's loss."""
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
        """Ask for a sign of life now and then, until there has been none for too long."""
        while not self._heartbeat.is_over:
            if self._heartbeat.is_asked_for():
                self._keep(self._ping())
            await asyncio.sleep(PING_TIME)
        self.kill(f"gave no sign of life for {self._heartbeat.silence:.0f} s and was killed")

    async def _ping(self) -> None:
        with contextlib.suppress(RayError):
            await _result(self._actor.ping.remote())
            self._heartbeat.answer(self._has_begun)
            return
        self._lose("is lost: its process or its node has ended")

    def _lose(self, how: str) -> None:
        """Kill the actor, and fail every pending and later call."""
        if self._lost is not None:
            return
        self._lost = WorkerLostError(f"the actor of {self._name} {how}")
        if self._beating is not None:
            self._beating.cancel()
        for waiting in self._waiting:
            if waiting is not asyncio.current_task():
                waiting.cancel()
        for answered in self._answers.values():
            if not answered.done():
                answered.set_exception(self._lost)
        self._answers.clear()
        with contextlib.suppress(RayError, ValueError):  # it has died already
            ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(RayError, ValueError):
            self._let_go()


async def _until_lost(work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(WorkerLostError):
        await work


async def _result(ref: Any) -> Any:
    return await ref

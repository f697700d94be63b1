"""One async handle on a role, wherever it lives: in this process (tests), or in a local process of its own.

`await handle.call("method", ...)` gives its result; `streamrl.executor.carriers.remote` makes such calls out of a role's
contract. Calls on one handle begin in the order they are made. A process that dies, gives no sign of life for too
long, or has a role that can do nothing any more, and one whose handle is closed, makes every pending and later call
raise `WorkerLostError`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from streamrl.executor.carriers import processes
from streamrl.executor.carriers.heartbeat import PATIENCE, PING_TIME, Heartbeat
from streamrl.executor.carriers.wire import PING, Answer, Call, decode, read_frame, write_frame
from streamrl.executor.carriers.worker import make_role
from streamrl.executor.roles import AnswerError, RoleLostError

CLOSE_TIME = 5.0  # seconds that a worker gets to leave before it is killed

T = TypeVar("T")
Config = dict[str, object]
"""A role's configuration as plain data; the role's own class checks it."""


class WorkerLostError(ConnectionError):
    """The process that a role lives in has died."""


@runtime_checkable
class Process(Protocol):
    """A handle on a process that faults can strike."""

    @property
    def is_lost(self) -> bool:
        """Whether it is known that nothing more comes from it."""

    def send_signal(self, number: signal.Signals) -> None:
        """Let the process suffer a signal."""

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Run a method of the role."""

    def kill(self, reason: str) -> None:
        """Kill the process."""

    async def close(self) -> None:
        """End the process."""


class Handle(ABC):
    """A role that can be called."""

    _lost: WorkerLostError | None = None
    """Why nothing more comes from it; None while something may."""

    @abstractmethod
    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Run a method of the role and return its result, as `returns`."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Let every pending and later call raise `WorkerLostError`; a process ends at once, whatever it does."""

    @abstractmethod
    async def close(self) -> None:
        """End the role; nothing of it is left behind."""

    def _result_of(self, answer: Answer, returns: type[T]) -> T:
        """Return what another process has answered.

        Raises:
            AnswerError: the call failed there.
            WorkerLostError: the role can do nothing any more; it is killed.
        """
        if answer.kind == "result":
            return decode(answer.value, returns)
        error = decode(answer.value, str)
        if answer.kind == "error":
            raise AnswerError(error)
        self.kill(f"can do nothing any more: {error}")
        assert self._lost is not None
        raise self._lost


class InProcess(Handle):
    """A role in this process and this event loop."""

    def __init__(self, role_path: str, config: Config) -> None:
        self._role: Any = make_role(role_path, config)
        self._calls: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Await the role's own method."""
        if self._lost is not None:
            raise self._lost
        work: asyncio.Task[T] = asyncio.ensure_future(getattr(self._role, method)(*arguments))
        self._calls.add(work)
        try:
            return await work
        except RoleLostError as error:
            self.kill(f"can do nothing any more: {error}")
        except asyncio.CancelledError:
            if self._lost is None:
                raise
        finally:
            self._calls.discard(work)
        assert self._lost is not None
        raise self._lost

    def kill(self, reason: str) -> None:
        """Cancel what runs; a computation in a thread goes on to its end, for nobody."""
        self._lost = self._lost or WorkerLostError(f"role in this process {reason}")
        for work in self._calls:
            work.cancel()

    async def close(self) -> None:
        """Let the role stop."""
        await self._role.stop()


class LocalProcess(Handle):
    """A role in a process of its own on this machine, at the other end of a socket pair."""

    def __init__(
        self,
        process: processes.WorkerProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._num_calls = 0
        self._listener = asyncio.create_task(self._listen())
        self._heartbeat = Heartbeat(process.pid, patience)
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def start(
        cls,
        role_path: str,
        config: Config,
        log: Path,
        environment: dict[str, str],
        patience: float = PATIENCE,
        begin: processes.Begin = processes.spawn,
    ) -> LocalProcess:
        """Start the process; its output goes to `log`, and it is killed where it seems dead for `patience` seconds."""
        ours, theirs = socket.socketpair()
        with log.open("ab") as output, theirs:
            process = await begin(role_path, theirs, output, {**os.environ, **environment})
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        write_frame(writer, config)
        return cls(process, reader, writer, patience)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it is known that nothing more comes from it."""
        return self._lost is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Let the process suffer a signal."""
        os.kill(self.pid, number)

    @property
    def exit_status(self) -> int | None:
        """The process's exit status, negative for a signal; None while it lives."""
        return self._process.returncode

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Send the call now, wait for its result."""
        return self._result_of(await self._send(method, arguments), returns)

    def kill(self, reason: str) -> None:
        """Kill the process, also one that is stopped, and say why it is lost."""
        self._lose(reason)
        self._process.kill()

    async def close(self) -> None:
        """Hang up, wait a little, then kill."""
        self._listener.cancel()
        self._lose("was closed")
        await asyncio.to_thread(self._end)

    def _end(self) -> int:
        """Wait for the process, but not for ever; return its exit status."""
        try:
            return self._process.wait(CLOSE_TIME)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _send(self, method: str, arguments: tuple[object, ...]) -> asyncio.Future[Answer]:
        if self._lost is not None:
            raise self._lost
        self._num_calls += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answer
        write_frame(self._writer, Call(self._num_calls, method, list(arguments)))
        return answer

    async def _listen(self) -> None:
        try:
            while True:
                answer = decode(await read_frame(self._reader), Answer)
                if answer.id == PING:
                    self._heartbeat.answer()
                    continue
                waiting = self._answers.pop(answer.id)
                if not waiting.done():  # else its caller was cancelled
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await asyncio.to_thread(self._end)
            self._lose(f"ended with status {status}")
        except (ValueError, KeyError) as error:
            self.kill(f"sent what is no answer and was killed: {error}")

    async def _beat(self) -> None:
        """Ask for a sign of life now and then, until there has been none for too long."""
        while not self._heartbeat.is_over:
            if self._heartbeat.is_asked_for():
                write_frame(self._writer, Call(PING, "", []))
            await asyncio.sleep(PING_TIME)
        self.kill(f"gave no sign of life for {self._heartbeat.silence:.0f} s and was killed")

    def _lose(self, how: str) -> None:
        """Hang up, and fail every pending and later call."""
        if self._lost is None:
            self._lost = WorkerLostError(f"worker process {self.pid} {how}")
            self._beating.cancel()
            self._writer.close()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._lost)
        self._answers.clear()

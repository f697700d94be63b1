"""One async handle on a role, wherever it lives: in this process (tests), or in a local process of its own.

`await handle.call("method", ...)` gives its result; `executor.carriers.remote` makes such calls out of a role's
contract. Calls on one handle begin in the order they are made. A process that dies, or whose handle is closed,
makes every pending and later call raise `WorkerLostError`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

from executor.carriers.wire import Answer, Call, decode, read_frame, write_frame
from executor.carriers.worker import make_role

CLOSE_TIME = 5.0  # seconds that a worker gets to leave before it is killed

T = TypeVar("T")
Config = dict[str, object]
"""A role's configuration as plain data; the role's own class checks it."""


class WorkerLostError(ConnectionError):
    """The process that a role lives in has died."""


class Handle(ABC):
    """A role that can be called."""

    @abstractmethod
    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Run a method of the role and return its result, as `returns`."""

    @abstractmethod
    async def close(self) -> None:
        """End the role; nothing of it is left behind."""


class InProcess(Handle):
    """A role in this process and this event loop."""

    def __init__(self, role_path: str, config: Config) -> None:
        self._role: Any = make_role(role_path, config)

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Await the role's own method."""
        result: T = await getattr(self._role, method)(*arguments)
        return result

    async def close(self) -> None:
        """Let the role stop."""
        await self._role.stop()


class LocalProcess(Handle):
    """A role in a process of its own on this machine, at the other end of a socket pair."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._num_calls = 0
        self._lost: WorkerLostError | None = None
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, role_path: str, config: Config, log: Path, environment: dict[str, str]
    ) -> LocalProcess:
        """Start the process; its output goes to `log`."""
        ours, theirs = socket.socketpair()
        with log.open("ab") as output, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "executor.carriers.worker", role_path, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is the controller's to handle
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        write_frame(writer, config)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The process's exit status, negative for a signal; None while it lives."""
        return self._process.returncode

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Send the call now, wait for its result."""
        answer = await self._send(method, arguments)
        if answer.kind == "error":
            raise RuntimeError(decode(answer.value, str))
        return decode(answer.value, returns)

    async def close(self) -> None:
        """Hang up, wait a little, then kill."""
        self._listener.cancel()
        self._lose("was closed")
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_TIME)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

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
                waiting = self._answers.pop(answer.id)
                if not waiting.done():  # else its caller was cancelled
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await asyncio.to_thread(self._process.wait)
            self._lose(f"ended with status {status}")

    def _lose(self, how: str) -> None:
        """Fail every pending and later call."""
        if self._lost is None:
            self._lost = WorkerLostError(f"worker process {self.pid} {how}")
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._lost)
        self._answers.clear()

"""Accept connections of untrusted processes: few at a time, for a short time, and without an error that ends the run.

A connection is *unknown* until its first bytes show the token. Unknown connections are limited in number, by address and
in all, and in time. A new connection replaces the oldest one, so idle connections do not keep readers out. The rate of
new connections is limited; the kernel keeps the others waiting, or refuses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

MOST_UNKNOWN, MOST_OF_ADDRESS = 32, 16
"""Maximum number of unknown connections, of all addresses and of one."""
UNKNOWN_TIME = 3.0
"""Seconds in which a connection must show the token."""
PAUSE = 0.01
"""Seconds between two connections. A connection costs the controller 0.2 ms, so a flood costs it 2 % of a core."""
PAUSE_AFTER_ERROR = 1.0
RESERVE = 64
"""File descriptors that are kept for the run: a connection whose number is nearer to the limit is closed."""
BACKLOG = 16
"""Connections that wait in the kernel."""

Serve = Callable[[], Awaitable[None]]
"""Serves a known connection until it ends."""
Authenticate = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Serve | None]]
"""Reads the first bytes, and returns how to serve the connection; without the token it may write an answer and returns None."""


class Listener:
    """A socket on which untrusted processes may connect; `start` opens it."""

    def __init__(self, host: str, port: int, authenticate: Authenticate, most_asked: int) -> None:
        """Store how connections are served; `most_asked` is the maximum number of their first bytes.

        Port 0 is any free port.
        """
        self._place, self._port = (host, port), port
        self._authenticate = authenticate
        self._most_asked = most_asked
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._unknown: dict[asyncio.Task[None], str] = {}
        """Addresses of unknown connections; the oldest one is first."""
        self._known: set[asyncio.Task[None]] = set()
        self.num_refused = 0
        """Connections that ended without a valid request."""
        self.num_errors = 0
        """Connections that the kernel could not deliver."""

    def start(self) -> int:
        """Listen, and return the port.

        Raises:
            OSError: the port is in use, or there is no free file descriptor.
        """
        self._socket = socket.create_server(self._place, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket))
        self._port = int(self._socket.getsockname()[1])
        return self._port

    def stop(self) -> None:
        """Accept nothing more and end all unknown connections; known ones go on."""
        if self._socket is None or self._accepting is None:
            return
        self._accepting.cancel()
        self._socket.close()
        for task in list(self._unknown):
            task.cancel()
        if self.num_refused or self.num_errors:
            logger.warning(
                f"port {self._port}: closed {self.num_refused:,} connections that made no valid request; "
                f"{self.num_errors:,} more could not be accepted"
            )
        self._socket = None

    async def _accept(self, listening: socket.socket) -> None:
        loop, most = asyncio.get_running_loop(), _most_descriptors() - RESERVE
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError:  # too many open files, no memory, or the other side has left
                self.num_errors += 1
                await asyncio.sleep(PAUSE_AFTER_ERROR)
                continue
            if connection.fileno() >= most:
                connection.close()
                self.num_refused += 1
                await asyncio.sleep(PAUSE_AFTER_ERROR)
                continue
            self._make_room(address[0])
            task = asyncio.create_task(self._handle(connection))
            self._unknown[task] = address[0]
            task.add_done_callback(self._forget)
            await asyncio.sleep(PAUSE)

    def _make_room(self, address: str) -> None:
        """End the oldest unknown connection of this address, or of all, if there are too many."""
        same = [task for task, other in self._unknown.items() if other == address]
        for tasks, most in ((same, MOST_OF_ADDRESS), ([*self._unknown], MOST_UNKNOWN)):
            if len(tasks) >= most and tasks[0] in self._unknown:
                del self._unknown[tasks[0]]
                tasks[0].cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        self._known.discard(task)

    async def _handle(self, connection: socket.socket) -> None:
        """Serve one connection; an error ends only this connection."""
        loop, task, serve = asyncio.get_running_loop(), asyncio.current_task(), None
        assert task is not None, "each connection has a task"
        reader = asyncio.StreamReader(limit=self._most_asked)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(UNKNOWN_TIME):
                    serve = await self._authenticate(reader, writer)
                if serve is not None:
                    self._unknown.pop(task, None)
                    self._known.add(task)
                    await serve()
        finally:
            self.num_refused += serve is None
            writer.close()


def _most_descriptors() -> int:
    """Return the limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return os.sysconf("SC_OPEN_MAX") if soft == resource.RLIM_INFINITY else soft

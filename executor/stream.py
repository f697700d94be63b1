"""Scored rollouts and finished groups of a run, as they come, for whoever asks on this machine: server-sent events.

    GET /rollouts    event "rollout" for each that has its reward
    GET /groups      event "group" for each whose last rollout has its reward

Tokens go from replicas to trainers past the process that decides, so what is told of a rollout is told once it is scored.
It listens on loopback alone, where `stream.json` of the run directory says, which only its owner may read: the port, and
the token that `Authorization: Bearer` must name. Who reads too slowly loses the oldest events, is told how many (event
"lost"), and delays nobody: events wait in a bounded line of the reader's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from executor.buffer import BufferedRollout
from executor.notices import tell
from executor.stream_client import HOST, STREAM, StreamAddress

MOST_WAITING = 1000
"""Events that wait for one reader: of some kilobytes each."""
MOST_READERS = 16
MOST_ASKED = 16_384
"""Bytes of a request's head."""
PATIENCE = 10.0
"""Seconds in which a request has to be there."""
END_TIME = 2.0
"""Seconds that readers get at the end to take what waits for them."""
KINDS = {"/rollouts": "rollout", "/groups": "group"}


class Reader:
    """What waits for one reader."""

    def __init__(self, kind: str, connection: asyncio.WriteTransport) -> None:
        self.kind = kind
        self.connection = connection
        self.lost = 0
        """Events that it was too slow for, and was not told of yet."""
        self._waiting: deque[bytes] = deque()
        self._something = asyncio.Event()

    def put(self, event: bytes) -> bool:
        """Let an event wait, in the oldest one's place where there are too many; return whether that was so."""
        is_full = len(self._waiting) == MOST_WAITING
        if is_full:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(event)
        self._something.set()
        return is_full

    async def take(self) -> bytes:
        """Return all that waits, once anything does; before it, how many events were lost."""
        await self._something.wait()
        self._something.clear()
        lost, self.lost = self.lost, 0
        told = [encode_event("lost", {"events": lost})] if lost else []
        found = b"".join([*told, *self._waiting])
        self._waiting.clear()
        return found


class GroupStream:
    """Serves a run's rollouts and groups; does nothing where no port is asked for."""

    def __init__(self, directory: Path, port: int | None, group_size: int) -> None:
        self._path = directory / STREAM
        self._port = port
        self._group_size = group_size
        self._server: asyncio.Server | None = None
        self._token = secrets.token_urlsafe(32)
        self._readers: dict[Reader, asyncio.Task[None]] = {}
        self._groups: dict[int, list[dict[str, Any]]] = {}
        """Scored rollouts of groups of which others are missing."""
        self.num_lost = 0
        """Events that readers were too slow for."""

    async def start(self) -> None:
        """Listen, and say where.

        Raises:
            RuntimeError: the port is taken.
        """
        self._path.unlink(missing_ok=True)
        if self._port is None:
            return
        try:
            self._server = await asyncio.start_server(
                self._serve, HOST, self._port, limit=MOST_ASKED
            )
        except OSError as error:
            raise RuntimeError(f"execute.stream_port {self._port}: {error.strerror}") from None
        port = self._server.sockets[0].getsockname()[1]
        partial = self._path.with_name(f".{STREAM}.tmp")
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600)
        partial.write_bytes(msgspec.json.encode(StreamAddress(port, self._token)))
        partial.rename(self._path)

    def publish(self, rollout: int, buffered: BufferedRollout, text: str, prompt: object) -> None:
        """Tell readers of a rollout that has its reward, and of its group where that is the last one."""
        if self._server is None:
            return
        group = rollout // self._group_size
        told = {
            "rollout": rollout,
            "group": group,
            "text": text,
            "num_tokens": buffered.num_tokens,
            "versions": buffered.versions,
            "reward": buffered.reward,
            "rewards": dict(buffered.scores),
            "fault": buffered.fault,
        }
        self._send("rollout", told)
        siblings = self._groups.setdefault(group, [])
        siblings.append(told)
        if len(siblings) == self._group_size:
            siblings.sort(key=lambda each: each["rollout"])
            self._send("group", {"group": group, "prompt": prompt, "rollouts": siblings})
            del self._groups[group]

    def forget(self, group: int) -> None:
        """Enter that a group will never be whole."""
        self._groups.pop(group, None)

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        readers = [reader for reader in self._readers if reader.kind == kind]
        if readers:
            event = encode_event(kind, data)
            for reader in readers:
                self.num_lost += reader.put(event)

    async def close(self) -> None:
        """Tell readers that it is over, and listen no longer."""
        if self._server is None:
            return
        self._server.close()
        for reader in self._readers:
            reader.put(encode_event("end", {}))
        if self._readers:
            await asyncio.wait(list(self._readers.values()), timeout=END_TIME)
        for reader in self._readers:
            reader.connection.abort()
        self._server = None
        self._path.unlink(missing_ok=True)
        if self.num_lost:
            tell(f"readers of the stream were too slow for {self.num_lost:,} events, and lost them")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; whatever goes wrong with it is its own affair."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, kind = self._judge(head)
            if kind is None:
                writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
            else:
                await self._feed(kind, writer)
        writer.close()

    def _judge(self, head: str) -> tuple[str, str | None]:
        """Return the status that a request is answered with, and what it wants where it may have it."""
        first, *lines = head.split("\r\n")
        fields = {
            key.strip().lower(): value.strip()
            for key, _, value in (x.partition(":") for x in lines)
        }
        given = fields.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return "401 Unauthorized", None
        method, _, rest = first.partition(" ")
        if method != "GET":
            return "405 Method Not Allowed", None
        kind = KINDS.get(rest.partition(" ")[0])
        if kind is None:
            return "404 Not Found", None
        if len(self._readers) >= MOST_READERS:
            return "503 Service Unavailable", None
        return "200 OK", kind

    async def _feed(self, kind: str, writer: asyncio.StreamWriter) -> None:
        mine, task = Reader(kind, writer.transport), asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        self._readers[mine] = task
        try:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
            )
            while True:
                events = await mine.take()
                writer.write(events)
                await writer.drain()
                if events.endswith(END):
                    return
        finally:
            del self._readers[mine]


def encode_event(kind: str, data: dict[str, Any]) -> bytes:
    """Write one event; JSON has no line breaks of its own."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


END = encode_event("end", {})

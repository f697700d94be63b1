"""Scored rollouts and finished groups of a run, as they come, for whoever asks on this machine: server-sent events.

    GET /rollouts             event "rollout" for each that has its reward
    GET /groups               event "group" for each whose last rollout has its reward
    GET /rollouts?tokens=1    before it event "tokens" for what replicas have made of it since the last one; /groups too

Tokens go from replicas to trainers past the process that decides, which reads them where replicas put them, and only where
a reader wants them. It listens on loopback alone, where `stream.json` of the run directory says, which only its owner may read: the port, and
the token that `Authorization: Bearer` must name. Who reads too slowly loses the oldest events, is told how many (event
"lost"), and delays nobody: events wait in a bounded line of the reader's own. Who is told of tokens would miss some: it is
dropped instead (event "dropped").
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.engine.messages import Event
from streamrl.executor.buffer import BufferedRollout, RolloutBuffer
from streamrl.executor.subscribers.stream_client import HOST, STREAM, StreamAddress
from streamrl.executor.subscribers.token_stream import TokenStream
from streamrl.runfile.config import ExecuteConfig

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Events that wait for one reader: of some kilobytes each."""
MANY_BYTES, MOST_BYTES = 2**23, 2**25
"""Of events that wait for one reader who is told of tokens: whoever tells waits for it, and what nobody waits with."""
DROP_TIME = 2.0
"""Seconds that a reader who is told of tokens may take nothing of many, and then gets to learn that it was dropped."""
MOST_READERS = 16
MOST_ASKED = 16_384
"""Bytes of a request's head."""
PATIENCE = 10.0
"""Seconds in which a request has to be there."""
END_TIME = 2.0
"""Seconds that readers get at the end to take what waits for them."""
KINDS = {"/rollouts": "rollout", "/groups": "group"}
TOKENS = "tokens=1"


class StreamRequest(NamedTuple):
    """What a reader wants."""

    kind: str
    with_tokens: bool = False


class Reader:
    """What waits for one reader."""

    def __init__(self, asked: StreamRequest, connection: asyncio.WriteTransport) -> None:
        self.asked = asked
        self.connection = connection
        self.is_dropped = False
        self.lost = 0
        """Events that it was too slow for, and was not told of yet."""
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_taken = asyncio.Event()
        self._something = asyncio.Event()

    def put(self, event: bytes) -> bool:
        """Let an event wait, in the oldest one's place where there are too many; return whether that was so."""
        if self.asked.with_tokens:
            return self._put_or_drop(event)
        is_full = len(self._waiting) == MOST_WAITING
        if is_full:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(event)
        self._something.set()
        return is_full

    def _put_or_drop(self, event: bytes) -> bool:
        """Let an event wait, or drop a reader for whom too much waits; return whether the event is lost."""
        if self.is_dropped:
            return True
        self._num_bytes += len(event)
        is_full = self._num_bytes > MOST_BYTES
        if is_full:
            self.drop()
        else:
            self._waiting.append(event)
            self._something.set()
        return is_full

    async def wait_for_room(self) -> None:
        """Wait while much waits for the reader, and drop it where it takes nothing of that."""
        if self.is_dropped or self._num_bytes <= MANY_BYTES:
            return
        self._has_taken.clear()
        try:
            async with asyncio.timeout(DROP_TIME):
                await self._has_taken.wait()
        except TimeoutError:
            self.drop()

    def drop(self) -> None:
        """Tell the reader that it is told no more; whoever does not even read that is cut off."""
        self.is_dropped = True
        self._waiting.clear()
        self._waiting.append(DROPPED)
        self._something.set()
        with contextlib.suppress(RuntimeError):  # no loop: nobody is connected
            asyncio.get_running_loop().call_later(DROP_TIME, self.connection.abort)

    async def take(self) -> bytes:
        """Return all that waits, once anything does; before it, how many events were lost."""
        await self._something.wait()
        self._something.clear()
        lost, self.lost = self.lost, 0
        told = [encode_event("lost", {"events": lost})] if lost else []
        found = b"".join([*told, *self._waiting])
        self._waiting.clear()
        self._num_bytes = 0
        self._has_taken.set()
        return found


class GroupStream:
    """Serves a run's rollouts and groups; does nothing where no port is asked for."""

    def __init__(
        self, directory: Path, group_size: int, execute: ExecuteConfig, buffer: RolloutBuffer
    ) -> None:
        self._path = directory / STREAM
        self._port = execute.stream_port
        self._group_size = group_size
        every = execute.save_tokens_every
        self._token_stream = TokenStream(
            buffer, self._group_size, every, self._tell_tokens, self._drop_readers_of_tokens
        )
        self._telling: asyncio.Task[None] | None = None
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
        self._telling = asyncio.create_task(self._token_stream.serve())
        self._telling.add_done_callback(self._end_telling)
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

    def see(self, event: Event) -> None:
        """Take note of what an event says of the tokens of a rollout."""
        self._token_stream.see(event)

    def forget(self, group: int) -> None:
        """Enter that a group will never be whole."""
        self._groups.pop(group, None)
        first = group * self._group_size
        self._token_stream.forget(range(first, first + self._group_size))

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        """Tell those who want it: who is told of tokens once they have those before it."""
        readers = [reader for reader in self._readers if reader.asked.kind == kind]
        if readers:
            event = encode_event(kind, data)
            self._put(event, [reader for reader in readers if not reader.asked.with_tokens])
            later = [r for r in readers if r.asked.with_tokens and not r.is_dropped]
            if later:
                self._token_stream.then(partial(self._put, event, later))

    async def _tell_tokens(self, data: dict[str, Any]) -> None:
        event = encode_event("tokens", data)
        for reader in [reader for reader in self._readers if reader.asked.with_tokens]:
            await reader.wait_for_room()
            self._put(event, [reader])

    def _put(self, event: bytes, readers: Iterable[Reader]) -> None:
        for reader in readers:
            self.num_lost += reader.put(event)

    def _drop_readers_of_tokens(self) -> None:
        for reader in self._readers:
            if reader.asked.with_tokens and not reader.is_dropped:
                reader.drop()
        self._token_stream.want(False)

    def _end_telling(self, task: asyncio.Task[None]) -> None:
        """Go on without whoever is told of tokens, where these cannot be told any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning(f"tokens are told to nobody any more: {type(error).__name__}: {error}")
            self._drop_readers_of_tokens()

    async def close(self) -> None:
        """Tell readers that it is over, and listen no longer."""
        if self._server is None:
            return
        self._server.close()
        await self._tell_all()
        for reader in self._readers:
            reader.put(encode_event("end", {}))
        if self._readers:
            await asyncio.wait(list(self._readers.values()), timeout=END_TIME)
        for reader in self._readers:
            reader.connection.abort()
        self._server = None
        self._path.unlink(missing_ok=True)
        if self.num_lost:
            logger.warning(
                f"readers of the stream were too slow for {self.num_lost:,} events, and lost them"
            )

    async def _tell_all(self) -> None:
        """Let readers have the tokens that there are, and tell no more."""
        assert self._telling is not None, "it has started"
        if self._token_stream.is_wanted:
            is_told = asyncio.Event()
            self._token_stream.then(is_told.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_told.wait(), END_TIME)
        self._telling.cancel()
        self._token_stream.want(False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; whatever goes wrong with it is its own affair."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, asked = self._judge(head)
            if asked is None:
                writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
            else:
                await self._feed(asked, writer)
        writer.close()

    def _judge(self, head: str) -> tuple[str, StreamRequest | None]:
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
        path, _, query = rest.partition(" ")[0].partition("?")
        kind = KINDS.get(path)
        if kind is None or query not in ("", TOKENS):
            return "404 Not Found", None
        if len(self._readers) >= MOST_READERS:
            return "503 Service Unavailable", None
        return "200 OK", StreamRequest(kind, query == TOKENS)

    async def _feed(self, asked: StreamRequest, writer: asyncio.StreamWriter) -> None:
        mine, task = Reader(asked, writer.transport), asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        self._readers[mine] = task
        self._look_who_reads()
        try:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Cache-Control: no-store\r\nConnection: close\r\n\r\n"
            )
            while True:
                events = await mine.take()
                writer.write(events)
                await writer.drain()
                if events.endswith((END, DROPPED)):
                    return
        finally:
            del self._readers[mine]
            self._look_who_reads()

    def _look_who_reads(self) -> None:
        """Let tokens be told as long as anybody wants them."""
        is_over = self._telling is None or self._telling.done()
        wants = (r.asked.with_tokens and not r.is_dropped for r in self._readers)
        self._token_stream.want(not is_over and any(wants))


def encode_event(kind: str, data: dict[str, Any]) -> bytes:
    """Write one event; JSON has no line breaks of its own."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


END = encode_event("end", {})
DROPPED = encode_event("dropped", {})

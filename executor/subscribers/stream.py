"""Serve scored rollouts and finished groups of a run to local readers, as server-sent events.

| request                  | event                                                                                 |
|--------------------------|---------------------------------------------------------------------------------------|
| `GET /rollouts`          | "rollout" for each rollout that has its reward                                        |
| `GET /groups`            | "group" for each group whose last rollout has its reward                              |
| `GET /rollouts?tokens=1` | also "tokens", before the rollout, for each piece of its new tokens; `/groups` has it too |

The server listens on loopback only. `stream.json` in the run directory has the port and the token for
`Authorization: Bearer`; only the owner of the run can read this file.

A slow reader never delays the run. Each reader has a bounded queue. A reader without tokens loses the oldest events,
and an event "lost" has their number. A reader with tokens is dropped instead (event "dropped"), because it would miss
tokens. Tokens do not pass through the controller to trainers. The controller reads their files only for such readers.
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
from streamrl.executor.subscribers.listener import Listener, Serve
from streamrl.executor.subscribers.stream_client import HOST, STREAM, StreamAddress
from streamrl.executor.subscribers.token_stream import TokenStream
from streamrl.runfile.config import ExecuteConfig

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Maximum number of events queued for one reader, of some kilobytes each."""
MANY_BYTES, MOST_BYTES = 2**23, 2**25
"""Bytes queued for one reader with tokens. Above the first limit the token stream waits for the reader. Above the
second one the reader is dropped."""
DROP_TIME = 2.0
"""Seconds after which a blocked reader with tokens is dropped, and seconds that it has to read the event "dropped"."""
MOST_READERS = 16
MOST_ASKED = 16_384
"""Maximum size of a request's head, in bytes."""
END_TIME = 2.0
"""Seconds that readers have at the end of the run to read their queued events."""
KINDS = {"/rollouts": "rollout", "/groups": "group"}
TOKENS = "tokens=1"


class StreamRequest(NamedTuple):
    """The request of a reader: the kind of event, and whether it wants tokens."""

    kind: str
    with_tokens: bool = False


class Reader:
    """The queue of events of one reader."""

    def __init__(self, request: StreamRequest, connection: asyncio.WriteTransport) -> None:
        self.request = request
        self.connection = connection
        self.is_dropped = False
        self.lost = 0
        """Lost events that were not reported to the reader yet."""
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_taken = asyncio.Event()
        self._something = asyncio.Event()

    def put(self, event: bytes) -> bool:
        """Queue an event; if the queue is full, drop the oldest event and return True."""
        if self.request.with_tokens:
            return self._put_or_drop(event)
        is_full = len(self._waiting) == MOST_WAITING
        if is_full:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(event)
        self._something.set()
        return is_full

    def _put_or_drop(self, event: bytes) -> bool:
        """Queue an event, or drop the reader if its queue is full; return whether the event is lost."""
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
        """Wait while the queue is nearly full; drop the reader if it reads nothing for `DROP_TIME`."""
        if self.is_dropped or self._num_bytes <= MANY_BYTES:
            return
        self._has_taken.clear()
        try:
            async with asyncio.timeout(DROP_TIME):
                await self._has_taken.wait()
        except TimeoutError:
            self.drop()

    def drop(self) -> None:
        """Replace the queue by the event "dropped"; close the connection if it is not read in time."""
        self.is_dropped = True
        self._waiting.clear()
        self._waiting.append(DROPPED)
        self._something.set()
        with contextlib.suppress(RuntimeError):  # no event loop: no reader is connected
            asyncio.get_running_loop().call_later(DROP_TIME, self.connection.abort)

    async def take(self) -> bytes:
        """Wait for events and return all of them; the event "lost" comes first if events were lost."""
        await self._something.wait()
        self._something.clear()
        lost, self.lost = self.lost, 0
        report = [encode_event("lost", {"events": lost})] if lost else []
        events = b"".join([*report, *self._waiting])
        self._waiting.clear()
        self._num_bytes = 0
        self._has_taken.set()
        return events


class GroupStream:
    """Serves the rollouts and groups of a run; does nothing if `execute.stream_port` is not set."""

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
        self._listener: Listener | None = None
        self._token = secrets.token_urlsafe(32)
        self._readers: dict[Reader, asyncio.Task[None]] = {}
        self._groups: dict[int, list[dict[str, Any]]] = {}
        """Scored rollouts of incomplete groups, by group."""
        self.num_lost = 0
        """Events that slow readers lost."""

    async def start(self) -> None:
        """Start the server and write stream.json.

        Raises:
            RuntimeError: the port is in use.
        """
        self._path.unlink(missing_ok=True)
        if self._port is None:
            return
        listener = Listener(HOST, self._port, self._authenticate, MOST_ASKED)
        try:
            port = listener.start()
        except OSError as error:
            raise RuntimeError(f"execute.stream_port {self._port}: {error.strerror}") from None
        self._listener = listener
        self._telling = asyncio.create_task(self._token_stream.serve())
        self._telling.add_done_callback(self._end_telling)
        partial = self._path.with_name(f".{STREAM}.tmp")
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600)
        partial.write_bytes(msgspec.json.encode(StreamAddress(port, self._token)))
        partial.rename(self._path)

    def publish(self, rollout: int, buffered: BufferedRollout, text: str, prompt: object) -> None:
        """Send a scored rollout to its readers, and its group when this is the group's last rollout."""
        if self._listener is None:
            return
        group = rollout // self._group_size
        facts = {
            "rollout": rollout,
            "group": group,
            "text": text,
            "num_tokens": buffered.num_tokens,
            "versions": buffered.versions,
            "reward": buffered.reward,
            "rewards": dict(buffered.scores),
            "fault": buffered.fault,
        }
        self._send("rollout", facts)
        siblings = self._groups.setdefault(group, [])
        siblings.append(facts)
        if len(siblings) == self._group_size:
            siblings.sort(key=lambda each: each["rollout"])
            self._send("group", {"group": group, "prompt": prompt, "rollouts": siblings})
            del self._groups[group]

    def see(self, event: Event) -> None:
        """Pass an event to the token stream."""
        self._token_stream.see(event)

    def forget(self, group: int) -> None:
        """Forget a group that will never be complete."""
        self._groups.pop(group, None)
        first = group * self._group_size
        self._token_stream.forget(range(first, first + self._group_size))

    def _send(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event to its readers; readers with tokens get it after all earlier tokens."""
        readers = [reader for reader in self._readers if reader.request.kind == kind]
        if readers:
            event = encode_event(kind, data)
            self._put(event, [reader for reader in readers if not reader.request.with_tokens])
            later = [r for r in readers if r.request.with_tokens and not r.is_dropped]
            if later:
                self._token_stream.then(partial(self._put, event, later))

    async def _tell_tokens(self, data: dict[str, Any]) -> None:
        event = encode_event("tokens", data)
        for reader in [reader for reader in self._readers if reader.request.with_tokens]:
            await reader.wait_for_room()
            self._put(event, [reader])

    def _put(self, event: bytes, readers: Iterable[Reader]) -> None:
        for reader in readers:
            self.num_lost += reader.put(event)

    def _drop_readers_of_tokens(self) -> None:
        for reader in self._readers:
            if reader.request.with_tokens and not reader.is_dropped:
                reader.drop()
        self._token_stream.want(False)

    def _end_telling(self, task: asyncio.Task[None]) -> None:
        """Drop all readers with tokens if the token stream has failed; the run continues."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning(
                f"the token stream failed, its readers are dropped: {type(error).__name__}: {error}"
            )
            self._drop_readers_of_tokens()

    async def close(self) -> None:
        """Send the event "end" to all readers and stop the server."""
        if self._listener is None:
            return
        self._listener.stop()
        await self._tell_all()
        for reader in self._readers:
            reader.put(encode_event("end", {}))
        if self._readers:
            await asyncio.wait(list(self._readers.values()), timeout=END_TIME)
        for reader in self._readers:
            reader.connection.abort()
        self._listener = None
        self._path.unlink(missing_ok=True)
        if self.num_lost:
            logger.warning(f"readers of the stream were too slow and lost {self.num_lost:,} events")

    async def _tell_all(self) -> None:
        """Send the remaining tokens to readers, then stop the token stream."""
        assert self._telling is not None, "start was called"
        if self._token_stream.is_wanted:
            is_told = asyncio.Event()
            self._token_stream.then(is_told.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_told.wait(), END_TIME)
        self._telling.cancel()
        self._token_stream.want(False)

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Serve | None:
        """Read a request, and refuse it or return how to serve it."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, request = self._judge(head)
        if request is not None:
            return partial(self._feed, request, writer)
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        return None

    def _judge(self, head: str) -> tuple[str, StreamRequest | None]:
        """Return the HTTP status of a request, and the parsed request if it is accepted."""
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

    async def _feed(self, request: StreamRequest, writer: asyncio.StreamWriter) -> None:
        mine, task = Reader(request, writer.transport), asyncio.current_task()
        assert task is not None, "asyncio serves each connection in a task"
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
        """Run the token stream while a reader wants tokens."""
        is_over = self._telling is None or self._telling.done()
        wants = (r.request.with_tokens and not r.is_dropped for r in self._readers)
        self._token_stream.want(not is_over and any(wants))


def encode_event(kind: str, data: dict[str, Any]) -> bytes:
    """Return one server-sent event; its JSON has no line breaks."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


END = encode_event("end", {})
DROPPED = encode_event("dropped", {})

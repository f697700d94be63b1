"""The stream of a run: all of it for whoever has the token, nothing for others, and nobody waits for a reader."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.api import read_stream
from streamrl.engine.messages import Drop, Event, Failed, Generated, RunStarted, Verified
from streamrl.engine.state import State
from streamrl.engine.trace import Trace
from streamrl.executor.buffer import BufferedRollout, RolloutBuffer
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.subscribers import listener, stream_client
from streamrl.executor.subscribers.listener import MOST_OF_ADDRESS
from streamrl.executor.subscribers.stream import (
    DROPPED,
    MANY_BYTES,
    MOST_BYTES,
    MOST_READERS,
    MOST_WAITING,
    GroupStream,
    Reader,
    StreamRequest,
    encode_event,
)
from streamrl.executor.subscribers.stream_client import HOST, STREAM, StreamAddress
from streamrl.executor.world import RealWorld
from streamrl.runfile.config import Run
from tests.scripted import ScriptedTokenizer, make_world
from tests.scripted_roles import tokens_of
from tests.test_execute import real_run


def test_a_reader_is_told_of_every_group_and_of_every_rollout_until_the_run_is_over(
    tmp_path: Path,
) -> None:
    run = real_run(tmp_path, execute__stream_port=0, algorithm__steps=5)
    found: dict[str, list[dict[str, Any]]] = {"groups": [], "rollouts": []}

    async def read(kind: Any) -> None:
        async for each in read_stream(tmp_path / "run", kind):
            found[kind].append(each)

    async def go() -> Trace:
        readers: list[asyncio.Task[None]] = []

        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, RunStarted):
                readers.extend(asyncio.create_task(read(kind)) for kind in found)

        world = make_world(run, {"slowest": 0.02}, watch=watch)
        with contextlib.closing(world._directory):
            trace = await world.run()
        await asyncio.gather(*readers)
        return trace

    trace = asyncio.run(asyncio.wait_for(go(), timeout=60))
    verified = {e.event.rollout: e.event.reward for e in trace.entries if type(e.event) is Verified}
    assert {each["rollout"]: each["reward"] for each in found["rollouts"]} == verified
    size = run.algorithm.group_size
    for group in found["groups"]:
        numbers = [each["rollout"] for each in group["rollouts"]]
        assert numbers == list(range(group["group"] * size, (group["group"] + 1) * size))
        assert group["prompt"].startswith("p") and group["rollouts"][0]["text"] in ("odd", "even")
    assert len(found["groups"]) >= 5 * run.algorithm.prompts_per_step
    assert not (tmp_path / "run" / STREAM).exists()


def stream_in(directory: Path, port: int | None) -> GroupStream:
    """Return the stream of a run with groups of two, of which nothing is drawn."""
    given = {} if port is None else {"execute__stream_port": port}
    run = real_run(directory, algorithm__group_size=2, **given)
    return GroupStream(
        directory,
        run.algorithm.group_size,
        run.execute,
        RolloutBuffer(PromptWorkload(run, ScriptedTokenizer()), run.num_trainers),
    )


async def answer(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    head = await reader.readline()
    writer.close()
    return head


def test_who_has_no_token_is_told_nothing_and_who_is_not_the_owner_cannot_read_it(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        address = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress)
        assert (tmp_path / STREAM).stat().st_mode & 0o077 == 0
        right = f"Authorization: Bearer {address.token}\r\n"
        for method, path, fields, status in (
            ("GET", "/groups", "", "401"),
            ("GET", "/groups", "Authorization: Bearer \xe9\r\n", "401"),
            ("POST", "/groups", right, "405"),
            ("GET", "/../trace.jsonl", right, "404"),
            ("GET", "/groups?tokens=2", right, "404"),
            ("GET", "/groups?tokens=1", right, "200"),
            ("GET", "/groups", right, "200"),
        ):
            request = f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
            assert status.encode() in await answer(address.port, request), (method, path, fields)
        await answer(address.port, b"\x80" * 100_000)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.2", address.port)  # loopback, another address
        await stream.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_who_reads_too_slowly_loses_its_oldest_events_is_told_how_many_and_delays_nobody(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        slow = Reader(StreamRequest("rollout"), asyncio.Transport())
        for number in range(MOST_WAITING + 7):
            slow.put(encode_event("rollout", {"rollout": number}))
        told = (await slow.take()).split(b"\n\n")
        assert told[0] == b'event: lost\ndata: {"events":7}' and b'"rollout":7}' in told[1]
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        address = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress)
        _, writer = await asyncio.open_connection(HOST, address.port)  # which reads nothing
        writer.write(
            f"GET /rollouts HTTP/1.1\r\nAuthorization: Bearer {address.token}\r\n\r\n".encode()
        )
        while not stream._readers:
            await asyncio.sleep(0)
        began_at = time.monotonic()
        for number in range(4000):
            stream.publish(number, BufferedRollout((number,), 0), "x" * 10_000, "p")
            if not number % 100:
                await asyncio.sleep(0)
        took = time.monotonic() - began_at
        (reader,) = stream._readers
        assert reader.lost > 1000 and took < 5
        await stream.close()
        assert stream.num_lost > 1000
        writer.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


CROWD = """
import socket, sys, time
kept = []
for number in range(400):
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", int(sys.argv[1])))
    kept.append(connection)
    if number == 200:
        print("here", flush=True)
    time.sleep(0.002)
    if number % 4 == 1:
        connection.send(b"GET /")
    elif number % 4 == 2:
        connection.send(b"\\x16\\x03\\x01\\x02" + b"x" * 30_000)
    elif number % 4 == 3:
        connection.close()
sys.stdin.read()
"""
"""Makes many connections without the token: idle, slow, too long and gone."""


def _num_open() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_crowd_without_the_token_takes_few_descriptors_and_no_readers_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        port = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress).port
        num_open = _num_open()
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CROWD, str(port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert crowd.stdout is not None
        await crowd.stdout.readline()
        reading = asyncio.create_task(anext(read_stream(tmp_path, "rollouts")))
        while not stream._readers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert _num_open() < num_open + MOST_OF_ADDRESS + 10
        stream.publish(0, BufferedRollout((0,), 0), "text", "p")
        assert (await reading)["rollout"] == 0
        await stream.close()
        await crowd.communicate(b"")

    asyncio.run(asyncio.wait_for(go(), timeout=30))
    (line,) = caplog.messages
    assert "connections that made no valid request" in line


def known(stream: GroupStream, path: str = "/rollouts") -> tuple[int, bytes]:
    """Return the port of a stream, and a request with its token."""
    address = msgspec.json.decode(stream._path.read_bytes(), type=StreamAddress)
    head = f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {address.token}\r\n\r\n"
    return address.port, head.encode()


HOSTILE: dict[str, bytes] = {
    "half a head": b"GET /rollouts HTTP/1.1\r\nAuthorization: Bear",
    "a huge length": b"POST /rollouts HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "a head without end": b"GET /rollouts HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
    "one long line": b"GET /" + b"a" * 100_000 + b"\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "two tokens": b"GET /rollouts HTTP/1.1\r\nAuthorization: Bearer x\r\nAuthorization: Bearer y\r\n\r\n",
    "no text": bytes(range(256)) + b"\r\n\r\n",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_request_ends_its_own_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(listener, "UNKNOWN_TIME", 0.2)

    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        port, request = known(stream)
        assert b"200" in await answer(port, request)
        reader, writer = await asyncio.open_connection(HOST, port)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
            said = await reader.read()
            assert said[:12] in (b"", b"HTTP/1.1 401")
        assert b"200" in await answer(port, request)
        writer.close()
        await stream.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_a_reader_that_sends_more_or_leaves_in_the_middle_of_an_event_harms_nobody(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        port, request = known(stream)
        honest = asyncio.create_task(anext(read_stream(tmp_path, "rollouts")))
        talker, leaver = [await asyncio.open_connection(HOST, port, limit=2**24) for _ in range(2)]
        talker[1].write(request + request * 100 + b"POST /stop HTTP/1.1\r\n\r\n" + bytes(10_000))
        leaver[1].write(request)
        while len(stream._readers) < 3:
            await asyncio.sleep(0.01)
        leaver[1].transport.abort()
        stream.publish(0, BufferedRollout((0,), 0), "x" * 4_000_000, "p")
        assert (await honest)["rollout"] == 0
        text = await talker[0].readuntil(b"\n\n")
        assert text.startswith(b"HTTP/1.1 200") and text.count(b"event: rollout") == 1
        stream.publish(1, BufferedRollout((1,), 0), "y", "p")
        await stream.close()
        for _, writer in (talker, leaver):
            writer.close()
        assert not stream._readers

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_readers_with_the_token_are_limited_too_and_a_place_is_free_again(tmp_path: Path) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        port, request = known(stream)
        kept = []
        for _ in range(MOST_READERS):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(request)
            assert b"200" in await reader.readline()
            kept.append(writer)
        assert b"503" in await answer(port, request)
        kept.pop().close()
        while len(stream._readers) == MOST_READERS:
            await asyncio.sleep(0.01)
            stream.publish(0, BufferedRollout((0,), 0), "text", "p")
        assert b"200" in await answer(port, request)
        await stream.close()
        for writer in kept:
            writer.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_a_token_of_an_earlier_run_opens_nothing(tmp_path: Path) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        _, old = known(stream)
        await stream.close()
        again = stream_in(tmp_path, port=0)
        await again.start()
        port, _ = known(again)
        assert b"401" in await answer(port, old)
        await again.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_an_error_of_accept_ends_no_run_and_later_readers_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PAUSE_AFTER_ERROR", 0.01)

    async def go() -> None:
        loop = asyncio.get_running_loop()
        accept, errors = loop.sock_accept, [errno.ECONNABORTED, errno.EMFILE, errno.ENOBUFS]

        async def fail(listening: Any) -> Any:
            if errors:
                raise OSError(errors.pop(), "no")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", fail)
        stream = stream_in(tmp_path, port=0)
        await stream.start()
        port = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress).port
        assert b"401" in await answer(port, b"GET / HTTP/1.1\r\n\r\n") and not errors
        monkeypatch.setattr(listener, "RESERVE", 10**6)
        await stream.close()
        await stream.start()
        port = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress).port
        assert not await answer(port, b"GET / HTTP/1.1\r\n\r\n")  # no descriptor is free
        await stream.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))
    assert "3 more could not be accepted" in caplog.messages[0] and len(caplog.messages) == 2


def test_where_no_run_streams_a_reader_is_told_so(tmp_path: Path) -> None:
    async def go() -> None:
        async for _ in read_stream(tmp_path):
            pass

    with pytest.raises(
        ValueError, match=r"no run streams there; start it with execute\.stream_port"
    ):
        asyncio.run(go())


@pytest.mark.parametrize(
    "sent",
    [
        b"event: rollout\ndata: 7\n\n",
        b"event: rollout\ndata: {\n\n",
        b"event: lost\ndata: \xff\n\n",
        b"x" * 200_000,
        b"event: rollout\ndata: " + b"[" * 50_000 + b"\n\n",
    ],
)
def test_another_process_at_the_port_of_a_run_is_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(stream_client, "LONGEST", 100_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + sent)
        await reader.read()
        writer.close()

    async def go() -> None:
        async with await asyncio.start_server(serve, HOST, 0) as other:
            port = other.sockets[0].getsockname()[1]
            (tmp_path / STREAM).write_bytes(msgspec.json.encode(StreamAddress(port, "t")))
            with pytest.raises(RuntimeError, match=f"listens on port {port} sends no events"):
                await anext(read_stream(tmp_path))

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_a_run_that_was_asked_for_no_port_listens_nowhere(tmp_path: Path) -> None:
    async def go() -> None:
        stream = stream_in(tmp_path, port=None)
        before = {*tmp_path.iterdir()}
        await stream.start()
        stream.publish(0, BufferedRollout((0, 1), 0), "text", "p")
        assert not stream._groups and {*tmp_path.iterdir()} == before
        await stream.close()

    asyncio.run(go())


# Tokens -------------------------------------------------------------------------------------------

LIVE: dict[str, Any] = {"fastest": 0.05, "slowest": 0.3, "save_time": 0.02}
"""Of rollouts that say often what they have made."""


def read_tokens(
    run: Run, options: dict[str, Any], act: Callable[[RealWorld, Event], None] = lambda w, e: None
) -> tuple[Trace, list[dict[str, Any]]]:
    """Execute a run, and return its trace and all that a reader of tokens was told from its first moment on."""
    found: list[dict[str, Any]] = []
    directory = Path(run.execute.output)

    async def read() -> None:
        async for each in read_stream(directory, "rollouts", tokens=True):
            found.append(each)

    async def go() -> Trace:
        readers: list[asyncio.Task[None]] = []

        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, RunStarted):
                readers.append(asyncio.create_task(read()))
            asyncio.get_running_loop().call_soon(act, world, event)

        tokens = directory / "tokens"
        tokens.mkdir(parents=True)
        world = make_world(run, options, tokens=tokens, watch=watch)
        with contextlib.closing(world._directory):
            trace = await world.run()
        await asyncio.gather(*readers)
        assert not list(tokens.glob("*.*")) or run.execute.deterministic
        return trace

    return asyncio.run(asyncio.wait_for(go(), timeout=60)), found


def put_together(found: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the tokens of each rollout, told in order and each once, but for what was taken back."""
    told: dict[int, list[int]] = {}
    ended: set[int] = set()
    for each in found:
        rollout = each["rollout"]
        tokens = told.setdefault(rollout, [])
        if "taken_back" in each:
            assert len(tokens) == each["start"] + each["taken_back"]
            del tokens[each["start"] :]
        elif "tokens" in each:
            assert each["start"] == len(tokens) and rollout not in ended
            spans = [start for _, start in each["versions"]]
            assert spans == sorted(spans) and spans[:1] == [len(tokens)][: len(each["tokens"])]
            tokens += each["tokens"]
            ended |= {rollout} if "finish" in each else set()
        else:
            assert rollout in ended and each["num_tokens"] == len(tokens), (
                "scored before it was told"
            )
    return told


@pytest.mark.parametrize("system", ["stream-async", "fully-async"])
def test_tokens_are_told_while_they_are_made_in_order_and_each_once(
    tmp_path: Path, system: str
) -> None:
    policies = {"policies__system": system, "policies__weight_sync": "abort-and-resume"}
    run = real_run(
        tmp_path,
        execute__stream_port=0,
        execute__save_tokens_every="0.05 s",
        algorithm__steps=5,
        **policies,
    )
    trace, found = read_tokens(run, LIVE)
    told = put_together(found)
    whole = {
        e.event.rollout: e.event
        for e in trace.entries
        if isinstance(e.event, Generated) and e.event.finish != "aborted"
    }
    assert len(whole) >= 30
    for rollout in whole:
        assert told[rollout] == tokens_of(rollout)[: run.rollout.max_tokens]
    aborted = {e.event.rollout for e in trace.entries if _is_aborted(e.event)}
    assert aborted & told.keys()
    chunks = [each for each in found if each.get("tokens")]
    assert len(chunks) > 1.3 * len(whole), "they were told at their ends alone"
    versions = {
        r: [tuple(s) for c in chunks if c["rollout"] == r for s in c["versions"]] for r in whole
    }
    scored = {each["rollout"]: each["versions"] for each in found if "reward" in each}
    for rollout, spans in scored.items():
        merged = [
            s
            for n, s in enumerate(versions[rollout])
            if not n or s[0] != versions[rollout][n - 1][0]
        ]
        known = [tuple(s) for n, s in enumerate(spans) if not n or s[0] != spans[n - 1][0]]
        assert merged == known


def _is_aborted(event: Event) -> bool:
    return isinstance(event, Generated) and event.finish == "aborted" and event.tokens > 0


def test_what_fails_is_taken_back_and_what_is_dropped_ends_so(tmp_path: Path) -> None:
    run = real_run(
        tmp_path,
        execute__stream_port=0,
        execute__save_tokens_every="0.05 s",
        algorithm__steps=4,
        policies__max_attempts=2,
        policies__max_dropped_groups=1000,
    )
    trace, found = read_tokens(run, {**LIVE, "failure_rate": 0.3})
    told = put_together(found)
    failed = [e for e in trace.entries if isinstance(e.event, Failed)]
    dropped = {c.group for e in trace.entries for c in e.commands if isinstance(c, Drop)}
    assert failed and dropped
    assert any("taken_back" in each for each in found)
    ends = {each["group"] for each in found if each.get("finish") == "dropped"}
    assert ends and ends <= dropped
    for rollout, tokens in told.items():
        assert tokens == tokens_of(rollout)[: len(tokens)]


def test_who_reads_tokens_too_slowly_is_dropped_and_told_so() -> None:
    async def go() -> None:
        class Line(asyncio.Transport):
            aborted = False

            def abort(self) -> None:
                self.aborted = True

        line = Line()
        reader = Reader(StreamRequest("rollout", with_tokens=True), line)
        assert not reader.put(b"x" * (MANY_BYTES + 1))
        waiting = asyncio.create_task(reader.wait_for_room())
        await asyncio.sleep(0)
        assert not waiting.done() and len(await reader.take()) > MANY_BYTES
        await waiting
        assert not reader.is_dropped
        for _ in range(5):
            reader.put(b"x" * (MOST_BYTES // 4))
        assert reader.is_dropped and await reader.take() == DROPPED
        assert reader.put(b"more")

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_nothing_of_tokens_is_read_while_nobody_asks(tmp_path: Path) -> None:
    run = real_run(tmp_path, execute__stream_port=0, algorithm__steps=2)
    seen: list[bool] = []

    async def go() -> None:
        def watch(event: Event, state: State, now: float) -> None:
            teller = world._stream._token_stream
            seen.append(teller.is_wanted or bool(teller._queue or teller._told))

        world = make_world(run, {"slowest": 0.01}, watch=watch)
        with contextlib.closing(world._directory):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert seen and not any(seen)

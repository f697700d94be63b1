"""The stream of a run: all of it for whoever has the token, nothing for others, and nobody waits for a reader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executor.buffer import BufferedRollout
from executor.stream import MOST_WAITING, GroupStream, Reader, encode_event
from executor.stream_client import HOST, STREAM, StreamAddress
from streamrl.api import read_stream
from streamrl.engine.messages import Event, RunStarted, Verified
from streamrl.engine.state import State
from streamrl.record.trace import Trace
from tests.scripted import make_world
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
        stream = GroupStream(tmp_path, 0, 2)
        await stream.start()
        address = msgspec.json.decode((tmp_path / STREAM).read_bytes(), type=StreamAddress)
        assert (tmp_path / STREAM).stat().st_mode & 0o077 == 0
        right = f"Authorization: Bearer {address.token}\r\n"
        for method, path, fields, status in (
            ("GET", "/groups", "", "401"),
            ("GET", "/groups", "Authorization: Bearer \xe9\r\n", "401"),
            ("POST", "/groups", right, "405"),
            ("GET", "/../trace.jsonl", right, "404"),
            ("GET", "/groups", right, "200"),
        ):
            request = f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")
            assert status.encode() in await answer(address.port, request), (method, path, fields)
        await answer(address.port, b"\x80" * 100_000)
        assert [s.getsockname()[0] for s in stream._server.sockets] == [HOST]  # type: ignore[union-attr]
        await stream.close()

    asyncio.run(asyncio.wait_for(go(), timeout=30))


def test_who_reads_too_slowly_loses_its_oldest_events_is_told_how_many_and_delays_nobody(
    tmp_path: Path,
) -> None:
    async def go() -> None:
        slow = Reader("rollout", asyncio.Transport())
        for number in range(MOST_WAITING + 7):
            slow.put(encode_event("rollout", {"rollout": number}))
        told = (await slow.take()).split(b"\n\n")
        assert told[0] == b'event: lost\ndata: {"events":7}' and b'"rollout":7}' in told[1]
        stream = GroupStream(tmp_path, 0, 2)
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


def test_where_no_run_streams_a_reader_is_told_so(tmp_path: Path) -> None:
    async def go() -> None:
        async for _ in read_stream(tmp_path):
            pass

    with pytest.raises(ValueError, match=r"no run streams there \(execute\.stream_port\)"):
        asyncio.run(go())


def test_a_run_that_was_asked_for_no_port_listens_nowhere(tmp_path: Path) -> None:
    async def go() -> None:
        stream = GroupStream(tmp_path, None, 2)
        await stream.start()
        stream.publish(0, BufferedRollout((0, 1), 0), "text", "p")
        assert not stream._groups and not list(tmp_path.iterdir())
        await stream.close()

    asyncio.run(go())

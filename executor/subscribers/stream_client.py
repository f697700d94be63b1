"""Read the stream of a running job: an async iterator over its groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec

STREAM = "stream.json"
"""In a run's directory, as long as it goes on: where its stream is."""
HOST = "127.0.0.1"
LONGEST = 2**26
"""Bytes of an event: a group of many long texts."""


class StreamAddress(msgspec.Struct, frozen=True):
    """Where a run's stream is, and what lets one read it."""

    port: int
    token: str


async def read_stream(
    directory: Path | str,
    kind: Literal["groups", "rollouts"] = "groups",
    *,
    tokens: bool = False,
) -> AsyncIterator[dict[str, Any]]:
    """Yield what a run finishes from now on, each as it comes, until the run is over.

    Of a group: `group`, `prompt` and `rollouts`; of a rollout: `rollout`, `group`, `text`, `num_tokens`, `versions`
    (spans of (version, first token)), `reward`, `rewards` by scorer, and `fault`. Where you were too slow, one that has
    `lost` alone says how many were lost.

    With `tokens` there come, before it, ids of new output tokens of each rollout as its replica reports them
    (`execute.save_tokens_every`), in order: `rollout`, `group`, `start` (output tokens before these), `tokens`, `versions`
    (spans of (version, output token from which on it sampled)), and with the last ones `finish`: "stop", "length" or
    "dropped". One that has `taken_back` instead says that so many tokens from `start` on were lost, and are made anew.
    Where you are too slow for tokens, you are dropped.

    Raises:
        ValueError: no run streams there.
        RuntimeError: the run refuses, drops you because you are too slow, or went away without a word.
    """
    try:
        address = msgspec.json.decode(Path(directory, STREAM).read_bytes(), type=StreamAddress)
        reader, writer = await asyncio.open_connection(HOST, address.port, limit=LONGEST)
    except (OSError, msgspec.MsgspecError):
        what = f"{directory}: no run streams there (execute.stream_port)"
        raise ValueError(what) from None
    try:
        path = f"{kind}?tokens=1" if tokens else kind
        request = (
            f"GET /{path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {address.token}\r\n\r\n"
        )
        writer.write(request.encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if " 200 " not in head.splitlines()[0]:
            raise RuntimeError(f"{directory}: the run refuses: {head.splitlines()[0]}")
        while (event := await _read_event(reader)) is not None:
            yield event
    except (asyncio.IncompleteReadError, ConnectionError):
        raise RuntimeError(f"{directory}: the run went away") from None
    finally:
        writer.close()


async def _read_event(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next event's data; None at the end."""
    text = await reader.readuntil(b"\n\n")
    name, _, data = text.rstrip(b"\n").partition(b"\ndata: ")
    kind, found = name.removeprefix(b"event: "), msgspec.json.decode(data)
    if kind == b"end":
        return None
    if kind == b"dropped":
        raise RuntimeError("the run's tokens came faster than they were read: it tells no more")
    return {"lost": found["events"]} if kind == b"lost" else dict(found)

"""Read the stream of a running job: an async iterator over its groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from streamrl.runfile.reading import decode_json

STREAM = "stream.json"
"""File in the run directory with the address of its stream, while the run is active."""
HOST = "127.0.0.1"
LONGEST = 2**26
"""Maximum size of an event, in bytes: a group of many long texts."""


class StreamAddress(msgspec.Struct, frozen=True):
    """Port of a run's stream, and the token that a reader must send."""

    port: int
    token: str


async def read_stream(
    directory: Path | str,
    kind: Literal["groups", "rollouts"] = "groups",
    *,
    tokens: bool = False,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the groups or rollouts that a run finishes from now on, until the run ends.

    | item             | keys                                                                                        |
    |------------------|---------------------------------------------------------------------------------------------|
    | group            | `group`, `prompt`, `rollouts`                                                               |
    | rollout          | `rollout`, `group`, `text`, `num_tokens`, `versions`, `reward`, `rewards` by scorer, `fault` |
    | lost events      | `lost`: number of events that you lost because you read too slowly                          |
    | new tokens       | `rollout`, `group`, `start`, `tokens`, `versions`, and `finish` with the last tokens        |
    | discarded tokens | `rollout`, `group`, `start`, `taken_back`: number of tokens, which are generated again      |

    `versions` are pairs of a version and the first output token that it sampled. `start` is the number of output tokens
    before these. `finish` is "stop", "length" or "dropped".

    The last two kinds of items come only with `tokens`. They have token ids in order, and come before their rollout or
    group. Replicas report them every `execute.save_tokens_every` seconds. If you read tokens too slowly, you are dropped.

    Raises:
        ValueError: no run has a stream there.
        RuntimeError: the run refuses the request, drops you because you are too slow, or ends without an end event; or
            another process listens on its port.
    """
    try:
        address = decode_json(Path(directory, STREAM), StreamAddress)
        reader, writer = await asyncio.open_connection(HOST, address.port, limit=LONGEST)
    except (OSError, ValueError):
        text = f"{directory}: no run streams there; start it with execute.stream_port"
        raise ValueError(text) from None
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
    except (asyncio.LimitOverrunError, ValueError, RecursionError):  # of msgspec or UTF-8
        raise RuntimeError(
            f"{directory}: what listens on port {address.port} sends no events; is it another process?"
        ) from None
    finally:
        writer.close()


async def _read_event(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the data of the next event, or None at the end."""
    text = await reader.readuntil(b"\n\n")
    name, _, data = text.rstrip(b"\n").partition(b"\ndata: ")
    kind = name.removeprefix(b"event: ")
    facts = msgspec.json.decode(data, type=dict[str, Any])
    if kind == b"end":
        return None
    if kind == b"dropped":
        raise RuntimeError("tokens came faster than they were read, so the run dropped this reader")
    return {"lost": facts.get("events")} if kind == b"lost" else facts

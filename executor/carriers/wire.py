"""Frames between the controller and a worker: a length, then msgpack. No pickle, no code, only data."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

LENGTH_BYTES = 4
MOST_BYTES = 1 << 30  # a longer frame is a broken peer, not a message

Kind = Literal["result", "error"]


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Run `method` of the role; answers carry `id`."""

    id: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a call gave: its result, or an error's text."""

    id: int
    kind: Kind
    value: Any


def write_frame(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue one message; frames leave in the order of these calls."""
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Wait for one message's bytes.

    Raises:
        asyncio.IncompleteReadError: the peer is gone.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MOST_BYTES} are allowed")
    return await reader.readexactly(length)

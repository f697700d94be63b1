"""Frames between the controller and a worker: a length, then msgpack. No pickle, no code, only data."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, TypeVar

import msgspec

LENGTH_BYTES = 4
MOST_BYTES = 1 << 30  # a longer frame is a broken peer, not a message
PING = 0  # id of a call that a worker answers by itself, as a sign of life; those of its role begin at 1

T = TypeVar("T")
Kind = Literal["result", "error", "lost"]
"""lost: an error after which the role can do nothing any more; see `RoleLostError`."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Run `method` of the role; answers carry `id`."""

    id: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a call gave: its result, or an error's text."""

    id: int
    kind: Kind
    value: msgspec.Raw
    """Of the type that the caller asked for; see `decode`."""


def encode(value: object) -> msgspec.Raw:
    """Return a value as a part of a message."""
    return msgspec.Raw(_ENCODER.encode(value))


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Return what `encode` was given, or what a frame carried, as a `kind`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    value: T = decoder.decode(data)
    return value


def encode_frame(message: object) -> bytes:
    """Return a message as it goes over the wire."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def write_frame(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue one message; frames leave in the order of these calls."""
    writer.write(encode_frame(message))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Wait for one message's bytes.

    Raises:
        asyncio.IncompleteReadError: the peer is gone.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MOST_BYTES} are allowed")
    return await reader.readexactly(length)


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[object, msgspec.msgpack.Decoder[Any]] = {}
"""By what they decode; making one takes longer than decoding with it."""

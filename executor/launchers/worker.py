"""Serve one role in its own process, and encode the calls and answers that it exchanges with the controller.

The process that a role lives in: `python -m streamrl.executor.launchers.worker MODULE:CLASS FD`.

It reads the role's configuration, then serves calls, many at a time, until its controller is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from streamrl.executor.libc import die_with_parent
from streamrl.executor.roles import RoleLostError, reason_of

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
    """Queue one message, unless the connection is lost; frames leave in the order of these calls.

    A call may come after the peer has died and before its end is noticed. asyncio warns of each such write.
    """
    if not writer.is_closing():
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


MODULE = "streamrl.executor.launchers.worker"
"""Of this file, by which a worker's process is known."""


async def serve(role_path: str, connection: socket.socket) -> None:
    """Serve one role over `connection` until the controller closes it."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    role = make_role(role_path, msgspec.msgpack.decode(await read_frame(reader)))
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            call = msgspec.msgpack.decode(await read_frame(reader), type=Call)
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the controller is gone: threads in the middle of a computation end too
        if call.id == PING:
            write_frame(writer, Answer(PING, "result", encode(None)))
            continue
        task = asyncio.create_task(_answer(role, call, writer))
        running.add(task)
        task.add_done_callback(running.discard)


def make_role(role_path: str, config: object) -> Any:
    """Import `module:Class` and make it from its configuration, given as plain data."""
    module_name, _, class_name = role_path.partition(":")
    role_class = getattr(importlib.import_module(module_name), class_name)
    config_class = get_type_hints(role_class.__init__)["config"]
    return role_class(msgspec.convert(config, config_class))


async def _answer(role: Any, call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        method = getattr(role, call.method)
        result = await method(*typed_arguments(method, call.arguments))
        write_frame(writer, Answer(call.id, "result", encode(result)))
    except Exception as error:  # crosses the process boundary as text, and becomes `Failed` there
        with suppress(OSError):  # its log's disk is full
            traceback.print_exc()
        write_frame(writer, failure(call, error))
    await writer.drain()


def failure(call: Call, error: Exception) -> Answer:
    """Return the answer to a call that has raised."""
    kind: Kind = "lost" if isinstance(error, RoleLostError) else "error"
    return Answer(call.id, kind, encode(reason_of(error)))


def typed_arguments(method: Any, arguments: list[Any]) -> list[Any]:
    """Convert plain data to the types that the method declares."""
    hints = get_type_hints(method)
    hints.pop("return", None)
    kinds = list(hints.values())[: len(arguments)]
    return [msgspec.convert(value, kind) for value, kind in zip(arguments, kinds, strict=True)]


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))

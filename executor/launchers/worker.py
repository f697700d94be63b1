"""Serve one role in its own process, and encode its calls and answers.

    python -m streamrl.executor.launchers.worker MODULE:CLASS FD

The process reads the role's configuration from FD. Then it serves calls concurrently until the controller is gone.
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
MOST_BYTES = 1 << 30  # a longer frame means a broken peer
PING = 0  # id of a ping, which the worker itself answers; calls of the role have ids from 1

T = TypeVar("T")
Kind = Literal["result", "error", "lost"]
"""lost: an error after which the role cannot continue; see `RoleLostError`."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Run `method` of the role; its answer has the same `id`."""

    id: int
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, or the text of its error."""

    id: int
    kind: Kind
    value: msgspec.Raw
    """Encoded result of the type that the caller expects; see `decode`."""


def encode(value: object) -> msgspec.Raw:
    """Return a value encoded as part of a message."""
    return msgspec.Raw(_ENCODER.encode(value))


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Return the value in encoded data or in a frame, as a `kind`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    value: T = decoder.decode(data)
    return value


def encode_frame(message: object) -> bytes:
    """Return a message as a frame: its length, then its bytes."""
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def write_frame(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue one message, unless the connection is closing; frames are sent in the order of these calls.

    Without the check, asyncio would warn about each write after the peer has died.
    """
    if not writer.is_closing():
        writer.write(encode_frame(message))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next message.

    Raises:
        asyncio.IncompleteReadError: the peer is gone.
        ValueError: the frame is longer than `MOST_BYTES`.
    """
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MOST_BYTES:
        raise ValueError(f"a frame has {length} bytes, but at most {MOST_BYTES} are allowed")
    return await reader.readexactly(length)


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[object, msgspec.msgpack.Decoder[Any]] = {}
"""Decoders by type, cached because creating one takes longer than decoding."""


MODULE = "streamrl.executor.launchers.worker"
"""Name of this module, which identifies worker processes in `ps`."""


async def serve(role_path: str, connection: socket.socket) -> None:
    """Serve one role over `connection` until the controller closes it."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    role = make_role(role_path, msgspec.msgpack.decode(await read_frame(reader)))
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            call = msgspec.msgpack.decode(await read_frame(reader), type=Call)
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)  # the controller is gone: also end threads that still compute
        if call.id == PING:
            write_frame(writer, answer_ping(role))
            continue
        task = asyncio.create_task(_answer(role, call, writer))
        running.add(task)
        task.add_done_callback(running.discard)


def make_role(role_path: str, config: object) -> Any:
    """Import `module:Class` and create it from its configuration, given as plain data."""
    module_name, _, class_name = role_path.partition(":")
    role_class = getattr(importlib.import_module(module_name), class_name)
    config_class = get_type_hints(role_class.__init__)["config"]
    return role_class(msgspec.convert(config, config_class))


async def _answer(role: Any, call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        method = getattr(role, call.method)
        result = await method(*typed_arguments(method, call.arguments))
        write_frame(writer, Answer(call.id, "result", encode(result)))
    except Exception as error:  # sent as text; the controller turns it into `Failed`
        with suppress(OSError):  # the disk of the log is full
            traceback.print_exc()
        write_frame(writer, failure(call, error))
    await writer.drain()


def failure(call: Call, error: Exception) -> Answer:
    """Return the answer to a call that raised `error`."""
    kind: Kind = "lost" if isinstance(error, RoleLostError) else "error"
    return Answer(call.id, kind, encode(reason_of(error)))


def answer_ping(role: Any) -> Answer:
    """Return the answer to a ping: "lost" if the role knows that it cannot continue."""
    try:
        if hasattr(role, "check_alive"):
            role.check_alive()
    except RoleLostError as error:
        return Answer(PING, "lost", encode(reason_of(error)))
    return Answer(PING, "result", encode(None))


def typed_arguments(method: Any, arguments: list[Any]) -> list[Any]:
    """Convert plain data to the types that the method declares."""
    hints = get_type_hints(method)
    hints.pop("return", None)
    kinds = list(hints.values())[: len(arguments)]
    return [msgspec.convert(value, kind) for value, kind in zip(arguments, kinds, strict=True)]


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))

"""The process that a role lives in: `python -m streamrl.executor.carriers.worker MODULE:CLASS FD`.

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
from typing import Any, get_type_hints

import msgspec

from streamrl.executor.carriers.wire import (
    PING,
    Answer,
    Call,
    Kind,
    encode,
    read_frame,
    write_frame,
)
from streamrl.executor.libc import die_with_parent
from streamrl.executor.roles import RoleLostError, reason_of

MODULE = "streamrl.executor.carriers.worker"
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

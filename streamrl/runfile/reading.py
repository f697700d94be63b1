"""Read files that others wrote: with limits of size, time and nesting, and each pipe once.

Every reader of a user's file uses these functions. A file may be compressed by gzip. Its limit counts decompressed bytes,
so a small file cannot fill the memory. A pipe (`/dev/stdin`, `<(...)`) is read once, and kept for the readers after the
first.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import select
import stat
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MOST_DATA = 2**28
"""Maximum bytes of a data set, table or recorded file. With what is made of it, a command stays below 2 GB."""
MOST_LOG = 2**27
"""Maximum bytes of a log, whose lines are split and searched."""
MOST_TEXT = 2**22
"""Maximum bytes of a TOML file; tomllib reads some megabytes a second."""
MOST_VALUES = 10_000_000
"""Maximum values in a JSON text. An empty object takes 64 bytes, and one with a key 232."""
MOST_ROWS = 2_000_000
"""Maximum rows of a table."""
MOST_PARTS = 64
"""Maximum parts of a dotted TOML key. The time of tomllib grows with their square."""
DAMAGE_OF_ARRAYS = (
    *(AttributeError, EOFError, KeyError, RuntimeError, TypeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""Errors of numpy and zipfile for a damaged file of arrays (.npz)."""
PATIENCE = 10.0
"""Seconds without data after which a pipe is given up."""
BLOCK_BYTES = 2**20
GZIP = b"\x1f\x8b"
"""First bytes of a compressed file."""

_Kind = TypeVar("_Kind")
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w\"'-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_PARTS},}}")
_piped: dict[tuple[int, int], bytes] = {}
"""What pipes had, by device and number."""
_silent: set[tuple[int, int]] = set()
"""Pipes that sent nothing."""


class UnreadableError(OSError, ValueError):
    """A file that is larger than its limit, or a pipe that sends nothing."""

    def __str__(self) -> str:
        """Return what is wrong; `filename` is apart, as in other errors of files."""
        return str(self.strerror)


def read_bytes(path: Path | str, most: int = MOST_DATA) -> bytes:
    """Return the bytes of a file or pipe, decompressed if it is compressed by gzip.

    Raises:
        OSError: it cannot be read; `UnreadableError` if it has more than `most` bytes.
        EOFError, zlib.error: its compressed data is damaged.
    """
    with open(path, "rb", buffering=0, opener=_open) as file:
        status = os.fstat(file.fileno())
        is_file = stat.S_ISREG(status.st_mode)
        key = status.st_dev, status.st_ino
        if key in _piped and not is_file:
            return _piped[key]
        if key in _silent:
            raise _no_data(path)
        try:
            data = _read(file, path, most, is_file)
        except TimeoutError:
            _silent.add(key)
            raise _no_data(path) from None
    if data.startswith(GZIP):
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
            data = unpacked.read(most + 1)
    if len(data) > most:
        raise _too_large(path, most)
    if not is_file:
        _piped[key] = data
    return data


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file that a command of this package wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is a directory, a pipe or a device, which may have no end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file; restore the file that was written there")
    return path.read_bytes()


def _open(path: str, flags: int) -> int:
    """Open a file; an unused pipe would block here without O_NONBLOCK."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: io.FileIO, path: Path | str, most: int, is_file: bool) -> bytes:
    data = bytearray()
    while len(data) <= most:
        if not is_file:
            _wait(file)
        block = file.read(BLOCK_BYTES)
        if not block:
            return bytes(data)
        data += block
    raise _too_large(path, most)


def _wait(file: io.FileIO) -> None:
    ready, _, _ = select.select([file], [], [], PATIENCE)
    if not ready:
        raise TimeoutError


def _no_data(path: Path | str) -> UnreadableError:
    text = f"no data came from this pipe for {PATIENCE:.0f} s"
    return UnreadableError(errno.ETIMEDOUT, text, str(path))


def _too_large(path: Path | str, most: int) -> UnreadableError:
    text = f"more than {most / 2**20:.0f} MiB (decompressed), which is the limit; split it or leave rows out"
    return UnreadableError(errno.EFBIG, text, str(path))


def read_text(path: Path | str, most: int = MOST_DATA) -> str:
    """Return the UTF-8 text of a file, without a byte order mark; errors are those of `read_bytes` and UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf-8-sig")


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return the table in a TOML file; errors are those of `read_text` and `parse_toml`."""
    return parse_toml(read_text(path, MOST_TEXT))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in a TOML text.

    Raises:
        tomllib.TOMLDecodeError: it is no TOML, or nested too deeply.
    """
    long = _LONG_KEY.search(text)
    if long is not None:
        line = text.count("\n", 0, long.start()) + 1
        raise tomllib.TOMLDecodeError(f"a key has more than {MOST_PARTS} parts (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("values are nested too deeply") from None


def read_json(path: Path | str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value in a JSON file; errors are those of `read_text` and `parse_json`."""
    return parse_json(read_text(path), hook)


def decode_json(path: Path | str, kind: type[_Kind]) -> _Kind:
    """Return the struct in a JSON file.

    Raises:
        OSError: it cannot be read; `UnreadableError` if it is too large.
        msgspec.MsgspecError: it is no JSON or another struct, not UTF-8, or nested too deeply.
    """
    try:
        return msgspec.json.decode(read_bytes(path), type=kind)
    except RecursionError:
        raise msgspec.DecodeError("its values are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None


def check_values(text: str) -> None:
    """Raise `ValueError` if a JSON text has so many values that they would fill the memory."""
    if len(text) > MOST_VALUES and sum(map(text.count, ",:[{")) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")


def parse_json(text: str, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value in a JSON text; `hook` makes an object of its pairs.

    Raises:
        ValueError: it is no JSON, has too many values, or is nested too deeply.
    """
    check_values(text)
    try:
        return json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None

"""Keep one number for each step of a run, most of them in a temporary file."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import IO, TypeVar, overload

Number = TypeVar("Number", int, float)

NUM_RECENT = 1024
"""Newest values that stay in memory. They may still change, because rollouts of several steps run at once."""


class LongColumn(Sequence[Number]):
    """A list of numbers whose memory does not grow with its length.

    Up to twice `NUM_RECENT` values are in memory, and earlier ones in a file that only this object has. If no file can be
    written, all values stay in memory. The file is freed with the object.
    """

    __slots__ = ("_code", "_file", "_limit", "_num_written", "_recent")

    def __init__(self, code: str, values: Iterable[Number] = ()) -> None:
        """Start with some values; `code` is that of an `array` of 8 bytes a value: "d" or "q"."""
        self._code = code
        self._recent: array[Number] = array(code)
        self._file: IO[bytes] | None = None
        self._num_written = 0
        self._limit: float = 2 * NUM_RECENT
        self.extend(values)

    def __len__(self) -> int:
        return self._num_written + len(self._recent)

    @overload
    def __getitem__(self, key: int) -> Number: ...
    @overload
    def __getitem__(self, key: slice) -> array[Number]: ...
    def __getitem__(self, key: int | slice) -> Number | array[Number]:
        written = self._num_written
        if not isinstance(key, slice):
            place = key + len(self) if key < 0 else key
            if place >= written:
                return self._recent[place - written]
            return self._read(place, place + 1)[0]
        start, stop, step = key.indices(len(self))
        stop = max(start, stop)
        if start >= written:
            return self._recent[start - written : stop - written : step]
        found = self._read(start, min(stop, written))
        found.extend(self._recent[: max(0, stop - written)])
        return found[::step]

    def __setitem__(self, place: int, value: Number) -> None:
        if place >= self._num_written:
            self._recent[place - self._num_written] = value
        elif self._file is not None:
            self._write(place, array(self._code, [value]))

    def __iter__(self) -> Iterator[Number]:
        for start in range(0, len(self), NUM_RECENT):
            yield from self[start : start + NUM_RECENT]

    def tolist(self) -> list[Number]:
        """Return all values."""
        return self[:].tolist()

    def append(self, value: Number) -> None:
        """Add a value."""
        self._recent.append(value)
        if len(self._recent) >= self._limit:
            self._move_older()

    def extend(self, values: Iterable[Number]) -> None:
        """Add some values."""
        self._recent.extend(values)
        if len(self._recent) >= self._limit:
            self._move_older()

    def cut(self, length: int) -> None:
        """Remove all values after the first `length`."""
        if length < self._num_written:
            start = max(0, length - NUM_RECENT)
            self._recent, self._num_written = self[start:length], start
        else:
            del self._recent[length - self._num_written :]

    def _move_older(self) -> None:
        """Write all values but the newest to the file."""
        older = self._recent[:-NUM_RECENT]
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="streamrl-", buffering=0)  # noqa: SIM115
            self._write(self._num_written, older)
        except OSError:  # such as a full disk
            self._limit = inf
            return
        self._num_written += len(older)
        del self._recent[: len(older)]

    def _write(self, place: int, values: array[Number]) -> None:
        assert self._file is not None, "it is made before values are written"
        data, done = values.tobytes(), 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], place * values.itemsize + done)

    def _read(self, start: int, stop: int) -> array[Number]:
        assert self._file is not None, "it has these values"
        found: array[Number] = array(self._code)
        size = found.itemsize
        found.frombytes(os.pread(self._file.fileno(), (stop - start) * size, start * size))
        return found

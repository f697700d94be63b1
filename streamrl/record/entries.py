"""The entries of a trace: in memory, or in a file that is too large for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import msgspec

from streamrl.engine.messages import Command, Event, TrainerJoined

T = TypeVar("T")

BLOCK = 4096
"""Entries that are read at once: few take a megabyte, many are read faster."""


class Entry(NamedTuple):
    """One event, at `time` seconds since the run's start, and the commands it led to."""

    time: float
    event: Event
    commands: list[Command]


_DECODER = msgspec.json.Decoder(Entry)


class WrittenEntries(Sequence[Entry]):
    """Entries that stay in their file, and are decoded anew each time that they are asked for."""

    def __init__(self, path: Path) -> None:
        """Look at every line after the header once.

        Raises:
            ValueError: naming the file and the line that is no entry, or is not in order of time.
        """
        self._path = path
        self._num = 0
        self.joined: list[TrainerJoined] = []
        """What tells of trainers that joined."""
        before = None
        with path.open("rb") as file:
            next(file)
            for entry in read_entries(path, file, _DECODER):
                if before is not None:
                    check_order(path, self._num + 2, before, entry)
                before = entry
                self._num += 1
                if isinstance(entry.event, TrainerJoined):
                    self.joined.append(entry.event)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Entry]:
        with self._path.open("rb") as file:
            next(file)
            yield from map(_DECODER.decode, islice(file, self._num))

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return list(islice(self, *index.indices(self._num)))
        place = range(self._num)[index]
        return next(islice(self, place, None))

    def blocks(self) -> Iterator[list[Entry]]:
        """Yield the entries in order, few enough at a time."""
        entries = iter(self)
        while block := list(islice(entries, BLOCK)):
            yield block


def decode_entries(path: Path, lines: Sequence[bytes]) -> list[Entry]:
    """Decode the lines after a header, of which the last lacks its end.

    Raises:
        ValueError: naming the file and the line that is no entry, or is not in order of time.
    """
    entries: list[Entry] = []
    for entry in read_entries(path, (line + b"\n" for line in lines[:-1]), _DECODER):
        if entries:
            check_order(path, len(entries) + 2, entries[-1], entry)
        entries.append(entry)
    return entries


def read_entries(
    path: Path, lines: Iterator[bytes], decoder: msgspec.json.Decoder[T]
) -> Iterator[T]:
    """Yield what lines after a header hold; one without its end was cut short by a crash, and is left out.

    Raises:
        ValueError: naming the file and the line.
    """
    for number, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: not a trace entry: {error}") from None


def check_order(path: Path, number: int, one: Entry, other: Entry) -> None:
    """Refuse an entry, of line `number`, that happened before the one in front of it; raises `ValueError`."""
    if one.time > other.time:
        raise ValueError(f"{path}:{number}: a damaged trace: {other.time} s after {one.time} s")

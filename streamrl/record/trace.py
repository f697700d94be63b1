"""The record of a run: every event, when it happened, and what the engine answered.

A trace file is JSON lines: a header with the run file, then one `[time, event, commands]` a line. The
same run file and seed give the same bytes; `replay` feeds the events to a fresh engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeAlias

import msgspec

from streamrl.engine.messages import Command, Event
from streamrl.engine.systems import build_engine
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, encode_run

FORMAT = 1


class Entry(NamedTuple):
    """One event, at `time` seconds since the run's start, and the commands it led to."""

    time: float
    event: Event
    commands: list[Command]


Facts: TypeAlias = Mapping[str, str | float | dict[str, float] | list[str]]
"""Where seconds came from: of a simulation the tiers' shares of each operation and the sources, of a real
run host and versions."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is of."""

    format: int
    world: Literal["simulated", "real"]
    run: msgspec.Raw
    facts: Facts


class Divergence(NamedTuple):
    """The first entry that a fresh engine decides differently."""

    entry: int
    recorded: list[Command]
    decided: list[Command]


class Trace:
    """Entries in order, in memory, and on disk as they happen where a file is given."""

    def __init__(
        self,
        run: Run,
        world: Literal["simulated", "real"],
        facts: Facts | None = None,
        file: IO[bytes] | None = None,
    ) -> None:
        self.run = run
        self.world = world
        self.facts: Facts = facts or {}
        self.entries: list[Entry] = []
        self._file = file
        if file is not None:
            file.write(self._encode_header())

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Add one entry."""
        entry = Entry(time, event, commands)
        self.entries.append(entry)
        if self._file is not None:
            self._file.write(_ENCODER.encode(entry) + b"\n")

    def encode(self) -> bytes:
        """Return the whole trace as JSON lines."""
        return self._encode_header() + _ENCODER.encode_lines(self.entries)

    def _encode_header(self) -> bytes:
        header = Header(
            format=FORMAT,
            world=self.world,
            run=msgspec.Raw(encode_run(self.run)),
            facts=self.facts,
        )
        return _ENCODER.encode(header) + b"\n"


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Entry)


def read_trace(path: Path) -> Trace:
    """Read a trace file; a last line that a crash cut short is left out.

    Raises:
        ValueError: naming the file and line that cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    trace = _read_header(path, lines[0])
    trace.entries = list(_read_entries(path, lines[1:]))
    return trace


def replay(trace: Trace) -> Divergence | None:
    """Feed the recorded events to a fresh engine; return the first decision that differs, if any."""
    engine = build_engine(trace.run)
    for index, (time, event, recorded) in enumerate(trace.entries):
        decided = engine.handle(event, time)
        if decided != recorded:
            return Divergence(index, recorded, decided)
    return None


def _read_header(path: Path, line: bytes) -> Trace:
    try:
        header = msgspec.json.decode(line, type=Header)
        if header.format != FORMAT:
            raise ValueError(f"{path}:1: trace format {header.format}, this version reads {FORMAT}")
        return Trace(decode_run(bytes(header.run)), header.world, header.facts)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}:1: not a trace header: {error}") from None


def _read_entries(path: Path, lines: list[bytes]) -> Iterable[Entry]:
    for number, line in enumerate(lines, start=2):
        is_last = number == len(lines) + 1
        if is_last:  # what follows the last newline: nothing, or an entry that a crash cut short
            return
        try:
            yield _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: not a trace entry: {error}") from None

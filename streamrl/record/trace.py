"""The record of a run: every event, when it happened, and what the engine answered.

A trace file is JSON lines: a header with the run file, then one `[time, event, commands]` a line. The
same run file and seed give the same bytes; `replay` feeds the events to a fresh engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import SEEK_END
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import msgspec

from streamrl.engine.invariants import check
from streamrl.engine.messages import Command, Event, TrainerJoined
from streamrl.engine.systems import build_engine
from streamrl.record.decode_yield import DecodeYield
from streamrl.record.entries import (
    Entry,
    WrittenEntries,
    decode_entries,
)
from streamrl.record.line_file import LineFile
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, encode_run, with_follower

FORMAT = 2

UNHEARD_OF = (LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What speaking of rollouts, replicas or steps that were never begun is answered with."""

LARGE = 20_000_000
"""Bytes of a file whose entries stay there, since in memory they take several times as many; views of it take long."""


Facts: TypeAlias = Mapping[str, str | float | dict[str, float] | list[str]]
"""Where seconds came from: of a simulation the tiers' shares of each operation and the sources, of a real
run host and versions."""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trace is of."""

    format: int
    world: Literal["simulated", "real"]
    run: msgspec.Raw
    facts: Facts
    decode: DecodeYield | None = None
    """What a full batch of a replica yields, where that was known beforehand."""
    other_decodes: list[DecodeYield] = []
    """The same of the kinds of `rollout.others`."""
    is_endless: bool = False
    """Whether the engine knew of no last step."""
    leg: int = 1
    """How often the run was begun or resumed: the trace is of what happened since."""


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
        file: IO[bytes] | LineFile | None = None,
        keeps_entries: bool = True,
        decode: Sequence[DecodeYield] = (),
        is_endless: bool = False,
        leg: int = 1,
        tell: Callable[[Entry], None] | None = None,
    ) -> None:
        """Begin a trace.

        Args:
            run: the run file.
            world: where it is carried out.
            facts: where seconds come from.
            file: where entries are written as they happen.
            keeps_entries: whether they stay in memory; a run of days writes them, and they are read back.
            decode: what a full batch of each kind of replica yields, where it is known.
            is_endless: whether the engine knows of no last step: the steady state of a training, which is cut
                while things are under way, so that nothing winds down in it.
            leg: how often the run was begun or resumed, this time included.
            tell: told of each entry as it happens.
        """
        self.begun = run
        """The run file that its engine began with."""
        self.run = run
        """The same with the trainers that joined meanwhile, who are the last ones."""
        self.world = world
        self.facts: Facts = facts or {}
        self.decode = decode
        self.is_endless = is_endless
        self.leg = leg
        self._own: list[Entry] = []
        self.entries: list[Entry] | WrittenEntries = self._own
        self.path: Path | None = None
        """The file that it was read from."""
        self.is_cut = False
        """Whether that ends inside a line, as one does whose writer was killed: what came after is not known."""
        self._file = file
        self._keeps_entries = keeps_entries
        self._tell = tell
        if file is not None:
            file.write(self._encode_header())

    @property
    def joined(self) -> range:
        """Numbers of the trainers that joined after it began."""
        return range(self.begun.num_trainers, self.run.num_trainers)

    def join(self, section: dict[str, Any]) -> None:
        """Enter that a trainer joins which the run has not known yet."""
        self.run = with_follower(self.run, section)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Add one entry."""
        entry = Entry(time, event, commands)
        if self._keeps_entries:
            self._own.append(entry)
        if self._file is not None:
            self._file.write(_ENCODER.encode(entry) + b"\n")
        if self._tell is not None:
            self._tell(entry)

    def blocks(self) -> Iterator[Sequence[Entry]]:
        """Yield the entries in order: all at once where they are in memory, else few enough at a time."""
        if isinstance(self.entries, WrittenEntries):
            yield from self.entries.blocks()
        else:
            yield self.entries

    def encode(self) -> bytes:
        """Return the whole trace as JSON lines."""
        return self._encode_header() + _ENCODER.encode_lines(self.entries)

    def _encode_header(self) -> bytes:
        header = Header(
            format=FORMAT,
            world=self.world,
            run=msgspec.Raw(encode_run(self.begun)),
            facts=self.facts,
            decode=self.decode[0] if self.decode else None,
            other_decodes=list(self.decode[1:]),
            is_endless=self.is_endless,
            leg=self.leg,
        )
        return _ENCODER.encode(header) + b"\n"


_ENCODER = msgspec.json.Encoder()


def read_trace(path: Path) -> Trace:
    """Read a trace file, or leave the entries of a large one there; a last line that a crash cut short is left out.

    Raises:
        ValueError: naming the file and line that cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(path, file.readline().rstrip(b"\n"))
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    run = _read_run(path, header)
    decode = [] if header.decode is None else [header.decode, *header.other_decodes]
    trace = Trace(
        run,
        header.world,
        header.facts,
        decode=decode,
        is_endless=header.is_endless,
        leg=header.leg,
    )
    trace.path = path
    if size > LARGE:
        written = WrittenEntries(path)
        trace.entries, trace.is_cut = written, not _ends_a_line(path)
        _enter_joined(trace, written.joined)
        return trace
    lines = path.read_bytes().split(b"\n")
    trace.is_cut = bool(lines[-1])
    trace.entries = decode_entries(path, lines[1:])
    _enter_joined(trace, (e.event for e in trace.entries if isinstance(e.event, TrainerJoined)))
    return trace


def _enter_joined(trace: Trace, joined: Iterable[TrainerJoined]) -> None:
    """Take note of trainers that joined and were not known.

    Raises:
        ValueError: the section of one of them is none.
    """
    try:
        for event in joined:
            if event.trainer == trace.run.num_trainers:
                trace.join(event.follower)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{trace.path}: not a trainer that joined: {error}") from None


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, SEEK_END)
        return file.read() == b"\n"


def replay(trace: Trace, *, checks_invariants: bool = False) -> Divergence | None:
    """Feed the recorded events to a fresh engine; return the first decision that differs, if any.

    Args:
        trace: the record.
        checks_invariants: whether what is true of every state is checked after each event, which takes long.

    Raises:
        ValueError: naming the file and the entry whose event cannot have happened after those before it.
    """
    engine = build_engine(trace.begun, is_endless=trace.is_endless)
    for index, (time, event, recorded) in enumerate(trace.entries):
        try:
            decided = engine.handle(event, time)
            if checks_invariants:
                check(engine.state)
        except UNHEARD_OF as error:
            why = f"{type(event).__name__} cannot follow: {_in_words(error)}"
            raise ValueError(_say_damaged(trace, why, index)) from error
        if decided != recorded:
            return Divergence(index, recorded, decided)
    return None


@contextmanager
def blaming_damage(trace: Trace) -> Iterator[None]:
    """Let what you read out of a trace fail with a line where the trace is damaged, and as it does where it is not.

    Raises:
        ValueError: naming the file, and the entry that does not follow from those before it.
    """
    try:
        yield
    except UNHEARD_OF as error:
        if isinstance(error, ValueError):
            raise ValueError(_name_file(trace) + str(error)) from error
        divergence = replay(trace, checks_invariants=True)
        if divergence is None and isinstance(error, LookupError):
            raise ValueError(_say_damaged(trace, _in_words(error))) from error
        if divergence is None:
            raise
        why = "decided differently now"
        raise ValueError(_say_damaged(trace, why, divergence.entry)) from error


def _say_damaged(trace: Trace, why: str, entry: int | None = None) -> str:
    """Return the sentence, with the file where the trace was read from one and the entry where one is known."""
    where = "" if entry is None else f"entry {entry} does not follow from those before it: "
    return f"{_name_file(trace)}a damaged trace: {where}{why}"


def _name_file(trace: Trace) -> str:
    return "" if trace.path is None else f"{trace.path}: "


def _in_words(error: Exception) -> str:
    """Return what was raised to say what is wrong; what Python raises by itself says nothing of the run."""
    if type(error) in (ValueError, AssertionError) and (said := str(error)):
        return said
    return "it answers nothing that was begun"


def _read_header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}:1: not a trace header: {error}") from None
    if header.format != FORMAT:
        raise ValueError(f"{path}:1: trace format {header.format}, this version reads {FORMAT}")
    return header


def _read_run(path: Path, header: Header) -> Run:
    """Read the run file of a header."""
    try:
        run = decode_run(bytes(header.run))
        check_run(run)
        return run
    except ValueError as error:
        raise ValueError(f"{path}:1: not a trace header: {error}") from None

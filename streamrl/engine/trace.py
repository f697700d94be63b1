"""The trace of a run: write every event with the commands that answered it, read it back, and replay it through a fresh engine.

The record of a run: every event, when it happened, and what the engine answered.

A trace file is JSON lines: a header with the run file, then one `[time, event, commands]` a line. The
same run file and seed give the same bytes; `replay` feeds the events to a fresh engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOSPC
from itertools import islice
from math import ceil
from mmap import ACCESS_READ, mmap
from os import SEEK_END, strerror
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import msgspec

from streamrl.engine.invariants import check
from streamrl.engine.messages import Command, Event, TrainerJoined
from streamrl.engine.systems import build_engine
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.files import decode_run, encode_run, with_secondary_trainer

EVERY_BATCH = 32  # up to here each batch is kept, as products of few rows take uneven seconds
SPACING = 1.08  # of batches that are kept beyond it: seconds between them are all but straight


class DecodeYield(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a replica's decode step at some batches, and how large a batch it may have.

    A step of b rollouts with S tokens of context in all takes `base + per_context_token * S` seconds.
    """

    batches: list[int]
    base: list[float]
    per_context_token: list[float]
    most_running: int
    """Most rollouts at once, whatever they hold."""
    kv_capacity: float | None = None
    """Tokens that bound the batch too; absent where the longest output of each has its memory."""

    @classmethod
    def of(
        cls, base: Sequence[float], per_context_token: Sequence[float], kv_capacity: float | None
    ) -> DecodeYield:
        """Keep some batches of a decode curve whose lists begin with a batch of none."""
        batches = list(_kept(len(base) - 1))
        return cls(
            batches=batches,
            base=[base[batch] for batch in batches],
            per_context_token=[per_context_token[batch] for batch in batches],
            most_running=len(base) - 1,
            kv_capacity=kv_capacity,
        )


def _kept(most: int) -> Iterator[int]:
    batch = 1
    while batch < most:
        yield batch
        batch = batch + 1 if batch < EVERY_BATCH else ceil(batch * SPACING)
    yield most


class LineFile:
    """Writes lines to an unbuffered file; after the first that fails it takes no more, so that none is missing between others."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._name = getattr(file, "name", None)  # what lives in memory has none
        self._error: OSError | None = None

    def write(self, line: bytes) -> None:
        """Add a line, its end included.

        Raises:
            OSError: it does not fit, or one before did not; what is there of it is taken back.
        """
        if self._error is not None:
            raise self._error
        size = self._file.seek(0, SEEK_END)
        try:
            if self._file.write(line) != len(line):  # a raw file says so, and raises nothing
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError as error:
            self._file.truncate(size)
            self._error = OSError(error.errno, error.strerror, self._name)
            raise self._error from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_at_end(path: Path) -> LineFile:
    """Open a file of lines for more of them; a last one that a crash cut short is left out."""
    file = path.open("a+b", buffering=0)
    if path.stat().st_size:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
        file.truncate(end)
    return LineFile(file)


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
        self.run = with_secondary_trainer(self.run, section)

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

"""The trace of a run: write every event with its commands, read it back, and replay it through a fresh engine.

A trace file is JSON lines: a header with the run file, then one `[time, event, commands]` a line.
The same run file and seed give the same bytes. `replay` feeds the events to a fresh engine.
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
from typing import (
    IO,
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    overload,
)

import msgspec

from streamrl.engine.invariants import check
from streamrl.engine.messages import Command, Event, TrainerJoined
from streamrl.engine.systems import build_engine
from streamrl.runfile.checks import check_run
from streamrl.runfile.choices import ChoiceError
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import dispatch_named
from streamrl.runfile.files import decode_run, encode_run, with_secondary_trainer
from streamrl.runfile.formatting import format_duration
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.paths import absolute, paths_of, with_paths
from streamrl.runfile.result_files import check_results

if TYPE_CHECKING:
    from pandas import DataFrame

# batches kept one by one up to here, because small matrix products take uneven seconds
EVERY_BATCH = 32
SPACING = 1.08  # ratio of kept batches beyond: between them the seconds are almost linear


class DecodeYield(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a replica's decode step by batch size, and its largest batch.

    A step of b rollouts with S tokens of context in total takes `base + per_context_token * S`
    seconds.
    """

    batches: list[int]
    base: list[float]
    per_context_token: list[float]
    most_running: int
    """Maximum number of rollouts at once, whatever their lengths."""
    kv_capacity: float | None = None
    """Tokens of KV cache, which limit the batch too. Absent where memory is reserved for the
    longest output of each rollout.
    """

    @classmethod
    def of(
        cls, base: Sequence[float], per_context_token: Sequence[float], kv_capacity: float | None
    ) -> DecodeYield:
        """Keep some batches of a decode curve; its lists begin with a batch of 0."""
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
    """Writes lines to an unbuffered file. After a failed write it accepts no more, so that no line in the middle is missing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._name = getattr(file, "name", None)  # a file in memory has no name
        self._error: OSError | None = None

    def write(self, line: bytes) -> None:
        """Append a line that ends with a line break.

        Raises:
            OSError: the line does not fit, or an earlier write failed. A partial line is removed.
        """
        if self._error is not None:
            raise self._error
        size = self._file.seek(0, SEEK_END)
        try:
            # a raw file returns the bytes written and raises nothing
            if self._file.write(line) != len(line):
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError as error:
            self._file.truncate(size)
            self._error = OSError(error.errno, error.strerror, self._name)
            raise self._error from None

    def rename(self, path: Path) -> None:
        """Give the open file another path."""
        Path(self._file.name).rename(path)
        self._name = str(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_at_end(path: Path) -> LineFile:
    """Open a file of lines to append to it. A last line that a crash cut short is removed."""
    file = path.open("a+b", buffering=0)
    if path.stat().st_size:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
        file.truncate(end)
    return LineFile(file)


T = TypeVar("T")

BLOCK = 4096
"""Entries read at once: few entries can fill a megabyte, and many are faster to read."""


class Entry(NamedTuple):
    """One event, at `time` seconds since the run's start, and the commands that answered it."""

    time: float
    event: Event
    commands: list[Command]


_NEW = tuple.__new__
_DECODER = msgspec.json.Decoder(Entry)


class WrittenEntries(Sequence[Entry]):
    """Entries that stay in their file, and are decoded at each access."""

    def __init__(self, path: Path) -> None:
        """Check every line after the header once.

        Raises:
            ValueError: a line is no entry, or not in order of time; the message names file and line.
        """
        self._path = path
        self._num = 0
        self.joined: list[TrainerJoined] = []
        """Events of trainers that joined."""
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
        """Yield the entries in order, in blocks."""
        entries = iter(self)
        while block := list(islice(entries, BLOCK)):
            yield block


def decode_entries(path: Path, lines: Sequence[bytes]) -> list[Entry]:
    """Decode the lines after a header; the last line has no line break.

    Raises:
        ValueError: a line is no entry, or not in order of time; the message names file and line.
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
    """Yield the decoded lines after a header. A last line without line break was cut short by a crash, and is left out.

    Raises:
        ValueError: a line cannot be decoded; the message names file and line.
    """
    for number, line in enumerate(lines, start=2):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{number}: not a trace entry: {error}") from None


def check_order(path: Path, number: int, one: Entry, other: Entry) -> None:
    """Raise `ValueError` if entry `one`, in line `number`, is earlier than the entry before it."""
    if one.time > other.time:
        raise ValueError(f"{path}:{number}: a damaged trace: {other.time} s after {one.time} s")


FORMAT = 2

UNHEARD_OF = (LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""Exceptions of the engine for events about unknown rollouts, replicas or steps."""

LARGE = 20_000_000
"""File size in bytes from which entries stay on disk, because they need several times as much
memory. Access is then slower.
"""


Facts: TypeAlias = Mapping[str, str | float | dict[str, float] | list[str]]
"""Where seconds come from. Simulated: the tiers' shares of each operation, and sources. Real: host
and versions.
"""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a trace."""

    format: int
    world: Literal["simulated", "real"]
    run: msgspec.Raw
    facts: Facts
    decode: DecodeYield | None = None
    """The decode curve of a replica, if it was known before the run."""
    other_decodes: list[DecodeYield] = []
    """The same for the kinds of `rollout.others`."""
    is_endless: bool = False
    """Whether the engine had no last step."""
    leg: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 1
    """Number of starts and resumes of the run so far. The trace covers the time since the last one.
    """
    run_id: str = ""
    """The id of an executed run, which its other files have too."""
    prompts: str = ""
    """The digest of the token ids of an executed run's prompts; see `streamrl.record.prompt_tokens`."""


class Divergence(NamedTuple):
    """The first entry that a fresh engine decides differently."""

    entry: int
    recorded: list[Command]
    decided: list[Command]


class Trace:
    """Entries in order: in memory, and in a file where one is given."""

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
        run_id: str = "",
        tell: Callable[[Entry], None] | None = None,
        prompts: str = "",
    ) -> None:
        """Begin a trace.

        Args:
            run: the run file.
            world: where the run is carried out.
            facts: where seconds come from.
            file: file to which entries are written as they happen.
            keeps_entries: whether entries stay in memory. A run of days writes them, and reads them back.
            decode: the decode curve of each kind of replica, if known.
            is_endless: whether the engine has no last step. A steady-state run is cut while work is running, so that it
                has no wind-down.
            leg: number of starts and resumes of the run, this one included.
            run_id: the id of an executed run.
            tell: called with each entry as it happens.
            prompts: the digest of an executed run's prompts.
        """
        self.begun = run
        """The run file with which its engine began."""
        self.run = run
        """The same run, with the trainers that joined later at the end."""
        self.world = world
        self.facts: Facts = facts or {}
        self.decode = decode
        self.is_endless = is_endless
        self.leg = leg
        self.run_id = run_id
        self.prompts = prompts
        self._own: list[Entry] = []
        self.entries: list[Entry] | WrittenEntries = self._own
        self.path: Path | None = None
        """The file that it was read from."""
        self.is_cut = False
        """Whether the file ends inside a line, because its writer was killed. Later events are
        unknown.
        """
        self._file = file
        self._keeps_entries = keeps_entries
        self._tell = tell
        self._is_followed = file is not None or tell is not None
        self._readers: dict[type[Event], Callable[[float, Event, list[Command]], None]] = {}
        """By type of event: what reads its entries as they happen."""
        if file is not None:
            file.write(self._encode_header())

    def __repr__(self) -> str:
        return f"<Trace of a {self.world} run: {self._length()}; {self.run.model.name or self.run.model.path}>"

    def _length(self) -> str:
        text = f"{len(self.entries):,} events"
        if isinstance(self.entries, list) and self.entries:  # a file would be read to its end
            text += f" in {format_duration(self.entries[-1].time)}"
        return text

    def _repr_html_(self) -> str:
        """Return the length of the run and its main values as a table for a notebook."""
        rows = [("length", self._length()), *self.run.summary()]
        note = "measure(trace) computes time and cost; trace.to_frame() lists the events"
        return html_table(f"Trace of a {self.world} run", rows, notes=[note])

    def to_frame(self) -> DataFrame:
        """Return a row for each event: its time, its name, the commands that answered it, and its values."""
        return frame_of(
            (
                {
                    "time": entry.time,
                    "event": type(entry.event).__name__,
                    "commands": [type(command).__name__ for command in entry.commands],
                    **msgspec.structs.asdict(entry.event),
                }
                for block in self.blocks()
                for entry in block
            ),
            ("time", "event", "commands"),
        )

    @property
    def joined(self) -> range:
        """Numbers of the trainers that joined after the run began."""
        return range(self.begun.num_trainers, self.run.num_trainers)

    def join(self, section: dict[str, Any]) -> None:
        """Add a trainer that joined and is not yet in the run."""
        self.run = with_secondary_trainer(self.run, section)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Add one entry."""
        # what `Entry` does, without its slower constructor
        entry = _NEW(Entry, (time, event, commands))
        if self._keeps_entries:
            self._own.append(entry)
        if self._is_followed:
            self._pass_on(entry)
        if (read := self._readers.get(type(event))) is not None:
            read(time, event, commands)

    def _pass_on(self, entry: Entry) -> None:
        if self._file is not None:
            self._file.write(_ENCODER.encode(entry) + b"\n")
        if self._tell is not None:
            self._tell(entry)

    def blocks(self) -> Iterator[Sequence[Entry]]:
        """Yield the entries in order: all at once from memory, or in blocks from a file."""
        if isinstance(self.entries, WrittenEntries):
            yield from self.entries.blocks()
        else:
            yield self.entries

    def encode(self) -> bytes:
        """Return the whole trace as JSON lines."""
        return self._encode_header() + _ENCODER.encode_lines(self.entries)

    def _encode_header(self) -> bytes:
        run = self.begun
        if (
            self.world == "simulated"
        ):  # the same bytes, however the path of the run file was written
            run = with_paths(run, absolute(paths_of(run)))
        header = Header(
            format=FORMAT,
            world=self.world,
            run=msgspec.Raw(encode_run(run)),
            facts=self.facts,
            decode=self.decode[0] if self.decode else None,
            other_decodes=list(self.decode[1:]),
            is_endless=self.is_endless,
            leg=self.leg,
            run_id=self.run_id,
            prompts=self.prompts,
        )
        return _ENCODER.encode(header) + b"\n"


_ENCODER = msgspec.json.Encoder()


MOST_HEADER = 2**24
"""Maximum bytes of the first line, which has the run file."""


def read_trace(path: Path | str) -> Trace:
    """Read a trace file. A last line that a crash cut short is left out; entries of a large file stay on disk.

    Raises:
        ValueError: a line cannot be read; the message names file and line. Or the directory mixes files of two commands.
    """
    path = Path(path)
    if path.is_fifo() or path.is_char_device():
        raise ValueError(f"{path}: a trace must be a file, because it is read several times")
    try:
        with path.open("rb") as file:
            header = _read_header(path, file.readline(MOST_HEADER).rstrip(b"\n"))
        size = path.stat().st_size
        check_results(path, header.run_id)
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
        run_id=header.run_id,
        prompts=header.prompts,
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


def recorded_world(path: Path) -> Literal["simulated", "real"]:
    """Return where the run of a trace file was carried out; only its header is read.

    Raises:
        ValueError: the file has no header of a trace.
    """
    with path.open("rb") as file:
        return _read_header(path, file.readline().rstrip(b"\n")).world


def recorded_run_id(path: Path) -> str:
    """Return the id of the executed run that wrote a trace file; only its header is read.

    Raises:
        ValueError: the file has no header of a trace.
    """
    with path.open("rb") as file:
        return _read_header(path, file.readline().rstrip(b"\n")).run_id


def _enter_joined(trace: Trace, joined: Iterable[TrainerJoined]) -> None:
    """Add trainers that joined and are not yet in the trace's run.

    Raises:
        ValueError: the section of one of them is invalid.
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
    """Feed the recorded events to a fresh engine; return the first decision that differs, or None.

    Args:
        trace: the record.
        checks_invariants: whether to check all invariants of the state after each event, which is slow.

    Raises:
        ValueError: an event cannot follow those before it; the message names file and entry.
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
    """While you read a trace, turn exceptions that a damaged trace causes into a `ValueError` with its place.

    Raises:
        ValueError: an entry does not follow from those before it; the message names file and entry.
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
    """Return the error text, with file and entry if they are known."""
    where = "" if entry is None else f"entry {entry} does not follow from those before it: "
    return f"{_name_file(trace)}a damaged trace: {where}{why}"


def _name_file(trace: Trace) -> str:
    return "" if trace.path is None else f"{trace.path}: "


def _in_words(error: Exception) -> str:
    """Return the message of our own exceptions; Python's own messages do not describe the run."""
    if type(error) in (ValueError, AssertionError) and (said := str(error)):
        return said
    return "it answers nothing that was begun"


def _read_header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except RecursionError:
        raise ValueError(
            f"{path}:1: not a trace header: its values are nested too deeply"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}:1: not a trace header: {error}") from None
    if header.format != FORMAT:
        raise ValueError(f"{path}:1: trace format {header.format}, this version reads {FORMAT}")
    return header


def _read_run(path: Path, header: Header) -> Run:
    """Return the run of a header."""
    try:
        run = decode_run(bytes(header.run))
        check_run(run)
        dispatch_named(run.policies.dispatch)
        return run
    except ChoiceError as error:
        raise ValueError(f"{path}:1: the recorded run cannot be read here: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}:1: not a trace header: {error}") from None

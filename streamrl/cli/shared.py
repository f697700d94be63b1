"""Arguments, options and output that several commands share."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO, cast

import msgspec
import typer

from streamrl.cli.lazy_commands import OUTPUT, UNTIL_END
from streamrl.cli.output import echo
from streamrl.engine.trace import Trace, read_trace
from streamrl.record.ledger import Ledger, describe_faults
from streamrl.record.run_directory import TRACE
from streamrl.runfile.escaping import visible_json
from streamrl.runfile.paths import check_no_directory, check_writable
from streamrl.runfile.result_files import holder_of, is_device, locked, partial_of

if TYPE_CHECKING:
    from rich.console import Console

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a key of the run file, such as rollout.replicas=8. Repeat for more keys.",
    ),
]
RolloutFields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=COLUMN",
        help="Column of the rollouts that holds output_tokens, prompt_id or prompt_tokens. Repeat for more.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel=OUTPUT),
]

Intervals = Annotated[
    bool,
    typer.Option(
        "--intervals",
        help="Also show 95 % intervals: the sampling error alone, as ±.",
        rich_help_panel=OUTPUT,
    ),
]
"""An option of commands that show bands."""

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Simulate on the CPUs of a Ray cluster: HOST:PORT, or auto for the one of this machine. The results are the same.",
    ),
]

RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory of a running job (execute.output).")
]

PIPE_WIDTH = 200
"""Line width if standard output is not a terminal."""
TRAILING_BLANKS = re.compile(r" +(?=\n)")
HEADER = b'{"format":'
"""The first bytes of a trace."""


@contextmanager
def simulating_on(ray_address: str | None, module: str) -> Iterator[None]:
    """Let plans and studies use a Ray cluster until the context ends; without an address, the cores of this machine.

    Workers of the cluster start at once, and import the module of the jobs meanwhile.
    """
    if ray_address is None:
        yield
        return
    from streamrl.executor.launchers.ray_pool import ray_pool
    from streamrl.sim.parallel import spread_over

    with ray_pool(ray_address, module) as pool, spread_over(lambda: nullcontext(pool)):
        yield


def stdout_console() -> Console:
    """Return standard output, as wide as its terminal; else wide enough for whole tables, and without blanks at line ends."""
    from streamrl.cli.consoles import SafeConsole

    console = SafeConsole()
    if console.is_terminal or console.is_jupyter:
        return console
    width = None if "COLUMNS" in os.environ else PIPE_WIDTH
    return SafeConsole(file=cast("TextIO", _WithoutTrailingBlanks(sys.stdout)), width=width)


class _WithoutTrailingBlanks(io.TextIOBase):
    """Removes the blanks that fill the lines of a table."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a stream that is written to has one
        return self._file.encoding

    def write(self, text: str) -> int:
        self._file.write(TRAILING_BLANKS.sub("", text))
        return len(text)

    def flush(self) -> None:
        self._file.flush()


def print_json(value: object) -> None:
    """Print one JSON object on a line of its own."""
    echo(visible_json(msgspec.json.encode(value).decode()))


def check_ledger(*ledgers: Ledger) -> None:
    """Raise `RuntimeError` if the ledger of a run does not balance; the message lists its faults."""
    for ledger in ledgers:
        if not ledger.is_balanced:
            raise RuntimeError(f"the ledger does not balance: {describe_faults(ledger)}")


def keep_private(*sources: Path) -> None:
    """Let this command make no file for users who may not read all of these files and directories."""
    hidden = 0
    for path in sources:
        with suppress(OSError):
            hidden |= ~path.stat().st_mode & 0o077
    os.umask(os.umask(0o077) | hidden)


def claim_directory(path: Path) -> None:
    """Check before any work that results can be written to a directory, and let no other command write there meanwhile.

    Raises:
        ValueError: another command holds the directory, or nothing can be written there.
    """
    UNTIL_END.enter_context(sole_writer(path))


class FileKind(NamedTuple):
    """What a command writes to a file. It replaces an older file only if that is of the same kind."""

    name: str
    pattern: re.Pattern[bytes]
    """Found in each file of this kind."""

    def is_of(self, path: Path) -> bool:
        """Return whether a file is of this kind, or empty."""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return not head or self.pattern.search(head) is not None


HEAD_BYTES = 2**22
"""Bytes of a file that tell its kind; the pages of large studies have a few MB."""
HTML = FileKind("an HTML page", re.compile(rb"\A\s*<!doctype html", re.IGNORECASE))
MARKDOWN = FileKind(
    "a report in Markdown", re.compile(rb"\A# .*^## Words$", re.DOTALL | re.MULTILINE)
)
PICTURE = FileKind("a picture", re.compile(rb"\A(?:\x89PNG|<\?xml.*<svg|<svg)", re.DOTALL))
CALIBRATION = FileKind(
    "a calibration", re.compile(rb"\A(?:(?!^\[).)*^system *=", re.DOTALL | re.MULTILINE)
)
PROFILE = FileKind("a measured profile", re.compile(rb"^refill_passes *=", re.MULTILINE))
RANKER = FileKind("a ranker", re.compile(rb"\APK\x03\x04"))
SCORED = FileKind("a file of scored prompts", re.compile(rb'\A\{.*"expected_tokens":'))
ANY = FileKind("a file", re.compile(b""))
"""Of commands that replace a file only with --force."""


def claim_file(
    path: Path, kind: FileKind, option: str = "--output", inputs: Iterable[Path] = ()
) -> None:
    """Check before any work that a result can be written to a file, and let no other command write it meanwhile.

    It leaves no file if the command fails.

    Raises:
        ValueError: the file is one of `inputs` or of another kind, another command will write it, or it cannot be written.
    """
    with _telling_remedy():
        check_no_directory(path, option)
    if path.is_file() and any(each.exists() and each.samefile(path) for each in inputs):
        raise ValueError(f"{option} {path} is an input of this command; name another file")
    if path.is_file() and not kind.is_of(path):
        raise ValueError(
            f"{option} {path} exists and is not {kind.name}; name another file or remove it"
        )
    if is_device(path):
        return
    with _telling_remedy():
        check_writable(path.parent, option)
    partial = partial_of(path.resolve())
    UNTIL_END.enter_context(_made(partial.parent))
    UNTIL_END.enter_context(_locked_alone(partial, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
    UNTIL_END.callback(partial.unlink, missing_ok=True)


@contextmanager
def _telling_remedy() -> Iterator[None]:
    """Add what to do to the error of a place that cannot be written."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; name another place") from None


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Make a directory for results, and let no other command write its results there meanwhile.

    The lock is on the directory itself and ends with this process. A new directory is removed if
    nothing was written. Where the file system has no locks, none is taken.

    Raises:
        ValueError: another command holds the directory, or nothing can be written there.
    """
    with _telling_remedy():
        check_writable(directory, "--output")
    with _made(directory), _locked_alone(directory, directory, os.O_RDONLY):
        yield


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Make a directory, and remove it at the end if it is new and nothing was written."""
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it has results
            for each in new:
                each.rmdir()


@contextmanager
def _locked_alone(lock: Path, path: Path, flags: int) -> Iterator[None]:
    """Hold a lock; raise `ValueError` with the process that holds it if there is one."""
    try:
        held = locked(lock, flags)
        held.__enter__()
    except BlockingIOError:
        raise ValueError(
            f"{path} is in use by {holder_of(lock)}, which writes there; wait for it, or name another with --output"
        ) from None
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def trace_file(path: Path) -> Path:
    """Return a trace file, or the one in a run directory."""
    return path / TRACE if path.is_dir() else path


def holds_run(path: Path) -> bool:
    """Return whether a path is a run directory, or a trace file."""
    if path.is_dir():
        return (path / TRACE).is_file()
    if not path.is_file():  # a pipe is read once, and not here
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(HEADER)) == HEADER
    except OSError:
        return False


def open_trace(path: Path) -> Trace:
    """Read a trace file, or the one in a run directory."""
    return read_trace(trace_file(path))

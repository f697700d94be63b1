"""Write the results of a command whole and together, and refuse a directory that mixes the results of two commands.

A file is written under another name and then renamed. So a reader never sees a half-written file, and a full disk
leaves the older results as they were.

`results.json` lists the files that one command wrote together, with their digests and one run id:

    [{"id": "9f2c41d07a66b3e5", "files": {"trace.jsonl": "5c01…", "timeline.png": "77e9…"}}, …]

Several commands may write to one directory, such as `plan` and `simulate`. A file belongs to the command that wrote it
last. The list is renamed first, so a command that is killed between two renames leaves a mixture that readers refuse.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from streamrl.runfile.reading import read_regular

RESULTS, ROLLOUTS_FILE = "results.json", "rollouts.jsonl"
DIGEST_BYTES = 8  # enough to tell the files of all runs apart; not a protection against forgery
EDITABLE = ".toml"
"""End of the name of a run file. Users may edit these, so their bytes are not compared."""
COMMAND_CHARS = 100
"""Maximum characters of another process's command line in an error."""


class ResultSet(msgspec.Struct, frozen=True):
    """Files that one command wrote together."""

    id: str
    files: dict[str, str]
    """A digest of each file, by its path in the directory."""


def partial_of(path: Path) -> Path:
    """Return the path under which a file is written before it is renamed; it has the same ending."""
    return path.with_name(f".{path.stem}.partial{path.suffix}")


def is_device(path: Path) -> bool:
    """Return whether a path exists and is no regular file, such as a pipe or a terminal."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write to; afterwards that file replaces `path`. After an error, nothing has changed.

    A link stays, and its target is replaced. What is not a regular file, such as /dev/stdout, is written to directly.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    if is_device(path):
        with naming(path):
            yield path
        return
    path = path.resolve()
    partial = partial_of(path)
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if partial.is_symlink():  # somebody else made it, and its target is not ours
                partial.unlink()
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, data: bytes | str) -> None:
    """Replace a file by new data, all or nothing; make its directory if it is missing.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    with replacing(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_files(files: Mapping[Path, bytes | str]) -> None:
    """Replace several files, in this order, once the data of all is written.

    Raises:
        OSError: one cannot be written; the error names it, and no file has changed.
    """
    with ExitStack() as all_written:
        for path, data in reversed([*files.items()]):  # the stack renames the last one first
            partial = all_written.enter_context(replacing(path))
            with naming(path):
                partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_results(
    directory: Path, files: Mapping[str, bytes | str | None], run_id: str = ""
) -> None:
    """Replace the results of a command in a directory, all or nothing.

    Args:
        directory: it is created if it is missing.
        files: the data of each file, by its path in the directory. None marks a file that the command writes later,
            line by line; its lines have the run id.
        run_id: the id of the run, if it has one; files are added to those that have this id already. By default the
            id follows from the data.

    Raises:
        OSError: a file cannot be written; the error names it, and all older results are as they were.
    """
    digests = {name: "" if data is None else _digest(data) for name, data in files.items()}
    own = ResultSet(run_id or _digest(msgspec.json.encode(digests, order="sorted")), digests)
    others = []
    for each in _listed(directory):
        rest = {name: digest for name, digest in each.files.items() if name not in digests}
        if each.id == run_id:
            own = ResultSet(run_id, {**rest, **digests})
        elif rest:
            others.append(ResultSet(each.id, rest))
    listed = msgspec.json.format(msgspec.json.encode([*others, own]), indent=1)
    given = {directory / name: data for name, data in files.items() if data is not None}
    write_files({directory / RESULTS: listed, **given})


def check_results(path: Path, run_id: str = "") -> None:
    """Check that a result and the files that were written with it are from one command.

    A directory without `results.json` passes, and so do files that are gone.

    Args:
        path: the result.
        run_id: the id that the file itself has, if it has one.

    Raises:
        ValueError: some files are from another command; the message names them.
    """
    for each in _read_sets(path.parent):
        if path.name not in each.files:
            continue
        others = [name for name in each.files if _is_other(path.parent / name, each.files[name])]
        if run_id and each.id != run_id:
            others.append(path.name)
        if others:
            raise ValueError(
                f"{path.parent} mixes the results of two commands: {', '.join(sorted(others))} "
                f"{'is' if len(others) == 1 else 'are'} not of run {each.id}. "
                f"Write the results again, or remove {RESULTS} there to read them as they are"
            )


def listed_run_id(path: Path) -> str:
    """Return the id of the command that wrote a file, as `results.json` has it; empty if it does not list the file."""
    return next((each.id for each in _listed(path.parent) if path.name in each.files), "")


def _is_other(path: Path, digest: str) -> bool:
    """Return whether a file has other bytes than were written. Run files may be edited, and some files grow."""
    may_differ = not digest or path.suffix == EDITABLE or not path.is_file()
    return not may_differ and _digest(path.read_bytes()) != digest


def _digest(data: bytes | str) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _read_sets(directory: Path) -> list[ResultSet]:
    """Return the sets of results in a directory; none if it has no list.

    Raises:
        ValueError: the list cannot be read.
    """
    path = directory / RESULTS
    try:
        return msgspec.json.decode(read_regular(path), type=list[ResultSet])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a list of results: {error}; remove it") from None


def _listed(directory: Path) -> list[ResultSet]:
    """Return the sets of results in a directory; none if it has no list, or a damaged one."""
    try:
        return _read_sets(directory)
    except ValueError:
        return []


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` the name of the file that could not be written. The error of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(partial_of(path))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[None]:
    """Hold the lock on a file or directory; it also ends with this process.

    Where the file system has no locks, none is taken.

    Raises:
        BlockingIOError: another process holds it; `holder_of` names that process.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def holder_of(path: Path) -> str:
    """Return the process that holds the lock on a file or directory: its id and its command, if this machine knows."""
    with suppress(OSError, ValueError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            *_, pid, place, _, _ = line.split()
            if int(place.rpartition(":")[2]) == inode and int(pid) > 0:
                return f"process {pid}{_command_of(pid)}"
    return "another command"


def _command_of(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words)
    shown = text if len(text) <= COMMAND_CHARS else f"{text[:COMMAND_CHARS]}..."
    return f" ({shown})" if shown else ""

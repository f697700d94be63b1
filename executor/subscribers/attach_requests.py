"""Ask a running job to attach, detach or resize a trainer, or tell it of a notice; record which trainers are attached.

| file in the run directory | content                                                                           |
|---------------------------|-----------------------------------------------------------------------------------|
| `attached.json`           | trainers that joined a running job, in order, and names of detached ones; a resume reads it |
| `control/NAME.json`       | a request to the running job                                                      |
| `control/NAME.answer`     | the answer to that request                                                        |

Requests are files, not messages to a port. Only the owner of the run may write to `control/`, so no other user and
no process on the network can send a request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from streamrl.executor.directory_lock import LOCK, is_abandoned
from streamrl.record.run_directory import ATTACHED, CONTROL, RUN
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.files import with_secondary_trainer
from streamrl.runfile.recorded_numbers import Count
from streamrl.runfile.result_files import write_file

logger = logging.getLogger(__name__)


class Attached(msgspec.Struct, frozen=True):
    """The content of attached.json."""

    followers: tuple[dict[str, Any], ...] = ()
    """Run file sections of trainers that joined later, as JSON."""
    away: tuple[str, ...] = ()
    """Names of detached trainers, including those of the run file."""
    promoted: str = ""
    """Name of the secondary trainer that became the primary one; empty if none did."""
    leads_from: Count = 0
    """Version at which it became the primary trainer."""


def read_attached(directory: Path) -> Attached:
    """Return the attached.json of a run directory; empty if no trainer joined or left.

    Raises:
        ValueError: the file cannot be read.
    """
    path = directory / ATTACHED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Attached)
    except FileNotFoundError:
        return Attached()
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def write_attached(directory: Path, attached: Attached) -> None:
    """Write attached.json atomically."""
    write_file(directory / ATTACHED, msgspec.json.encode(attached))


def with_attached(run: Run, directory: Path) -> Run:
    """Return the run with the trainers of attached.json that its run file does not have.

    Raises:
        ValueError: attached.json cannot be read, or it has no valid section of a trainer.
    """
    for section in read_attached(directory).followers:
        if section.get("name") not in run.secondary_trainer_names:
            try:
                run = with_secondary_trainer(run, section)
                check_run(run)
            except (ValueError, TypeError) as error:
                raise _unreadable(directory / ATTACHED, error) from None
    return run


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path}: cannot be read, so the run cannot be resumed: {error}; restore the file, or remove it to resume "
        "without the trainers that were attached"
    )


TICK = 0.25
"""Seconds between two polls, on either side. Polling an empty directory takes about 10 µs."""
ANSWER_TIME = 60.0
"""Seconds in which a run answers. An assumption: it looks for requests four times a second."""
MOST_BYTES = 1 << 20
"""Maximum size of a request. The section of a trainer has some kilobytes."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Attach a new secondary trainer, or re-attach a detached one."""

    follower: dict[str, Any]
    """Its section of a run file, with quantities in base units."""


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Save a secondary trainer and remove it from the run."""

    name: str


class Notice(msgspec.Struct, frozen=True, tag=True):
    """Announce that the machines of replicas will be taken away."""

    replicas: tuple[int, ...]
    """Their numbers; all replicas where empty."""
    warning: float
    """Seconds until the machines go."""
    replacement_time: float
    """Seconds from then until other machines are there in their place."""


class RanksRequest(msgspec.Struct, frozen=True, tag=True):
    """Change the data-parallel ranks of the primary trainer after its current step."""

    data_parallel: int


ControlRequest: TypeAlias = Attach | Detach | Notice | RanksRequest


class ControlAnswer(msgspec.Struct, frozen=True):
    """The answer to a request: a message for the user, and whether the request is refused."""

    said: str
    is_refused: bool = False


class ControlFiles:
    """The run's side of its control directory.

    No error of the file system ends the run: an entry that cannot be read or removed is logged once and ignored.
    """

    def __init__(self, directory: Path) -> None:
        """Create an empty control directory; requests to an earlier process of this run are deleted."""
        self._path = directory / CONTROL
        self._ignored: set[Path] = set()
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._ignore(self._path, error)
        for old in self._list():
            try:
                old.unlink()
            except OSError as error:
                self._ignore(old, error)

    def take(self) -> Iterator[tuple[Path, ControlRequest | ValueError]]:
        """Yield the path and content of each new request; what is no request is yielded as an error."""
        for path in self._list():
            is_partial = path.name.startswith(".")  # not yet renamed
            if is_partial or path.suffix != ".json" or path in self._ignored:
                continue
            try:
                if not path.is_file():  # reading a named pipe would wait without end
                    raise OSError("it is no file")
                with path.open("rb") as file:
                    content = file.read(MOST_BYTES + 1)
                if len(content) > MOST_BYTES:
                    raise OSError(f"it has more than {MOST_BYTES >> 20} MiB")
                path.unlink()  # a request that stayed would be carried out again
            except OSError as error:
                self._ignore(path, error)
                continue
            try:
                yield path, msgspec.json.decode(content, type=ControlRequest)
            except (ValueError, RecursionError) as error:  # of msgspec or UTF-8
                yield path, ValueError(f"no request: {error}")

    def answer(self, path: Path, answer: ControlAnswer) -> None:
        """Write the answer to the request at `path`."""
        try:
            write_file(path.with_suffix(".answer"), msgspec.json.encode(answer))
        except OSError as error:
            self._ignore(path, error)

    def _list(self) -> list[Path]:
        try:
            return sorted(self._path.iterdir())
        except OSError as error:
            self._ignore(self._path, error)
            return []

    def _ignore(self, path: Path, error: OSError) -> None:
        if path not in self._ignored:
            self._ignored.add(path)
            logger.warning(f"{path} is ignored: {error.strerror or error}; the run goes on")


def ask(directory: Path, request: ControlRequest, limit: float = ANSWER_TIME) -> str:
    """Send a request to the run that is active in a directory, and return its answer.

    Args:
        directory: the run directory.
        request: the request.
        limit: seconds to wait. A detached trainer is saved first, so once the run has taken such a request, no limit
            applies while its control directory is there.

    Raises:
        ValueError: no run is active there, or it refuses the request.
        RuntimeError: the run ended, or did not answer in time.
    """
    find_run(directory)
    name = f"{time.time_ns()}-{os.getpid()}"
    asked, path = (directory / CONTROL / f"{name}{end}" for end in (".json", ".answer"))
    write_file(asked, msgspec.json.encode(request))
    until = time.monotonic() + limit
    while not path.exists():
        if is_abandoned(directory):
            raise RuntimeError(f"{directory}: the run ended before it answered")
        if not asked.parent.is_dir():
            raise RuntimeError(_say_missing(directory))
        is_taken_up = isinstance(request, Detach) and not asked.exists()
        if time.monotonic() >= until and not is_taken_up:
            with contextlib.suppress(OSError):
                asked.unlink()  # nobody waits for it any more
            raise RuntimeError(
                f"{directory}: the run did not answer within {limit:g} s; look at its log, and ask again"
            )
        time.sleep(TICK)
    answer = msgspec.json.decode(path.read_bytes(), type=ControlAnswer)
    path.unlink()
    if answer.is_refused:
        raise ValueError(answer.said)
    return answer.said


def find_run(directory: Path) -> Path:
    """Return the path of run.json of the run that is active in a directory.

    Raises:
        ValueError: no run is active there, or its control directory is missing.
    """
    if not (directory / LOCK).exists() or is_abandoned(directory):
        raise ValueError(f"{directory}: no run goes on there")
    if not (directory / CONTROL).is_dir():
        raise ValueError(_say_missing(directory))
    return directory / RUN


def _say_missing(directory: Path) -> str:
    path = directory / CONTROL
    return f"{path} is missing, through which the run is asked; mkdir -m 700 {path} makes it again"

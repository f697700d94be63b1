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

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from streamrl.executor.directory_lock import LOCK, is_abandoned
from streamrl.record.run_directory import ATTACHED, CONTROL, RUN
from streamrl.runfile.config import Run
from streamrl.runfile.files import with_secondary_trainer
from streamrl.runfile.result_files import write_file


class Attached(msgspec.Struct, frozen=True):
    """The content of attached.json."""

    followers: tuple[dict[str, Any], ...] = ()
    """Run file sections of trainers that joined later, as JSON."""
    away: tuple[str, ...] = ()
    """Names of detached trainers, including those of the run file."""
    promoted: str = ""
    """Name of the secondary trainer that became the primary one; empty if none did."""
    leads_from: int = 0
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
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: cannot be read, so the run cannot be resumed: {error}") from None


def write_attached(directory: Path, attached: Attached) -> None:
    """Write attached.json atomically."""
    write_file(directory / ATTACHED, msgspec.json.encode(attached))


def with_attached(run: Run, directory: Path) -> Run:
    """Return the run with the trainers of attached.json that its run file does not have.

    Raises:
        ValueError: attached.json cannot be read.
    """
    for section in read_attached(directory).followers:
        if section.get("name") not in run.secondary_trainer_names:
            run = with_secondary_trainer(run, section)
    return run


TICK = 0.25
"""Seconds between two polls, on either side. Polling an empty directory takes about 10 µs."""


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
    """The run's side of its control directory."""

    def __init__(self, directory: Path) -> None:
        """Create an empty control directory; requests to an earlier process of this run are deleted."""
        self._path = directory / CONTROL
        self._path.mkdir(mode=0o700, exist_ok=True)
        for old in self._path.iterdir():
            old.unlink()

    def take(self) -> Iterator[tuple[Path, ControlRequest | ValueError]]:
        """Yield the path and content of each new request; an unreadable request is yielded as an error."""
        for path in sorted(self._path.glob("*.json")):
            try:
                yield path, msgspec.json.decode(path.read_bytes(), type=ControlRequest)
            except msgspec.MsgspecError as error:
                yield path, ValueError(f"no request: {error}")
            path.unlink()

    def answer(self, path: Path, answer: ControlAnswer) -> None:
        """Write the answer to the request at `path`."""
        write_file(path.with_suffix(".answer"), msgspec.json.encode(answer))


def ask(directory: Path, request: ControlRequest) -> str:
    """Send a request to the run that is active in a directory, and return its answer.

    Raises:
        ValueError: no run is active there, or it refuses the request.
        RuntimeError: the run ended before it answered.
    """
    find_run(directory)
    name = f"{time.time_ns()}-{os.getpid()}"
    write_file(directory / CONTROL / f"{name}.json", msgspec.json.encode(request))
    path = directory / CONTROL / f"{name}.answer"
    while not path.exists():
        if is_abandoned(directory):
            raise RuntimeError(f"{directory}: the run ended before it answered")
        time.sleep(TICK)
    answer = msgspec.json.decode(path.read_bytes(), type=ControlAnswer)
    path.unlink()
    if answer.is_refused:
        raise ValueError(answer.said)
    return answer.said


def find_run(directory: Path) -> Path:
    """Return the path of run.json of the run that is active in a directory.

    Raises:
        ValueError: no run is active there.
    """
    has_owner = (directory / LOCK).exists() and not is_abandoned(directory)
    if not has_owner or not (directory / CONTROL).is_dir():
        raise ValueError(f"{directory}: no run goes on there")
    return directory / RUN

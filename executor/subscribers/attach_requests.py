"""Ask a running job to attach or detach a trainer, and remember who is attached.

Trainers that joined a run while it went on: what a resume has to bring back beside the run file's.

attached.json    sections of those that the run file does not have, in the order in which they joined, and who is away

What a run that goes on is asked from outside: a file for each request in its directory, and one for the answer.

control/NAME.json      a request; whoever may write to this directory, which only its owner may, may ask
control/NAME.answer    what became of it

Files instead of a port, so that nobody else on the machine, and nobody on the network, can ask anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from streamrl.executor.directory_lock import LOCK, is_abandoned, replace_file
from streamrl.record.run_directory import ATTACHED, CONTROL, RUN
from streamrl.runfile.config import Run
from streamrl.runfile.files import with_secondary_trainer


class Attached(msgspec.Struct, frozen=True):
    """What is in that file."""

    followers: tuple[dict[str, Any], ...] = ()
    """Sections as JSON has them."""
    away: tuple[str, ...] = ()
    """Names of trainers that were detached, those of the run file among them."""
    promoted: str = ""
    """Name of the one that took the leading trainer's place; nothing where none did."""
    leads_from: int = 0
    """The version at which it did."""


def read_attached(directory: Path) -> Attached:
    """Return what a run directory has; nothing where nobody joined or left.

    Raises:
        ValueError: it cannot be read.
    """
    path = directory / ATTACHED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Attached)
    except FileNotFoundError:
        return Attached()
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: cannot be read, so the run cannot be resumed: {error}") from None


def write_attached(directory: Path, attached: Attached) -> None:
    """Write it, whole or not at all."""
    replace_file(directory / ATTACHED, msgspec.json.encode(attached))


def with_attached(run: Run, directory: Path) -> Run:
    """Return the run file with those that joined, as far as it has not got them itself.

    Raises:
        ValueError: what is written there cannot be read.
    """
    for section in read_attached(directory).followers:
        if section.get("name") not in run.secondary_trainer_names:
            run = with_secondary_trainer(run, section)
    return run


TICK = 0.25
"""Seconds between two looks, on either side: a look at an empty directory takes some ten microseconds."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Let one more trainer follow, or one that was detached follow again."""

    follower: dict[str, Any]
    """Its section of a run file, quantities in base units."""


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Let a trainer follow no longer."""

    name: str


ControlRequest: TypeAlias = Attach | Detach


class ControlAnswer(msgspec.Struct, frozen=True):
    """What became of a request."""

    said: str
    is_refused: bool = False


class ControlFiles:
    """The run's side of its control directory."""

    def __init__(self, directory: Path) -> None:
        """Make it anew: what somebody asked of a run that is over nobody answers."""
        self._path = directory / CONTROL
        self._path.mkdir(mode=0o700, exist_ok=True)
        for left in self._path.iterdir():
            left.unlink()

    def take(self) -> Iterator[tuple[Path, ControlRequest | ValueError]]:
        """Yield each request that is new, and where to answer it; one that cannot be read as what is wrong with it."""
        for path in sorted(self._path.glob("*.json")):
            try:
                yield path, msgspec.json.decode(path.read_bytes(), type=ControlRequest)
            except msgspec.MsgspecError as error:
                yield path, ValueError(f"no request: {error}")
            path.unlink()

    def answer(self, path: Path, answer: ControlAnswer) -> None:
        """Say what became of a request."""
        replace_file(path.with_suffix(".answer"), msgspec.json.encode(answer))


def ask(directory: Path, request: ControlRequest) -> str:
    """Ask the run that goes on in a directory; return what it says once that is done.

    Raises:
        ValueError: no run goes on there, or it refuses.
        RuntimeError: it ended before it answered.
    """
    find_run(directory)
    name = f"{time.time_ns()}-{os.getpid()}"
    replace_file(directory / CONTROL / f"{name}.json", msgspec.json.encode(request))
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
    """Return the run file, as JSON, of the run that goes on in a directory.

    Raises:
        ValueError: none does.
    """
    has_owner = (directory / LOCK).exists() and not is_abandoned(directory)
    if not has_owner or not (directory / CONTROL).is_dir():
        raise ValueError(f"{directory}: no run goes on there")
    return directory / RUN

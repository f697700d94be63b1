"""What a run that goes on is asked from outside: a file for each request in its directory, and one for the answer.

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

from streamrl.executor.attached import replace_file
from streamrl.executor.directory_lock import LOCK, is_abandoned
from streamrl.record.run_lines import RUN

CONTROL = "control"
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

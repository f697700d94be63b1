"""Simulations of a study that have finished, in a file, so that an interrupted study continues after them.

Each line has the digest of a job, and its row or the reason why the run does not finish. The digest
covers the run file with its seed, and the code and data of this package. So nothing is reused after
a change of either. Lines are appended as answers arrive, in any order.
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

import streamrl
from streamrl.sim.studies.results import StudyRow

FINISHED = "finished.jsonl"
"""Name of the file in the directory of a study."""
SUFFIXES = (".py", ".toml", ".csv", ".json")
"""Files of the package that a simulation may depend on."""


class FinishedJobs:
    """The answers of finished jobs, by the run file of each."""

    def __init__(self, path: Path | None) -> None:
        """Read the answers in a file; without a file, keep them in memory."""
        self._answers: dict[str, StudyRow | str] = {}
        self._path = path
        if path is not None and path.exists():
            *lines, _ = path.read_bytes().split(b"\n")  # the last one is cut, or empty
            for line in lines:
                job, answer = json.loads(line)
                self._answers[job] = _answer_of(answer)
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def find(self, run: bytes) -> StudyRow | str | None:
        """Return the answer of a job; None if it has not finished."""
        return self._answers.get(_digest(run))

    def add(self, run: bytes, answer: StudyRow | str) -> None:
        """Add the answer of a job."""
        job = _digest(run)
        self._answers[job] = answer
        if self._path is not None:
            line = json.dumps([job, msgspec.to_builtins(answer)])  # it may have NaN
            with self._path.open("ab") as file:
                file.write(line.encode() + b"\n")


def _answer_of(read: Any) -> StudyRow | str:
    """Return an answer as it was added; counts among the figures stay whole numbers."""
    if isinstance(read, str):
        return read
    row = msgspec.convert(read, StudyRow)
    return msgspec.structs.replace(row, figures=read["figures"])


def _digest(run: bytes) -> str:
    return sha256(_digest_of_package() + run).hexdigest()


@cache
def _digest_of_package() -> bytes:
    """Return a digest of names, sizes and times of the files of this package."""
    root, found = Path(streamrl.__file__).parent, sha256(streamrl.__version__.encode())
    rooms = [root / name for name in ("sim", "profiles")]
    for path in sorted(path for room in (root, *rooms) for path in room.rglob("*")):
        if path.suffix in SUFFIXES:
            known = path.stat()
            found.update(f"{path.relative_to(root)} {known.st_size} {known.st_mtime_ns}\n".encode())
    return found.digest()

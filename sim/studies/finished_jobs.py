"""Simulations of a study that have finished, in a file, so that an interrupted study continues after them.

Each line has the digest of a job's run file with its seed, the digest of its inputs, and its row or
the reason why the run does not finish. The inputs are the code of this package, the profiles, the
files that the run file names, and the code of chosen classes from outside this package. So nothing
is reused after a change of any of them. Lines are appended as answers arrive, in any order.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec

import streamrl
from streamrl.runfile.field_checks import code_of, sections_of
from streamrl.runfile.files import decode_run
from streamrl.runfile.paths import WRITTEN_KEYS, paths_of
from streamrl.runfile.profile_folder import PROFILES
from streamrl.runfile.reading import MOST_DATA
from streamrl.runfile.result_files import naming
from streamrl.sim.studies.results import StudyRow, check_figures

logger = logging.getLogger(__name__)
FINISHED = "finished.jsonl"
"""Name of the file in the directory of a study."""
SUFFIXES = (".py", ".toml", ".csv", ".json")
"""Files of the package and of the profiles that a simulation may depend on."""
PIPED = token_hex(8)
"""Stands for the bytes of a pipe, which nobody can read again: another process has another value."""


class Job(NamedTuple):
    """Digests of what an answer depends on."""

    run: str
    """Of the run file with its seed."""
    inputs: str
    """Of all other code and data."""


class FinishedJobs:
    """The answers of finished jobs, by the run file of each."""

    def __init__(self, path: Path | None) -> None:
        """Read the answers in a file; without a file, keep them in memory.

        Raises:
            ValueError: a line of the file is damaged, or a figure is out of range.
        """
        self._answers: dict[Job, StudyRow | str] = {}
        self._jobs: dict[bytes, Job] = {}
        self._path = path
        if path is not None and path.exists():
            *lines, cut = path.read_bytes().split(b"\n")  # the last one is cut, or empty
            for number, line in enumerate(lines, start=1):
                try:
                    job, answer = _read_line(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{path}: line {number} is no finished simulation: {error}. Remove this line, "
                        "or the file to begin again."
                    ) from None
                self._answers[job] = answer
            if cut:
                os.truncate(path, path.stat().st_size - len(cut))

    def missing(self, runs: Iterable[bytes]) -> list[bytes]:
        """Return the jobs without an answer, each once.

        Log how many of them have an answer that was computed from other inputs.
        """
        self._jobs = {run: _job_of(run) for run in dict.fromkeys(runs)}
        missing = [run for run in self._jobs if self.find(run) is None]
        known = {job.run for job in self._answers}
        if num_outdated := sum(self._jobs[run].run in known for run in missing):
            logger.warning(
                "%d finished simulations in %s had other input files, profiles or code, and are done again",
                num_outdated,
                self._path,
            )
        return missing

    def find(self, run: bytes) -> StudyRow | str | None:
        """Return the answer of a job that `missing` was given; None if it has not finished."""
        return self._answers.get(self._jobs[run])

    def add(self, run: bytes, answer: StudyRow | str) -> None:
        """Add the answer of a job that `missing` returned.

        Raises:
            ValueError: its inputs have changed since then.
        """
        job = self._jobs[run]
        if _job_of(run) != job:
            raise ValueError(
                "An input file of the study changed while it was simulated. "
                "Run the same command again, without changes of its inputs."
            )
        self._answers[job] = answer
        if self._path is not None:
            line = json.dumps([*job, msgspec.to_builtins(answer)])  # it may have NaN
            with naming(self._path), self._path.open("ab") as file:
                file.write(line.encode() + b"\n")


def _read_line(line: bytes) -> tuple[Job, StudyRow | str]:
    """Return a job and its answer as they were added; counts among the figures stay whole numbers."""
    values = json.loads(line)
    run, inputs, answer = msgspec.convert(values, tuple[str, str, StudyRow | str])
    if isinstance(answer, StudyRow):
        check_figures(values[-1]["figures"])
        answer = msgspec.structs.replace(answer, figures=values[-1]["figures"])
    return Job(run, inputs), answer


def _job_of(run: bytes) -> Job:
    decoded = decode_run(run)
    files = _digest_of_files(_input_files(paths_of(decoded), code_of(sections_of(decoded))))
    return Job(sha256(run).hexdigest(), sha256(_digest_of_package() + files).hexdigest())


def _input_files(paths: Mapping[str, str], code: Iterable[str]) -> Iterator[Path]:
    """Yield the files that paths by key name, and those of classes as "module:Class"."""
    for key, path in paths.items():
        if key not in WRITTEN_KEYS:
            yield from _files_in(Path(path))
    for chosen in code:
        yield from _code_files(chosen.partition(":")[0])


def _code_files(module: str) -> Iterator[Path]:
    """Yield the files of a module's package, or a module without one and the modules beside it."""
    found = find_spec(module.partition(".")[0])
    if found is None:
        return
    if found.submodule_search_locations is not None:
        for folder in found.submodule_search_locations:
            yield from Path(folder).rglob("*.py")
    elif found.origin is not None:
        yield from Path(found.origin).parent.glob("*.py")


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a path if it is no directory, else the files in it."""
    if path.is_dir():
        yield from (each for each in path.rglob("*") if not each.is_dir())
    else:
        yield path


def _digest_of_files(paths: Iterable[Path]) -> bytes:
    """Return a digest of paths and bytes of files."""
    found = sha256()
    for path in sorted(set(paths)):
        try:
            known = path.stat()
            digest = _digest_of_file(path, known.st_size, known.st_mtime_ns)
        except OSError as error:  # a check of the run refuses it, if it is needed
            digest = str(error)
        found.update(f"{path} {digest}\n".encode(errors="surrogateescape"))
    return found.digest()


@cache
def _digest_of_file(path: Path, size: int, changed_at: int) -> str:
    """Return a digest of a file's bytes; of a larger one than simulations read, size and time."""
    if not path.is_file():
        return PIPED
    if size > MOST_DATA:
        return f"{size} {changed_at}"
    return sha256(path.read_bytes()).hexdigest()


@cache
def _digest_of_package() -> bytes:
    """Return a digest of the version and files of this package, and of the profiles."""
    root = Path(streamrl.__file__).parent
    rooms = (root, root / "sim", *PROFILES.iterdir())  # each may be a link
    files = (path for room in rooms for path in _files_in(room) if path.suffix in SUFFIXES)
    return sha256(streamrl.__version__.encode() + _digest_of_files(files)).digest()

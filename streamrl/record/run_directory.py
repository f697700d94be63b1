"""Name and read the files of a run directory other than the trace: metrics, rollouts, samples and inputs.

metrics.jsonl, rollouts.jsonl and samples.jsonl are append-only. After a loss or a resume, the trainer
returns to its last checkpoint and repeats the later steps. A line `{"rolled_back_to": version, …}`
records this: earlier lines about later versions no longer count.

The input files of a run are copied into its directory. So the directory can be moved, and a report can
be made from it on any machine:

inputs/model.path/NAME/config.json          the model's shape, under the name of its directory
inputs/costs.profile/NAME                   every other file under its key, with its own name

A trace's header keeps the original paths, so the same run file and seed give the same bytes
wherever they are written. To read a run from its directory, call `with_kept_inputs`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.paths import paths_of, with_paths
from streamrl.runfile.reading import read_regular
from streamrl.runfile.result_files import RESULTS, ROLLOUTS_FILE, listed_run_id

RUN, TRACE = "run.json", "trace.jsonl"
ATTACHED, CONTROL = "attached.json", "control"
"""The file that lists trainers that joined the run, and the directory of requests to the run."""
METRICS, ROLLOUTS, SAMPLES = "metrics.jsonl", ROLLOUTS_FILE, "samples.jsonl"
FATES = ("generated", "trained", "dropped")
OF_FAMILY = "/"
"""Separator in keys of metrics.jsonl that count the rollouts of a prompt family: one of `FATES`, this, the family."""
OF_SCORER = "reward/"
"""Prefix of keys of metrics.jsonl with the mean score of one of several scorers."""
RUN_ID = "run"
"""Key of the id of the run in each line of metrics.jsonl, rollouts.jsonl and samples.jsonl."""
ROLLED_BACK_TO = "rolled_back_to"
"""Key of a line that records a rollback."""

UNSAFE = re.compile(r"[^\w.-]+")
"""Characters of a trainer's name that a directory name must not have."""
MOST_NAME = 60
"""Maximum characters of a trainer's name in a directory name. File systems allow about 255 bytes."""

Line = dict[str, Any]


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """A line that records a rollback."""

    rolled_back_to: int
    groups_done: int = 0
    done_ahead: frozenset[int] = frozenset()


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a line that decide whether a rollback removes it."""

    step: int = 0
    group: int | None = None
    """None in rollouts of earlier versions of this program, which a rollback does not remove."""


def secondary_trainer_directory(directory: Path, number: int, name: str) -> Path:
    """Return the directory of a secondary trainer's files; `number` counts from 1."""
    return directory / "followers" / f"{number}-{UNSAFE.sub('-', name)[:MOST_NAME]}"


def read_metrics(directory: Path) -> list[Line]:
    """Return a line for each step that was not rolled back, in order.

    Raises:
        ValueError: metrics.jsonl is missing, or one of its lines is not from a run.
    """
    return _read(directory / METRICS, _is_before)


def read_samples(directory: Path) -> list[Line]:
    """Return the samples of each step that was not rolled back, in order; see `streamrl.record.samples`.

    Raises:
        ValueError: samples.jsonl is missing, or one of its lines is not from a run.
    """
    return _read(directory / SAMPLES, _is_before)


def read_rollouts(directory: Path, last: RolledBack | None = None) -> list[Line]:
    """Return a line for each verified rollout that was not rolled back, in order.

    Args:
        directory: the run directory.
        last: a rollback that the file does not have yet, as it is when a resume begins.

    Raises:
        ValueError: rollouts.jsonl is missing, or one of its lines is not from a run.
    """
    return _read(directory / ROLLOUTS, _is_done, last)


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file that has one line for each step, without rolled-back steps, in order.

    Raises:
        ValueError: the file is missing, or one of its lines is not from a run.
    """
    return _read(path, _is_before)


def _is_before(line: Counted, mark: RolledBack) -> bool:
    return line.step <= mark.rolled_back_to


def _is_done(line: Counted, mark: RolledBack) -> bool:
    return line.group is None or line.group < mark.groups_done or line.group in mark.done_ahead


def _read(
    path: Path, stays: Callable[[Counted, RolledBack], bool], last: RolledBack | None = None
) -> list[Line]:
    """Return the lines that no later rollback removes, without a last line that a crash cut short."""
    try:
        *lines, _ = read_regular(path).split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    kept: list[tuple[Counted, Line]] = []
    run_id = listed_run_id(path)
    for number, data in enumerate(lines, start=1):
        try:
            line = msgspec.json.decode(data, type=Line)
            own = line.pop(RUN_ID, "")
            run_id = run_id or own
            if own not in ("", run_id):
                raise ValueError(
                    f"{path} mixes two runs: line {number} is not of run {run_id}, as {RESULTS} says"
                )
            if ROLLED_BACK_TO in line:
                mark = msgspec.convert(line, RolledBack)
                kept = [each for each in kept if stays(each[0], mark)]
            else:
                kept.append((msgspec.convert(line, Counted), line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: the line is not from a run: {error}") from None
    return [line for counted, line in kept if last is None or stays(counted, last)]


INPUTS = "inputs"
KEPT = (
    "model.path",
    "costs.profile",
    "costs.calibration",
    "workload.lengths.source",
    "workload.lengths.ranker_scores",
)
"""Keys whose files a simulation or a report of the run reads."""
DIGEST_BYTES = 4  # enough to distinguish the files of a few runs, and short enough to read
CONFIG = "config.json"
"""The file of a model directory that has the model's shape."""


def read_inputs(paths: Mapping[str, str], directory: Path) -> dict[str, bytes]:
    """Return the data of the input files of a run, by the paths of their copies in its directory.

    Missing files, and those that are the copies, are left out.

    Args:
        paths: paths in the run file by key, as `paths_of` returns them.
        directory: the run directory.
    """
    return {
        target.relative_to(directory).as_posix(): source.read_bytes()
        for path, kept in _input_paths(paths, directory).values()
        for source, target in _files(path, kept)
        if source.is_file() and not (target.exists() and source.samefile(target))
    }


def with_kept_inputs(run: Run, directory: Path) -> Run:
    """Return the run with paths to the copies in its directory. Files without a copy keep their path."""
    inputs = _input_paths(paths_of(run), directory)
    return with_paths(run, {key: str(kept) for key, (_, kept) in inputs.items() if kept.exists()})


def kept_names(paths: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return by key the name of each copied file with a digest of its bytes, which does not depend on the directory."""
    names = {}
    for key, (_, kept) in _input_paths(paths, directory).items():
        file = kept / CONFIG if kept.is_dir() else kept
        if file.is_file():
            digest = hashlib.blake2b(file.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()
            names[key] = f"{kept.name} ({digest})"
    return names


def _input_paths(paths: Mapping[str, str], directory: Path) -> dict[str, tuple[Path, Path]]:
    """Return by key the original path of an input and the path of its copy."""
    named = {key: Path(path) for key, path in paths.items() if key in KEPT}
    return {
        key: (path, directory / INPUTS / key / path.absolute().name) for key, path in named.items()
    }


def _files(path: Path, kept: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file to copy for a path, with the path of its copy."""
    yield (path / CONFIG, kept / CONFIG) if path.is_dir() else (path, kept)

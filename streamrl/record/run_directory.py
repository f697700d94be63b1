"""Name and read the files of a run directory beside its trace: metrics, rollouts, samples and inputs.

metrics.jsonl, rollouts.jsonl and samples.jsonl are append-only. A lost trainer, or a resumed
driver, returns to its last checkpoint and repeats the later steps. A line `{"rolled_back_to":
version, …}` records this: earlier lines about later versions no longer count.

The input files of a run are copied beside its trace, so that the directory can be moved and
reported on anywhere:

inputs/model.path/NAME/config.json          the model's shape, under the name of its directory
inputs/costs.profile/NAME                   and so on: each file under its key, with its own name

A trace's header keeps the original paths, so the same run file and seed give the same bytes
wherever they are written. To read a run from its directory, call `with_kept_inputs`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.paths import paths_of, with_paths

RUN, TRACE = "run.json", "trace.jsonl"
ATTACHED, CONTROL = "attached.json", "control"
"""The file that lists trainers that joined the run, and the directory of requests to it."""
METRICS, ROLLOUTS, SAMPLES = "metrics.jsonl", "rollouts.jsonl", "samples.jsonl"
FATES = ("generated", "trained", "dropped")
OF_FAMILY = "/"
"""What stands between one of `FATES` and a family in the keys of metrics.jsonl that count its rollouts."""
OF_SCORER = "reward/"
"""What the keys of metrics.jsonl begin with that say what one of several scorers gave."""
ROLLED_BACK_TO = "rolled_back_to"
"""Key of a line that is no step and no rollout."""

OTHER = re.compile(r"[^\w.-]+")
"""What names of directories are spared."""
MOST_NAME = 60
"""Characters of a name in that of a directory: file systems take some 255 bytes."""

Line = dict[str, Any]


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a line that takes others back."""

    rolled_back_to: int
    groups_done: int = 0
    done_ahead: frozenset[int] = frozenset()


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a line that may be taken back."""

    step: int = 0
    group: int | None = None
    """None in rollouts of earlier versions, which nothing takes back."""


def secondary_trainer_directory(directory: Path, number: int, name: str) -> Path:
    """Return where a trainer that follows leaves its files in a run's directory; the first is number 1."""
    return directory / "followers" / f"{number}-{OTHER.sub('-', name)[:MOST_NAME]}"


def read_metrics(directory: Path) -> list[Line]:
    """Return a line for each step of a run that stayed, in order.

    Raises:
        ValueError: there is no such file, or a line of it is none of a run.
    """
    return _read(directory / METRICS, _is_before)


def read_samples(directory: Path) -> list[Line]:
    """Return a line for each step of a run that stayed, in order: what it was trained on; see `streamrl.record.samples`.

    Raises:
        ValueError: there is no such file, or a line of it is none of a run.
    """
    return _read(directory / SAMPLES, _is_before)


def read_rollouts(directory: Path) -> list[Line]:
    """Return a line for each verified rollout of a run that no resume took back, in order.

    Raises:
        ValueError: there is no such file, or a line of it is none of a run.
    """
    return _read(directory / ROLLOUTS, _is_done)


def _is_before(line: Counted, mark: RolledBack) -> bool:
    return line.step <= mark.rolled_back_to


def _is_done(line: Counted, mark: RolledBack) -> bool:
    return line.group is None or line.group < mark.groups_done or line.group in mark.done_ahead


def _read(path: Path, stays: Callable[[Counted, RolledBack], bool]) -> list[Line]:
    """Return the lines that no later one takes back; a last one that a crash cut short is left out."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    kept: list[tuple[Counted, Line]] = []
    for number, data in enumerate(lines, start=1):
        try:
            line = msgspec.json.decode(data, type=Line)
            if ROLLED_BACK_TO in line:
                mark = msgspec.convert(line, RolledBack)
                kept = [each for each in kept if stays(each[0], mark)]
            else:
                kept.append((msgspec.convert(line, Counted), line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a line of a run: {error}") from None
    return [line for _, line in kept]


INPUTS = "inputs"
KEPT = (
    "model.path",
    "costs.profile",
    "costs.calibration",
    "workload.lengths.source",
    "workload.lengths.ranker_scores",
)
"""Keys whose files a simulation or a report of the run reads."""
DIGEST_BYTES = 4  # tells the files of a handful of runs apart, and can be read
CONFIG = "config.json"
"""All of a model directory that tells its shape."""


def keep_inputs(paths: Mapping[str, str], directory: Path) -> None:
    """Copy what a run was read from into its directory; a file that is not there was not read.

    Args:
        paths: paths that the run names, by key, as `paths_of` returns them.
        directory: the run directory.
    """
    for path, kept in _places(paths, directory).values():
        for source, target in _files(path, kept):
            if source.is_file() and not (target.exists() and source.samefile(target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def with_kept_inputs(run: Run, directory: Path) -> Run:
    """Return the run as it reads where its directory is: from what was kept there, else from where it was."""
    places = _places(paths_of(run), directory)
    return with_paths(run, {key: str(kept) for key, (_, kept) in places.items() if kept.exists()})


def kept_names(paths: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return by key what was kept: its name with a digest of its bytes, alike wherever the directories are."""
    names = {}
    for key, (_, kept) in _places(paths, directory).items():
        file = kept / CONFIG if kept.is_dir() else kept
        if file.is_file():
            digest = hashlib.blake2b(file.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()
            names[key] = f"{kept.name} ({digest})"
    return names


def _places(paths: Mapping[str, str], directory: Path) -> dict[str, tuple[Path, Path]]:
    """Return by key where the run read from, and where that is kept."""
    named = {key: Path(path) for key, path in paths.items() if key in KEPT}
    return {
        key: (path, directory / INPUTS / key / path.absolute().name) for key, path in named.items()
    }


def _files(path: Path, kept: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file that is kept of a path, and where."""
    yield (path / CONFIG, kept / CONFIG) if path.is_dir() else (path, kept)

"""What a run was read from, kept beside its trace, so that its directory can be moved, sent and reported anywhere.

inputs/model.path/NAME/config.json          the model's shape, under the name of its directory
inputs/costs.profile/NAME                   and so on: each file under its key, with its own name

A trace's header keeps the paths as they were, so the same run file and seed give the same bytes wherever they are
written; who reads a run from its directory asks for `with_kept_inputs`.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from streamrl.runfile.config import Run
from streamrl.runfile.paths import paths_of, with_paths

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


def keep_inputs(run: Run, directory: Path) -> None:
    """Copy what the run was read from into its directory; a file that is not there was not read."""
    for path, kept in _places(run, directory).values():
        for source, target in _files(path, kept):
            if source.is_file() and not (target.exists() and source.samefile(target)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def with_kept_inputs(run: Run, directory: Path) -> Run:
    """Return the run as it reads where its directory is: from what was kept there, else from where it was."""
    places = _places(run, directory)
    return with_paths(run, {key: str(kept) for key, (_, kept) in places.items() if kept.exists()})


def kept_names(run: Run, directory: Path) -> dict[str, str]:
    """Return by key what was kept: its name with a digest of its bytes, alike wherever the directories are."""
    names = {}
    for key, (_, kept) in _places(run, directory).items():
        file = kept / CONFIG if kept.is_dir() else kept
        if file.is_file():
            digest = hashlib.blake2b(file.read_bytes(), digest_size=DIGEST_BYTES).hexdigest()
            names[key] = f"{kept.name} ({digest})"
    return names


def _places(run: Run, directory: Path) -> dict[str, tuple[Path, Path]]:
    """Return by key where the run read from, and where that is kept."""
    named = {key: Path(path) for key, path in paths_of(run).items() if key in KEPT}
    return {
        key: (path, directory / INPUTS / key / path.absolute().name) for key, path in named.items()
    }


def _files(path: Path, kept: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file that is kept of a path, and where."""
    yield (path / CONFIG, kept / CONFIG) if path.is_dir() else (path, kept)

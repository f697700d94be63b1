"""Keys of a run file whose values are paths, and a run with other paths in their places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.section import Section

PATH_KEYS = (
    "model.path",
    "workload.prompts",
    "workload.lengths.source",
    "workload.lengths.ranker_scores",
    "workload.ranker.path",
    "costs.profile",
    "execute.output",
)
"""Dotted keys; `workload.lengths.source` may be a name in profiles/lengths instead."""


def paths_of(run: Run) -> dict[str, str]:
    """Return the paths that a run names, by dotted key."""
    found = {key: _value(run, key) for key in PATH_KEYS}
    lengths = run.workload.lengths
    if lengths is not None and not lengths.names_a_file:
        del found["workload.lengths.source"]
    return {key: path for key, path in found.items() if path is not None}


def with_paths(run: Run, paths: Mapping[str, str]) -> Run:
    """Return the run with the values of dotted keys replaced."""
    for key, path in paths.items():
        run = _replaced(run, key.split("."), path)
    return run


def _value(run: Run, key: str) -> str | None:
    place: Any = run
    for name in key.split("."):
        place = getattr(place, name, None)  # a run may have no section `workload.lengths`
    return place if place is None else str(place)


def _replaced(section: Any, names: list[str], path: str) -> Any:
    name, *rest = names
    assert isinstance(section, Section), f"no section has {name}"
    value = _replaced(getattr(section, name), rest, path) if rest else path
    return msgspec.structs.replace(section, **{name: value})


def check_writable(path: Path, key: str) -> None:
    """Raise `ValueError` with `key` where nothing could be written to a directory; nothing is left there."""
    try:
        place = next(each for each in (path, *path.absolute().parents) if each.exists())
        with TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        raise ValueError(f"{key} {path}: cannot be written: {error.strerror}") from None

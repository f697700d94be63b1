"""Keys of a run file whose values are paths, and a run with other paths in their places."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.scorer_choice import file_of, with_file
from streamrl.runfile.section import Section
from streamrl.runfile.workload_config import HUB

PATH_KEYS = (
    "model.path",
    "rollout.external.certificate",
    "rollout.external.directory",
    "workload.prompts",
    "evaluation.prompts",
    "evaluation.scorer",
    "workload.lengths.source",
    "workload.lengths.ranker_scores",
    "workload.ranker.path",
    "costs.profile",
    "costs.calibration",
    "execute.output",
    "execute.checkpoints.export",
    "plan.staleness_study",
)
"""Dotted keys; `workload.lengths.source` may be a name in profiles/lengths instead."""
WRITTEN_KEYS = ("execute.output", "execute.checkpoints.export", "rollout.external.directory")
"""Those of `PATH_KEYS` whose paths a run writes and does not read."""
SCORER, IMPLEMENTATION = ".scorer", ".implementation"
"""What the keys end with whose values may have a path in them: that of a file with a function or class."""
TOOLS = "environment.tools."
"""Start of the keys of an environment's tools, whose values may have such a path in them too."""
MODEL = ".model"
"""What the key of a reward model ends with."""


def paths_of(run: Run) -> dict[str, str]:
    """Return the paths that a run names, by dotted key."""
    keys = [
        *PATH_KEYS,
        *(f"workload.source.{place}.prompts" for place in range(len(run.workload.source))),
        *map(run.verifier.key, range(len(run.verifier.rewards))),
        *_model_keys(run.verifier),
        f"environment{IMPLEMENTATION}",
        *(
            f"{TOOLS}{place}"
            for place in range(len(run.environment.tools if run.environment else ()))
        ),
    ]
    found = {key: _path_in(key, _value(run, key)) for key in keys}
    lengths = run.workload.lengths
    if lengths is not None and not lengths.names_a_file:
        del found["workload.lengths.source"]
    return {key: path for key, path in found.items() if path is not None}


def _model_keys(verifier: VerifierConfig) -> list[str]:
    """Return the key of the directory of a run's reward model, where it has one."""
    rewards = enumerate(verifier.reward)
    return [f"verifier.reward.{at}{MODEL}" for at, each in rewards if each.has_model]


def with_paths(run: Run, paths: Mapping[str, str]) -> Run:
    """Return the run with the paths in the values of dotted keys replaced."""
    for key, path in paths.items():
        run = _replaced(run, key.split("."), path)
    return run


def absolute(paths: Mapping[str, str]) -> dict[str, str]:
    """Return absolute paths by key, which do not depend on how the path of the run file was written."""
    return {key: os.path.normpath(Path(path).absolute()) for key, path in paths.items()}


def _path_in(key: str, value: str | None) -> str | None:
    """Return the path in a key's value: for a scorer its file, for a data set or model on the hub None."""
    if value is None or (key.endswith((".prompts", MODEL, ".export")) and value.startswith(HUB)):
        return None
    return file_of(value) if names_code(key) else value


def names_code(key: str) -> bool:
    """Return whether the value of a key is a function or class, of which a file may have the code."""
    return key.endswith((SCORER, IMPLEMENTATION)) or key.startswith(TOOLS)


def _value(run: Run, key: str) -> str | None:
    place: Any = run
    for name in key.split("."):
        is_list = isinstance(place, tuple)  # a run may have no such section
        place = place[int(name)] if is_list else getattr(place, name, None)
    return place if place is None else str(place)


def _replaced(place: Any, names: list[str], path: str) -> Any:
    name, *rest = names
    if isinstance(place, tuple):
        at = int(name)
        new = _replaced(place[at], rest, path) if rest else with_file(place[at], path)
        return (*place[:at], new, *place[at + 1 :])
    assert isinstance(place, Section), f"no section has {name}"
    old = getattr(place, name)
    if rest:
        value = _replaced(old, rest, path)
    else:
        value = with_file(old, path) if names_code(f".{name}") else path
    return msgspec.structs.replace(place, **{name: value})


def check_no_directory(path: Path, key: str) -> None:
    """Raise `ValueError` with `key` where a directory is in the place of a file that is to be written."""
    try:
        is_directory = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"{key} {path}: cannot be written: {error.strerror}") from None
    if is_directory:
        raise ValueError(f"{key} {path}: cannot be written: Is a directory")


def check_file_writable(path: Path, key: str) -> None:
    """Raise `ValueError` with `key` where a file that exists could not be written to, or is a directory."""
    check_no_directory(path, key)
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{key} {path}: cannot be written: {os.strerror(errno.EACCES)}")


def check_writable(path: Path, key: str) -> None:
    """Raise `ValueError` with `key` where nothing could be written to a directory; nothing is left there."""
    try:
        place = next(each for each in (path, *path.absolute().parents) if each.exists())
        with TemporaryDirectory(dir=place):
            pass
    except OSError as error:
        raise ValueError(f"{key} {path}: cannot be written: {error.strerror}") from None

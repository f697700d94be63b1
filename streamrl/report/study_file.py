"""A what-if study: a run file, sweeps over its keys, and a question; ready-made studies are TOML files.

A study file has the key `run`, which no run file has. Its other keys correspond to the options of
`streamrl simulate RUN.toml --sweep … --set … --seeds … --metric …`, with names for figures.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from streamrl.report.study_table import Question, check_metrics
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run, load_run
from streamrl.runfile.reading import read_toml
from streamrl.runfile.sweep import Axis, Scale, parse_axis

NUM_SEEDS = 1  # its interval shows what more seeds would add
MOST_SEEDS = 10_000
"""Maximum simulations of one combination; all jobs of a study are listed before the first one begins."""
DEFAULT_METRICS = ("step_time", "cost_per_million_tokens")
KEY = "run"
UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]+)`.*")


class AxisEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sweep of a study file."""

    sweep: str
    """A sweep, as `--sweep` takes it."""
    name: str = ""
    """Name in figures; the swept keys if empty."""
    labels: list[str] = msgspec.field(default_factory=list)
    """Names of the points in figures; their values if empty."""
    scale: Scale = "auto"


class StudyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A study file as it is written."""

    run: str
    """The run file, relative to the study file."""
    title: str
    question: str = ""
    set: list[str] = msgspec.field(default_factory=list)
    """Settings, as `--set` takes them."""
    axis: list[AxisEntry]
    """The first one is the x axis; the others make the series."""
    seeds: int = NUM_SEEDS
    metrics: list[str] = msgspec.field(default_factory=lambda: list(DEFAULT_METRICS))
    finding: Question = Question()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study to run."""

    run_file: Path
    run: Run | None = None
    """A run in memory, which replaces `run_file`; the path is then only its name."""
    title: str
    question: str = ""
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...]
    num_seeds: int = NUM_SEEDS
    metrics: tuple[str, ...] = DEFAULT_METRICS
    """Each gets a figure and a finding; the first represents the study."""
    finding: Question = field(default_factory=Question)

    def __post_init__(self) -> None:
        """Raise `ValueError` if the study sweeps nothing or names an unknown metric."""
        if not self.axes:
            raise ValueError("a study needs a sweep: add --sweep key=value,value")
        if not 1 <= self.num_seeds <= MOST_SEEDS:
            raise ValueError(f"--seeds must be from 1 to {MOST_SEEDS:,}, got {self.num_seeds}")
        if not self.metrics:
            raise ValueError("metrics is empty: remove it, or name the metrics to draw")
        check_metrics(self.metrics)
        tolerance = self.finding.tolerance
        if not (isfinite(tolerance) and 0 <= tolerance < 1):
            raise ValueError(f"finding.tolerance must be in [0, 1), got {tolerance}")
        if self.finding.kind == "crossover" and len(self.axes) < 2:
            raise ValueError("finding.kind 'crossover' compares series, so it needs a second axis")

    def load(self, overrides: list[str]) -> Run:
        """Return its run with `key=value` changes."""
        if self.run is not None:
            return change_run(self.run, overrides)
        return load_run(self.run_file, overrides)


def is_study(path: Path) -> bool:
    """Return whether a file is a study, not a run file; False for an unreadable file."""
    try:
        return isinstance(read_toml(path).get(KEY), str)
    except (OSError, ValueError, RecursionError):
        return False


def load_study(path: Path) -> Study:
    """Read a study file.

    Raises:
        ValueError: the file is wrong; the message is one line with the path, the key and the reason.
    """
    try:
        return _make_study(read_toml(path), path.parent)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_say(str(error))}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _make_study(table: dict[str, Any], base: Path) -> Study:
    file = msgspec.convert(table, StudyFile)
    return Study(
        run_file=Path(os.path.normpath(base / file.run)),
        title=file.title,
        question=file.question,
        overrides=tuple(file.set),
        axes=tuple(parse_axis(a.sweep, a.name, a.labels, a.scale) for a in file.axis),
        num_seeds=file.seeds,
        metrics=tuple(file.metrics),
        finding=file.finding,
    )


def _say(error: str) -> str:
    """Return msgspec's error, with the nearest known key for an unknown one."""
    match = UNKNOWN.fullmatch(error)
    if match is None:
        return error.replace("$.", "")
    keys = [k for kind in (StudyFile, AxisEntry, Question) for k in kind.__struct_fields__]
    close = difflib.get_close_matches(match["key"], keys, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{match['key']} is no key of a study file{hint}"

"""Write a run file: what `load_run` reads, with every key that is not at its default.

What the framework that a run names fills in is its default there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.frameworks import settings_of
from streamrl.runfile.keys import place_of
from streamrl.runfile.paths import paths_of, with_paths
from streamrl.runfile.section import Section
from streamrl.runfile.trainers import join_trainers
from streamrl.runfile.units import Bandwidth, Duration, Size

OUTPUT = "execute.output"
UNITS: dict[type, str] = {Bandwidth: "B/s", Duration: "s", Size: "B"}


def write_run(
    run: Run,
    path: Path,
    notes: Iterable[str] = (),
    stated: Iterable[str] = (),
    base: Path = Path(),
) -> None:
    """Write a run file; paths are written as seen from its directory.

    Args:
        run: what to write.
        path: where to.
        notes: comments at its head, a line each.
        stated: dotted keys that are written whatever their value.
        base: directory of the file that the run was read from; what was its default output is that of the
            written file.
    """
    if run.execute.output == os.path.normpath(base / ExecuteConfig().output):
        execute = msgspec.structs.replace(run.execute, output=ExecuteConfig().output)
        run = msgspec.structs.replace(run, execute=execute)
    stated = list(stated)
    run = _turned(run, path.parent, stated)
    table = _run_table(run)
    for key in stated:
        _state(table, run, key)
    table = join_trainers(table)
    head = "".join(f"# {note}\n" for note in notes)
    path.write_text(f"{head}\n{tomli_w.dumps(table)}", encoding="utf-8")


def run_table(run: Run) -> dict[str, Any]:
    """Return a run as TOML gives its file."""
    return join_trainers(_run_table(run))


def _run_table(run: Run) -> dict[str, Any]:
    """Return a run's table without what its framework fills in again, and with what it would fill in otherwise."""
    table = _table(run)
    for setting, own in settings_of(run):
        place, last = place_of(table, setting.key)
        if own == setting.value:
            place.pop(last, None)
        else:
            place[last] = _value(own)
    return table


def _table(section: Section) -> dict[str, Any]:
    """Return a section as TOML has it."""
    found = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value is not None and (default is msgspec.NODEFAULT or value != default):
            found[field.name] = _value(value)
    return found


def _state(table: Any, run: Any, key: str) -> None:
    *parents, last = key.split(".")
    section, place = run, table
    for parent in parents:
        if parent.isdigit():
            section, place = section[int(parent)], place[int(parent)]
        else:
            section, place = getattr(section, parent), place.setdefault(parent, {})
    place[last] = _value(getattr(section, last))


def _value(value: Any) -> Any:
    match value:
        case Section():
            return _table(value)
        case dict():
            return {key: _value(each) for key, each in value.items()}
        case list() | tuple():
            return [_value(each) for each in value]
        case Bandwidth() | Duration() | Size():
            return f"{float(value)!r} {UNITS[type(value)]}"
        case _:
            return value


def _turned(run: Run, base: Path, stated: Iterable[str]) -> Run:
    """Return the run with its paths as seen from `base`; a default that is not written stays."""
    paths = paths_of(run)
    if run.execute.output == ExecuteConfig().output and OUTPUT not in stated:
        del paths[OUTPUT]
    return with_paths(run, {key: os.path.relpath(path, base) for key, path in paths.items()})

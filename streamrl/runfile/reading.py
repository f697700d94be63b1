"""Read a run file: from TOML and overrides to a run; write a run as JSON and read it back."""

from __future__ import annotations

import copy
import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, overload

import msgspec

from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.overrides import override
from streamrl.runfile.section import Section
from streamrl.runfile.units import read_quantity

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]+)`(?: - at `\$(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]+)`(?: - at `\$(?P<path>.*)`)?")
_AT = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)


def load_run(path: Path, overrides: Iterable[str] = ()) -> Run:
    """Read the run file at `path` with `key=value` overrides applied.

    Raises:
        ValueError: one line that names the key, its value and what would be right.
    """
    return make_run(read_table(path, overrides), path.parent)


def read_table(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the run file at `path` as TOML gives it, with overrides applied; see `load_run` for the errors."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such run file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    for change in overrides:
        override(table, change)
    return table


def make_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run from a table as TOML gives it; relative paths start at `base`."""
    run = convert_run(table, base)
    check_run(run)
    return run


def convert_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run of which only keys and types are checked."""
    try:
        run = msgspec.convert(table, Run, dec_hook=read_quantity)
    except msgspec.ValidationError as error:
        raise ValueError(_say(str(error), table)) from None
    return _resolve_paths(run, base)


def decode_run(data: bytes) -> Run:
    """Read a run that `encode_run` wrote."""
    return msgspec.json.decode(data, type=Run, dec_hook=_restore_quantity)


def encode_run(run: Run) -> bytes:
    """Write a run as JSON, quantities in base units."""
    return msgspec.json.encode(run, enc_hook=float)


def _restore_quantity(kind: type, value: object) -> object:
    return kind(value)


def _resolve_paths(run: Run, base: Path) -> Run:
    """Let every path in the run file start at `base`."""
    replace = msgspec.structs.replace
    lengths = run.workload.lengths
    if lengths is not None:
        source = _from(base, lengths.source) if lengths.names_a_file else lengths.source
        scores = _from(base, lengths.ranker_scores)
        lengths = replace(lengths, source=source, ranker_scores=scores)
    return replace(
        run,
        model=replace(run.model, path=_from(base, run.model.path)),
        workload=replace(run.workload, prompts=_from(base, run.workload.prompts), lengths=lengths),
        costs=replace(run.costs, profile=_from(base, run.costs.profile)),
        execute=replace(run.execute, output=_from(base, run.execute.output)),
    )


@overload
def _from(base: Path, path: str) -> str: ...
@overload
def _from(base: Path, path: None) -> None: ...
def _from(base: Path, path: str | None) -> str | None:
    return None if path is None else os.path.normpath(base / path)


def _say(error: str, table: dict[str, Any]) -> str:
    """Say what msgspec found, with the key's path as a run file has it."""
    if match := _UNKNOWN.fullmatch(error):
        close = difflib.get_close_matches(match["key"], _all_keys(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        path = _name_entry(match["path"] or "", error, table)
        return f"{_dotted(path, match['key'])} is no key of a run file{hint}"
    if match := _MISSING.fullmatch(error):
        path = _name_entry(match["path"] or "", error, table)
        return f"{_dotted(path, match['key'])} is missing"
    if match := _AT.fullmatch(error):
        path = _name_entry(match["path"], error, table)
        value = _look_up(table, path)
        if choices := _choices(path):
            return f"{_dotted(path)} must be one of {', '.join(choices)}, got {value!r}"
        return f"{_dotted(path)}: {match['what']}, got {value!r}"
    return error


def _choices(path: str) -> list[str]:
    """Give the names that the key at `path` may have, none where it takes no name."""
    kind: Any = Run
    for part in re.findall(r"[^.\[\]]+", path):
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        kind = get_type_hints(kind)[part] if is_section else _entries_of(kind)
    options = [kind, *get_args(kind)]
    return [
        str(name)
        for option in options
        if get_origin(option) is Literal
        for name in get_args(option)
    ]


def _entries_of(kind: Any) -> Any:
    """Give the type of the entries of a table or list, which may also be absent."""
    *_, last = (each for each in get_args(kind) if each is not NoneType)
    return _entries_of(last) if NoneType in get_args(kind) else last


def _all_keys() -> list[str]:
    return [key for section in Section.__subclasses__() for key in section.__struct_fields__]


def _dotted(path: str | None, key: str = "") -> str:
    return ".".join(part for part in ((path or "").lstrip("."), key) if part)


def _name_entry(path: str, error: str, table: dict[str, Any]) -> str:
    """Replace msgspec's "[...]" by the entry of the table that is wrong."""
    before, found, after = path.partition("[...]")
    if not found:
        return path
    entries = _look_up(table, before)
    if not isinstance(entries, dict):
        return path
    for name, entry in entries.items():
        alone = copy.deepcopy(table)
        _override_table(alone, before, {name: entry})
        try:
            msgspec.convert(alone, Run, dec_hook=read_quantity)
        except msgspec.ValidationError as again:
            if str(again) == error:
                return f"{before}.{name}{after}"
    return path


def _override_table(table: dict[str, Any], path: str, value: object) -> None:
    *parents, last = _dotted(path).split(".")
    place: Any = table
    for part in parents:
        place = place[part]
    place[last] = value


def _look_up(table: Any, path: str) -> object:
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            table = table[int(part)] if isinstance(table, list) else table[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return "nothing there"
    return table

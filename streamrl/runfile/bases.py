"""Read a run file with the file that it builds on (`base`), and with environment variables in its texts.

A base is another run file. Tables are merged key by key; other values, lists included, replace those of the base. A base
may have a base. Relative paths start at the directory of the file that wrote them.

`${NAME}` in a text is replaced by an environment variable. A variable whose name says that it is a secret
(`SECRET_NAMES`) is written to records as `${NAME}`, and never with its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import join_key
from streamrl.runfile.paths import IMPLEMENTATION, MODEL, PATH_KEYS, names_code
from streamrl.runfile.reading import read_toml
from streamrl.runfile.scorer_choice import SCORERS, file_of, with_file
from streamrl.runfile.workload_config import HUB

BASE = "base"
"""Key of a run file that names another one."""
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of variables whose values no record has."""
_as_written: dict[str, str] = {}
"""Texts with secrets that this process has read, and how their files write them."""
LISTED_PATHS = ("workload.source.*.prompts", "verifier.reward.*.scorer", "verifier.reward.*.model")
"""Keys of paths in lists, beside `PATH_KEYS`."""

Table = dict[str, Any]


def read_merged(path: Path) -> Table:
    """Return the table of a run file, merged with those of its bases.

    Raises:
        ValueError: a file is missing or no TOML, or files build on each other in a circle.
    """
    return _read_merged(path, ())


def _read_merged(path: Path, above: tuple[Path, ...]) -> Table:
    place = path.resolve()
    if place in above:
        circle = " -> ".join(each.name for each in (*above[above.index(place) :], place))
        raise RunError(BASE, path.name, text=f"base: run files build on each other: {circle}")
    table = _read(path)
    if BASE not in table:
        return table
    named = table.pop(BASE)
    if not isinstance(named, str) or not named:
        text = f"base must be the path of one run file, got {named!r}; a base may have a base of its own"
        raise RunError(BASE, named, str, f"{path}: {text}")
    below = path.parent / expanded(named, BASE)
    found = _read_merged(below, (*above, place))
    _move_paths(found, below.parent, path.parent)
    return _merged(found, table)


def _read(path: Path) -> Table:
    try:
        return read_toml(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such run file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of TOML, text or huge numbers
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def _merged(below: Table, above: Table) -> Table:
    """Return a table with the keys of both; where both have a key, tables are merged and `above` counts else."""
    found = dict(below)
    for key, value in above.items():
        other = found.get(key)
        are_tables = isinstance(value, dict) and isinstance(other, dict)
        found[key] = _merged(other, value) if are_tables and other is not None else value
    return found


def _move_paths(table: Table, start: Path, other: Path) -> None:
    """Write the relative paths of a table from another directory."""
    for key in (*PATH_KEYS, "verifier.scorer", f"environment{IMPLEMENTATION}", *LISTED_PATHS):
        for place, name in _places(table, key.split(".")):
            value = place[name]
            if isinstance(value, str) and (path := _path_in(f".{name}", value, place)) is not None:
                path = expanded(path, key)
                if not Path(path).is_absolute():
                    moved = os.path.relpath(start / path, other)
                    place[name] = with_file(value, moved) if names_code(f".{name}") else moved


def _places(table: Any, names: list[str]) -> Iterator[tuple[Table, str]]:
    """Yield the tables that have a dotted key, each with its last name; `*` stands for every entry of a list."""
    name, *rest = names
    if name == "*":
        for each in table if isinstance(table, list) else ():
            yield from _places(each, rest)
    elif isinstance(table, dict) and name in table:
        if rest:
            yield from _places(table[name], rest)
        else:
            yield table, name


def _path_in(key: str, value: str, place: Table) -> str | None:
    """Return the path in a value, None where it has none."""
    if names_code(key):
        return file_of(value)
    if key.endswith((".prompts", MODEL)) and value.startswith(HUB):
        return None
    if key == MODEL:
        choice = SCORERS.get(place.get("scorer", ""))
        return value if choice is not None and choice.has_model else None
    if key == ".source":  # a profile's name, or figures
        is_path = place.get("kind") != "stated" and ("/" in value or "." in value)
        return value if is_path else None
    return value


def with_variables(value: Any, key: str = "") -> Any:
    """Return a table, list or value with environment variables in its texts.

    Raises:
        RunError: a variable is not set.
    """
    return _with_texts(value, expanded, key)


def _with_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return a table, list or value with each of its texts changed, given the text and its key."""
    if isinstance(value, dict):
        inner = ((name, each, join_key(key, name)) for name, each in value.items())
        return {name: _with_texts(each, change, path) for name, each, path in inner}
    if isinstance(value, list):
        return [_with_texts(each, change, join_key(key, at)) for at, each in enumerate(value)]
    return change(value, key) if isinstance(value, str) else value


def expanded(text: str, key: str) -> str:
    """Return a text with the values of its environment variables; `RunError` where one is not set."""
    for name in VARIABLE.findall(text):
        if name not in os.environ:
            raise RunError(
                key,
                text,
                text=f"{key}: the environment variable {name} is not set: export {name}=VALUE, or write the value there",
            )
    return _expanded(text)


def restored(value: Any) -> Any:
    """Return what a record has, with the variables that are set here; others stay as they are written."""
    return _with_texts(value, lambda text, _: _expanded(text))


def _expanded(text: str) -> str:
    found = VARIABLE.sub(lambda each: os.environ.get(each[1], each[0]), text)
    if found != text and any(map(SECRET_NAMES.search, VARIABLE.findall(text))):
        _as_written[found] = text
    return found


def is_secret(text: str) -> bool:
    """Return whether a text has the value of a secret variable, or names one, so that no record gets it."""
    return text in _as_written or bool(VARIABLE.fullmatch(text) and SECRET_NAMES.search(text))


def has_secrets() -> bool:
    """Return whether this process has read any secret."""
    return bool(_as_written)


def without_secrets(value: Any) -> Any:
    """Return a table, list or value in which texts with secrets are as their files write them."""
    return _with_texts(value, lambda text, _: _as_written.get(text, text))

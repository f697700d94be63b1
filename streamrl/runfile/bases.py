"""Read a run file with the file that it builds on (`base`), and with environment variables in its texts.

A base is another run file. Tables are merged key by key; other values, lists included, replace those of the base. A base
may have a base. Relative paths start at the directory of the file that wrote them.

`${NAME}` in a text is replaced by an environment variable when a run file is loaded. Records have the value, and nothing
in a record is replaced. A secret (`SECRET_NAMES`) can stand only in `SECRET_KEY`. That text stays as it is written, also
in records, and only who sends the secret looks up its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import join_key
from streamrl.runfile.length_words import lengths_in_full
from streamrl.runfile.paths import IMPLEMENTATION, MODEL, PATH_KEYS, TOOLS, names_code
from streamrl.runfile.reading import read_toml
from streamrl.runfile.scorer_choice import SCORERS, file_of, with_file
from streamrl.runfile.workload_config import HUB

BASE = "base"
"""Key of a run file that names another one."""
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
SECRET_NAMES = re.compile(
    r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE
)
"""Names of variables whose values no record has: one of their words, between underscores, says so."""
SECRET_KEY = "rollout.external.key"
"""The only key that takes a secret."""
LISTED_PATHS = (
    "workload.source.*.prompts",
    "verifier.reward.*.scorer",
    "verifier.reward.*.model",
    f"{TOOLS}*",
)
"""Keys of paths in lists, beside `PATH_KEYS`."""

Table = dict[str, Any]


def read_merged(path: Path) -> Table:
    """Return the table of a run file, merged with those of its bases.

    Raises:
        ValueError: a file is missing or no TOML, or files build on each other in a circle.
    """
    return _read_merged(path, ())


def _read_merged(path: Path, above: tuple[Path, ...]) -> Table:
    place = Path(os.path.realpath(path))  # unlike `resolve`, it accepts a circle of links
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
    workload = table.get("workload")
    if isinstance(workload, dict) and "lengths" in workload:
        workload["lengths"] = lengths_in_full(workload["lengths"])  # may be a path in short
    for key in (*PATH_KEYS, "verifier.scorer", f"environment{IMPLEMENTATION}", *LISTED_PATHS):
        for place, name in _places(table, key.split(".")):
            value, full = place[name], key.replace("*", "0")
            if isinstance(value, str) and (path := _path_in(full, value, place)) is not None:
                path = expanded(path, key)
                if not Path(path).is_absolute():
                    moved = os.path.relpath(start / path, other)
                    place[name] = with_file(value, moved) if names_code(full) else moved


def _places(table: Any, names: list[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the tables or lists that have a dotted key, each with its last name; `*` is every entry of a list."""
    name, *rest = names
    if name == "*":
        for at, each in enumerate(table if isinstance(table, list) else ()):
            yield from _places(each, rest) if rest else [(table, at)]
    elif isinstance(table, dict) and name in table:
        if rest:
            yield from _places(table[name], rest)
        else:
            yield table, name


def _path_in(key: str, value: str, place: Any) -> str | None:
    """Return the path in a value, None where it has none."""
    if names_code(key):
        return file_of(value)
    if key.endswith((".prompts", MODEL)) and value.startswith(HUB):
        return None
    if key.endswith(MODEL):
        choice = SCORERS.get(place.get("scorer", ""))
        return value if choice is not None and choice.has_model else None
    if key.endswith(".source"):  # a profile's name, or figures
        is_path = place.get("kind") != "stated" and ("/" in value or "." in value)
        return value if is_path else None
    return value


def with_variables(value: Any, key: str = "") -> Any:
    """Return a table, list or value with environment variables in its texts; see `expanded` for the errors."""
    if isinstance(value, dict):
        inner = ((name, each, join_key(key, name)) for name, each in value.items())
        return {name: with_variables(each, path) for name, each, path in inner}
    if isinstance(value, list):
        return [with_variables(each, join_key(key, at)) for at, each in enumerate(value)]
    return expanded(value, key) if isinstance(value, str) else value


def expanded(text: str, key: str) -> str:
    """Return a text with the values of its environment variables; that of `SECRET_KEY` stays as it is.

    Raises:
        RunError: a variable is not set, or has a secret, which records would have.
    """
    for name in VARIABLE.findall(text):
        if name not in os.environ:
            raise RunError(key, text, text=_unset(key, name))
        if key != SECRET_KEY and SECRET_NAMES.search(name):
            what = f"{key}: the environment variable {name} is named like a secret, and records have what stands here"
            raise RunError(
                key, text, text=f"{what}: only {SECRET_KEY} takes secrets; rename it if it is none"
            )
    return text if key == SECRET_KEY else VARIABLE.sub(lambda each: os.environ[each[1]], text)


def is_variable(text: str) -> bool:
    """Return whether a text is one environment variable, as `${NAME}`."""
    return VARIABLE.fullmatch(text) is not None


def secret_of(text: str | None) -> str | None:
    """Return the value of the environment variable in `SECRET_KEY`, None without one.

    Raises:
        RunError: the variable is not set.
    """
    found = VARIABLE.fullmatch(text or "")
    if found is None:
        return None
    if found[1] not in os.environ:
        raise RunError(SECRET_KEY, text, text=_unset(SECRET_KEY, found[1]))
    return os.environ[found[1]]


def _unset(key: str, name: str) -> str:
    what = f"{key}: the environment variable {name} is not set"
    return f"{what}: export {name}=VALUE" + (
        "" if key == SECRET_KEY else ", or write the value there"
    )

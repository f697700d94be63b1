"""Dotted keys of a run file such as `cluster.links.0.latency`: build them, split them, and set them as `--set key=value` does."""

from __future__ import annotations

import json
import re
from typing import Any

from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.reading import parse_toml

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^."]+')
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def join_key(parent: str, name: str | int) -> str:
    """Return the key of an entry of a table or list; as in TOML a name with a dot or a space is quoted."""
    part = str(name)
    if not _BARE.fullmatch(part):
        part = json.dumps(part, ensure_ascii=not part.isprintable())
    return f"{parent}.{part}" if parent else part


def pool_key(pool: str, name: str) -> str:
    """Return the key of one thing that a pool says."""
    return join_key(join_key("cluster.pools", pool), name)


def split_key(key: str) -> list[str]:
    """Return the names that a dotted key is made of.

    Raises:
        ValueError: the key is empty, or has an empty name or an open quote.
    """
    parts = _PART.findall(key)
    if not parts or ".".join(parts) != key:
        raise ValueError(f"{key!r} is not a dotted key")
    return [json.loads(part) if part.startswith('"') else part for part in parts]


def place_of(table: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table that contains a key, and the key's name in it. A missing table is created.

    Only for keys that the project itself spells out: their names have no quotes and no list
    indices.
    """
    *parents, last = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    return table, last


TRAINER, FOLLOWERS = "trainer", "followers"


def trainer_key(trainer: int) -> str:
    """Return the key of a trainer's section, the leading one first."""
    return f"{TRAINER}.{trainer}" if trainer else TRAINER


def is_list(table: dict[str, Any]) -> bool:
    """Return whether a run file's table has its trainers in a list."""
    return isinstance(table.get(TRAINER), list)


def full_key(table: dict[str, Any], parts: list[str]) -> list[str]:
    """Return a dotted key's parts, with the index of the primary trainer if the key names no trainer."""
    if is_list(table) and parts[0] == TRAINER and len(parts) > 1 and not parts[1].isdigit():
        return [TRAINER, "0", *parts[1:]]
    return parts


def split_trainers(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with the primary trainer separate from secondary trainers. The table must have no errors."""
    if not is_list(table):
        return table
    leader, *followers = table[TRAINER]
    return {**table, TRAINER: leader, FOLLOWERS: followers}


def join_trainers(table: dict[str, Any]) -> dict[str, Any]:
    """Reverse `split_trainers`."""
    followers = table.pop(FOLLOWERS, [])
    if followers:
        table[TRAINER] = [table[TRAINER], *followers]
    return table


INSTEAD: dict[tuple[str, ...], str] = {("model", "path"): "name", ("model", "name"): "path"}
"""Pairs of exclusive keys: setting one removes the other, for example in a plan that names its
model.
"""


def override(table: dict[str, Any], change: str) -> None:
    """Set one dotted key, as `key=value` says; tables on the way are made, entries of lists are numbered from 0.

    Where a section has one of two keys (`INSTEAD`), the other one goes.

    Raises:
        RunError: the text is no `key=value`, or the key leads through what is no table.
    """
    name, separator, text = change.partition("=")
    key = name.strip()
    if not separator or not _is_key(key):
        raise RunError(key, change, text=f"--set {shown(change)} must read key=value")
    value = read_value(text.strip())
    is_number = key in VERSIONS and not isinstance(value, str)
    set_value(table, key, text.strip() if is_number else value)


VERSIONS = ("costs.engine_version", "framework.version")
"""Keys whose text may read like a number: 0.10 is another version than 0.1."""


def set_value(table: dict[str, Any], key: str, value: object) -> None:
    """Set one dotted key to a value as TOML has it. None removes the key; see `override`."""
    *parents, last = full_key(table, split_key(key))
    place: Any = table
    path = ""
    for part in parents:
        path = join_key(path, part)
        place = _enter(place, part, path)
    if isinstance(place, list):
        place[_index(place, last, key)] = value
    elif value is None:
        place.pop(last, None)
    else:
        place[last] = value
        place.pop(INSTEAD.get((*parents, last)), None)


def _is_key(text: str) -> bool:
    try:
        return bool(split_key(text))
    except ValueError:
        return False


def _enter(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        inner = place[_index(place, part, path)]
    else:
        inner = place.setdefault(part, {})
    if not isinstance(inner, dict | list):
        text = f"--set {path}: {shown(inner)} is not a table"
        raise RunError(path, inner, dict, text)
    return inner


def _index(entries: list[Any], part: str, path: str) -> int:
    if part not in map(str, range(len(entries))):
        text = f"--set {path}: no entry {part!r} in a list of {len(entries)}"
        raise RunError(path, entries, list, text)
    return int(part)


def read_value(text: str) -> object:
    """Read a TOML value; other text becomes a string."""
    try:
        table = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text

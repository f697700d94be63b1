"""Replace keys of a run file's table: `--set rollout.replicas=8`, `--set cluster.links.0.latency="20 ms"`."""

from __future__ import annotations

import tomllib
from typing import Any

from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.keys import join_key, split_key
from streamrl.runfile.trainers import full_key

INSTEAD: dict[tuple[str, ...], str] = {("model", "path"): "name", ("model", "name"): "path"}
"""Keys of which a section has one: the one that is set takes the other's place, as of a plan that names its model."""


def override(table: dict[str, Any], change: str) -> None:
    """Set one dotted key, as `key=value` says; tables on the way are made, entries of lists are numbered from 0.

    Where a section has one of two keys (`INSTEAD`), the other one goes.

    Raises:
        RunError: the text is no `key=value`, or the key leads through what is no table.
    """
    name, separator, text = change.partition("=")
    key = name.strip()
    try:
        *parents, last = full_key(table, split_key(key))
    except ValueError:
        separator = ""
    if not separator:
        raise RunError(key, change, text=f"--set {shown(change)} must read key=value")
    place: Any = table
    path = ""
    for part in parents:
        path = join_key(path, part)
        place = _enter(place, part, path)
    if isinstance(place, list):
        place[_index(place, last, key)] = read_value(text.strip())
    else:
        place[last] = read_value(text.strip())
        place.pop(INSTEAD.get((*parents, last)), None)


def _enter(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        inner = place[_index(place, part, path)]
    else:
        inner = place.setdefault(part, {})
    if not isinstance(inner, dict | list):
        text = f"--set {path}: {shown(inner)} is no table"
        raise RunError(path, inner, dict, text)
    return inner


def _index(entries: list[Any], part: str, path: str) -> int:
    if part not in map(str, range(len(entries))):
        text = f"--set {path}: no entry {part!r} in a list of {len(entries)}"
        raise RunError(path, entries, list, text)
    return int(part)


def read_value(text: str) -> object:
    """Read a TOML value; what is none is a text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text

"""Read run files, changes and swept values that Python code gives as dicts, lists and numbers.

{"rollout.replicas": 8}          a change of one key
{"rollout": {"replicas": 8}}     the same
["rollout.replicas=8"]           the same, as `--set` takes it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.keys import join_key, override, read_value, set_value, split_key
from streamrl.runfile.reading import MOST_PARTS

Changes: TypeAlias = Iterable[str] | Mapping[str, object]
"""Texts `key=value`, or values by dotted key. A value of None removes the key."""


def apply_changes(table: dict[str, Any], changes: Changes) -> None:
    """Make changes to the table of a run file.

    Raises:
        RunError: a key or a value cannot be in a run file.
    """
    if isinstance(changes, Mapping):
        for key, value in _flat(changes, ""):
            set_value(table, key, value)
        return
    for change in [changes] if isinstance(changes, str) else changes:
        override(table, change)


def _flat(changes: Mapping[str, object], parent: str) -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each change."""
    for name, value in changes.items():
        key = join_key(parent, name) if parent else _checked(name)
        if isinstance(value, Mapping):
            _check_depth(key)
            yield from _flat(value, key)
        else:
            yield key, None if value is None else plain_value(value, key)


def _checked(key: object) -> str:
    try:
        if isinstance(key, str) and split_key(key):
            return key
    except ValueError:
        pass
    text = f"{shown(key)} is no key of a run file; write a dotted key such as 'rollout.replicas'"
    raise RunError(str(key), key, text=text)


def _check_depth(key: str) -> None:
    """Refuse a value that is nested too deeply, such as in a dict that contains itself."""
    if key.count(".") >= MOST_PARTS:
        first, *_ = split_key(key)
        text = f"{first} is nested more than {MOST_PARTS} times; a run file has tables in tables, at most a few"
        raise RunError(first, None, text=text)


def plain_table(table: Mapping[str, object], parent: str = "") -> dict[str, Any]:
    """Return a copy of a run file's table in the types that TOML has. Values of None are left out.

    Raises:
        RunError: a value has a type that a run file cannot hold.
    """
    found = {}
    names: Iterable[tuple[object, object]] = table.items()
    for name, value in names:
        if not isinstance(name, str):
            text = f"{parent or 'a run file'}: {shown(name)} is no key; keys are texts"
            raise RunError(parent, name, str, text)
        if value is not None:
            found[name] = plain_value(value, join_key(parent, name))
    return found


def plain_value(value: object, key: str) -> object:
    """Return a value in a type that TOML has: a path becomes a text, a tuple or an array a list."""
    _check_depth(key)
    match value:
        case bool() | int() | float() | str():
            return value
        case Mapping():
            return plain_table(value, key)
        case list() | tuple() | range():
            return [plain_value(each, join_key(key, place)) for place, each in enumerate(value)]
        case PurePath():
            return str(value)
        case _ if hasattr(value, "tolist"):  # of numpy or pandas
            return plain_value(value.tolist(), key)
        case _:
            text = f"{key} is a {type(value).__name__}, got {shown(value)}; a run file holds texts, numbers, lists and tables"
            raise RunError(key, value, text=text)


def value_text(value: object, key: str) -> str:
    """Return a value as `--set` takes it.

    Raises:
        RunError: it is a table, or of a type that a run file cannot hold.
    """
    plain = plain_value(value, key)
    if isinstance(plain, str):
        return plain if read_value(plain) == plain else json.dumps(plain, ensure_ascii=False)
    if isinstance(plain, dict):
        text = f"{key} is a table, got {shown(value)}; name the keys in it"
        raise RunError(key, value, text=text)
    is_float = isinstance(plain, float)  # TOML writes nan and inf as Python does
    return repr(plain) if is_float else json.dumps(plain, ensure_ascii=False)

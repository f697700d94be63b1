"""Change keys of a run, and write such changes as `--set` takes them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import msgspec

from streamrl.doctor.finding import Changes
from streamrl.runfile.config import Run
from streamrl.runfile.keys import join_key, split_key
from streamrl.runfile.overrides import read_value
from streamrl.runfile.section import Section
from streamrl.runfile.trainers import FOLLOWERS, TRAINER
from streamrl.runfile.units import BITS_PER_BYTE, Bandwidth, Duration, Size, read_quantity


def changed(run: Run, changes: Changes) -> Run:
    """Return the run with dotted keys replaced, unchecked.

    Raises:
        ValueError: a value is not of its key's type.
    """
    for key, value in changes.items():
        run = _put(run, path_of(key), value)
    return run


def value_of(run: Run, key: str) -> Any:
    """Return the value of a dotted key.

    Raises:
        LookupError: the run file has no such key.
    """
    return place_of(run, path_of(key))


def place_of(place: Any, names: Iterable[str]) -> Any:
    """Return what is at the end of a path through sections, tables and lists; `LookupError` where there is none."""
    for name in names:
        place = _enter(place, name)
    return place


def path_of(key: str) -> list[str]:
    """Return where a dotted key of a run file is in a `Run`, which has trainers that follow apart."""
    parts = split_key(key)
    if parts[0] != TRAINER or len(parts) == 1 or not parts[1].isdecimal():
        return parts
    number, rest = int(parts[1]), parts[2:]
    return [FOLLOWERS, str(number - 1), *rest] if number else [TRAINER, *rest]


def say(changes: Changes) -> str:
    """Write changes for people: "set rollout.replicas=4 rollout.tensor_parallel=2"."""
    settings = [f"{key}={toml(value)}" for key, value in changes.items() if value is not None]
    removed = [key for key, value in changes.items() if value is None]
    parts = ["set " + " ".join(settings)] if settings else []
    parts += ["remove " + " and ".join(removed)] if removed else []
    return " and ".join(parts)


def toml(value: object) -> str:
    """Write a value as `--set` reads it; a plain word needs no quotes."""
    if isinstance(value, str):
        is_word = bool(value) and all(c.isalnum() or c in "-_./" for c in value)
        return value if is_word and read_value(value) == value else _inline(value)
    return _inline(value)


def _inline(value: object) -> str:
    match value:
        case Section():
            found = {key: getattr(value, key) for key in value.__struct_fields__}
            return _inline(found)
        case Mapping():
            pairs = (f"{join_key('', key)} = {_inline(each)}" for key, each in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case Bandwidth():
            return f'"{value * BITS_PER_BYTE / 1e9:g} Gbps"'
        case Duration():
            return f'"{value * 1e3:g} ms"'
        case Size():
            return f'"{value / 1e9:g} GB"'
        case float():
            return repr(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return json.dumps(value, ensure_ascii=False)


def _enter(place: Any, part: str) -> Any:
    match place:
        case dict():
            return place[part]
        case list() | tuple() if part.isdecimal():
            return place[int(part)]
        case Section() if part in place.__struct_fields__:
            return getattr(place, part)
        case _:
            raise KeyError(part)


def _put(place: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    if isinstance(place, list | tuple):
        entries = list(place)
        entries[int(name)] = _put(entries[int(name)], rest, value)
        return type(place)(entries)
    if isinstance(place, dict):
        if value is None and not rest:
            return {key: each for key, each in place.items() if key != name}
        return {**place, name: _put(place[name], rest, value)}
    if rest:
        return msgspec.structs.replace(place, **{name: _put(getattr(place, name), rest, value)})
    kind = get_type_hints(type(place))[name]
    value = msgspec.convert(value, kind, dec_hook=read_quantity)
    return msgspec.structs.replace(place, **{name: value})

"""What keeps a run file's table from being a run: keys that are unknown or missing, values of a wrong type."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeGuard, get_args, get_origin

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.errors import Allowed, Bounds, OneOf, RunError, say, shown
from streamrl.runfile.keys import join_key
from streamrl.runfile.section import Section
from streamrl.runfile.sides_config import FollowerConfig
from streamrl.runfile.trainers import FOLLOWERS, TRAINER, is_list, trainer_key
from streamrl.runfile.units import QUANTITIES

LARGEST = 2**63 - 1
"""The largest whole number that TOML promises, and that a trace can hold."""
MOST_NEAR = 3
"""Keys that an unknown one may have been meant for."""
ALIKE = 0.8
"""How like a key of another section must be, by difflib's ratio, to have been meant."""

Kind = Any
"""A type that a key of the run file has."""


def find_errors(table: object) -> Iterator[RunError]:
    """Yield all that keeps a table, as TOML gives it, from being a run; bounds and contradictions are not looked at."""
    if not isinstance(table, dict) or not is_list(table):
        yield from _errors(table, Run, "")
        return
    if not table[TRAINER]:
        text = "trainer is an empty list, got []: it must hold a trainer"
        yield RunError(TRAINER, [], Bounds(1), text)
        return
    for trainer, entry in enumerate(table[TRAINER]):
        if not isinstance(entry, dict):
            yield from _errors(entry, FollowerConfig, f"{TRAINER}.{trainer}")
            return
    leader, *followers = table[TRAINER]
    yield from _errors({**table, TRAINER: leader}, Run, "")
    for trainer, follower in enumerate(followers, start=1):
        yield from _errors(follower, FollowerConfig, trainer_key(trainer))


def _errors(value: Any, kind: Kind, key: str, or_absent: str = "") -> Iterator[RunError]:
    if NoneType in get_args(kind):
        if value is not None:
            yield from _errors(value, _without_none(kind), key, " (or absent)")
    elif kind in QUANTITIES:
        try:
            kind.parse(value)
        except ValueError as error:
            yield RunError(key, value, kind, f"{key}: {error}")
    elif not _fits(value, kind):
        text = f"{key or 'a run file'} must be {_say(kind)}{or_absent}, got {shown(value)}"
        yield RunError(key, value, _allowed(kind), text)
    elif _is_section(kind):
        yield from _section_errors(value, kind, key)
    else:
        for name, each, inner in _entries(value, kind):
            yield from _errors(each, inner, join_key(key, name))


def _fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a type, whatever its entries are."""
    allowed = _allowed(kind)
    if isinstance(allowed, OneOf):
        return any(type(value) is type(name) and value == name for name in allowed)
    if allowed is list:
        return isinstance(value, list | tuple) and len(value) == (_size(kind) or len(value))
    if allowed in (int, float) and type(value) is int:
        return abs(value) <= LARGEST
    return type(value) is allowed


def _allowed(kind: Kind) -> Allowed:
    """Return what a type allows, as errors have it."""
    kind = _without_none(kind)
    if _origin(kind) is Literal:
        return OneOf(get_args(kind))
    if _is_section(kind):
        return dict
    allowed: type = list if _origin(kind) is tuple else _origin(kind)
    return allowed


def _say(kind: Kind) -> str:
    size = _size(kind)
    return f"{say(_allowed(kind))} of {size}" if size else say(_allowed(kind))


def _size(kind: Kind) -> int:
    """Return the length of a pair or triple, 0 for a list that may be of any."""
    inner = get_args(kind)
    return len(inner) if _origin(kind) is tuple and Ellipsis not in inner else 0


def _entries(value: Any, kind: Kind) -> Iterator[tuple[str | int, Any, Kind]]:
    """Yield name, value and type of what is in a table or a list."""
    inner = get_args(kind)
    if _origin(kind) is dict:
        yield from ((name, each, inner[1]) for name, each in value.items())
    elif _origin(kind) in (list, tuple):
        kinds = inner if _size(kind) else inner[:1] * len(value)
        yield from zip(range(len(value)), value, kinds, strict=True)


def _origin(kind: Kind) -> Any:
    """Return the type without what it is made of: `list` of a list of names."""
    origin: Any = get_origin(kind)
    return kind if origin is None else origin


def _without_none(kind: Kind) -> Kind:
    options = [each for each in get_args(kind) if each is not NoneType]
    return options[0] if NoneType in get_args(kind) else kind


def _is_section(kind: Kind) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


# Sections -----------------------------------------------------------------------------------------


def _section_errors(table: dict[str, Any], kind: type[Section], key: str) -> Iterator[RunError]:
    fields = {field.name: field for field in _fields(kind) if field.name != FOLLOWERS}
    for name, value in table.items():
        if name in fields:
            yield from _errors(value, fields[name].type, join_key(key, name))
        else:
            yield _unknown(key, name, value, list(fields))
    for name, field in fields.items():
        if field.required and name not in table:
            missing = join_key(key, name)
            text = f"{missing} is missing: it must be {_say(field.type)}"
            yield RunError(missing, None, _allowed(field.type), text, problem="missing key")


def _unknown(section: str, name: str, value: object, names: list[str]) -> RunError:
    """Return the error of an unknown key, with those that may have been meant, the likeliest first."""
    key = join_key(section, name)
    near = difflib.get_close_matches(name, names, n=MOST_NEAR)
    elsewhere = difflib.get_close_matches(name, list(_places()), n=1, cutoff=ALIKE)
    meant = [join_key(section, each) for each in near]
    if name in _places():  # of another section
        meant = _places()[name] + meant
    elif not near and elsewhere:
        meant = _places()[elsewhere[0]]
    hint = f"; did you mean {meant[0].removeprefix(f'{section}.')}?" if meant else ""
    text = f"{key} is no key of a run file{hint}"
    return RunError(key, value, OneOf(meant), text, problem="unknown key")


@cache
def _places() -> dict[str, list[str]]:
    """Return where each name is a key; what is in tables by name, or in lists, is left out."""
    found: dict[str, list[str]] = {}
    open_sections: list[tuple[str, type[Section]]] = [("", Run)]
    for section, kind in open_sections:
        for field in (field for field in _fields(kind) if field.name != FOLLOWERS):
            key, inner = join_key(section, field.name), _without_none(field.type)
            found.setdefault(field.name, []).append(key)
            if _is_section(inner):
                open_sections.append((key, inner))
    return found


@cache
def _fields(kind: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)

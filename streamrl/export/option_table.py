"""The options of a framework by name, and the planned value of each (profiles/frameworks/options/NAME.toml)."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import msgspec

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.frameworks import Value

ExportName = Literal["verl", "nemo-rl", "slime", "openrlhf"]
"""Frameworks whose launch arguments can be written."""
FOLDER = PROFILES / "frameworks" / "options"


class Launch(ProfileTable, frozen=True, kw_only=True):
    """A command that starts training; the first one whose conditions hold is used."""

    command: str
    when: tuple[str, ...] = ()
    source: str


class LaunchOption(ProfileTable, frozen=True, kw_only=True):
    """One option and its value: from the plan, or constant."""

    name: str
    of: str = ""
    """Name of a planned value; empty if `value` has the constant."""
    value: Value = ""
    map: dict[str, Value] = msgspec.field(default_factory=dict)
    """The framework's names for planned values; a value outside the map is not supported."""
    when: tuple[str, ...] = ()
    """Facts of a plan that must all hold; "!fact" must not hold."""
    covers: tuple[str, ...] = ()
    """Further planned values that need no mention if this option is set."""
    adds: bool = False
    """Whether the key may be missing in the framework's file, so that Hydra has to add it."""
    source: str


class Relation(ProfileTable, frozen=True, kw_only=True):
    """A rule between options: a product equals another, or divides it; skipped if an option is not set."""

    product: tuple[str, ...]
    equals: tuple[str, ...] = ()
    divides: tuple[str, ...] = ()
    beside: str = msgspec.field(default="", name="with")
    """Another option that must be set for the rule to apply."""
    source: str


class Note(ProfileTable, frozen=True, kw_only=True):
    """A difference of the framework that no option changes."""

    text: str
    when: tuple[str, ...] = ()


class OptionTable(ProfileTable, frozen=True, kw_only=True):
    """All options of a framework that depend on a plan."""

    framework: ExportName
    style: Literal["assign", "flag"]
    """name=value, or --name value."""
    variables: dict[str, str]
    """Environment variables that the user must set, with their meaning."""
    launch: tuple[Launch, ...]
    options: tuple[LaunchOption, ...]
    relations: tuple[Relation, ...] = ()
    notes: tuple[Note, ...] = ()


@functools.cache
def load_options(name: ExportName) -> OptionTable:
    """Read profiles/frameworks/options/NAME.toml."""
    return read_profile(FOLDER / f"{name}.toml", OptionTable)


def export_name(name: str, key: str) -> ExportName:
    """Return a framework's name, checked to have a table of options.

    Raises:
        RunError: it has none; the error names `key`.
    """
    for known in get_args(ExportName):
        if known == name:
            found: ExportName = known
            return found
    known_names = get_args(ExportName)
    text = f"{key} must be one of {', '.join(known_names)}, whose options are known, got {name!r}"
    raise RunError(key, name, OneOf(known_names), text)

"""The options of a framework by name, as profiles/frameworks/options/NAME.toml has them: what of a plan each one takes."""

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
    """A command that starts training; the first that holds is the one."""

    command: str
    when: tuple[str, ...] = ()
    source: str


class LaunchOption(ProfileTable, frozen=True, kw_only=True):
    """One option, and what it is given: a value of the plan, or one that never changes."""

    name: str
    of: str = ""
    """A value of the plan by name; empty where `value` says it."""
    value: Value = ""
    map: dict[str, Value] = msgspec.field(default_factory=dict)
    """What the framework calls the plan's value; what is not in it the framework has not."""
    when: tuple[str, ...] = ()
    """Facts of a plan that must all hold; "!fact": must not."""
    covers: tuple[str, ...] = ()
    """Further values of the plan that need no mention once this option is there."""
    adds: bool = False
    """Whether the key may be missing in the file that it is set over, so that Hydra has to add it."""
    source: str


class Relation(ProfileTable, frozen=True, kw_only=True):
    """What must hold between options: a product equals another, or divides it; left out where an option is not there."""

    product: tuple[str, ...]
    equals: tuple[str, ...] = ()
    divides: tuple[str, ...] = ()
    beside: str = msgspec.field(default="", name="with")
    """An option that must be there too for it."""
    source: str


class Note(ProfileTable, frozen=True, kw_only=True):
    """What the framework does otherwise, and no option changes."""

    text: str
    when: tuple[str, ...] = ()


class OptionTable(ProfileTable, frozen=True, kw_only=True):
    """All options of a framework that a plan has something to say to."""

    framework: ExportName
    style: Literal["assign", "flag"]
    """name=value, or --name value."""
    variables: dict[str, str]
    """Of the environment, that whoever starts it must set, and what each is."""
    launch: tuple[Launch, ...]
    options: tuple[LaunchOption, ...]
    relations: tuple[Relation, ...] = ()
    notes: tuple[Note, ...] = ()


@functools.cache
def load_options(name: ExportName) -> OptionTable:
    """Read profiles/frameworks/options/NAME.toml."""
    return read_profile(FOLDER / f"{name}.toml", OptionTable)


def export_name(name: str, key: str) -> ExportName:
    """Return a framework's name as one whose options are known.

    Raises:
        RunError: they are not; `key` is named.
    """
    for known in get_args(ExportName):
        if known == name:
            found: ExportName = known
            return found
    known_names = get_args(ExportName)
    text = f"{key} must be one of {', '.join(known_names)}, whose options are known, got {name!r}"
    raise RunError(key, name, OneOf(known_names), text)

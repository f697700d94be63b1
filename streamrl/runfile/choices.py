"""Look up the class that a value of a run file names, and let users bring their own classes.

A value is one of three:

- a name of this package, such as "grpo";
- a name that an installed package declares as an entry point of the group, such as `streamrl.algorithms`;
- "module:Class", for any module that Python can import.

Only the last two import code from outside this package. Classes are imported at their first use, so that a list
may name classes of any room, and libraries that only they need.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar, get_args, get_origin

from streamrl.runfile.errors import OneOf, RunError, shown

_Base = TypeVar("_Base")


class ChoiceList:
    """The classes that one key chooses among, by name."""

    def __init__(
        self, key: str, group: str, base: str, own: Mapping[str, str], required: str | None = None
    ) -> None:
        """List the choices of a key.

        Args:
            key: the dotted key, for errors.
            group: the entry points of installed packages that add choices.
            base: "module:Class" that every choice is a subclass of.
            own: "module:Class" of each choice in this package, by name.
            required: the method that every choice must define; the base has none to fall back on.
        """
        self.key = key
        self.group = group
        self.base = base
        self.own = own
        self.required = required
        self._loaded: dict[str, type] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names: those of this package, then those of installed packages."""
        return (*self.own, *(name for name in sorted(self._installed()) if name not in self.own))

    def knows(self, value: object) -> bool:
        """Return whether a value is a name of the list, or has the form "module:Class"."""
        if not isinstance(value, str):
            return False
        return value in self.own or ":" in value or value in self._installed()

    def path_of(self, name: str) -> str:
        """Return a choice as "module:Class", which any process can import without entry points.

        Raises:
            KeyError: no choice has this name.
        """
        if name in self.own:
            return self.own[name]
        return name if ":" in name else self._installed()[name].value

    def find_error(self, value: object, key: str, or_absent: str = "") -> RunError | None:
        """Return why a value chooses nothing, at a key of a run file; None where it is right."""
        if isinstance(value, str) and value in self.own:
            return None
        if not isinstance(value, str) or not self.knows(value):
            allowed = OneOf(self.names())
            text = f"{key} must be {allowed}{or_absent}, got {shown(value)}"
            return RunError(key, value, allowed, text)
        try:
            self._load(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the module is the user's: its import may raise or exit
            text = (
                f"{key} {shown(value)} cannot be used: {_one_line(error)}; "
                f"make its module importable (PYTHONPATH or pip install), or use one of {', '.join(self.names())}"
            )
            return RunError(key, value, OneOf(self.names()), text)
        return None

    def class_of(self, name: str, base: type[_Base]) -> type[_Base]:
        """Return the class that a name chooses; `base` is the one that the list was made with.

        Raises:
            RunError: no class has this name, or it cannot be imported.
        """
        if name not in self._loaded:
            if error := self.find_error(name, self.key):
                raise error
            self._loaded[name] = self._load(name)
        found = self._loaded[name]
        assert issubclass(found, base)
        return found

    def _load(self, name: str) -> type:
        path = self.path_of(name)
        with redirect_stdout(sys.stderr):  # what a user's module prints must not mix with --json
            found = import_object(path)
        base = import_object(self.base)
        assert isinstance(base, type)
        if not isinstance(found, type) or not issubclass(found, base):
            raise TypeError(f"{path} is not a subclass of {self.base.replace(':', '.')}")
        needed = self.required
        if needed is not None and getattr(found, needed) is getattr(base, needed):
            raise TypeError(f"{path} does not define {needed}")
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}


def import_object(path: str) -> object:
    """Import the object that "module:NAME" names.

    Raises:
        ImportError: there is no such module, or it has no such name.
    """
    module, _, name = path.rpartition(":")
    found = import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"module {module} has no {name}")
    named: object = getattr(found, name)
    return named


def choices_of(kind: object) -> ChoiceList | None:
    """Return the list that a type `Annotated[str, ChoiceList(...)]` takes its values from; None for other types."""
    notes = get_args(kind)[1:] if get_origin(kind) is not None else ()
    return next((note for note in notes if isinstance(note, ChoiceList)), None)


def _one_line(error: BaseException) -> str:
    """Return an error's type and text in one line, unprintable characters escaped."""
    text = " ".join(str(error).split())
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from traceback import format_exception
from typing import TypeVar, get_args, get_origin

from streamrl.runfile.errors import OneOf, RunError, shown

_Base = TypeVar("_Base")
_Made = TypeVar("_Made")
FORM = "module:Class"


class ChoiceError(RunError):
    """A value that chooses nothing, or a class from outside this package that cannot be used here."""


class ExtensionError(RuntimeError):
    """A fault of a class from outside this package, not of the run file. The message names key and class."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message, traceback)  # so that it can be pickled
        self.traceback = traceback
        """Lines of the traceback of the error that the class raised; empty if it raised none."""

    def __str__(self) -> str:
        return str(self.args[0])


class ChoiceList:
    """The classes that one key chooses among, by name."""

    def __init__(
        self,
        key: str,
        group: str,
        base: str,
        own: Mapping[str, str],
        required: str | None = None,
        is_made_alone: bool = True,
    ) -> None:
        """List the choices of a key.

        Args:
            key: the dotted key, for errors.
            group: the entry points of installed packages that add choices.
            base: "module:Class" that every choice is a subclass of.
            own: "module:Class" of each choice in this package, by name.
            required: the method or attribute that every choice must define; the base has none to fall back on.
            is_made_alone: whether its constructor takes no arguments, so that a check can call it.
        """
        self.key = key
        self.group = group
        self.base = base
        self.own = own
        self.required = required
        self.is_made_alone = is_made_alone
        self._loaded: dict[str, type] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names: those of this package, then those of installed packages."""
        return (*self.own, *(name for name in sorted(self._installed()) if name not in self.own))

    def knows(self, value: object) -> bool:
        """Return whether a value is a name of the list, or has the form "module:Class"."""
        if not isinstance(value, str):
            return False
        return value in self.own or has_form(value) or value in self._installed()

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
            form = f" or {FORM}" if isinstance(value, str) and set(value) & set(".:") else ""
            text = f"{key} must be {allowed}{form}{or_absent}, got {shown(value)}"
            return ChoiceError(key, value, allowed, text)
        try:
            found = self._load(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the module is the user's: its import may raise or exit
            fix = "make its module importable (PYTHONPATH or pip install)"
            return self.refusal(value, f"cannot be used: {one_line(error)}; {fix}", key)
        try:
            if self.is_made_alone:
                self.make(value, found, key)
        except RunError as error:
            return error
        return None

    def make(self, name: str, make: Callable[[], _Made], key: str | None = None) -> _Made:
        """Return what `make` returns, which makes the object of a choice, or imports what it names.

        Raises:
            RunError: the choice is from outside this package, and `make` raised an error.
        """
        if name in self.own:
            return make()
        try:
            with redirect_stdout(sys.stderr):
                return make()
        except RunError:
            raise
        except (Exception, SystemExit) as error:
            text = f"cannot be used: {one_line(error)}; mend it"
            raise self.refusal(name, text, key) from error

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """Turn errors of the object of a choice into an `ExtensionError`, if it is from outside this package."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if name in self.own or isinstance(error, ExtensionError):
                raise
            trace = "".join(format_exception(error))
            raise self.fault(name, f"raised {one_line(error)}", trace) from error

    def fault(self, name: str, what: str, traceback: str = "") -> ExtensionError:
        """Return the error that says what the object of a choice did wrong."""
        return ExtensionError(f"{self.key} {shown(name)} {what}", traceback)

    def refusal(self, name: str, why: str, key: str | None = None) -> RunError:
        """Return the error that says why a choice cannot be used."""
        key, names = key or self.key, OneOf(self.names())
        text = f"{key} {shown(name)} {why}, or use one of {', '.join(self.names())}"
        return ChoiceError(key, name, names, text)

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
        with redirect_stdout(sys.stderr):  # what users' code prints must not mix with --json
            found = import_object(path)
        base = import_object(self.base)
        assert isinstance(base, type)
        if not isinstance(found, type) or not issubclass(found, base):
            raise TypeError(f"{path} is not a subclass of {self.base.replace(':', '.')}")
        needed = self.required
        if needed and getattr(found, needed, None) is getattr(base, needed, None):
            raise TypeError(f"{path} does not define {needed}")
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}


def has_form(path: str) -> bool:
    """Return whether a text has the form "module:NAME"."""
    module, _, name = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


def import_object(path: str) -> object:
    """Import the object that "module:NAME" names.

    Raises:
        ImportError: the path has another form, there is no such module, or it has no such name.
    """
    if not has_form(path):
        raise ImportError(f"{path!r} does not have the form {FORM}")
    module, _, name = path.partition(":")
    found = import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"module {module} has no {name}")
    named: object = getattr(found, name)
    return named


def choices_of(kind: object) -> ChoiceList | None:
    """Return the list that a type `Annotated[str, ChoiceList(...)]` takes its values from; None for other types."""
    notes = get_args(kind)[1:] if get_origin(kind) is not None else ()
    return next((note for note in notes if isinstance(note, ChoiceList)), None)


def one_line(error: BaseException) -> str:
    """Return an error's type and text in one line, unprintable characters escaped."""
    text = " ".join(str(error).split())
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

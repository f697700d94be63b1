"""What is wrong with a run file: a line for people, and the same as data for what mends it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from itertools import islice
from math import inf, isfinite
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeAlias

from streamrl.runfile.units import Bandwidth, Duration, Size

MOST_SHOWN = 80
"""Maximum characters of a value in an error."""


class OneOf(tuple[object, ...]):
    """Allowed values; for a list, allowed entries."""

    def __str__(self) -> str:
        return repr(self[0]) if len(self) == 1 else f"one of {', '.join(map(str, self))}"


class Bounds(NamedTuple):
    """Finite numbers from `least` to `most`."""

    least: float
    most: float = inf
    excludes_least: bool = False

    def hold(self, number: float) -> bool:
        """Whether a number lies within."""
        is_above = number > self.least if self.excludes_least else number >= self.least
        return isfinite(number) and is_above and number <= self.most

    def __str__(self) -> str:
        return self.text(str)

    def text(self, show: Callable[[float], str]) -> str:
        """Return the bounds in words, given how to write a number."""
        if self.most == inf:
            return f"{'above' if self.excludes_least else 'at least'} {show(self.least)}"
        opening = "(" if self.excludes_least else "["
        return f"in {opening}{show(self.least)}, {show(self.most)}]"


Allowed: TypeAlias = OneOf | Bounds | type
"""The allowed values; a type (bool, int, float, str, list, dict, or a quantity) allows any of its
values.
"""
Problem = Literal["unknown key", "unused key", "missing key", "wrong value"]

TYPES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a table",
    UnionType: "a text, a number, or true or false",
    Bandwidth: "a bandwidth such as '80 Gbps'",
    Duration: "a duration such as '20 ms'",
    Size: "a size such as '96 GB'",
}


class RunError(ValueError):
    """One error in a run file: one line with the key, its value and what is allowed."""

    def __init__(
        self,
        key: str,
        value: object,
        allowed: Allowed | None = None,
        text: str = "",
        others: tuple[str, ...] = (),
        problem: Problem = "wrong value",
    ) -> None:
        """Say what is wrong.

        Args:
            key: the dotted key, as `--set` takes it.
            value: what it has, as the run file or the run has it; None where it is missing.
            allowed: the values that it may have. For an unknown key: the keys that may have been meant. For an
                unused key: the values of `others` with which it is read. None if other keys decide.
            text: the line, where "KEY must be ALLOWED, got VALUE" does not say it.
            others: further keys, of which a change may help as well, the likeliest first.
            problem: what kind of error it is.
        """
        super().__init__(
            key, value, allowed, text, others, problem
        )  # so that pickle makes it again
        self.key = key
        self.value = value
        self.allowed = allowed
        self.others = others
        self.problem = problem
        self._text = text
        self.further: tuple[RunError, ...] = ()
        """Further errors of the same run file, if it has several."""

    def __str__(self) -> str:
        return self._text or f"{self.key} must be {say(self.allowed)}, got {shown(self.value)}"


MOST_ERRORS = 100
"""Maximum errors of a run file. For each unknown key, similar keys are searched."""


def system_remedy(error: OSError) -> str:
    """Return what to do if the disk, or a limit of this process, allows no more, as the end of a message; else empty."""
    match error.errno:
        case errno.ENOSPC:
            return "; free some space there"
        case errno.EDQUOT:
            return "; free some space there, or raise the quota"
        case errno.EFBIG:
            return "; raise the limit of file sizes (ulimit -f)"
        case errno.EMFILE:
            return "; raise the limit of open files (ulimit -n)"
        case errno.EAGAIN:
            return "; raise the limit of processes (ulimit -u)"
    return ""


def raise_all(errors: Iterable[RunError]) -> None:
    """Raise the first of some errors, with the others as its `further`, at most `MOST_ERRORS`; do nothing if there are none."""
    found = list(islice(errors, MOST_ERRORS))
    if found:
        first, *others = found
        first.further = tuple(others)
        raise first


def say(allowed: Allowed | None) -> str:
    """Return what a value may be in words: "at least 1", "a whole number"."""
    return TYPES[allowed] if isinstance(allowed, type) else str(allowed)


def shown(value: object) -> str:
    """Return a value for an error message: on one line, and shortened if long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class RepeatedKeyError(ValueError):
    """A JSON object that has a key twice, of which only the last value would count."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as `object_pairs_hook` of `json.loads`.

    Raises:
        RepeatedKeyError: it has a key twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {twice!r} appears twice in one object; remove one")
    return found

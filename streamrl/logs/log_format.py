"""How one framework writes its logs: which lines hold figures, and which key is which column; a file of profiles/logs each."""

from __future__ import annotations

import datetime
import re
from functools import cache
from typing import Literal

import msgspec

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.logs.measured_steps import COLUMNS

Keys = tuple[str | tuple[str, ...], ...]
"""Aliases, the first that is there counts; a list among them is summed up, as far as its keys are there."""


class LinePattern(ProfileTable, frozen=True, kw_only=True):
    """Lines of one kind."""

    pattern: str
    """A regular expression. dict and pairs: the group `values`, and `step` where the line says it; item: `key` and `value`,
    of the step that is told before or after; step: `step`, with which a new one begins."""
    reads: Literal["dict", "pairs", "item", "step"]
    """dict: as Python prints one; pairs: `key:value` between ` - `."""

    def __post_init__(self) -> None:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r}: {error}") from None
        needed = {"item": {"key", "value"}, "step": {"step"}}.get(self.reads, {"values"})
        if missing := needed - groups:
            raise ValueError(f"pattern {self.pattern!r} lacks the group {', '.join(missing)}")


class LogFormat(ProfileTable, frozen=True, kw_only=True):
    """One framework's logs."""

    name: str
    source: str
    """Repository and files that write them."""
    commit: str
    """At which they were read."""
    date: datetime.date
    step_keys: tuple[str, ...] = ()
    """Keys that hold the number of the step in rows of JSON or CSV."""
    nested: str | None = None
    """Key of a row under which its figures stand, where they do."""
    rows: str | None = None
    """Key of a JSON file under which its rows stand, where they do."""
    lines: tuple[LinePattern, ...] = ()
    columns: dict[str, Keys] = msgspec.field(default_factory=dict)
    synchronous: dict[str, Keys] = msgspec.field(default_factory=dict)
    """Columns of modes in which generation and training take turns, beside or in place of those above."""
    asynchronous: dict[str, Keys] = msgspec.field(default_factory=dict)
    asynchronous_marks: tuple[str, ...] = ()
    """What keys begin with that only asynchronous modes write."""
    is_told_by_keys: bool = True
    """Whether an asynchronous mode always leaves a mark; where not, a key means one thing or the other, and the run file,
    or who imports, has to say."""
    ignores: tuple[str, ...] = ()
    """Keys that look like stages and are not, for readers of this file."""

    def __post_init__(self) -> None:
        for table in (self.columns, self.synchronous, self.asynchronous):
            for column in table:
                if column not in COLUMNS:
                    raise ValueError(f"{column!r} is no column; there is {', '.join(COLUMNS)}")

    @property
    def column_of(self) -> dict[str, str]:
        """Return the column that each known key is read for, whichever mode writes it."""
        found: dict[str, str] = {}
        for table in (self.columns, self.synchronous, self.asynchronous):
            for column, aliases in table.items():
                for alias in aliases:
                    names = [alias] if isinstance(alias, str) else alias
                    found.update(dict.fromkeys(names, column))
        return found

    @property
    def told(self) -> str:
        """Say whose logs these are, for a source."""
        return f"log of {self.name}, keys of {self.source.split(':')[0]} @ {self.commit[:9]}"

    def keys(self, *, is_asynchronous: bool) -> dict[str, Keys]:
        """Return by column the keys that it is read from."""
        return {**self.columns, **(self.asynchronous if is_asynchronous else self.synchronous)}


def known_formats() -> list[str]:
    """Return the names of all formats of profiles/logs."""
    return sorted(path.stem for path in (PROFILES / "logs").glob("*.toml"))


@cache
def load_format(name: str) -> LogFormat:
    """Read a format; `ValueError` with all names where there is none of this one."""
    known = known_formats()
    if name not in known:
        raise ValueError(f"no format {name!r} in profiles/logs; there is {', '.join(known)}")
    return read_profile(PROFILES / "logs" / f"{name}.toml", LogFormat)


def pick(keys: Keys, values: dict[str, float]) -> float | None:
    """Return what a column is by the figures of a step; None where none of its keys is there."""
    for alias in keys:
        names = [alias] if isinstance(alias, str) else alias
        found = [values[name] for name in names if name in values]
        if found:
            return sum(found)
    return None

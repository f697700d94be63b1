"""Describe the logs of frameworks: lines, keys and columns, as the files of profiles/logs have them."""

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
"""Alternative keys. The first existing one counts. For a list among them, its existing keys are summed."""


class LinePattern(ProfileTable, frozen=True, kw_only=True):
    """Lines of one kind."""

    pattern: str
    """A regular expression. Its groups depend on `reads`. dict, pairs, bars and cells: `values`, and
    `step` if the line has it. item: `key` and `value`, for the step before or after. step: `step`, with
    which a new step begins. progress: `step` of `total`, and `value` in the unit `unit` (s/it or it/s).
    """
    reads: Literal[
        "dict", "pairs", "bars", "cells", "item", "step", "start", "begin", "end", "progress"
    ]
    """How the values are written.

    - dict: a printed Python dict, or JSON
    - pairs: `key:value` between ` - `
    - bars: `key: value unit` between ` | `
    - cells: a table of keys and values between `│`, from `╒` to `╛`
    - start: nothing. A run starts. Lines before its first step belong to none.
    - begin: nothing. A step begins, and the line does not have its number.
    - end: nothing. The current step is complete. Without this line, a last step is cut off.
    - progress: a bar of tqdm. Its seconds count only if nothing else has the seconds of steps.
    """
    prefix: str = ""
    """Text before the key of an item."""
    incomplete: str | None = None
    """An expression for the first part of such a line, if a terminal wrapped it. The next line continues it."""
    after: str | None = None
    """Of `begin`: the key that the current step must have. Without it, the step goes on."""

    def __post_init__(self) -> None:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r}: {error}") from None
        needed = {
            "item": {"key", "value"},
            "step": {"step"},
            "progress": {"step", "total", "value", "unit"},
            "start": set(),
            "begin": set(),
            "end": set(),
        }.get(self.reads, {"values"})
        if missing := needed - groups:
            raise ValueError(f"pattern {self.pattern!r} needs the named group {', '.join(missing)}")


class LogFormat(ProfileTable, frozen=True, kw_only=True):
    """The logs of one framework."""

    name: str
    source: str
    """Repository and files that write them."""
    commit: str
    """Commit at which these files were read."""
    date: datetime.date
    step_keys: tuple[str, ...] = ()
    """Keys with the number of the step in rows of JSON or CSV."""
    nested: str | None = None
    """Key of a row that contains its figures, if they are nested."""
    rows: str | None = None
    """Key of a JSON file that contains its rows, if they are nested."""
    lines: tuple[LinePattern, ...] = ()
    unnumbered: tuple[LinePattern, ...] = ()
    """Lines that do not say their step. They are read if no line of `lines` has a figure."""
    record: str | None = None
    """An expression for the first line of a record. All lines up to the next record are read as one, because a record may
    have several lines, and a terminal may wrap them.
    """
    rising: tuple[str, ...] = ()
    """Keys that never fall during a run, of formats whose lines do not say their step."""
    late: dict[str, str] = msgspec.field(default_factory=dict)
    """Keys with the value of the step before, in rows that also have the second key."""
    columns: dict[str, Keys] = msgspec.field(default_factory=dict)
    synchronous: dict[str, Keys] = msgspec.field(default_factory=dict)
    """Columns of modes in which generation and training alternate, in addition to or in place of those above."""
    asynchronous: dict[str, Keys] = msgspec.field(default_factory=dict)
    asynchronous_marks: tuple[str, ...] = ()
    """Prefixes of keys that only asynchronous modes write."""
    level_keys: tuple[str, ...] = ()
    """Keys with the number of steps that generation is ahead of training; 0 means that they alternate."""
    is_told_by_keys: bool = True
    """Whether an asynchronous mode always writes such a key. If not, the meaning of a key depends on
    the mode, which the run file or the user must state.
    """
    ignores: tuple[str, ...] = ()
    """Keys that look like stages but are not, for readers of this file."""

    def __post_init__(self) -> None:
        for table in (self.columns, self.synchronous, self.asynchronous):
            for column in table:
                if column not in COLUMNS:
                    raise ValueError(
                        f"{column!r} is not a column; the columns are {', '.join(COLUMNS)}"
                    )

    @property
    def column_of(self) -> dict[str, str]:
        """Return the column of each known key, in any mode."""
        found: dict[str, str] = {}
        for table in (self.columns, self.synchronous, self.asynchronous):
            for column, aliases in table.items():
                for alias in aliases:
                    names = [alias] if isinstance(alias, str) else alias
                    found.update(dict.fromkeys(names, column))
        return found

    @property
    def description(self) -> str:
        """Return the name of the framework and its files, for a source."""
        return f"log of {self.name}, keys of {self.source.split(':')[0]} @ {self.commit[:9]}"

    def keys(self, *, is_asynchronous: bool) -> dict[str, Keys]:
        """Return the keys of each column."""
        return {**self.columns, **(self.asynchronous if is_asynchronous else self.synchronous)}


def known_formats() -> list[str]:
    """Return the names of all formats of profiles/logs."""
    return sorted(path.stem for path in (PROFILES / "logs").glob("*.toml"))


@cache
def load_format(name: str) -> LogFormat:
    """Return a format; a `ValueError` for an unknown one lists all names."""
    known = known_formats()
    if name not in known:
        raise ValueError(f"no format {name!r} in profiles/logs; the formats are {', '.join(known)}")
    return read_profile(PROFILES / "logs" / f"{name}.toml", LogFormat)


def pick(keys: Keys, values: dict[str, float]) -> float | None:
    """Return a column's value from the figures of a step; None if none of its keys exists."""
    for alias in keys:
        names = [alias] if isinstance(alias, str) else alias
        found = [values[name] for name in names if name in values]
        if found:
            return sum(found)
    return None

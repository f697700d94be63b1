"""Read the steps in a training framework's log (text, JSON lines, JSON or CSV) by formats that profiles/logs describes.

The figures of each step in a log, by the names that the framework gave them: of text, JSON lines, JSON or CSV.

What a format knows nothing of may be anything. What it knows and cannot be (text for a number, negative seconds, nan, a
step that is told twice) is kept as damage, with where it stands, for whoever takes the log to be of that format; a last
line that was cut off while it was written is left out and noted.
"""

from __future__ import annotations

import ast
import datetime
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.logs.measured_steps import COLUMNS, SECONDS, MeasuredStep, MeasuredSteps, parse_steps
from streamrl.runfile.errors import shown
from streamrl.workload.data_files import read_csv

LiteralValue = dict[str, object]
NAMES: dict[str, object] = {"nan": nan, "inf": inf, "NaN": nan, "Infinity": inf}
WRAPPERS = ("float", "int", "tensor", "array", "bool")
"""What the names of those end or begin with that numbers stand in, such as np.float64(1.5) and tensor(2)."""


def read_dict(text: str) -> LiteralValue:
    """Read a dict with text keys.

    Raises:
        ValueError: it is none, or has anything in it but literals.
    """
    found = _parse(text)
    if not isinstance(found, dict):
        raise ValueError("not a dict")
    return {str(key): value for key, value in found.items()}


def read_number(value: object) -> float | None:
    """Return a number, or the one that a text or a literal says; None where it is none."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
        try:
            value = _parse(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # of a whole number with hundreds of digits
        return inf


def _parse(text: str) -> object:
    try:
        with warnings.catch_warnings(action="ignore"):  # of literals that Python finds odd
            return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"not a literal: {getattr(error, 'msg', error)}") from None


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(ast.USub(), operand):
            number = _value(operand)
            if isinstance(number, int | float):
                return -number
        case ast.Dict(keys, values) if all(key is not None for key in keys):
            return {
                _key(key): _value(value) for key, value in zip(keys, values, strict=True) if key
            }
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [_value(element) for element in elements]
        case ast.Call(func, [argument, *_]) if _is_wrapper(func):
            return _value(argument)
        case _:
            pass
    raise ValueError(f"{ast.unparse(node)[:40]} is no literal")


def _key(node: ast.expr) -> str:
    return str(_value(node))


def _is_wrapper(node: ast.expr) -> bool:
    """Whether a call is of a type that numbers stand in; nothing is called."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.rstrip("0123456789") in WRAPPERS


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


Figures = dict[str, float]
"""Numbers by key."""
Records = dict[int, Figures]
"""Figures by step, in order."""
WANDB_SEPARATOR = " - "
"""Between a run's name and a key, in the header of a table that wandb exports."""


@dataclass(slots=True)
class LogRecords:
    """What a file says by the keys of one format."""

    path: Path
    log: LogFormat
    steps: Records = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    """What known keys have that cannot be, each with its place: the first is reason to refuse the file."""
    notes: list[str] = field(default_factory=list)
    columns: dict[str, str] = field(init=False)
    """Which column each known key is read for."""

    def __post_init__(self) -> None:
        self.columns = self.log.column_of

    def numbers(self, row: Mapping[str, object], where: str) -> Figures:
        """Return what of a row are numbers, under keys without the run's name that wandb puts before them."""
        found: Figures = {}
        for key, value in row.items():
            name, number = key.rpartition(WANDB_SEPARATOR)[2], read_number(value)
            if number is not None and isfinite(number):
                found[name] = number
            elif (name in self.columns or name in self.log.step_keys) and _is_said(value):
                self.damage.append(f"{where}: {name} must be a finite number, got {shown(value)}")
        return found

    def enter(self, step: int, figures: Figures, where: str) -> None:
        """Enter what a row or a line says of a step."""
        own = self.steps.setdefault(step, {})
        for key, value in figures.items():
            column = self.columns.get(key)
            if column is None:
                continue
            unit = " s" if column in SECONDS else ""
            if value < 0:
                text = f"step {step}: {column} cannot be {value:g}{unit} ({key})"
                self.damage.append(f"{where}: {text}")
            if own.get(key, value) != value:
                text = (
                    f"step {step} is told twice: {key} is {own[key]:g}{unit}, then {value:g}{unit}"
                )
                self.damage.append(f"{where}: {text}")
        own.update(figures)

    def cut_off(self, damaged: int) -> None:
        """Take the damage since there were `damaged` for that of a last line that was cut off."""
        if len(self.damage) > damaged:
            del self.damage[damaged:]
            self.notes.append(_cut_off(self.path))


def _is_said(value: object) -> bool:
    """Whether a value says something: cells and keys may be empty."""
    return isinstance(value, int | float) or (isinstance(value, str) and bool(value.strip()))


def _cut_off(path: Path) -> str:
    return f"{path.name}: its last line is cut off, so what that says is left out"


def read_records(path: Path, log: LogFormat) -> LogRecords:
    """Read what a file has of each step, as far as a format knows its lines.

    Raises:
        ValueError: the file cannot be read, or a line that should hold figures does not.
    """
    found = LogRecords(path, log)
    if path.suffix in (".csv", ".gz"):
        _of_rows(found, ((f"{path}: row {n}", row) for n, row in enumerate(read_csv(path), 1)))
        return found
    text = _read_text(path)
    rows = _json_rows(found, text)
    if rows is None:
        _of_lines(found, text)
    else:
        _of_rows(found, rows)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


PlacedRow = tuple[str, Mapping[str, object]]
"""Where a row stands, and the row."""


def _json_rows(found: LogRecords, text: str) -> list[PlacedRow] | None:
    """Return the objects of JSON, or of JSON lines; None where the text is neither."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _json_lines(found, text)
    if isinstance(whole, dict) and found.log.rows is not None:
        whole = whole.get(found.log.rows, whole)
    rows = whole if isinstance(whole, list) else [whole]
    placed = enumerate(rows, start=1)
    return [(f"{found.path}: row {n}", row) for n, row in placed if isinstance(row, dict)]


def _json_lines(found: LogRecords, text: str) -> list[PlacedRow] | None:
    """Return the objects of JSON lines; None where the first is none: a Python dict, or a log.

    Raises:
        ValueError: a later one is none, and not the last, which may have been cut off.
    """
    rows: list[PlacedRow] = []
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not rows or not line.lstrip().startswith("{"):
                return None
            if number != lines[-1][0]:
                why = getattr(error, "msg", "nested too deeply")
                raise ValueError(f"{found.path}:{number}: no JSON: {why}") from None
            found.notes.append(_cut_off(found.path))
            break
        if isinstance(row, dict):
            rows.append((f"{found.path}:{number}", row))
    return rows


def _of_rows(found: LogRecords, rows: Iterable[PlacedRow]) -> None:
    """Merge rows of one step; those that do not say which are counted."""
    log = found.log
    for number, (where, row) in enumerate(rows, start=1):
        nested = row.get(log.nested) if log.nested else None
        figures = found.numbers({**row, **nested} if isinstance(nested, dict) else row, where)
        step = next((figures[key] for key in log.step_keys if key in figures), number)
        found.enter(int(step), figures, where)


def _of_lines(found: LogRecords, text: str) -> None:
    current = 0
    patterns = [(line, re.compile(line.pattern)) for line in found.log.lines]
    lines = re.split(r"[\r\n]+", text)
    for number, line in enumerate(lines, start=1):
        damaged = len(found.damage)
        for pattern, expression in patterns:
            match = expression.search(line)
            if match is None:
                continue
            where = f"{found.path}:{number}"
            try:
                if pattern.reads == "step":
                    current = int(match["step"])
                else:
                    figures = found.numbers(_values(pattern, match), where)
                    found.enter(_step_of(match, found, figures, current), figures, where)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            break
        if number == len(lines):  # one that ended would have an empty one behind it
            found.cut_off(damaged)


def _step_of(match: re.Match[str], found: LogRecords, figures: Figures, current: int) -> int:
    """Return the step that a line is of: as it says, as the line before it said, or the next."""
    if match.groupdict().get("step") is not None:
        return int(match["step"])
    if "key" in match.groupdict():
        return current
    stated = next((figures[key] for key in found.log.step_keys if key in figures), None)
    return int(stated) if stated is not None else max(found.steps, default=0) + 1


def _values(pattern: LinePattern, match: re.Match[str]) -> Mapping[str, object]:
    if pattern.reads == "item":
        return {match["key"]: match["value"]}
    if pattern.reads == "dict":
        return read_dict(match["values"])
    pairs = (pair.rpartition(":") for pair in match["values"].split(" - "))
    return {key.strip(): value for key, _, value in pairs}


CSV = "csv"
"""The format of our own columns."""


def read_measured_file(
    path: Path, name: str | None = None, is_asynchronous: bool | None = None
) -> MeasuredSteps:
    """Read the steps of a file.

    Args:
        path: the file.
        name: the format; found out where absent.
        is_asynchronous: whether generation went on beside training, where somebody knows; else as the keys tell.

    Raises:
        ValueError: it cannot be read, no format knows it, or it has no seconds of any step.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if name == CSV or (name is None and _has_our_columns(path)):
        steps = parse_steps(str(path), read_csv(path))
        return _checked(path, CSV, steps, str(path), is_asynchronous)
    if name is not None:
        return _read(path, load_format(name), is_asynchronous)
    return _read(path, _find_format(path), is_asynchronous)


def _has_our_columns(path: Path) -> bool:
    if path.suffix not in (".csv", ".gz"):
        return False
    rows = read_csv(path)
    return bool(rows) and bool(set(rows[0]) & set(SECONDS))


def _find_format(path: Path) -> LogFormat:
    """Return the format that knows most columns of a file; none where two know as many."""
    scores: dict[str, int] = {}
    damaged: list[str] = []
    for name in known_formats():
        log = load_format(name)
        try:
            found = read_records(path, log)
        except ValueError as error:
            damaged.append(str(error))
            continue  # or not its lines
        damaged += found.damage[:1]
        both = (_columns(found.steps, log, known) for known in (False, True))
        scores[name] = len(set().union(*both))
    most = max(scores.values(), default=0)
    best = [name for name, score in scores.items() if score == most]
    if not most and damaged:
        raise ValueError(damaged[0])
    if not most:
        formats = ", ".join([CSV, *known_formats()])
        raise ValueError(
            f"{path}: no format knows its steps; there is {formats} (--format), and a CSV needs columns of "
            f"{', '.join(COLUMNS)}"
        )
    if len(best) > 1:
        raise ValueError(f"{path}: could be of {' or '.join(best)}: say --format")
    return load_format(best[0])


def _columns(records: Records, log: LogFormat, is_asynchronous: bool) -> set[str]:
    keys = log.keys(is_asynchronous=is_asynchronous)
    seen = {key for figures in records.values() for key in figures}
    known = dict.fromkeys(seen, 0.0)
    return {column for column, aliases in keys.items() if pick(aliases, known) is not None}


def _read(path: Path, log: LogFormat, is_asynchronous: bool | None) -> MeasuredSteps:
    found = read_records(path, log)
    if found.damage:
        raise ValueError(found.damage[0])
    records = found.steps
    is_marked = any(
        key.startswith(mark)
        for figures in records.values()
        for key in figures
        for mark in log.asynchronous_marks
    )
    known = is_marked if log.is_told_by_keys else is_marked or is_asynchronous
    keys = log.keys(is_asynchronous=bool(known))
    steps = [
        MeasuredStep(step=step, **_picked(keys, figures))
        for step, figures in sorted(records.items())
    ]
    notes = found.notes
    if known is None and log.asynchronous:
        notes.append(
            f"{path.name}: nothing in it is of an asynchronous mode alone, so it is read as of one that takes turns"
        )
    source = f"{path.name} ({log.told})"
    return _checked(path, log.name, steps, source, known, tuple(notes), log)


def _picked(keys: dict[str, Keys], figures: dict[str, float]) -> dict[str, float]:
    found = {column: pick(aliases, figures) for column, aliases in keys.items()}
    return {column: value for column, value in found.items() if value is not None}


def _checked(
    path: Path,
    framework: str,
    steps: list[MeasuredStep],
    source: str,
    is_asynchronous: bool | None,
    notes: tuple[str, ...] = (),
    log: LogFormat | None = None,
) -> MeasuredSteps:
    kept = tuple(step for step in steps if step.has_seconds)
    if not kept:
        wanted = ""
        if log is not None:
            keys = log.keys(is_asynchronous=bool(is_asynchronous))
            wanted = ": it needs one of " + ", ".join(
                _first(keys[column]) for column in SECONDS if column in keys
            )
        raise ValueError(f"{path}: has no seconds of a step as {framework} writes them{wanted}")
    for step in kept:
        for column in SECONDS:
            value = getattr(step, column)
            if value is not None and not 0 <= value < 1e7:
                raise ValueError(f"{path}: step {step.step}: {column} cannot be {value:g} s")
    return MeasuredSteps(
        source=source,
        framework=framework,
        steps=kept,
        is_asynchronous=is_asynchronous,
        notes=notes,
    )


def _first(keys: Keys) -> str:
    """Return one key of a column, to name it."""
    alias = keys[0]
    return alias if isinstance(alias, str) else alias[0]

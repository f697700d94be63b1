"""The figures of each step in a log, by the names that the framework gave them: of text, JSON lines, JSON or CSV.

What a format knows nothing of may be anything. What it knows and cannot be (text for a number, negative seconds, nan, a
step that is told twice) is kept as damage, with where it stands, for whoever takes the log to be of that format; a last
line that was cut off while it was written is left out and noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from streamrl.logs.literals import read_dict, read_number
from streamrl.logs.log_format import LinePattern, LogFormat
from streamrl.logs.measured_steps import SECONDS
from streamrl.runfile.errors import shown
from streamrl.workload.csv_rows import read_csv

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

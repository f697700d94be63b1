"""The figures of each step in a log, by the names that the framework gave them: of text, JSON lines, JSON or CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from streamrl.logs.literals import read_dict, read_number
from streamrl.logs.log_format import LinePattern, LogFormat
from streamrl.workload.csv_rows import read_csv

Figures = dict[str, float]
"""Numbers by key."""
Records = dict[int, Figures]
"""Figures by step, in order."""
WANDB_SEPARATOR = " - "
"""Between a run's name and a key, in the header of a table that wandb exports."""


def read_records(path: Path, log: LogFormat) -> Records:
    """Read what a file has of each step, as far as a format knows its lines.

    Raises:
        ValueError: the file cannot be read, or a line that should hold figures does not.
    """
    if path.suffix in (".csv", ".gz"):
        return _of_rows(read_csv(path), log)
    text = _read_text(path)
    rows = _json_rows(text, log)
    return _of_rows(rows, log) if rows is not None else _of_lines(path, text, log)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def _json_rows(text: str, log: LogFormat) -> list[Mapping[str, object]] | None:
    """Return the objects of JSON, or of JSON lines; None where the text is neither."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _json_lines(text)
    if isinstance(whole, dict) and log.rows is not None:
        whole = whole.get(log.rows, whole)
    rows = whole if isinstance(whole, list) else [whole]
    return [row for row in rows if isinstance(row, dict)]


def _json_lines(text: str) -> list[Mapping[str, object]] | None:
    rows: list[Mapping[str, object]] = []
    for line in text.splitlines():
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            return None  # a Python dict, or a log
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _of_rows(rows: Sequence[Mapping[str, object]], log: LogFormat) -> Records:
    """Merge rows of one step; those that do not say which are counted."""
    found: Records = {}
    for number, row in enumerate(rows, start=1):
        nested = row.get(log.nested) if log.nested else None
        figures = _figures({**row, **nested} if isinstance(nested, dict) else row)
        step = next((figures[key] for key in log.step_keys if key in figures), number)
        found.setdefault(int(step), {}).update(figures)
    return found


def _figures(row: Mapping[str, object]) -> Figures:
    """Return what of a row are numbers, under keys without the run's name that wandb puts before them.

    What is not finite nobody measured.
    """
    found: Figures = {}
    for key, value in row.items():
        number = read_number(value)
        if number is not None and isfinite(number):
            found[key.rpartition(WANDB_SEPARATOR)[2]] = number
    return found


def _of_lines(path: Path, text: str, log: LogFormat) -> Records:
    found: Records = {}
    current = 0
    patterns = [(line, re.compile(line.pattern)) for line in log.lines]
    for number, line in enumerate(re.split(r"[\r\n]+", text), start=1):
        for pattern, expression in patterns:
            match = expression.search(line)
            if match is None:
                continue
            try:
                if pattern.reads == "step":
                    current = int(match["step"])
                else:
                    figures = dict(_read_line(pattern, match))
                    step = _step_of(match, log, figures, current, found)
                    found.setdefault(step, {}).update(figures)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            break
    return found


def _step_of(
    match: re.Match[str], log: LogFormat, figures: Figures, current: int, found: Records
) -> int:
    """Return the step that a line is of: as it says, as the line before it said, or the next."""
    if match.groupdict().get("step") is not None:
        return int(match["step"])
    if "key" in match.groupdict():
        return current
    stated = next((figures[key] for key in log.step_keys if key in figures), None)
    return int(stated) if stated is not None else max(found, default=0) + 1


def _read_line(pattern: LinePattern, match: re.Match[str]) -> Iterator[tuple[str, float]]:
    if pattern.reads == "item":
        values: Mapping[str, object] = {match["key"]: match["value"]}
    elif pattern.reads == "dict":
        values = read_dict(match["values"])
    else:
        pairs = (pair.rpartition(":") for pair in match["values"].split(" - "))
        values = {key.strip(): value for key, _, value in pairs}
    yield from _figures(values).items()

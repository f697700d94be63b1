"""Measured steps from a file: a CSV of our own columns, or a framework's log, whichever format knows most of it."""

from __future__ import annotations

from pathlib import Path

from streamrl.logs.log_format import Keys, LogFormat, known_formats, load_format, pick
from streamrl.logs.log_records import Records, read_records
from streamrl.logs.measured_steps import (
    COLUMNS,
    SECONDS,
    MeasuredStep,
    MeasuredSteps,
    parse_steps,
)
from streamrl.workload.csv_rows import read_csv

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

"""Read the rows of data files: CSV, JSONL, a JSON array, Parquet, a directory of `datasets`, or the Hugging Face hub."""

from __future__ import annotations

import csv
import datetime
import difflib
import importlib.util
import io
import json
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import dropwhile, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.runfile.errors import RunError, unique_keys
from streamrl.runfile.reading import MOST_ROWS, check_values, parse_json, read_text
from streamrl.runfile.workload_config import HUB

if TYPE_CHECKING:
    import pyarrow

    from streamrl.runfile.workload_config import SourceConfig


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows below the header; lines above it that begin with # are skipped.

    Raises:
        ValueError: the file cannot be read; the message begins with its path.
    """
    try:
        reader = csv.DictReader(_lines(path))
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        _check_columns(path, reader.fieldnames)
        rows = list(islice(reader, MOST_ROWS + 1))
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from None
    if len(rows) > MOST_ROWS:
        raise ValueError(f"{path}: more than {MOST_ROWS:,} rows, which is the limit; sample it")
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(f"{path}: row {number} has more columns than the header")
    return rows


SEPARATORS = (";", "\t")
"""Characters between columns in the tables of some programs."""


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name, of which only the last would count, and a header without commas."""
    named = [name.strip() for name in names if name and name.strip()]
    if len(named) == 1 and any(mark in named[0] for mark in SEPARATORS):
        raise ValueError(f"{path}: its header is {named[0]!r}; separate columns with commas")
    for name in named:
        if named.count(name) > 1:
            raise ValueError(
                f"{path}: the column {name!r} appears twice; remove or rename one of them"
            )


_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse_number(text: str | None) -> float:
    """Return a number in ASCII digits; Python alone would also read the digits of other scripts and underscores.

    Raises:
        ValueError: the text is something else, or missing, as the last cells of a short row are.
    """
    if text is None or _NUMBER.fullmatch(text.strip()) is None:
        raise ValueError(f"not a number: {text!r}")
    return float(text)


TIME_UNITS = {
    **dict.fromkeys(("us", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hours"), 3600.0),
}
"""Units that the name of a column may end with, in seconds."""
_UNIT = re.compile(r"(.+?)(?:_([A-Za-z]+)|\s*\(([A-Za-z]+)\)|\s*\[([A-Za-z]+)\])")


def column_in_seconds(column: str, names: Container[str]) -> tuple[str, float]:
    """Return the column that a name with a unit stands for, and the seconds of one unit; other names stay, with 1.

    `step_time_min` and `step_time (min)` are `step_time` in minutes.

    Args:
        column: the name in the header.
        names: names of columns of seconds.
    """
    if column not in names and (found := _UNIT.fullmatch(column)):
        name, *units = found.groups()
        factor = TIME_UNITS.get(next(filter(None, units)).lower())
        if name in names and factor is not None:
            return name, factor
    return column, 1.0


def columns_in_seconds(
    where: str, header: Iterable[str], names: Container[str]
) -> dict[str, tuple[str, float]]:
    """Return `column_in_seconds` of each column of a header.

    Raises:
        ValueError: two columns stand for the same one.
    """
    found: dict[str, tuple[str, float]] = {}
    for column in header:
        meant = column_in_seconds(column, names)
        if twin := next((each for each, (name, _) in found.items() if name == meant[0]), None):
            raise ValueError(
                f"{where}: {twin} and {column} are both {meant[0]}; remove one of them"
            )
        found[column] = meant
    return found


def _lines(path: Path) -> Iterator[str]:
    """Return the lines from the header on. A later line that begins with # is a row, or a part of a quoted cell."""
    lines = io.StringIO(read_text(path), newline="")
    return dropwhile(lambda line: line.startswith("#"), lines)


Row = dict[str, Any]
"""One line or row, as JSON represents it: dates as text, bytes in base 64."""

PARQUET = (".parquet", ".pq")
MOST_ERROR_CHARS = 300
"""Maximum characters that an error message takes from a library's error."""
EXTRA = "pip install 'streamrl[data]'"
_COUNTED: dict[tuple[object, ...], int] = {}
"""Rows of data sets that were counted: a search simulates many plans with the same prompts."""


def read_rows(source: SourceConfig, key: str) -> list[Row]:
    """Return all rows of a data set, in order.

    Args:
        source: the data set.
        key: the run file's key for it, for error messages.

    Raises:
        ValueError: a row is wrong or a package is missing; the message names key, data set and row.
    """
    path = Path(source.prompts)
    is_on_hub = source.prompts.startswith(HUB)
    if not is_on_hub and not path.is_dir():
        _check_has_one_split(source, key)
        rows = _of_parquet(path, key) if path.suffix in PARQUET else list(read_lines(path, key))
    else:
        rows = _of_data_set(source, key)
    if not rows:
        raise ValueError(f"{key}: {source.prompts} has no rows")
    return rows


def count_rows(source: SourceConfig, key: str) -> int | None:
    """Return the number of rows of a data set; None if it is missing or on the hub. See `read_rows` for the errors."""
    path = Path(source.prompts)
    if source.prompts.startswith(HUB) or not path.exists():
        return None
    stated = path, source.subset, source.split, path.stat().st_mtime_ns
    if stated not in _COUNTED:
        _COUNTED[stated] = len(read_rows(source, key))
    return _COUNTED[stated]


def read_lines(path: Path, key: str = "") -> Iterator[Row]:
    """Yield the objects of a JSONL file, or of a file that is one JSON array.

    Raises:
        ValueError: a line or an entry is not a JSON object; the message names file and line.
    """
    text = _read_text(path, key).rstrip()
    if not text:
        raise ValueError(f"{key and f'{key}: '}{path} has no lines")
    try:
        check_values(text)
    except ValueError as error:
        raise ValueError(f"{key and f'{key}: '}{path}: {error}; sample its rows") from None
    entries = _entries_of(text)
    if entries is not None:
        for number, entry in enumerate(entries, start=1):
            yield _object(entry, f"{path}:{number}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = parse_json(line, unique_keys)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}{_remedy(text, path)}") from None
        yield _object(row, f"{path}:{number}")


def _read_text(path: Path, key: str) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        text = f"{key and f'{key}: '}{path} does not exist{_like(path)}"
        raise RunError(key, str(path), text=text) from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{key and f'{key}: '}{path} cannot be read: {error}") from None


def _like(path: Path) -> str:
    """Return the files beside a missing one whose names are like its name, as a question; "" if there are none."""
    names = [file.name for file in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    return (
        f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
    )


def _entries_of(text: str) -> list[object] | None:
    """Return the entries of a JSON array; None for other text, such as a line with an array."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found: list[object] = parse_json(text, unique_keys)
    except ValueError:
        return None  # lines are read instead, and the first wrong one is named
    return found if found and all(isinstance(entry, dict) for entry in found) else None


def _object(row: object, where: str) -> Row:
    """Return a row that is an object and can be encoded; half of a surrogate pair cannot."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    return row


def _remedy(text: str, path: Path) -> str:
    """Return what to do with a file that is no JSON lines; empty if only a line is wrong."""
    if path.suffix in (".csv", ".tsv", ".gz") and not text.startswith("{"):
        return "; convert a table to JSON lines, such as with pandas: to_json(orient='records', lines=True)"
    if not text.startswith("{"):
        return ""
    try:
        whole = parse_json(text)
    except ValueError:
        return ""
    lists = [name for name, value in whole.items() if isinstance(value, list)]
    rows = f".{lists[0]}[]" if lists else "."
    return f"; the file is one JSON object: write one object a line (jq -c '{rows}' {path.name})"


def _check_has_one_split(source: SourceConfig, key: str) -> None:
    """Raise `ValueError` if a subset or split is set for a single file, which has neither."""
    for name in ("subset", "split"):
        if (value := getattr(source, name)) is not None:
            of = f"{key.removesuffix('prompts')}{name}"
            raise ValueError(
                f"{of} applies only to data sets (directory or hub), got {value!r}; {source.prompts} is a file"
            )


def _of_parquet(path: Path, key: str) -> list[Row]:
    _check_installed("pyarrow", f"{key}: {path} is read")
    import pyarrow
    import pyarrow.parquet

    try:
        _check_columns(path, pyarrow.parquet.read_schema(path).names)
        table = pyarrow.parquet.read_table(path)
        for place, column in enumerate(table.columns):
            if pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type):
                name = table.column_names[place]
                table = table.set_column(place, name, _texts(column))
        rows: list[Row] = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{key}: {path} cannot be read: {_line(error)}") from None
    return _as_json(rows, str(path))


def _texts(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column of bytes as text if all are UTF-8: some writers do not mark texts as such."""
    import pyarrow

    try:
        return column.cast(pyarrow.large_string())
    except pyarrow.ArrowInvalid:
        return column


def _of_data_set(source: SourceConfig, key: str) -> list[Row]:
    _check_installed("datasets", f"{key}: {source.prompts} is read")
    import datasets

    try:
        if source.prompts.startswith(HUB):
            name = source.prompts.removeprefix(HUB)
            found = datasets.load_dataset(name, source.subset, split=source.split)
        else:
            if source.subset is not None:
                of = f"{key.removesuffix('prompts')}subset"
                raise ValueError(
                    f"{of} applies only to data sets on the hub, got {source.subset!r}"
                )
            found = datasets.load_from_disk(source.prompts)
    except Exception as error:  # from the hub's client, the network or the file system
        raise ValueError(f"{key}: {source.prompts} cannot be loaded: {_line(error)}") from None
    if isinstance(found, datasets.DatasetDict):
        found = found[_split(source, key, list(found))]
    elif source.split is not None and not source.prompts.startswith(HUB):
        of = f"{key.removesuffix('prompts')}split"
        raise ValueError(f"{of}: {source.prompts} has no splits, got {source.split!r}")
    return _as_json(found.to_list(), source.prompts)


def _split(source: SourceConfig, key: str, names: list[str]) -> str:
    """Return the configured split, or the only one."""
    of = f"{key.removesuffix('prompts')}split"
    if source.split is None and len(names) == 1:
        return names[0]
    if source.split not in names:
        raise ValueError(
            f"{of} must be one of {', '.join(names)} of {source.prompts}, got {source.split!r}"
        )
    return source.split


def _as_json(rows: list[Row], name: str) -> list[Row]:
    """Return rows as plain JSON types, because records travel to verifiers as JSON."""
    try:
        found: list[Row] = msgspec.to_builtins(rows, enc_hook=_date_as_text)
    except TypeError as error:
        raise ValueError(f"{name}: has a column that cannot be written as JSON: {error}") from None
    return found


def _date_as_text(value: object) -> str:
    """Return a date or duration with nanoseconds as text, which pandas has types of its own for."""
    if isinstance(value, datetime.datetime | datetime.timedelta):
        return str(value)
    raise TypeError(f"objects of type {type(value).__name__} are not supported")


def _check_installed(module: str, what: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{what} with {module}, which is not installed: {EXTRA}")


def _line(error: Exception) -> str:
    """Return the error's message on one line, cut at `MOST_ERROR_CHARS` characters."""
    return " ".join(str(error).split())[:MOST_ERROR_CHARS] or type(error).__name__

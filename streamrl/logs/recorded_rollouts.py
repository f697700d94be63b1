"""Read recorded rollouts (tokens by prompt) from a data set, and write them as a workload's lengths and prompts."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.logs.framework_logs import read_number
from streamrl.runfile.workload_config import HUB, SourceConfig
from streamrl.workload.data_files import read_csv, read_rows

Row = Mapping[str, object]


class RolloutColumns(ProfileTable, frozen=True, kw_only=True):
    """Known names of columns in data sets of rollouts, by meaning."""

    source: str
    date: datetime.date
    output_tokens: tuple[str, ...]
    """A number, or a list with those of all samples of the prompt."""
    turns: tuple[str, ...]
    """A list with one number for each turn; their sum is the rollout's output."""
    prompt_id: tuple[str, ...]
    """The same value for all rollouts of one prompt."""
    prompt_tokens: tuple[str, ...]


TEXTS = ("prompt", "problem", "question", "input")
"""Columns of `prompt_id` that are the prompt itself."""
OF_PROMPTS = ("answer", "task", "tests", "family")
"""Further columns of a prompt that a run reads."""
FIELDS = ("output_tokens", "prompt_id", "prompt_tokens")
"""Names that `--field` can map to a column."""


class RecordedRollouts(NamedTuple):
    """Rollouts by prompt, in order of each prompt's first appearance."""

    groups: list[list[int]]
    """Output tokens of the rollouts of each prompt; one group for all if prompts cannot be identified."""
    prompt_tokens: list[int] | None
    """Tokens of each prompt; None if the data does not have them."""
    has_prompts: bool
    records: list[dict[str, object]]
    """The record of each prompt, as `workload.prompts` needs it; empty if the data has no text of prompts."""

    @property
    def lengths(self) -> list[int]:
        """Return the output tokens of every rollout."""
        return [length for group in self.groups for length in group]


@cache
def load_columns() -> RolloutColumns:
    """Return the known names."""
    return read_profile(PROFILES / "rollouts" / "columns.toml", RolloutColumns)


def read_rollouts(
    path: str, fields: Mapping[str, str] | None = None, split: str | None = None
) -> RecordedRollouts:
    """Return the rollouts of a data set.

    Args:
        path: a JSONL, Parquet or CSV file, a directory of `datasets`, or a data set of the hub (hf://NAME).
        fields: columns by meaning, if their names are not known ones.
        split: the split of a data set.

    Raises:
        ValueError: it cannot be read, or has no tokens of rollouts.
    """
    rows: Sequence[Row]
    if path.endswith((".csv", ".csv.gz")):
        rows = read_csv(Path(path))
    else:
        rows = read_rows(SourceConfig(prompts=path, split=split), "import")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return _gather(path, rows, dict(fields or {}))


def looks_like_rollouts(path: str) -> bool:
    """Return whether a path is more likely a data set of rollouts than a log, by its name and first row."""
    file = Path(path)
    if path.startswith(HUB) or file.is_dir() or file.suffix in (".parquet", ".pq"):
        return True
    if file.suffix not in (".csv", ".gz", ".jsonl"):
        return False
    try:
        rows: Sequence[Row] = (
            read_csv(file)
            if file.suffix in (".csv", ".gz")
            else read_rows(SourceConfig(prompts=path), "import")
        )
    except ValueError:
        return False
    known = load_columns()
    names = (*known.output_tokens, *known.turns, *TEXTS)
    return bool(rows) and any(_has(rows[0], name) for name in names)


def write_prompts(found: RecordedRollouts) -> str:
    """Return the prompts as the text of a JSONL file for `workload.prompts`."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found.records)


def write_lengths(found: RecordedRollouts, source: str) -> str:
    """Return rollouts as a CSV for `workload.lengths`, of kind groups, or empirical without prompts."""
    text = io.StringIO()
    text.write(f"# Recorded rollouts of {' '.join(source.split())}; tokens.\n")
    writer = csv.writer(text, lineterminator="\n")
    prompts = found.prompt_tokens
    header = ["prompt_id"] if found.has_prompts else []
    writer.writerow([*header, *(["prompt_tokens"] if prompts else []), "output_tokens"])
    for number, group in enumerate(found.groups):
        start = [number] if found.has_prompts else []
        own = [prompts[number]] if prompts else []
        writer.writerows([*start, *own, length] for length in group)
    return text.getvalue()


def _gather(path: str, rows: Sequence[Row], fields: dict[str, str]) -> RecordedRollouts:
    known = load_columns()
    for name, column in fields.items():
        if not _has(rows[0], column):
            have = ", ".join(rows[0])
            raise ValueError(f"--field {name}={column}: {path} has no such column; it has {have}")
    output, turns, prompt, tokens = (
        fields.get(name) or _find(rows[0], names)
        for name, names in (
            ("output_tokens", known.output_tokens),
            ("turns", known.turns),
            ("prompt_id", known.prompt_id),
            ("prompt_tokens", known.prompt_tokens),
        )
    )
    if output is None and turns is None:
        output = next((name for name in known.output_tokens if name in rows[0]), None)
    if output is None and turns is None:
        raise ValueError(
            f"{path}: no column has the tokens of a rollout; the columns are {', '.join(rows[0])}. Name one with "
            f"--field output_tokens=COLUMN, or rename it to {' or '.join(known.output_tokens[:4])}"
        )
    groups: dict[str, list[int]] = {}
    of_prompts: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        lengths = _lengths(where, row, output, turns)
        key = "" if prompt is None else repr(_value(row, prompt))
        if prompt is None and len(lengths) > 1:
            key = str(number)  # one row has all samples of a prompt
        groups.setdefault(key, []).extend(lengths)
        if tokens is not None:
            of_prompts.setdefault(key, _count(where, tokens, _value(row, tokens)))
    has_prompts = prompt is not None or len(groups) > 1
    counted = list(of_prompts.values()) if tokens is not None else None
    if counted is not None and not has_prompts:
        counted = None
    records = list(_records(rows, prompt)) if prompt is not None and prompt in TEXTS else []
    return RecordedRollouts(list(groups.values()), counted, has_prompts, records)


def _records(rows: Sequence[Row], prompt: str) -> Iterator[dict[str, object]]:
    """Yield the first row of each prompt, with the columns that a run reads."""
    seen: set[str] = set()
    for row in rows:
        key = repr(row[prompt])
        if key not in seen:
            seen.add(key)
            yield {"prompt": row[prompt], **{name: row[name] for name in OF_PROMPTS if name in row}}


def _lengths(where: str, row: Row, output: str | None, turns: str | None) -> list[int]:
    column = output or turns
    assert column is not None, "one of them is there"
    value = _value(row, column)
    if not isinstance(value, list):
        return [_count(where, column, value)]
    counts = [_count(where, column, each) for each in value]
    return counts if output is not None else [sum(counts)]


def _count(where: str, column: str, value: object) -> int:
    if value is None or value == "":
        raise ValueError(f"{where}: {column} is missing; it must be a whole number of tokens")
    number = read_number(value)
    if number is None or not 0 <= number < 1e9 or number != int(number):
        raise ValueError(f"{where}: {column} must be a whole number of tokens, got {value!r}")
    return int(number)


def _find(row: Row, names: Iterable[str]) -> str | None:
    return next((name for name in names if _value(row, name) is not None), None)


def _has(row: Row, column: str) -> bool:
    """Return whether a row has a column, even an empty one."""
    return column in row or _value(row, column) is not None


def _value(row: Row, column: str) -> object:
    """Return the value of a column; dots select nested values."""
    if column in row:
        return row[column]
    place: object = row
    for name in column.split("."):
        place = place.get(name) if isinstance(place, Mapping) else None
    return place

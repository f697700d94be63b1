"""Read recorded rollouts (tokens by prompt) from a data set, and write them as a workload's lengths and prompts."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.logs.printed_values import read_number
from streamrl.record import run_directory
from streamrl.record.prompt_tokens import PROMPTS, read_prompt_tokens
from streamrl.record.run_directory import ROLLOUTS
from streamrl.runfile.errors import shown
from streamrl.runfile.escaping import visible
from streamrl.runfile.reading import read_json
from streamrl.runfile.workload_config import HUB, LengthsConfig, SourceConfig
from streamrl.workload.data_files import read_csv, read_lines, read_rows

Row = Mapping[str, object]


class RolloutColumns(ProfileTable, frozen=True, kw_only=True):
    """Known names of columns in data sets of rollouts, by meaning."""

    source: str
    date: datetime.date
    output_tokens: tuple[str, ...]
    """A number, or a list with those of all samples of the prompt."""
    turns: tuple[str, ...]
    """A list with one number for each turn; their sum is the rollout's output."""
    requests: tuple[str, ...]
    """A list with one number for each request of a serving benchmark; each is a rollout of its own prompt."""
    request_prompts: tuple[str, ...]
    """A list with the prompt tokens of each request."""
    request_errors: tuple[str, ...]
    """A list with the error of each request; empty if it succeeded."""
    request_totals: tuple[str, ...]
    """Sums that a benchmark writes if it keeps no lengths of single requests."""
    shared_blocks: tuple[str, ...]
    """A list with the hashes of a prompt's blocks, equal for prompts with the same beginning."""
    prompt_id: tuple[str, ...]
    """The same value for all rollouts of one prompt."""
    prompt_tokens: tuple[str, ...]


TEXTS = ("prompt", "problem", "question", "input")
"""Columns of `prompt_id` that are the prompt itself."""
OF_PROMPTS = ("answer", "task", "tests", "family")
"""Further columns of a prompt that a run reads."""
FIELDS = ("output_tokens", "prompt_id", "prompt_tokens")
"""Names that `--field` can map to a column."""
ASSUMED_PROMPTS = (
    f"the tokens of prompts are unknown: {LengthsConfig(kind='empirical', source='').prompt_tokens} are assumed "
    "(workload.lengths.prompt_tokens); name their column with --field prompt_tokens=COLUMN"
)


class RecordedRollouts(NamedTuple):
    """Rollouts by prompt, in order of each prompt's first appearance."""

    groups: list[list[int]]
    """Output tokens of the rollouts of each prompt; one group for all if prompts cannot be identified."""
    prompt_tokens: list[int] | None
    """Tokens of each prompt, or of each rollout if prompts cannot be identified; None if unknown."""
    has_prompts: bool
    records: list[dict[str, object]]
    """The record of each prompt, as `workload.prompts` needs it; empty if the data has no text of prompts."""
    notes: tuple[str, ...] = ()
    """What was left out or assumed, one line each."""

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
    rows = _read(path, split)
    if not rows:
        raise ValueError(f"{path} has no rows")
    requests, notes = _single_requests(path, rows)
    found = _gather(path, requests, dict(fields or {}))
    if found.prompt_tokens is None:
        notes = (*notes, ASSUMED_PROMPTS)
    return found._replace(notes=(*notes, *_note_shared(rows)))


def _read(path: str, split: str | None = None) -> Sequence[Row]:
    if path.endswith((".csv", ".csv.gz")):
        return read_csv(Path(path))
    if Path(path).name == ROLLOUTS and (Path(path).parent / PROMPTS).is_file():
        return _of_run(Path(path).parent)
    if path.endswith(".json") and (only := _only_object(Path(path))) is not None:
        return [only]
    return read_rows(SourceConfig(prompts=path, split=split), "import")


def _of_run(directory: Path) -> Sequence[Row]:
    """Return the rollouts of a run directory that count, with the tokens of their prompts."""
    rows = run_directory.read_rollouts(directory)
    prompts = [len(ids) for ids in read_prompt_tokens(directory)]
    known = load_columns().prompt_tokens[0]
    return [{known: prompts[line], **row} for row in rows if (line := _line_of(row)) is not None]


def _line_of(row: Row) -> int | None:
    """Return the index of a rollout's prompt; None for a line that a resume wrote."""
    line = row.get("line")
    return line if isinstance(line, int) else None


def _only_object(path: Path) -> Row | None:
    """Return the object that a JSON file consists of; None for another file."""
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def parse_fields(stated: Iterable[str]) -> dict[str, str]:
    """Return columns by meaning from texts such as "output_tokens=length".

    Raises:
        ValueError: a text has another form, or an unknown name.
    """
    found: dict[str, str] = {}
    for each in stated:
        name, equals, column = each.partition("=")
        if not equals or name not in FIELDS or not column:
            raise ValueError(
                f"--field must be NAME=COLUMN with a name of {', '.join(FIELDS)}, got {each!r}"
            )
        if name in found:
            raise ValueError(f"--field {name} is set twice: {found[name]}, then {column}")
        found[name] = column
    return found


def looks_like_rollouts(path: str) -> bool:
    """Return whether a path is more likely a data set of rollouts than a log, by its name and first row."""
    file = Path(path)
    if path.startswith(HUB) or file.is_dir() or file.suffix in (".parquet", ".pq"):
        return True
    if file.suffix not in (".csv", ".gz", ".jsonl", ".json"):
        return False
    try:
        row = _first_row(path)
    except ValueError:
        return False
    known = load_columns()
    names = (*known.output_tokens, *known.turns, *known.requests, *known.request_totals, *TEXTS)
    return row is not None and any(_has(row, name) for name in names)


def _first_row(path: str) -> Row | None:
    """Return the first row of a CSV or JSON file; None without rows. Later rows may be damaged."""
    if path.endswith((".csv", ".csv.gz")):
        return next(iter(read_csv(Path(path))), None)
    return _only_object(Path(path)) or next(read_lines(Path(path)), None)


def _single_requests(path: str, rows: Sequence[Row]) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Return a row for each request of a serving benchmark, with notes; other rows stay as they are."""
    known = load_columns()
    outputs = next((name for name in known.requests if name in rows[0]), None)
    if outputs is None:
        total = next((name for name in known.request_totals if name in rows[0]), None)
        if total is not None and not any(_has(rows[0], name) for name in known.output_tokens):
            raise ValueError(
                f"{path}: a serving benchmark with {total} only, without the lengths of its requests; run it with "
                "--save-detailed (vLLM) or --output-details (SGLang)"
            )
        return rows, ()
    found: list[Row] = []
    failed = 0
    for number, row in enumerate(rows, start=1):
        requests = _requests_of(f"{path}: row {number}", row, outputs, known)
        failed += requests.count(None)
        found += [request for request in requests if request is not None]
    if not found:
        raise ValueError(f"{path}: all {failed} requests of the benchmark failed")
    return found, (f"{failed} failed requests are left out",) if failed else ()


def _requests_of(where: str, row: Row, outputs: str, known: RolloutColumns) -> list[Row | None]:
    """Return the requests of a benchmark; None for a failed one."""
    lengths = row.get(outputs)
    if not isinstance(lengths, list):
        raise ValueError(f"{where}: {outputs} must be a list with a number for each request")
    columns: dict[str, list[object]] = {known.output_tokens[0]: lengths}
    for target, names in (
        (known.prompt_tokens[0], known.request_prompts),
        ("error", known.request_errors),
    ):
        name = next((each for each in names if isinstance(row.get(each), list)), None)
        if name is None:
            continue
        values = row[name]
        assert isinstance(values, list), "just checked"
        if len(values) != len(lengths):
            raise ValueError(
                f"{where}: {outputs} has {len(lengths)} requests, but {name} has {len(values)}"
            )
        columns[target] = values
    made = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return [None if request.pop("error", None) else request for request in made]


def _note_shared(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many blocks of prompts repeat, if a trace has their hashes."""
    name = next((each for each in load_columns().shared_blocks if each in rows[0]), None)
    lists = [row.get(name) for row in rows] if name is not None else []
    blocks = [block for each in lists if isinstance(each, list) for block in each]
    if blocks:
        repeated = 1 - len(set(map(repr, blocks))) / len(blocks)
        yield (
            f"{name}: {repeated:.0%} of the prompts' blocks repeat an earlier one; a simulated workload shares "
            "prefixes only within a group"
        )


def write_prompts(found: RecordedRollouts) -> str:
    """Return the prompts as the text of a JSONL file for `workload.prompts`."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in found.records)


def write_lengths(found: RecordedRollouts, source: str) -> str:
    """Return rollouts as a CSV for `workload.lengths`, of kind groups, or empirical without prompts."""
    text = io.StringIO()
    text.write(f"# Recorded rollouts of {visible(' '.join(source.split()))}; tokens.\n")
    writer = csv.writer(text, lineterminator="\n")
    prompts = found.prompt_tokens
    header = ["prompt_id"] if found.has_prompts else []
    writer.writerow([*header, *(["prompt_tokens"] if prompts else []), "output_tokens"])
    if prompts and not found.has_prompts:
        writer.writerows(zip(prompts, found.lengths, strict=True))
        return text.getvalue()
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
        fields.get(name) or _find(rows, names)
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
    for name, names in (
        ("output_tokens", known.output_tokens),
        ("prompt_tokens", known.prompt_tokens),
    ):
        if name not in fields:
            _refuse_ambiguous(path, rows, name, names)
    if prompt is not None:
        _check_prompts(path, rows, prompt, tokens, has_stated_id="prompt_id" in fields)
    groups: dict[str, list[int]] = {}
    of_prompts: dict[str, int] = {}
    of_rollouts: list[int] = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        lengths = _lengths(where, row, output, turns)
        key = "" if prompt is None else repr(_value(row, prompt))
        if prompt is None and len(lengths) > 1:
            key = str(number)  # one row has all samples of a prompt
        groups.setdefault(key, []).extend(lengths)
        if tokens is not None:
            count = _count(where, tokens, _value(row, tokens))
            of_prompts.setdefault(key, count)
            of_rollouts += [count] * len(lengths)
    has_prompts = prompt is not None or len(groups) > 1
    counted = None
    if tokens is not None:
        counted = list(of_prompts.values()) if has_prompts else of_rollouts
    if not any(groups.values()):
        raise ValueError(f"{path} has no rollouts: every {output or turns} is an empty list")
    records = list(_records(rows, prompt)) if prompt is not None and prompt in TEXTS else []
    return RecordedRollouts(list(groups.values()), counted, has_prompts, records)


def _check_prompts(
    path: str, rows: Sequence[Row], prompt: str, tokens: str | None, *, has_stated_id: bool
) -> None:
    """Refuse rows without an id of their prompt, and rows of one id with different prompts.

    Args:
        path: the data set, for messages.
        rows: its rows.
        prompt: the column of the id.
        tokens: the column of the prompt's tokens, if there is one.
        has_stated_id: whether the user named the column, so that the texts of prompts may differ.
    """
    texts = () if has_stated_id else _filled(rows, TEXTS)
    same = [name for name in (*texts, tokens) if name is not None and name != prompt]
    first: dict[tuple[str, str], tuple[int, object]] = {}
    for number, row in enumerate(rows, start=1):
        key = _value(row, prompt)
        if _is_missing(key):
            raise ValueError(
                f"{path}: row {number}: {prompt} is missing; fill it in, or choose the prompt's id with --field prompt_id=COLUMN"
            )
        for name in same:
            value = _value(row, name)
            if _is_missing(value):
                continue
            earlier, other = first.setdefault((name, repr(key)), (number, value))
            if value != other:
                raise ValueError(
                    f"{path}: rows {earlier} and {number} have the same {prompt} ({shown(key)}), but {name} is "
                    f"{shown(other)}, then {shown(value)}; choose the prompt's id with --field prompt_id=COLUMN"
                )


def _refuse_ambiguous(path: str, rows: Sequence[Row], meaning: str, names: Iterable[str]) -> None:
    """Refuse two columns of one meaning that have different values, because one would be chosen in silence."""
    first, *others = [*_filled(rows, names)] or [""]
    for name, row in product(others, rows):
        one, other = _value(row, first), _value(row, name)
        if not _is_missing(one) and not _is_missing(other) and str(one) != str(other):
            raise ValueError(
                f"{path}: both {first} ({one}) and {name} ({other}) may be the {meaning.replace('_', ' ')}; "
                f"choose one with --field {meaning}=COLUMN"
            )


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
    return counts if output is not None or not counts else [sum(counts)]


def _count(where: str, column: str, value: object) -> int:
    if _is_missing(value):
        raise ValueError(f"{where}: {column} is missing; it must be a whole number of tokens")
    number = read_number(value)
    if number is None or not 1 <= number < 1e9 or number != int(number):
        raise ValueError(
            f"{where}: {column} must be a whole number of tokens, at least 1, got {value!r}; correct the row or remove it"
        )
    return int(number)


def _find(rows: Sequence[Row], names: Iterable[str]) -> str | None:
    """Return the first name of a column that has a value in any row."""
    return next(_filled(rows, names), None)


def _filled(rows: Sequence[Row], names: Iterable[str]) -> Iterator[str]:
    """Yield the names of columns that have a value in any row."""
    keys = set().union(*rows)
    for name in names:
        is_there = name in keys or name.partition(".")[0] in keys
        if is_there and any(not _is_missing(_value(row, name)) for row in rows):
            yield name


def _is_missing(value: object) -> bool:
    """Return whether a row has no value. An empty cell of a CSV is an empty text."""
    return value is None or value == ""


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

"""Read the steps in a training framework's log (text, JSON lines, JSON or CSV) by the formats of profiles/logs.

Keys that a format does not know are ignored. A known key can have an invalid value: a text,
negative seconds, nan, or a second value for the same step. Such values are kept as `damage` with
their location. The file is rejected if it is read in this format. A last line that was cut off
during writing is left out with a note.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from streamrl.logs.log_formats import Keys, LinePattern, LogFormat, known_formats, load_format, pick
from streamrl.logs.measured_steps import COLUMNS, SECONDS, MeasuredStep, MeasuredSteps, parse_steps
from streamrl.logs.printed_values import read_dict, read_number
from streamrl.runfile.errors import RepeatedKeyError, shown, unique_keys
from streamrl.runfile.reading import MOST_LOG, parse_json, read_bytes
from streamrl.workload.data_files import column_in_seconds, read_csv

Figures = dict[str, float]
"""Numbers by key."""
Records = dict[int, Figures]
"""Figures by step, in order."""
WANDB_SEPARATOR = " - "
"""Separator of run name and key in the header of a table that wandb exports."""


@dataclass(slots=True)
class LogRecords:
    """The content of a file under the keys of one format."""

    path: Path
    log: LogFormat
    steps: Records = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    """Invalid values of known keys, each with its location. The first one is the reason to reject the file."""
    notes: list[str] = field(default_factory=list)
    bars: dict[int, dict[int, float]] = field(default_factory=dict)
    """By the total of a progress bar, in order: the seconds of a step, by the number that the bar shows."""
    restarted: set[int] = field(default_factory=set)
    """Totals of bars that began again, such as those of evaluations."""
    highest: Figures = field(default_factory=dict)
    """Highest value of each key that only rises in a run."""
    current: int | None = None
    """The step that the last line with a step named."""
    last: Figures = field(default_factory=dict)
    """All numbers of the last line with figures."""
    cut: str | None = None
    """The last key of a last line without an end, whose value may be cut off."""
    is_complete: bool = True
    """Whether the last step ended, if the format has lines that say so."""
    runs: dict[str, None] = field(default_factory=dict)
    """Names of runs that wandb put before known keys; "" for keys without one."""
    columns: dict[str, str] = field(init=False)
    """Column of each known key."""

    def __post_init__(self) -> None:
        self.columns = self.log.column_of

    def numbers(self, row: Mapping[str, object], where: str) -> Figures:
        """Return the numbers of a row, with keys without the run name that wandb puts before them."""
        found: Figures = {}
        for key, value in row.items():
            (run, _, name), number = key.rpartition(WANDB_SEPARATOR), read_number(value)
            if number is not None and isfinite(number):
                found[name] = number
                if name in self.columns:
                    self._note_run(run, where)
            elif (name in self.columns or name in self.log.step_keys) and _is_filled(value):
                self.damage.append(f"{where}: {name} must be a finite number, got {shown(value)}")
        return found

    def _note_run(self, run: str, where: str) -> None:
        """Note damage if figures of a second run appear, because their keys would become one."""
        if self.runs and run not in self.runs:
            names = " and ".join(
                shown(name) if name else "one without a name" for name in (*self.runs, run)
            )
            self.damage.append(f"{where}: columns of two runs, {names}; export one run")
        self.runs.setdefault(run)

    def enter(self, step: int, figures: Figures, where: str) -> None:
        """Add the figures of a row or a line to a step."""
        if self.log.late:
            figures = self._without_late(step, figures, where)
        own = self.steps.setdefault(step, {})
        for key, value in figures.items():
            column = self.columns.get(key)
            if column is None:
                continue
            unit = " s" if column in SECONDS else ""
            if value < 0:
                text = f"step {step}: {column} must not be {value:g}{unit} ({key})"
                self.damage.append(f"{where}: {text}")
            if own.get(key, value) != value:
                text = f"step {step} is logged twice: {key} is {own[key]:g}{unit}, then {value:g}{unit}"
                self.damage.append(
                    f"{where}: {text}. If the file has two runs, or one that was resumed, split it"
                )
        own.update(figures)

    def _without_late(self, step: int, figures: Figures, where: str) -> Figures:
        """Return figures without those of the step before, which are entered there."""
        late = {
            key
            for key, mark in self.log.late.items()
            if key in figures and (mark in figures or not figures[key])
        }
        for key in late:
            own = self.steps.get(step - 1)
            is_known = own is not None and figures[key]  # 0 after a start or a resume
            if own is not None and is_known and own.setdefault(key, figures[key]) != figures[key]:
                self.damage.append(f"{where}: step {step - 1} is logged twice: {key}")
        return {key: value for key, value in figures.items() if key not in late}

    def check_rising(self, figures: Figures, where: str) -> None:
        """Note damage if a key that only rises in a run falls."""
        for key in self.log.rising:
            value = figures.get(key)
            if value is not None and value < self.highest.get(key, -inf):
                text = f"{key} falls from {self.highest[key]:g} to {value:g}"
                self.damage.append(
                    f"{where}: {text}. If the file has two runs, or one that was resumed, split it"
                )
            if value is not None:
                self.highest[key] = max(value, self.highest.get(key, -inf))

    def add(self, figures: Figures) -> None:
        """Add figures to the current step, which may have the same keys already."""
        if self.current is None:
            return
        own = self.steps.setdefault(self.current, {})
        for key, value in figures.items():
            own[key] = own.get(key, 0.0) + value

    def advance(self, total: int, step: int, seconds: float | None) -> None:
        """Add a progress bar that shows a step, whose seconds are unknown at first."""
        bar = self.bars.setdefault(total, {})
        if step < max(bar, default=0):
            self.restarted.add(total)
        if seconds is not None:
            bar[step] = seconds

    @property
    def progress(self) -> dict[int, float]:
        """Seconds of a step of training, by its number: the first bar, unless it began again."""
        own = (bar for total, bar in self.bars.items() if bar and total not in self.restarted)
        return next(own, {})

    def cut_off(self, damaged: int) -> None:
        """Replace the damage since there were `damaged` entries by a note that the last line was cut off."""
        if len(self.damage) > damaged:
            del self.damage[damaged:]
            self.notes.append(_cut_off(self.path))

    def skip(self, step: int) -> None:
        """Leave out a step with missing figures."""
        self.steps.pop(step, None)
        self.notes.append(f"{self.path.name}: step {step} {SKIPPED}")


def _is_filled(value: object) -> bool:
    """Return whether a value is not empty."""
    return isinstance(value, int | float) or (isinstance(value, str) and bool(value.strip()))


def _cut_off(path: Path) -> str:
    return f"{path.name}: the last line {SKIPPED}"


def read_records(path: Path, log: LogFormat) -> LogRecords:
    """Return the figures of each step in a file, from the lines that the format knows.

    Raises:
        ValueError: the file cannot be read, or a line that should have figures does not.
    """
    found = LogRecords(path, log)
    if _is_table(path):
        _of_rows(found, ((f"{path}: row {n}", row) for n, row in enumerate(read_csv(path), 1)))
        return found
    text = _read_text(path)
    rows = _json_rows(found, text)
    if rows is None:
        _of_lines(found, text)
    else:
        _of_rows(found, rows)
    return found


def _is_table(path: Path) -> bool:
    """Return whether a file is a CSV by its name, also a compressed one."""
    return path.name.endswith((".csv", ".csv.gz"))


def _read_text(path: Path) -> str:
    try:
        data = read_bytes(path, MOST_LOG)
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return data.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


SKIPPED = "is cut off and was skipped"
PlacedRow = tuple[str, Mapping[str, object]]
"""A row and its location."""


def _json_rows(found: LogRecords, text: str) -> list[PlacedRow] | None:
    """Return the objects of JSON, or of JSON lines; None for other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole = parse_json(text, unique_keys)
    except RepeatedKeyError as error:
        raise ValueError(f"{found.path}: {error}") from None
    except ValueError:
        return _json_lines(found, text)
    if isinstance(whole, dict) and found.log.rows is not None:
        whole = whole.get(found.log.rows, whole)
    rows = whole if isinstance(whole, list) else [whole]
    placed = enumerate(rows, start=1)
    return [(f"{found.path}: row {n}", row) for n, row in placed if isinstance(row, dict)]


def _json_lines(found: LogRecords, text: str) -> list[PlacedRow] | None:
    """Return the objects of JSON lines; None if the first line is not one, such as a Python dict or a log.

    Raises:
        ValueError: a later line is not an object. The last line may be cut off.
    """
    rows: list[PlacedRow] = []
    lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        try:
            row = parse_json(line, unique_keys)
        except RepeatedKeyError as error:
            raise ValueError(f"{found.path}:{number}: {error}") from None
        except ValueError as error:
            if not rows or not line.lstrip().startswith("{"):
                return None
            if number != lines[-1][0]:
                why = getattr(error, "msg", "nested too deeply")
                raise ValueError(f"{found.path}:{number}: not JSON: {why}") from None
            found.notes.append(_cut_off(found.path))
            break
        if isinstance(row, dict):
            rows.append((f"{found.path}:{number}", row))
    return rows


def _of_rows(found: LogRecords, rows: Iterable[PlacedRow]) -> None:
    """Merge rows of the same step; rows without a step are counted."""
    log = found.log
    for number, (where, row) in enumerate(rows, start=1):
        nested = row.get(log.nested) if log.nested else None
        figures = found.numbers({**row, **nested} if isinstance(nested, dict) else row, where)
        step = next((figures[key] for key in log.step_keys if key in figures), number)
        found.enter(int(step), figures, where)


OPEN_ENDED = ("pairs", "bars", "item")
"""Kinds of lines without a mark at their end."""
SEPARATORS = {"pairs": " - ", "bars": " | "}
"""What is between the values of a line, by kind of line."""
CONTINUATIONS = {
    "pairs": re.compile(
        r"(?!.*[^\s,-]\s+[^\s-])(?:(^|.*\s)-\s\S+:\S|^\S+:[-+.\deE]+\s*$|^[-+.\deE]+\s*$)"
    ),
    "bars": re.compile(
        r".*\|\s[^|:]+:\s\S|^[^|:]*:\s*[-+.,\d]+\S*( \S+)?\s*$|^[-+.,\d]+\S*( \S+)?\s*$"
    ),
}
"""The rest of a line that a terminal wrapped, by kind of line. Two words without a dash between them are no pairs."""
MOST_IN_RECORD = 5000
"""Maximum lines of a record."""
MOST_WRAPPED = 200
"""Maximum lines of a terminal into which one line of a log is wrapped."""

Patterns = list[tuple[LinePattern, re.Pattern[str]]]


MARKS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")
"""Colours, links and other commands for a terminal, as ECMA-48 writes them."""
LABELS = re.compile(
    r"^(?:"
    r"\([\w.:]+ pid=\d+(?:, ip=[^)]*)?\) ?"  # Ray
    r"|\[(?:rank|default)\d+\]: ?"  # torch and torchrun
    r"|\d+: (?=\S| )"  # srun --label
    r"|[\w.-]+-\d+\s+\| "  # Docker Compose
    r"|\d{4}-\d\d-\d\dT[\d:.]+Z (?:std(?:out|err) [FP] )?"  # Kubernetes
    r")+"
)
"""Labels that launchers put before each line of a worker."""
REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
"""What Ray puts after a line that several workers printed."""


@lru_cache(maxsize=1)  # every format reads the same file
def _plain_lines(text: str) -> list[str]:
    """Return the lines of a text without colours and labels of workers."""
    lines = re.split(r"[\r\n]+", MARKS.sub("", text))
    return [REPEATED.sub("", LABELS.sub("", line)) for line in lines]


def _of_lines(found: LogRecords, text: str) -> None:
    lines = _plain_lines(text)
    if found.log.record is not None:
        lines = _records(lines, found.log.record)
    for kinds in filter(None, (found.log.lines, found.log.unnumbered)):
        _read_lines(found, lines, kinds)
        if any(set(figures) & set(found.columns) for figures in found.steps.values()):
            break
        found.current = None
    if not found.is_complete and found.current is not None:
        found.skip(found.current)
    elif not text.endswith(("\n", "\r")) and _lacks_keys(found):
        found.skip(list(found.steps)[-1])


def _lacks_keys(found: LogRecords) -> bool:
    """Return whether the last step has not all keys that every earlier step has, other than a cut one."""
    known = [set(figures) & set(found.columns) for figures in found.steps.values()]
    missing = {*found.log.late, found.cut}
    return len(known) > 1 and not set.intersection(*known[:-1]) - missing <= known[-1]


def _records(lines: list[str], begin: str) -> list[str]:
    """Return lines with the rest of each record on its first line; each rest becomes an empty line."""
    expression = re.compile(begin)
    made, first = [*lines], len(lines)
    for place, line in enumerate(lines):
        if expression.search(line):
            first = place
        elif place - first in range(1, MOST_IN_RECORD):
            made[first] += line
            made[place] = ""
    return made


def _read_lines(found: LogRecords, lines: list[str], kinds: tuple[LinePattern, ...]) -> None:
    patterns = [(line, re.compile(line.pattern)) for line in kinds]
    for first, last, line in _unwrapped(lines, patterns):
        damaged = len(found.damage)
        pattern, match = _match(line, patterns)
        if pattern is not None and match is not None:
            where = f"{found.path}:{first}"
            is_cut = 1 < last == len(lines)  # or text of one line, which somebody copied
            try:
                _take_line(found, pattern, match, where, is_cut=is_cut)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if last == len(lines):  # a complete last line would have an empty one after it
            found.cut_off(damaged)


def _take_line(
    found: LogRecords, pattern: LinePattern, match: re.Match[str], where: str, *, is_cut: bool
) -> None:
    """Enter the content of a line, without its last value if the line may be cut off there."""
    match pattern.reads:
        case "step":
            found.current = int(match["step"])
            found.is_complete = all(line.reads != "end" for line in found.log.lines)
        case "end":
            found.is_complete = True
        case "start":
            found.current = None
        case "begin":
            found.current = _next_step(found, pattern)
        case "progress":
            found.advance(int(match["total"]), int(match["step"]), _seconds_of(match))
        case _:
            values = _values(pattern, match)
            if is_cut and pattern.reads in OPEN_ENDED and values:
                *_, found.cut = values
                values = {key: value for key, value in values.items() if key != found.cut}
                if found.cut in found.columns:
                    found.notes.append(f"{found.path.name}: {found.cut} of the last line {SKIPPED}")
            figures = found.numbers(values, where)
            if figures == found.last and not figures.keys().isdisjoint(found.log.rising):
                return  # two handlers wrote it
            found.last = figures
            found.check_rising(figures, where)
            if pattern in found.log.unnumbered:
                found.add(figures)
            else:
                found.enter(_step_of(match, found, figures), figures, where)


def _next_step(found: LogRecords, pattern: LinePattern) -> int:
    """Return the number of the step that begins, or of the current one if it goes on."""
    current = found.current
    if current is None:
        return max(found.steps, default=0) + 1
    return current if pattern.after not in found.steps.get(current, {}) else current + 1


def _match(line: str, patterns: Patterns) -> tuple[LinePattern, re.Match[str]] | tuple[None, None]:
    for pattern, expression in patterns:
        match = expression.search(line)
        if match is not None:
            return pattern, match
    return None, None


def _unwrapped(lines: list[str], patterns: Patterns) -> Iterator[tuple[int, int, str]]:
    """Yield the lines of a log as they were before a terminal wrapped them, with their first and last numbers."""
    at, kinds = 0, {pattern.reads for pattern, _ in patterns}
    while at < len(lines):
        end = _end_of_line(lines, at, patterns, kinds)
        yield at + 1, end, lines[at] if end == at + 1 else _joined(lines[at:end])
        at = end


def _end_of_line(lines: list[str], at: int, patterns: Patterns, kinds: AbstractSet[str]) -> int:
    """Return the place after the last piece of a line."""
    line = lines[at]
    if "dict" in kinds and line.count("{") > line.count("}"):
        return _after_dict(lines, at, patterns)
    if "cells" in kinds and "╒" in line:
        ends = (place for place in range(at, len(lines)) if "╛" in lines[place])
        return next(ends, at) + 1
    if (end := _end_of_item(lines, at, patterns)) is not None:
        return end
    pattern = None
    if not kinds.isdisjoint(CONTINUATIONS):
        pattern, _ = _match(line, patterns)
    if pattern is None or pattern.reads not in CONTINUATIONS:
        return at + 1
    end, rest = at + 1, CONTINUATIONS[pattern.reads]
    while end < min(len(lines), at + MOST_WRAPPED) and rest.match(lines[end]):
        if _match(lines[end], patterns)[0] is not None:
            break
        end += 1
    return end


NUMBER = re.compile(r"^[\d.eE+-]+\s*$")


def _end_of_item(lines: list[str], at: int, patterns: Patterns) -> int | None:
    """Return the place after the last piece of an item; None if the line is no item that may be wrapped."""
    for pattern, expression in patterns:
        if pattern.incomplete is None:
            continue
        end, line = at + 1, lines[at]
        while re.search(pattern.incomplete, line) and end < min(len(lines), at + MOST_WRAPPED):
            line += lines[end]
            end += 1
        if end < len(lines) and expression.search(line) and NUMBER.match(lines[end]):
            end += 1
        if end > at + 1:
            return end
    return None


def _after_dict(lines: list[str], at: int, patterns: Patterns) -> int:
    """Return the place after the line that closes a dict; if none does, after its first line."""
    depth = 0
    for place in range(at, min(len(lines), at + MOST_WRAPPED)):
        if place > at and _match(lines[place], patterns)[0] is not None:
            break
        depth += lines[place].count("{") - lines[place].count("}")
        if depth <= 0:
            return place + 1
    return at + 1


def _joined(pieces: list[str]) -> str:
    """Return a wrapped line; white space at the place of a break may be lost."""
    line = pieces[0]
    for piece in pieces[1:]:
        is_at_separator = line.endswith((" -", " |")) or piece.startswith(("- ", "| "))
        line += f" {piece}" if is_at_separator else piece
    return line


def _seconds_of(match: re.Match[str]) -> float | None:
    """Return the seconds of a step in a progress bar; None before its first one."""
    if match["value"] == "?":
        return None
    value = float(match["value"])
    return value if match["unit"] == "s/it" else 1 / value if value else inf


def _step_of(match: re.Match[str], found: LogRecords, figures: Figures) -> int:
    """Return the step of a line: its own, that of the line before, or the next one."""
    if match.groupdict().get("step") is not None:
        return int(match["step"])
    if "key" in match.groupdict():
        return found.current or 0
    stated = next((figures[key] for key in found.log.step_keys if key in figures), found.current)
    return int(stated) if stated is not None else max(found.steps, default=0) + 1


def _values(pattern: LinePattern, match: re.Match[str]) -> Mapping[str, object]:
    if pattern.reads == "item":
        return {pattern.prefix + match["key"]: match["value"]}
    if pattern.reads == "dict":
        return read_dict(match["values"])
    if pattern.reads == "cells":
        return _cells(match["values"])
    pairs = (pair.rpartition(":") for pair in match["values"].split(SEPARATORS[pattern.reads]))
    found = {key.strip(): value for key, _, value in pairs}
    if pattern.reads == "pairs":
        return found
    numbers = {key: _WITH_UNIT.fullmatch(value) for key, value in found.items()}
    return {
        key: value if (number := numbers[key]) is None else number[1].replace(",", "")
        for key, value in found.items()
    }


BORDER = re.compile(r"[╞╘├][═─╤┼╧╪]+[╡╛┤]|[═╤]+╕")


def _cells(table: str) -> Mapping[str, object]:
    """Return the figures of a table: every text with the cell after it."""
    cells = [cell.strip() for cell in BORDER.sub("│", table).split("│")]
    filled = [cell for cell in cells if cell]
    return {key: value for key, value in pairwise(filled) if read_number(key) is None}


_WITH_UNIT = re.compile(
    r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?)(?: ?s(?:/step)?| ?tokens/(?:s|sample))?\s*",
    re.IGNORECASE,
)
"""A number before its unit (seconds or tokens, not a multiple of them), with commas between thousands."""
PROGRESS = "step_time"
"""The column that a progress bar fills."""


def _fill_from_progress(steps: list[MeasuredStep], found: LogRecords) -> list[MeasuredStep]:
    """Return steps with the seconds of a progress bar, if nothing else has seconds of them."""
    progress = found.progress
    if not progress or any(step.has_seconds for step in steps):
        return steps
    usual = median(progress.values())
    found.notes.append(
        f"{found.path.name}: no key has the seconds of a step; those of the progress bar are used ({usual:g} s/it), which "
        "are a smoothed mean"
    )
    return [replace(step, step_time=progress.get(step.step, usual)) for step in steps]


CSV = "csv"
"""The format of our own columns."""


def read_measured_file(
    path: Path, name: str | None = None, is_asynchronous: bool | None = None
) -> MeasuredSteps:
    """Return the measured steps of a file.

    Args:
        path: the file.
        name: the format; detected if None.
        is_asynchronous: whether generation overlapped with training; if None, the keys decide.

    Raises:
        ValueError: the file cannot be read, has no known format, or has no seconds of any step.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if name == CSV or (name is None and _has_our_columns(path)):
        steps = parse_steps(str(path), read_csv(path))
        notes = tuple(_note_long_stages(path, steps))
        return _checked(path, CSV, steps, str(path), is_asynchronous, notes)
    if name is not None:
        return _read(path, load_format(name), is_asynchronous)
    return _read(path, _find_format(path), is_asynchronous)


def _has_our_columns(path: Path) -> bool:
    if not _is_table(path):
        return False
    rows = read_csv(path)
    return any(column_in_seconds(each, SECONDS)[0] in SECONDS for each in (rows[0] if rows else ()))


def _find_format(path: Path) -> LogFormat:
    """Return the format that knows most columns of a file; raise `ValueError` if two know equally many."""
    if not (read_csv(path) if _is_table(path) else _read_text(path).strip()):
        raise ValueError(f"{path} is empty: it has no line of figures")
    scores: dict[str, int] = {}
    damaged: list[str] = []
    cut: list[str] = []
    for name in known_formats():
        log = load_format(name)
        try:
            found = read_records(path, log)
        except ValueError as error:
            damaged.append(str(error))
            continue  # or the lines are of another format
        damaged += found.damage[:1]
        cut += [note for note in found.notes if note.endswith(SKIPPED)]
        both = (_columns(found.steps, log, known) for known in (False, True))
        scores[name] = len(set().union(*both))
    most = max(scores.values(), default=0)
    best = [name for name, score in scores.items() if score == most]
    if not most and damaged:
        raise ValueError(damaged[0])
    if not most and cut:
        raise ValueError(f"{path} has no whole step: {cut[0]}")
    if not most:
        formats = ", ".join([CSV, *known_formats()])
        raise ValueError(
            f"{path}: its format is unknown; choose one of {formats} with --format, or write the steps as a CSV with some "
            f"of the columns {', '.join(COLUMNS)}"
        )
    if len(best) > 1:
        raise ValueError(
            f"{path}: the format could be {' or '.join(best)}; choose one with --format"
        )
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
    levels = [
        figures[key] for figures in records.values() for key in log.level_keys if key in figures
    ]
    if levels and known is None:
        known = max(levels) > 0
        found.notes.append(
            f"{path.name}: generation is up to {max(levels):g} steps ahead of training"
        )
    keys = log.keys(is_asynchronous=bool(known))
    steps = [
        MeasuredStep(step=step, **_picked(keys, figures))
        for step, figures in sorted(records.items())
    ]
    steps = _fill_from_progress(steps, found)
    notes = [*found.notes, *_note_long_stages(path, steps)]
    if known is None and log.asynchronous:
        notes.append(
            f"{path.name}: no key is specific to asynchronous training, so generation and training are read as taking turns"
        )
    source = f"{path.name} ({log.description})"
    return _checked(path, log.name, steps, source, known, tuple(notes), log)


def _picked(keys: dict[str, Keys], figures: dict[str, float]) -> dict[str, float]:
    found = {column: pick(aliases, figures) for column, aliases in keys.items()}
    known = {column: value for column, value in found.items() if value is not None}
    if "output_tokens" not in known and {"tokens_per_rollout", "prompt_tokens"} <= set(known):
        outputs = known["tokens_per_rollout"] - known["prompt_tokens"]
        if outputs > 0:
            known["output_tokens"] = outputs
    return known


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
            wanted = "; it needs one of " + ", ".join(
                _first(keys[column]) for column in SECONDS if column in keys
            )
        cut = "".join(f"; {note}" for note in notes if note.endswith(SKIPPED))
        raise ValueError(f"{path}: has no seconds of a step under {framework}'s names{wanted}{cut}")
    for step in kept:
        for problem in _impossible(step):
            raise ValueError(f"{path}: step {step.step}: {problem}")
    return MeasuredSteps(
        source=source,
        framework=framework,
        steps=kept,
        is_asynchronous=is_asynchronous,
        notes=notes,
    )


def _note_long_stages(path: Path, steps: Iterable[MeasuredStep]) -> Iterator[str]:
    """Yield the stages that take longer than their steps on average, such as with another unit."""
    for column in STAGES:
        both = [
            (seconds, step.step_time)
            for step in steps
            if (seconds := getattr(step, column)) is not None and step.step_time is not None
        ]
        stage, whole = (sum(values) for values in zip(*both, strict=True)) if both else (0.0, 0.0)
        if stage > whole * ROUNDING:
            mean = f"{stage / len(both):.4g} s of a step of {whole / len(both):.4g} s"
            yield f"{path.name}: {column} takes {mean}; check their units"


STAGES = ("generation", "busy", "wait", "score", "train", "other")
"""Columns of seconds that are a part of a step. Rollouts and a weight sync may last longer."""
MOST_SECONDS, MOST_TOKENS = 1e7, 1e9
"""Bounds of the seconds of a step and of the tokens of a rollout."""
TOKENS = ("output_tokens", "longest_output", "prompt_tokens", "tokens_per_rollout")
"""Columns of tokens of one rollout."""
ROUNDING = 1.001
"""A mean of equal lengths may be printed with fewer digits than their maximum."""


def _impossible(step: MeasuredStep) -> Iterator[str]:
    """Yield what is wrong with the values of a step."""
    for column in SECONDS:
        value = getattr(step, column)
        if value is not None and not 0 <= value < MOST_SECONDS:
            yield f"{column} must be from 0 to {MOST_SECONDS:g} s, got {value:g} s"
    if step.step_time == 0:
        yield "step_time must be above 0 s, got 0 s; remove the step"
    for column in TOKENS:
        value = getattr(step, column)
        if value is not None and not 0 < value < MOST_TOKENS:
            yield f"{column} must be above 0 and below {MOST_TOKENS:g}, got {value:g}"
    share = step.informative_share
    if share is not None and share > 1:
        yield f"informative_share must be in [0, 1], got {share:g}"
    mean, longest = step.output_tokens, step.longest_output
    if mean is not None and longest is not None and mean > longest * ROUNDING:
        yield f"output_tokens is a mean of {mean:g}, but longest_output is {longest:g}"


def _first(keys: Keys) -> str:
    """Return one key of a column as its name."""
    alias = keys[0]
    return alias if isinstance(alias, str) else alias[0]

"""Show a study, write it as study.csv, study.json, figures and a table, and read study.json back."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from rich.table import Table as TextTable

from streamrl.report.figures import png_of, study_figure
from streamrl.report.study_file import Study
from streamrl.report.study_table import MetricTable, Spread, find, label_of, make_table, name_of
from streamrl.runfile.escaping import csv_rows
from streamrl.runfile.keys import read_value
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.reading import decode_json
from streamrl.runfile.recorded_numbers import Count
from streamrl.runfile.result_files import check_results, write_results
from streamrl.runfile.sweep import Axis, Grid
from streamrl.sim.studies.results import StudyRow

if TYPE_CHECKING:
    from pandas import DataFrame

STUDY_CSV = "study.csv"
STUDY_JSON = "study.json"

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, repr=False)
class StudyResult:
    """A study and its results."""

    study: Study
    grid: Grid
    rows: Sequence[StudyRow]

    def __repr__(self) -> str:
        table = self.table(self.study.metrics[0])
        values = {place: spread.median for place, spread in table.spreads.items()}
        best = table.best(values.values())
        place = next(each for each, value in values.items() if value == best)
        what = f"{table.word} {table.name} {table.format(best)} with {self.grid.name(place)}"
        return f"<Study of {len(self.grid.cells)} combinations: {what}>"

    def _repr_html_(self) -> str:
        """Return the table of `streamrl simulate --sweep` for a notebook."""
        left_out = (*self.grid.refused, *self.grid.unfinished)
        notes = [
            *dict.fromkeys(s for metric in self.study.metrics for s in self.sentences(metric)),
            self.table_note,
            *self.doubts,
            *(f"left out: {self.grid.name(each.place)}: {each.reason}" for each in left_out),
        ]
        head, *rows = table_rows(self)
        return html_table(self.study.title, rows, head, notes)

    def to_frame(self) -> DataFrame:
        """Return the rows of study.csv: swept keys, seed and all figures of each simulation."""
        return frame_of(
            {
                **{key: read_value(text) for key, text in self.grid.values(row.place).items()},
                "seed": row.seed,
                **row.figures,
                "note": row.note,
            }
            for row in self.rows
        )

    def table(self, metric: str) -> MetricTable:
        """Return one metric over the grid."""
        return make_table(metric, self.grid.axes, self.rows)

    def sentences(self, metric: str) -> list[str]:
        """Return the findings on one metric, as sentences."""
        return find(self.study.finding, self.table(metric))

    def finding(self, metric: str) -> str:
        """Return the same findings as one string."""
        return " ".join(self.sentences(metric))

    @property
    def note(self) -> str:
        """Return what the values of a figure mean."""
        widest = self.widest
        if not widest:
            return self._note("")
        return self._note(
            f", bars are 95 % intervals, ± {widest * 100:.2g} % at most (smaller differences may be chance)"
        )

    @property
    def table_note(self) -> str:
        """Return what the values of a table mean."""
        parts = ["brackets hold bands, with the model error"] if self.has_bands else []
        if widest := self.widest:
            parts.append(f"differences below {widest * 100:.2g} % may be chance")
        return self._note("".join(f"; {part}" for part in parts))

    def _note(self, told: str) -> str:
        seeds = self.study.num_seeds
        spread = f"median of {seeds} seeds" if seeds > 1 else "one seed"
        spread += told
        num_left_out = len(self.grid.refused) + len(self.grid.unfinished)
        left_out = f"; {num_left_out} combinations left out" if num_left_out else ""
        return f"Simulated, {spread}{left_out}: {self.study.run_file.name}."

    @property
    def has_bands(self) -> bool:
        """Return whether a table of the study shows bands."""
        return any(row.bands.keys() & set(self.study.metrics) for row in self.rows)

    @property
    def widest(self) -> float:
        """Return half the widest 95 % interval of a step time, as a share of it."""
        return max(row.spread("step_time") for row in self.rows)

    @property
    def doubts(self) -> list[str]:
        """Return which combinations are less certain than requested, and why."""
        named: dict[str, list[str]] = {}
        for row in self.rows:
            if row.note:
                places = named.setdefault(row.note, [])
                places += [name for name in (self.grid.name(row.place),) if name not in places]
        return [f"{'; '.join(places)}: {note}" for note, places in named.items()]


def describe(report: StudyResult) -> Json:
    """Return a study as data: settings, findings, and median, lowest and highest value of every combination."""
    study, grid = report.study, report.grid
    tables = {metric: report.table(metric) for metric in study.metrics}
    return {
        "title": study.title,
        "question": study.question,
        "run": str(study.run_file),
        "set": study.overrides,
        "seeds": study.num_seeds,
        "axes": [
            {
                "keys": axis.keys,
                "points": axis.points,
                "name": axis.title,
                "labels": axis.point_labels,
                "scale": axis.scale,
            }
            for axis in grid.axes
        ],
        "finding": report.finding(study.metrics[0]),
        "findings": {metric: report.finding(metric) for metric in study.metrics},
        "rows": [
            {
                "values": grid.values(cell.place),
                "label": label_of(grid.axes, cell.place),
                "place": cell.place,
                "metrics": {
                    m: msgspec.to_builtins(tables[m].spreads[cell.place]) for m in study.metrics
                },
            }
            for cell in grid.cells
        ],
        "notes": report.doubts,
        "refused": [
            {"values": grid.values(refused.place), "reason": refused.reason}
            for refused in grid.refused
        ],
        "unfinished": [
            {"values": grid.values(each.place), "reason": each.reason} for each in grid.unfinished
        ],
    }


def write_study(report: StudyResult, directory: Path | str) -> list[Path]:
    """Write study.csv, study.json and a figure for each metric; return the figures' paths."""
    data = msgspec.json.format(msgspec.json.encode(describe(report)), indent=1)
    figures: dict[str, bytes | str | None] = {}
    for metric in report.study.metrics:
        sentences = [*report.sentences(metric), report.note]
        figure = study_figure(report.table(metric), report.study.title, sentences)
        figures[f"{metric}.png"] = png_of(figure)
    files = {STUDY_CSV: rows_text(report), STUDY_JSON: data + b"\n", **figures}
    write_results(Path(directory), files)
    return [Path(directory) / name for name in figures]


def rows_text(report: StudyResult) -> str:
    """Return CSV with a row for each combination and seed: the swept keys, the seed, every figure."""
    keys = [key for axis in report.grid.axes for key in axis.keys]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    rows: list[list[object]] = [[*keys, "seed", *report.rows[0].figures]]
    for row in report.rows:
        values = report.grid.values(row.place)
        figures = [f"{figure:.10g}" for figure in row.figures.values()]
        rows.append([*(values[key] for key in keys), row.seed, *figures])
    writer.writerows(csv_rows(rows))
    return file.getvalue()


def text_table(report: StudyResult, *, intervals: bool = False) -> TextTable:
    """Lay out the median of every metric with its band, a line for each combination."""
    text = TextTable(box=None, pad_edge=False)
    (head, *rows), num_axes = table_rows(report, intervals=intervals), len(report.grid.axes)
    for place, name in enumerate(head):
        text.add_column(name, justify="left" if place < num_axes else "right")
    for row in rows:
        text.add_row(*row)
    return text


def table_rows(report: StudyResult, *, intervals: bool = False) -> Iterator[list[str]]:
    """Yield the heads of a table of all combinations, then its rows."""
    tables = [report.table(metric) for metric in report.study.metrics]
    axes = report.grid.axes
    yield [*(axis.title for axis in axes), *(name_of(table.metric) for table in tables)]
    for cell in report.grid.cells:
        labels = [a.point_labels[at] for a, at in zip(axes, cell.place, strict=True)]
        spreads = ((table, table.spreads[cell.place]) for table in tables)
        yield [*labels, *(t.format_spread(each, intervals=intervals) for t, each in spreads)]


STUDY_CSV, STUDY_JSON = "study.csv", "study.json"
TIERS = "tiers."


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the grid."""

    values: dict[str, str]
    """Value of every swept key."""
    label: str
    place: tuple[Count, ...]
    """Its point on every axis."""
    metrics: dict[str, Spread]


class RecordedRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that cannot run or does not finish, and the reason."""

    values: dict[str, str]
    reason: str


class StudyJson(msgspec.Struct, frozen=True, kw_only=True):
    """The part of study.json that is read back."""

    title: str
    question: str = ""
    run: str = ""
    seeds: int = 1
    axes: list[Axis]
    findings: dict[str, str]
    """One or more sentences for each metric."""
    rows: list[Combination]
    notes: list[str] = []
    """Reasons why combinations are less certain than requested."""
    refused: list[RecordedRefusal] = []
    unfinished: list[RecordedRefusal] = []


class RecordedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """A what-if study."""

    name: str
    path: Path
    found: StudyJson
    tiers: dict[str, float]
    """Mean share of busy seconds by tier, if study.csv has it."""

    @property
    def metrics(self) -> list[str]:
        """Return its metrics, the main one first."""
        return list(self.found.findings)

    def table(self, metric: str) -> MetricTable:
        """Return one metric over the grid."""
        spreads = {row.place: row.metrics[metric] for row in self.found.rows}
        return MetricTable(metric, tuple(self.found.axes), spreads)


def read_study(path: Path, name: str) -> RecordedStudy:
    """Read study.json next to a study.csv.

    Raises:
        ValueError: the file is missing, is not a study, is mixed with another command's results, or has an axis or row that does not match the others.
    """
    check_results(path)
    file = path.with_name(STUDY_JSON)
    try:
        found = decode_json(file, StudyJson)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: not a study: {error}") from None
    _check(found, file)
    return RecordedStudy(name=name, path=file, found=found, tiers=_read_tiers(path))


def _read_tiers(path: Path) -> dict[str, float]:
    """Return the means of columns tiers.TIER over all rows."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = [name for name in (rows[0] if rows else {}) if name.startswith(TIERS)]
        return {
            name.removeprefix(TIERS): sum(float(row[name]) for row in rows) / len(rows)
            for name in names
        }
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not the rows of a study: {error}") from None


def _check(found: StudyJson, file: Path) -> None:
    if not found.axes or not found.rows:
        raise ValueError(f"{file}: a study needs at least one axis and one row")
    for axis in found.axes:
        if len(axis.point_labels) != len(axis.points):
            raise ValueError(f"{file}: {axis.title!r} needs one label for each of its points")
    sizes = [len(axis.points) for axis in found.axes]
    for row in found.rows:
        if len(row.place) != len(sizes) or not all(map(_is_point, row.place, sizes)):
            raise ValueError(f"{file}: row {row.label!r} is outside the axes: {row.place}")
        for metric in found.findings:
            if metric not in row.metrics:
                raise ValueError(f"{file}: row {row.label!r} lacks {metric}")


def _is_point(at: int, size: int) -> bool:
    return 0 <= at < size

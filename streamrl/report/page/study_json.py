"""Read what `streamrl simulate --sweep -o DIR` leaves: the findings and spreads of study.json."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from streamrl.report.study_table import MetricTable, Spread
from streamrl.runfile.grid import Axis

STUDY_CSV, STUDY_JSON = "study.csv", "study.json"
TIERS = "tiers."


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the grid."""

    values: dict[str, str]
    """Of every swept key."""
    label: str
    place: tuple[int, ...]
    """Its point on every axis."""
    metrics: dict[str, Spread]


class RecordedRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that cannot run, or does not finish, and why."""

    values: dict[str, str]
    reason: str


class StudyJson(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of study.json."""

    title: str
    question: str = ""
    run: str = ""
    seeds: int = 1
    axes: list[Axis]
    findings: dict[str, str]
    """A sentence or more for each metric."""
    rows: list[Combination]
    notes: list[str] = []
    """What keeps combinations from being as exactly known as was asked for."""
    refused: list[RecordedRefusal] = []
    unfinished: list[RecordedRefusal] = []


class RecordedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """A what-if study."""

    name: str
    path: Path
    found: StudyJson
    tiers: dict[str, float]
    """Mean share of busy seconds by tier, where study.csv says."""

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that it is about, the first one first."""
        return list(self.found.findings)

    def table(self, metric: str) -> MetricTable:
        """Return one metric over the grid."""
        spreads = {row.place: row.metrics[metric] for row in self.found.rows}
        return MetricTable(metric, tuple(self.found.axes), spreads)


def read_study(path: Path, name: str) -> RecordedStudy:
    """Read study.json beside a study.csv.

    Raises:
        ValueError: the file is missing, is no study, or has an axis or row that the others do not know.
    """
    file = path.with_name(STUDY_JSON)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=StudyJson)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: not a study: {error}") from None
    _check(found, file)
    return RecordedStudy(name=name, path=file, found=found, tiers=_read_tiers(path))


def _read_tiers(path: Path) -> dict[str, float]:
    """Average the columns tiers.measured, tiers.composed and tiers.roofline over all rows."""
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
        raise ValueError(f"{file}: a study has an axis and a row at least")
    for axis in found.axes:
        if len(axis.point_labels) != len(axis.points):
            raise ValueError(f"{file}: {axis.title!r} has not one label for each of its points")
    sizes = [len(axis.points) for axis in found.axes]
    for row in found.rows:
        if len(row.place) != len(sizes) or not all(map(_is_point, row.place, sizes)):
            raise ValueError(f"{file}: row {row.label!r} is at no point of the axes: {row.place}")
        for metric in found.findings:
            if metric not in row.metrics:
                raise ValueError(f"{file}: row {row.label!r} lacks {metric}")


def _is_point(at: int, size: int) -> bool:
    return 0 <= at < size

"""Read what `streamrl simulate --sweep -o DIR` leaves: the findings and spreads of study.json."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

STUDY_CSV, STUDY_JSON = "study.csv", "study.json"
TIERS = "tiers."


class RecordedSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A metric over the seeds of one combination."""

    median: float
    least: float
    most: float


class RecordedAxis(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that varies."""

    name: str
    labels: list[str]
    keys: list[str] = []


class Combination(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the grid."""

    values: dict[str, str]
    """Of every swept key."""
    label: str
    metrics: dict[str, RecordedSpread]


class RecordedRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that cannot run, and why."""

    values: dict[str, str]
    reason: str


class StudyJson(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of study.json."""

    title: str
    question: str = ""
    run: str = ""
    seeds: int = 1
    axes: list[RecordedAxis]
    findings: dict[str, str]
    """A sentence or more for each metric."""
    rows: list[Combination]
    refused: list[RecordedRefusal] = []


class RecordedStudy(msgspec.Struct, frozen=True, kw_only=True):
    """A what-if study."""

    name: str
    path: Path
    found: StudyJson
    tiers: dict[str, float]
    """Mean share of busy seconds by tier, where study.csv says."""

    @property
    def metrics(self) -> list[str]:
        """Give the metrics that it is about, the first one first."""
        return list(self.found.findings)

    def series(self) -> dict[str, list[Combination]]:
        """Give the combinations by the labels of all axes but the first, in the order of the rows."""
        found: dict[str, list[Combination]] = {}
        for row in self.found.rows:
            found.setdefault(self._rest(row), []).append(row)
        return found

    def place(self, row: Combination) -> int:
        """Give a combination's point on the first axis."""
        labels = self.found.axes[0].labels
        return max(
            (i for i, label in enumerate(labels) if _starts(row.label, label)),
            key=lambda i: len(labels[i]),
        )

    def _rest(self, row: Combination) -> str:
        label = self.found.axes[0].labels[self.place(row)]
        return row.label[len(label) :].removeprefix(", ")


def _starts(text: str, label: str) -> bool:
    """Whether a combination's label begins with that of a point of the first axis, and not a longer one."""
    return text == label or text.startswith(f"{label}, ")


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
        with path.open(newline="") as file:
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
    for row in found.rows:
        if not any(_starts(row.label, label) for label in found.axes[0].labels):
            raise ValueError(f"{file}: row {row.label!r} is at no point of {found.axes[0].name!r}")
        for metric in found.findings:
            if metric not in row.metrics:
                raise ValueError(f"{file}: row {row.label!r} lacks {metric}")

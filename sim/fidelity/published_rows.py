"""Published measurements with our predictions, and their errors."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable, Sequence
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import msgspec
import numpy as np
from rich.table import Table

from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.step_errors import Stage
from streamrl.record.band import StepBasis

PUBLISHED = PROFILES / "published"
UNKNOWN = 0.1
"""A prediction whose range is wider than this depends on inputs that its source does not state."""
Evidence = Literal["not fitted", "left out", "in sample"]
"""How much a row says.

- not fitted: no constant was fitted to the row.
- left out: constants were fitted to rows like it, and it is predicted by constants without its model.
- in sample: constants were fitted to the row itself. Its error is too small.
"""


AT_DEFAULTS = "racks at defaults"
"""A run file that does not say how nodes are placed in racks: NVLink joins up to 72 GPUs."""
AT_LOW_ENDS = "low ends"
"""The lowest prediction, where a source does not state an input."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure and the range of its prediction.

    A row is predicted for the lowest and highest value of an input that the source does not state. If
    a range is published, the row has both ends.
    """

    name: str
    """Model, GPUs, layout and load, for readers of the tables."""
    group: str
    """Group in summaries of errors: a framework and release, or an engine and version."""
    shape: str
    """Model and kind of GPU. All rows of one shape are left out of a fit together."""
    unit: str
    published: tuple[float, float]
    predicted: tuple[float, float]
    band: tuple[float, float] | None = None
    """Ends of the band that a report shows for the prediction; None for what has no band."""
    counts_as_range: bool = False
    """Whether the prediction is its range over unknown inputs. It has no band then, and the published figure is within the
    range or outside.
    """
    is_fitted: bool = False
    """Whether constants of the prediction were fitted to rows of this shape."""
    left_out: float | None = None
    """The prediction with constants that were fitted without this shape."""
    beside: tuple[float, float] | None = None
    """Another tool's prediction of the row."""
    stage: Stage | Literal["step"] | None = None
    """The stage of a step that the figure is about, or the whole step; None for figures of engines."""
    basis: StepBasis | None = None
    """What the prediction of a stage or step rests on."""
    has_stages: bool = True
    """Whether stages of the step were published too; a right total of two wrong stages is not seen without them."""
    num_gpus: int | None = None
    """GPUs of a published step; None for other figures."""
    partitions: tuple[str, ...] = ()
    """Groups of summaries, if the row counts in several."""
    readings: dict[str, float] = {}
    """The prediction by other readings of its inputs: `AT_DEFAULTS` and `AT_LOW_ENDS`."""
    configuration: str = ""
    """What rows that repeat one configuration have in common; "" for a row of its own."""
    system: str = ""
    """The system of `[policies]` of a published step."""
    note: str = ""
    """Unknown inputs, and assumptions about them."""
    source: str

    @property
    def error(self) -> float:
        """Return predicted over published, minus 1, for the geometric middle of each range.

        For fitted rows it is the error of the prediction without their shape, if there is one.
        """
        return self.best / middle(self.published) - 1

    @property
    def best(self) -> float:
        """Return the prediction that rests least on the row: without its shape, else the middle of its range."""
        return middle(self.predicted) if self.left_out is None else self.left_out

    def error_by(self, reading: str) -> float:
        """Return the error of another reading, or that of the prediction if the row does not have it."""
        return self.readings.get(reading, self.best) / middle(self.published) - 1

    @property
    def error_beside(self) -> float | None:
        """Return the relative error of the other tool's prediction; None if it has none."""
        return None if self.beside is None else middle(self.beside) / middle(self.published) - 1

    @property
    def width(self) -> float:
        """Return the highest prediction over the lowest, minus 1: the effect of unknown inputs."""
        least, most = min(self.predicted), max(self.predicted)
        if least == most:  # may be 0, where a stage takes no time without a correction
            return 0.0
        return most / least - 1 if least else inf

    @property
    def has_unknown_inputs(self) -> bool:
        """Return whether inputs that the source does not state change the prediction by more than `UNKNOWN`."""
        return self.width > UNKNOWN

    @property
    def is_in_band(self) -> bool | None:
        """Return whether the published figure is in the band of the prediction; None without a band."""
        return self.band and self.band[0] <= middle(self.published) <= self.band[1]

    @property
    def is_above_band(self) -> bool | None:
        """Return whether the published figure is above the band of the prediction; None without a band."""
        return self.band and middle(self.published) > self.band[1]

    @property
    def is_within_range(self) -> bool | None:
        """Return whether the published figure is within the range of the prediction; None if it does not count as one."""
        if not self.counts_as_range:
            return None
        return min(self.predicted) <= middle(self.published) <= max(self.predicted)

    @property
    def evidence(self) -> Evidence:
        """Return whether a constant was fitted to the row's source, and how the row is judged then."""
        if not self.is_fitted:
            return "not fitted"
        return "in sample" if self.left_out is None else "left out"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predictions over published rows."""

    rows: int
    median: float
    """Median of the absolute relative errors."""
    p90: float
    worst: float
    """The largest of the absolute relative errors."""
    bias: float
    """Median of the signed errors."""
    width: float
    """Median of the highest prediction over the lowest, minus 1: the effect of unknown inputs."""
    widest: float = 0.0
    """The largest of them."""
    in_band: float | None = None
    """Share of the published figures that are in the bands of their predictions, of those with a band."""
    above_band: float | None = None
    """Share of the published figures that are above these bands."""
    band: tuple[float, float] | None = None
    """Medians of the lower and the upper ends of these bands, relative to the prediction."""
    within_range: float | None = None
    """Share of the published figures within the range of their predictions, of those that count as ranges."""
    rows_beside: int = 0
    """Rows that another tool predicts too."""
    median_beside: float | None = None
    """Median of that tool's absolute errors; None if it predicts no row."""


def read_published(path: Path) -> list[dict[str, str]]:
    """Read a CSV table of profiles/published, without its comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@functools.cache
def first_predictions() -> dict[str, tuple[float, float]]:
    """Return by name the range of the earliest prediction of each row of which it was kept."""
    table = read_published(PUBLISHED / "first_predictions.csv")
    return {line["name"]: (float(line["lowest"]), float(line["highest"])) for line in table}


def first_errors(rows: Sequence[Row]) -> list[float]:
    """Return the absolute errors of the first predictions of rows, as far as they were kept."""
    pairs = ((row, first_predictions().get(row.name)) for row in rows)
    return [abs(middle(ends) / middle(row.published) - 1) for row, ends in pairs if ends]


def median_by(rows: Sequence[Row], reading: str) -> float | None:
    """Return the median error of rows by another reading; None if no row has it."""
    if not any(reading in row.readings for row in rows):
        return None
    return median(abs(row.error_by(reading)) for row in rows)


def num_configurations(rows: Sequence[Row]) -> int:
    """Return how many configurations rows are of: one configuration may be published for several releases."""
    stated = [row.configuration for row in rows if row.configuration]
    return len(set(stated)) + len(rows) - len(stated)


def publisher(source: str) -> str:
    """Return who published a row: the repository of its source, or its first words. Pages of one repository are one."""
    words = source.replace(",", " ").split()
    return " ".join(words[:2]) if words[0] == "NeMo" else words[0].rpartition("/")[2]


def summarise(rows: Sequence[Row]) -> Summary:
    """Return the summary of errors of rows."""
    errors = np.array([row.error for row in rows])
    in_band = [row.is_in_band for row in rows if row.is_in_band is not None]
    above = [row.is_above_band for row in rows if row.is_above_band is not None]
    ends = [(row.band[0] / row.best, row.band[1] / row.best) for row in rows if row.band]
    within = [row.is_within_range for row in rows if row.is_within_range is not None]
    others = np.array([row.error_beside for row in rows if row.error_beside is not None])
    return Summary(
        rows=len(rows),
        median=float(np.median(abs(errors))),
        p90=float(np.quantile(abs(errors), 0.9)),
        worst=float(abs(errors).max()),
        bias=float(np.median(errors)),
        width=float(np.median([row.width for row in rows])),
        widest=max(row.width for row in rows),
        in_band=fmean(in_band) if in_band else None,
        above_band=fmean(above) if above else None,
        band=tuple(np.median(ends, axis=0).tolist()) if ends else None,
        within_range=fmean(within) if within else None,
        rows_beside=len(others),
        median_beside=float(np.median(abs(others))) if len(others) else None,
    )


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each group, in order of appearance; a row with partitions is in each of them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.partitions or (row.group,):
            groups.setdefault(name, []).append(row)
    is_sorted = any(row.partitions for row in rows)
    return dict(sorted(groups.items())) if is_sorted else groups


def group_table(rows: Sequence[Row], title: str) -> Table:
    """Lay out the errors of each group and of all rows for the terminal."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("group")
    has_other = any(row.beside is not None for row in rows)
    names = ("rows", "median", "p90", "bias", "range", IN_BAND, "band")
    for name in (*names, *(("AIConfigurator",) * has_other)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, some in (*grouped(rows).items(), ("all", rows)):
        found = summarise(some)
        errors = f"{found.median:.1%}", f"{found.p90:.1%}", f"{found.bias:+.1%}"
        width = width_text(found)
        figures = (str(found.rows), *errors, width, in_band_text(found), band_text(found))
        table.add_row(name, *figures, *((beside_text(found),) * has_other))
    return table


IN_BAND = "in band / above / below"


def in_band_text(found: Summary) -> str:
    """Return the shares of rows in their bands, above them and below them; nothing without bands."""
    if found.in_band is None or found.above_band is None:
        return ""
    shares = (found.in_band, found.above_band, 1 - found.in_band - found.above_band)
    return " / ".join(f"{max(0.0, share):.0%}" for share in shares)


def width_text(found: Summary) -> str:
    """Return the median width of ranges, and the share of published figures within them; nothing without ranges."""
    width = f"{found.width:.0%}" if found.width > 0 else ""
    width += f" (widest {found.widest:.0%})" if found.widest > found.width else ""
    within = "" if found.within_range is None else f"{found.within_range:.0%} within"
    return ", ".join(filter(None, (width, within)))


def band_text(found: Summary) -> str:
    """Return the median ends of bands, relative to the prediction; nothing without bands."""
    return "" if found.band is None else " to ".join(f"{end - 1:+.0%}" for end in found.band)


def beside_text(found: Summary) -> str:
    """Return the median error of the other tool, and its rows if it has fewer."""
    if found.median_beside is None:
        return ""
    some = f" of {found.rows_beside}" if found.rows_beside < found.rows else ""
    return f"{found.median_beside:.1%}{some}"


def row_table(rows: Iterable[Row], title: str) -> Table:
    """Lay out rows for the terminal."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in ("row", "unit"):
        table.add_column(name)
    for name in ("published", "predicted", "left out", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        without = "" if row.left_out is None else f"{row.left_out:.4g}"
        cells = (
            range_text(row.published, 4),
            range_text(row.predicted, 4),
            without,
            f"{row.error:+.1%}",
        )
        table.add_row(row.name, row.unit, *cells)
    return table


def middle(ends: tuple[float, float]) -> float:
    """Return the geometric middle of a range: it is off by the same factor at both ends."""
    low, high = ends
    return sqrt(low * high)


def range_text(ends: tuple[float, float], digits: int) -> str:
    """Return both ends of a range as text, or one figure if they are equal."""
    low, high = (f"{end:.{digits}g}" for end in ends)
    return low if ends[0] == ends[1] else f"{low} to {high}"

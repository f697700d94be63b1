"""Rows of published measurements beside predictions, and their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from rich.table import Table


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure and the range in which the prediction lies.

    A row whose source leaves an input open is predicted for the least and the greatest value of that input;
    a row that is published as a range has both ends.
    """

    name: str
    """Model, GPUs, layout and load, as a reader would look it up."""
    group: str
    """What errors are summed up by: a framework and release, an engine and version."""
    shape: str
    """Model and kind of GPU: all rows of one shape are left out of a fit together."""
    unit: str
    published: tuple[float, float]
    predicted: tuple[float, float]
    is_fitted: bool = False
    """Whether constants of the prediction were fitted to rows of this shape."""
    left_out: float | None = None
    """The prediction of constants fitted without this shape."""
    note: str = ""
    """Which inputs are unknown, and what was assumed."""
    source: str

    @property
    def error(self) -> float:
        """Predicted over published, less 1: of the nearest ends, 0 where the ranges meet.

        Of rows that were fitted it is the error of the prediction without them, where there is one.
        """
        if self.left_out is not None:
            return _distance(self.published, (self.left_out, self.left_out))
        return _distance(self.published, self.predicted)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions are from published rows."""

    rows: int
    median: float
    """Of absolute relative errors."""
    p90: float
    bias: float
    """Median of the signed errors."""
    width: float
    """Median of the greatest prediction over the least, less 1: what unknown inputs leave open."""


def summarise(rows: Sequence[Row]) -> Summary:
    """Sum the errors of rows up."""
    errors = np.array([row.error for row in rows])
    return Summary(
        rows=len(rows),
        median=float(np.median(abs(errors))),
        p90=float(np.quantile(abs(errors), 0.9)),
        bias=float(np.median(errors)),
        width=float(np.median([max(row.predicted) / min(row.predicted) - 1 for row in rows])),
    )


def grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each group, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def group_table(rows: Sequence[Row], title: str) -> Table:
    """Lay the errors of each group out for the terminal, and of all rows."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("group")
    for name in ("rows", "median", "p90", "bias", "range"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, some in (*grouped(rows).items(), ("all", rows)):
        found = summarise(some)
        width = f"{found.width:.0%}" if found.width > 0 else ""
        figures = f"{found.median:.1%}", f"{found.p90:.1%}", f"{found.bias:+.1%}", width
        table.add_row(name, str(found.rows), *figures)
    return table


def row_table(rows: Iterable[Row], title: str) -> Table:
    """Lay rows out for the terminal."""
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


def _distance(published: tuple[float, float], predicted: tuple[float, float]) -> float:
    (least, most), (low, high) = published, predicted
    if low > most:
        return low / most - 1
    return high / least - 1 if high < least else 0.0


def range_text(ends: tuple[float, float], digits: int) -> str:
    """Write both ends of a range, or one figure where they are the same."""
    low, high = (f"{end:.{digits}g}" for end in ends)
    return low if ends[0] == ends[1] else f"{low} to {high}"

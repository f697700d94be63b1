"""Compare errors by partition with those of an earlier version, so that none rises unseen.

A partition is a group of published rows: a framework, an engine, a stage or a GPU. Stages are compared beside whole
steps, so a step cannot become better by two stages that became worse.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streamrl.runfile.result_files import replacing
from streamrl.sim.fidelity.bands import with_reported_bands
from streamrl.sim.fidelity.published_rows import Row, Summary, grouped, summarise
from streamrl.workload.data_files import parse_number, read_csv

PARTITIONS = "fidelity-partitions.csv"
RISE = 0.05
"""Share by which an error may rise."""
NOISE = 0.002
"""Rise of an error that is rounding, whatever the error."""
DIGITS = 4
LEAST_COVERAGE = 0.75
"""Share of whole steps in their bands, below which bands of 80 % are too narrow."""
STEPS = ("steps", "bands of whole steps")
"""The partition of all rows with a band of 80 %, each computed without its source."""
COLUMNS = ("set", "group", "rows", "median", "p90", "in_band", "half_band")


class Partition(NamedTuple):
    """The errors of one group of published rows."""

    rows: int
    """Rows that have a prediction."""
    median: float
    p90: float
    in_band: float | None
    """Share of the published figures in the bands of their predictions, or within ranges over unknown inputs; None
    without either.
    """
    half_band: float | None
    """Half the distance of the median ends of these bands, relative to the prediction."""


Partitions = dict[tuple[str, str], Partition]
"""By set and group."""


def partitions_of(sets: Mapping[str, Sequence[Row]]) -> Partitions:
    """Return the errors of each group of each set."""
    found = {
        (name, group): _partition(summarise(some))
        for name, rows in sets.items()
        for group, some in grouped(rows).items()
    }
    if banded := [row for row in sets.get(STEPS[0], ()) if row.band is not None]:
        found[STEPS] = _partition(summarise(banded))
    return found


def write_partitions(sets: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write the errors by partition as a CSV table."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for (name, group), found in partitions_of(sets).items():
            table.writerow([name, group, *found])


def read_partitions(path: Path) -> Partitions:
    """Read a table of `write_partitions`.

    Raises:
        ValueError: the file is no such table.
    """
    rows = read_csv(path)
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ValueError(f"{path} must have the columns {', '.join(COLUMNS)}, and rows")
    found: Partitions = {}
    for number, row in enumerate(rows, start=1):
        try:
            found[row["set"], row["group"]] = _read_row(row)
        except (TypeError, ValueError) as error:  # of a cell that is missing, or no number
            raise ValueError(f"{path}: row {number} is no row of errors: {error}") from None
    return found


def worsened(sets: Mapping[str, Sequence[Row]], before: Partitions) -> Iterator[str]:
    """Yield a line for each error that rose by more than `RISE`, and for rows and bands that were lost.

    Args:
        sets: published rows with the predictions of now. Sets that are not in it are not compared.
        before: the errors of an earlier version.
    """
    now = partitions_of(sets)
    for (name, group), old in before.items():
        if name not in sets:
            continue
        new = now.get((name, group))
        if new is None or new.rows < old.rows:
            yield f"{name}, {group}: {new.rows if new else 0} rows have a prediction, before {old.rows}"
            continue
        for what, error, least in (
            ("median error", new.median, old.median),
            ("p90 of errors", new.p90, old.p90),
        ):
            if error > least * (1 + RISE) + NOISE:
                yield f"{name}, {group}: {what} {error:.1%}, before {least:.1%}"
        yield from (
            f"{name}, {group}: {line}"
            for line in _worse_band(new, old, LEAST_COVERAGE if name == STEPS[0] else 1.0)
        )
    yield from _uncalibrated(sets.get(STEPS[0], ()))


def _worse_band(new: Partition, old: Partition, enough: float) -> Iterator[str]:
    """Yield what became worse of the bands of a partition.

    Args:
        new: errors of now.
        old: errors of an earlier version.
        enough: coverage above which it may fall: a band of 80 % that held all of a few rows may hold less of them.
    """
    if old.in_band is None:
        return
    if new.in_band is None:
        yield f"no row in the band, before {old.in_band:.0%}"
    elif new.in_band < min(old.in_band, enough) - NOISE:
        yield f"{new.in_band:.0%} of the rows in the band, before {old.in_band:.0%}"


def _uncalibrated(steps: Sequence[Row]) -> Iterator[str]:
    """Yield whether the bands that reports show hold too few whole steps: predictions changed, and the profile did not."""
    banded = [row for row in steps if row.band is not None and row.basis is not None]
    held = summarise(with_reported_bands(banded)).in_band if banded else None
    if held is not None and held < LEAST_COVERAGE:
        yield f"bands of reports: {held:.0%} of the rows in a band of 80 %; run streamrl validate --output docs"


def _partition(found: Summary) -> Partition:
    half = None if found.band is None else (found.band[1] - found.band[0]) / 2
    covered = found.within_range if found.in_band is None else found.in_band
    in_band, half_band = (
        None if figure is None else round(figure, DIGITS) for figure in (covered, half)
    )
    median, p90 = round(found.median, DIGITS), round(found.p90, DIGITS)
    return Partition(found.rows, median, p90, in_band, half_band)


def _read_row(row: Mapping[str, str]) -> Partition:
    in_band, half_band = (
        parse_number(row[key]) if row[key] else None for key in ("in_band", "half_band")
    )
    median, p90 = parse_number(row["median"]), parse_number(row["p90"])
    return Partition(int(row["rows"]), median, p90, in_band, half_band)

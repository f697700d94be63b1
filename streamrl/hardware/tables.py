"""Operator tables: seconds of one kernel by its shape, measured on one GPU with one backend.

A table is a CSV file of `profiles/measured/GPU/OPERATOR.BACKEND.DTYPE.csv`. Comment lines say what was
measured, by whom, under which licence; then a row for each shape and a column for each value of the
last axis (tokens, context or bytes). A cell that was not measured is empty.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.profile_table import ProfileTable

Floats: TypeAlias = NDArray[np.float64]
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Facts(ProfileTable, frozen=True, kw_only=True):
    """What the comment lines of a table say."""

    operator: str
    gpu: str
    """Name in profiles/gpus."""
    device: str
    """What the device called itself."""
    backend: str
    version: str
    dtype: str
    unit: str
    """Of every cell: us, ms or s."""
    source: str
    licence: str
    date: datetime.date
    columns: str
    """Axis of the columns."""
    distribution: str = ""
    """Of tokens over experts, where that matters."""


@dataclass(frozen=True)
class Table:
    """One operator's measured seconds.

    Attributes:
        keys: names of the axes that the rows go through.
        rows: (rows, keys) values of those axes.
        columns: (columns,) values of the last axis.
        seconds: (rows, columns), NaN where nothing was measured.
    """

    facts: Facts
    keys: tuple[str, ...]
    rows: Floats
    columns: Floats
    seconds: Floats

    @property
    def origin(self) -> str:
        """Say on what, with what and by whom this was measured."""
        facts = self.facts
        return (
            f"{facts.operator} {facts.dtype} on {facts.device}, {facts.backend} {facts.version} "
            f"({facts.source}, {facts.licence})"
        )


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        ValueError: a fact is missing or a cell is no positive number; names file, row and column.
    """
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    head = [line for line in lines if line.startswith("#")]
    facts = _read_facts(path, head)
    body = lines[len(head) :]
    if len(body) < 2:
        raise ValueError(f"{path}: no rows below the comment lines")
    names = body[0].split(",")
    keys = tuple(name for name in names if not name[:1].isdigit())
    columns = _numbers(path, len(head) + 1, names, names[len(keys) :])
    if not np.all(np.diff(columns) > 0):
        raise ValueError(f"{path}: row {len(head) + 1}: columns do not increase")
    cells = np.array(
        [
            _numbers(path, number, names, line.split(","), may_be_empty=len(keys))
            for number, line in enumerate(body[1:], len(head) + 2)
        ]
    )
    seconds = cells[:, len(keys) :] * UNITS[facts.unit]
    return Table(facts, keys, cells[:, : len(keys)], columns, seconds)


def _read_facts(path: Path, head: list[str]) -> Facts:
    pairs = (line.lstrip("# ").partition(": ") for line in head)
    found = {key: value.strip() for key, _, value in pairs}
    try:
        facts = msgspec.convert(found, Facts, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in ("source", "licence", "version", "backend", "device"):
        if not getattr(facts, name):
            raise ValueError(f"{path}: {name} is empty")
    if facts.unit not in UNITS:
        raise ValueError(f"{path}: unit {facts.unit!r}; known: {', '.join(UNITS)}")
    return facts


def _numbers(
    path: Path, row: int, names: list[str], cells: list[str], may_be_empty: int | None = None
) -> Floats:
    """Read one line's cells; from column `may_be_empty` on, an empty one becomes NaN."""
    if may_be_empty is not None and len(cells) != len(names):
        raise ValueError(f"{path}: row {row}: {len(cells)} cells under {len(names)} columns")
    try:
        values = [float(cell) if cell else np.nan for cell in cells]
    except ValueError:
        values = []
    allowed = len(cells) if may_be_empty is None else may_be_empty
    if not values or not all(
        (isfinite(value) and value > 0) or (not cells[i] and i >= allowed)
        for i, value in enumerate(values)
    ):
        _refuse(path, row, names[-len(cells) :], cells, allowed)
    return np.array(values)


def _refuse(path: Path, row: int, names: list[str], cells: list[str], allowed: int) -> None:
    """Raise for the first cell that is no positive finite number."""
    for i, (name, cell) in enumerate(zip(names, cells, strict=True)):
        try:
            is_good = isfinite(float(cell)) and float(cell) > 0
        except ValueError:
            is_good = not cell and i >= allowed
        if not is_good:
            raise ValueError(f"{path}: row {row}, column {name}: {cell!r} is not a positive number")

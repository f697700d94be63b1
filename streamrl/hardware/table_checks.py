"""What a table of measurements may not say: physics, with room for noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamrl.hardware.operators import OPERATORS, Peak
from streamrl.hardware.tables import Table

FALL = 0.8
"""Share of an earlier cell's seconds below which more work is called faster: less is noise or another kernel."""
MOST_FALLS = 0.25
"""Share of such cells that a table may have; H100's all-to-all has 20 %, everything else under 8 %."""
MOST_TOO_FAST = 0.01
"""Share of cells that may beat the datasheet: small shapes stay in the cache between two calls."""
UNCERTAIN = ("moe",)
"""Operators whose traffic depends on what the router chose, which the table does not say."""


class Violation(NamedTuple):
    """One thing that a table says against physics."""

    is_wrong: bool
    """Whether the table is refused; else it is only noted."""
    text: str


def check_table(table: Table, peak: Peak) -> list[Violation]:
    """Find cells that beat the datasheet, and work that gets faster as it grows."""
    return [*_too_fast(table, peak), *_falls(table)]


def _too_fast(table: Table, peak: Peak) -> list[Violation]:
    operator = OPERATORS[table.facts.operator]
    if table.facts.operator in UNCERTAIN:
        return []
    axes = {name: table.rows[:, i][:, None] for i, name in enumerate(table.keys)}
    axes[table.facts.columns] = table.columns[None, :]
    ratio = operator.roofline(peak)(axes) / table.seconds
    count, size = int(np.nansum(ratio > 1)), int(np.sum(~np.isnan(table.seconds)))
    if not count:
        return []
    row, column = np.unravel_index(np.nanargmax(ratio), ratio.shape)
    text = (
        f"{count} of {size} cells beat the datasheet, row {_name(table, int(row))}, "
        f"column {table.columns[column]:g} by {ratio[row, column]:.2f}"
    )
    return [Violation(count > MOST_TOO_FAST * size, text)]


def _falls(table: Table) -> list[Violation]:
    seconds = np.where(np.isnan(table.seconds), 0.0, table.seconds)
    most = np.maximum.accumulate(seconds, axis=1)[:, :-1]
    later = table.seconds[:, 1:]
    is_fall = later < FALL * most
    count, size = int(is_fall.sum()), int(np.sum(~np.isnan(later)))
    if not count:
        return []
    ratio = np.where(is_fall, later / np.where(most > 0, most, 1.0), 1.0)
    row, column = np.unravel_index(np.argmin(ratio), ratio.shape)
    text = (
        f"{count} of {size} cells take under {FALL:.0%} of a smaller shape's seconds, "
        f"row {_name(table, int(row))}, column {table.columns[column + 1]:g} "
        f"{ratio[row, column]:.0%}"
    )
    return [Violation(count > MOST_FALLS * size, text)]


def _name(table: Table, row: int) -> str:
    pairs = zip(table.keys, table.rows[row], strict=True)
    return " ".join(f"{key}={value:g}" for key, value in pairs)

"""Report what differs between two run files or plans: keys, dollars, hours and idle time; on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.run_comparison import Against
from streamrl.report.against_report import band_lines, figures, verdict
from streamrl.runfile.config import Run
from streamrl.runfile.files import values_by_key

ABSENT = "absent"
IGNORED = ("execute.output",)
"""Keys that say where results go, and change nothing of a run."""
TOTALS = (
    *("step", "$ a step", "$ per million tokens", "  idle", "staleness, mean"),
    *("$ a step for idle GPUs", "whole training", "  $", "GPUs that generate", "GPUs that train"),
    "GPUs that compute rewards",
)
"""Figures that are shown, by the beginning of their name."""


class ChangedKey(NamedTuple):
    """A key of the run file with two values."""

    key: str
    a: object
    b: object


def changed_keys(a: Run, b: Run) -> list[ChangedKey]:
    """Return the keys whose values differ, in the order of the run file."""
    ours, theirs = values_by_key(a), values_by_key(b)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    changes = (ChangedKey(key, ours.get(key), theirs.get(key)) for key in keys)
    return [each for each in changes if each.a != each.b and each.key not in IGNORED]


def diff_report(
    changes: Sequence[ChangedKey], against: Against | None, why_not: str, *, intervals: bool = False
) -> RenderableType:
    """Lay out what differs for a terminal; `why_not` says why there are no figures."""
    if not changes:
        return Text("A and B are the same run.")
    keys = Table("key", "A", "B", box=None, pad_edge=False)
    for change in changes:
        keys.add_row(change.key, _shown(change.a), _shown(change.b))
    if against is None:
        return Group(keys, Text(), Text(why_not))
    table = Table("", "A", "B", "A - B", box=None, pad_edge=False)
    for row in _totals(against, intervals):
        table.add_row(*row)
    bands = [Text(line) for line in band_lines(against)]
    return Group(keys, Text(), table, *bands, Text(), Text(verdict(against), style="bold"))


def diff_markdown(
    changes: Sequence[ChangedKey], against: Against | None, why_not: str, *, intervals: bool = False
) -> str:
    """Return what differs as Markdown, for the description of a pull request."""
    if not changes:
        return "A and B are the same run."
    parts = [_table(("key", "A", "B"), [(f"`{c.key}`", _shown(c.a), _shown(c.b)) for c in changes])]
    if against is None:
        return "\n\n".join([*parts, why_not])
    parts.append(_table(("", "A", "B", "A - B"), list(_totals(against, intervals))))
    return "\n\n".join([*parts, *band_lines(against), verdict(against)])


def _totals(against: Against, intervals: bool) -> Iterator[tuple[str, ...]]:
    rows = figures(against, intervals=intervals)
    yield from (row for row in rows if row[0].startswith(TOTALS))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.strip().replace('|', '/') for cell in line)} |" for line in lines
    )


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ABSENT if value is None else str(value)

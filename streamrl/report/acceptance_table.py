"""Show an acceptance test: a table of measurements, and lines about the plan and the decision."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from streamrl.record.band import ends_of
from streamrl.runfile.formatting import format_step_time, listing, long_dollars, long_time
from streamrl.sim.acceptance.result import Acceptance, Comparison, Outlook


def acceptance_table(found: Acceptance) -> Table:
    """Return a row for each measurement."""
    title = f"{found.num_gpus} x {found.gpu} ({found.device})"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("measurement")
    for name in ("expected", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("changes")
    for each in found.comparisons:
        table.add_row(*_cells(each))
    return table


def _cells(row: Comparison) -> Iterator[str]:
    yield row.name
    yield _amount(row.expected, row.unit)
    yield _amount(row.measured, row.unit)
    yield f"{row.measured / row.expected:.2f}"
    changes = row.changes or "nothing"
    yield f"{changes} ({row.note})" if row.note else changes


def _amount(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    return f"{value * 1e3:.3g} ms"


def acceptance_lines(found: Acceptance) -> Iterator[str]:
    """Yield what was not measured, the plan before and after, and the decision with its reasons."""
    if found.kept:
        yield f"not measured, so as planned: {listing(found.kept)}"
    yield f"planned:  {_outlook(found.before)}"
    yield f"measured: {_outlook(found.after)}"
    yield f"step: {found.slowdown - 1:+.1%}; the limit is {found.limit:+.0%}"
    yield f"{found.decision}: {'; '.join(found.reasons)}"


def _outlook(found: Outlook) -> str:
    """Return a step, the run and its dollars, each with its band."""
    step = format_step_time(found.step_time, None, ends_of(found.step_band))
    run = long_time(found.seconds, None, ends_of(found.seconds_band))
    return (
        f"step {step}, run {run}, {long_dollars(found.dollars, None, ends_of(found.dollars_band))}"
    )

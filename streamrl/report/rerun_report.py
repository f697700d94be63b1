"""Show a recorded run, its simulation and a changed simulation side by side on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.metrics import RATIOS, Metrics
from streamrl.record.run_comparison import Rerun
from streamrl.report.run_tables import LABELS, figure_text
from streamrl.runfile.formatting import format_duration, format_share


def rerun_report(rerun: Rerun, *, intervals: bool = False) -> RenderableType:
    """Lay out all three for a terminal, with the saving of the changes.

    Args:
        rerun: the three runs.
        intervals: whether to show 95 % intervals (sampling error) as well.
    """
    first, last = rerun.recorded.counted_steps
    table = Table(
        f"steps {first} to {last}", "recorded", "simulated", "changed", box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    runs = (rerun.recorded, rerun.as_it_was, rerun.changed)
    for figures in zip(*(_figures(run, intervals) for run in runs), strict=True):
        table.add_row(figures[0][0], *(shown for _, shown in figures))
    notes = [Text(rerun.recorded.note, style="yellow")] if rerun.recorded.note else []
    told = Text(verdict(rerun), style="bold")
    return Group(table, Text(), *notes, Text(error_line(rerun)), told)


def verdict(rerun: Rerun) -> str:
    """Return a sentence on what the changes would have saved or cost."""
    ratio, what = rerun.step_time_ratio, ", ".join(rerun.changes) or "no change"
    if ratio.value == 1:
        return f"{what} would have made no difference."
    done, more = ("saved", "") if ratio.value < 1 else ("taken", " more")
    share = format_share(abs(1 - ratio.value))
    if ratio.interval is None:
        return f"{what} would have {done} {share}{more} of a step's time; too few steps say how sure that is."
    half = format_share((ratio.interval[1] - ratio.interval[0]) / 2)
    chance = "" if ratio.differs_from(1.0) else ", which may be chance"
    return f"{what} would have {done} {share} ± {half}{more} of a step's time{chance}."


def error_line(rerun: Rerun) -> str:
    """Return how far the simulation of the unchanged run is off its record."""
    error = rerun.prediction_error
    way = "longer" if error > 0 else "shorter"
    return f"As it was, a simulated step is {format_share(abs(error))} {way} than a recorded one."


def _figures(run: Metrics, intervals: bool) -> Iterator[tuple[str, str]]:
    """Yield the figures of a run's column, each with its label."""
    yield LABELS["step_time"], figure_text(run, "step_time", intervals=intervals)
    yield "  all steps", format_duration(sum(run.step_times))
    for name in RATIOS[1:]:
        yield LABELS[name], figure_text(run, name)
    yield "idle", format_share(sum(run.idle.values()))

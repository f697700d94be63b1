"""Report what differs between two run files or plans: keys, dollars, hours and idle time; on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.record.band import ends_of
from streamrl.record.evaluation import FinalScores
from streamrl.record.run_comparison import Against
from streamrl.report.against_report import band_lines, figures, verdict
from streamrl.report.evaluation_table import final_score_rows, say_final_scores
from streamrl.report.run_tables import dollars_text, time_text
from streamrl.report.words import change as change_text
from streamrl.runfile.config import Run
from streamrl.runfile.files import values_by_key
from streamrl.runfile.formatting import format_step_time
from streamrl.runfile.units import BITS_PER_BYTE
from streamrl.sim.planner.plan import PlanOption

ABSENT = "absent"
SAME = "A and B are the same run."
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


class PlannedPair(NamedTuple):
    """The figures of two plans, as their plan.json has them."""

    a: PlanOption
    b: PlanOption


FROM_PLANS = (
    "Figures are from plan.json of both. `streamrl diff A/plan.toml B/plan.toml` simulates both on the same prompts. "
    "It adds idle time and whether a difference may be chance."
)


def diff_report(
    changes: Sequence[ChangedKey],
    against: Against | PlannedPair | None,
    why_not: str,
    *,
    intervals: bool = False,
    scores: FinalScores | None = None,
) -> RenderableType:
    """Lay out what differs for a terminal; `why_not` says why there are no figures."""
    held_out = [] if scores is None else [Text(), *_scores_part(scores)]
    if not changes:
        return Group(Text(SAME), *held_out)
    keys = Table("key", "A", "B", box=None, pad_edge=False)
    for change in _rows(changes):
        keys.add_row(*change)
    if against is None:
        return Group(keys, *held_out, Text(), Text(why_not))
    table = Table("", "A", "B", "A - B", box=None, pad_edge=False)
    for row in _totals(against, intervals):
        table.add_row(*row)
    *lines, last = _lines(against)
    told = [Text(line) for line in lines]
    return Group(keys, *held_out, Text(), table, *told, Text(), Text(last, style="bold"))


def _scores_part(scores: FinalScores) -> Iterator[RenderableType]:
    table = Table("", "A", "B", "A - B", box=None, pad_edge=False)
    for row in final_score_rows(scores):
        table.add_row(*row)
    yield table
    yield Text(say_final_scores(scores))


def diff_markdown(
    changes: Sequence[ChangedKey],
    against: Against | PlannedPair | None,
    why_not: str,
    *,
    intervals: bool = False,
    scores: FinalScores | None = None,
) -> str:
    """Return what differs as Markdown, for the description of a pull request."""
    held_out = []
    if scores is not None:
        rows_of_scores = list(final_score_rows(scores))
        held_out = [_table(("", "A", "B", "A - B"), rows_of_scores), say_final_scores(scores)]
    if not changes:
        return "\n\n".join([SAME, *held_out])
    rows = [(f"`{key}`", *values) for key, *values in _rows(changes)]
    parts = [_table(("key", "A", "B"), rows), *held_out]
    if against is None:
        return "\n\n".join([*parts, why_not])
    parts.append(_table(("", "A", "B", "A - B"), list(_totals(against, intervals))))
    return "\n\n".join([*parts, *_lines(against)])


def _lines(against: Against | PlannedPair) -> Iterator[str]:
    """Yield what to know of the figures, the verdict last."""
    if isinstance(against, PlannedPair):
        yield FROM_PLANS
        cost, time = _ratios(against)
        dollars = "" if cost is None else f"dollars {change_text(cost - 1)}, "
        yield f"A compared with B: {dollars}time {change_text(time - 1)}."
    else:
        yield from band_lines(against)
        yield verdict(against)


def _rows(changes: Sequence[ChangedKey]) -> Iterator[tuple[str, str, str]]:
    """Yield the changes for a table. A pool that only one side has is one row."""
    for pool, alike in groupby(changes, _pool_of):
        group = list(alike)
        ours, theirs = ([getattr(each, side) for each in group] for side in ("a", "b"))
        if pool and not (_is_known(ours) and _is_known(theirs)):
            yield pool, _pool_text(group, ours), _pool_text(group, theirs)
        else:
            yield from ((each.key, _shown(each.a), _shown(each.b)) for each in group)


def _is_known(values: Sequence[object]) -> bool:
    """Return whether a side has any of these keys."""
    return any(value is not None for value in values)


def _pool_of(change: ChangedKey) -> str:
    """Return the pool that a key describes; "" for keys of other sections."""
    return change.key.rpartition(".")[0] if change.key.startswith("cluster.pools.") else ""


def _pool_text(changes: Sequence[ChangedKey], values: Sequence[object]) -> str:
    """Return the GPUs of a pool, and their price: "16 h100 at $2.2"."""
    found = {
        each.key.rpartition(".")[2]: value for each, value in zip(changes, values, strict=True)
    }
    match found:
        case {"gpu": str(gpu), "nodes": int(nodes), "gpus_per_node": int(each), **rest}:
            price = rest.get("price")
            return f"{nodes * each} {gpu}" + (f" at ${_shown(price)}" if price is not None else "")
    return ABSENT


def _totals(against: Against | PlannedPair, intervals: bool) -> Iterator[tuple[str, ...]]:
    if isinstance(against, PlannedPair):
        yield from _planned_totals(against)
        return
    rows = figures(against, intervals=intervals)
    yield from (row for row in rows if row[0].startswith(TOTALS))


def _planned_totals(pair: PlannedPair) -> Iterator[tuple[str, ...]]:
    """Yield the totals of two plans, each with its band, and their relative difference."""
    wholes, choices = [each.whole_run for each in pair], [each.choice for each in pair]
    steps = " and ".join(dict.fromkeys(f"{whole.steps:,}" for whole in wholes))
    cost, time = _ratios(pair)
    yield (f"whole training, {steps} steps", *map(time_text, wholes), change_text(time - 1))
    if cost is not None:
        yield ("  $", *map(dollars_text, wholes), change_text(cost - 1))
    texts = [
        format_step_time(each.step_time, None, ends_of(each.step_time_band)) for each in choices
    ]
    yield ("step", *texts, change_text(choices[0].step_time / choices[1].step_time - 1))
    ages = [f"{each.mean_staleness:.2f}" for each in choices]
    yield (
        "staleness, mean",
        *ages,
        f"{choices[0].mean_staleness - choices[1].mean_staleness:+.2f}",
    )


def _ratios(pair: PlannedPair) -> tuple[float | None, float]:
    """Return the ratios of the dollars and the wall time of A to those of B."""
    ours, theirs = pair.a.whole_run, pair.b.whole_run
    cost = ours.dollars / theirs.dollars if theirs.dollars else None
    return cost, ours.wall_time / theirs.wall_time


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.strip().replace('|', '/') for cell in line)} |" for line in lines
    )


def _shown(value: object) -> str:
    """Return a value as a run file has it, a list of tables without its brackets."""
    match value:
        case None:
            return ABSENT
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case list():
            return "; ".join(_shown(each) for each in value) or "none"
        case {"between": [str(one), str(other)], "bandwidth": float(bandwidth)}:
            return f"{one} to {other}: {bandwidth * BITS_PER_BYTE / 1e9:g} Gbps"
        case dict():
            return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
        case _:
            return str(value)

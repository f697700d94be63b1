"""Compute the figures of `make bench-reality`: errors of simulations against executed runs, in total and by run file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple, TypeAlias

import numpy as np
from rich.table import Table

from streamrl.record.metrics import Metrics
from streamrl.sim.fidelity.scorecard import stamp

LEAST_SHARE = 5e-4
"""Least share of GPU-seconds for a row of a cause of idle time."""


class Repeat(NamedTuple):
    """One execution and its simulations: seconds of a step and of the start-up, and shares of idle time by cause."""

    measured: Metrics
    before: Metrics
    recorded: Metrics
    pace: float
    """Slowdown of the machine around the run, relative to its profile."""
    started: float
    """Seconds until the first rollout was sent to a replica. A simulation sends it at once."""
    push: float
    """Median seconds of a weight push, executed and simulated."""
    push_before: float


Repeats: TypeAlias = dict[str, list[Repeat]]
"""Repeats by run file."""
Figure: TypeAlias = tuple[str, float, str]
"""Name, value and unit."""


def middle(repeats: Sequence[Repeat], name: str) -> float:
    """Return the median step time of repeats, measured or simulated."""
    return median(getattr(one, name).step_time for one in repeats)


def error(repeats: Sequence[Repeat], name: str) -> float:
    """Return the relative error of the median simulated step against the median measured one."""
    return middle(repeats, name) / middle(repeats, "measured") - 1


def spread(repeats: Sequence[Repeat]) -> float:
    """Return the spread of repeats: the slowest over the fastest, minus 1."""
    seconds = [one.measured.step_time for one in repeats]
    return max(seconds) / min(seconds) - 1


def idle_error(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return by cause the error of the mean share of idle GPU-seconds, in shares."""
    causes = dict.fromkeys(
        c for one in repeats for m in (one.measured, one.recorded) for c in m.idle
    )
    return {
        cause: mean(
            one.recorded.idle.get(cause, 0.0) - one.measured.idle.get(cause, 0.0) for one in repeats
        )
        for cause in causes
    }


def figures(repeats: Repeats) -> list[Figure]:
    """Return every figure, over all run files."""
    return [*_errors(repeats), *_pushes(repeats)]


def _pushes(repeats: Repeats) -> Iterator[Figure]:
    """Yield the figures of pushes: executed over simulated seconds."""
    every = [one for ones in repeats.values() for one in ones]
    ratios = [
        median(one.push for one in ones) / median(one.push_before for one in ones)
        for ones in repeats.values()
    ]
    yield "push, median", median(one.push for one in every), "s"
    yield "push over simulated, median of run files", median(ratios), "times"
    yield "push over simulated, most", max(ratios), "times"


def _errors(repeats: Repeats) -> list[Figure]:
    found: list[Figure] = []
    for name in ("before", "recorded"):
        errors = np.abs([error(ones, name) for ones in repeats.values()])
        for what, value in (
            ("median", np.median(errors)),
            ("p90", np.percentile(errors, 90)),
            ("mean", errors.mean()),
        ):
            found.append((f"error of steps, {name}, {what}", float(value), "ratio"))
    spreads = [spread(ones) for ones in repeats.values()]
    paces = [one.pace for ones in repeats.values() for one in ones]
    started = median(one.started for ones in repeats.values() for one in ones)
    found.append(("spread of repeats, median", median(spreads), "ratio"))
    found.append(("pace of the machine, fastest", min(paces), "times"))
    found.append(("pace of the machine, slowest", max(paces), "times"))
    found.append(("start until the first rollout, median", started, "s"))
    for cause, value in idle_error([one for ones in repeats.values() for one in ones]).items():
        if abs(value) >= LEAST_SHARE:
            found.append((f"error of idle: {cause}", value, "share"))
    return found


def rows(repeats: Repeats) -> list[tuple[str, ...]]:
    """Return a row per cell: name, seconds, errors, spread, start-up, and the idle cause with the largest error."""
    found = []
    for name, ones in repeats.items():
        idle = idle_error(ones)
        worst = max(idle, key=lambda cause: abs(idle[cause]), default="")
        found.append(
            (
                name,
                f"{middle(ones, 'measured'):.3f} s",
                *(f"{error(ones, which):+.1%}" for which in ("before", "recorded")),
                f"{spread(ones):.1%}",
                f"{median(one.pace for one in ones):.2f}",
                f"{median(one.started for one in ones):.1f} s",
                f"{worst} {idle[worst] * 100:+.1f} pp" if worst else "",
            )
        )
    return found


HEADS = ("run", "step", "before", "recorded", "repeats", "pace", "start", "idle most off")


def table_of(repeats: Repeats) -> Table:
    """Lay the rows out for a terminal."""
    table = Table(*HEADS)
    for row in rows(repeats):
        table.add_row(*row)
    return table


def section(repeats: Repeats) -> list[str]:
    """Return the lines of docs/fidelity.md's section."""
    num = max(map(len, repeats.values()))
    lines = [
        f"`make bench-reality` writes this section ({stamp()}). It executes {len(repeats)} run files {num} times",
        "each on one machine's CPU cores, in turn. Nothing was tuned on these run files.",
        "",
        "- *before*: error of the step time, simulated before the run;",
        "- *recorded*: error of the step time, simulated with the recorded lengths;",
        "- *repeats*: step time of the slowest execution over the fastest, less 1;",
        "- *pace*: a few points of the profile are measured again around a run. Pace is their time over their time in the profile.",
        "  Both simulations use it;",
        "- *start*: time until the first rollout, which is in no step;",
        "- *idle most off*: the cause of idle time with the largest error, in percentage points of GPU-seconds.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
        *(f"| {' | '.join(row)} |" for row in rows(repeats)),
        "",
        "| figure | value |",
        "|---|---|",
    ]
    for name, value, unit in figures(repeats):
        shown = {"s": f"{value:.3g} s", "times": f"{value:.2f} times"}.get(unit, f"{value:+.1%}")
        lines.append(f"| {name} | {shown} |")
    return lines

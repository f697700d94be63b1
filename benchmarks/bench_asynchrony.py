"""Measure the gain of asynchrony on this machine, executed and simulated, with one, two and three replicas.

A synchronous and an asynchronous run alternate on the machine, one second each. So both see the
same changes of speed of a shared host. The result is the mean gain over several pairs, with its
standard error. A difference to the simulation below the standard error is not significant.
Simulations use the recorded lengths. No other program may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.in_turns import execute_in_turns
from benchmarks.reality_cells import Cell, asynchrony_pair, make_run
from benchmarks.reality_runs import as_recorded, make_models, profile, with_profile
from streamrl.record.metrics import measure
from streamrl.report.fidelity import ASYNCHRONY, with_section
from streamrl.sim.fidelity.scorecard import stamp

ROUNDS = 6
REPLICAS = 1, 2, 3


class Step(NamedTuple):
    """Seconds of a step of a run, from three sources."""

    measured: float
    recorded: float
    """Simulated with the recorded lengths."""


class Pair(NamedTuple):
    """The two runs of a pair."""

    first: Step
    second: Step

    def gain(self, name: str) -> float:
        """Return the gain: by which share steps are shorter in the second run, by one of the sources."""
        return float(1 - getattr(self.second, name) / getattr(self.first, name))


def main() -> None:
    """Print the gains and one JSON object per figure; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--page", type=Path, help="docs/fidelity.md, whose section is written")
    parser.add_argument("--quick", action="store_true", help="a profile of few points")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-asynchrony-") as scratch:
        data = make_models(args.data, Path(scratch))
        path = profile(data, "first", data / "first.toml", is_quick=args.quick)
        pairs: dict[int, list[Pair]] = {replicas: [] for replicas in REPLICAS}
        for number in range(args.rounds):
            for replicas, found in pairs.items():
                label = f"pair-{number + 1}-{replicas}-replicas"
                found.append(run_pair(label, asynchrony_pair(replicas), data, path))
    rows = [row_of(replicas, found) for replicas, found in pairs.items()]
    table = Table(*HEADS)
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    for replicas, found in pairs.items():
        for which, values in figures(found).items():
            name = f"asynchrony gains, {replicas} replicas, {which}"
            print(json.dumps({"name": name, "value": mean(values), "error": error(values)}))
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        lines = section(rows, args.rounds)
        args.page.write_text(with_section(page, ASYNCHRONY, lines), encoding="utf-8")


def run_pair(label: str, cells: Sequence[Cell], data: Path, path: Path) -> Pair:
    """Execute both runs in turns, and simulate both with the profile at `path`."""
    outputs = [data / f"{label}-{place}" for place in range(2)]
    runs = [
        with_profile(make_run(one, data, output), path)
        for one, output in zip(cells, outputs, strict=True)
    ]
    traces = execute_in_turns(runs, data / f"{label}-turns")
    steps = []
    for trace, output in zip(traces, outputs, strict=True):
        measured = measure(trace)
        recorded = as_recorded(trace, output / "trace.jsonl", path, measured.counted_steps)
        steps.append(Step(measured.step_time, recorded.step_time))
    pair = Pair(*steps)
    gains = ", ".join(f"{name} {pair.gain(name):+.1%}" for name in Step._fields)
    print(f"{label}: {steps}, gains {gains}", file=sys.stderr)
    return pair


def figures(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return the gains by source, one value per pair."""
    measured, recorded = ([pair.gain(name) for pair in pairs] for name in ("measured", "recorded"))
    less = [simulated - real for simulated, real in zip(recorded, measured, strict=True)]
    return {"measured": measured, "simulated": recorded, "simulated less measured": less}


def error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


HEADS = "replicas", "sync", "async", "gains", "simulated", "simulated less measured"


def row_of(replicas: int, pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Return the median seconds per step, the gains and their difference."""
    shown = [f"{mean(v):+.1%} ± {error(v):.1%}" for v in figures(pairs).values()]
    seconds = [median(step.measured for step in side) for side in zip(*pairs, strict=True)]
    return str(replicas), *(f"{one:.2f} s" for one in seconds), *shown


def section(rows: Sequence[Sequence[str]], rounds: int) -> list[str]:
    """Return the lines of docs/fidelity.md's section."""
    return [
        f"`make bench-reality` writes this section ({stamp()}). It executes {rounds} pairs of runs at each number of",
        "replicas. Generation waits for training in *sync*, and does not wait in *async*. Both runs of a pair take turns of one second",
        "on one machine's two cores, so both see all changes of its speed. *Gains* are means over pairs with their standard errors.",
        "Simulations use the recorded lengths.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    main()

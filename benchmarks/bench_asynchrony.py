"""What asynchrony gains on this machine, executed and simulated, at one, two and three replicas.

Runs in which generation waits for training and runs in which it does not take turns, each pair next to each other, and
every other pair the other way round: a host that others use as well changes its pace by the minute, and a pair has one
pace. What is told of several pairs is the mean of their gains and its standard error; a difference from the simulation
that is smaller than that was not seen. Simulated are the runs with the lengths that they had. Nothing else may run on
the machine meanwhile.
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

from benchmarks.reality_cells import asynchrony_pair
from benchmarks.reality_figures import Repeat
from benchmarks.reality_runs import judge, make_models, pace_of, profile, run_cell
from sim.fidelity.scorecard import stamp
from streamrl.report.fidelity import ASYNCHRONY, with_section

ROUNDS = 10
REPLICAS = 1, 2, 3


class Pair(NamedTuple):
    """Both runs of a pair, one after the other."""

    sync: Repeat
    streams: Repeat

    def gain(self, name: str) -> float:
        """Return by how much steps are shorter where generation does not wait, measured or simulated."""
        streams, sync = (getattr(one, name).step_time for one in (self.streams, self.sync))
        return float(1 - streams / sync)


def main() -> None:
    """Print the gains and one JSON object a figure; write the page's section where asked for."""
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
                found.append(run_pair(replicas, data, path, number))
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


def run_pair(replicas: int, data: Path, path: Path, number: int) -> Pair:
    """Execute both, in the order of an even or an odd pair."""
    pace = pace_of(data, path)
    cells = list(enumerate(asynchrony_pair(replicas)))
    order = cells[::-1] if number % 2 else cells
    outputs = {place: data / f"pair-{number}-{replicas}-{place}" for place, _ in order}
    done = {place: run_cell(one, data, outputs[place], path, pace) for place, one in order}
    after = pace_of(data, path)
    sync, streams = (judge(done[place], path, after) for place in range(2))
    pair = Pair(sync, streams)
    gains = ", ".join(f"{name} {pair.gain(name):+.1%}" for name in ("measured", "recorded"))
    print(f"pair {number + 1}, {replicas} replicas: {gains}", file=sys.stderr)
    return pair


def figures(pairs: Sequence[Pair]) -> dict[str, list[float]]:
    """Return gains by what they are of, one a pair."""
    measured, recorded = ([pair.gain(name) for pair in pairs] for name in ("measured", "recorded"))
    less = [simulated - real for simulated, real in zip(recorded, measured, strict=True)]
    return {"measured": measured, "simulated": recorded, "simulated less measured": less}


def error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 of one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


HEADS = "replicas", "sync", "async", "gains", "simulated", "simulated less measured", "pace"


def row_of(replicas: int, pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Return median seconds of a step, the gains and their difference, and how much the pace changed."""
    shown = [f"{mean(v):+.1%} ± {error(v):.1%}" for v in figures(pairs).values()]
    paces = [one.pace for pair in pairs for one in pair]
    seconds = [median(p.measured.step_time for p in side) for side in zip(*pairs, strict=True)]
    return (
        *(str(replicas), *(f"{one:.2f} s" for one in seconds), *shown),
        f"{min(paces):.2f} to {max(paces):.2f}",
    )


def section(rows: Sequence[Sequence[str]], rounds: int) -> list[str]:
    """Return the lines of docs/fidelity.md's section."""
    return [
        f"`make bench-reality` writes this ({stamp()}): {rounds} pairs of runs at each number of replicas, whose generation waits",
        "for training (*sync*) and does not (*async*), next to each other on one machine's two cores. What steps gain is the mean over",
        "pairs and its standard error, executed and simulated with the lengths that the runs had.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    main()

"""Measure the gain of lending trainer GPUs on this machine, executed and simulated, in three run files.

A run without `[lending]` and one with it alternate on the machine, one second each. So both see the same
changes of speed of a shared host. The goal is a simulated gain within 5 points of the executed one. Simulations use the
recorded lengths. No other program may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.bench_asynchrony import Pair, error, figures, run_pair
from benchmarks.reality_cells import Cell, cell
from benchmarks.reality_runs import make_models, profile
from streamrl.report.fidelity import LENDING, with_section
from streamrl.sim.fidelity.scorecard import stamp

ROUNDS = 3
STEPS = 16
SYSTEMS = "disaggregated", "stream-sync", "stream-async"
LENT = {"lending__share": 1.0, "lending__replicas": 1}
"""One replica on the trainer's core, as fast as the other one."""


def main() -> None:
    """Print one JSON object per run file and figure; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--page", type=Path, help="docs/fidelity.md, whose section is written")
    parser.add_argument("--quick", action="store_true", help="a profile of few points")
    args = parser.parse_args()
    found: dict[str, list[Pair]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-lending-") as scratch:
        data = make_models(args.data, Path(scratch))
        path = profile(data, "first", data / "first.toml", is_quick=args.quick)
        for system in SYSTEMS:
            pairs = [
                run_pair(f"{system}-pair-{number + 1}", cells_of(system), data, path)
                for number in range(args.rounds)
            ]
            found[system] = pairs
            for which, values in figures(pairs).items():
                name = f"lending gains, {system}, {which}"
                print(json.dumps({"name": name, "value": mean(values), "error": error(values)}))

    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, LENDING, section(found)), encoding="utf-8")


def section(found: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Return the lines of docs/fidelity.md's section, from the pairs of each system."""
    rounds = max(map(len, found.values()))
    rows = []
    for system, pairs in found.items():
        seconds = [median(step.measured for step in side) for side in zip(*pairs, strict=True)]
        gains = [f"{mean(v):+.1%} ± {error(v):.1%}" for v in figures(pairs).values()]
        rows.append((system, *(f"{one:.2f} s" for one in seconds), *gains))
    return [
        f"`make bench-lending` writes this section ({stamp()}). It executes {rounds} pairs of runs of each system on two cores: one",
        "replica, and a trainer that waits for rollouts. With `[lending]`, a second replica generates on the trainer's core. Both runs of",
        "a pair take turns of one second, so both see all changes of the machine's speed. *Gains* are means over pairs with their standard",
        "errors. Simulations use the recorded lengths.",
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * len(HEADS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


HEADS = "system", "alone", "lent", "gains", "simulated", "simulated less measured"


def cells_of(system: str) -> tuple[Cell, Cell]:
    """Return a run whose trainer waits for rollouts, without and with lending."""
    changes: dict[str, object] = {"algorithm__prompts_per_step": 32, "algorithm__steps": STEPS}
    return (
        cell(f"{system}, apart", "first", system, 1, **changes),
        cell(f"{system}, lent", "first", system, 1, **changes, **LENT),
    )


if __name__ == "__main__":
    main()

"""Compare simulations with executed runs on this machine, on run files that nothing was tuned on.

The machine is profiled for both models before the runs. Every run file is simulated, then executed,
`--rounds` times in turn with all others. Afterwards it is simulated again with the recorded lengths.
The step time of a run is compared with both simulations:

    before      simulated before the run, with the lengths of its run file
    recorded    simulated with the recorded lengths

The speed of a shared host changes within minutes. So a few points of a run's profile are measured
again between runs (`benchmarks/pace.py`). The simulated seconds are scaled by the measured slowdown:
before the run for `before`, around the run for `recorded`.

The spread of repeated runs is a lower bound on the error of any prediction. The time of weight pushes
is also compared with the simulation before the run. No other program may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.reality_cells import CELLS, Cell
from benchmarks.reality_figures import Repeat, figures, section, table_of
from benchmarks.reality_runs import judge, make_models, pace_of, profile, run_cell
from streamrl.report.fidelity import EXECUTED, with_section

ROUNDS = 3


def main() -> None:
    """Print the comparison and one JSON object per figure; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    names = [one.name for one in CELLS]
    parser.add_argument("--only", choices=names, action="append", help="cells, all if absent")
    parser.add_argument("--page", type=Path, help="docs/fidelity.md, whose section is written")
    parser.add_argument(
        "--quick", action="store_true", help="profiles of few points, as a smoke test"
    )
    args = parser.parse_args()
    chosen = [one for one in CELLS if one.name in (args.only or names)]
    with tempfile.TemporaryDirectory(prefix="bench-reality-") as scratch:
        repeats = compare(
            make_models(args.data, Path(scratch)), chosen, args.rounds, is_quick=args.quick
        )
    lines = section(repeats)
    Console(width=140).print(table_of(repeats))
    for name, value, unit in figures(repeats):
        print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, EXECUTED, lines), encoding="utf-8")


def compare(
    data: Path, cells: Sequence[Cell], rounds: int, *, is_quick: bool
) -> dict[str, list[Repeat]]:
    """Profile, execute every cell `rounds` times in turn, and return the repeats by cell."""
    profiles = {
        name: profile(data, name, data / f"{name}.toml", is_quick=is_quick)
        for name in dict.fromkeys(one.model for one in cells)
    }
    repeats: dict[str, list[Repeat]] = {one.name: [] for one in cells}
    model, pace = "", 1.0
    for number in range(rounds):
        for place, one in enumerate(cells):
            own = profiles[one.model]
            if one.model != model:
                pace = pace_of(data, one.model, own)
            output = data / f"run-{number}-{place}"
            done = run_cell(one, data, output, own, pace)
            model, pace = one.model, pace_of(data, one.model, own)
            repeats[one.name].append(judge(done, own, pace))
    return repeats


if __name__ == "__main__":
    main()

"""Calibrate on an executed run of the quickstart, and predict other runs of the quickstart's model on this machine.

| run            | difference to the quickstart (one replica, `stream-async`, outputs of at most 128 tokens)       |
|----------------|-------------------------------------------------------------------------------------------------|
| two replicas   | a second one on the same cores                                                                   |
| stream-sync    | generation waits for training                                                                    |
| shorter        | outputs of at most 48 tokens                                                                     |

These runs and the quickstart alternate in turns of one second. So all see the same changes of speed
of a shared host. A run with shorter steps has more of them, so all runs end at about the same time.
The calibration uses all steps of the quickstart, because the other runs judge it. A simulation uses
the recorded lengths and advantages of its run. Simulated and executed steps are compared over the
same steps: those that count in the metrics of the run. The machine is profiled once, before all runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.bench_profile import predict, write_profile
from benchmarks.in_turns import execute_in_turns
from benchmarks.quickstart import EXAMPLES, make_quickstart, settings_of
from streamrl.engine.trace import Trace
from streamrl.hardware.calibration_file import write_calibration
from streamrl.record.metrics import measure
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.files import load_run
from streamrl.sim.calibration.calibrate import calibrate_recorded


class Other(NamedTuple):
    """A run that is predicted, and its difference to the quickstart."""

    steps: float
    """Number of steps relative to the quickstart, so that both take about the same time."""
    changes: tuple[str, ...]


OTHERS = {
    "two replicas": Other(1.1, ("rollout.replicas=2", "cluster.pools.local.gpus_per_node=3")),
    "stream-sync": Other(0.75, ("policies.system=stream-sync",)),
    "shorter": Other(1.4, ("rollout.max_tokens=48",)),
}


class Executed(NamedTuple):
    """An executed run, and the path of its trace."""

    trace: Trace
    file: Path


class Outcome(NamedTuple):
    """The mean step of a run, and the errors of its predictions."""

    measured: float
    """Seconds."""
    before: float
    """Relative error with the profile alone."""
    calibrated: float
    """Relative error with the profile and the calibration."""


def main() -> None:
    """Print every run, then one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    make_quickstart(args.data)
    with tempfile.TemporaryDirectory(prefix="bench-calibrated-") as scratch:
        show(compare(args.data, Path(scratch), args.rounds, args.steps))


def compare(data: Path, scratch: Path, rounds: int, steps: int) -> dict[str, list[Outcome]]:
    """Execute all runs in turns, calibrate on the quickstart, and predict the others with and without the calibration."""
    profile = scratch / "profile.toml"
    base = make(data, steps)
    write_profile(data, base, profile)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in OTHERS}
    for number in range(rounds):
        home = scratch / f"round-{number}"
        runs = [base]
        for other in OTHERS.values():
            runs.append(make(data, round(steps * other.steps), other.changes))
        first, *others = carry_out(runs, home)
        calibration = calibrate(first, profile, home / "calibration.toml")
        for name, done in zip(OTHERS, others, strict=True):
            measured = measure(done.trace).step_time
            plain, found = (predict(*done, profile, one).step_time for one in (None, calibration))
            outcomes[name].append(Outcome(measured, plain / measured - 1, found / measured - 1))
            print(f"{name}: {outcomes[name][-1]}", file=sys.stderr)
    return outcomes


def make(data: Path, steps: int, changes: tuple[str, ...] = ()) -> Run:
    """Return the quickstart's run with keys replaced."""
    return load_run(EXAMPLES / "quickstart.toml", [*settings_of(data, steps), *changes])


def carry_out(runs: Sequence[Run], home: Path) -> list[Executed]:
    """Execute runs in turns, and return their traces."""
    outputs = [home / f"run-{place}" for place in range(len(runs))]
    own = [
        replace(run, execute=replace(run.execute, output=str(output)))
        for run, output in zip(runs, outputs, strict=True)
    ]
    traces = execute_in_turns(own, home / "turns")
    return [
        Executed(trace, output / "trace.jsonl")
        for trace, output in zip(traces, outputs, strict=True)
    ]


def calibrate(done: Executed, profile: Path, path: Path) -> Path:
    """Write the calibration that fits the steps of a run."""
    run = replace(done.trace.run, costs=CostsConfig(profile=str(profile)))
    found = calibrate_recorded(run, done.trace, done.file, held_out=0.0).calibration
    path.write_text(write_calibration(found), encoding="utf-8")
    return path


def show(outcomes: dict[str, list[Outcome]]) -> None:
    """Print every run, then the figures."""
    table = Table("run", "a step", "by the profile", "calibrated")
    for name, ones in outcomes.items():
        for one in ones:
            table.add_row(
                name, f"{one.measured:.3f} s", f"{one.before:+.1%}", f"{one.calibrated:+.1%}"
            )
    Console(width=100).print(table)
    for name, ones in outcomes.items():
        for what, errors in (
            ("by the profile alone", [one.before for one in ones]),
            ("calibrated on the quickstart", [one.calibrated for one in ones]),
        ):
            line = {"name": f"{name}, {what}: error of a step, median of rounds"}
            print(json.dumps({**line, "value": round(median(errors), 4), "unit": "share"}))


if __name__ == "__main__":
    main()

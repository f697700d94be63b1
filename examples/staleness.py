"""Run one task at several staleness bounds and corrections, and print what a version of staleness costs.

    python examples/make_quickstart.py --out build/quickstart
    python examples/staleness.py --out runs/staleness          # 0, 2, 8 x none, token-tis, decoupled x 5 seeds: an hour
    streamrl plan examples/plan-7b.toml --set plan.staleness_study=$PWD/runs/staleness/study.json

Each run is one `streamrl execute`. Finished runs are not repeated. `study.json` has the steps and seconds to the target
reward, which is a mean over `WINDOW` steps. `curves.csv` has the reward and time of every step.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

import msgspec

from streamrl.record.run_directory import Line, read_metrics
from streamrl.runfile.staleness_study import StalenessStudy, StudiedRun, read_staleness_model

HERE = Path(__file__).parent
WINDOW = 5
"""Steps whose mean reward is compared with the target, because one step is noisy."""


def main() -> None:
    """Run what is missing, write the study, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--run-file", type=Path, default=HERE / "staleness.toml")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--corrections", nargs="+", default=["none", "token-tis", "decoupled"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--target", type=float, default=0.75, help="reward that steps are counted to"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args()
    runs, curves = [], []
    for staleness, correction, seed in product(args.staleness, args.corrections, range(args.seeds)):
        output = (args.out / f"{correction}-{staleness}-{seed}").resolve()
        cell = {
            "policies.max_staleness": staleness,
            "algorithm.correction": correction,
            "seed": seed,
            "execute.output": output,
        }
        execute(args.run_file, output, [*args.changes, *(f"{k}={v}" for k, v in cell.items())])
        lines = read_metrics(output)
        runs.append(studied(lines, staleness, correction, seed, args.target))
        curves += [
            (staleness, correction, seed, line["step"], line["time"], line["reward"])
            for line in lines
        ]
        print(runs[-1], flush=True)
    study = StalenessStudy(task=args.run_file.stem, target_reward=args.target, runs=tuple(runs))
    (args.out / "study.json").write_bytes(msgspec.json.format(msgspec.json.encode(study)))
    with (args.out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("staleness", "correction", "seed", "step", "seconds", "reward"))
        writer.writerows(curves)
    tell(study, args.out / "study.json")


def execute(run_file: Path, output: Path, changes: list[str]) -> None:
    """Execute one run, unless it is finished."""
    if (output / "checkpoints").exists() and any((output / "checkpoints").glob("v*/position.json")):
        return
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", "execute"]
    subprocess.run([*command, str(run_file), *words], check=True, stdout=subprocess.DEVNULL)


def studied(
    lines: list[Line], staleness: int, correction: str, seed: int, target: float
) -> StudiedRun:
    """Return when a run's mean reward reached the target."""
    reached = None
    for last in range(WINDOW, len(lines) + 1):
        if fmean(line["reward"] for line in lines[last - WINDOW : last]) >= target:
            reached = lines[last - 1]
            break
    return StudiedRun(
        staleness=staleness,
        correction=correction,
        seed=seed,
        lag=fmean(line["staleness_mean"] for line in lines),
        steps=None if reached is None else int(reached["step"]),
        seconds=None if reached is None else float(reached["time"]),
    )


def tell(study: StalenessStudy, path: Path) -> None:
    """Print means over seeds, and the line fitted to the runs of each correction."""
    print(f"steps and seconds to a mean reward of {study.target_reward:g}")
    cells = dict.fromkeys((run.correction, run.staleness) for run in study.runs)
    for correction, staleness in cells:
        found = [r for r in study.runs if (r.correction, r.staleness) == (correction, staleness)]
        there = [
            (r.steps, r.seconds) for r in found if r.steps is not None and r.seconds is not None
        ]
        means = [f"{fmean(values):.1f}" for values in zip(*there, strict=True)] or ["-", "-"]
        lag = fmean(r.lag for r in found)
        print(
            f"{correction:10} staleness {staleness}: lag {lag:.2f}, steps {means[0]}, seconds {means[1]}, "
            f"{len(there)} of {len(found)} runs came there"
        )
    for correction in dict.fromkeys(run.correction for run in study.runs):
        try:
            print(read_staleness_model(str(path), correction))
        except ValueError as error:
            print(error)


if __name__ == "__main__":
    main()

"""Compare the speed of simulations with earlier versions, in alternation on one core.

    python -m benchmarks.bench_against [REV ...]    a minute for each; the default is the newest tag

Each round simulates the same two runs with this checkout and with the others, each in a process of its own. So all
see the same state of the machine. A figure is this checkout's speed over the other's: above 1 is faster. Its spread is
that of the rounds. The output is one JSON object for each run and version.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent.parent
RUNS = {
    "1 replica": {"rollouts": 1024, "replicas": 1, "mean_tokens": 1444, "max_running": 1024},
    "20 replicas": {"rollouts": 1024, "replicas": 20, "mean_tokens": 4930, "max_running": 256},
}
"""The runs of `bench_engine` with one step of 1,024 rollouts."""
TRIES = 4
"""Simulations of a run in one process; the fastest counts."""
CHILD = """
import json, sys
sys.path.insert(0, "benchmarks")
import bench_engine as bench
runs, tries = json.loads(sys.argv[1]), int(sys.argv[2])
made = [bench._run(**run) for run in runs]
print(json.dumps([min(bench.simulate_once(run)[1] for _ in range(tries)) for run in made]))
"""
"""Prints the CPU seconds of each run with the checkout in the working directory."""


def main() -> None:
    """Print one JSON object per run and version."""
    options = _read_arguments()
    revisions = options.revisions or [tag for tag in [newest_tag()] if tag]
    if not revisions:
        print(json.dumps({"name": "speed of simulations", "value": None, "why": "no tag here"}))
        return
    with ExitStack() as stack:
        others = [stack.enter_context(checkout(revision)) for revision in revisions]
        rounds = [
            [seconds(directory) for directory in (HERE, *others)] for _ in range(options.rounds)
        ]
    for number, revision in enumerate(revisions, start=1):
        for place, name in enumerate(RUNS):
            ratios = sorted(times[number][place] / times[0][place] for times in rounds)
            print(
                json.dumps(
                    {
                        "name": f"speed of simulations over {revision}'s, {name}",
                        "value": round(statistics.median(ratios), 4),
                        "spread": [round(ratios[0], 4), round(ratios[-1], 4)],
                        "unit": "1",
                    }
                )
            )


def newest_tag() -> str | None:
    """Return the newest tag before this commit; None without tags, as in a shallow clone."""
    command = ["git", "describe", "--tags", "--abbrev=0"]
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Yield a directory with the files of a revision; it is removed afterwards.

    Raises:
        SystemExit: there is no such revision.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision], cwd=HERE, capture_output=True, check=False
    )
    if archive.returncode:
        raise SystemExit(f"git has no revision {revision}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        yield Path(folder)


def seconds(directory: Path) -> list[float]:
    """Return the CPU seconds of each run with the code of a directory."""
    command = [sys.executable, "-c", CHILD, json.dumps(list(RUNS.values())), str(TRIES)]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    done = subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, check=True
    )
    found: list[float] = json.loads(done.stdout)
    return found


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", help="tags or commits; default: the newest tag")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of both checkouts")
    return parser.parse_args()


if __name__ == "__main__":
    main()

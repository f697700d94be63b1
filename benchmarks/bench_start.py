"""Measure the CPU seconds of a command from the shell. Most time of a short command is spent on imports.

The result is user and system time of a process, as a median over `--runs`. With `--against DIR`, each
run is followed by the same command of another checkout, with the same Python. So both see the same
state of the machine, and the ratio of their seconds is printed. Bytecode is written before the first
counted run, as in an installation. The output is one JSON object per figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.parent
RUN_FILE = str(HERE / "examples" / "h20-h800.toml")
SMALL_PLAN = (
    *("algorithm.prompts_per_step=64", "plan.systems=['stream-async']", "plan.unit=16"),
    *("plan.finalists=1", "simulate.max_steps=4"),
)
"""An offer with few plans, so that start-up is a large part of the time."""


def main() -> None:
    """Print one JSON object per figure."""
    options = _read_arguments()
    checkouts = [HERE, *(checkout.resolve() for checkout in options.against)]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name, arguments in commands(scratch).items():
            ours, *others = measure(arguments, checkouts, scratch, options.runs)
            _report(f"CPU time of streamrl {name}", ours, "s")
            for checkout, theirs in zip(options.against, others, strict=True):
                _report(f"CPU time of streamrl {name} in {checkout}", theirs, "s")
                _report(f"CPU time of streamrl {name}, share of {checkout}'s", ours / theirs, "1")


def commands(scratch: Path) -> dict[str, list[str]]:
    """Return the arguments of each command to measure. `replay` reads the output of a simulation in `scratch`."""
    run_once(["simulate", RUN_FILE, "-o", str(scratch / "run")], HERE, scratch)
    settings = [word for setting in SMALL_PLAN for word in ("--set", setting)]
    return {
        "--help": ["--help"],
        "simulate": ["simulate", RUN_FILE],
        "replay": ["replay", str(scratch / "run")],
        "doctor": ["doctor", RUN_FILE],
        "plan": ["plan", RUN_FILE, "-o", str(scratch / "plan"), "--force", *settings],
    }


def measure(
    arguments: list[str], checkouts: list[Path], scratch: Path, num_runs: int
) -> list[float]:
    """Return the median CPU seconds of a command in each checkout, measured in turns."""
    rounds = [
        [run_once(arguments, checkout, scratch) for checkout in checkouts]
        for _ in range(num_runs + 1)
    ]
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def run_once(arguments: list[str], checkout: Path, scratch: Path) -> float:
    """Return the CPU seconds, user and system, of one command and its child processes.

    Raises:
        RuntimeError: the command failed.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, "-c", "from streamrl.cli import main; main()", *arguments],
        cwd=checkout,  # the first directory of Python's module search path
        env={**environment, "PYTHONPATH": str(checkout)},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(
            f"streamrl {' '.join(arguments)} in {checkout} failed with exit status {process.returncode}"
        )
    return usage.ru_utime + usage.ru_stime


def _report(name: str, value: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit}), flush=True)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout to compare with"
    )
    parser.add_argument("--runs", type=int, default=20, help="runs of each command")
    return parser.parse_args()


if __name__ == "__main__":
    main()

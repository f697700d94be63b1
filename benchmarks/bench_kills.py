"""Check that a run ends correctly if any of its processes is killed (kill -9) at any time, in every system.

    python -m benchmarks.bench_kills --kills 40

Each run kills these processes one after the other: driver, replica, trainer, verifier and prefork
server. The seed draws the order and the moments, which may be while workers start. After a kill of
the driver, the run is resumed. Every other run trains on groups in order of completion (`greedy`).
The script prints one JSON object per run. It exits with status 1 if a run does not make all steps,
or if its ledger does not balance.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bench_faults import COMMAND
from benchmarks.fault_model import make_model
from benchmarks.fault_results import SIMULATED, RolloutCounts, balance, read_traces
from benchmarks.processes import processes_of
from streamrl.record.ledger import describe_faults
from streamrl.record.restarts import ledger_of_traces

HERE = Path(__file__).parent
VICTIMS = ("driver", "replica", "trainer", "verifier", "prefork_server")
COMBINATIONS = list(product(SIMULATED, ("strict-fifo", "greedy")))
"""Every system, with both orders of consumption. Each combination has at least one run."""
APART = 8.0
"""Most seconds between two kills. A worker takes three to ten seconds to start."""
STEPS = 600
"""Optimizer steps of a run: more than it can make before the last kill."""
MOST_SECONDS = 420.0
"""Time limit of a run in seconds. A run that takes longer counts as hung."""


@dataclass
class Killed:
    """The result of one run."""

    system: str
    consumption: str
    seed: int
    kills: list[tuple[str, float, int]] = field(default_factory=list)
    """Role, seconds since the run started, and number of steps at the time of each kill."""
    status: int | None = None
    """Exit status of the last command; None if it did not end."""
    books: RolloutCounts | None = None
    ledger: str = ""
    """Faults in the run's ledger; empty if it balances."""
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Return whether the run has all steps, and every rollout is accounted for."""
        is_clean = self.books is not None and self.books.is_clean
        return self.status == 0 and is_clean and not self.ledger


def main() -> None:
    """Execute runs until the requested number of kills is reached, and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="least number of kills")
    parser.add_argument("--workers", type=int, default=2, help="number of runs at the same time")
    arguments = parser.parse_args()
    num_runs = max(len(COMBINATIONS), -(-arguments.kills // len(VICTIMS)))
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as name:
        make_model(Path(name))
        with ThreadPoolExecutor(arguments.workers) as pool:
            runs = list(pool.map(partial(_show, Path(name)), range(num_runs)))
    num_kills = sum(len(run.kills) for run in runs)
    unsound = sum(not run.is_sound for run in runs)
    print(json.dumps({"name": "kills.kills", "value": num_kills, "unit": "processes"}))
    print(json.dumps({"name": "kills.unsound", "value": unsound, "unit": "runs"}))
    sys.exit(0 if num_kills >= arguments.kills and not unsound else 1)


def _show(directory: Path, seed: int) -> Killed:
    found = kill(directory, seed)
    print(json.dumps(asdict(found) | {"is_sound": found.is_sound}), flush=True)
    return found


def kill(directory: Path, seed: int) -> Killed:
    """Execute a run and kill its processes one after the other."""
    system, consumption = COMBINATIONS[seed % len(COMBINATIONS)]
    found = Killed(system, consumption, seed)
    place = directory / f"run-{seed}"
    place.mkdir()
    table = (HERE / "faults-executed.toml").read_text()
    (place / "run.toml").write_text(table)
    changes = [
        *(f"policies.system={system}", f"policies.consumption={consumption}", f"seed={seed}"),
        f"algorithm.steps={STEPS}",
    ]
    draw, began_at = Random(seed), time.monotonic()
    victims = draw.sample(VICTIMS, len(VICTIMS))
    process = _begin(place, "begin", changes)
    while not (place / "run" / "trace.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    for victim in victims:
        time.sleep(draw.uniform(0.0, APART))
        pids = _wait_for(victim, process, began_at)
        if not pids:
            break  # the run has ended
        os.kill(draw.choice(pids), signal.SIGKILL)
        found.kills.append((victim, round(time.monotonic() - began_at, 2), _num_steps(place)))
        if victim == "driver":
            process.wait()
            process = _begin(place, "resume", changes)
    try:
        found.status = process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    found.seconds = round(time.monotonic() - began_at, 1)
    output = place / "run"
    traces = read_traces(output)
    found.books, found.ledger = balance(traces), describe_faults(ledger_of_traces(traces))
    if not found.is_sound:
        print((place / "log").read_text()[-2000:], file=sys.stderr)
    return found


def _begin(place: Path, what: str, changes: list[str]) -> subprocess.Popen[Any]:
    words = [sys.executable, "-c", COMMAND, str(place / "run.toml"), what, *changes]
    with (place / "log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def _wait_for(role: str, process: subprocess.Popen[Any], began_at: float) -> list[int]:
    """Return the processes of a role as soon as there are any; empty if the run ends first."""
    while process.poll() is None and time.monotonic() - began_at < MOST_SECONDS:
        if pids := processes_of(process.pid).get(role):
            return pids
        time.sleep(0.05)
    return []


def _num_steps(place: Path) -> int:
    path = place / "run" / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    main()

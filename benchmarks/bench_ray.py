"""Compare a study on a Ray cluster of two workers with the same study on two processes of this machine.

    make bench-ray

Each round runs `streamrl simulate --sweep` once on a pool of processes and once with `--ray`, in
alternation. A point is a simulation of `examples/h20-h800.toml`, with other replicas and lengths.
Times are wall seconds of the whole command. The cluster is already there, but its workers are new
for each study: they start Python, Ray and streamrl, which takes some 3 s. A last study on Ray has
one worker killed in its middle. All studies must write the same rows. The output is one
JSON object per figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent.parent
RUN_FILE = HERE / "examples" / "h20-h800.toml"
NUM_WORKERS = 2
REPLICAS = (4, 8, 12, 16, 20)
"""Values of the first axis; the second one has as many as the number of points requires."""
KILLED_AFTER = 15.0
"""Seconds from the start of the last study to the end of its worker."""


def main() -> None:
    """Print one JSON object per figure."""
    options = _read_arguments()
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as the processes; Ray has 15
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": NUM_WORKERS})
    try:
        with tempfile.TemporaryDirectory() as folder:
            compare(cluster.address, options, Path(folder))
    finally:
        cluster.shutdown()


def compare(address: str, options: argparse.Namespace, folder: Path) -> None:
    """Run the studies of all rounds, and report their times and whether their rows agree."""
    settings = [part for setting in options.set for part in ("--set", setting)]
    kinds = {"processes": settings, "Ray": [*settings, "--ray", address]}
    num_points = options.points
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    written = set()
    for number in range(options.rounds):
        for kind in sorted(kinds, reverse=number % 2 == 1):
            seconds, rows = study(num_points, kinds[kind], folder / f"{kind}-{number}")
            times[kind].append(seconds)
            written.add(rows)
    ratios = [there / here for there, here in zip(times["Ray"], times["processes"], strict=True)]
    for kind, taken in times.items():
        report(f"seconds of {num_points} points on {NUM_WORKERS} {kind}", taken, "s")
    report(f"time of {num_points} points on Ray, over processes", ratios, "1")
    seconds, rows = study(num_points, kinds["Ray"], folder / "killed", kill_worker)
    report(f"seconds of {num_points} points on Ray with a killed worker", [seconds], "s")
    is_same = len({*written, rows}) == 1
    print(json.dumps({"name": "all studies have the same rows", "value": is_same, "unit": "1"}))


def study(
    num_points: int,
    options: list[str],
    output: Path,
    disturb: Callable[[], None] | None = None,
) -> tuple[float, bytes]:
    """Run a study; return its wall seconds and its rows.

    Raises:
        CalledProcessError: the study failed.
    """
    lengths = [0.5 + 0.005 * number for number in range(-(-num_points // len(REPLICAS)))]
    axes = {"rollout.replicas": REPLICAS, "workload.lengths.scale": lengths}
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", "simulate", RUN_FILE]
    for key, values in axes.items():
        command += ["--sweep", f"{key}={','.join(map(str, values))}"]
    command += ["--seeds", "1", "-o", output, *options]
    began_at = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment()) as process:
        if disturb is not None:
            time.sleep(KILLED_AFTER)
            disturb()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - began_at, (output / "study.csv").read_bytes()


def environment() -> dict[str, str]:
    """Return the environment variables of a study, which imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(HERE)}


def kill_worker() -> None:
    """Kill a worker of Ray that simulates."""
    found = (each for each in psutil.process_iter(["name"]) if each.info["name"] == "ray::_call")
    next(found).kill()


def report(name: str, values: list[float], unit: str) -> None:
    """Print the median of a figure, and its spread over rounds."""
    spread = [round(min(values), 3), round(max(values), 3)]
    value = round(statistics.median(values), 3)
    print(json.dumps({"name": name, "value": value, "spread": spread, "unit": unit}), flush=True)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=500, help="points of each study")
    parser.add_argument("--rounds", type=int, default=2, help="studies of each kind")
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE of every point, for smaller ones"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

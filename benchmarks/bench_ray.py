"""Compare a study on a Ray cluster of two workers with the same study on two processes of this machine.

    make bench-ray

Each round runs `streamrl simulate --sweep` once on a pool of processes and once with `--ray`, in
alternation. A point is a simulation of `examples/h20-h800.toml`, with other replicas and lengths.
There are two sizes of points, because points of studies take from 0.1 s to some seconds. Times are wall seconds of the whole command. The cluster is already there, but
its workers are new for each study: they start Python, Ray and streamrl. Studies of few points show
these fixed seconds apart, so that the rest is the time of a point. A last study on Ray has one
worker killed in its middle. All studies of a size must write the same rows. The output is one JSON
object per figure.
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
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent.parent
RUN_FILE = HERE / "examples" / "h20-h800.toml"
NUM_WORKERS = 2
REPLICAS = (4, 8, 12, 16, 20)
"""Values of the first axis; the second one has as many as the number of points requires."""
FEW = 10
"""Points of the studies whose time is mostly fixed."""
SIZES = {
    "small": ("algorithm.prompts_per_step=64", "simulate.max_steps=6"),
    "large": ("algorithm.prompts_per_step=512", "simulate.max_steps=7"),
}
"""Settings of points, by the name of their size: about 0.04 and 0.25 s of CPU time."""
KILLED_AFTER = 0.5
"""Share of the seconds of an undisturbed study after which a worker is killed."""


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
    """Compare studies of each size of points."""
    for size in options.sizes:
        (folder / size).mkdir()
        here = [part for setting in SIZES[size] for part in ("--set", setting)]
        kinds = {"processes": here, "Ray": [*here, "--ray", address]}
        compare_points(size, kinds, options.points, options.rounds, folder / size)


def compare_points(
    size: str, kinds: Mapping[str, list[str]], most: int, rounds: int, folder: Path
) -> None:
    """Run studies of few and of many points, and one that loses a worker; report times, and whether rows agree."""
    times: dict[tuple[str, int], list[float]] = {}
    written: dict[int, set[bytes]] = {FEW: set(), most: set()}
    for number in range(rounds):
        for kind, points in product(sorted(kinds, reverse=number % 2 == 1), written):
            seconds, rows = study(points, kinds[kind], folder / f"{kind}-{points}-{number}")
            times.setdefault((kind, points), []).append(seconds)
            written[points].add(rows)
    report_times(size, times, most)
    after = KILLED_AFTER * statistics.median(times["Ray", most])
    seconds, rows = study(most, kinds["Ray"], folder / "killed", partial(kill_worker, after))
    report(f"seconds of {most} {size} points on Ray with a killed worker", [seconds], "s")
    written[most].add(rows)
    is_same = all(len(each) == 1 for each in written.values())
    name = f"all studies of {size} points have the same rows"
    print(json.dumps({"name": name, "value": is_same, "unit": "1"}), flush=True)


def report_times(size: str, times: Mapping[tuple[str, int], list[float]], most: int) -> None:
    """Report the seconds of studies by kind and number of points, those of one point, and those that are fixed."""
    for (kind, points), taken in times.items():
        report(f"seconds of {points} {size} points on {NUM_WORKERS} {kind}", taken, "s")
    for kind in ("processes", "Ray"):
        pairs = zip(times[kind, most], times[kind, FEW], strict=True)
        each = [(many - few) / (most - FEW) for many, few in pairs]
        report(f"seconds of one more {size} point on {kind}", each, "s")
    pairs = zip(times["Ray", FEW], times["processes", FEW], strict=True)
    report(f"seconds that Ray adds to {FEW} {size} points", [a - b for a, b in pairs], "s")
    pairs = zip(times["Ray", most], times["processes", most], strict=True)
    report(f"time of {most} {size} points on Ray, over processes", [a / b for a, b in pairs], "1")


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
            disturb()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - began_at, (output / "study.csv").read_bytes()


def environment() -> dict[str, str]:
    """Return the environment variables of a study, which imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(HERE)}


def kill_worker(after: float) -> None:
    """Kill a worker of Ray that simulates, after so many seconds."""
    time.sleep(after)
    found = (each for each in psutil.process_iter(["name"]) if each.info["name"] == "ray::_do")
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
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measure the speed of simulations on one core: output tokens per second, and time over rollouts and tokens.

The whole run counts, from the first prompt to the last optimizer step: engine, policies, SimPy, and
the trace in memory. Seconds are CPU seconds of one core. Each figure is the best of `ROUNDS` rounds
with pauses between them, because the speed of a shared machine changes for seconds at a time.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from streamrl.engine.messages import Generated
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload

RUN_FILE = Path(__file__).parent / "engine.toml"
HISTOGRAM_MEAN = 4930.0  # tokens: mean of the length histogram at scale 1
ROUNDS = 12
PAUSE = 1.0  # seconds between rounds
GRID_ROLLOUTS = (512, 1024, 2048, 4096)
GRID_TOKENS = (500, 1000, 2000, 4000)
SCALE: dict[str, dict[str, int]] = {
    "100000 prompts on 100 replicas": {"rollouts": 100_000, "replicas": 100},
    "16384 rollouts on 10000 replicas": {"rollouts": 16_384, "replicas": 10_000},
}
"""Large steps, each simulated once in a process of its own, so that its memory is known."""


def main() -> None:
    """Print one JSON object per figure."""
    one_replica = _run(rollouts=1024, replicas=1, mean_tokens=1444, max_running=1024)
    many = _run(rollouts=1024, replicas=20, mean_tokens=4930, max_running=256)
    large = _run(rollouts=16384, replicas=1000, mean_tokens=4930, max_running=256)
    grid = {
        (rollouts, rollouts * tokens): _run(rollouts, 20, tokens, max_running=256)
        for rollouts in GRID_ROLLOUTS
        for tokens in GRID_TOKENS
    }
    times = best_times([one_replica, many, large, *grid.values()])
    name = "simulated tokens per second, 1024 rollouts of 1444 tokens, 1 replica"
    report(name, count_tokens(one_replica) / times[0], "tokens/s")
    name = "simulated tokens per second, 1024 rollouts of 4930 tokens, 20 replicas"
    report(name, count_tokens(many) / times[1], "tokens/s")
    report("seconds for a step of 16384 rollouts on 1000 replicas", times[2], "s")
    for name, run in SCALE.items():
        seconds, peak = simulate_alone(run)
        report(f"seconds for a step of {name}", seconds, "s")
        report(f"peak memory of a step of {name}", peak, "MB")
    start, per_rollout, per_token = fit(list(grid), times[3:])
    report("simulation time of a run, fit: constant", start * 1e6, "us")
    report("simulation time of a run, fit: per rollout", per_rollout * 1e6, "us")
    report("simulation time of a run, fit: per thousand tokens", per_token * 1e9, "us")


def report(name: str, value: float, unit: str) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def count_tokens(run: Run) -> int:
    """Return the output tokens that a run simulates."""
    events = (entry.event for entry in simulate_once(run)[0].trace.entries)
    return sum(event.tokens for event in events if isinstance(event, Generated))


def best_times(runs: list[Run]) -> list[float]:
    """Return the CPU seconds of the fastest simulation of each run."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for index, run in enumerate(runs):
            best[index] = min(best[index], simulate_once(run)[1])
        time.sleep(PAUSE)
    return best


def simulate_once(run: Run) -> tuple[SimWorld, float]:
    """Simulate with prepared costs and lengths, and return the world and the CPU seconds."""
    world = SimWorld(run, Costs.load(run), SimulatedWorkload(run))
    gc.collect()
    began_at = time.process_time()
    world.run()
    return world, time.process_time() - began_at


def simulate_alone(sizes: dict[str, int]) -> tuple[float, float]:
    """Simulate one step in a new process; return its CPU seconds with loading, and its peak memory in MB."""
    command = [sys.executable, __file__, json.dumps(sizes)]
    seconds, peak = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return float(seconds), float(peak)


def _simulate_scale(sizes: dict[str, int]) -> None:
    simulate_once(_run(**sizes, mean_tokens=HISTOGRAM_MEAN, max_running=256))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps([time.process_time(), peak]))


def fit(sizes: list[tuple[int, int]], seconds: list[float]) -> tuple[float, float, float]:
    """Fit seconds = constant + p * rollouts + q * tokens; return (constant, p, q)."""
    rows = np.array([(1.0, rollouts, tokens) for rollouts, tokens in sizes])
    constant, per_rollout, per_token = np.linalg.lstsq(rows, np.array(seconds), rcond=None)[0]
    return float(constant), float(per_rollout), float(per_token)


def _run(rollouts: int, replicas: int, mean_tokens: float, max_running: int) -> Run:
    return load_run(
        RUN_FILE,
        [
            f"algorithm.prompts_per_step={rollouts}",
            f"rollout.replicas={replicas}",
            f"cluster.pools.h200.nodes={-(-replicas // 8)}",
            f"rollout.max_running={max_running}",
            f"workload.lengths.scale={mean_tokens / HISTOGRAM_MEAN}",
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        _simulate_scale(json.loads(sys.argv[1]))
    else:
        main()

"""How fast one core simulates: output tokens a second, and how time grows with rollouts and tokens.

The whole run counts, from the first prompt drawn to the last optimizer step: engine, policies, SimPy,
and the trace in memory. Each figure is the best of several runs, so that a busy machine shows less.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path

import numpy as np

from sim.costs import Costs
from sim.world import SimWorld
from streamrl.config import Run
from streamrl.messages import Generated
from streamrl.run_file import load_run
from streamrl.workload import SimulatedWorkload

RUN_FILE = Path(__file__).parent / "engine.toml"
HISTOGRAM_MEAN = 4930.0  # tokens, of the length histogram at scale 1
REPEATS = 7


def main() -> None:
    """Print one JSON object per figure."""
    one_replica = _run(rollouts=1024, replicas=1, mean_tokens=1444, max_running=1024)
    report(
        "simulated tokens per second, 1024 rollouts of 1444 tokens, 1 replica",
        tokens_per_second(one_replica),
        "tokens/s",
    )
    many = _run(rollouts=1024, replicas=20, mean_tokens=4930, max_running=256)
    report(
        "simulated tokens per second, 1024 rollouts of 4930 tokens, 20 replicas",
        tokens_per_second(many),
        "tokens/s",
    )
    large = _run(rollouts=16384, replicas=1000, mean_tokens=4930, max_running=256)
    report("seconds for a step of 16384 rollouts on 1000 replicas", best_time(large, 3), "s")
    per_rollout, per_token = growth()
    report("simulation time per rollout", per_rollout * 1e6, "us")
    report("simulation time per thousand tokens", per_token * 1e9, "us")


def report(name: str, value: float, unit: str) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def tokens_per_second(run: Run) -> float:
    """Give simulated output tokens per second of the best run."""
    world, seconds = simulate_once(run)
    events = (entry.event for entry in world.trace.entries)
    tokens = sum(event.tokens for event in events if isinstance(event, Generated))
    return tokens / min(seconds, best_time(run, REPEATS - 1))


def best_time(run: Run, repeats: int) -> float:
    """Give the seconds of the fastest of several runs."""
    return min(simulate_once(run)[1] for _ in range(repeats))


def simulate_once(run: Run) -> tuple[SimWorld, float]:
    """Simulate with costs and lengths ready, and give the seconds it took."""
    workload = SimulatedWorkload(run)
    workload.draw(0, 1)
    world = SimWorld(run, Costs.load(run), workload)
    gc.collect()
    began_at = time.perf_counter()
    world.run()
    return world, time.perf_counter() - began_at


def growth() -> tuple[float, float]:
    """Fit seconds = p * rollouts + q * tokens over a grid; give (p, q)."""
    rows, seconds = [], []
    for rollouts in (512, 1024, 2048, 4096):
        for mean_tokens in (500, 1000, 2000, 4000):
            run = _run(rollouts=rollouts, replicas=20, mean_tokens=mean_tokens, max_running=256)
            rows.append((rollouts, rollouts * mean_tokens))
            seconds.append(best_time(run, 3))
    solution = np.linalg.lstsq(np.array(rows, dtype=float), np.array(seconds), rcond=None)[0]
    return float(solution[0]), float(solution[1])


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
    main()

"""Print the table of docs/concurrency.md: the same rollouts under each limit on running rollouts.

Its columns are the step time including the start-up, preemptions per rollout, and the share of replica time spent on recomputation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from streamrl.engine.messages import Stepped
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "h20-h800.toml"
ROOMY = ("rollout.replicas=2", "rollout.max_running=512", "algorithm.steps=16")
TIGHT = (
    *("rollout.replicas=8", "rollout.max_running=256", "algorithm.steps=12"),
    "rollout.memory_utilization=0.3",
)
LONG = (
    *("rollout.replicas=16", "rollout.max_running=256", "algorithm.steps=12"),
    *("rollout.memory_utilization=0.4", "workload.lengths.scale=3", "rollout.max_tokens=60000"),
)
RUNS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "unchanged: training is the bottleneck": ((), None),
    "2 replicas, `max_running` 512": (ROOMY, 192),
    "8 replicas, 250,000 tokens of cache, `max_running` 256": (TIGHT, 32),
    "16 replicas, outputs up to 60,000 tokens, `max_running` 256": (LONG, 24),
}
"""Changes of the example, and the largest `max_running` without frequent preemption, found by
trial.
"""
LIMITS: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "kv-pressure": ("policies.concurrency=kv-pressure",),
    "fixed, {fewer} at most": ("rollout.max_running={fewer}",),
    "reserve": ("rollout.admission=reserve",),
}


def main() -> None:
    """Print a row for each run and limit."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| run | concurrency | step, s | preemptions per rollout | time spent recomputing |")
    print("|---|---|---|---|---|")
    for name, (changes, fewer) in RUNS.items():
        shown = f" {name} "
        for limit, own in LIMITS.items():
            if fewer is None and "{fewer}" in limit:
                continue
            keys = [*changes, *(key.format(fewer=fewer) for key in own)]
            cells = " | ".join(figures(load_run(EXAMPLE, keys)))
            print(f"|{shown}| {limit.format(fewer=fewer)} | {cells} |", flush=True)
            shown = " "


def figures(run: Run) -> Iterator[str]:
    """Simulate a run to its last step, and yield its figures."""
    costs = Costs.load(run)
    run = fill_policies(run, costs)
    world = SimWorld(run, costs, SimulatedWorkload(run))
    trace = world.run()
    ends = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    replicas = list(world.replicas.values())
    yield f"{ends[-1] / len(ends):.0f}"
    num_rollouts = run.algorithm.rollouts_per_step * len(ends)
    yield f"{sum(replica.num_preempted for replica in replicas) / num_rollouts:.2f}"
    again = sum(replica.recompute_time for replica in replicas)
    yield f"{again / len(replicas) / world.now:.1%}"


if __name__ == "__main__":
    main()

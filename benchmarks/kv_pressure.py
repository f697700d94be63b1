"""What places that follow KV pressure gain and cost: the same rollouts with each way of letting them in.

Prints the table of `docs/concurrency.md`: seconds of a step, the first counted, how often a rollout is put off, and the share
of replicas' seconds that goes into computing again what they had made.
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
RUNS: dict[str, tuple[tuple[str, ...], int]] = {
    "as it is, where training binds": ((), 256),
    "2 replicas": (ROOMY, 192),
    "8 replicas, 250,000 tokens of cache": (TIGHT, 32),
    "16 replicas, outputs up to 60,000 tokens": (LONG, 24),
}
"""Changes of the example, and the most that may run at once without much preemption, found by trying."""
WAYS: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "kv-pressure": ("policies.concurrency=kv-pressure",),
    "fixed, {fewer} at most": ("rollout.max_running={fewer}",),
    "reserve": ("rollout.admission=reserve",),
}


def main() -> None:
    """Print a row for each run and way."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| run | places | a step, s | put off, times a rollout | computed again |")
    print("|---|---|---|---|---|")
    for name, (changes, fewer) in RUNS.items():
        for way, own in WAYS.items():
            keys = [*changes, *(key.format(fewer=fewer) for key in own)]
            cells = " | ".join(figures(load_run(EXAMPLE, keys)))
            print(f"| {name} | {way.format(fewer=fewer)} | {cells} |", flush=True)


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

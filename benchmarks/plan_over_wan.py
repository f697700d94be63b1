"""Execute a plan for two datacenters on a small scale: on CPUs, over Ray and an emulated link.

    streamrl plan examples/plan-7b.toml --for execute -o plans/7b
    build/engines/bin/python -m benchmarks.plan_over_wan plans/7b/plan.toml --output runs/plan-7b

It needs root. The quickstart's model replaces the plan's model, and one replica and one trainer
replace its GPUs. Pools, link, system, dispatch and sync are those of the plan. Afterwards, `streamrl
compare` prints the run next to its simulation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.bench_wan import PORT, TOKEN, cluster, near_command
from benchmarks.wan_link import ADDRESSES, NEAR, wan_link
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run

QUICKSTART = Path(__file__).parent.parent / "build" / "quickstart"
SMALL: dict[str, Any] = {
    "model.path": QUICKSTART / "model",
    "model.dtype": "bfloat16",
    "rollout.replicas": 1,
    "rollout.tensor_parallel": 1,
    "rollout.max_running": 64,
    "rollout.max_tokens": 128,
    "trainer.data_parallel": 1,
    "trainer.tensor_parallel": 1,
    "trainer.pipeline_parallel": 1,
    "trainer.zero": 0,
    "trainer.offload": "false",
    "trainer.recompute": "none",
    "trainer.logits": "eager",
    "trainer.max_tokens_per_pass": 2048,
    "algorithm.steps": 6,
    "algorithm.prompts_per_step": 24,
    "algorithm.group_size": 8,
    "workload.prompts": QUICKSTART / "prompts.jsonl",
    "workload.max_prompt_tokens": 48,
    "workload.lengths.kind": "groups",
    "workload.lengths.source": QUICKSTART / "lengths.csv",
    "workload.lengths.prompt_tokens": 16,
    "verifier.scorer": "reasoning-gym",
    "policies.order": "fifo",  # the quickstart's prompts have no expected lengths
    "execute.launcher": "ray",
    "execute.ray_address": f"{ADDRESSES[NEAR]}:{PORT}",
}
"""Keys of the run file that replace values of the plan which this machine cannot execute."""


def main() -> None:
    """Execute the plan, and compare it with its simulation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("plan", type=Path, help="a run file of `streamrl plan`, with two pools")
    parser.add_argument("--output", type=Path, required=True, help="run directory to create")
    parser.add_argument("--rate", type=float, default=200e6, help="bits a second")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds one way")
    parser.add_argument("--set", action="append", default=[], help="as for `streamrl execute`")
    options = parser.parse_args()
    run = load_run(options.plan, [])
    settings = [*small(run, options.rate, options.delay), f"execute.output={options.output}"]
    words = [word for one in [*settings, *options.set] for word in ("--set", one)]
    with wan_link(options.rate, options.delay), cluster(run.trainer.pool, run.rollout.pool):
        for command in (["execute", str(options.plan), *words], ["compare", str(options.output)]):
            subprocess.run(near_command(*command), check=True, env=os.environ | TOKEN)


def small(run: Run, rate: float, delay: float) -> list[str]:
    """Return the settings with which a plan's run can be executed on two cores and an emulated link."""
    pools = {run.trainer.pool, run.rollout.pool}
    keys = {
        **SMALL,
        **{f"cluster.pools.{pool}.gpu": "cpu" for pool in pools},
        **{f"cluster.pools.{pool}.gpus_per_node": 2 for pool in pools},
        "cluster.links.0.bandwidth": f"{rate / 1e6:g} Mbps",
        "cluster.links.0.latency": f"{1000 * delay:g} ms",
    }
    return [f"{key}={value}" for key, value in keys.items()]


if __name__ == "__main__":
    main()

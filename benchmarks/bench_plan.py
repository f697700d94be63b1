"""Measure the planner: its speed, the gap of its choice to the best of all plans, and its proposals for the paper.

Six cases: Qwen2.5 7B, 32B and 72B, in one datacenter of H800 and with H20 in another. The choice is
compared with every plan that could be better: those with a bound of at most `ROOM` times the chosen
objective. All are simulated on the seed and the steps of the choice. `--sample` other plans are
simulated too, to check that none of them is better. `--full` simulates all plans of a case, which
takes hours.

One JSON object per figure ends the output.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.sim.fidelity.paper import Case, load_paper, make_case
from streamrl.sim.planner.plan import Plan
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import Trial, run_all, short_speed_of

SIZES = ("7B", "32B", "72B")
H20_NODES = {"7B": 4, "32B": 6, "72B": 8}
MICRO_BATCHES = {"7B": [1, 2, 4, 8], "32B": [4], "72B": [4]}
"""Micro-batches for the cases in one datacenter. Each case has 5,000 to 10,000 plans; `--full`
simulates all of them.
"""
LINK = [{"between": ["h20", "h800"], "bandwidth": "80 Gbps", "latency": "10 ms"}]
ROOM = 1.05
"""Ratio to the chosen objective. The bound is for a steady step, and a few steps after the first
may be 5 % faster.
"""
SPLITS = {"32B": (40, 24), "72B": (80, 48)}
NODE = 8


class Outcome(NamedTuple):
    """The result of one case."""

    name: str
    plan: Plan
    num_simulated: int
    ratio: float
    """Objective of the chosen plan over the best simulated one."""
    sampled_ratio: float
    """The same, over the best of a sample of the plans that their bound rules out."""
    least_over_bound: float


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="simulate every plan of a case")
    parser.add_argument(
        "--sample", type=int, default=40, help="number of ruled-out plans to simulate"
    )
    parser.add_argument("--cases", nargs="*", help="only these, such as 7B-one 72B-two")
    arguments = parser.parse_args()
    speed()
    for name, run in cases().items():
        if not arguments.cases or name in arguments.cases:
            show(compare(name, run, full=arguments.full, sample=arguments.sample))
    paper_splits()
    heterogeneous()


# Cases --------------------------------------------------------------------------------------------


def cases() -> dict[str, Run]:
    """Return the six cases. Each has some thousand plans."""
    found = {}
    for size in SIZES:
        found[f"{size}-one"] = opened(
            size, {}, sync_modes=["full"], micro_batch=MICRO_BATCHES[size]
        )
        far = {
            "cluster.pools.h20": {
                "gpu": "h20",
                "nodes": H20_NODES[size],
                "transport": "tcp",
                "node_bandwidth": "100 Gbps",
            },
            "cluster.links": LINK,
        }
        found[f"{size}-two"] = opened(
            size, far, rollout_pools=["h20"], sync_modes=["full"], micro_batch=[4]
        )
    return found


def opened(size: str, changes: dict[str, Any], **plan: Any) -> Run:
    """Return the paper's run of a size, as an offer to plan for."""
    run = make_case(Case(size, "20K", "async"), changes=changes)
    return replace(run, plan=replace(run.plan, **plan))


def speed() -> None:
    """Measure the time of one plan and of the screening of its candidates."""
    run = cases()["7B-two"]
    started_at = time.perf_counter()
    search = Search.open(run)
    search.scores()
    screened = time.perf_counter() - started_at
    plan = make_plan(run).plan
    report("plan: candidates", plan.candidates, "plans")
    report("plan: seconds", plan.seconds, "s")
    report("plan: candidates a second", plan.candidates / plan.seconds, "plans/s")
    report("plan: candidates screened a second", plan.candidates / screened, "plans/s")


# Against the best of all ---------------------------------------------------------------------------


def compare(name: str, run: Run, *, full: bool, sample: int) -> Outcome:
    """Plan a case, then simulate the plans that could be better, or all plans."""
    plan = make_plan(run).plan
    search = Search.open(run)
    chosen = plan.objective.value
    bounds = search.bounds()
    could = np.nonzero(bounds <= ROOM * chosen)[0]
    rest = np.nonzero(bounds > ROOM * chosen)[0]
    few = np.random.default_rng(0).choice(rest, min(sample, len(rest)), replace=False)
    with ProcessPoolExecutor() as pool:
        best = simulate(search, pool, range(len(bounds)) if full else could.tolist())
        others = simulate(search, pool, few.tolist())
    over = [value / bounds[index] for found in (best, others) for index, value in found.items()]
    return Outcome(
        name,
        plan,
        len(best) + len(others),
        chosen / min(best.values()),
        chosen / min(others.values()) if others else 0.0,
        min(over),
    )


def simulate(search: Search, pool: Executor, indices: range | list[int]) -> dict[int, float]:
    """Return the objective of plans. Each is simulated on its own."""
    trials = ((i, Trial(search.base, search.space.candidate(i))) for i in indices)
    speeds = run_all(pool, short_speed_of, trials)
    return {i: search.value_of(speed) for i, speed in speeds.items()}


def show(outcome: Outcome) -> None:
    """Print the figures of a case."""
    plan = outcome.plan
    print(f"\n{outcome.name}: {plan.allocation.text}", flush=True)
    report(f"{outcome.name}: candidates", plan.candidates, "plans")
    report(f"{outcome.name}: simulated one by one", outcome.num_simulated, "plans")
    report(f"{outcome.name}: seconds", plan.seconds, "s")
    report(f"{outcome.name}: chosen over best", outcome.ratio, "times")
    report(f"{outcome.name}: chosen over best ruled out", outcome.sampled_ratio, "times")
    report(f"{outcome.name}: least simulated over bound", outcome.least_over_bound, "times")


# Against the paper ---------------------------------------------------------------------------------


def paper_splits() -> None:
    """Divide the paper's pools for the shortest step of the asynchronous system (Figure 10)."""
    for size, (generate, train) in SPLITS.items():
        run = opened(size, {}, objective="step-time", systems=["stream-async"])
        plan = make_plan(run).plan
        sides = plan.allocation.rollout.num_gpus, plan.allocation.trainer.num_gpus
        print(f"\n{size}: {plan.allocation.text}; the paper has {generate}:{train}")
        away = max(abs(sides[0] - generate), abs(sides[1] - train)) / NODE
        report(f"{size} split: GPUs that generate", sides[0], "GPUs")
        report(f"{size} split: GPUs that train", sides[1], "GPUs")
        report(f"{size} split: away from the paper's", away, "nodes")


def heterogeneous() -> None:
    """Compare 32 H20 + 16 H800 with 32 H800 in tokens per dollar. Each is planned separately (Figure 12)."""
    far = {
        "cluster.pools.h20": {
            "gpu": "h20",
            "nodes": 4,
            "transport": "tcp",
            "node_bandwidth": "100 Gbps",
        },
        "cluster.links": LINK,
    }
    ratios = [a / b for a, b in load_paper().heterogeneous.values()]
    print(f"\nthe paper has {min(ratios):.2f} to {max(ratios):.2f} times the tokens a dollar")
    name = "7B: tokens a dollar of 32 H20 + 16 H800 over 32 H800"
    for which, degrees in (("any replicas", None), ("the paper's replicas", [1])):
        shared: dict[str, Any] = {
            "systems": ["stream-async"],
            "trainer_gpus": [16],
            "rollout_tensor_parallel": degrees,
        }
        alone = opened("7B", {}, rollout_gpus=[16], **shared)
        across = opened("7B", far, rollout_pools=["h20"], rollout_gpus=[32], **shared)
        across = replace(across, plan=replace(across.plan, trainer_pools=["h800"]))
        plans = [make_plan(run).plan for run in (across, alone)]
        for plan in plans:
            print(f"{plan.allocation.text}: ${plan.objective.value:.3f} per million tokens")
        report(f"{name}, {which}", plans[1].objective.value / plans[0].objective.value, "times")
    at_20k = load_paper().heterogeneous["20K"]
    report(f"{name}, in the paper at 20K", at_20k[0] / at_20k[1], "times")


def report(name: str, value: float, unit: str) -> None:
    """Print one figure as a JSON object on its own line."""
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit}), flush=True)


if __name__ == "__main__":
    main()

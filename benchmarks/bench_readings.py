"""Compare readings of the details that the StreamRL paper (arXiv 2504.15930) leaves open.

`sim/fidelity/paper.py` uses one reading for all cells. Here each choice is changed on its own. The
results are the 27 cells of Figure 8, the mean error at 20K for each model, the ratios over the
colocated system, Table 3 and Figure 12. The training efficiency is the only constant that the six
cells of 7B and 72B at 20K may calibrate. Their error is printed for several values. The output ends
with one JSON object per figure.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from math import log, sqrt
from statistics import median
from typing import Any, NamedTuple

from streamrl.record.metrics import measure_speed
from streamrl.sim.fidelity.paper import (
    BATCH,
    LENGTHS,
    MODELS,
    WARM_UP,
    Case,
    load_paper,
    make_case,
    on_wider_replicas,
)
from streamrl.sim.fidelity.paper_throughput import CELLS, COST, paper_throughput
from streamrl.sim.world import simulate

SEEDS = (0, 1)
READINGS: dict[str, dict[str, Any]] = {
    "as chosen": {},
    **{
        f"{n} let in on demand": {"rollout.admission": "on-demand", "rollout.max_running": n}
        for n in (15, 16, 20, 24, 32, 256)
    },
    "twice the GPUs a replica": {"rollout.tensor_parallel": "twice"},
    "generation a fifth faster": {"costs.generation_factor": 1.2},
    "training a tenth faster": {"costs.training_factor": 1.1},
    "8 rollouts a pass": {"trainer.micro_batch": 8},
    "trainer offloads where it must": {"trainer.offload": "where it must"},
    "drains wherever weights arrive": {"policies.weight_sync": "drain-then-load"},
    "loads in flight": {"policies.weight_sync": "load-in-flight"},
    "a batch waits for the last": {
        "policies.weight_sync": "drain-then-load",
        "policies.waits_for_whole_batches": True,
    },
}
EFFICIENCIES = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
HETEROGENEOUS = [Case("7B", length, "async", across=True) for length in LENGTHS]
CALIBRATED = [case for case in CELLS if case.size in ("7B", "72B") and case.length == "20K"]
SKEWED = Case("72B", "20K", "colocated, skewness-aware")


class Job(NamedTuple):
    """One run of a reading."""

    case: Case
    seed: int
    changes: dict[str, Any]


def main() -> None:
    """Print tables, then the figures."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", nargs="*", default=[], help="readings by name")
    only = arguments.parse_args().only
    figures: list[tuple[str, float, str]] = []
    with ProcessPoolExecutor() as pool:
        print(
            f"{'reading':34} mean  largest   7B   32B   72B  sync/coloc  async/coloc  Table 3             "
            "Figure 12"
        )
        for name, changes in READINGS.items():
            if not only or name in only:
                figures += compare(pool, name, changes)
        if not only:
            figures += calibrate(pool)
    for name, value, unit in figures:
        print(json.dumps({"name": name, "value": round(value, 4), "unit": unit}))


def compare(
    pool: ProcessPoolExecutor, name: str, changes: dict[str, Any]
) -> list[tuple[str, float, str]]:
    """Print the errors of a reading, and return them as figures."""
    ours = simulate_all(pool, [*CELLS, SKEWED, *HETEROGENEOUS], changes)
    errors = [abs(ours[case] / paper_throughput(case) - 1) for case in CELLS]
    unlike = {system: ratio_error(ours, system) for system in ("sync", "async")}
    base = ours[Case("72B", "20K", "colocated")]
    rows = [SKEWED, Case("72B", "20K", "sync"), Case("72B", "20K", "async")]
    table = [ours[case] / base for case in rows]
    over = [ours[case] / ours[case._replace(across=False)] for case in HETEROGENEOUS]
    per_cost = [ratio * COST[False] / COST[True] for ratio in over]
    mean = sum(errors) / len(errors)
    by_size = [f"{mean_at_20k(ours, size):+4.0%}" for size in MODELS]
    print(
        f"{name:34} {mean:4.1%}  {max(errors):6.0%}  {'  '.join(map(str, by_size))}  "
        f"{unlike['sync']:9.1%}  {unlike['async']:10.1%}   "
        + "  ".join(f"{ratio:.2f}" for ratio in [*table, *per_cost]),
        flush=True,
    )
    wanted = [across / alone for across, alone in load_paper().heterogeneous.values()]
    differences = [abs(a - b) for a, b in zip(table, load_paper().ablation["72B"][1:], strict=True)]
    return [
        (f"Figure 8 mean error ({name})", mean, "share"),
        (f"Figure 8 largest error ({name})", max(errors), "share"),
        (f"Figure 8 sync ratios, median error ({name})", unlike["sync"], "share"),
        (f"Figure 8 async ratios, median error ({name})", unlike["async"], "share"),
        (f"Table 3 largest difference ({name})", max(differences), "times"),
        (
            f"Figure 12 largest difference ({name})",
            max(abs(a - b) for a, b in zip(per_cost, wanted, strict=True)),
            "times",
        ),
    ]


def calibrate(pool: ProcessPoolExecutor) -> list[tuple[str, float, str]]:
    """Print the error of the six calibrating cells for each training efficiency."""
    figures = []
    print("\ntraining efficiency over the profiles': root mean square error of 7B and 72B at 20K")
    for factor in EFFICIENCIES:
        ours = simulate_all(pool, CALIBRATED, {"costs.training_factor": factor})
        squares = [log(ours[case] / paper_throughput(case)) ** 2 for case in CALIBRATED]
        error = sqrt(sum(squares) / len(squares))
        print(f"{factor:5.2f}  {error:.1%}", flush=True)
        figures.append(
            (f"error of the calibrating cells at training efficiency {factor}", error, "log")
        )
    return figures


def simulate_all(
    pool: ProcessPoolExecutor, cases: list[Case], changes: dict[str, Any]
) -> dict[Case, float]:
    """Return the samples per second of every case, as a median over seeds."""
    jobs = [Job(case, seed, applied(case, changes)) for case in cases for seed in SEEDS]
    found = dict(zip([job[:2] for job in jobs], pool.map(throughput, jobs), strict=True))
    return {case: median(found[case, seed] for seed in SEEDS) for case in cases}


def applied(case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that apply to a case. Systems that overlap a weight load keep their own weight sync."""
    kept = dict(changes)
    if case.system != "async":
        kept = {key: value for key, value in kept.items() if not key.startswith("policies.")}
    if kept.get("trainer.offload") == "where it must":
        kept["trainer.offload"] = case.size == "72B"
    if kept.get("rollout.tensor_parallel") == "twice":
        kept |= on_wider_replicas(case)
    return kept


def mean_at_20k(ours: dict[Case, float], size: str) -> float:
    """Return the mean error of a model's three systems at 20K; negative is too slow."""
    cells = [case for case in CELLS if case.size == size and case.length == "20K"]
    return sum(ours[case] / paper_throughput(case) - 1 for case in cells) / len(cells)


def throughput(job: Job) -> float:
    """Return the samples per second of one run."""
    step_times = measure_speed(simulate(make_case(*job))).step_times
    return BATCH / median(step_times[WARM_UP:])


def ratio_error(ours: dict[Case, float], system: str) -> float:
    """Return the median error of a system's speed-ups over the colocated system."""
    errors = []
    for case in CELLS:
        if case.system == system:
            base = case._replace(system="colocated")
            errors.append(
                abs(ours[case] / ours[base] / (paper_throughput(case) / paper_throughput(base)) - 1)
            )
    return median(errors)


if __name__ == "__main__":
    main()

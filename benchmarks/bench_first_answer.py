"""Measure how soon a first answer comes, and how far its figures are from whole simulations of the same plans.

    python -m benchmarks.bench_first_answer             the wall seconds of one question, and the figures of all offers
    python -m benchmarks.bench_first_answer --runs 5    how often the wall seconds are measured; their median is printed

The figures of a first answer are compared with `streamrl simulate` on each plan that it names, which stops when the
mean step is known. One JSON object is printed per figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

from streamrl.runfile.files import make_run
from streamrl.sim.planner.answers import MOST_SECONDS
from streamrl.sim.planner.first_answer import EstimatedPlan, Question, first_answer, run_table_of
from streamrl.sim.planner.trial import Trial, Unfinished, metrics_of, whole

LONG = {"mean_tokens": 6_000, "max_tokens": 32_000}
OFFERS = {
    "8B, 16 H100 and 8 H20": Question(model="qwen3-8b", gpus="16xH100@2.2,8xH20@1.1", **LONG),
    "0.6B on a workstation": Question(model="qwen3-0.6b", gpus="2xH100@2", mean_tokens=1_000),
    "1.5B on a node": Question(model="qwen2.5-1.5b", gpus="8xH100@2"),
    "7B on a node of A100": Question(model="qwen2.5-7b", gpus="8xA100@1.3"),
    "7B, short outputs": Question(
        model="qwen2.5-7b", gpus="16xH100@2", mean_tokens=500, max_tokens=2_000
    ),
    "7B in two datacenters": Question(
        model="qwen2.5-7b", gpus="32xH20@1.85,32xH800@5.27", link="80 Gbps"
    ),
    "14B, large batch": Question(model="qwen3-14b", gpus="32xH100@2", prompts=256),
    "30B mixture": Question(model="qwen3-30b-a3b", gpus="32xH100@2", **LONG),
    "32B": Question(model="qwen3-32b", gpus="64xH800@2.5", **LONG),
    "32B on H200": Question(model="qwen3-32b", gpus="32xH200@3", **LONG),
    "72B": Question(model="qwen2.5-72b", gpus="64xH100@2", mean_tokens=2_000, max_tokens=8_000),
    "PPO, single GPUs": Question(model="qwen2.5-7b", gpus="16xH100@2/1", algorithm="ppo"),
}


def main() -> None:
    """Print the wall seconds of a question, and one line for each plan of each offer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    seconds = statistics.median(wall_seconds() for _ in range(options.runs))
    _print(name="wall time of a first answer", value=round(seconds, 2), unit="s", runs=options.runs)
    with ProcessPoolExecutor() as pool:
        for name, question in OFFERS.items():
            for line in compare(name, question, pool):
                _print(**line)


def wall_seconds() -> float:
    """Return how long `streamrl init` takes, which prints a first answer and writes a run file."""
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", "init"]
    question = ["--model", "Qwen/Qwen3-8B", "--gpus", "16xH100@2.20,8xH20@1.10"]
    lengths = ["--mean-tokens", "6k", "--max-tokens", "32k"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [*command, str(Path(folder) / "run.toml"), *question, *lengths],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - began


def compare(name: str, question: Question, pool: Executor) -> list[dict[str, object]]:
    """Return the figures of a first answer over those of whole simulations of its plans."""
    run = make_run(run_table_of(question))
    answer = first_answer(run, pool, MOST_SECONDS)
    plans = {plan.choice: plan for plan in answer.plans}
    trials = [Trial(whole(run, run.seed), plan.candidate) for plan in plans.values()]
    found = zip(plans.values(), pool.map(metrics_of, trials), strict=True)
    return [
        _line(name, answer.seconds, plan, metrics.step_time, metrics.cost_per_step)
        for plan, metrics in found
        if not isinstance(metrics, Unfinished)
    ]


def _line(
    name: str, seconds: float, plan: EstimatedPlan, step_time: float, cost: float
) -> dict[str, object]:
    own_cost = plan.dollars / plan.seconds * plan.step_time
    return {
        "name": f"{name}, {plan.what}",
        "answered_in": round(seconds, 1),
        "simulated_steps": plan.simulated_steps,
        "step_time": round(plan.step_time / step_time, 3),
        "cost": round(own_cost / cost, 3),
        "choice": plan.choice,
    }


def _print(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

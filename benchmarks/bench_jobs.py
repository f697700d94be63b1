"""Compare the plans of random pairs of jobs on one pool with static halves, simulated again with another seed.

    python -m benchmarks.bench_jobs --page docs/jobs.md       20 pairs; a quarter of an hour on two cores
    python -m benchmarks.bench_jobs --pairs 2 --seconds 10    two of them, quickly

Each pair has models, lengths, batches, numbers of steps, priorities, submission times and a pool of its own, drawn from a
fixed seed. A ratio below 1 means that the plan is better than an equal split by its objective. The goal is a ratio of at most
1.02 in every pair, with simulations that the choice has not seen. Pairs with a line in the results are not planned again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from streamrl.report.fidelity import with_section
from streamrl.runfile.formatting import long_time
from streamrl.runfile.jobs_file import load_jobs
from streamrl.sim.jobs.plan import ClusterPlan
from streamrl.sim.jobs.planner import plan_jobs
from streamrl.sim.planner.first_answer import Question, run_table_of

SECTION = "How good the choices are"
SEED, NUM_PAIRS = 7, 20
GOAL = 1.02
MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen2.5-7b", "qwen3-8b", "llama-3.1-8b")
GPUS = ("h100", "h800", "h200", "a100")
PLAN = {
    "mixes_replicas": False,
    "systems": ["colocated", "one-step-async", "stream-async"],
    "micro_batch": [2],
    "sync_modes": ["full"],
    "finalists": 2,
}
"""A small search, so that a pair takes less than a minute."""


def pairs() -> Iterator[dict[str, Any]]:
    """Yield the cluster file of each pair, with the run files of its jobs under "runs"."""
    draw = random.Random(SEED)
    for _ in range(NUM_PAIRS):
        gpu, nodes = draw.choice(GPUS), draw.choice((2, 4))
        pool = {"gpu": gpu, "nodes": nodes, "owned": draw.random() < 0.5, "price": 2.0}
        jobs = [_job(draw, gpu, name, number) for number, name in enumerate(("a", "b"))]
        yield {
            "cluster": {"pools": {gpu: pool}},
            "jobs": [job for job, _ in jobs],
            "schedule": {"objective": draw.choice(("completion", "completion", "dollars"))},
            "runs": [run for _, run in jobs],
        }


def _job(draw: random.Random, gpu: str, name: str, number: int) -> tuple[dict[str, Any], Any]:
    mean = draw.choice((1000, 2000, 4000, 6000))
    question = Question(
        model=draw.choice(MODELS),
        gpus=f"8x{gpu}@2",
        prompts=draw.choice((32, 64, 128)),
        group=8,
        mean_tokens=mean,
        max_tokens=4 * mean,
        steps=draw.choice((50, 100, 200, 400)),
    )
    run = run_table_of(question)
    run |= {"plan": PLAN, "simulate": {"max_steps": 12}}
    job: dict[str, Any] = {"name": name, "run": f"{name}.toml"}
    job["priority"] = draw.choice((1, 1, 1, 4))
    if number and draw.random() < 0.5:
        job["submitted"] = draw.choice(("30 min", "2 h", "6 h"))
    return job, run


def plan_pair(pair: dict[str, Any], seconds: float) -> ClusterPlan:
    """Plan one pair within about so many seconds."""
    with tempfile.TemporaryDirectory(prefix="bench-jobs-") as scratch:
        table = {key: value for key, value in pair.items() if key != "runs"}
        table["schedule"] = {**table["schedule"], "time_limit": f"{seconds} s"}
        for job, run in zip(pair["jobs"], pair["runs"], strict=True):
            (Path(scratch) / job["run"]).write_text(tomli_w.dumps(run))
        path = Path(scratch) / "cluster.toml"
        path.write_text(tomli_w.dumps(table))
        return plan_jobs(load_jobs(path)).plan


def row_of(number: int, pair: dict[str, Any], plan: ClusterPlan) -> dict[str, Any]:
    """Return the figures of a pair."""
    equal = next((each for each in plan.options if each.name == "equal-split"), None)
    chosen, check = plan.choice, plan.check
    (pool,) = pair["cluster"]["pools"].values()
    return {
        "pair": number,
        "pool": f"{pool['nodes'] * 8} {pool['gpu']}{', owned' if pool['owned'] else ''}",
        "jobs": [
            f"{run['model']['name']}, {job.get('submitted', 'at once')}"
            for job, run in zip(pair["jobs"], pair["runs"], strict=True)
        ],
        "objective": plan.objective,
        "chosen": plan.chosen,
        "planned": 1.0 if check is None else check.planned_ratio,
        "checked": 1.0 if check is None else check.ratio,
        "has_halves": equal is not None,
        "busy": chosen.utilisation,
        "busy_in_halves": None if equal is None else equal.utilisation,
        "seconds": [each.seconds for each in chosen.jobs],
        "seconds_in_halves": [] if equal is None else [each.seconds for each in equal.jobs],
        "seconds_alone": [each.seconds for each in plan.alone],
        "busy_alone": [each.utilisation for each in plan.alone],
    }


def section(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's section."""
    compared = [row for row in rows if row["has_halves"]]
    worst = max((row["checked"] for row in compared), default=1.0)
    better = [row for row in compared if row["checked"] < 0.98]
    yield (
        f"`make bench-jobs` plans {len(rows)} random pairs of jobs. It simulates the choice and static halves again with another "
        "seed."
    )
    yield (
        f"In the worst pair the objective is {(worst - 1) * 100:+.1f} % against static halves. In {len(better)} of "
        f"{len(compared)} pairs it is better by more than 2 %."
    )
    yield (
        "Times are those of both jobs, from submission to end. Jobs that are shorter than a time slice run one after the other."
    )
    yield ""
    yield (
        "| pool | jobs, submitted | objective | chosen | planned | other seed | GPUs busy (halves) | times | in halves | alone |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        halves = row["busy_in_halves"]
        cells = [
            row["pool"],
            "; ".join(row["jobs"]),
            row["objective"],
            row["chosen"],
            f"{(row['planned'] - 1) * 100:+.1f} %",
            f"{(row['checked'] - 1) * 100:+.1f} %",
            f"{row['busy']:.0%}" + ("" if halves is None else f" ({halves:.0%})"),
            *(_times(row[key]) for key in ("seconds", "seconds_in_halves", "seconds_alone")),
        ]
        yield f"| {' | '.join(cells)} |"


def _times(seconds: Sequence[float]) -> str:
    return ", ".join(long_time(each).partition(" (")[0] for each in seconds) or "do not fit"


def main() -> None:
    """Print one JSON object per pair and figure; with --page, write the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--seconds", type=float, default=40.0, help="time to plan one pair")
    parser.add_argument("--results", type=Path, default=Path("build/bench-jobs.jsonl"))
    parser.add_argument("--page", type=Path, help="docs/jobs.md, whose section is written")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    text = args.results.read_text() if args.results.exists() else ""
    known = {row["pair"]: row for row in map(json.loads, text.splitlines())}
    for number, pair in enumerate(pairs()):
        if number < args.pairs and number not in known:
            known[number] = row_of(number, pair, plan_pair(pair, args.seconds))
            with args.results.open("a") as file:
                file.write(json.dumps(known[number]) + "\n")
            print(json.dumps(known[number]), flush=True)
    rows = [known[number] for number in sorted(known)]
    worst = max(row["checked"] for row in rows)
    print(json.dumps({"name": "jobs: worst against halves", "value": worst, "unit": "ratio"}))
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(with_section(page, SECTION, [*section(rows)]), encoding="utf-8")
    if worst > GOAL:
        raise SystemExit(f"a choice is {worst:.3f} times static halves, the goal is {GOAL}")


if __name__ == "__main__":
    main()

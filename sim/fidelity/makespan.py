"""Figure 9: what skewness-aware dispatch takes off generation, with the ranker's order and with true lengths."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from streamrl.hardware.memory import most_running
from streamrl.report.fidelity import FigureCell, PaperFigure
from streamrl.sim.batch_time import generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.fill import fill_latency
from streamrl.sim.fidelity.cases import BATCH, MODELS, SKEWNESS_AWARE, Case, make_case
from streamrl.sim.fidelity.paper import load_paper
from streamrl.workload.workload import SimulatedWorkload

SEEDS = range(5)
WAYS: dict[str, dict[str, Any]] = {
    "random": {"policies.dispatch": "random", "policies.order": "fifo"},
    "ranker": {f"policies.{key}": value for key, value in SKEWNESS_AWARE.items()},
    "true lengths": {
        **{f"policies.{key}": value for key, value in SKEWNESS_AWARE.items()},
        "workload.lengths.ranker": "oracle",
    },
}
TRIED = (14, 20, 24, 32, 48)
"""Rollouts let in on demand, to see what the ratios hang on."""
TRIED_SEEDS = range(2)


class Job(NamedTuple):
    """One batch to be generated."""

    size: str
    way: str
    seed: int
    changes: dict[str, Any]


def dispatch() -> PaperFigure:
    """Figure 9: six ratios."""
    paper = load_paper().dispatch
    with ProcessPoolExecutor() as pool:
        ours = ratios_over_random(pool, {}, SEEDS)
        tried = {
            most: ratios_over_random(
                pool,
                {"rollout.admission": "on-demand", "rollout.max_running": most},
                TRIED_SEEDS,
            )
            for most in TRIED
        }
    cells = [
        FigureCell(label=f"{size} {way}", paper=paper[size][place], ours=ours[size, way])
        for size in paper
        for place, way in enumerate(("ranker", "true lengths"))
    ]
    return PaperFigure(
        name="Figure 9",
        title="generation of a 20K batch over random dispatch",
        unit="times",
        cells=cells,
        target="every ratio within 0.05",
        is_met=all(abs(cell.difference) <= 0.05 for cell in cells),
        notes=[_batch_note(), _tried_note(tried)],
    )


def ratios_over_random(
    pool: ProcessPoolExecutor, changes: dict[str, Any], seeds: Sequence[int]
) -> dict[tuple[str, str], float]:
    """Return the seconds of each model and way over those of random dispatch, medians over seeds."""
    jobs = [Job(size, way, seed, changes) for size, way, seed in product(MODELS, WAYS, seeds)]
    found = dict(zip([job[:3] for job in jobs], pool.map(makespan, jobs), strict=True))
    took = {
        (size, way): median(found[size, way, seed] for seed in seeds)
        for size, way in product(MODELS, WAYS)
    }
    return {(size, way): took[size, way] / took[size, "random"] for size, way in took}


def makespan(job: Job) -> float:
    """Return the seconds in which one batch is generated on the generation GPUs of Figure 8."""
    changes = {**WAYS[job.way], **job.changes}
    run = make_case(Case(job.size, "20K", "sync"), job.seed, changes)
    costs = Costs.load(run)
    run = fill_latency(run, costs)
    return generate_batch(run, costs, SimulatedWorkload(run).draw(0, BATCH))[-1].time


def _batch_note() -> str:
    """Say how much of its share a replica runs at once."""
    runs = {size: make_case(Case(size, "20K", "sync")) for size in MODELS}
    shares = ", ".join(
        f"{most_running(run)} of {BATCH // run.rollout.replicas} ({size})"
        for size, run in runs.items()
    )
    return (
        "order decides something only where a replica runs fewer rollouts than it is dealt, and the more the fewer it "
        f"runs. Memory for the longest of each is there for {shares}"
    )


def _tried_note(tried: dict[int, dict[tuple[str, str], float]]) -> str:
    """Say what the ratios with true lengths are where other numbers are let in on demand."""
    found = "; ".join(
        f"{size} " + ", ".join(f"{ratios[size, 'true lengths']:.2f}" for ratios in tried.values())
        for size in MODELS
    )
    return (
        f"with {', '.join(map(str, TRIED))} let in on demand instead, true lengths leave: {found}. The paper has "
        + ", ".join(f"{oracle:.2f} ({size})" for size, (_, oracle) in load_paper().dispatch.items())
        + ": 7B would be met where its replicas run fewer than memory holds of the longest, and so would both others, each "
        "at a batch of its own (`benchmarks/bench_dispatch.py --sweep` has more)"
    )

"""The runs of the paper's evaluation: one reading for all cells, every choice that the paper leaves open named here.

| left open by the paper                    | read as                                                           |
|-------------------------------------------|-------------------------------------------------------------------|
| generation parallelism                    | the smallest that fits: 7B TP1, 32B TP2, 72B TP4                   |
| training parallelism                      | `TRAINING` below, per number of GPUs                              |
| GPUs of each side, 32B and 72B            | as Figure 10 says; 7B half and half                               |
| key-value heads of 7B                     | 4, as released (its Table 2 prints 8)                             |
| prompts and samples per prompt            | 1,024 prompts, one sample each; 400 tokens a prompt               |
| steps of asynchronous generation          | back to back: a batch starts once the one before is generated     |
| most rollouts that a replica decodes      | 256, or what memory holds                                         |
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, Literal, NamedTuple

from sim.world import simulate
from streamrl.config import Run
from streamrl.metrics import Metrics, measure
from streamrl.run_file import make_run

Size = Literal["7B", "32B", "72B"]
MODELS: dict[str, str] = {"7B": "qwen2.5-7b", "32B": "qwen2.5-32b", "72B": "qwen2.5-72b"}
GPUS: dict[str, int] = {"7B": 32, "32B": 64, "72B": 128}
SPLIT: dict[str, tuple[int, int]] = {"7B": (16, 16), "32B": (40, 24), "72B": (80, 48)}
"""GPUs that generate and that train."""
GENERATION_TP: dict[str, int] = {"7B": 1, "32B": 2, "72B": 4}
LENGTHS: dict[str, int] = {"5K": 5000, "10K": 10_000, "20K": 20_000}
BATCH = 1024
STEPS, WARM_UP = 5, 2
SEEDS = (0, 1)
RECALL = 0.87
"""Of the paper's 7B ranker (Table 4)."""


class Degrees(NamedTuple):
    """Parallelism of the trainer."""

    data: int
    tensor: int
    pipeline: int
    offload: bool


TRAINING: dict[tuple[str, int], Degrees] = {
    ("7B", 8): Degrees(4, 2, 1, True),
    ("7B", 16): Degrees(8, 2, 1, False),
    ("7B", 24): Degrees(12, 2, 1, False),
    ("7B", 32): Degrees(16, 2, 1, False),
    ("32B", 24): Degrees(1, 4, 6, False),
    ("32B", 32): Degrees(2, 4, 4, False),
    ("32B", 64): Degrees(4, 4, 4, False),
    ("72B", 48): Degrees(2, 4, 6, True),
    ("72B", 64): Degrees(4, 4, 4, True),
    ("72B", 128): Degrees(8, 4, 4, True),
}

SYSTEMS: dict[str, dict[str, Any]] = {
    "colocated": {"system": "colocated", "dispatch": "random", "order": "fifo"},
    "colocated, skewness-aware": {
        "system": "colocated",
        "dispatch": "skewness-aware",
        "order": "longest-first",
    },
    "sync": {
        "system": "stream-sync",
        "dispatch": "skewness-aware",
        "order": "longest-first",
    },
    "async": {
        "system": "stream-async",
        "dispatch": "skewness-aware",
        "order": "longest-first",
        "waits_for_whole_batches": True,
    },
}


class Case(NamedTuple):
    """One run of the paper."""

    size: str
    length: str
    system: str
    generation_factor: float = 1.0
    training_factor: float = 1.0
    split: tuple[int, int] | None = None


def make_case(case: Case, seed: int = 0, changes: dict[str, Any] | None = None) -> Run:
    """Make the run file of a case; dotted keys in `changes` replace values."""
    is_colocated = case.system.startswith("colocated")
    total = GPUS[case.size]
    generate, train = (total, total) if is_colocated else case.split or SPLIT[case.size]
    degrees = TRAINING[case.size, train]
    table: dict[str, Any] = {
        "seed": seed,
        "warm_up_steps": WARM_UP,
        "model": {"name": MODELS[case.size]},
        "cluster": {"pools": {"h800": {"gpu": "h800", "nodes": total // 8}}},
        "rollout": {
            "pool": "h800",
            "replicas": generate // GENERATION_TP[case.size],
            "tensor_parallel": GENERATION_TP[case.size],
            "max_running": 256,
            "max_tokens": LENGTHS[case.length],
        },
        "trainer": {
            "pool": "h800",
            "data_parallel": degrees.data,
            "tensor_parallel": degrees.tensor,
            "pipeline_parallel": degrees.pipeline,
            "offload": degrees.offload,
        },
        "algorithm": {
            "name": "ppo",
            "kl_coefficient": 0.001,
            "steps": STEPS,
            "prompts_per_step": BATCH,
        },
        "workload": {
            "lengths": {
                "kind": "histogram",
                "source": "streamrl-codemath-20k",
                "scale": LENGTHS[case.length] / 20_000,
                "prompt_tokens": 400,
                "ranker": "recall",
                "ranker_recall": RECALL,
            }
        },
        "policies": dict(SYSTEMS[case.system]),
        "costs": {
            "generation_factor": case.generation_factor,
            "training_factor": case.training_factor,
        },
    }
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = table
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return make_run(table)


def throughput(case: Case, changes: dict[str, Any] | None = None) -> float:
    """Give samples a second: rollouts of a step over the median step, median over seeds."""
    return median(BATCH / measure_run(make_case(case, seed, changes)).step_time for seed in SEEDS)


def measure_run(run: Run) -> Metrics:
    """Simulate a run and measure it."""
    return measure(simulate(run))


def throughputs(cases: Iterable[Case]) -> dict[Case, float]:
    """Give the samples a second of many cases, on all cores."""
    wanted = list(dict.fromkeys(cases))
    with ProcessPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(throughput, wanted), strict=True))

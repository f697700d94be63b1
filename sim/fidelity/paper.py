"""The StreamRL paper's reported figures, and the runs of its evaluation.

One reading applies to all cells. This table lists every choice that the paper leaves open:

| left open by the paper                    | our reading                                                       |
|-------------------------------------------|-------------------------------------------------------------------|
| generation parallelism                    | the smallest that fits: 7B TP1, 32B TP2, 72B TP4                   |
| training parallelism                      | the fastest that fits, by our own costs (`TRAINING` below)        |
| kernels of the trainer                    | fused: an in-house trainer with 3D parallelism                    |
| GPUs of each side, 32B and 72B            | from Figure 10; for 7B half of the GPUs each                      |
| key-value heads of 7B                     | 4, as released (its Table 2 prints 8)                             |
| prompts and samples per prompt            | 1,024 prompts, one sample each; 400 tokens a prompt               |
| rollouts that a replica decodes at once   | as many of maximum length as its KV memory holds (`RESERVING`):   |
|                                           | the paper's Equation 2 has a batch that is "bounded by KV memory" |
| meaning of "no barrier"                   | each replica begins its share of a batch when its last is done    |

The paper states that actor, critic and reference take turns on the trainer's GPUs (`offload`).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from functools import lru_cache
from statistics import median
from typing import Any, Literal, NamedTuple

from streamrl.engine.messages import Generated, PromptsDrawn, WeightsLoaded
from streamrl.engine.trace import Trace
from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import find_profile, read_profile
from streamrl.record.band import model_error_of
from streamrl.record.metrics import measure_speed, steady_basis
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.sim.parallel import worker_pool
from streamrl.sim.world import simulate


class Split(ProfileTable, frozen=True, kw_only=True):
    """GPUs of each side, and the stage seconds of each side over those of generation on half of all GPUs."""

    generate: tuple[int, float]
    train: tuple[int, float]


class Splits(ProfileTable, frozen=True, kw_only=True):
    """Figure 10: the division of GPUs between generation and training."""

    even: Split
    chosen: Split


class Adjustment(ProfileTable, frozen=True, kw_only=True):
    """Figure 11: one entry for each step of the adjustment."""

    delta: list[float]
    gpus: list[int]


class Scaling(ProfileTable, frozen=True, kw_only=True):
    """Figure 2: stage seconds over the number of GPUs and the output length."""

    gpus: list[int]
    generate: list[float]
    train: list[float]
    tokens: list[int]
    generate_by_length: list[float]
    train_by_length: list[float]


class Decode(ProfileTable, frozen=True, kw_only=True):
    """Figure 6, right: the decode curve."""

    batch: list[int]
    milliseconds: list[float]


class Paper(ProfileTable, frozen=True, kw_only=True):
    """All figures of the paper that a simulation is compared with."""

    name: str
    source: str
    date: datetime.date
    throughput: dict[str, tuple[float, float, float, float]]
    ablation: dict[str, tuple[float, float, float, float]]
    dispatch: dict[str, tuple[float, float]]
    allocation: dict[str, Splits]
    adjustment: Adjustment
    heterogeneous: dict[str, tuple[float, float]]
    scaling: Scaling
    decode: Decode


@lru_cache(maxsize=1)
def load_paper() -> Paper:
    """Read profiles/papers/streamrl.toml."""
    return read_profile(find_profile("papers", "streamrl", ".toml"), Paper)


Size = Literal["7B", "32B", "72B"]
MODELS: dict[str, str] = {"7B": "qwen2.5-7b", "32B": "qwen2.5-32b", "72B": "qwen2.5-72b"}
GPUS: dict[str, int] = {"7B": 32, "32B": 64, "72B": 128}
SPLIT: dict[str, tuple[int, int]] = {"7B": (16, 16), "32B": (40, 24), "72B": (80, 48)}
"""By model: GPUs that generate, and GPUs that train."""
GENERATION_TP: dict[str, int] = {"7B": 1, "32B": 2, "72B": 4}
LENGTHS: dict[str, int] = {"5K": 5000, "10K": 10_000, "20K": 20_000}
BATCH = 1024
ENGINE = "streamrl"
"""The paper's inference engine; its constants come from the paper's decode curve."""
STEPS, WARM_UP = 5, 2
SEEDS = (0, 1)
RECALL = 0.87
"""recall@20% of the paper's 7B ranker (Table 4)."""


class CaseDegrees(NamedTuple):
    """Parallelism degrees of the trainer."""

    data: int
    tensor: int
    pipeline: int


TRAINING: dict[tuple[str, int], CaseDegrees] = {
    ("7B", 8): CaseDegrees(8, 1, 1),
    ("7B", 16): CaseDegrees(8, 1, 2),
    ("7B", 24): CaseDegrees(12, 1, 2),
    ("7B", 32): CaseDegrees(16, 1, 2),
    ("32B", 24): CaseDegrees(6, 2, 2),
    ("32B", 32): CaseDegrees(8, 2, 2),
    ("32B", 64): CaseDegrees(16, 2, 2),
    ("72B", 48): CaseDegrees(6, 4, 2),
    ("72B", 64): CaseDegrees(8, 4, 2),
    ("72B", 128): CaseDegrees(16, 4, 2),
}
"""The fastest degrees that fit for 20K outputs, from `streamrl.sim.planner.allocation`. They are
not fitted to any figure.
"""

SKEWNESS_AWARE = {
    "dispatch": "skewness-aware",
    "skew_objective": "max",
    "order": "longest-first",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "colocated": {"system": "colocated", "dispatch": "random", "order": "fifo"},
    "colocated, skewness-aware": {"system": "colocated", **SKEWNESS_AWARE},
    "sync": {"system": "stream-sync", **SKEWNESS_AWARE},
    "async": {"system": "stream-async", "weight_sync": "between-batches", **SKEWNESS_AWARE},
}


class Case(NamedTuple):
    """One run of the paper."""

    size: str
    length: str
    system: str
    across: bool = False
    """Whether 32 H20 generate and 16 H800 train in another datacenter (Figure 12)."""


class Times(NamedTuple):
    """Times of a step of a case in seconds: medians over steps and seeds."""

    step_time: float
    generation_time: float
    """Time from the prompts to the last rollout, or to the next prompts if these come earlier. On
    shared GPUs it starts with the weight load.
    """
    error: tuple[float, float] = (1.0, 1.0)
    """Lowest and highest ratio of true to simulated seconds, by the band of the first seed."""

    @property
    def throughput(self) -> float:
        """Return the throughput in samples per second."""
        return BATCH / self.step_time


RESERVING: dict[str, Any] = {"admission": "reserve"}
"""Memory is the only limit on a batch: no replica gets as many rollouts as `max_running`."""

ACROSS: dict[str, Any] = {
    "cluster.pools.h20": {
        "gpu": "h20",
        "nodes": 4,
        "transport": "tcp",
        "node_bandwidth": "100 Gbps",
    },
    "cluster.pools.h800.nodes": 2,
    "cluster.links": [{"between": ["h20", "h800"], "bandwidth": "80 Gbps", "latency": "10 ms"}],
    "rollout.pool": "h20",
    "rollout.replicas": 32,
}


def make_case(case: Case, seed: int = 0, changes: dict[str, Any] | None = None) -> Run:
    """Return the run file of a case; dotted keys in `changes` replace values."""
    is_colocated = case.system.startswith("colocated")
    total = GPUS[case.size]
    generate, train = (total, total) if is_colocated else SPLIT[case.size]
    degrees = TRAINING[case.size, train]
    table: dict[str, Any] = {
        "seed": seed,
        "model": {"name": MODELS[case.size]},
        "cluster": {"pools": {"h800": {"gpu": "h800", "nodes": total // 8}}},
        "rollout": {
            "pool": "h800",
            "replicas": generate // GENERATION_TP[case.size],
            "tensor_parallel": GENERATION_TP[case.size],
            **RESERVING,
            "max_tokens": LENGTHS[case.length],
        },
        "trainer": {
            "pool": "h800",
            "data_parallel": degrees.data,
            "tensor_parallel": degrees.tensor,
            "pipeline_parallel": degrees.pipeline,
            "offload": True,
            "kernels": "fused",
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
        "costs": {"engine": ENGINE},
        "policies": dict(SYSTEMS[case.system]),
    }
    for key, value in {**(ACROSS if case.across else {}), **(changes or {})}.items():
        place, last = place_of(table, key)
        place[last] = value
    return make_run(table)


def take_times(case: Case, changes: dict[str, Any] | None = None) -> Times:
    """Simulate a case with every seed; dotted keys in `changes` replace values."""
    traces = [simulate(make_case(case, seed, changes)) for seed in SEEDS]
    found, error = [_measure(trace) for trace in traces], model_error_of(steady_basis(traces[0]))
    return Times(
        median(t.step_time for t in found),
        median(t.generation_time for t in found),
        (error.low, error.high),
    )


def on_wider_replicas(case: Case) -> dict[str, Any]:
    """Return changes that double the GPUs of each replica and halve the number of replicas."""
    rollout = make_case(case).rollout
    return {
        "rollout.tensor_parallel": 2 * rollout.tensor_parallel,
        "rollout.replicas": rollout.replicas // 2,
    }


def take_all_times(cases: Iterable[Case]) -> dict[Case, Times]:
    """Simulate many cases on all cores; each case is simulated only once."""
    wanted = list(dict.fromkeys(cases))
    missing = [case for case in wanted if case not in _TAKEN]
    with worker_pool() as pool:
        _TAKEN.update(zip(missing, pool.map(take_times, missing), strict=True))
    return {case: _TAKEN[case] for case in wanted}


_TAKEN: dict[Case, Times] = {}


def _measure(trace: Trace) -> Times:
    drawn_at, ended_at = [], []
    for time, event, _ in trace.entries:
        if isinstance(event, PromptsDrawn):
            drawn_at.append(time)
            ended_at.append(time)
        elif isinstance(event, Generated):
            ended_at[-1] = time
        elif isinstance(event, WeightsLoaded) and trace.run.policies.shares_gpus:
            drawn_at[-1] = ended_at[-1] = time
    took = [end - begin for begin, end in zip(drawn_at, ended_at, strict=True)]
    step_times = measure_speed(trace).step_times
    return Times(median(step_times[WARM_UP:]), median(took[WARM_UP:]))

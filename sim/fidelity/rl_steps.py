"""Published RL steps, stage by stage, compared with their simulation.

Two sources are left out. NeMo-Aligner's five steps (arXiv 2405.01481) have no published response
lengths. RLHFuse's twelve steps (arXiv 2409.13221) have critics and reward models of another size than
the actor.

Inputs that a source does not state are ranges: a row is predicted with every combination of
`Published.opens`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from streamrl.engine.messages import (
    Generated,
    PromptsDrawn,
    PushWeights,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
    Trained,
    WeightsLoaded,
)
from streamrl.engine.trace import Trace
from streamrl.hardware.memory import check_memory
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.sim.batch_generation import DrawnBatch, generate_batch
from streamrl.sim.costs.corrections import own_switch_time
from streamrl.sim.costs.costs import Costs
from streamrl.sim.fidelity.published_rows import Row
from streamrl.sim.parallel import worker_pool
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload


class PhaseSeconds(NamedTuple):
    """Mean seconds of a run's steps without the first one, which has no earlier generation or load."""

    generation: float
    """Time from the prompts, once all replicas have the weights, to the last rollout."""
    score: float
    train: float
    """Forward and backward passes, and the optimizer step."""
    refit: float
    """Time from the pushed weights until the last replica has loaded them."""
    step: float
    """Time from version to version."""


def phase_seconds(trace: Trace) -> PhaseSeconds:
    """Return the stage times of a run whose generation and training do not overlap."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    scored: defaultdict[int, float] = defaultdict(float)
    trained: defaultdict[int, float] = defaultdict(float)
    stepped: dict[int, float] = {}
    pushed: dict[int, float] = {}
    refit: dict[int, float] = {}
    work_at = 0.0
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                began[len(began) + 1] = time
            case Generated():
                ended[len(began)] = time
            case Scored():
                scored[len(stepped) + 1] += time - work_at
            case Trained():
                trained[len(stepped) + 1] += time - work_at
            case Stepped(version):
                trained[version] += time - work_at
                stepped[version] = time
            case WeightsLoaded(_, version) if version in pushed:
                refit[version] = time - pushed[version]
                began[len(began)] = time
            case _:
                pass
        for command in commands:
            match command:
                case Score() | Train() | Step():
                    work_at = time
                case PushWeights(version):
                    pushed[version] = time
                case _:
                    pass
    steps = [step for step in stepped if step > 1]
    return PhaseSeconds(
        generation=fmean(ended[n] - began[n] for n in steps),
        score=fmean(scored[n] for n in steps),
        train=fmean(trained[n] for n in steps),
        refit=fmean(refit.values()),
        step=fmean(stepped[n] - stepped[n - 1] for n in steps),
    )


STEPS = 3
SAMPLE_CAP, SAMPLED_PROMPTS = 10**6, 512
"""Tokens that no output reaches, and the number of prompts for a mean length."""
LENGTHS = "r1-distill-aime"
"""Assumed shape of output lengths, scaled to the published mean. Another shape changes the time of
generation, and changes other stages only slightly.
"""


class Published(NamedTuple):
    """One published step."""

    name: str
    source: str
    note: str
    mean_tokens: float
    table: dict[str, Any]
    opens: dict[str, tuple[Any, ...]]
    """Possible values of the dotted keys that the source does not state."""
    stages: dict[str, float]
    """Published seconds by stage, with the names of `PhaseSeconds`."""


def _colocated(model: str, gpus: int, degrees: tuple[int, int, int], **keys: Any) -> dict[str, Any]:
    """Return the run file of a colocated GRPO step on H100, with dotted keys added."""
    generate, tensor, pipeline = degrees
    return {
        "model": {"name": model},
        "cluster": {"pools": {"h100": {"gpu": "h100", "nodes": gpus // 8}}},
        "rollout": {
            "pool": "h100",
            "replicas": gpus // generate,
            "tensor_parallel": generate,
            "max_tokens": keys["max_tokens"],
        },
        "trainer": {
            "pool": "h100",
            "data_parallel": gpus // tensor // pipeline,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "micro_batch": 64,
            "logits": "fused",
            "offload": keys["kl_coefficient"] > 0,
            "max_tokens_per_pass": keys["pass_tokens"],
        },
        "algorithm": {
            "name": "grpo",
            "steps": STEPS,
            "group_size": keys["group_size"],
            "prompts_per_step": keys["rollouts"] // keys["group_size"],
            "old_log_probs": "trainer",
            "kl_coefficient": keys["kl_coefficient"],
            "correction": "none",
        },
        "workload": {
            "max_prompt_tokens": 1024,
            "lengths": {"kind": "histogram", "source": LENGTHS, "prompt_tokens": 150},
        },
        "policies": {"system": "colocated"},
    }


SMALL = _colocated(
    "r1-distill-qwen-1.5b",
    8,
    (2, 2, 1),
    max_tokens=27648,
    pass_tokens=28672,
    group_size=8,
    rollouts=512,
    kl_coefficient=0.0,
)
EIGHT = _colocated(
    "llama-3.1-8b",
    8,
    (1, 1, 2),
    max_tokens=4096,
    pass_tokens=16384,
    group_size=16,
    rollouts=2048,
    kl_coefficient=0.01,
)
SEVENTY = _colocated(
    "llama-3.1-70b",
    64,
    (4, 4, 4),
    max_tokens=4096,
    pass_tokens=16384,
    group_size=16,
    rollouts=2048,
    kl_coefficient=0.01,
)
NEMO = (
    "1024 or 2048 rollouts, a cap of 4096, one or four optimizer steps, packing, recomputation and CUDA graphs (with, as "
    "vLLM 0.11, or without, as transformers 4.51) are not stated"
)
NEMO_OPENS: dict[str, tuple[Any, ...]] = {
    "algorithm.prompts_per_step": (64, 128),
    "framework.optimizer_steps": (1, 4),
    "costs.engine": ("vllm-0.11", "transformers-4.51"),
    "trainer.packing": ("packed", "padded"),
    "trainer.recompute": ("none", "full"),
}

PUBLISHED = (
    Published(
        "RLinf: R1-Distill-Qwen-1.5B on 8 H100",
        "RLinf docs compare_with_verl.rst a3816b5",
        "recomputation, and how long prompts are, are not stated",
        13975,
        SMALL,
        {"trainer.recompute": ("none", "full"), "workload.lengths.prompt_tokens": (100, 400)},
        {"generation": 266.08, "score": 17.78, "train": 61.12, "step": 346.33},
    ),
    Published(
        "verl 0.5.0: R1-Distill-Qwen-1.5B on 8 H100",
        "RLinf docs compare_with_verl.rst a3816b5",
        "recomputation, and how long prompts are, are not stated",
        14254.84,
        SMALL,
        {"trainer.recompute": ("none", "full"), "workload.lengths.prompt_tokens": (100, 400)},
        {"generation": 260.92, "score": 17.51, "train": 66.53, "step": 363.55},
    ),
    Published(
        "NeMo-RL 0.3: Llama-3.1-8B on 8 H100",
        "NVIDIA-NeMo/RL issue 959",
        NEMO,
        795,
        EIGHT,
        NEMO_OPENS,
        {"generation": 58, "score": 18, "train": 28, "refit": 5, "step": 112},
    ),
    Published(
        "NeMo-RL 0.3: Llama-3.1-8B on 8 H100, second run",
        "NVIDIA-NeMo/RL issue 959",
        NEMO,
        811,
        EIGHT,
        NEMO_OPENS,
        {"generation": 56, "score": 18, "train": 27, "refit": 8, "step": 116},
    ),
    Published(
        "NeMo-RL 0.3: Llama-3.1-70B on 64 H100",
        "NVIDIA-NeMo/RL issue 959",
        f"{NEMO}; degrees are not stated",
        398,
        SEVENTY,
        {**NEMO_OPENS, "trainer.pipeline_parallel": (2, 4)},
        {"generation": 84, "score": 18, "train": 28, "refit": 14, "step": 147},
    ),
)

FITTED = ("refit", "step")
"""Stages with constants that rest on these very sources: the seconds of a switch and those beside the
stages (profiles/frameworks/usual.toml).
"""

GENERATED = {
    ("llama-2-7b", 8): 86,
    ("llama-2-7b", 4): 44.5,
    ("llama-2-7b", 2): 34,
    ("llama-2-7b", 1): 32,
    ("llama-2-13b", 8): 224,
    ("llama-2-13b", 4): 141,
    ("llama-2-13b", 2): 159,
    ("llama-2-13b", 1): 230,
}
"""Seconds of 1,024 rollouts of 1,024 + 1,024 tokens on 16 A100, by model and tensor parallelism.
Source: HybridFlow, arXiv 2409.19256, Figure 15, read within 3 %, including the switch, with vLLM of
2024.
"""

SWITCHED = {
    "llama-2-7b": (2.7, 3.8),
    "llama-2-13b": (3.0, 3.2),
    "llama-3.1-70b": (9.7, 9.7),
}
"""Seconds from training to generation (HybridFlow, Figure 14)."""


def steps_rows() -> list[Row]:
    """Return every published stage with its prediction, computed on all cores."""
    wanted = [(step, choice) for step in PUBLISHED for choice in _choices(step)]
    with worker_pool() as pool:
        found = list(pool.map(_simulated, *zip(*wanted, strict=True)))
        generated = list(pool.map(_generated, *zip(*GENERATED, strict=True)))
    rows = []
    for step in PUBLISHED:
        times = [t for (one, _), t in zip(wanted, found, strict=True) if one is step and t]
        rows += list(_stage_rows(step, times))
    rows += [
        Row(
            name=f"HybridFlow: {model} on 16 A100 at TP{degree}, 1,024 rollouts of 1,024 + 1,024",
            group="generation by tensor parallelism, vLLM of 2024",
            shape=model,
            unit="s generation",
            published=(seconds * 0.97, seconds * 1.03),
            predicted=(ours, ours),
            source="HybridFlow arXiv 2409.19256 Figure 15",
        )
        for ((model, degree), seconds), ours in zip(GENERATED.items(), generated, strict=True)
    ]
    return rows + list(_switch_rows())


def _choices(step: Published) -> Iterator[dict[str, Any]]:
    """Yield every combination of unstated inputs, with lengths scaled to the published mean."""
    scaled = _scaled(step)
    for values in product(*step.opens.values()):
        yield {**dict(zip(step.opens, values, strict=True)), **scaled}


def _simulated(step: Published, choice: dict[str, Any]) -> PhaseSeconds | None:
    """Simulate one combination of inputs; None if it does not fit the GPUs that the source used."""
    run = _run(step.table, choice)
    try:
        check_memory(resolve(run))
    except RunError:
        return None
    return phase_seconds(simulate(run))


def _run(table: dict[str, Any], changes: dict[str, Any]) -> Run:
    made = deepcopy(table)
    gpus = made["trainer"]["data_parallel"] * made["trainer"]["pipeline_parallel"]
    for key, value in changes.items():
        place, last = place_of(made, key)
        place[last] = value
    made["trainer"]["data_parallel"] = gpus // made["trainer"]["pipeline_parallel"]
    return make_run(made)


def _scaled(step: Published) -> dict[str, Any]:
    """Return the scale at which lengths, cut off at the cap, have the published mean."""
    cap = step.table["rollout"]["max_tokens"]
    run = _run(step.table, {"rollout.max_tokens": SAMPLE_CAP, "algorithm.prompts_per_step": 8})
    draws = SimulatedWorkload(run).draw(0, SAMPLED_PROMPTS)
    lengths = np.array([length for draw in draws for length in draw.lengths], dtype=float)
    low, high = 0.01, 100.0
    for _ in range(50):
        scale = (low * high) ** 0.5
        is_short = np.minimum(lengths * scale, cap).mean() < step.mean_tokens
        low, high = (scale, high) if is_short else (low, scale)
    return {"workload.lengths.scale": round(scale, 4)}


def _generated(model: str, degree: int) -> float:
    """Return the seconds that 16 A100 take to generate the batch; every output is cut off at 1,024 tokens."""
    run = make_run(
        {
            "model": {"name": model, "dtype": "bfloat16"},
            "cluster": {"pools": {"a100": {"gpu": "a100", "nodes": 2}}},
            "rollout": {
                "pool": "a100",
                "replicas": 16 // degree,
                "tensor_parallel": degree,
                "max_tokens": 1024,
            },
            "trainer": {"pool": "a100", "data_parallel": 2, "tensor_parallel": 8},
            "costs": {"engine": "vllm-0.6"},
            "algorithm": {"name": "ppo", "steps": 1, "prompts_per_step": 1024},
            "workload": {
                "lengths": {
                    "kind": "histogram",
                    "source": LENGTHS,
                    "scale": 2000.0,
                    "prompt_tokens": 1024,
                }
            },
            "policies": {"system": "colocated"},
        }
    )
    batch = DrawnBatch(SimulatedWorkload(run).draw(0, 1024))
    return generate_batch(run, Costs.load(run), batch)[-1].time


def _stage_rows(step: Published, times: list[PhaseSeconds]) -> Iterator[Row]:
    for stage, seconds in step.stages.items():
        ours = [getattr(one, stage) for one in times]
        yield Row(
            name=f"{step.name}: {stage}",
            group=f"stages of RL steps: {stage}",
            shape=step.table["model"]["name"],
            unit="s",
            published=(seconds, seconds),
            predicted=(min(ours), max(ours)),
            is_fitted=stage in FITTED,
            note=step.note,
            source=step.source,
        )


def _switch_rows() -> Iterator[Row]:
    """Yield the framework's part of a switch. The transfer of bytes is not included."""
    for model, (least, most) in SWITCHED.items():
        run = _run({**EIGHT, "model": {"name": model}}, {})
        trainer = resolve(run).trainer
        gpu, size = trainer.pool.gpu, trainer.model.num_parameters
        seconds = own_switch_time(run.framework, gpu, size).seconds
        yield Row(
            name=f"HybridFlow: {model}, from training to generation",
            group="switch of colocated systems",
            shape=model,
            unit="s",
            published=(least, most),
            predicted=(seconds, seconds),
            is_fitted=True,
            note="on A100; the default lies between this and NeMo-RL's 5 to 14 s",
            source="HybridFlow arXiv 2409.19256 Figure 14",
        )

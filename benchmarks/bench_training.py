"""Compare predicted seconds and memory of training with published steps; `streamrl validate training` prints the rows.

    python benchmarks/bench_training.py

Each step is predicted with constants that were fitted without its model. All published steps ran, so
the memory model should predict that they fit.
"""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np

from streamrl.hardware.memory import check_memory
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.fidelity.published_rows import Row, summarise
from streamrl.sim.fidelity.training_steps import (
    PublishedStep,
    read_steps,
    step_memory,
    training_rows,
)

PLANS = (
    ("qwen2.5-7b", (4, 4, 1), False),
    ("qwen2.5-7b", (8, 2, 1), False),
    ("qwen2.5-32b", (1, 8, 3), False),
    ("qwen2.5-32b", (1, 4, 6), False),
    ("qwen2.5-72b", (1, 8, 6), False),
    ("qwen2.5-72b", (2, 4, 6), True),
)
"""Models, their data, tensor and pipeline degrees, and whether they are offloaded. StreamRL trains 32B
on 24 and 72B on 48 H800.
"""
PAPER_TOKENS = 5330
"""Mean tokens of a prompt and its output in StreamRL's 20K workload: 400 + 4930."""


def main() -> None:
    """Print a table, then one JSON object per figure."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in training_rows():
        groups[row.group].append(row)
    figures = []
    for name, rows in sorted(groups.items()):
        found = summarise(rows)
        print(
            f"{name:58s} {found.rows:3d} rows: median {found.median:.1%}, bias {found.bias:+.1%}, "
            f"90 % below {found.p90:.1%}"
        )
        figures.append((f"median error of {name}", found.median, ""))
    shares = [memory_share(step) for step in read_steps()]
    print(
        f"\nmemory of the {len(shares)} steps, which all ran: median {np.median(shares):.0%}, "
        f"most {max(shares):.0%} of the GPU's"
    )
    fitting = float(np.mean(np.array(shares) <= 1))
    figures.append(("share of published steps that the memory model lets run", fitting, ""))
    figures += predictions()
    print()
    for name, value, unit in figures:
        print(json.dumps({"name": f"training: {name}", "value": round(value, 4), "unit": unit}))


def memory_share(step: PublishedStep) -> float:
    """Return the predicted memory of a step as a share of the GPU's memory."""
    need, memory = step_memory(step)
    return need / memory


def predictions() -> list[tuple[str, float, str]]:
    """Return the predicted MFU of Qwen2.5 models in PPO, with the shipped constants."""
    figures = []
    for gpu in ("h800", "h20"):
        tier = load_training_profile().gemm[gpu].tier
        for model, (data, tensor, pipeline), offload in PLANS:
            run = make_run(ppo_table(model, gpu, (data, tensor, pipeline), offload))
            name = f"MFU of {model} in PPO, {gpu}, DP{data} TP{tensor} PP{pipeline} ({tier})"
            figures.append((name, ppo_mfu(run), ""))
    return figures


def ppo_mfu(run: Run) -> float:
    """Return the MFU of a PPO step. It counts 16 FLOPs per parameter and token, of linear layers only.

    Forward and backward passes of actor and critic take 6 each. Forward passes of the reference and of
    the old log-probabilities take 2 each.
    """
    check_memory(resolve(run))
    costs, model = TrainingCosts.load(resolve(run)), load_model(run.model)
    lengths = [PAPER_TOKENS] * run.algorithm.rollouts_per_step
    seconds = costs.train_time(lengths) + costs.score_time(lengths) + costs.optimizer_time
    peak = load_gpu(run.cluster.pools["gpus"].gpu).flops["bfloat16"] * run.trainer.num_gpus
    return 16 * model.num_parameters * sum(lengths) / seconds / peak


def ppo_table(
    model: str, gpu: str, degrees: tuple[int, int, int], offload: bool
) -> dict[str, object]:
    """Return the run file of PPO as StreamRL trains it."""
    data, tensor, pipeline = degrees
    return {
        "model": {"name": model},
        "cluster": {"pools": {"gpus": {"gpu": gpu, "nodes": data * tensor * pipeline // 8 + 1}}},
        "rollout": {"pool": "gpus", "replicas": 1, "tensor_parallel": 4, "max_tokens": 20000},
        "trainer": {
            "pool": "gpus",
            "data_parallel": data,
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "offload": offload,
            "logits": "fused",
        },
        "algorithm": {
            "name": "ppo",
            "kl_coefficient": 0.001,
            "steps": 1,
            "prompts_per_step": 1024,
        },
    }


if __name__ == "__main__":
    main()

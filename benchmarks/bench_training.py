"""How well seconds of training are predicted: relative error of MFU against published measurements.

    python benchmarks/bench_training.py

Constants are fitted on half of the model sizes and tested on the other half, then the other way round;
on one generation of GPUs and tested on the other; and the memory model is asked whether what ran fits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from fit_training import (
    Floats,
    Row,
    fit,
    halves,
    memory_share,
    read_rows,
    relative_errors,
)
from sim.costs.training_profile import load_training_profile

from sim.costs.training import TrainingCosts
from streamrl.hardware.memory import check_memory
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.config import Run
from streamrl.runfile.reading import make_run

GPUS = ("h100", "a100", "a100-40")
PLANS = (
    ("qwen2.5-7b", (4, 4, 1), False),
    ("qwen2.5-7b", (8, 2, 1), False),
    ("qwen2.5-32b", (1, 8, 3), False),
    ("qwen2.5-32b", (1, 4, 6), False),
    ("qwen2.5-72b", (1, 8, 6), False),
    ("qwen2.5-72b", (2, 4, 6), True),
)
"""Models, their data, tensor and pipeline degrees, and whether they are offloaded to fit; StreamRL trains 32B
on 24 and 72B on 48 H800."""
PAPER_TOKENS = 5330
"""Mean prompt and output of StreamRL's 20K workload: 400 + 4930 tokens."""


def main() -> None:
    """Print a table, then one JSON object per figure."""
    rows = read_rows()
    first, second = halves(rows)
    ampere = [row for row in rows if row.gpu != "h100"]
    hopper = [row for row in rows if row.gpu == "h100"]
    splits = {
        "125M 760M 3B 13B 70B, tested on 350M 1B 7B 30B": (first, second),
        "350M 1B 7B 30B, tested on 125M 760M 3B 13B 70B": (second, first),
        "A100, tested on H100": (ampere, hopper),
        "H100, tested on A100": (hopper, ampere),
    }
    figures = [figure for name, split in splits.items() for figure in held_out(name, *split)]
    shares = [memory_share(row) for row in rows]
    print(f"\nmemory of the {len(rows)} rows, which all ran: {describe(shares)} of the GPU's")
    figures.append(("share of measured rows that the memory model lets run", mean_fits(shares), ""))
    figures += predictions()
    print()
    for name, value, unit in figures:
        print(json.dumps({"name": f"training: {name}", "value": round(value, 4), "unit": unit}))


def held_out(name: str, train: Sequence[Row], test: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Fit on some rows, print errors on others, and return their median."""
    constants = fit(train)
    errors = relative_errors(test, constants)
    print(f"\nfitted on {name}\n  {constants}")
    print(f"  all      {summary(errors)}")
    for gpu in GPUS:
        if any(row.gpu == gpu for row in test):
            print(f"  {gpu:8s} {summary(errors[[row.gpu == gpu for row in test]])}")
    worst = sorted(zip(errors, test, strict=True), key=lambda pair: -abs(pair[0]))[:3]
    for error, row in worst:
        where = f"{row.model} on {row.gpus} {row.gpu}, {row.micro_batch} x {row.sequence} tokens"
        print(f"  worst    {error:+.1%} {where}, measured MFU {row.mfu:.1%}")
    return [(f"median error of MFU, fitted on {name}", float(np.median(np.abs(errors))), "")]


def summary(errors: Floats) -> str:
    """Say how large relative errors are."""
    size = np.abs(errors)
    return (
        f"{len(errors):3d} rows: median {np.median(size):.1%}, bias {np.median(errors):+.1%}, "
        f"90 % below {np.quantile(size, 0.9):.1%}, worst {size.max():.1%}"
    )


def describe(shares: Sequence[float]) -> str:
    """Say how full GPUs are."""
    return f"median {np.median(shares):.0%}, most {max(shares):.0%}"


def mean_fits(shares: Sequence[float]) -> float:
    """Return the share of rows that fit."""
    return float(np.mean(np.array(shares) <= 1))


def predictions() -> list[tuple[str, float, str]]:
    """Return the MFU that the shipped constants predict for Qwen2.5 models in PPO."""
    figures = []
    for gpu in ("h800", "h20"):
        tier = load_training_profile().gemm[gpu].tier
        for model, (data, tensor, pipeline), offload in PLANS:
            run = make_run(ppo_table(model, gpu, (data, tensor, pipeline), offload))
            name = f"MFU of {model} in PPO, {gpu}, DP{data} TP{tensor} PP{pipeline} ({tier})"
            figures.append((name, ppo_mfu(run), ""))
    return figures


def ppo_mfu(run: Run) -> float:
    """Return achieved over peak FLOP/s of a PPO step, linear FLOPs only: 16 a parameter and token.

    Actor and critic forward and backward take 6 each, a reference and a log-probability forward 2 each.
    """
    check_memory(run)
    costs, model = TrainingCosts.load(run), load_model(run.model)
    lengths = [PAPER_TOKENS] * run.algorithm.rollouts_per_step
    seconds = costs.train_time(lengths) + costs.score_time(lengths) + costs.optimizer_time
    peak = load_gpu(run.cluster.pools["gpus"].gpu).flops["bfloat16"] * run.trainer.num_gpus
    return 16 * model.num_parameters * sum(lengths) / seconds / peak


def ppo_table(
    model: str, gpu: str, degrees: tuple[int, int, int], offload: bool
) -> dict[str, object]:
    """Return a run file of PPO as StreamRL trains it."""
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

"""Measure the gain of skewness-aware dispatch: StreamRL (arXiv 2504.15930), Figure 9, and other batches.

The result is the time to generate one batch of 1,024 rollouts on H800, relative to random dispatch in
FIFO order, as a median over seeds. Lengths follow the 20K histogram. The gain depends on the number
of rollouts that a replica runs at once. If it runs all of its rollouts at once, their order has no
effect. Here memory is reserved for the longest output of each rollout, as in all figures of
`sim/fidelity`. `--sweep` admits other numbers of rollouts on demand. The output ends with one JSON
object per figure.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from streamrl.engine.messages import Generated, PromptsDrawn
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.sim.fidelity.paper import BATCH, RESERVING
from streamrl.sim.world import simulate

SWEPT = (8, 10, 12, 14, 15, 16, 20, 24, 32, 64, 256)
TOLERANCE = 0.05


class Setting(NamedTuple):
    """GPUs that generate, and the paper's ratios with its ranker and with true lengths."""

    model: str
    num_gpus: int
    tensor_parallel: int
    ranked: float
    oracle: float


FIGURE_9 = {
    "7B": Setting("qwen2.5-7b", 16, 1, 0.90, 0.82),
    "32B": Setting("qwen2.5-32b", 40, 2, 0.82, 0.67),
    "72B": Setting("qwen2.5-72b", 80, 4, 0.79, 0.69),
}
OTHER_GPUS = {"7B": (8, 24), "32B": (32, 48), "72B": (64, 96)}

RANDOM = {"dispatch": "random", "order": "fifo"}
SKEWED = {"dispatch": "skewness-aware", "skew_objective": "max", "order": "longest-first"}
DRAIN = {**SKEWED, "skew_objective": "drain"}
VARIANTS = {
    "longest-first": {"dispatch": "random", "order": "longest-first"},
    "max": SKEWED,
    "sum": {**SKEWED, "skew_objective": "sum"},
    "drain": DRAIN,
    "drain + moves": {**DRAIN, "migration": "consolidate"},
}


def main() -> None:
    """Print tables, then the figures."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=31)
    arguments.add_argument("--sweep", action="store_true", help="other batches and GPU counts too")
    chosen = arguments.parse_args()
    if chosen.sweep:
        sweep(range(chosen.seeds))
    figures = compare(range(chosen.seeds))
    for name, value in figures.items():
        print(json.dumps({"name": name, "value": round(value, 4), "unit": "ratio"}))


def compare(seeds: range) -> dict[str, float]:
    """Print the ratio of every dispatch next to the paper's; return the ratios and the share within the tolerance."""
    print(
        "\ngeneration as a share of random-FIFO's, memory reserved for the longest output of each"
    )
    print("model  lengths  paper " + "".join(f"{variant:>15}" for variant in VARIANTS))
    figures: dict[str, float] = {}
    errors = []
    for name, setting in FIGURE_9.items():
        base = makespan(setting, RANDOM, "none", seeds, RESERVING)
        for ranker, paper in (("recall", setting.ranked), ("oracle", setting.oracle)):
            found = {
                variant: makespan(setting, policies, ranker, seeds, RESERVING) / base
                for variant, policies in VARIANTS.items()
            }
            cells = "".join(f"{ratio:15.3f}" for ratio in found.values())
            print(f"{name:<5}  {ranker:<7}  {paper:5.2f} {cells}")
            figures |= {f"{name} {ranker} {variant}": ratio for variant, ratio in found.items()}
            errors.append(abs(found["max"] - paper))
    figures["mean error"] = sum(errors) / len(errors)
    figures["largest error"] = max(errors)
    figures[f"within {TOLERANCE}"] = sum(e <= TOLERANCE for e in errors) / len(errors)
    return figures


def sweep(seeds: range) -> None:
    """Print Figure 9 for other batches and numbers of GPUs."""
    print("model  GPUs  most running  random s  ranker  oracle   paper")
    for name, setting in FIGURE_9.items():
        for num_gpus in (setting.num_gpus, *OTHER_GPUS[name]):
            for max_running in SWEPT:
                other = setting._replace(num_gpus=num_gpus)
                on_demand = {"admission": "on-demand", "max_running": max_running}
                took = partial(makespan, other, seeds=seeds, admission=on_demand)
                base = took(RANDOM, "none")
                ranked, oracle = (took(SKEWED, r) / base for r in ("recall", "oracle"))
                print(
                    f"{name:<5}  {num_gpus:4}  {max_running:12}  {base:8.0f}  {ranked:6.3f}  "
                    f"{oracle:6.3f}   {setting.ranked:.2f} / {setting.oracle:.2f}",
                    flush=True,
                )


def makespan(
    setting: Setting, policies: dict[str, str], ranker: str, seeds: range, admission: dict[str, Any]
) -> float:
    """Return the median seconds from the draw of a batch to its last token."""
    return median(
        _makespan(make_batch(setting, policies, ranker, seed, admission)) for seed in seeds
    )


def make_batch(
    setting: Setting, policies: dict[str, str], ranker: str, seed: int, admission: dict[str, Any]
) -> Run:
    """Return the run of one step; `admission` has keys of the section rollout.

    Its trainer exists only because every run has one.
    """
    table: dict[str, Any] = {
        "seed": seed,
        "model": {"name": setting.model},
        "cluster": {
            "pools": {
                "generation": {"gpu": "h800", "nodes": setting.num_gpus // 8},
                "training": {"gpu": "h800", "nodes": 6},
            },
            "links": [{"between": ["generation", "training"], "bandwidth": "200 GB/s"}],
        },
        "rollout": {
            "pool": "generation",
            "replicas": setting.num_gpus // setting.tensor_parallel,
            "tensor_parallel": setting.tensor_parallel,
            **admission,
            "max_tokens": 20000,
        },
        "trainer": {
            "pool": "training",
            "data_parallel": 2,
            "tensor_parallel": 4,
            "pipeline_parallel": 6,
            "offload": True,
        },
        "algorithm": {"name": "reinforce++", "steps": 1, "prompts_per_step": BATCH},
        "workload": {
            "lengths": {
                "kind": "histogram",
                "source": "streamrl-codemath-20k",
                "ranker": ranker,
            }
        },
        "policies": {"system": "stream-sync", **policies},
    }
    return make_run(table)


def _makespan(run: Run) -> float:
    entries = simulate(run).entries
    drawn = next(entry.time for entry in entries if isinstance(entry.event, PromptsDrawn))
    return max(entry.time for entry in entries if isinstance(entry.event, Generated)) - drawn


if __name__ == "__main__":
    main()

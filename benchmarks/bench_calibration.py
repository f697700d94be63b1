"""Calibrate on one published RL step, and predict similar ones: another batch, cluster, model or run.

Reads `../shared/data/rl_steps` if it exists. Each row becomes a measured CSV of one step. The run
files of similar rows get only the resulting factors and their own stated values. The output ends with
one JSON object per figure.

Values that a source does not state are assumed, the same for all rows of the source. A factor
absorbs the error of an assumption that is the same for all rows. Assumptions:

- NeMo-Aligner (arXiv 2405.01481 Table 2): 512 tokens per rollout. Generation degrees equal tensor
  parallelism. A replica runs 8 rollouts at once, one micro-batch after the other. This follows from
  its runs of 128 and 1,024 rollouts on 192 GPUs, whose times are as 1 to 7.5.
- NeMo-RL (issue 959): 2,048 rollouts, four optimizer steps and full recomputation.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.hardware.calibration_file import write_calibration
from streamrl.hardware.profiles import load_model
from streamrl.logs.imported_workload import scale_to_mean
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps, parse_steps
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.calibration.calibrate import calibrate_steps
from streamrl.sim.calibration.simulated_steps import simulate_steps
from streamrl.sim.fidelity.rl_steps import EIGHT, SEVENTY, SMALL

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "rl_steps" / "stages.csv"
STAGES = ("generation", "score", "train", "sync", "step_time")
SHAPE = "r1-distill-aime"
ALIGNER_TOKENS, ALIGNER_RUNNING = 512, 8
LONG = 2000.0
"""Scale at which every output reaches the cap."""
EIGHT_CHOICE = {
    "algorithm.prompts_per_step": 128,
    "framework.optimizer_steps": 4,
    "trainer.recompute": "full",
}


class PublishedStep(NamedTuple):
    """One row of the file, and the run file that is built from it."""

    name: str
    table: dict[str, Any]
    step: MeasuredStep


def main() -> None:
    """Print every pair of rows, then the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not DATA.is_file():
        print(f"{DATA} does not exist, so there is nothing to calibrate on")
        return
    figures: list[tuple[str, float]] = []
    for name, rows in read_families().items():
        print(
            f"\n{name}\n{'calibrated on':>28} -> {'predicts':28} {'  '.join(f'{s:>10}' for s in STAGES)}"
        )
        steps = [error["step_time"] for error in compare_all(rows)]
        before = [error_before(row) for row in rows]
        figures += [
            (f"calibrated on a neighbour, {name}: median error of a step", median(steps)),
            (f"calibrated on a neighbour, {name}: largest error of a step", max(steps)),
            (f"uncalibrated, {name}: median error of a step", median(before)),
        ]
    for figure, value in figures:
        print(json.dumps({"name": figure, "value": round(value, 4), "unit": "share"}))


def compare_all(rows: list[PublishedStep]) -> Iterator[dict[str, float]]:
    """Yield the errors of every row. It is predicted from the row before or after it, even if that has another model.

    A run file rejects factors of another model. Here the factors are written as if they were of the
    row's own model, to measure their error.
    """
    for number, base in enumerate(rows):
        others = [rows[place] for place in (number - 1, number + 1) if 0 <= place < len(rows)]
        with TemporaryDirectory() as directory:
            path = Path(directory) / "calibration.toml"
            measured = MeasuredSteps(source=base.name, framework="csv", steps=(base.step,))
            made = calibrate_steps(make(base.table), measured).calibration
            for other in others:
                passed_off = replace(made, model=load_model(make(other.table).model).name)
                path.write_text(write_calibration(passed_off), encoding="utf-8")
                yield compare(base, other, path)


def error_before(row: PublishedStep) -> float:
    """Return the error of a row's step without a calibration."""
    plain = simulate_steps(make(row.table), [row.step]).steps[0]
    assert plain.step_time and row.step.step_time, "every row has a step time"
    return abs(plain.step_time / row.step.step_time - 1)


def compare(base: PublishedStep, other: PublishedStep, calibration: Path) -> dict[str, float]:
    """Print the signed errors of a row, and return their absolute values."""
    ours = simulate_steps(
        make(other.table, {"costs.calibration": str(calibration)}), [other.step]
    ).steps[0]
    signed = {
        stage: getattr(ours, stage) / getattr(other.step, stage) - 1
        for stage in STAGES
        if getattr(other.step, stage) is not None and getattr(ours, stage) is not None
    }
    cells = "  ".join(f"{signed[s]:>+10.1%}" if s in signed else f"{'-':>10}" for s in STAGES)
    print(f"{base.name:>28} -> {other.name:28} {cells}", flush=True)
    return {stage: abs(error) for stage, error in signed.items()}


def read_families() -> dict[str, list[PublishedStep]]:
    """Return the rows by family, such that similar rows are adjacent. The name says how they differ."""
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    aligner = [_aligner(row) for row in rows if row["source"].startswith("NeMo-Aligner")]
    nemo = [_nemo(row) for row in rows if "issue 959" in row["source"]]
    small = [_small(row) for row in rows if row["source"].startswith("RLinf")]
    return {
        "NeMo-Aligner, other batch or cluster": aligner,
        "NeMo-RL 8B, another run": nemo[:2],
        "NeMo-RL, another model, cluster and degrees": nemo[1:],
        "1.5B, another framework": small,
    }


def _nemo(row: dict[str, str]) -> PublishedStep:
    table = changed(SEVENTY if row["model"].endswith("70b") else EIGHT, EIGHT_CHOICE)
    name = f"{row['model']} on {row['num_gpus']}, {row['mean_response_tokens']}"
    return PublishedStep(name, _scaled(table, _measured(row)), _measured(row))


def _small(row: dict[str, str]) -> PublishedStep:
    return PublishedStep(row["framework"], _scaled(SMALL, _measured(row)), _measured(row))


def _measured(row: dict[str, str]) -> MeasuredStep:
    """Return a row as a measured step; values that are not published stay unknown."""
    columns = {
        "step_time": "step_s",
        "generation": "generation_s",
        "score": "logprob_s",
        "train": "train_s",
        "sync": "refit_s",
        "output_tokens": "mean_response_tokens",
    }
    return parse_steps(row["source"], [{ours: row[theirs] for ours, theirs in columns.items()}])[0]


def _aligner(row: dict[str, str]) -> PublishedStep:
    """Return the actor's side of a PPO step. The critic's side runs on its own GPUs at the same time."""
    gpus = int(row["num_gpus"]) * 2 // 3
    rollouts = int(row["rollouts_per_step"])
    table = {
        "model": {"name": "llama-3.1-70b"},
        "cluster": {"pools": {"h100": {"gpu": "h100", "nodes": gpus // 8}}},
        "rollout": {
            "pool": "h100",
            "replicas": gpus // 8,
            "tensor_parallel": 8,
            "max_running": ALIGNER_RUNNING,
            "max_tokens": ALIGNER_TOKENS,
        },
        "trainer": {
            "pool": "h100",
            "data_parallel": gpus // 64,
            "tensor_parallel": 8,
            "pipeline_parallel": 8,
            "micro_batch": 1,
            "logits": "fused",
            "recompute": "selective",
        },
        "algorithm": {
            "name": "reinforce++",
            "steps": 3,
            "prompts_per_step": rollouts,
            "old_log_probs": "trainer",
            "kl_coefficient": 0.01,
        },
        "workload": {
            "max_prompt_tokens": 1024,
            "lengths": {"kind": "histogram", "source": SHAPE, "scale": LONG, "prompt_tokens": 150},
        },
        "policies": {"system": "colocated"},
    }
    return PublishedStep(f"{row['num_gpus']} H100, {rollouts} rollouts", table, _measured(row))


def _scaled(table: dict[str, Any], step: MeasuredStep) -> dict[str, Any]:
    """Return a run file whose lengths have the mean of a step."""
    assert step.output_tokens is not None, "published or assumed"
    config = LengthsConfig(kind="histogram", source=SHAPE)
    cap = table["rollout"]["max_tokens"]
    scale = scale_to_mean(config, step.output_tokens, cap)
    return changed(table, {"workload.lengths.scale": scale})


def changed(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a run file with dotted keys replaced."""
    made = deepcopy(table)
    for key, value in changes.items():
        place, last = place_of(made, key)
        place[last] = value
    return made


def make(table: dict[str, Any], changes: dict[str, Any] | None = None) -> Run:
    """Return the run of a run file with dotted keys replaced."""
    return make_run(changed(table, changes or {}))


if __name__ == "__main__":
    main()

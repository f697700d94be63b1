"""Write AIConfigurator's own predictions of the served points.

    python benchmarks/predict_aiconfigurator.py profiles/published/served_points.csv OUT

It needs an environment with `aiconfigurator` 0.12.0, and uses `aiconfigurator.cli.api.cli_estimate`
with its defaults: the newest tables of the engine, no speculative decoding. A point whose layout is
unknown has no line. A point with a range of running requests has a prediction for both ends. If the measured
tables do not suffice, the mode that fills gaps ("HYBRID") is tried.
"""

from __future__ import annotations

import csv
import logging
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiconfigurator.cli.api import cli_estimate
from aiconfigurator.sdk.perf_database import get_latest_database_version

MODELS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-R1",
    "minimax-m2.7": "MiniMaxAI/MiniMax-M2.5",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "glm-5": "zai-org/GLM-5",
}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt": "trtllm"}
"""AIConfigurator's name of an engine, by the beginning of its profile's name."""
MODES = "SILICON", "HYBRID"
DENSE = ("llama-3.1-70b", "llama-3.1-8b", "qwen3-32b")


def main() -> None:
    """Predict every point and write the table."""
    logging.disable(logging.CRITICAL)
    source, out = map(Path, sys.argv[1:3])
    lines = [line for line in source.read_text().splitlines() if not line.startswith("#")]
    found = {}
    for line in csv.DictReader(lines):
        if int(line["tensor_parallel"]) == 0:
            continue
        found[line["key"]] = _predict(line)
        if len(found) % 100 == 0:
            print(len(found), flush=True)
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("aiconfigurator", "aiconfigurator-core")
    )
    head = [
        f"# source: predictions of {packages} (PyPI), by benchmarks/predict_aiconfigurator.py",
        "# licence: Apache-2.0",
        "# date: 2026-11-29",
        "key,mode,version,least,most",
    ]
    rows = [f"{key},{cells}" for key, cells in found.items() if cells]
    out.write_text("\n".join([*head, *rows]) + "\n")
    print(f"{len(rows)} of {len(found)} points with a layout")


def _predict(line: dict[str, str]) -> str:
    """Return the cells of a point; an empty text if AIConfigurator has no prediction."""
    for mode in MODES:
        try:
            ends = [_estimate(line, mode, line[name]) for name in ("least_running", "most_running")]
        except Exception as error:  # it raises errors of many kinds for what it does not support
            if mode == MODES[-1]:
                print(line["key"], type(error).__name__, str(error)[:150].replace("\n", " "))
            continue
        low, high = sorted(float(end.tpot) for end in ends)
        return f"{mode},{ends[0].backend_version},{low:.6g},{high:.6g}"
    return ""


def _estimate(line: dict[str, str], mode: str, running: str) -> Any:
    tensor, data, experts = (int(line[f"{name}_parallel"]) for name in ("tensor", "data", "expert"))
    batch = max(1, round(float(running) / data))
    layout: dict[str, Any] = {"tp_size": tensor}
    if line["model"] not in DENSE:
        layout |= {
            "attention_dp_size": data,
            "moe_tp_size": tensor * data // experts,
            "moe_ep_size": experts,
        }
    if line["is_split"] == "True":
        layout |= {
            "mode": "disagg",
            "prefill_batch_size": 1,
            "prefill_num_workers": 1,
            "decode_batch_size": batch,
            "decode_num_workers": 1,
        }
    engine = ENGINES[line["engine"].partition("-")[0]]
    system = f"{line['gpu']}{'' if line['gpu'].startswith('gb') else '_sxm'}"
    return cli_estimate(
        MODELS[line["model"]],
        system,
        backend_name=engine,
        backend_version=_newest(system, engine),
        database_mode=mode,
        isl=round(float(line["prompt"])),
        osl=round(float(line["output"])),
        batch_size=batch,
        **layout,
        **_quantisation(line),
    )


@cache
def _newest(system: str, engine: str) -> str:
    """Return the newest version of the tables, which is the default. To look it up takes a second."""
    return str(get_latest_database_version(system=system, backend=engine))


def _quantisation(line: dict[str, str]) -> dict[str, str]:
    match line["dtype"]:
        case "nvfp4":
            return {"gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4"}
        case "fp8" if line["has_block_scales"] == "True":
            return {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"}
        case "fp8":
            return {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"}
        case "bfloat16":
            return {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"}
        case _:
            return {}


if __name__ == "__main__":
    main()

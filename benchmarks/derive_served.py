"""Derive profiles/published/served_points.csv: time per output token of served models, by layout and load.

    python benchmarks/derive_served.py SAMPLE

SAMPLE is the CSV file of served points that AIConfigurator tests itself with (one row per point). The
script writes one line per point with the layout of a decode worker, its number of running requests, and
the inputs that the sample does not state.

Layouts of the sample need reading, because its converter multiplied degrees twice for some files:

| sample                                   | read as                                                     |
|------------------------------------------|-------------------------------------------------------------|
| experts over tp x ep = TP x DP GPUs      | as it says                                                  |
| TP = n x n, experts n x n                | n GPUs with tensor and expert parallelism of n              |
| TP = n, DP = n, experts 1 x n x n        | the same; the same point is published so in another file    |
| DP = n x n, experts n x n                | n attention ranks that share the experts                    |
| TP without a layout that adds up         | left out (whole racks that the sample counts as one worker) |
| TP n of an expert in fp8, whose part is  | whole experts on n ranks: engines refuse such parts, and InferenceX |
| no multiple of the blocks of 128 rows    | then enables expert parallelism (its pull request 869)      |

A disaggregated point without its number of decode workers takes the layout of the same measurement in
another file of the sample, where there is one (same GPU, load and time to all digits). Otherwise the number of
workers, and the kind of attention ranks, are unknown: the point is a range.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import pandas as pd

from streamrl.hardware.profiles import PROFILES, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.fidelity.served import COLUMNS, ServedPoint

OUT = PROFILES / "published" / "served_points.csv"
HEAD = {
    "source": "ai-dynamo/aiconfigurator 095f58a51, every second row of its sample of served points; measured by "
    "SemiAnalysisAI/InferenceX and NVIDIA",
    "licence": "Apache-2.0",
    "measured": "mean milliseconds per output token of closed-loop load at a fixed number of requests",
    "date": "2026-11-29",
}
MODELS = {
    "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-V3": "deepseek-v3",
    "MiniMax-M2.5": "minimax-m2.7",
    "gpt-oss-120b": "gpt-oss-120b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "Kimi-K2.5": "kimi-k2.5",
    "GLM-5": "glm-5",
}
"""Profile of each model, by the beginning of its name. M2.5 and M2.7 of MiniMax have one shape."""
DRAFTED = ("deepseek-v3", "qwen3.5-397b-a17b", "glm-5")
"""Models whose checkpoints have a draft layer that InferenceX also measures with. The sample does not
state which points used it."""


FIXED = "aic-auto-gap-analysis"
"""Runs of NVIDIA, with prompts and outputs of one length each."""
MEAN_SHARE = 0.9
"""Mean length over the stated one in runs of InferenceX, which draws lengths between 0.8 and 1 of it
(RANDOM_RANGE_RATIO in its README).
"""


NEWEST = {"vllm": "vllm-0.19", "sglang": "sglang-0.5", "trtllm": "tensorrt-llm-1.0"}
FIRST_OF_NEWEST_VLLM = 15
"""Minor version of vLLM from which the profile of 0.19 holds. Before it, experts in fp8 were padded to blocks."""
BLOCKS = ("deepseek-v3", "minimax-m2.7", "qwen3-235b-a22b", "qwen3.5-397b-a17b", "glm-5")
"""Models whose own checkpoints in fp8 have a scale for each block of 128 by 128."""


class Layout(NamedTuple):
    """GPUs of one worker."""

    tensor: int
    data: int
    experts: int


def main() -> None:
    """Write the table."""
    table = pd.read_csv(sys.argv[1], keep_default_na=False)
    known = _known_workers(table)
    points = [_point(line, known) for line in table.to_dict("records")]
    lines = [f"# {key}: {text}" for key, text in HEAD.items()]
    lines.append(",".join(COLUMNS))
    lines += [",".join(_cell(getattr(point, name)) for name in COLUMNS) for point in points]
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{len(points)} points")


def _point(line: dict[str, Any], known: dict[tuple[str, ...], dict[str, Any]]) -> ServedPoint:
    model = _model_of(str(line["model_path"]))
    is_split = line["mode"] == "disagg"
    if is_split and not line["decode_num_workers"]:
        line = {**line, **known.get(_identity(line), {})}
    layout = layout_of(line, "decode_" if is_split else "")
    least, most = _running(line, layout)
    dtype = _dtype(line, model)
    has_blocks = model in BLOCKS or "block" in str(line["gemm_quant_mode"])
    if layout is not None and dtype == "fp8" and has_blocks:
        layout = with_whole_blocks(layout, model)
    is_fixed = FIXED in str(line["silicon_data_source"])
    share = 1.0 if is_fixed else MEAN_SHARE
    return ServedPoint(
        key=str(line["id"]),
        engine=_engine(line),
        version=str(line["backend_version"]),
        gpu=str(line["system"]).removesuffix("_sxm"),
        model=model,
        dtype=dtype,
        cache_dtype=_cache(line, dtype, has_blocks=has_blocks),
        has_block_scales=has_blocks,
        is_split=is_split,
        tensor_parallel=layout.tensor if layout else 0,
        data_parallel=layout.data if layout else 0,
        expert_parallel=layout.experts if layout else 0,
        least_running=least,
        most_running=most,
        may_draft=model in DRAFTED,
        is_random=not is_fixed,
        prompt=float(line["isl"]) * share,
        output=float(line["osl"]) * share,
        tpot=float(line["silicon_tpot_ms"]),
    )


def layout_of(line: dict[str, Any], side: str) -> Layout | None:
    """Return the layout of a worker; `side` is "decode_" for a disaggregated one. None if degrees do not add up."""
    tensor, data, sliced, whole = (
        int(float(line[f"{side}{name}"] or 1))
        for name in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    )
    is_dense = not any(name in line["model_path"] for name in MIXTURES)
    if is_dense:
        return Layout(tensor, 1, 1)
    data = data or 1
    sliced, whole = sliced or 1, whole or 1
    if tensor * data == sliced * whole and tensor == sliced == whole == 1:
        return Layout(1, 1, 1) if not side else None
    if data == 1 and sliced == whole and tensor == sliced * whole and not side:
        return Layout(sliced, 1, sliced)
    if tensor == data == whole**0.5 and sliced == 1 and not side:
        return Layout(tensor, 1, tensor)
    if tensor == 1 and sliced == whole and data == sliced * whole and sliced > 1:
        return Layout(1, sliced, sliced)
    if tensor * data != sliced * whole or (tensor > 8 and tensor not in (16, 32, 64)):
        return None
    if tensor > 8 and not side:
        return None
    return Layout(tensor, data, whole)


def with_whole_blocks(layout: Layout, model: str) -> Layout:
    """Return the layout that an engine can load: experts stay whole if their parts would cut a block of scales.

    vLLM: "output_size is not divisible by weight quantization block_n" (fp8.py); its recipe for MiniMax-M2
    says that TP8 needs expert parallelism (vllm-project/recipes pull request 96).
    """
    experts = load_model(ModelConfig(name=model)).experts
    ranks = layout.tensor * layout.data
    if experts is None or experts.intermediate_size % (ranks // layout.experts * BLOCK) == 0:
        return layout
    return layout._replace(experts=ranks)


BLOCK = 128
"""Rows and columns of weights in fp8 that share a scale."""
MIXTURES = ("DeepSeek", "MiniMax", "gpt-oss", "235B", "397B", "Kimi", "GLM")


def _running(line: dict[str, Any], layout: Layout | None) -> tuple[float, float]:
    """Return the fewest and most requests on one worker."""
    if layout is None:
        return 0.0, 0.0
    found = re.search(r"concurrency=(\d+)", str(line["silicon_data_source"]))
    load = float(found[1]) if found else float(line["batch_size"] or line["decode_batch_size"] or 0)
    if line["mode"] != "disagg":
        return load, load
    if line["decode_num_workers"]:
        running = max(1.0, load / float(line["decode_num_workers"]))
        return running, running
    return max(1.0, load / MOST_WORKERS), load


MOST_WORKERS = 9
"""Decode workers of a point that does not state them, at most: the most of those that do, but for two points."""


def _identity(line: dict[str, Any]) -> tuple[str, ...]:
    names = ("system", "precision", "isl", "osl", "silicon_tpot_ms")
    return tuple(str(line[name]) for name in names)


def _known_workers(table: pd.DataFrame) -> dict[tuple[str, ...], dict[str, Any]]:
    stated = table[(table["mode"] == "disagg") & (table.decode_num_workers != "")]
    names = [name for name in table.columns if name.startswith("decode_")]
    return {
        _identity(line): {name: line[name] for name in names} for line in stated.to_dict("records")
    }


def _engine(line: dict[str, Any]) -> str:
    """Return the profile of an engine's version; the newest one if the sample states none."""
    name = str(line["backend"])
    release = str(line["backend_version"]).split(".")
    if name == "vllm" and release[0] == "0" and int(release[1]) < FIRST_OF_NEWEST_VLLM:
        return "vllm-0.11"
    return NEWEST[name]


def _cache(line: dict[str, Any], dtype: str, *, has_blocks: bool) -> str:
    """Return the format of keys and values.

    NVIDIA's checkpoints in nvfp4, and in fp8 with a scale a tensor, ask for fp8
    (kv_cache_quant_algo in their hf_quant_config.json). TensorRT-LLM takes it for all of fp8.
    """
    is_narrow = dtype == "nvfp4" or (dtype == "fp8" and not has_blocks)
    is_narrow = is_narrow or (dtype == "fp8" and line["backend"] == "trtllm")
    return "fp8" if is_narrow else "bfloat16"


def _dtype(line: dict[str, Any], model: str) -> str:
    if model == "gpt-oss-120b":
        return "mxfp4"
    found = {"fp4": "nvfp4", "fp8": "fp8", "int4": "int4", "bf16": "bfloat16"}
    return found.get(str(line["precision"]), "bfloat16")


def _model_of(path: str) -> str:
    name = path.rpartition("/")[2]
    return MODELS[max((start for start in MODELS if name.startswith(start)), key=len)]


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

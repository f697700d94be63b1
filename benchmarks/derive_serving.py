"""Derive profiles/published/serving_*.csv: published steps and throughputs of inference engines.

    python benchmarks/derive_serving.py DATA

DATA has the tables as collected from their sources, one CSV file each. The supported architectures
were chosen before anything was fitted. They are dense models and mixtures in which every layer has
plain multi-head or grouped-query attention over its whole context. Latent attention is supported where
its kernels were measured. Left out:

| left out                                                      | why                                       |
|---------------------------------------------------------------|-------------------------------------------|
| gpt-oss, Gemma 3 and 4, Step-3.5                              | sliding windows in most layers            |
| Nemotron (Mamba), Qwen3.5, Qwen3.8                            | linear attention in most layers           |
| Llama 4                                                       | chunked attention, modalities             |
| DeepSeek-V3.2, GLM-5.1, Kimi-K2.5                             | sparse attention; int4 experts            |
| GPT-J, Falcon                                                 | parallel blocks                           |
| GPTQ, AWQ, int8, int4, mxfp4 weights                          | no table of their kernels                 |
| B200, GH200, H100 NVL and PCIe, RTX PRO 6000, RTX 4090        | no table of their kernels                 |
| rows with speculative decoding, or of attention data parallel | another schedule than a replica's         |
| MLPerf                                                        | layouts and batches are not published     |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from streamrl.hardware.profiles import PROFILES
from streamrl.sim.fidelity.serving import COLUMNS, ServingRow

OUT = PROFILES / "published"
MODELS = {
    "Llama-3.1-405B": "llama-3.1-405b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.3-70B": "llama-3.1-70b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "LLaMA 70B": "llama-2-70b",
    "llama2-70b": "llama-2-70b",
    "LLaMA 7B": "llama-2-7b",
    "bloom-176b": "bloom-176b",
    "DeepSeek-R1": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-Coder-30B-A3B": "qwen3-30b-a3b",
    **{f"Qwen3-{size}B": f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
    **{
        f"Qwen2.5-{size}B": f"qwen2.5-{size}b"
        for size in ("0.5", "1.5", "3", "7", "14", "32", "72")
    },
}
"""Profile of each published model, by the beginning of its name. All models with the same config
are one shape.
"""
PROMPTS = {"lm-arena-chat": 300, "gpqa": 300, "sourcegraph-fim": 600}
"""Assumed prompt tokens where none are published. Fill-in-the-middle has longer prompts. It fills the
cache of Qwen3-30B-A3B on one GPU with as many rollouts, but its outputs are 300 tokens shorter.
"""
SHARE = 0.6
"""Share of the mean output that is in the context of a running rollout. It is 0.5 if all outputs have
the same length, and higher if long ones stay longer. 0.56 and 0.65 fill the KV memory in the two
settings whose batch it limits (Qwen3-8B and 14B, GPQA).
"""
MOST_PREFILLS = 0.5
"""Prompts per step. From this number on, the median step may include prefill."""
FACTS = "facts; its repository states no licence"


def main() -> None:
    """Write every table."""
    data = Path(sys.argv[1])
    OUT.mkdir(exist_ok=True)
    _write("mlenergy", list(_mlenergy(_read(data, "mlenergy_itl_h100"))), MLENERGY)
    _write("qwen3_h20", list(_qwen3(_read(data, "qwen3_h20_batch1"))), QWEN3)
    _write("qwen25_a100", list(_qwen25(_read(data, "qwen25_a100_batch1"))), QWEN25)
    _write("splitwise", list(_splitwise(_read(data, "splitwise_llama70b_bloom"))), SPLITWISE)
    _write("trtllm_static", list(_static(_read(data, "trtllm_static_batch"))), STATIC)
    _write("trtllm_load", list(_load(_read(data, "trtllm_max_throughput"))), LOAD)
    _write("sglang", list(_sglang(_read(data, "sglang_cookbook"))), SGLANG)
    _write("threads", list(_threads(_read(data, "points_from_threads"))), THREADS)
    _write("evalscope", list(_evalscope()), EVALSCOPE)


MLENERGY = {
    "source": "ml-energy/leaderboard 0cd52da, data of 2026-02-16",
    "licence": FACTS,
    "measured": "vLLM 0.11.1 with async scheduling and CUDA graphs, at a fixed number of rollouts: median "
    "inter-token latency; a busy step begins half a prompt or more, so that the median may have prefill in it",
    "assumed": f"prompts of 300 tokens, 600 of fill-in-the-middle; context = prompt + {SHARE} of the mean output",
}
QWEN3 = {
    "source": "QwenLM/Qwen3 7a2f61f, docs/source/getting_started/speed_benchmark.md",
    "licence": FACTS,
    "measured": "one request alone on H20 96 GB, SGLang 0.4.6.post1 and Transformers 4.51.3 (eager): whole time, "
    "prefill in it, a token of output",
    "assumed": "nothing; Transformers past 1 token of prompt (its cache is copied each step) and its mixture "
    "(a loop over experts) are left out",
}
QWEN25 = {
    "source": "QwenLM/Qwen3 a912d23, docs/source/benchmark/speed_benchmark.rst",
    "licence": FACTS,
    "measured": "one request alone on A100 80 GB, vLLM 0.6.3: whole time, prefill in it, a token of output",
    "assumed": "prefill in the time; rows of vLLM 0.6.2 are left out",
}
SPLITWISE = {
    "source": "Mutinifni/splitwise-sim 8f99e7d, data/perf_model.csv",
    "licence": "MIT",
    "measured": "vLLM of 2023 without CUDA graphs, medians of 5: seconds of a decode step",
    "assumed": "BLOOM's plain MLP counts as a gated one of as many parameters; TP2 at batch 64 (faster than at 32) "
    "and GPUs with a cap on their power are left out",
}
STATIC = {
    "source": "NVIDIA/TensorRT-LLM docs/source/performance.md, release 0.5.0 and 138f96d",
    "licence": "Apache-2.0",
    "measured": "static batches, whole time a step, prefill of the batch in it",
    "assumed": "version 0.6.1 prints throughput per GPU",
}
LOAD = {
    "source": "NVIDIA/TensorRT-LLM docs/source/performance/perf-overview.md, 00f3768 and 03e27c7",
    "licence": "Apache-2.0",
    "measured": "output tokens/s a GPU with all requests queued at once, fp8 weights and cache",
    "assumed": "as many rollouts as memory holds whole, up to 2,048; a prompt waits for nobody",
}
SGLANG = {
    "source": "sgl-project/sgl-cookbook 7b5bd9c",
    "licence": "Apache-2.0",
    "measured": "SGLang 0.5.6, median inter-token latency at a mean number of rollouts",
    "assumed": "the version and layout of the page around the table",
}
THREADS = {
    "source": "alibaba/InferSim f2293da README; tenstorrent/tt-inference-server issue 340; SemiAnalysisAI/InferenceX "
    "issue 870",
    "licence": "Apache-2.0; facts",
    "measured": "time a token of output",
    "assumed": "lengths of InferSim are its defaults; one A100 for Qwen3-30B-A3B at batch 1, with a vLLM of no stated "
    "version: of July 2025, before async scheduling, so 0.6.3 on A100 is nearest",
}
EVALSCOPE = {
    "source": "tim-wang-tecg-blog.pages.dev/llm/llm-benchmark-en, read 2026-11-29",
    "licence": "facts; the page states no licence",
    "measured": "five requests at once on one H100, SGLang 0.4.9 and vLLM 0.9.0: whole time a token of output, prefill in it",
    "assumed": "prompts of 1,700 tokens: the page limits them to 5,000 to 10,000 characters; 50 and 100 requests are left "
    "out, as their seconds and their rate contradict each other",
}


def _mlenergy(table: pd.DataFrame) -> Iterator[ServingRow]:
    """Yield the rows of supported models in one replica, with the median of repeated settings."""
    keys = ["model", "precision", "attn_tp", "ep", "dp", "task", "max_num_seqs"]
    kept = table.groupby(keys, sort=False, as_index=False).median(numeric_only=True)
    for line in kept.to_dict("records"):
        model = model_of(str(line["model"]))
        if model is None or line["dp"] > 1 or line["precision"] not in ("bfloat16", "fp8"):
            continue
        batch, output = line["avg_batch"], line["avg_output_len"]
        prompt = PROMPTS[str(line["task"])]
        is_busy = batch / output >= MOST_PREFILLS
        yield ServingRow(
            engine="vllm-0.11",
            version="0.11.1",
            gpu="h100",
            model=model,
            dtype=str(line["precision"]),
            tensor_parallel=int(line["attn_tp"]),
            expert_parallel=int(line["ep"]),
            kind="busy step" if is_busy else "step",
            batch=batch,
            prompt=prompt,
            output=output,
            context=prompt + SHARE * output,
            value=line["itl_median_ms"],
        )


def _qwen3(table: pd.DataFrame) -> Iterator[ServingRow]:
    for line in table[table.precision == "BF16"].to_dict("records"):
        is_eager = str(line["engine"]).startswith("Transformers")
        if is_eager and (line["isl"] > 1 or "A3B" in str(line["model"])):
            continue
        yield _alone(
            line,
            engine="transformers-4.51" if is_eager else "sglang-0.4",
            version="4.51.3" if is_eager else "0.4.6.post1",
            gpu="h20",
            value=line["e2e_ms_per_output_token"],
        )


def _qwen25(table: pd.DataFrame) -> Iterator[ServingRow]:
    is_kept = (table.precision == "BF16") & ~table.note.fillna("").str.contains("0.6.2")
    for line in table[is_kept].to_dict("records"):
        yield _alone(
            line, engine="vllm-0.6", version="0.6.3", gpu="a100", value=line["ms_per_token"]
        )


def _alone(line: dict[str, Any], **facts: Any) -> ServingRow:
    """Return the row of a request that is alone on the replica."""
    return ServingRow(
        model=str(model_of(line["model"])),
        dtype="bfloat16",
        tensor_parallel=int(line["tp"]),
        expert_parallel=1,
        kind="request",
        batch=1,
        prompt=line["isl"],
        output=line["osl"],
        context=line["isl"] + line["osl"] / 2,
        **facts,
    )


def _splitwise(table: pd.DataFrame) -> Iterator[ServingRow]:
    gpus = {"a100-80gb": "a100", "h100-80gb": "h100"}
    is_kept = table.gpu.isin(gpus)
    is_kept &= ~((table.tp == 2) & (table.batch == 64))
    for line in table[is_kept].to_dict("records"):
        yield ServingRow(
            engine="vllm-0.2",
            version="2023",
            gpu=gpus[line["gpu"]],
            model=str(model_of(line["model"])),
            dtype="float16",
            tensor_parallel=line["tp"],
            expert_parallel=1,
            kind="step",
            batch=line["batch"],
            prompt=line["isl"],
            output=line["osl"],
            context=line["avg_context"],
            value=line["token_time_ms"],
        )


def _static(table: pd.DataFrame) -> Iterator[ServingRow]:
    for line in table[table.model.str.startswith("LLaMA")].to_dict("records"):
        version = str(line["engine"]).split()[-1]
        yield ServingRow(
            engine="tensorrt-llm-0.5",
            version=version,
            gpu="h100" if "H100" in line["gpu"] else "a100",
            model=str(model_of(line["model"])),
            dtype={"FP8": "fp8", "FP16": "float16"}[line["precision"]],
            tensor_parallel=line["tp"],
            expert_parallel=1,
            kind="batch",
            batch=line["batch"],
            prompt=line["isl"],
            output=line["osl"],
            context=line["isl"] + line["osl"] / 2,
            value=line["e2e_ms_per_step"],
        )


def _load(table: pd.DataFrame) -> Iterator[ServingRow]:
    is_kept = table.parallel.str.fullmatch(r"TP\d") & (table.precision == "FP8")
    for line in table[is_kept].to_dict("records"):
        model = model_of(line["model"])
        if model is None or "a22b" in model:
            continue
        yield ServingRow(
            engine="tensorrt-llm-1.0",
            version=str(line["engine"]).split()[1],
            gpu=str(line["gpu"]).lower(),
            model=model,
            dtype="fp8",
            tensor_parallel=int(str(line["parallel"])[2:]),
            expert_parallel=1,
            kind="full load",
            batch=None,
            prompt=line["isl"],
            output=line["osl"],
            context=line["isl"] + line["osl"] / 2,
            value=line["output_tokens_per_s_per_gpu"],
        )


def _sglang(table: pd.DataFrame) -> Iterator[ServingRow]:
    is_kept = (table.model == "Meta-Llama/Llama-3.1-70B") & (table.gpu == "A100")
    for line in table[is_kept & table.accept_length.isna()].to_dict("records"):
        yield ServingRow(
            engine="sglang-0.5",
            version="0.5.6",
            gpu="a100",
            model="llama-3.1-70b",
            dtype="bfloat16",
            tensor_parallel=int(line["tp_from_page"]),
            expert_parallel=1,
            kind="step",
            batch=line["avg_concurrency"],
            prompt=line["avg_isl"],
            output=line["avg_osl"],
            context=line["avg_isl"] + line["avg_osl"] / 2,
            value=line["itl_median_ms"],
        )


def _threads(table: pd.DataFrame) -> Iterator[ServingRow]:
    for line in table.to_dict("records"):
        model = str(line["model"])
        is_single = line["gpu"] == "A100" and model == "Qwen3-30B-A3B"
        is_r1 = "issue 870" in str(line["source"]) and "outlier" not in str(line["note"])
        if not (is_single or is_r1 or (line["gpu"], model) == ("H20", "Qwen3-8B")):
            continue
        yield ServingRow(
            engine="vllm-0.6" if is_single else "sglang-0.5",
            version="0.5.7" if is_r1 else "not stated",
            gpu=str(line["gpu"]).lower(),
            model=str(model_of(model)),
            dtype="fp8" if line["precision"] == "fp8" else "bfloat16",
            tensor_parallel=8 if is_r1 else 1,
            expert_parallel=1,
            kind="step",
            batch=line["concurrency"],
            prompt=line["isl"],
            output=line["osl"],
            context=line["isl"] + line["osl"] / 2,
            value=line["tpot_ms"],
        )


def _evalscope() -> Iterator[ServingRow]:
    for engine, version, seconds in (("sglang-0.5", "0.4.9", 15.00), ("vllm-0.9", "0.9.0", 15.75)):
        yield ServingRow(
            engine=engine,
            version=version,
            gpu="h100",
            model="llama-3.1-8b",
            dtype="bfloat16",
            tensor_parallel=1,
            expert_parallel=1,
            kind="batch",
            batch=5,
            prompt=1700,
            output=2000,
            context=2700,
            value=1e3 * seconds / 2000,
        )


def model_of(name: str) -> str | None:
    """Return the profile of a published model; None if its architecture is left out."""
    found = [prefix for prefix in MODELS if name.startswith(prefix)]
    return MODELS[max(found, key=len)] if found else None


def _read(data: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(data / f"{name}.csv")


def _write(name: str, rows: list[ServingRow], head: dict[str, str]) -> None:
    lines = [f"# {key}: {text}" for key, text in head.items()]
    lines += ["# date: 2026-11-21", ",".join(COLUMNS)]
    lines += [",".join(_cell(getattr(row, column)) for column in COLUMNS) for row in rows]
    (OUT / f"serving_{name}.csv").write_text("\n".join(lines) + "\n")
    print(f"{name}: {len(rows)} rows")


def _cell(value: object) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""Derive profiles/published/training.csv: published training steps in one format, one row per step.

    python benchmarks/derive_training.py DATA

DATA is the folder of published tables: `training/mpt_train_mfu.csv` and `parallel_training/*.csv`. The
script keeps steps on A100, H100, H200 and Blackwell with a published layout, of models that the simulator has
costs for. It also keeps dense models in fp8, to which nothing is fitted:

| kept                                           | left out, and why                                             |
|------------------------------------------------|---------------------------------------------------------------|
| dense models with grouped-query attention      | state space models, vision towers: no costs                   |
| mixtures with plain attention                  | expert layers of those                                        |
| sliding windows, linear attention, groups apart | GPT-OSS of Automodel: its expert ranks are not published      |
| mixtures with latent attention, a group apart  | adapters (LoRA): another amount of work                       |
| pipelines, tensor, expert and data parallelism | FP8 mixtures, optimizer on the host: no costs yet             |
| context parallelism, a group apart             | verification cards with it: functional, 10 to 40 TFLOP/s      |
| ZeRO 1 and 3                                   | rows whose batch, layout or GPU is not published              |
|                                                | Llama-3.1-405B with FSDP: moves 92 of 126 layers to the host  |

The kernel table of fp8 products with one scale a tensor was chosen after the first fp8 rows were seen.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from streamrl.hardware.profiles import load_gpu
from streamrl.sim.fidelity.training_steps import PATH, PublishedStep, Recompute, shape_of

LICENCES = "Apache-2.0 (llm-foundry, Megatron-Bridge, Automodel, prime-rl), MIT (ModelZoo, KempnerForge), BSD-style (Megatron-LM)"
MPT_DEVICES = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40"}
BRIDGE = "Megatron-Bridge 067f987"
AUTOMODEL = "NeMo Automodel 36044ad"
ZOO = "Megatron-MoE-ModelZoo e865051"
PRIME = "prime-rl 559b447"
KEMPNER = "KempnerForge 5666d0d"


def main() -> None:
    """Write the table."""
    rows = derived(Path(sys.argv[1]))
    names = PublishedStep.__struct_fields__
    head = [
        "# source: the column `source`, by repository and commit",
        f"# licence: {LICENCES}",
        "# date: 2026-11-21",
        "# Published seconds of an optimizer step: forward, backward and update of `sequences` of `tokens`.",
    ]
    with PATH.open("w") as file:
        file.write("\n".join(head) + "\n")
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
    print(f"{len(rows)} rows in {PATH}")


def derived(data: Path) -> list[PublishedStep]:
    """Return the rows of the table, from a folder of published tables."""
    return [
        *mosaic(data / "training" / "mpt_train_mfu.csv"),
        *bridge(data / "parallel_training" / "mbridge_cards_h100.csv"),
        *bridge_fp8(data / "parallel_training" / "megatron_bridge_h100.csv"),
        *pages(data / "parallel_training" / "megatron_bridge_h100.csv"),
        *blackwell(data / "parallel_training" / "megatron_bridge_blackwell.csv"),
        *ablations(data / "parallel_training" / "training_ablations.csv"),
        *others(data / "parallel_training" / "training_other.csv"),
        *prime(data / "parallel_training" / "prime_rl_bench.csv"),
    ]


def _cell(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else value


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)


# MosaicML: MPT with FSDP --------------------------------------------------------------------------


def mosaic(path: Path) -> Iterator[PublishedStep]:
    """Yield MPT steps. The published MFU counts 6 N + 12 layers x hidden x sequence FLOPs per token."""
    for line in _lines(path):
        model, gpu = f"mpt-{line['Model']}", MPT_DEVICES[line["GPU"]]
        shape = shape_of(model)
        gpus, sequence = int(line["# GPUs"]), int(line["SeqLen (T)"])
        micro, accumulation = int(line["MicroBatchSize"]), int(line["GradAccum"])
        per_token = (
            6 * int(line["NumParams"]) + 12 * shape.num_layers * shape.hidden_size * sequence
        )
        dtype: Literal["fp8", "bfloat16"] = "fp8" if line["Precision"] == "amp_fp8" else "bfloat16"
        peak = load_gpu(gpu.removesuffix("-40")).flops[dtype]
        tokens = micro * accumulation * sequence
        yield PublishedStep(
            framework="llm-foundry",
            release="8c8dd48",
            gpu=gpu,
            model=model,
            sequences=gpus * micro * accumulation,
            tokens=sequence,
            micro_batch=micro,
            data_parallel=gpus,
            zero=3,
            recompute="full" if line["Activation Checkpointing"] == "True" else "none",
            dtype=dtype,
            seconds=per_token * tokens / peak / (float(line["MFU"]) / 100),
            source="mosaicml/llm-foundry 8c8dd48",
        )


# Megatron-Bridge ----------------------------------------------------------------------------------

CARDS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("qwen3-8b", "pretrain"): ("qwen3-8b", {}),
    ("qwen3-8b", "checkpoint_resume"): ("qwen3-8b", {}),
    ("qwen3-30b-a3b", "pretrain"): ("qwen3-30b-a3b", {"dispatch": "deduplicated"}),
    ("qwen3-30b-a3b", "sft"): ("qwen3-30b-a3b", {"dispatch": "all-to-all"}),
    ("qwen3-30b-a3b", "pretrain_performance"): (
        "qwen3-30b-a3b",
        {"dispatch": "deduplicated", "routing": "balanced", "overlaps": True},
    ),
    ("moonlight-16b-a3b", "pretrain"): ("moonlight-16b-a3b", {"dispatch": "deduplicated"}),
    ("moonlight-16b-a3b", "checkpoint_resume"): (
        "moonlight-16b-a3b",
        {"dispatch": "deduplicated"},
    ),
    ("moonlight-16b-a3b", "sft"): ("moonlight-16b-a3b", {"dispatch": "deduplicated"}),
    ("deepseek-v3", "pretrain_performance"): (
        "deepseek-v3",
        {
            "dispatch": "deduplicated",
            "routing": "balanced",
            "overlaps": True,
            "recompute": "selective",
        },
    ),
}
"""Verification cards with a known layout and without adapters, with the facts of the card's text.
"""


def bridge(path: Path) -> Iterator[PublishedStep]:
    """Yield the verification cards."""
    for line in _lines(path):
        found = CARDS.get((line["model"], line["item"]))
        if found is None:
            continue
        model, known = found
        gpus = int(line["num_gpus"])
        tensor, pipeline = int(line["tp"] or 1), int(line["pp"] or 1)
        yield PublishedStep(
            framework="Megatron-Bridge",
            release=line["date"],
            gpu="h100",
            model=model,
            sequences=int(line["gbs"]),
            tokens=int(line["seq_len"]),
            micro_batch=int(line["mbs"] or 1),
            data_parallel=gpus // tensor // pipeline,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_stages=int(line["vp"] or 1),
            expert_parallel=int(line["ep"] or (16 if "30b" in model else 1)),
            seconds=float(line["step_time_s"]),
            source=f"{BRIDGE} {line['item']}",
            **known,
        )


DENSE_FP8 = {
    "LLAMA3_8B": "llama-3.1-8b",
    "LLAMA3_70B": "llama-3.1-70b",
    "LLAMA3.1_405B": "llama-3.1-405b",
}


def bridge_fp8(path: Path) -> Iterator[PublishedStep]:
    """Yield pretraining steps of dense models in fp8, from the page's tables. Their recipes do not recompute."""
    for line in _lines(path):
        model = DENSE_FP8.get(line["model"])
        if model is None or line["phase"] != "pretrain" or not line["precision"].startswith("FP8"):
            continue
        gpus, tensor, pipeline = (int(line[key]) for key in ("num_gpus", "tp", "pp"))
        sequences, tokens, context = (int(line[key]) for key in ("gbs", "seq_len", "cp"))
        yield PublishedStep(
            framework="Megatron-Bridge",
            release=line["release"],
            gpu="h100",
            model=model,
            sequences=sequences,
            tokens=tokens,
            micro_batch=int(line["mbs"]),
            data_parallel=gpus // tensor // pipeline // context,
            context_parallel=context,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_stages=int(float(line["vp"] or 1)),
            zero=3 if int(float(line["fsdp"] or 0)) else 1,
            dtype="fp8",
            seconds=sequences * tokens / gpus / float(line["tokens_per_s_per_gpu"]),
            source=f"{BRIDGE} performance-summary",
        )


def pages(path: Path) -> Iterator[PublishedStep]:
    """Yield the 16-bit steps of GPT-OSS from Megatron-Bridge's summary pages.

    The pages do not state the recomputation. It is in the H100's 16-bit configuration:
    recompute_modules = ["layernorm", "moe_act"]
    (scripts/performance/configs/gpt_oss/gpt_oss_workload_base_configs.py, 07eea52). Version 25.11 is
    left out, because its page counts a quarter of the micro-batches of its batch.
    """
    for line in _lines(path):
        kind = (line["precision"], line["model"], line["release"] == "25.11")
        if kind != ("BF16", "GPT OSS 120B", False):
            continue
        gpus, pipeline = int(line["num_gpus"]), int(line["pp"])
        tokens = int(line["gbs"]) * int(line["seq_len"])
        yield PublishedStep(
            framework="Megatron-Bridge",
            release=line["release"],
            gpu="h100",
            model="gpt-oss-120b",
            sequences=int(line["gbs"]),
            tokens=int(line["seq_len"]),
            micro_batch=int(line["mbs"]),
            data_parallel=gpus // pipeline,
            pipeline_parallel=pipeline,
            expert_parallel=int(line["ep"]),
            recompute="selective",
            routing="balanced",
            seconds=tokens / gpus / float(line["tokens_per_s_per_gpu"]),
            source=f"{BRIDGE} docs/performance-summary-archive.md",
        )


BLACKWELL = {
    "GPT OSS 120B": ("gpt-oss-120b", {"dispatch": "all-to-all", "recompute": "selective"}),
    "DeepSeekV3": ("deepseek-v3", {"dispatch": "deduplicated", "recompute": "selective"}),
    "Qwen3_235B_a22B": ("qwen3-235b-a22b", {"dispatch": "deduplicated", "recompute": "none"}),
    "LLAMA3_8B": ("llama-3.1-8b", {}),
    "LLAMA3.1_405B": ("llama-3.1-405b", {}),
}
"""Models of the page's Blackwell tables, with facts of their configurations (scripts/performance/configs,
0fa501a): DeepSeek-V3 recomputes `mla_up_proj`, or `mlp` and `moe_act`; GPT-OSS norms and `moe_act`.
Llama 3 70B moves activations of 20 to 40 layers to the host, so it is left out. Llama 3.1 405B moves
some only with FSDP (v0.2.0, `cpu_offloading_num_layers`).
"""
RACK = 72
"""GPUs of an NVLink domain of GB200 and GB300."""


def blackwell(path: Path) -> Iterator[PublishedStep]:
    """Yield pretraining steps on Blackwell: mixtures in 16 bits, and dense models in fp8 with one scale a tensor."""
    for line in _lines(path):
        model, known = BLACKWELL.get(line["model"], ("", {}))
        is_mixture = bool(known)
        wanted = ("BF16",) if is_mixture else ("FP8", "FP8-CS")
        if not model or line["phase"] != "pretrain" or line["precision"] not in wanted:
            continue
        if model == "llama-3.1-405b" and int(line["fsdp"] or 0):
            continue
        gpu = line["system"].removeprefix("DGX-").lower()
        gpus, tensor, pipeline = (int(line[key]) for key in ("num_gpus", "tp", "pp"))
        tokens, context = int(line["gbs"]) * int(line["seq_len"]), int(line["cp"] or 1)
        yield PublishedStep(
            framework="Megatron-Bridge",
            release=line["release"],
            gpu=gpu,
            gpus_per_node=RACK if gpu.startswith("gb") else 8,
            model=model,
            sequences=int(line["gbs"]),
            tokens=int(line["seq_len"]),
            micro_batch=int(line["mbs"]),
            data_parallel=gpus // tensor // pipeline // context,
            context_parallel=context,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_stages=int(line["vp"] or 1) if pipeline > 1 else 1,
            expert_parallel=int(line["ep"] or 1),
            routing="balanced" if is_mixture else "natural",
            dtype="bfloat16" if is_mixture else "fp8",
            seconds=tokens / gpus / float(line["tokens_per_s_per_gpu"]),
            source=f"{BRIDGE} performance-summary",
            **known,  # type: ignore[arg-type]  # keys are fields of PublishedStep
        )


ABLATIONS = {
    "HybridEP, overlap off": {"dispatch": "deduplicated"},
    "HybridEP, overlap on (search run)": {"dispatch": "deduplicated", "overlaps": True},
    "HybridEP, overlap on (validation)": {"dispatch": "deduplicated", "overlaps": True},
    "alltoall, no overlap": {"dispatch": "all-to-all"},
    "alltoall, overlap": {"dispatch": "all-to-all", "overlaps": True},
    "alltoall, overlap + delayed wgrad": {"dispatch": "all-to-all", "overlaps": True},
}


def ablations(path: Path) -> Iterator[PublishedStep]:
    """Yield the overlap and dispatcher ablations of Qwen3-30B-A3B on 16 H100."""
    for line in _lines(path):
        known = ABLATIONS.get(line["variant"])
        if known is None or not line["step_time_s"]:
            continue
        yield PublishedStep(
            framework="Megatron-Bridge",
            release=line["date"],
            gpu="h100",
            model="qwen3-30b-a3b",
            sequences=1024,
            tokens=4096,
            micro_batch=1,
            data_parallel=16,
            expert_parallel=16,
            routing="balanced",
            seconds=float(line["step_time_s"]),
            source=f"{BRIDGE} {line['topic']}: {line['variant']}",
            **known,  # type: ignore[arg-type]  # keys are fields of PublishedStep
        )


# Megatron-LM, ModelZoo, Automodel, KempnerForge ---------------------------------------------------

KEMPNER_MODELS = {
    "Llama-3 7B": "llama-3.1-8b",
    "Llama-3 7B (8.0B)": "llama-3.1-8b",
    "Llama-3 13B": "kempner-13b",
    "Llama-3 13B (14.8B)": "kempner-13b",
    "Llama-3 70B": "llama-3.1-70b",
    "Llama-3 70B (70.6B)": "llama-3.1-70b",
}
MIXTURES = {
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3 MoE 30B": "qwen3-30b-a3b",
    "DeepSeek V3 671B": "deepseek-v3",
    "Mixtral-8x7B": "mixtral-8x7b",
    "Qwen3-Next-80B-A3B": "qwen3-next-80b-a3b",
}


def others(path: Path) -> Iterator[PublishedStep]:
    """Yield rows with full layouts from the other sources."""
    for line in _lines(path):
        if line["precision"] != "BF16":
            continue
        if line["source"].startswith("KempnerForge") and line["model"] in KEMPNER_MODELS:
            yield kempner(line)
        elif line["model"] == "Llama3 70B" and int(line["cp"] or 1) > 1 and line["num_gpus"]:
            yield automodel_dense(line)
        elif line["model"] in MIXTURES and "H100" in line["system"] and line["num_gpus"]:
            yield mixture(line)


def kempner(line: dict[str, str]) -> PublishedStep:
    """Return a step of KempnerForge: FSDP2 with tensor ranks in a node of 4."""
    gpus, tensor, pipeline = (int(line[key]) for key in ("num_gpus", "tp", "pp"))
    tokens = float(line["tokens_per_s_per_gpu"]) * gpus * float(line["step_time_s"])
    data = gpus // tensor // pipeline
    sequences = int(line["gbs"] or round(tokens / 4096 / data) * data)
    default = 1 if pipeline > 1 else 2 if "70B" in line["model"] else 4
    micro = int(line["mbs"] or default)
    return PublishedStep(
        framework="KempnerForge",
        release=line["release"],
        gpu="h200",
        gpus_per_node=4,
        model=KEMPNER_MODELS[line["model"]],
        sequences=sequences,
        tokens=4096,
        micro_batch=min(micro, sequences // data),
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        zero=3,
        recompute="full",
        kernels="uncompiled" if "no compile" in line["note"] else "fused",
        seconds=float(line["step_time_s"]),
        source=f"{KEMPNER} {line['source'].split()[1]}",
    )


def mixture(line: dict[str, str]) -> PublishedStep:
    """Return a step of a mixture. If a page has TFLOP/s only, seconds are computed from the model's FLOPs."""
    note, framework = line["note"], line["source"].split()[0]
    gpus, tensor, pipeline = int(line["num_gpus"]), int(line["tp"]), int(line["pp"])
    sequences, context = int(line["gbs"] or 256), int(line["cp"] or 1)
    model, tokens = MIXTURES[line["model"]], int(line["seq_len"])
    if line["step_time_s"]:
        seconds = float(line["step_time_s"])
    else:
        seconds = (
            sequences
            * tokens
            * flops_per_token(model, tokens)
            / (float(line["tflops_per_gpu"]) * 1e12 * gpus)
        )
    is_fsdp = "FSDP" in line["fsdp"] or framework == "NeMo"
    release = line["release"]
    return PublishedStep(
        framework="Automodel" if framework == "NeMo" else "Megatron-LM",
        release=release,
        gpu="h100",
        model=model,
        sequences=sequences,
        tokens=tokens,
        micro_batch=int(line["mbs"] or 1),
        data_parallel=gpus // tensor // pipeline // context,
        context_parallel=context,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=int(line["vp"] or (4 if pipeline == 8 else 1)),
        expert_parallel=int(line["ep"] or 1),
        zero=3 if is_fsdp else 1,
        recompute=recomputed(note, framework),
        routing="natural" if "natural routing" in note else "balanced",
        dispatch="all-to-all" if "all-to-all" in note else "deduplicated",
        overlaps="overlap" in note.lower() or ("PR 5728" in line["source"] and pipeline > 1),
        seconds=seconds,
        source=line["source"],
    )


def automodel_dense(line: dict[str, str]) -> PublishedStep:
    """Return a step of a dense Automodel model with context ranks. It recomputes, since its activations fit no GPU."""
    gpus, context = int(line["num_gpus"]), int(line["cp"])
    return PublishedStep(
        framework="Automodel",
        release=line["release"],
        gpu="h100",
        model="llama-3.1-70b",
        sequences=int(line["gbs"]),
        tokens=int(line["seq_len"]),
        micro_batch=int(line["mbs"]),
        data_parallel=gpus // context,
        context_parallel=context,
        zero=3,
        recompute="full",
        seconds=float(line["step_time_s"]),
        source=line["source"],
    )


def recomputed(note: str, framework: str) -> Recompute:
    """Return the recomputation of a mixture.

    Automodel's page does not state it. But every version of its benchmark configurations
    (examples/llm_benchmark, earlier examples/benchmark) has `activation_checkpointing: true`, which
    wraps each layer.
    """
    if framework == "NeMo" or "full recompute" in note:
        return "full"
    if "recompute layernorm+moe" in note:
        return "mlp"
    return "selective" if "recompute norm,act" in note else "none"


def flops_per_token(model: str, tokens: int) -> float:
    """Return the FLOPs per token as Megatron counts them: all products and causal attention, no recomputation."""
    return 3 * shape_of(model).forward_flops(1, tokens / 2)


# prime-rl -----------------------------------------------------------------------------------------

PRIME_MODELS = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-4B-Instruct-2507": "qwen3-4b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
}
PRIME_GPUS = {"H100 80GB HBM3": "h100", "H200": "h200"}


def prime(path: Path) -> Iterator[PublishedStep]:
    """Yield steps that train all parameters, without those that offload activations.

    Only the RL trainer chunks logits. So the peak memory of supervised steps includes all logits.
    """
    for line in _lines(path):
        model, gpu = PRIME_MODELS.get(line["model"]), PRIME_GPUS.get(line["system"])
        if model is None or gpu is None or "lora" in line["phase"] or line["act_ckpt"] == "Offload":
            continue
        gpus = int(line["num_gpus"])
        yield PublishedStep(
            framework="prime-rl",
            release=line["run_date"],
            gpu=gpu,
            model=model,
            sequences=int(line["gbs"]),
            tokens=int(line["seq_len"]),
            micro_batch=1,
            data_parallel=gpus,
            zero=3,
            recompute="full",
            kernels="eager",
            logits="chunked" if line["phase"].startswith("rl") else "eager",
            seconds=float(line["step_time_s"]),
            peak_memory=float(line["peak_mem_gib"]) * 2**30,
            source=f"{PRIME} {line['phase']}",
        )


if __name__ == "__main__":
    main()

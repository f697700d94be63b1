"""Published training steps (profiles/published/training.csv), and their predictions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from streamrl.hardware.activations import activation_bytes, logit_bytes
from streamrl.hardware.memory import model_states
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import PROFILES, Gpu, find_profile, load_gpu, read_profile
from streamrl.record.band import StepBasis
from streamrl.runfile.roles_config import KernelFusion, Recompute, TrainerConfig
from streamrl.runfile.units import Bandwidth, Size
from streamrl.sim.costs.training.layer import Layer
from streamrl.sim.costs.training.pipeline import PipelinedSchedule
from streamrl.sim.costs.training.profile import Constants, load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.stage_times import StageTimes
from streamrl.sim.costs.training.training import Rates, rates_of
from streamrl.sim.fidelity.published_rows import Row, read_published

PATH = PROFILES / "published" / "training.csv"
MPT_VOCABULARY = 50432
"""Vocabulary of every MPT model in the table: parameters outside layers and positions, over the
hidden size.
"""
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, layers and heads of the MPT models (llm-foundry, scripts/train/yamls/pretrain)."""


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One published optimizer step."""

    framework: str
    release: str
    gpu: str
    gpus_per_node: int = 8
    model: str
    sequences: int
    """Sequences of the step over all ranks."""
    tokens: int
    """Tokens of each sequence, packed or padded."""
    micro_batch: int
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    zero: Literal[1, 3] = 1
    recompute: Recompute = "none"
    routing: Literal["natural", "balanced"] = "natural"
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    overlaps: bool = False
    """Whether expert dispatch overlaps with the computation of other micro-batches."""
    kernels: KernelFusion = "fused"
    logits: Literal["eager", "fused", "chunked"] | None = None
    dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Precision of the products of linear layers."""
    seconds: float
    peak_memory: float | None = None
    """Peak bytes of the fullest GPU, if published."""
    source: str

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of the step."""
        split = self.tensor_parallel * self.pipeline_parallel
        return self.data_parallel * self.context_parallel * split


@functools.cache
def read_steps(path: Path = PATH) -> tuple[PublishedStep, ...]:
    """Read the committed table."""
    lines = read_published(path)
    return tuple(msgspec.convert(_typed(line), PublishedStep, strict=False) for line in lines)


def _typed(line: dict[str, str]) -> dict[str, object]:
    return {
        key: {"True": True, "False": False, "": None}.get(value, value)
        for key, value in line.items()
    }


def is_fitted(step: PublishedStep) -> bool:
    """Return whether constants are fitted to a step: full attention, 16 bits, no context ranks, not on Blackwell."""
    is_wide = step.dtype == "bfloat16"
    is_plain = kind_of_attention(step.model) == "plain" and step.context_parallel == 1
    return is_plain and is_wide and not is_blackwell(step)


def is_blackwell(step: PublishedStep) -> bool:
    """Return whether a step ran on Blackwell, to whose steps nothing is fitted."""
    return load_gpu(step.gpu.removesuffix("-40")).generation == "blackwell"


def kind_of_attention(model: str) -> Literal["plain", "latent", "windows", "linear"]:
    """Return the kind of attention of a published model: "plain" attends to all keys and values."""
    shape = shape_of(model)
    if shape.latent is not None:
        return "latent"
    if shape.linear is not None:
        return "linear"
    return "plain" if shape.sliding_window is None else "windows"


@functools.cache
def shape_of(model: str) -> ModelShape:
    """Return the shape of a published model from its profile; for MPT, return an approximation.

    A gated MLP of 8/3 times the hidden size has as many parameters as MPT's plain MLP of 4 times.
    """
    if model.startswith("mpt-"):
        hidden, layers, heads = MPT[model.removeprefix("mpt-")]
        return ModelShape(
            name=model,
            source="mosaicml/llm-foundry, scripts/train/yamls/pretrain",
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            intermediate_size=round(8 * hidden / 3),
            vocab_size=MPT_VOCABULARY,
            has_qkv_bias=False,
            has_tied_embeddings=True,
        )
    return read_profile(find_profile("models", model, ".toml"), ModelShape)


SMALL_A100 = (Size(40e9), Bandwidth(1.555e12))
"""Memory size and bandwidth of the 40 GB A100. All else equals the 80 GB one (NVIDIA A100
datasheet).
"""


MESH = 4
"""GPUs of a node with direct NVLinks between them, without a switch."""


ATTENTION = {
    "latent": "latent attention",
    "windows": "sliding windows",
    "linear": "linear attention",
}
"""Names of groups of steps that were not fitted, by kind of attention."""


def training_rows() -> list[Row]:
    """Return every published step, predicted by the profile and by constants that were fitted without its model."""
    profile = load_training_profile()
    rows = []
    for step in read_steps():
        rates = rates_of(profile, step.dtype)
        seconds = step_time(step, rates, profile.constants, profile.triton_attention)
        without, left_out = profile.without.get(step.model), None
        if without is not None:
            left_out = step_time(step, rates, without, profile.triton_without[step.model])
        if not is_fitted(step):  # but other steps of its model may be
            seconds, left_out = left_out or seconds, None
        rows.append(
            Row(
                name=_name(step),
                group=_group(step),
                shape=step.model,
                unit="s a step",
                published=(step.seconds, step.seconds),
                predicted=(seconds, seconds),
                is_fitted=is_fitted(step),
                left_out=left_out,
                source=step.source,
                configuration=_configuration(step),
                stage="train",
                basis=StepBasis(replicas={}, trainer={}, partition=_partition(step)),
            )
        )
    return rows


def _configuration(step: PublishedStep) -> str:
    """Return the layout and precision of a step, which rows of several releases have in common."""
    layout = (step.data_parallel, step.tensor_parallel, step.pipeline_parallel, step.virtual_stages)
    parts = (step.expert_parallel, step.context_parallel, step.sequences, step.tokens)
    return f"{step.gpu} {step.model} {step.dtype} {step.micro_batch} {layout} {parts}"


def _partition(step: PublishedStep) -> tuple[str, ...]:
    kind = "dense" if shape_of(step.model).experts is None else "mixture"
    return kind, _gpu(step).generation or "other", "named framework"


def step_time(
    step: PublishedStep, rates: Rates, constants: Constants, triton_attention: dict[str, float]
) -> float:
    """Return the seconds of a step by the trainer's schedule. Data-parallel ranks are alike, so one is simulated."""
    ranks, stages = _composed(step, rates, constants, triton_attention)
    alone = msgspec.structs.replace(ranks.trainer, data_parallel=1, expert_parallel=1, zero=1)
    line = PipelinedSchedule(stages, alone, scores=[], trains=[0.0])
    line.train([step.tokens] * (step.sequences // step.data_parallel), 0.0)
    return line.finish(0.0) + _update_time(ranks, constants)


def step_memory(step: PublishedStep) -> tuple[float, float]:
    """Return the bytes that the memory model predicts for the fullest GPU, and the bytes available to tensors."""
    model, trainer, gpu = shape_of(step.model), _trainer(step), _gpu(step)
    num_tokens = step.micro_batch * step.tokens
    states = model_states(model, trainer, "bfloat16")
    activations = activation_bytes(model, trainer, "bfloat16", num_tokens)
    logits = [0.0] * (len(states) - 1) + [logit_bytes(model, trainer, num_tokens)]
    need = max(
        state.weights + state.gradients + state.optimizer + kept + last
        for state, kept, last in zip(states, activations, logits, strict=True)
    )
    return need, gpu.usable_memory


def even_step_time(
    step: PublishedStep, rates: Rates, constants: Constants, triton_attention: dict[str, float]
) -> float:
    """Return the seconds of a step in closed form.

    Every micro-batch takes one turn of the slowest stage, plus one fill of the pipeline.
    """
    ranks, stages = _composed(step, rates, constants, triton_attention)
    num_micro = step.sequences // step.data_parallel // step.micro_batch
    batch = [(step.micro_batch * step.tokens, step.micro_batch * step.tokens**2 / 2, 0)]
    times = stages.forward_times(batch) + stages.backward_times(batch)
    turns = times.reshape(-1, step.pipeline_parallel).sum(axis=0)
    fill = (np.sum(turns) - np.max(turns)) / step.virtual_stages
    return float(num_micro * np.max(turns) + fill) + _update_time(ranks, constants)


def _composed(
    step: PublishedStep, rates: Rates, constants: Constants, triton_attention: dict[str, float]
) -> tuple[Ranks, StageTimes]:
    name = step.gpu.removesuffix("-40")
    if step.framework == "llm-foundry":
        constants = msgspec.structs.replace(constants, attention=triton_attention[name])
    ranks = Ranks(
        model=shape_of(step.model),
        gpu=_gpu(step),
        gpu_name=name,
        trainer=_trainer(step),
        nvlink_domain=step.gpus_per_node,
        dtype="bfloat16",
        computes_in=step.dtype,
        collective=constants.collective,
    )
    layer = Layer(
        ranks=ranks,
        gemm=(rates.wide or rates.gemm)[name],
        experts=rates.experts[name],
        constants=constants,
        narrow=rates.gemm[name] if rates.wide else None,
    )
    return ranks, StageTimes.compose(ranks, layer)


def _update_time(ranks: Ranks, constants: Constants) -> float:
    return ranks.reduce_time() + ranks.update_time() + constants.step_time


def _trainer(step: PublishedStep) -> TrainerConfig:
    return TrainerConfig(
        pool="published",
        data_parallel=step.data_parallel,
        context_parallel=step.context_parallel,
        tensor_parallel=step.tensor_parallel,
        pipeline_parallel=step.pipeline_parallel,
        virtual_stages=step.virtual_stages,
        expert_parallel=step.expert_parallel,
        micro_batch=step.micro_batch,
        max_tokens_per_pass=step.micro_batch * step.tokens,
        zero=step.zero,
        recompute=step.recompute,
        kernels=step.kernels,
        logits=step.logits,
        routing=step.routing,
        dispatch=step.dispatch,
        overlaps_dispatch=step.overlaps,
    )


def _gpu(step: PublishedStep) -> Gpu:
    """Return the GPU of a row. In a node of 4, NVLink joins each pair by a third of its links, without a switch."""
    gpu = load_gpu(step.gpu.removesuffix("-40"))
    if step.gpu.endswith("-40"):
        memory, bandwidth = SMALL_A100
        return msgspec.structs.replace(gpu, memory=memory, memory_bandwidth=bandwidth)
    if step.gpus_per_node == MESH and step.tensor_parallel == 2:
        return msgspec.structs.replace(gpu, nvlink=Bandwidth(gpu.nvlink / (MESH - 1)))
    return gpu


def _name(step: PublishedStep) -> str:
    degrees = f"DP{step.data_parallel} TP{step.tensor_parallel} PP{step.pipeline_parallel}"
    degrees += f" CP{step.context_parallel}" if step.context_parallel > 1 else ""
    experts = f" EP{step.expert_parallel} {step.routing}" if shape_of(step.model).experts else ""
    load = f"{step.sequences} x {step.tokens}"
    return (
        f"{step.model} on {step.num_gpus} {step.gpu}, {degrees}{experts}, ZeRO {step.zero}, {load}"
    )


def _group(step: PublishedStep) -> str:
    kind = "" if shape_of(step.model).experts is None else f", {step.routing} routing"
    attention = kind_of_attention(step.model)
    latent = "" if attention == "plain" else f", {ATTENTION[attention]}"
    context = ", context ranks" if step.context_parallel > 1 else ""
    dtype = "" if step.dtype == "bfloat16" else f", {step.dtype}"
    generation = ", Blackwell" if is_blackwell(step) else ""
    return f"{step.framework}{kind}{latent}{context}{dtype}{generation}"

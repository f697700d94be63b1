"""Compute the bytes of values in each number format, and the formats that replicas and trainers of a run use.

Formats narrower than 16 bits have scales:

| format | bits | bytes and block of a scale | source                                                            |
|--------|------|-------------------------|----------------------------------------------------------------------|
| fp8    | 8    | 4 bytes, 128 x 128      | DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Qwen3's checkpoints   |
| mxfp8  | 8    | 1 byte, 32 values       | OCP Microscaling Formats 1.0                                         |
| int8   | 8    | 4 bytes, a row          | SmoothQuant (arXiv 2211.10438), as vLLM's w8a8                       |
| int4   | 4    | 2.5 bytes, 128 values   | AWQ (arXiv 2306.00978): a scale of 16 bits, a zero point of 4        |
| nvfp4  | 4    | 1 byte, 16 values       | NVIDIA, "Introducing NVFP4" (2025): e4m3 scales                      |
| mxfp4  | 4    | 1 byte, 32 values       | OCP Microscaling Formats 1.0, as gpt-oss (arXiv 2508.10925)          |

Only the linear layers of attention, MLPs and experts are quantised. Embeddings, head, norms and routers
stay wide, as in the checkpoints of these sources.

Replicas and trainers have their own formats: `rollout.dtype`, `rollout.kv_dtype`, `trainer.dtype`. The
default of each is `model.dtype`. A replica either multiplies in the format of its weights (as w8a8, which
quantises inputs too), or widens weights before each product (weight-only). The first needs hardware
support of the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import Gpu
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig

ROW = 0
"""As `Format.group`: one scale for a whole row of a matrix."""


class Format(NamedTuple):
    """A narrow number format."""

    bits: int
    group: int
    """Values that share a scale."""
    scale_bytes: float


FORMATS = {
    "fp8": Format(8, 128 * 128, 4.0),
    "mxfp8": Format(8, 32, 1.0),
    "int8": Format(8, ROW, 4.0),
    "int4": Format(4, 128, 2.5),
    "nvfp4": Format(4, 16, 1.0),
    "mxfp4": Format(4, 32, 1.0),
}
WEIGHT_ONLY = ("int4", "mxfp4")
"""Formats that no GPU multiplies. They are always widened before each product."""
KNOWN = {*BYTES, *FORMATS}
OF_EXPERTS = ("int4", "nvfp4", "mxfp4")
"""Formats that checkpoints of mixtures use for experts alone, with attention in 16 bits. Sources: the
quantisation of gpt-oss, Kimi-K2.5 (int4), and NVIDIA's nvfp4 checkpoints of DeepSeek-V3.1 (but for the output
projection), Kimi-K2.6, MiniMax-M2.5 and Qwen3.5, as PyPI aiconfigurator-core 0.12.0 has their configs.
"""


def is_narrow(dtype: str) -> bool:
    """Return whether a format is narrower than 16 bits and so has scales."""
    return dtype in FORMATS


def width_of(dtype: str, row: float = 4096.0) -> float:
    """Return the bytes of one value with its share of a scale; its matrix has `row` values in a row."""
    if dtype not in FORMATS:
        return float(BYTES[dtype])
    form = FORMATS[dtype]
    return form.bits / 8 + form.scale_bytes / (form.group or row)


def shard_weight_bytes(
    model: ModelShape, dtype: str, wide: str, tensor_parallel: int = 1, expert_parallel: int = 1
) -> float:
    """Return the bytes of weights on one GPU of a replica, with linear layers in `dtype` and the rest in `wide`."""
    whole = model.shard_parameters(tensor_parallel, expert_parallel)
    linear = model.linear_parameters(tensor_parallel, expert_parallel)
    return kept_bytes(whole, linear, dtype, wide, model.hidden_size)


def kept_bytes(whole: float, linear: float, dtype: str, wide: str, row: float) -> float:
    """Return the bytes of `whole` parameters, of which `linear` are in `dtype` and the rest in `wide`."""
    if dtype not in FORMATS:
        return whole * BYTES[dtype]
    return whole * BYTES[wide] + linear * (width_of(dtype, row) - BYTES[wide])


class Precision(NamedTuple):
    """The number formats of a replica."""

    weights: str
    """Format of linear layers."""
    wide: str
    """Format of all other weights, of activations, and of products with widened weights."""
    cache: str
    """Format of the KV cache."""
    is_weight_only: bool

    @property
    def compute(self) -> str:
        """The format in which products of linear layers are computed."""
        return self.wide if self.is_weight_only else self.weights

    def __str__(self) -> str:
        """Return a short text: "fp8", "int4 weights, products in bfloat16", "bfloat16, KV cache in fp8"."""
        text = self.weights
        if self.is_weight_only:
            text += f" weights, products in {self.wide}"
        return text if self.cache == self.wide else f"{text}, KV cache in {self.cache}"


def precision_of(
    weights: str | None, cache: str | None, wide: str, *, weight_only: bool = False
) -> Precision:
    """Return the formats of a replica; None stands for the wide format."""
    kept = weights or wide
    if not is_narrow(kept):
        wide = kept
    only = is_narrow(kept) and (weight_only or kept in WEIGHT_ONLY)
    return Precision(kept, wide, cache or wide, only)


def rollout_precision(rollout: RolloutConfig, model: ModelConfig) -> Precision:
    """Return the formats of a run's replicas."""
    return precision_of(
        rollout.dtype, rollout.kv_dtype, model.dtype, weight_only=rollout.weight_only
    )


def training_dtype(trainer: TrainerConfig, model: ModelConfig) -> str:
    """Return the format in which the trainer multiplies."""
    return trainer.dtype or model.dtype


def trained_dtype(trainer: TrainerConfig, model: ModelConfig) -> str:
    """Return the format of the trainer's weights and activations: never a narrow one."""
    own = training_dtype(trainer, model)
    return model.dtype if own in FORMATS else own


def quantised_bytes(model: ModelShape, own: Precision, trained: str) -> float:
    """Return the bytes of memory traffic for quantising the weights of one push; 0 if replicas keep them wide.

    The weights are read twice, for their scales and for their values, and written once.

    Args:
        model: the model that is pushed.
        own: formats of the replicas.
        trained: format of the trainer's weights.
    """
    if not is_narrow(own.weights):
        return 0.0
    read = 2 * width_of(trained)
    return model.linear_parameters() * (read + width_of(own.weights, model.hidden_size))


# Checks -------------------------------------------------------------------------------------------


def check_units(
    own: Precision,
    gpu: str,
    flops: dict[str, float],
    section: str = "--",
    remedy: str = "--weight-only",
) -> None:
    """Raise `RunError` if a GPU cannot multiply in the format of a replica's weights."""
    if is_narrow(own.compute) and own.compute not in flops:
        text = (
            f"{section}dtype {own.weights!r}: {gpu} does not compute in {own.weights}; "
            f"{remedy} keeps weights in {own.weights} and multiplies in {own.wide}"
        )
        raise RunError("rollout.weight_only", False, OneOf([True]), text, ("rollout.dtype",))


def check_computed_in(own: str, gpu: Gpu, section: str) -> None:
    """Raise `RunError` if a GPU cannot compute in the format of the trainer in `section`."""
    if is_narrow(own) and own not in gpu.flops:
        text = (
            f"{section}.dtype {own!r}: {gpu.name} does not compute in {own}; "
            f"it does in {', '.join(gpu.flops)}"
        )
        raise RunError(f"{section}.dtype", own, OneOf([None, *gpu.flops]), text)

"""Number formats of weights, KV caches and products: bytes of a value with its scales, and what each side of a run uses.

Number formats narrower than 16 bits: bits of a value, and the scales that go with it.

| format | bits | a scale of              | what says so                                                         |
|--------|------|-------------------------|----------------------------------------------------------------------|
| fp8    | 8    | 4 bytes, 128 x 128      | DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Qwen3's checkpoints   |
| mxfp8  | 8    | 1 byte, 32 values       | OCP Microscaling Formats 1.0                                         |
| int8   | 8    | 4 bytes, a row          | SmoothQuant (arXiv 2211.10438), as vLLM's w8a8                       |
| int4   | 4    | 2.5 bytes, 128 values   | AWQ (arXiv 2306.00978): a scale of 16 bits, a zero point of 4        |
| nvfp4  | 4    | 1 byte, 16 values       | NVIDIA, "Introducing NVFP4" (2025): e4m3 scales                      |

Quantised are the linear layers of attention, MLPs and experts; embeddings, head, norms and routers stay wide, as those
checkpoints have them.

What a run's replicas and trainers keep and compute in, apart: `rollout.dtype`, `rollout.kv_dtype`, `trainer.dtype`.

All are those of `model.dtype` where a run file does not say. A replica multiplies what it keeps (w8a8: inputs are
quantised too), or widens its weights before each product (weight-only); a GPU needs units for the former.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import Gpu
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig

ROW = 0
"""Stands for values that share a scale in a whole row of a matrix."""


class Format(NamedTuple):
    """How a value is kept."""

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
}
WEIGHT_ONLY = ("int4",)
"""Formats that no GPU multiplies: they are widened before each product."""
KNOWN = {*BYTES, *FORMATS}


def is_narrow(dtype: str) -> bool:
    """Whether values of a format have scales beside them."""
    return dtype in FORMATS


def width_of(dtype: str, row: float = 4096.0) -> float:
    """Return the bytes of one value, its share of a scale among them; `row` values are in a row of its matrix."""
    if dtype not in FORMATS:
        return float(BYTES[dtype])
    form = FORMATS[dtype]
    return form.bits / 8 + form.scale_bytes / (form.group or row)


def shard_weight_bytes(
    model: ModelShape, dtype: str, wide: str, tensor_parallel: int = 1, expert_parallel: int = 1
) -> float:
    """Return the bytes of weights on a GPU of a replica whose linear layers are kept in `dtype`, all else in `wide`."""
    whole = model.shard_parameters(tensor_parallel, expert_parallel)
    linear = model.linear_parameters(tensor_parallel, expert_parallel)
    return kept_bytes(whole, linear, dtype, wide, model.hidden_size)


def kept_bytes(whole: float, linear: float, dtype: str, wide: str, row: float) -> float:
    """Return the bytes of `whole` parameters, those of linear layers among them in `dtype`, all else in `wide`."""
    if dtype not in FORMATS:
        return whole * BYTES[dtype]
    return whole * BYTES[wide] + linear * (width_of(dtype, row) - BYTES[wide])


class Precision(NamedTuple):
    """Formats of a replica."""

    weights: str
    """Of linear layers."""
    wide: str
    """Of all other weights, of activations, and of products where weights are widened."""
    cache: str
    is_weight_only: bool

    @property
    def compute(self) -> str:
        """What products of linear layers are computed in."""
        return self.wide if self.is_weight_only else self.weights

    def __str__(self) -> str:
        """Say it in a few words: "fp8", "int4 weights, products in bfloat16", "bfloat16, KV cache in fp8"."""
        text = self.weights
        if self.is_weight_only:
            text += f" weights, products in {self.wide}"
        return text if self.cache == self.wide else f"{text}, KV cache in {self.cache}"


def precision_of(
    weights: str | None, cache: str | None, wide: str, *, weight_only: bool = False
) -> Precision:
    """Return formats, those that are None being the wide one."""
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
    """Return what the trainer multiplies in."""
    return trainer.dtype or model.dtype


def trained_dtype(trainer: TrainerConfig, model: ModelConfig) -> str:
    """Return what the trainer keeps weights and activations in: the wide format where it multiplies in a narrow one."""
    own = training_dtype(trainer, model)
    return model.dtype if own in FORMATS else own


def quantised_bytes(model: ModelShape, own: Precision, trained: str) -> float:
    """Bytes of memory traffic in which the weights of one push are brought to a narrow format; 0 where they stay wide.

    They are read twice, for their scales and for their values, and written once.

    Args:
        model: the model that is pushed.
        own: formats of the replicas.
        trained: format in which the trainer keeps its weights.
    """
    if not is_narrow(own.weights):
        return 0.0
    read = 2 * width_of(trained)
    return model.linear_parameters() * (read + width_of(own.weights, model.hidden_size))


# What a GPU cannot do -----------------------------------------------------------------------------


def check_units(
    own: Precision,
    gpu: str,
    flops: dict[str, float],
    section: str = "--",
    remedy: str = "--weight-only",
) -> None:
    """Raise `RunError` where a GPU cannot multiply weights as a replica keeps them."""
    if is_narrow(own.compute) and own.compute not in flops:
        text = (
            f"{section}dtype {own.weights!r}: {gpu} does not compute in {own.weights}; "
            f"{remedy} keeps weights so and multiplies in {own.wide}"
        )
        raise RunError("rollout.weight_only", False, OneOf([True]), text, ("rollout.dtype",))


def check_computed_in(own: str, gpu: Gpu, section: str) -> None:
    """Raise `RunError` where a GPU does not compute in the format of the trainer with a section."""
    if is_narrow(own) and own not in gpu.flops:
        text = (
            f"{section}.dtype {own!r}: {gpu.name} does not compute in {own}; "
            f"it does in {', '.join(gpu.flops)}"
        )
        raise RunError(f"{section}.dtype", own, OneOf([None, *gpu.flops]), text)

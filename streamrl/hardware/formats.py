"""Number formats narrower than 16 bits: bits of a value, and the scales that go with it.

| format | bits | a scale of              | what says so                                                         |
|--------|------|-------------------------|----------------------------------------------------------------------|
| fp8    | 8    | 4 bytes, 128 x 128      | DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Qwen3's checkpoints   |
| mxfp8  | 8    | 1 byte, 32 values       | OCP Microscaling Formats 1.0                                         |
| int8   | 8    | 4 bytes, a row          | SmoothQuant (arXiv 2211.10438), as vLLM's w8a8                       |
| int4   | 4    | 2.5 bytes, 128 values   | AWQ (arXiv 2306.00978): a scale of 16 bits, a zero point of 4        |
| nvfp4  | 4    | 1 byte, 16 values       | NVIDIA, "Introducing NVFP4" (2025): e4m3 scales                      |

Quantised are the linear layers of attention, MLPs and experts; embeddings, head, norms and routers stay wide, as those
checkpoints have them.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.model_shape import BYTES, ModelShape

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

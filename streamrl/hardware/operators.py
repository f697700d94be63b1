"""What each operator must compute and move, and along which axes its measured table is interpolated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from streamrl.hardware.linear_attention import STATE_BYTES
from streamrl.hardware.tables import Floats

HEAD_DIM = 128
"""Width of a head in every attention table."""
LATENT_DIM, LATENT_ROPE_DIM = 512, 64
"""Widths of DeepSeek-V3's compressed keys and values, the only ones measured."""

LINEAR_CHUNK = 64
"""Tokens that gated delta kernels put together (flash-linear-attention)."""

Axes: TypeAlias = Mapping[str, Floats]
"""Values of an operator's axes by name; they broadcast against each other."""


class Work(NamedTuple):
    """What one call of an operator has to do on one GPU."""

    flops: Floats
    memory: Floats
    """Bytes through the GPU's memory."""
    wire: Floats
    """Bytes that the GPU sends over NVLink."""


@dataclass(frozen=True)
class Peak:
    """A datasheet's promises: FLOP/s of one dtype, bytes/s of memory and of NVLink, and bytes of a value."""

    flops: float
    memory: float
    nvlink: float
    width: float


@dataclass(frozen=True)
class Operator:
    """One kernel or collective, as its tables describe it."""

    count: Callable[[Axes, float], Work]
    """Work of a shape; the second argument is the bytes of a value."""
    coordinates: Callable[[Axes], tuple[Floats, ...]] = lambda axes: tuple(axes.values())
    """Axes along which seconds are smooth, from those by which the rows are named."""
    fills_holes: bool = True
    """Whether a shape that was not measured is estimated from its neighbours along every axis."""
    is_collective: bool = False
    reads_caches: bool = False
    """Whether the last coordinate counts caches, each of as many tokens as the column says."""

    def roofline(self, peak: Peak) -> Callable[[Axes], Floats]:
        """Return seconds at the peak: the longest of arithmetic, memory traffic and wire."""

        def seconds(axes: Axes) -> Floats:
            work = self.count(axes, peak.width)
            compute, memory = work.flops / peak.flops, work.memory / peak.memory
            return np.maximum(np.maximum(compute, memory), work.wire / peak.nvlink)

        return seconds


NOTHING = np.zeros(1)


def _gemm(axes: Axes, width: float) -> Work:
    """(m, k) times (k, n); the result is written in 16 bits."""
    m, n, k = axes["m"], axes["n"], axes["k"]
    return Work(2 * m * n * k, width * (m + n) * k + 2 * m * n, NOTHING)


def _quantise(axes: Axes, width: float) -> Work:
    """(m, k) activations of 16 bits become fp8 with a scale for each row."""
    return Work(NOTHING, (2 + width) * axes["m"] * axes["k"], NOTHING)


def _decode_attention(axes: Axes, width: float) -> Work:
    """Every new token reads the keys and values of its whole context."""
    read = axes["batch"] * axes["context"] * HEAD_DIM
    return Work(4 * read * axes["heads"], 2 * width * read * axes["kv_heads"], NOTHING)


def _caches(axes: Axes) -> tuple[Floats, ...]:
    """Query heads that share a cache, and independent caches: by these a kernel divides its work."""
    return axes["heads"] / axes["kv_heads"], axes["batch"] * axes["kv_heads"]


def _prefill_attention(axes: Axes, width: float) -> Work:
    """Causal: the i-th token attends to i tokens."""
    tokens = axes["batch"] * axes["context"] * HEAD_DIM
    flops = 4 * tokens * axes["heads"] * (axes["context"] + 1) / 2
    return Work(flops, 2 * width * tokens * (axes["heads"] + axes["kv_heads"]), NOTHING)


def _latent_decode_attention(axes: Axes, width: float) -> Work:
    """Latent attention with absorbed projections: all heads read one compressed cache."""
    read = axes["batch"] * axes["context"]
    flops = 2 * read * axes["heads"] * (2 * LATENT_DIM + LATENT_ROPE_DIM)
    return Work(flops, width * read * (LATENT_DIM + LATENT_ROPE_DIM), NOTHING)


def _linear_decode(axes: Axes, width: float) -> Work:
    """One token of each rollout: its key reads the state of every value head, changes it, and its query reads it."""
    states = axes["batch"] * axes["heads"] * HEAD_DIM**2
    return Work(6 * states, 2 * STATE_BYTES * states, NOTHING)


def _linear_prefill(axes: Axes, width: float) -> Work:
    """Chunks of tokens: products within each, of the keys with keys and with queries, and with the state before it."""
    tokens = axes["tokens"] * axes["heads"] * HEAD_DIM
    flops = tokens * (6 * HEAD_DIM + 8 * LINEAR_CHUNK)
    return Work(flops, 8 * width * tokens, NOTHING)


def _moe(axes: Axes, width: float) -> Work:
    """Gated MLPs of the experts on one GPU, tokens dealt out evenly: an expert that has any is read once.

    `tokens` are those of all GPUs that share the layer.
    """
    split = axes["tensor_parallel"] * axes["expert_parallel"]
    one_expert = 3 * axes["hidden"] * axes["intermediate"] / split
    chosen = axes["tokens"] * axes["topk"]
    num_read = np.minimum(axes["experts"], chosen)
    return Work(2 * chosen * one_expert, width * num_read * one_expert, NOTHING)


def weights_read(operator: str, axes: Axes) -> Floats:
    """Return how many values of weights a product reads: all of a matrix, or those of the experts that tokens go to.

    Raises:
        KeyError: the operator reads none.
    """
    return {"gemm": _weights_of_gemm, "moe": _weights_of_experts}[operator](axes)


def _weights_of_gemm(axes: Axes) -> Floats:
    return axes["n"] * axes["k"]


def _weights_of_experts(axes: Axes) -> Floats:
    split = axes["tensor_parallel"] * axes["expert_parallel"]
    one_expert = 3 * axes["hidden"] * axes["intermediate"] / split
    return np.minimum(axes["experts"], axes["tokens"] * axes["topk"]) * one_expert


def _ring(factor: float) -> Callable[[Axes, float], Work]:
    """A ring collective: each of g GPUs sends `factor` (g-1)/g of the whole message."""

    def count(axes: Axes, width: float) -> Work:
        gpus = axes["gpus"]
        return Work(NOTHING, NOTHING, factor * (gpus - 1) / gpus * axes["bytes"])

    return count


OPERATORS = {
    "gemm": Operator(_gemm),
    "quantise": Operator(_quantise),
    "decode_attention": Operator(_decode_attention, _caches, fills_holes=False, reads_caches=True),
    "prefill_attention": Operator(_prefill_attention),
    "latent_decode_attention": Operator(
        _latent_decode_attention, fills_holes=False, reads_caches=True
    ),
    "linear_decode": Operator(_linear_decode),
    "linear_prefill": Operator(_linear_prefill),
    "moe": Operator(_moe),
    "all_reduce": Operator(_ring(2.0), is_collective=True),
    "all_gather": Operator(_ring(1.0), is_collective=True),
    "all_to_all": Operator(_ring(1.0), is_collective=True),
    "reduce_scatter": Operator(_ring(1.0), is_collective=True),
}

"""Compute the seconds of a mixture layer's experts in inference: imbalance, expert parallelism, padded or skipped rows.

Imbalance. Routers distribute tokens unevenly, but tables were measured with even shares. A step
with few tokens is limited by reading expert weights. Each token chooses `topk` of `experts`. If all
are equally likely, an expert stays unread with probability (1 - topk/experts)^tokens. If GPUs share
the experts, all wait for the GPU that reads most.

Padded rows: fp8 experts in DeepGEMM's contiguous layout, as vLLM 0.11.1 calls it. vLLM uses
DeepGEMM for experts with a scale for each block of 128 by 128, at any batch since its pull 26197.
DeepGEMM has kernels for Hopper and for Blackwell of datacenters. Elsewhere vLLM uses Triton
(`support_deep_gemm` of its platforms/cuda.py). An expert's rows begin at a whole block of 128. The
host does not know how many blocks will be used. So products run over the maximum: one block for
each expert on the GPU, plus the rows of all tokens. Blocks without tokens are computed too, with
the weights of the first expert (`deepgemm_moe_permute` of its deep_gemm_utils.py). The same holds
for the activation between both products. At a small batch this costs more than fp8 saves.

Skipped rows: kernels for int4 weights (Marlin) on several GPUs, measured with all experts on one
GPU. Each of e ranks receives tokens with all their choices, and skips those of experts on other
ranks. This has two costs. Marlin chooses its block size, 8 to 64 rows of one expert, as if all
choices were for its own experts. So rows are padded for e times as many tokens. And the activation
and the sum run over all rows:

    seconds = fixed + (seconds of one GPU at T tokens - fixed) x experts read / experts read at T
            + bytes of rows that were skipped / (PASSING x bandwidth)

T is the number of tokens for which an expert on one GPU has as many rows as here, including
padding. SGLang 0.5.14 and vLLM 0.24.0 were measured with Kimi K2's experts (7168 x 2048, 8 of 384)
on 2 to 128 ranks (PyPI aiconfigurator-core 0.12.0, Apache-2.0). Computed from SGLang 0.5.14's own
rows of one GPU, its ranks are within 17 % from 16 tokens on. Computed from the 0.5.10 tables here,
the median error is 6 % on H200 and 13 % on H100. That of vLLM is 10 % and 6 %. The largest error is
50 %, where the rows of one GPU are noisy.

Dispatched tokens: with attention ranks, a GPU only receives the tokens of its own experts. In
tables of many expert ranks, every GPU has all tokens and skips those of other experts. At 16,384
tokens, 128 ranks take as long as 32. With dispatch, a GPU of e ranks does the same work as one of
`NEAR` ranks with the same number of tokens per expert, in addition to the fixed time of a call:

    seconds = fixed + (seconds of NEAR ranks - fixed) x experts that it reads / experts that one of NEAR ranks reads
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.operator_tables import Floats
from streamrl.sim.costs.kernels import Estimate, Kernels

BLOCK = 128
"""Rows of a block."""
PRODUCT_TIME = 10e-6
"""Seconds of a grouped product without its blocks. A GPU with one expert takes 35.6 us for two
products, and each further expert adds 15.7 us (profiles/measured/h800/moe.deepgemm.fp8.csv).
"""
SMALL_KERNELS, SMALL_TIME = 9, 4.5e-6
"""Number of kernels around the two products, and the seconds of one with little work. They
quantise rows, count them by expert, clear and write the experts of blocks, scatter rows, lay out
scales, activate, quantise again, and gather. Eight of them and the two Triton products take 35 us
(vLLM 0.19.0 on H200 in PyPI aiconfigurator-core 0.12.0: one token, one expert a GPU).
"""
ACTIVATION_BYTES = 9
"""Bytes per row and channel between the products: gate and up are read, and their product is
written in 16 bits. Then it is read again and written in 8 bits.
"""


def padded_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    num_read: Floats,
    hidden_size: int,
    tensor_parallel: int,
    expert_parallel: int,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens that read `num_read` experts' weights.

    A block takes the longer of two times: its products at the GPU's achieved FLOP/s, and reading
    its weights. Weights that another block of the same expert has read are not read again.
    """
    gpu, held = kernels.gpu, experts.num_experts / expert_parallel
    width = experts.gated_width / (tensor_parallel if expert_parallel == 1 else 1)
    weights = 3.0 * hidden_size * width
    computed = 2 * BLOCK * weights / (gpu.flops["fp8"] * gpu.roofline.block_efficiency)
    read = weights / (gpu.memory_bandwidth * gpu.roofline.block_efficiency)
    rows = tokens * experts.experts_per_token + held * (BLOCK - 1)
    blocks = np.ceil(rows / BLOCK)
    seconds = num_read * max(computed, read) + (blocks - num_read) * computed
    seconds = seconds + 2 * PRODUCT_TIME + SMALL_KERNELS * SMALL_TIME
    source = f"blocks of 128 rows in fp8 on {gpu.name}: {gpu.roofline.block_efficiency:.0%} of its peak, as DeepGEMM on H800 and H20"
    products = Estimate(seconds, np.zeros_like(seconds), (source,))
    return products + kernels.traffic(blocks * (BLOCK * ACTIVATION_BYTES * width))


FULL = 0.9 * 64
"""Rows per expert from which blocks are the largest: a block size is chosen when rows fill nine
tenths of it (`fused_marlin_moe`).
"""
PASSING = 0.4
"""Share of the bandwidth for rows that are skipped without a product. With 128 ranks and 4,096
tokens or more, SGLang 0.5.14 and vLLM 0.24.0 reach 1.3 to 1.9 TB/s for these bytes on H100 and
H200.
"""
ROW_BYTES = 6, 2
"""Bytes of a row in 16 bits: per channel of the expert (gate and up are read, their product
written), and per channel of the model (read by the sum).
"""


def skipping_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    num_read: Floats,
    hidden_size: int,
    ranks: int,
    given: float = 1.0,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all `ranks`.

    Args:
        kernels: of the GPUs; their table of experts has one expert rank only.
        tokens: (n,) of a pass.
        experts: of a layer.
        num_read: (n,) experts whose weights the fullest GPU reads.
        hidden_size: of the model.
        ranks: GPUs that share the experts; each has whole experts.
        given: share of the tokens that a GPU receives.
    """
    count, chosen = experts.num_experts, experts.experts_per_token
    shape = {
        "hidden": float(hidden_size),
        "intermediate": float(experts.gated_width),
        "topk": float(chosen),
        "experts": float(count),
        "tensor_parallel": 1.0,
        "expert_parallel": 1.0,
    }
    rows = tokens * chosen / count
    computed = np.maximum(rows, np.minimum(given * ranks * rows, FULL))
    alone = computed * count / chosen
    found = kernels.time("moe", alone, **shape)
    fixed = np.minimum(_fixed(kernels, experts, shape), found.seconds)
    share = num_read / np.minimum(count, alone * chosen)
    seconds = fixed + (found.seconds - fixed) * share
    products = found.taking(seconds)
    channels = ROW_BYTES[0] * experts.intermediate_size + ROW_BYTES[1] * hidden_size
    skipped = tokens * chosen * max(0.0, given - 1 / ranks)
    return products + _passed(kernels, skipped * channels)


def _fixed(kernels: Kernels, experts: Experts, shape: Mapping[str, float]) -> float:
    """Return the fixed seconds of a call: those for one token, minus the reads of its experts."""
    chosen, more = experts.experts_per_token, experts.num_experts / 2
    if more <= chosen:
        return 0.0
    one, other = kernels.time("moe", np.array([1.0, more / chosen]), **shape).seconds
    return max(0.0, float(one - (other - one) / (more - chosen) * chosen))


def _passed(kernels: Kernels, num_bytes: Floats) -> Estimate:
    """Return the seconds to skip the rows of other GPUs' experts."""
    gpu = kernels.gpu
    seconds = num_bytes / (PASSING * gpu.memory_bandwidth)
    source = f"rows of experts elsewhere on {gpu.name}: {PASSING:.0%} of its bandwidth, as SGLang 0.5.14 and vLLM 0.24.0 on H100 and H200"
    return Estimate(seconds, np.zeros_like(seconds), (source,))


FURTHEST = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070, 64: 2.344}
"""Mean excess of the largest of n normal values over their mean, in standard deviations."""


def experts_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    hidden_size: int,
    tensor_parallel: int,
    expert_parallel: int,
    *,
    is_padded: bool = False,
    num_fused: int = 0,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all GPUs that share the layer.

    A table of even shares is read at the number of tokens that reads as many experts as the fullest
    GPU. From there it grows with the tokens as the table does.

    Args:
        kernels: of the GPUs.
        tokens: (n,) of a pass.
        experts: of a layer.
        hidden_size: of the model.
        tensor_parallel: GPUs that share a layer.
        expert_parallel: GPUs that share its experts; each has whole experts.
        is_padded: whether fp8 experts use padded blocks (`streamrl.sim.costs.experts`).
        num_fused: shared experts that are computed with the routed ones.
    """
    num_read = num_experts_read(tokens, experts, expert_parallel) + num_fused
    if is_padded and kernels.dtype == "fp8":
        degrees = (hidden_size, tensor_parallel, expert_parallel)
        return padded_time(kernels, tokens, experts, num_read, *degrees)
    if expert_parallel > 1 and not kernels.has_expert_ranks:
        return skipping_time(kernels, tokens, experts, num_read, hidden_size, expert_parallel)
    shape = {
        "hidden": float(hidden_size),
        "intermediate": float(experts.gated_width),
        "topk": float(experts.experts_per_token),
        "experts": float(experts.num_experts),
        "tensor_parallel": 1.0 if expert_parallel > 1 else float(tensor_parallel),
        "expert_parallel": float(expert_parallel),
    }
    if not kernels.has_even_shares(expert_parallel):
        return kernels.time("moe", tokens, **shape)
    all_read = experts.num_experts / experts.experts_per_token
    alike = num_read / experts.experts_per_token
    read = kernels.time("moe", alike * expert_parallel, **shape)
    grown = kernels.time("moe", np.maximum(tokens, all_read), **shape)
    whole = kernels.time("moe", np.full(1, all_read), **shape)
    growth = np.maximum(1.0, grown.seconds / whole.seconds)
    return read.taking(read.seconds * growth)


def num_experts_read(tokens: Floats, experts: Experts, expert_parallel: int = 1) -> Floats:
    """Return the mean number of experts that the fullest of `expert_parallel` GPUs reads."""
    held = experts.num_experts / expert_parallel
    missed = (1 - experts.experts_per_token / experts.num_experts) ** tokens
    spread = np.sqrt(held * missed * (1 - missed))
    furthest = FURTHEST.get(expert_parallel, sqrt(2 * np.log(expert_parallel)))
    read: Floats = np.minimum(held, held * (1 - missed) + furthest * spread)
    return read


def _wide_experts_time(
    kernels: Kernels, tokens: Floats, experts: Experts, hidden_size: int, ranks: int
) -> Estimate:
    """Return the seconds of DeepGEMM's experts: masked for the tokens of low-latency dispatch, else contiguous."""
    shape = {
        "hidden": float(hidden_size),
        "intermediate": float(experts.gated_width),
        "topk": float(experts.experts_per_token),
        "experts": float(experts.num_experts),
        "tensor_parallel": 1.0,
        "expert_parallel": float(ranks),
    }
    few, many = (kernels.time(name, tokens, **shape) for name in ("masked_moe", "contiguous_moe"))
    is_few = tokens / ranks <= MOST_DIRECT
    return few.where(is_few, many)


MOST_DIRECT = 256
"""Most tokens per GPU for which DeepEP's low-latency kernels are used (deepseek-ai/DeepEP 0297fc8,
docs/legacy.md, MIT: advice about buffers). vLLM dispatches as many at once (VLLM_MOE_DP_CHUNK_SIZE).
"""
NEAR = 8
"""Largest number of ranks for which tables are used directly: the ranks of a node."""


def dispatched_experts_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    hidden_size: int,
    ranks: int,
    *,
    is_padded: bool = False,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all `ranks` GPUs, sent by all-to-all.

    Where DeepGEMM's experts after DeepEP's dispatch were measured, these tables count.

    The padding of blocks counts only the rows that a GPU receives. Skipped choices of received
    tokens count too (`streamrl.sim.costs.experts`).
    """
    if kernels.has_table("masked_moe") and kernels.kept == kernels.dtype:
        return _wide_experts_time(kernels, tokens, experts, hidden_size, ranks)
    num_read = num_experts_read(tokens, experts, ranks)
    if ranks > 1 and not kernels.has_expert_ranks:
        given = 1 - (1 - 1 / ranks) ** experts.experts_per_token
        return skipping_time(kernels, tokens, experts, num_read, hidden_size, ranks, given)
    if is_padded and kernels.dtype == "fp8":
        return padded_time(kernels, tokens / ranks, experts, num_read, hidden_size, 1, ranks)

    def of_ranks(some: Floats, degree: int) -> Estimate:
        return experts_time(kernels, some, experts, hidden_size, 1, degree)

    near = min(ranks, NEAR)
    found = of_ranks(tokens, near)
    if ranks == near:
        return found
    fixed = min(float(of_ranks(np.ones(1), near).seconds[0]), float(found.seconds.min()))
    reads = num_read / num_experts_read(tokens, experts, near)
    seconds = fixed + (found.seconds - fixed) * reads
    return found.taking(seconds)

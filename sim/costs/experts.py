"""Seconds of a mixture layer's experts in inference: imbalance, expert parallelism, and kernels that pad or skip rows.

Seconds of experts in fp8 where rows are padded to whole blocks: DeepGEMM's contiguous layout, as vLLM 0.11.1 calls it.

vLLM takes DeepGEMM for experts with a scale for each block of 128 by 128, at any batch since its pull 26197. An expert's
rows begin at a whole block of 128, and as the host does not know how many blocks will be used, products run over the most
that there may be: one for each expert that the GPU holds, and the rows of all tokens. Blocks of experts that no token
chose are computed too, with weights of the first one (`deepgemm_moe_permute` of its deep_gemm_utils.py), and so is the
activation between both products. At a small batch that outweighs the bytes that fp8 saves.

Seconds of experts that GPUs share out, of kernels that were measured where one GPU has them all: Marlin's, weights in int4.

A GPU of e ranks is given tokens with all their choices, and skips those of others' experts. That leaves two things beside
its share. Marlin chooses its blocks, 8 to 64 rows of one expert, as if all choices were of experts that it holds, so an
expert's rows are padded to what e times as many would fill. And the activation and the sum pass over rows of all choices:

    seconds = fixed + (seconds of one GPU at T tokens - fixed) x experts read / experts read at T
            + bytes of rows that were skipped / (PASSING x bandwidth)

T tokens give an expert of one GPU as many rows as are computed here, padding included. SGLang 0.5.14 and vLLM 0.24.0 were
measured with Kimi K2's experts (7168 x 2048, 8 of 384) on 2 to 128 ranks (PyPI aiconfigurator-core 0.12.0, Apache-2.0). From
SGLang 0.5.14's own rows of one GPU, its ranks follow within 17 % from 16 tokens on. From the tables here, of 0.5.10, they are
off by 6 % in median on H200 and 13 % on H100, vLLM's by 10 % and 6 %; by half at worst, where the rows of one GPU are noisy.

Seconds of a layer's experts: routers deal tokens out unevenly, and tables were measured with even shares.

A step of few tokens is bound by the experts whose weights it reads. Of `experts` each token chooses `topk`, so
that under even odds each stays unread with probability (1 - topk/experts)^tokens; where GPUs share the experts
out, all wait for the one that has most to read.

Seconds of a layer's experts on a GPU that is sent the tokens of its own experts alone, as with attention ranks.

Tables of many expert ranks were measured where every GPU has all tokens and passes over those of the others: at 16,384 of
them 128 ranks take as long as 32. Where tokens are sent, a GPU of e ranks does for its experts what one of `NEAR` ranks
does for as many tokens of each, beside what any call takes:

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
"""Seconds of a grouped product beside its blocks: a GPU with one expert takes 35.6 us for two products, each further
expert adds 15.7 us (profiles/measured/h800/moe.deepgemm.fp8.csv)."""
SMALL_KERNELS, SMALL_TIME = 9, 4.5e-6
"""Kernels around the two products, and the seconds of one with little to do. They quantise rows, count them by expert,
clear and write the blocks' experts, scatter rows, lay scales out, activate, quantise again, and gather; eight such and
the two products of Triton take 35 us (profiles/measured/h200/moe.vllm.fp8.csv: one token, one expert a GPU)."""
ACTIVATION_BYTES = 9
"""Bytes a row and channel between the products: gate and up are read and their product written in 16 bits, which is read
again and written in 8."""


def padded_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    num_read: Floats,
    hidden_size: int,
    tensor_parallel: int,
    expert_parallel: int,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens, which read the weights of `num_read`.

    A block takes what its products do of the FLOPs that the GPU reaches, or what its weights take of the bandwidth, if
    that is more and they are not those of another block.
    """
    gpu, held = kernels.gpu, experts.num_experts / expert_parallel
    width = experts.intermediate_size / (tensor_parallel if expert_parallel == 1 else 1)
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
"""Rows of an expert from which on blocks are the largest: a block is taken as soon as rows fill nine tenths of it
(`fused_marlin_moe`)."""
PASSING = 0.4
"""Share of the bandwidth at which rows that no product was computed for are passed over: with 128 ranks and 4,096 tokens or
more, SGLang 0.5.14 and vLLM 0.24.0 take 1.3 to 1.9 TB/s for these bytes on H100 and H200."""
ROW_BYTES = 6, 2
"""Of a row in 16 bits, for each channel of the expert (gate and up are read, their product written) and of the model (what
the sum reads)."""


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
        kernels: of the GPUs; their table of experts has one expert rank alone.
        tokens: (n,) of a pass.
        experts: of a layer.
        num_read: (n,) experts whose weights the fullest GPU reads.
        hidden_size: of the model.
        ranks: GPUs that share the experts out, whole ones each.
        given: share of the tokens that a GPU is given.
    """
    count, chosen = experts.num_experts, experts.experts_per_token
    shape = {
        "hidden": float(hidden_size),
        "intermediate": float(experts.intermediate_size),
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
    products = Estimate(seconds, found.unmeasured * (seconds / found.seconds), found.sources)
    channels = ROW_BYTES[0] * experts.intermediate_size + ROW_BYTES[1] * hidden_size
    skipped = tokens * chosen * max(0.0, given - 1 / ranks)
    return products + _passed(kernels, skipped * channels)


def _fixed(kernels: Kernels, experts: Experts, shape: Mapping[str, float]) -> float:
    """Return the seconds that a call takes beside its experts: what is left of a token's without those it reads."""
    chosen, more = experts.experts_per_token, experts.num_experts / 2
    if more <= chosen:
        return 0.0
    one, other = kernels.time("moe", np.array([1.0, more / chosen]), **shape).seconds
    return max(0.0, float(one - (other - one) / (more - chosen) * chosen))


def _passed(kernels: Kernels, num_bytes: Floats) -> Estimate:
    """Return the seconds in which rows of other GPUs' experts are passed over."""
    gpu = kernels.gpu
    seconds = num_bytes / (PASSING * gpu.memory_bandwidth)
    source = f"rows of experts elsewhere on {gpu.name}: {PASSING:.0%} of its bandwidth, as SGLang 0.5.14 and vLLM 0.24.0 on H100 and H200"
    return Estimate(seconds, np.zeros_like(seconds), (source,))


EVEN = "even"
"""Distribution of a table whose tokens were dealt out evenly."""
FURTHEST = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070, 64: 2.344}
"""Standard deviations by which the largest of n normal values exceeds their mean, on average."""


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

    A table of even shares is asked where it reads as many experts as the fullest GPU does, and grows from
    there as it does with tokens.

    Args:
        kernels: of the GPUs.
        tokens: (n,) of a pass.
        experts: of a layer.
        hidden_size: of the model.
        tensor_parallel: GPUs that share a layer.
        expert_parallel: GPUs that share its experts out, whole ones each.
        is_padded: whether those in fp8 go in padded blocks (`streamrl.sim.costs.experts`).
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
        "intermediate": float(experts.intermediate_size),
        "topk": float(experts.experts_per_token),
        "experts": float(experts.num_experts),
        "tensor_parallel": 1.0 if expert_parallel > 1 else float(tensor_parallel),
        "expert_parallel": float(expert_parallel),
    }
    if not kernels.distribution("moe").startswith(EVEN):
        return kernels.time("moe", tokens, **shape)
    all_read = experts.num_experts / experts.experts_per_token
    alike = num_read / experts.experts_per_token
    read = kernels.time("moe", alike * expert_parallel, **shape)
    grown = kernels.time("moe", np.maximum(tokens, all_read), **shape)
    whole = kernels.time("moe", np.full(1, all_read), **shape)
    growth = np.maximum(1.0, grown.seconds / whole.seconds)
    return Estimate(read.seconds * growth, read.unmeasured * growth, read.sources)


def num_experts_read(tokens: Floats, experts: Experts, expert_parallel: int = 1) -> Floats:
    """Return how many experts the fullest of `expert_parallel` GPUs reads, on average."""
    held = experts.num_experts / expert_parallel
    missed = (1 - experts.experts_per_token / experts.num_experts) ** tokens
    spread = np.sqrt(held * missed * (1 - missed))
    furthest = FURTHEST.get(expert_parallel, sqrt(2 * np.log(expert_parallel)))
    read: Floats = np.minimum(held, held * (1 - missed) + furthest * spread)
    return read


NEAR = 8
"""Ranks up to which tables are asked as they are: those of a node."""


def dispatched_experts_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    hidden_size: int,
    ranks: int,
    *,
    is_padded: bool = False,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all `ranks` GPUs.

    Padded blocks (`streamrl.sim.costs.experts`) are counted, of the rows that a GPU is sent, and so are choices that it skips
    of tokens that it is sent (`streamrl.sim.costs.experts`).
    """
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
    return Estimate(seconds, found.unmeasured * (seconds / found.seconds), found.sources)

"""Seconds of experts in fp8 where rows are padded to whole blocks: DeepGEMM's contiguous layout, as vLLM 0.11.1 calls it.

vLLM takes DeepGEMM for experts with a scale for each block of 128 by 128, at any batch since its pull 26197. An expert's
rows begin at a whole block of 128, and as the host does not know how many blocks will be used, products run over the most
that there may be: one for each expert that the GPU holds, and the rows of all tokens. Blocks of experts that no token
chose are computed too, with weights of the first one (`deepgemm_moe_permute` of its deep_gemm_utils.py), and so is the
activation between both products. At a small batch that outweighs the bytes that fp8 saves.
"""

from __future__ import annotations

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.tables import Floats
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

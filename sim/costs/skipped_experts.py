"""Seconds of experts that GPUs share out, of kernels that were measured where one GPU has them all: Marlin's, weights in int4.

A GPU of e ranks is given tokens with all their choices, and skips those of others' experts. That leaves two things beside
its share. Marlin chooses its blocks, 8 to 64 rows of one expert, as if all choices were of experts that it holds, so an
expert's rows are padded to what e times as many would fill. And the activation and the sum pass over rows of all choices:

    seconds = fixed + (seconds of one GPU at T tokens - fixed) x experts read / experts read at T
            + bytes of rows that were skipped / (PASSING x bandwidth)

T tokens give an expert of one GPU as many rows as are computed here, padding included. SGLang 0.5.14 and vLLM 0.24.0 were
measured with Kimi K2's experts (7168 x 2048, 8 of 384) on 2 to 128 ranks (PyPI aiconfigurator-core 0.12.0, Apache-2.0). From
SGLang 0.5.14's own rows of one GPU, its ranks follow within 17 % from 16 tokens on. From the tables here, of 0.5.10, they are
off by 6 % in median on H200 and 13 % on H100, vLLM's by 10 % and 6 %; by half at worst, where the rows of one GPU are noisy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.tables import Floats
from streamrl.sim.costs.kernels import Estimate, Kernels

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

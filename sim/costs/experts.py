"""Seconds of a layer's experts: routers deal tokens out unevenly, and tables were measured with even shares.

A step of few tokens is bound by the experts whose weights it reads. Of `experts` each token chooses `topk`, so
that under even odds each stays unread with probability (1 - topk/experts)^tokens; where GPUs share the experts
out, all wait for the one that has most to read.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from sim.costs.kernels import Estimate, Kernels
from streamrl.hardware.model_shape import Experts
from streamrl.hardware.tables import Floats

EVEN = "even"
"""Distribution of a table whose tokens were dealt out evenly."""
WIDE_TILES = (64.0, 80.0)
"""Tokens up to which Triton's grouped fp8 experts are dealt to tiles of 16 rows, and the next that were measured,
with tiles of 64: vLLM 0.19, whose experts the table has. vLLM 0.11 has tiles of 64 throughout (both in
get_default_config of their fused_moe.py); an expert's few rows fill neither, so the wider ones cost the same share more."""
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
    has_wide_tiles: bool = False,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all GPUs that share the layer.

    A table of even shares is asked where it reads as many experts as the fullest GPU does, and grows from
    there as it does with tokens. `has_wide_tiles`: see `WIDE_TILES`.
    """
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
    alike = num_experts_read(tokens, experts, expert_parallel) / experts.experts_per_token
    read = kernels.time("moe", alike * expert_parallel, **shape)
    grown = kernels.time("moe", np.maximum(tokens, all_read), **shape)
    whole = kernels.time("moe", np.full(1, all_read), **shape)
    growth = np.maximum(1.0, grown.seconds / whole.seconds)
    if has_wide_tiles and (kernels.dtype, kernels.backend("moe")) == ("fp8", "vllm"):
        narrow, wide = kernels.time("moe", np.array(WIDE_TILES), **shape).seconds
        growth = growth * np.where(tokens <= WIDE_TILES[0], max(1.0, wide / narrow), 1.0)
    return Estimate(read.seconds * growth, read.unmeasured * growth, read.sources)


def num_experts_read(tokens: Floats, experts: Experts, expert_parallel: int = 1) -> Floats:
    """Return how many experts the fullest of `expert_parallel` GPUs reads, on average."""
    held = experts.num_experts / expert_parallel
    missed = (1 - experts.experts_per_token / experts.num_experts) ** tokens
    spread = np.sqrt(held * missed * (1 - missed))
    furthest = FURTHEST.get(expert_parallel, sqrt(2 * np.log(expert_parallel)))
    read: Floats = np.minimum(held, held * (1 - missed) + furthest * spread)
    return read

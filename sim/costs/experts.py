"""Seconds of a layer's experts: routers deal tokens out unevenly, and tables were measured with even shares.

A step of few tokens is bound by the experts whose weights it reads. Of `experts` each token chooses `topk`, so
that under even odds each stays unread with probability (1 - topk/experts)^tokens; where GPUs share the experts
out, all wait for the one that has most to read.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.tables import Floats
from streamrl.sim.costs.kernels import Estimate, Kernels
from streamrl.sim.costs.padded_experts import padded_time
from streamrl.sim.costs.skipped_experts import skipping_time

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
        is_padded: whether those in fp8 go in padded blocks (`streamrl.sim.costs.padded_experts`).
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

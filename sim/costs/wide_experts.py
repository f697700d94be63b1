"""Seconds of a layer's experts on a GPU that is sent the tokens of its own experts alone, as with attention ranks.

Tables of many expert ranks were measured where every GPU has all tokens and passes over those of the others: at 16,384 of
them 128 ranks take as long as 32. Where tokens are sent, a GPU of e ranks does for its experts what one of `NEAR` ranks
does for as many tokens of each, beside what any call takes:

    seconds = fixed + (seconds of NEAR ranks - fixed) x experts that it reads / experts that one of NEAR ranks reads
"""

from __future__ import annotations

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.tables import Floats
from streamrl.sim.costs.experts import experts_time, num_experts_read
from streamrl.sim.costs.kernels import Estimate, Kernels
from streamrl.sim.costs.padded_experts import padded_time
from streamrl.sim.costs.skipped_experts import skipping_time

NEAR = 8
"""Ranks up to which tables are asked as they are: those of a node."""


def dealt_experts_time(
    kernels: Kernels,
    tokens: Floats,
    experts: Experts,
    hidden_size: int,
    ranks: int,
    *,
    is_padded: bool = False,
) -> Estimate:
    """Return the seconds of one layer's routed experts for `tokens` tokens of all `ranks` GPUs.

    Padded blocks (`streamrl.sim.costs.padded_experts`) are counted, of the rows that a GPU is sent, and so are choices that it skips
    of tokens that it is sent (`streamrl.sim.costs.skipped_experts`).
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

"""Seconds that LoRA adapters add to a layer: bytes through memory, beside which their products are few.

| bytes through memory, times a value       | fused                      | otherwise                  |
|-------------------------------------------|----------------------------|----------------------------|
| forward: of a layer's inputs, its outputs | 1, 2: added as it is made  | 1, 4: written, then added  |
| backward: the same of their gradients     | 3, 2                       | 5, 2                       |

A reads the inputs, B's product comes to the outputs; backward, the outputs' gradient is read for that of B and for what goes on
to A, the inputs are read again for that of A, and what comes out is added to the inputs' gradient. A roofline: nothing
published says what adapters alone take.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.linear_layers import passed_layers
from streamrl.sim.costs.training.pass_time import Pass
from streamrl.sim.costs.training.ranks import Ranks


class AdapterPasses(NamedTuple):
    """What adapters add to a mean layer, where the actor learns them."""

    forward: Pass
    backward: Pass


def adapters_of(ranks: Ranks, flops: float) -> AdapterPasses:
    """Return what they add on one GPU.

    Args:
        ranks: the trainer's.
        flops: FLOP/s of its products.
    """
    if not ranks.frozen:
        return AdapterPasses(Pass(), Pass())
    layers = list(passed_layers(ranks.model))
    inputs = sum(inner * count for inner, _, count in layers)
    outputs = sum(outer * count for _, outer, count in layers)
    weights = ranks.adapter_rank * (inputs + outputs)
    once, added = (2, 3) if ranks.trainer.kernels == "fused" else (4, 5)
    bandwidth = ranks.gpu.memory_bandwidth * ranks.gpu.roofline.bandwidth_efficiency
    share = ranks.frozen / ranks.model.num_layers / ranks.trainer.tensor_parallel

    def a_pass(values: float, products: float) -> Pass:
        seconds = values * ranks.width / bandwidth + products * 2 * weights / flops
        return Pass(per_token=share * seconds)

    forward = a_pass(inputs + once * outputs, 1)
    return AdapterPasses(forward, a_pass(added * inputs + 2 * outputs, 2))

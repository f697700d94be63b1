"""Seconds that LoRA adapters add to a layer: their products, and what brings their outputs to those of the layer."""

from __future__ import annotations

from sim.costs.training.pass_time import Pass, product
from sim.costs.training.profile import GemmRate
from sim.costs.training.ranks import Ranks
from streamrl.hardware.linear_layers import passed_layers

ADDED = 3
"""Times that the output of a layer passes memory to have its adapter's added: read twice, written once."""


def adapters(ranks: Ranks, rate: GemmRate) -> Pass:
    """Return what they add to the forward pass of a mean layer, where the actor learns adapters."""
    found = Pass()
    if not ranks.frozen:
        return found
    for inner, outer, count in passed_layers(ranks.model):
        added = Pass(per_token=ADDED * outer * ranks.width / ranks.gpu.memory_bandwidth)
        one = product(rate, ranks.adapter_rank, inner) + product(rate, outer, ranks.adapter_rank)
        found += (one + added) * (count / ranks.model.num_layers)
    return found * (ranks.frozen / ranks.trainer.tensor_parallel)

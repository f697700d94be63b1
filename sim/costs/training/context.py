"""What context ranks send each other, so that the tokens of one attend to those of the others, and what of it shows.

| exchange   | bytes that a rank sends of one layer, forward                           | backward | hidden behind            |
|------------|-------------------------------------------------------------------------|----------|--------------------------|
| ring       | keys and values of its tokens, c - 1 times, to its neighbour            | twice    | attention over the parts |
| all-gather | the same to all, by rings over all ports of a node                      | twice    | nothing                  |
| all-to-all | of its tokens' queries, keys, values and output the heads of the others | as much  | nothing                  |

The backward pass of the first two needs keys and values again, and returns their gradients (ring attention: Liu et al. 2023,
arXiv 2310.01889; gathered: Llama 3, arXiv 2407.21783, section 3.3.2; heads dealt out: DeepSpeed Ulysses, arXiv 2309.14509).
Parts of a sequence are paired so that each rank has as many pairs of tokens. That kernels run slower on the short parts of a
ring is not counted.
"""

from __future__ import annotations

from typing import assert_never

from streamrl.hardware.activations import context_channels
from streamrl.sim.costs.training.layer import ATTENTION_BACKWARD, Layer
from streamrl.sim.costs.training.pass_time import Pass
from streamrl.sim.costs.training.ranks import Ranks

RETURNS = 2.0
"""Times that a backward pass sends what a forward one does, where keys and values are sent and not heads."""


def late_forward(layer: Layer) -> Pass:
    """Return the seconds by which a layer waits for other ranks in its forward pass; less than none where it does not."""
    return Pass(per_token=_sent(layer.ranks)) + _meanwhile(layer) * -1.0


def late_backward(layer: Layer) -> list[Pass]:
    """Return the same of its backward pass, and of the forward one that full recomputation adds."""
    again = [late_forward(layer)] if layer.ranks.trainer.recompute == "full" else []
    times = 1.0 if layer.ranks.trainer.context_exchange == "all-to-all" else RETURNS
    hidden = _meanwhile(layer) * -ATTENTION_BACKWARD
    return [Pass(per_token=times * _sent(layer.ranks)) + hidden, *again]


def _meanwhile(layer: Layer) -> Pass:
    """Return the attention of a rank that computes while keys and values are under way: all parts but the last."""
    ranks = layer.ranks.trainer.context_parallel
    if layer.ranks.trainer.context_exchange != "ring":
        return Pass()
    return layer.attention().shared(ranks) * ((ranks - 1) / ranks)


def _sent(ranks: Ranks) -> float:
    """Seconds of one layer's forward exchange, for each token of a micro-batch."""
    trainer = ranks.trainer
    degree, near = trainer.context_parallel, ranks.context_ranks_of_a_node
    queries, caches = context_channels(ranks.model, trainer)
    share = (degree - 1) / degree * ranks.width
    match trainer.context_exchange:
        case "ring":
            wire = ranks.gpu.nvlink if near == degree else ranks.network
            return ranks.collective * share * caches / wire
        case "all-gather":
            return ranks.ring_time(ranks.width * caches, degree, trainer.tensor_parallel)
        case "all-to-all":
            heads = max(1.0, ranks.model.num_kv_heads / trainer.tensor_parallel)
            num_bytes = (2 * queries + caches * max(1.0, degree / heads)) / degree * ranks.width
            outside, inside = (degree - near) / degree, (near - 1) / degree
            seconds = outside / ranks.network + inside / ranks.gpu.nvlink
            return ranks.collective * num_bytes * seconds
        case other:
            assert_never(other)

"""Activations of a trainer's layers: kept for the backward pass, or computed again in it, as `trainer.recompute` says.

| recompute       | what of a layer is computed again                                                    |
|-----------------|--------------------------------------------------------------------------------------|
| none            | nothing                                                                              |
| mlp, selective  | its norms and its MLP, each as a whole: of an MLP selective would keep the products  |
| full            | all of it: its input alone is kept                                                   |

Attention's scores are kept by nobody where its kernels are fused, which make them again. What is computed again is what was
computed first, as models are trained without dropout. Inputs are kept in the dtype that they come in: between layers that
is float32, beside weights in float32, and so is what comes out of the norm before an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.runfile.sides_config import Recompute

MLPS = ("mlp", "shared_mlp", "experts", "feed_forward", "block_sparse_moe")
"""What models call the MLP of a layer, or its mixture of experts."""
NORM = "Norm"
"""In the names of norms' classes."""


def recompute(model: Any, choice: Recompute) -> None:
    """Let the backward pass compute parts of a model again from now on.

    Raises:
        ValueError: the model has no layers that one can tell.
    """
    if choice == "none":
        return
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    parts = [[layer] if choice == "full" else [*_parts(layer)] for layer in layers]
    if not all(parts) or not layers:
        ways = "'none'" if not layers else "'full' or 'none'"
        raise ValueError(f"trainer.recompute must be {ways} for this model, got {choice!r}")
    for part in chain.from_iterable(parts):
        again: Any = partial(
            checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False
        )
        part.forward = again


def _parts(layer: Module) -> Iterator[Module]:
    """Yield the norms and the MLP of a layer; nothing of one whose MLP is called otherwise."""
    mlps = [part for name, part in layer.named_children() if name in MLPS]
    if mlps:
        yield from mlps
        yield from (part for part in layer.children() if NORM in type(part).__name__)

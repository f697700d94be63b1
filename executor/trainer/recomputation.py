"""Activations of a trainer's layers: kept for the backward pass, or computed again in it, as `trainer.recompute` says.

| recompute       | what of a layer is computed again                                                    |
|-----------------|--------------------------------------------------------------------------------------|
| none            | nothing                                                                              |
| mlp, selective  | its norms and its MLP, as whole modules: of an MLP selective would keep the products |
| full            | all of it: its input alone is kept                                                   |

Attention's scores are kept by nobody: fused kernels make them again. What is computed again is what was computed first, as
models are trained without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.runfile.sides_config import Recompute

MLPS = ("mlp", "feed_forward", "block_sparse_moe")
"""What models call the MLP of a layer, or its mixture of experts."""
NORM = "Norm"
"""How the classes of norms end."""


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
    parts = layers if choice == "full" else [part for layer in layers for part in _parts(layer)]
    if not parts:
        ways = "'none'" if not layers else "'full' or 'none'"
        raise ValueError(f"trainer.recompute must be {ways} for this model, got {choice!r}")
    for part in parts:
        again: Any = partial(
            checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False
        )
        part.forward = again


def _parts(layer: Module) -> Iterator[Module]:
    """Yield the norms and the MLP of a layer; nothing of one whose MLP is called otherwise."""
    mlps = [part for name, part in layer.named_children() if name in MLPS]
    if mlps:
        yield from mlps
        yield from (part for part in layer.children() if type(part).__name__.endswith(NORM))

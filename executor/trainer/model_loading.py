"""Load the trainer's model on its ranks; set up recomputation of activations, and experts in half precision.

Experts. torch's autocast ignores grouped products, and transformers computes them in the weights' dtype (5.24,
integrations/moe.py). With float32 weights, experts would run in float32, which is most of a mixture's work at a fraction
of the speed. So this module casts them.

Activations of a layer are kept for the backward pass, or computed again in it (`trainer.recompute`):

| recompute       | computed again                                                                  |
|-----------------|---------------------------------------------------------------------------------|
| none            | nothing                                                                         |
| mlp, selective  | norms and the whole MLP                                                         |
| full            | everything; only the layer's input is kept                                      |

With `selective`, frameworks usually keep the products of the MLP; here they are computed again. Fused attention kernels
never keep attention scores. Recomputation gives the same values, because models are trained without dropout. Inputs are
kept in their own dtype. With float32 weights, the input of a layer and the output of the norm before an MLP are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.executor.pretrained import blank_model, load_pretrained
from streamrl.executor.trainer.passes import attend_apart
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings
from streamrl.runfile.roles_config import Recompute

NAME = "streamrl_grouped_mm"
"""Name of these experts in transformers' registry."""
REPLACED = "grouped_mm"


def follow_autocast(model: Any) -> None:
    """Make a model's grouped experts compute in autocast's dtype; other experts do so already."""
    if getattr(model.config, "_experts_implementation", None) == REPLACED:
        ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts_in_autocast)
        model.set_experts_implementation(NAME)


def grouped_experts_in_autocast(
    module: Any, hidden_states: torch.Tensor, *routed: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the experts of a layer like transformers, but with weights and inputs in autocast's dtype."""
    device = hidden_states.device.type
    if not torch.is_autocast_enabled(device):
        return _grouped(module, hidden_states, *routed, **options)
    dtype = torch.get_autocast_dtype(device)
    inputs = hidden_states.to(dtype)
    output = _grouped(_InFormat(module, dtype), inputs, *routed, **options)
    return output.to(hidden_states.dtype)


def _grouped(module: Any, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    output: torch.Tensor = grouped_mm_experts_forward(module, *inputs, **options)
    return output


class _InFormat:
    """A module whose parameters are cast to a dtype when read; other attributes are unchanged."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


MLPS = ("mlp", "shared_mlp", "experts", "feed_forward", "block_sparse_moe")
"""Names that models give to the MLP or the experts of a layer."""
NORM = "Norm"
"""Part of the class names of norms."""


def recompute(model: Any, choice: Recompute) -> None:
    """Set up a model to compute parts of each layer again in the backward pass.

    Raises:
        ValueError: the layers or their MLPs cannot be identified.
    """
    if choice == "none":
        return
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    parts = [[layer] if choice == "full" else [*_parts(layer)] for layer in layers]
    if not all(parts) or not layers:
        possible = "'none'" if not layers else "'full' or 'none'"
        raise ValueError(f"trainer.recompute must be {possible} for this model, got {choice!r}")
    for part in chain.from_iterable(parts):
        again: Any = partial(
            checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False
        )
        part.forward = again


def _parts(layer: Module) -> Iterator[Module]:
    """Yield the norms and the MLP of a layer; nothing if its MLP has an unknown name."""
    mlps = [part for name, part in layer.named_children() if name in MLPS]
    if mlps:
        yield from mlps
        yield from (part for part in layer.children() if NORM in type(part).__name__)


def load_model(
    directory: str,
    settings: TrainerSettings,
    ranks: RankGroup,
    *,
    learns: bool = True,
    is_blank: bool = False,
    **options: Any,
) -> Any:
    """Load the model of a directory, prepared for passes; every rank must call this.

    A blank model has uninitialized weights, for a rank that gets them from another one.

    Trained weights are float32, whatever the dtype of passes. Weights below adapters have the dtype of passes.

    With ZeRO 3, the whole weights do not fit on a GPU, nor once for each rank in host memory. So only the first rank
    loads them, in host memory. The other ranks have blank tensors until the backend splits the weights.

    Raises:
        ValueError: as `load_pretrained`, on every rank.
    """
    dtype = torch.float32 if learns else DTYPES[settings.dtype]
    waits_for_shards = settings.splits_weights and not ranks.is_first

    def load() -> Any:
        if waits_for_shards:
            model = blank_model(directory, dtype=DTYPES[settings.dtype], **options)
        elif is_blank:
            model = blank_model(directory, dtype=dtype, **options)
        else:
            own = {"is_aligned": settings.deterministic, "local_files_only": True, **options}
            model = load_pretrained(directory, dtype=dtype, **own)
        if not settings.splits_weights:
            model = model.to(settings.device)
        model.eval()  # no dropout: ratios must depend only on weights
        follow_autocast(model)
        if settings.packing == "packed":
            attend_apart(model, is_blank=is_blank or waits_for_shards)
        return model

    return ranks.agree(load)

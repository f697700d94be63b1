"""Load the trainer's model on its ranks, with activation recomputation and experts in half precision.

Experts in the precision that the rest of a pass has.

torch's autocast does not know grouped products, and transformers' take the format of the weights (5.24, integrations/moe.py):
beside weights in float32 experts would compute in float32, most of a mixture's work at a fraction of the speed.

Activations of a trainer's layers: kept for the backward pass, or computed again in it, as `trainer.recompute` says.

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
"""Of our experts in transformers' registry."""
REPLACED = "grouped_mm"


def follow_autocast(model: Any) -> None:
    """Let grouped experts of a model compute in autocast's format from now on, where there is one; others do already."""
    if getattr(model.config, "_experts_implementation", None) == REPLACED:
        ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts_in_autocast)
        model.set_experts_implementation(NAME)


def grouped_experts_in_autocast(
    module: Any, hidden_states: torch.Tensor, *routed: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the experts of a layer, as transformers does, with weights and inputs in autocast's format."""
    device = hidden_states.device.type
    if not torch.is_autocast_enabled(device):
        return _grouped(module, hidden_states, *routed, **options)
    dtype = torch.get_autocast_dtype(device)
    inputs = hidden_states.to(dtype)
    found = _grouped(_InFormat(module, dtype), inputs, *routed, **options)
    return found.to(hidden_states.dtype)


def _grouped(module: Any, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = grouped_mm_experts_forward(module, *inputs, **options)
    return found


class _InFormat:
    """A module whose parameters are read in another format; all else is as it is there."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, torch.nn.Parameter) else found


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


def load_model(
    directory: str,
    settings: TrainerSettings,
    ranks: RankGroup,
    *,
    learns: bool = True,
    **options: Any,
) -> Any:
    """Return the model of a directory, prepared for passes; every rank calls this.

    Weights that learn are in float32, whatever passes compute in; those that adapters lie beside are as passes want them.

    Where ZeRO 3 splits weights, nobody has room for all of them on a GPU, nor a machine for one copy a rank: they are in
    the first rank's host memory, and the others' tensors are blank, until a backend deals them out.

    Raises:
        ValueError: as `load_pretrained`, on every rank.
    """
    dtype = torch.float32 if learns else DTYPES[settings.dtype]
    is_blank = settings.splits_weights and not ranks.is_first

    def load() -> Any:
        if is_blank:
            model = blank_model(directory, dtype=DTYPES[settings.dtype], **options)
        else:
            own = {"is_aligned": settings.deterministic, "local_files_only": True, **options}
            model = load_pretrained(directory, dtype=dtype, **own)
        if not settings.splits_weights:
            model = model.to(settings.device)
        model.eval()  # without dropout: a ratio must say how the weights differ, not which units are off
        follow_autocast(model)
        if settings.packing == "packed":
            attend_apart(model, is_blank=is_blank)
        return model

    return ranks.agree(load)

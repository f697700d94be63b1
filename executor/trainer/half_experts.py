"""Experts in the precision that the rest of a pass has.

torch's autocast does not know grouped products, and transformers' take the format of the weights (5.24, integrations/moe.py):
beside weights in float32 experts would compute in float32, most of a mixture's work at a fraction of the speed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "streamrl_grouped_mm"
"""Of our experts in transformers' registry."""
REPLACED = "grouped_mm"


def follow_autocast(model: Any) -> None:
    """Let grouped experts of a model compute in autocast's format from now on, where there is one; others do already."""
    if getattr(model.config, "_experts_implementation", None) == REPLACED:
        ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_in_half)
        model.set_experts_implementation(NAME)


def grouped_in_half(
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

"""Select the layers of a model that get LoRA adapters, and name the adapter matrices that replicas load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

A, B = ".lora_A", ".lora_B"
"""Suffixes of the two matrices of a layer. `A` is rank x inputs; `B` is outputs x rank, with the scale applied."""
ADAPTERS = "adapter"
"""Subdirectory of a checkpoint for the adapter matrices. The checkpoint itself has the merged weights. In the same
directory, vLLM would load the matrices as further weights."""


def adapted_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the layers of a transformers model that get adapters, by name: all linear layers but the output layer."""
    from torch.nn import Linear  # imported here because the controller must not import torch

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not head
    }

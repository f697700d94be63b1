"""Which layers of a model have LoRA adapters beside them, and how their matrices are called on the way to replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

A, B = ".lora_A", ".lora_B"
"""Ends of the names of the two matrices of a layer: `A` is rank x inputs, `B` outputs x rank and scaled."""
ADAPTERS = "adapter"
"""In a checkpoint: the directory of the matrices as they are pushed, below the weights that they are merged in. Beside
these they would be taken for more of them, as by vLLM."""
VLLM_PLACES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM keeps places for (0.32.0, config/lora.py); smaller adapters fill a part of one."""


def adapted_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the layers of a transformers model that adapters sit on, by name: every linear one but what makes logits."""
    from torch.nn import Linear  # whoever launches roles has no use for torch

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not head
    }

"""LoRA adapters in a directory, as PEFT writes and vLLM reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from streamrl.executor.adapter_layers import A, B

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, END = "base_model.model.", ".weight"
"""What PEFT puts around the names of matrices."""


def write_adapters(adapters: Mapping[str, torch.Tensor], base: str, directory: Path) -> None:
    """Write matrices, as they are pushed, with the directory of the model that they belong to."""
    rank = next(tensor.shape[0] for name, tensor in adapters.items() if name.endswith(A))
    named = {f"{PREFIX}{name}{END}": tensor.contiguous() for name, tensor in adapters.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,  # the scale is in B
        "target_modules": sorted({name.removesuffix(A).removesuffix(B) for name in adapters}),
    }
    save_file(named, directory / TENSORS)
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def read_adapters(directory: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of such a directory, by the names that they are pushed under."""
    found = load_file(directory / TENSORS)
    return {name.removeprefix(PREFIX).removesuffix(END): each for name, each in found.items()}

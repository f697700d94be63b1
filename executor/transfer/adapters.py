"""Write and read LoRA adapter directories, and merge adapters into whole weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from streamrl.executor.adapter_layers import A, B
from streamrl.executor.roles import Manifest
from streamrl.executor.transfer.shared_memory import tensors_of, write_version

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, END = "base_model.model.", ".weight"
"""What PEFT adds before and after the names of matrices."""


def write_adapters(adapters: Mapping[str, torch.Tensor], base: str, directory: Path) -> None:
    """Write adapter matrices to a directory in PEFT's format; `base` is the directory of their model."""
    rank = next(tensor.shape[0] for name, tensor in adapters.items() if name.endswith(A))
    named = {f"{PREFIX}{name}{END}": tensor.contiguous() for name, tensor in adapters.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,  # the scale is already in B
        "target_modules": sorted({name.removesuffix(A).removesuffix(B) for name in adapters}),
    }
    save_file(named, directory / TENSORS)
    (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def read_adapters(directory: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of a PEFT directory, under the names that pushed adapters have."""
    tensors = tensors_of(directory / TENSORS)
    return {name.removeprefix(PREFIX).removesuffix(END): each for name, each in tensors}


WEIGHT = ".weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def merge(
    model: str, dtype: str, adapters: Manifest, pieces: list[Path], directory: Path
) -> Manifest:
    """Merge adapters into a model's weights, write them to a directory, and return their manifest.

    Args:
        model: Hugging Face directory of the weights that the adapters belong to.
        dtype: dtype of the written weights.
        adapters: manifest of the pushed adapters; its checksum becomes the origin of the written weights.
        pieces: local files of the adapters.
        directory: an empty directory.

    Raises:
        ValueError: the model has no safetensors files, or lacks a layer that the adapters change.
    """
    lora = dict(item for piece in pieces for item in tensors_of(piece))
    used: set[str] = set()
    tensors = _merged(Path(model), lora, DTYPES[dtype], used)
    whole = write_version(tensors, directory, adapters.version)
    if missing := {name.removesuffix(A).removesuffix(B) for name in lora} - used:
        raise ValueError(f"{model} has no weights for the adapters of {sorted(missing)[0]}")
    return replace(whole, origin=adapters.checksum)


def merged(name: str, tensor: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight plus the product of its adapters, in float32; the weight itself without adapters."""
    stem = name.removesuffix(WEIGHT)
    if stem + A not in adapters:
        return tensor
    added = adapters[stem + B].float() @ adapters[stem + A].float()
    return tensor.float() + added.to(tensor.device)


def _merged(
    model: Path, adapters: Mapping[str, torch.Tensor], dtype: torch.dtype, used: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged weights of a directory, and add the layers whose adapters were used to `used`."""
    files = sorted(model.glob("model*.safetensors"))
    if not files:
        raise ValueError(
            f"{model} has no model*.safetensors to merge adapters with; convert its weights to safetensors"
        )
    for file in files:
        for name, weight in tensors_of(file):
            used.add(name.removesuffix(WEIGHT))
            tensor = merged(name, weight, adapters)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

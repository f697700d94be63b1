"""Write and read LoRA adapter directories, and merge adapters into whole weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from streamrl.executor.adapter_layers import A, B
from streamrl.executor.roles import Manifest
from streamrl.executor.transfer.shared_memory import write_version

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


WEIGHT = ".weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def merge(
    model: str, dtype: str, adapters: Manifest, pieces: list[Path], directory: Path
) -> Manifest:
    """Write whole weights to a directory, and return what a replica loads.

    Args:
        model: Hugging Face directory of the weights that the adapters were trained beside.
        dtype: of what is written.
        adapters: as they were pushed; the manifest's checksum goes on to name the weights.
        pieces: where their files lie here.
        directory: a fresh one.

    Raises:
        ValueError: the model has no safetensors, or not the layers that the adapters are for.
    """
    found = {name: tensor for piece in pieces for name, tensor in load_file(piece).items()}
    used: set[str] = set()
    tensors = _merged(Path(model), found, DTYPES[dtype], used)
    whole = write_version(tensors, directory, adapters.version)
    if missing := {name.removesuffix(A).removesuffix(B) for name in found} - used:
        raise ValueError(f"{model} has no weights for the adapters of {sorted(missing)[0]}")
    return replace(whole, origin=adapters.checksum)


def merged(name: str, tensor: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight with what its adapters add to it, computed in float32; itself where it has none."""
    stem = name.removesuffix(WEIGHT)
    if stem + A not in adapters:
        return tensor
    added = adapters[stem + B].float() @ adapters[stem + A].float()
    return tensor.float() + added.to(tensor.device)


def _merged(
    model: Path, adapters: Mapping[str, torch.Tensor], dtype: torch.dtype, used: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a directory, merged; enter the layers whose adapters were used."""
    files = sorted(model.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{model} has no safetensors to merge adapters with")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - a file handle, which does not iterate
                used.add(name.removesuffix(WEIGHT))
                tensor = merged(name, weights.get_tensor(name), adapters)
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

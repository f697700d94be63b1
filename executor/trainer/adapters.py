"""Train LoRA adapters on all linear layers, and keep the model's own weights frozen.

Every linear layer except the output layer gets adapters (Hu et al. 2021, arXiv 2106.09685). PEFT adds them and computes
with them. A replica serves `W + B A`. The pushed B already includes LoRA's scale, `alpha / rank`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from streamrl.executor.adapter_layers import ADAPTERS, A, B, adapted_layers
from streamrl.executor.transfer.adapters import merged, read_adapters, write_adapters
from streamrl.executor.transfer.shared_memory import cast_tensors

ADAPTER = "default"
"""PEFT's name of the adapters."""
NAMES = {f".lora_A.{ADAPTER}.weight": A, f".lora_B.{ADAPTER}.weight": B}
"""Endings of PEFT's names of adapter matrices, and the endings under which they are pushed."""
BASE = ".base_layer."
"""Part that PEFT adds to the names of wrapped weights."""


def add_adapters(model: Any, rank: int, alpha: float) -> None:
    """Add adapters that change nothing yet to a model, and freeze all its other weights.

    The product of the two matrices of a layer is multiplied by alpha / rank.

    Raises:
        ValueError: the model has no linear layers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(adapted_layers(model))
    if not targets:
        raise ValueError("the model has no linear layers for adapters: remove trainer.adapter_rank")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # updates are too small for 16 bits
            parameter.data = parameter.data.float()
    for layer in _adapted(
        model
    ):  # otherwise each layer would cast its inputs from float32 and keep a copy
        layer.cast_input_dtype_enabled = False


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disable a model's adapters until the block ends."""
    layers = _adapted(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def scale_of(model: Any) -> float:
    """Return the factor of a model's adapters, alpha / rank; 1 without adapters."""
    return next((float(layer.scaling[ADAPTER]) for layer in _adapted(model)), 1.0)


def adapters_of(
    weights: Iterable[tuple[str, torch.Tensor]], scale: float, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's adapter matrices under their pushed names, with their scale in B, cast to `dtype` if given."""
    for name, tensor in weights:
        stem, end = _split(name)
        if end is not None:
            scaled = tensor * scale if end == B else tensor
            yield stem + end, scaled.to(dtype or scaled.dtype)


def whole_weights(
    weights: Iterable[tuple[str, torch.Tensor]], scale: float
) -> dict[str, torch.Tensor]:
    """Return a model's weights with merged adapters, under the names that they have without adapters."""
    state = dict(weights)
    adapters = dict(adapters_of(state.items(), scale))
    plain = {
        name.replace(BASE, "."): tensor for name, tensor in state.items() if _split(name)[1] is None
    }
    if not adapters:
        return plain
    whole = {name: merged(name, tensor, adapters) for name, tensor in plain.items()}
    return dict(cast_tensors(whole.items(), torch.float32))


def save_model(model: Any, weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write a model as a Hugging Face directory with merged adapters, and the adapters in a subdirectory."""
    state, scale = dict(weights), scale_of(model)
    model.save_pretrained(path, state_dict=whole_weights(state.items(), scale))
    if adapters := dict(adapters_of(state.items(), scale)):
        (path / ADAPTERS).mkdir()
        write_adapters(adapters, model.name_or_path, path / ADAPTERS)


def load_adapters(model: Any, checkpoint: Path, rank: int) -> None:
    """Load the adapters of a checkpoint into a model that has adapters.

    Raises:
        ValueError: the checkpoint has no adapters, or adapters of another rank or for other layers.
    """
    if not (checkpoint / ADAPTERS).is_dir():
        raise ValueError(f"{checkpoint}: no checkpoint of adapters: it has no directory {ADAPTERS}")
    adapters, scale = read_adapters(checkpoint / ADAPTERS), scale_of(model)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            stem, end = _split(name)
            if end is None:
                continue
            saved = adapters.get(stem + end)
            if saved is None or saved.shape != tensor.shape:
                raise ValueError(f"{checkpoint}: no adapters of rank {rank} for {stem}")
            tensor.copy_(saved / scale if end == B else saved)


def _split(name: str) -> tuple[str, str | None]:
    """Return the layer of an adapter matrix and the ending of its pushed name; None for other tensors."""
    for theirs, ours in NAMES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs), ours
    return name, None

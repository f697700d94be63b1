"""LoRA: a trainer that learns small matrices beside each linear layer, and leaves the model as it was.

Adapters sit on every linear layer but the one that makes logits (Hu et al. 2021, arXiv 2106.09685); PEFT puts them there
and computes with them. `W + B A` is what a replica serves: B is pushed with LoRA's scale, `alpha / rank`, in it.
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

ALPHA_PER_RANK = 2.0
"""LoRA's alpha for each rank, as is usual: what adapters say counts twice."""
NAMES = {".lora_A.default.weight": A, ".lora_B.default.weight": B}
"""How PEFT ends the names of its matrices, and how they are pushed."""
BASE = ".base_layer."
"""What PEFT puts into the names of weights that it has wrapped."""


def add_adapters(model: Any, rank: int) -> None:
    """Put adapters that change nothing yet into a model, and let nothing else be trained.

    Raises:
        ValueError: the model has no linear layers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(adapted_layers(model))
    if not targets:
        raise ValueError("the model has no linear layers for adapters")
    config = LoraConfig(r=rank, lora_alpha=round(ALPHA_PER_RANK * rank), target_modules=targets)
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # it learns by less than 16 bits tell apart
            parameter.data = parameter.data.float()
    for layer in _adapted(model):  # passes would take inputs back from float32, one copy a layer
        layer.cast_input_dtype_enabled = False


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Let a model compute as it did before it had adapters, until the block ends."""
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


def adapters_of(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of a model's adapters as they are pushed, in a dtype where one is named."""
    for name, tensor in weights:
        stem, end = _split(name)
        if end is not None:
            scaled = tensor * ALPHA_PER_RANK if end == B else tensor
            yield stem + end, scaled.to(dtype or scaled.dtype)


def whole_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a model's weights by the names that they had without adapters, with what those add."""
    state = dict(weights)
    adapters = dict(adapters_of(state.items()))
    plain = {
        name.replace(BASE, "."): tensor for name, tensor in state.items() if _split(name)[1] is None
    }
    if not adapters:
        return plain
    whole = {name: merged(name, tensor, adapters) for name, tensor in plain.items()}
    return dict(cast_tensors(whole, torch.float32))


def save_model(model: Any, weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write a model as a Hugging Face directory has it, and below it the adapters that are merged in it."""
    state = dict(weights)
    model.save_pretrained(path, state_dict=whole_weights(state.items()))
    if adapters := dict(adapters_of(state.items())):
        (path / ADAPTERS).mkdir()
        write_adapters(adapters, model.name_or_path, path / ADAPTERS)


def load_adapters(model: Any, checkpoint: Path, rank: int) -> None:
    """Put the adapters of a checkpoint into a model that has some.

    Raises:
        ValueError: the checkpoint has none, or others.
    """
    if not (checkpoint / ADAPTERS).is_dir():
        raise ValueError(f"{checkpoint}: no checkpoint of adapters: no directory {ADAPTERS}")
    adapters = read_adapters(checkpoint / ADAPTERS)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            stem, end = _split(name)
            if end is None:
                continue
            found = adapters.get(stem + end)
            if found is None or found.shape != tensor.shape:
                raise ValueError(f"{checkpoint}: no adapters of rank {rank} for {stem}")
            tensor.copy_(found / ALPHA_PER_RANK if end == B else found)


def _split(name: str) -> tuple[str, str | None]:
    """Return the layer that a matrix is for and its end of a name; None where it is no adapter's."""
    for theirs, ours in NAMES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs), ours
    return name, None

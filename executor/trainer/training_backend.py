"""The contract of a training backend, and the weight access that all backends share.

A backend holds the weights of a trainer. It applies gradients to them, over all ranks, and saves them.

| backend   | optimizer, gradients, weights | synchronization of ranks                                              |
|-----------|-------------------------------|-----------------------------------------------------------------------|
| torch     | whole on every rank           | gradients are summed once, at the step                                |
| deepspeed | split by ZeRO stage 1, 2 or 3 | stages 2 and 3: in every pass, so all ranks make as many passes       |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch


class TrainingBackend(Protocol):
    """Weights, gradient and optimizer; every rank calls the same methods in the same order."""

    model: Any
    """The callable of a forward pass: a causal transformers model, or a wrapper of one."""
    in_step: bool
    """Whether ranks wait for each other in passes and pushes; then all must make the same number of passes."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a summed loss to the gradient since the last step."""

    def step(self, count: float) -> float:
        """Divide the gradient, summed over all ranks, by `count`, clip it, and update the weights.

        Return its norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; the weights are unchanged.
        """

    def set_rate(self, rate: float) -> None:
        """Use a learning rate from the next step on."""

    def weights(self, *, learned: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """Return all weights (or only trained ones) by name, whole, on the first rank; every rank must call this."""

    def save(self, path: Path, version: int) -> None:
        """Write weights as a Hugging Face directory, and the other data that `load` needs."""

    def load(self, path: Path) -> int:
        """Load everything that `save` wrote except the weights, and return the version.

        Raises:
            ValueError: the checkpoint is from another backend or another number of ranks.
        """

    def move(self, device: str) -> None:
        """Move everything on a device to another one."""


def state_of(model: Any, *, learned: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by name, or only its trained parameters."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if each.requires_grad or not learned}


@contextlib.contextmanager
def weights_in_place(model: Any, weights: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
    """Make a model compute with other weights, by parameter name, until the block ends.

    Use it only for forward passes without gradient. None: the model's own weights.
    """
    if weights is None:
        yield
        return
    own = {name: each.data for name, each in model.named_parameters() if name in weights}
    _point(model, weights)
    try:
        yield
    finally:
        _point(model, own)


def _point(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data = weights[name]

"""Define what a training backend does, and the optimizer and weight access that all of them share.

What holds a trainer's weights: the gradient's way into them, across however many ranks, and theirs to a disk.

| backend   | optimizer, gradients, weights      | ranks of a step                                             |
|-----------|------------------------------------|-------------------------------------------------------------|
| torch     | whole on every rank                | sum their gradients once, at the step                       |
| deepspeed | split by ZeRO stage 1, 2 or 3      | stage 2 and 3: in every pass, so that all make as many      |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from streamrl.executor.trainer.trainer_settings import TrainerSettings


class TrainingBackend(Protocol):
    """Weights, gradient and optimizer; every rank calls the same methods in the same order."""

    model: Any
    """What a forward pass calls: a causal transformers model, or what stands in for one."""
    in_step: bool
    """Whether ranks wait for each other within passes, so that each makes as many, and at pushes."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a summed loss to what there is since the last step."""

    def step(self, count: float) -> float:
        """Divide the gradient, summed over all ranks, by `count`, clip it and update the weights.

        Returns its norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; the weights are as they were.
        """

    def weights(self, *, learned: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """Return every weight by its name, or those that learn alone, whole: on the first rank, while the others help."""

    def save(self, path: Path, version: int) -> None:
        """Write weights as a Hugging Face directory has them, and beside them what `load` needs."""

    def load(self, path: Path) -> int:
        """Take everything but the weights, which are there, from what `save` wrote; return the version.

        Raises:
            ValueError: it is another backend's, or another number of ranks'.
        """

    def move(self, device: str) -> None:
        """Take everything that lies on a device to another one."""


ADAM_BETAS = (0.9, 0.999)
"""AdamW's published values (arXiv 1711.05101)."""


def make_optimizer(settings: TrainerSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over those of a model's weights that are trained."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def state_of(model: Any, *, learned: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by name, or the parameters that learn alone."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if each.requires_grad or not learned}


@contextlib.contextmanager
def weights_in_place(model: Any, weights: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
    """Let a model compute with these weights, by the names of its parameters, until the block ends; the others stay.

    Only for forward passes without gradient. None: with the weights that it has.
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

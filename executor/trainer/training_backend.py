"""The contract of a training backend, and the weight access that all backends share.

A backend holds the weights of a trainer. It applies gradients to them, over all ranks, and saves them.

| backend   | optimizer, gradients, weights | synchronization of ranks                                              |
|-----------|-------------------------------|-----------------------------------------------------------------------|
| torch     | whole on every rank           | gradients are summed once, at the step                                |
| deepspeed | split by ZeRO stage 1, 2 or 3 | stages 2 and 3: in every pass, so all ranks make as many passes       |
| fsdp2     | split; a layer is gathered    | in every pass, so all ranks make as many passes                       |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist


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

    def weights(
        self, *, learned: bool = False, dtype: torch.dtype | None = None
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Return all weights (or only trained ones) by name, whole, on the first rank; every rank must read them all.

        Names of one tensor (tied weights) follow each other. A backend may cast weights to `dtype`, which saves it bytes
        where ranks exchange weights; the caller casts those that it did not.
        """

    def save(self, path: Path, version: int) -> None:
        """Write weights as a Hugging Face directory, and the other data that `load` needs."""

    def load(self, path: Path) -> int:
        """Load everything that `save` wrote except the weights, and return the version.

        Raises:
            ValueError: the checkpoint has no state that this version reads, or that of another optimizer.
        """

    def move(self, device: str) -> None:
        """Move everything on a device to another one."""


def state_of(model: Any, *, learned: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by name, or only its trained parameters; names of one tensor follow each other."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, each in state.items():
        if each.requires_grad or not learned:
            names.setdefault(id(each), []).append(name)
    return {name: state[name] for tied in names.values() for name in tied}


def broadcast_buffers(model: Any) -> None:
    """Send the tensors of a model that files have and training does not change from the first rank to all others.

    An example is the bias that balances experts. Other buffers are computed by every rank itself.
    """
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()
            dist.broadcast(buffer.data, 0)


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

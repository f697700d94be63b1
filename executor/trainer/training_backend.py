"""What holds a trainer's weights: the gradient's way into them, across however many ranks, and theirs to a disk.

| backend   | optimizer, gradients, weights      | ranks of a step                                             |
|-----------|------------------------------------|-------------------------------------------------------------|
| torch     | whole on every rank                | sum their gradients once, at the step                       |
| deepspeed | split by ZeRO stage 1, 2 or 3      | stage 2 and 3: in every pass, so that all make as many      |
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch


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

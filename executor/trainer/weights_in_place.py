"""The weights of a model by name, and others in their place for a while: its own come back as they were, nothing is copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


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

"""Compute with other weights for a while: a model's own come back as they were, nothing is copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@contextlib.contextmanager
def weights_in_place(model: Any, weights: Mapping[str, torch.Tensor] | None) -> Iterator[None]:
    """Let a model compute with these weights, by the names of its parameters, until the block ends.

    Only for forward passes without gradient. None: with the weights that it has.
    """
    if weights is None:
        yield
        return
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    _point(model, weights)
    try:
        yield
    finally:
        _point(model, own)


def _point(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]

"""The inference engines that tests hold to one contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import pytest

from streamrl.runfile.sides_config import RolloutBackend

NAMES: tuple[str, ...] = get_args(RolloutBackend)
APART = {"vllm": pytest.mark.vllm}
"""Engines whose packages fit no environment of others: what they are tested with is selected by their mark."""


def params(engines: Iterable[str] = NAMES, *others: str) -> list[Any]:
    """Return parameters of a test: each engine, or each with each of `others` as a pair."""
    if not others:
        return [pytest.param(name, marks=APART.get(name, ())) for name in engines]
    return [
        pytest.param((name, other), marks=APART.get(name, ()), id=f"{name}-{other}")
        for name in engines
        for other in others
    ]

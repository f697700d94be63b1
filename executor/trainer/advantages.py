"""Advantages of one group of rollouts from their rewards."""

from __future__ import annotations

import math
from collections.abc import Callable

STD_EPSILON = 1e-6
"""Keeps the division finite; far below any spread of rewards that carries signal."""


def advantages(name: str, rewards: list[float]) -> list[float]:
    """Return one advantage per reward of a group, by the estimator `name`.

    Equal rewards, or a group of one, give exact zeros under a group baseline (all but
    `reinforce++`): the trainer then skips the gradient. Raises ValueError on an unknown name.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantages {name!r}; known are {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name](rewards)


def _grpo(rewards: list[float]) -> list[float]:
    """`(r - mean) / (std + epsilon)`, std of the sample (GRPO, arXiv 2402.03300)."""
    centred = _dr_grpo(rewards)
    variance = math.fsum(value * value for value in centred) / max(1, len(rewards) - 1)
    return [value / (math.sqrt(variance) + STD_EPSILON) for value in centred]


def _dr_grpo(rewards: list[float]) -> list[float]:
    """`r - mean`: no division, which favours easy and hard prompts (Dr. GRPO, arXiv 2503.20783)."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _rloo(rewards: list[float]) -> list[float]:
    """`r - mean of the others`, which is `n/(n-1) * (r - mean)` (RLOO, arXiv 2402.14740)."""
    scale = len(rewards) / max(1, len(rewards) - 1)
    return [scale * value for value in _dr_grpo(rewards)]


def _reinforce_plus_plus(rewards: list[float]) -> list[float]:
    """`r` itself: the baseline is the mean over the whole batch (REINFORCE++, arXiv 2501.03262)."""
    return list(rewards)


ESTIMATORS: dict[str, Callable[[list[float]], list[float]]] = {
    "grpo": _grpo,
    "dr-grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce++": _reinforce_plus_plus,
}

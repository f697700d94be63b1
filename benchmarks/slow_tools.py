"""The tools of the agentic example, which take seconds with a heavy tail: `make bench-episodes` runs them."""

from __future__ import annotations

import random
import time

MEDIAN, SPREAD = 0.15, 0.8
"""Seconds and log standard deviation of a call."""
STALL_SHARE, STALL = 0.02, 30.0
"""Share of calls that stall, and their seconds. The time limit of an action ends them."""


def _wait() -> None:
    time.sleep(
        STALL if random.random() < STALL_SHARE else MEDIAN * random.lognormvariate(0, SPREAD)
    )


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    _wait()
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first one.

    Args:
        a: The first number.
        b: The second number.
    """
    _wait()
    return a - b

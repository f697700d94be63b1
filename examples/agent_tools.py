"""The two tools of the agentic example."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first one.

    Args:
        a: The first number.
        b: The second number.
    """
    return a - b

"""An environment of the `verifiers` package for tests: sums with two tools."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ROWS = [{"question": f"a{n}+b{n}-c1=", "answer": str(2 * n - 1)} for n in range(1, 9)]


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first one."""
    if b > 99:
        raise ValueError("too large")
    return a - b


def is_right(completion: Any, answer: str) -> float:
    """Return 1 if the last message is the answer."""
    return float(str(completion[-1].content).strip() == answer)


def load_environment(max_turns: int = 8) -> Any:
    """Return the environment, as the package loads it by the name of this module."""
    verifiers, datasets = import_module("verifiers"), import_module("datasets")
    return verifiers.ToolEnv(
        tools=[add, subtract],
        dataset=datasets.Dataset.from_list(ROWS),
        rubric=verifiers.Rubric(funcs=[is_right]),
        max_turns=max_turns,
    )

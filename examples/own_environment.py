"""An environment of your own with tools: sums with a memory, and a reward that charges for each call that fails."""

from __future__ import annotations

import re
from typing import Any

from streamrl.executor.environment.tools import ToolEnvironment

Answer = tuple[list[dict[str, Any]] | None, float, bool]
"""The observation (messages, or None), the reward of the turn, and whether the episode is over."""


class Sums(ToolEnvironment):
    """Answers the calls of each turn. A turn without a call is the answer, and ends the episode."""

    def __init__(self, tool_format: str = "hermes", penalty: float = 0.1) -> None:
        """Take `environment.arguments`. The methods below are the tools."""
        super().__init__([self.add, self.subtract], tool_format)
        self._penalty = penalty
        self._answer = ""

    def reset(self, task: dict[str, Any]) -> None:
        """Begin an episode; `task` is the record of the prompt. Return text or messages to show something first."""
        self._answer = str(task["answer"])

    def step(self, action: str) -> Answer:
        """Answer a turn of the policy. The reward of an episode is the sum of those of its turns."""
        messages, _, is_over = super().step(action)
        if not is_over:
            failed = sum("Error:" in each["content"] for each in messages or ())
            return messages, -self._penalty * failed, False
        numbers = re.findall(r"-?\d+", action)
        return None, float(numbers[-1:] == [self._answer]), True

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def subtract(self, a: int, b: int) -> int:
        """Subtract the second number from the first one.

        Args:
            a: The first number.
            b: The second number.
        """
        return a - b

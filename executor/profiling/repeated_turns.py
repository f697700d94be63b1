"""An environment whose actions compute nothing, to measure what a start and an action take around it."""

from __future__ import annotations


class RepeatedTurns:
    """Answers each turn with a short text, and ends after the last of `turns`."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    def reset(self, task: object) -> None:
        """Begin an episode."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return an observation, a reward, and whether the episode is over."""
        self._left -= 1
        return "1", 0.0, self._left <= 0

"""In which order a replica starts the rollouts that wait on it: smaller priority first."""

from __future__ import annotations

from typing import Protocol

from streamrl.engine.entities import Rollout

MOST_TOKENS = 1 << 32  # no rollout is longer: steps stay apart in a longest-first priority


class Order(Protocol):
    """Gives each rollout its place in a replica's queue."""

    def priority(self, rollout: Rollout) -> int:
        """Say how early `rollout` starts; smaller is earlier, ties go by id."""
        ...


class FirstInFirstOut:
    """Start rollouts in the order their prompts were drawn."""

    def priority(self, rollout: Rollout) -> int:
        """Return the id: ids follow draw order."""
        return rollout.id


class LongestFirst:
    """Start the rollouts of the oldest step first, and among them the one expected to be longest.

    Longest processing time first: on identical machines the makespan is at most 4/3 of the best
    (Graham 1969).
    """

    def priority(self, rollout: Rollout) -> int:
        """Return the step, then the expected length from long to short."""
        return rollout.group.step * MOST_TOKENS - rollout.expected_tokens

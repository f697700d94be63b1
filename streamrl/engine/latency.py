"""How long generation takes, as policies reckon with it (StreamRL, arXiv 2504.15930, Equations 1 and 2).

a rollout of L tokens in a batch of b:      step_time(b) * L
M rollouts of mean length L on a replica:   step_time(b) * L * ceil(M / b),  b = min(M, most running)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil


class Latency:
    """Seconds of a decode step by batch: given points, straight lines between them, flat beyond."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Take (batch, seconds) points in order of the batch; the last batch is the most that a replica runs."""
        self._batches = [batch for batch, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self.most_running = self._batches[-1]

    def step_time(self, batch: float) -> float:
        """Return the seconds of one decode step of `batch` rollouts."""
        right = bisect_right(self._batches, batch)
        if right == 0:
            return self._seconds[0]
        if right == len(self._batches):
            return self._seconds[-1]
        low, high = self._batches[right - 1], self._batches[right]
        share = (batch - low) / (high - low)
        return self._seconds[right - 1] + share * (self._seconds[right] - self._seconds[right - 1])

    def replica_time(self, num_rollouts: float, tokens: float) -> float:
        """Return the seconds in which one replica generates rollouts of `tokens` each, in full batches."""
        if num_rollouts <= 0:
            return 0.0
        batch = min(num_rollouts, self.most_running)
        return self.step_time(batch) * tokens * ceil(num_rollouts / batch)

    def time(self, num_rollouts: float, tokens: float, num_replicas: float) -> float:
        """Return the seconds in which replicas that share rollouts evenly generate them.

        Raises:
            ValueError: there are rollouts and no replica.
        """
        if num_replicas < 1 and num_rollouts > 0:
            raise ValueError(f"{num_rollouts} rollouts need a replica, got {num_replicas}")
        return self.replica_time(num_rollouts / max(1, num_replicas), tokens)

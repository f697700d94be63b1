"""How long rollouts have been lately: the lengths of those that finished last."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

STEPS_KEPT = 2  # one follows a drift fastest; a second evens out who happened to finish last


class RecentLengths:
    """The lengths of the last two steps' rollouts, also in order of length."""

    def __init__(self, enough: int) -> None:
        """Take the rollouts of a step, which are `enough` to speak for all.

        Short rollouts finish first, so fewer than a step's worth look shorter than the step is.
        """
        self._enough = enough
        self._arrived: deque[int] = deque()
        self.ordered: list[int] = []
        """Shortest first."""

    @property
    def is_full(self) -> bool:
        """Whether there are enough to speak for all."""
        return len(self._arrived) >= self._enough

    def add(self, tokens: int) -> None:
        """Enter the length of a rollout that finished, and forget the oldest where it is one too many."""
        if len(self._arrived) == STEPS_KEPT * self._enough:
            oldest = self._arrived.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
        self._arrived.append(tokens)
        insort(self.ordered, tokens)

    def expected_rest(self, done: float) -> float:
        """Return the tokens that a rollout of `done` tokens has ahead: the median of those that got further.

        0 where none did: nothing says that it will go on.
        """
        first = bisect_right(self.ordered, done)
        if first == len(self.ordered):
            return 0.0
        return self.ordered[(first + len(self.ordered)) // 2] - done


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the length that `share` of the lengths, shortest first, do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

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
        self._ordered: list[int] | None = None
        """None until anyone asks: few runs do, and keeping it costs them all."""

    @property
    def is_full(self) -> bool:
        """Whether there are enough to speak for all."""
        return len(self._arrived) >= self._enough

    @property
    def ordered(self) -> list[int]:
        """The lengths, shortest first."""
        if self._ordered is None:
            self._ordered = sorted(self._arrived)
        return self._ordered

    def add(self, tokens: int) -> None:
        """Enter the length of a rollout that finished, and forget the oldest where it is one too many."""
        if len(self._arrived) == STEPS_KEPT * self._enough:
            oldest = self._arrived.popleft()
            if self._ordered is not None:
                del self._ordered[bisect_left(self._ordered, oldest)]
        self._arrived.append(tokens)
        if self._ordered is not None:
            insort(self._ordered, tokens)

    def expected_rest(self, done: float) -> float:
        """Return the tokens that a rollout of `done` tokens has ahead: the median of those that got further.

        0 where none did: nothing says that it will go on.
        """
        ordered = self.ordered
        first = bisect_right(ordered, done)
        if first == len(ordered):
            return 0.0
        return ordered[(first + len(ordered)) // 2] - done


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the length that `share` of the lengths, shortest first, do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

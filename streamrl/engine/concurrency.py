"""Limit the number of rollouts on a replica by the pressure on its KV cache.

    limit = overcommit * tokens that the cache holds / tokens of a rollout when it ends

This is prime-rl's formula (`src/prime_rl/orchestrator/concurrency.py` at commit 014aa9d), applied
to each replica. `overcommit` begins at 1, where all running rollouts fit at their final lengths. It
is updated after each turn, in which as many rollouts end as the limit allows at once. It grows if
hardly any rollout was preempted, the cache has room and the replica is full. It falls if many were
preempted.

prime-rl cuts by a quarter, then by half, at the first preemption that it sees. In simulations this
left a third of the cache unused, and steps took 13 to 16 % longer than without a limit. An
occasional preemption costs less than an unused slot. So this module counts preemptions per finished
rollout (`docs/concurrency.md`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

GROWTH, BACKOFF = 1.05, 0.9
"""Factors on `overcommit` after a turn with few preemptions, and after one with many."""
FEW, MANY = 0.05, 0.25
"""Preemptions per finished rollout: at most FEW is a good turn, more than MANY a bad one."""
BINDING = 0.9
"""Share of the slots that must be in use before more slots are added."""
LEAST_OVERCOMMIT, MOST_OVERCOMMIT = 0.25, 16.0
FULL = 0.98
"""Share of the cache in use above which no slots are added, because they would stay empty."""


@dataclass(slots=True)
class FinalLengths:
    """Lengths, prompts included, of the rollouts that ended last."""

    enough: int
    """Rollouts of one step. Short rollouts end first, so fewer of them look shorter than the step
    is.
    """
    longest: int
    """Maximum tokens of a rollout."""
    _arrived: deque[int] = field(default_factory=deque)
    _sum: int = 0

    def expected(self, num_running: int) -> float:
        """Return the mean final length of a rollout, while `num_running` rollouts run.

        Until a whole step has ended, running rollouts count with the maximum length, because they
        outlasted the others.
        """
        num_ended = len(self._arrived)
        outlasting = min(num_running, self.enough - num_ended)
        if not num_ended + outlasting:
            return self.longest
        return (self._sum + outlasting * self.longest) / (num_ended + outlasting)

    def add(self, tokens: int) -> None:
        """Add the final length of a rollout, and forget the oldest one beyond `enough`."""
        if len(self._arrived) == self.enough:
            self._sum -= self._arrived.popleft()
        self._arrived.append(tokens)
        self._sum += tokens


@dataclass(slots=True)
class ConcurrencyLimit:
    """The limit of one replica."""

    most: int
    """Upper bound of the limit."""
    limit: int = 1
    """Rollouts that the replica may have now."""
    overcommit: float = 1.0
    _capacity: int | None = None
    """Tokens that its cache holds. None where unknown: the limit is then `most`."""
    _num_ended: int = 0
    """Rollouts that ended since the last turn."""
    _num_preempted: int = 0
    """Preemptions since the last turn."""

    def open(self, capacity: int | None, expected: float) -> None:
        """Start with a cache of `capacity` tokens and rollouts of `expected` tokens."""
        self._capacity = capacity
        self._set(expected)

    def see(
        self, cache_use: float | None, num_preempted: int, num_left: int, expected: float
    ) -> None:
        """Update from a replica's report at the end of a rollout; `num_left` rollouts remain there."""
        if self._capacity is None or cache_use is None:
            return
        self._num_ended += 1
        self._num_preempted += num_preempted
        if self._num_ended >= self.limit:
            self._turn(is_taken=num_left + 1 >= BINDING * self.limit and cache_use < FULL)
        self._set(expected)

    def _turn(self, *, is_taken: bool) -> None:
        """End a turn; `is_taken` says whether all slots are in use while more could be."""
        put_off = self._num_preempted / self._num_ended
        if put_off > MANY:
            self.overcommit = max(LEAST_OVERCOMMIT, self.overcommit * BACKOFF)
        elif put_off <= FEW and is_taken:
            self.overcommit = min(MOST_OVERCOMMIT, self.overcommit * GROWTH)
        self._num_ended = self._num_preempted = 0

    def _set(self, expected: float) -> None:
        if self._capacity is None:
            self.limit = self.most
        else:
            fitting = int(self.overcommit * self._capacity / expected)
            self.limit = max(1, min(self.most, fitting))

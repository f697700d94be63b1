"""How many rollouts a replica may have, as the pressure on its KV cache has it.

    limit = overcommit * tokens that the cache holds / tokens that a rollout ends with

This is prime-rl's form (`src/prime_rl/orchestrator/concurrency.py` at commit 014aa9d), here for each replica. `overcommit`
begins at 1, where all that run would fit at their ends, and changes with each turn, in which as many rollouts end as there
are places: it grows while hardly any is put off, the cache has room and the places are taken, and falls while many are.

prime-rl cuts by a quarter, then by half, with the first preemption that it sees. That left a third of the cache unused in
simulations, whose steps took 13 to 16 % longer than with no bound at all: a rollout that is put off now and then costs less
than an empty place. So what counts here is how many are put off for each that ends (`docs/concurrency.md`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

GROWTH, BACKOFF = 1.05, 0.9
"""Of the overcommitment, with a turn that went well, and with one that did not."""
FEW, MANY = 0.05, 0.25
"""Rollouts put off for each that ends: up to the one it went well, beyond the other it did not."""
BINDING = 0.9
"""Share of its places that must be taken for more to be of use."""
LEAST_OVERCOMMIT, MOST_OVERCOMMIT = 0.25, 16.0
FULL = 0.98
"""Share of the cache in use from which no places are added: they would stay empty."""


@dataclass(slots=True)
class FinalLengths:
    """Tokens, prompts included, that rollouts have ended with lately."""

    enough: int
    """A step's worth, which speaks for all: short rollouts end first, so fewer look shorter than the step is."""
    longest: int
    """Tokens of the longest rollout that there may be."""
    _arrived: deque[int] = field(default_factory=deque)
    _sum: int = 0

    def expected(self, num_running: int) -> float:
        """Return the tokens that a rollout ends with, where so many run.

        Before a step's worth has ended those that run count as the longest: they have outlasted the others.
        """
        num_ended = len(self._arrived)
        outlasting = min(num_running, self.enough - num_ended)
        if not num_ended + outlasting:
            return self.longest
        return (self._sum + outlasting * self.longest) / (num_ended + outlasting)

    def add(self, tokens: int) -> None:
        """Enter what a rollout has ended with, and forget the oldest where it is one too many."""
        if len(self._arrived) == self.enough:
            self._sum -= self._arrived.popleft()
        self._arrived.append(tokens)
        self._sum += tokens


@dataclass(slots=True)
class ConcurrencyLimit:
    """Of one replica."""

    most: int
    """More it never has."""
    limit: int = 1
    """Rollouts that it may have now."""
    overcommit: float = 1.0
    _capacity: int | None = None
    """Tokens that its cache holds; None where nobody says, and nothing keeps it from `most`."""
    _num_ended: int = 0
    """Rollouts that ended since the last turn."""
    _num_preempted: int = 0
    """Times that one was put off since."""

    def open(self, capacity: int | None, expected: float) -> None:
        """Begin with a cache of so many tokens, where a rollout is expected to end with `expected`."""
        self._capacity = capacity
        self._set(expected)

    def see(
        self, cache_use: float | None, num_preempted: int, num_left: int, expected: float
    ) -> None:
        """Enter what a replica told at the end of a rollout, after which it has `num_left`."""
        if self._capacity is None or cache_use is None:
            return
        self._num_ended += 1
        self._num_preempted += num_preempted
        if self._num_ended >= self.limit:
            self._turn(is_taken=num_left + 1 >= BINDING * self.limit and cache_use < FULL)
        self._set(expected)

    def _turn(self, *, is_taken: bool) -> None:
        """End a turn; `is_taken` says whether all places are, and more could be."""
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

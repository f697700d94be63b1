"""The stages of one data-parallel rank, each free from a time of its own: one forward, one backward in turn.

Stage s of p holds at most p - s micro-batches between their forward and their backward pass. A micro-batch enters
a stage once the one before has sent it, and the stage has done what came earlier: forward passes until it is full,
then backward and forward in turn (1F1B: Narayanan et al. 2021, arXiv 2104.04473). Micro-batches that come before
the last has left the first stage keep the pipeline full; otherwise it drains, and fills again.

Passes without a backward one (scores) go through in one direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDING = 1e-12
"""Share of an instant by which two sums of the same durations may differ: what comes so late is not late."""


class _Batch(NamedTuple):
    """A micro-batch between its two passes."""

    backward: Sequence[float]
    send: float
    """Seconds between two stages."""


@dataclass(slots=True)
class Pipeline:
    """See the module."""

    num_stages: int
    free_at: list[float] = field(default_factory=list)
    """When each stage has done all that it was given."""
    open_until: float = 0.0
    """When the last micro-batch leaves the first stage: what comes by then finds the pipeline full."""
    _waiting: list[deque[_Batch]] = field(default_factory=list)
    """Micro-batches of which each stage has yet to do the backward pass."""
    _returned_at: list[deque[float]] = field(default_factory=list)
    """When the stage after has sent the gradients of those back, of as many as it has done."""

    def __post_init__(self) -> None:
        self.free_at = [0.0] * self.num_stages
        self._waiting = [deque() for _ in range(self.num_stages)]
        self._returned_at = [deque() for _ in range(self.num_stages)]

    def train(
        self, forward: Sequence[float], backward: Sequence[float], send: float, now: float
    ) -> None:
        """Put a micro-batch through that is there at `now`, given its seconds on each stage and between two."""
        if self.num_stages == 1:
            self.open_until = max(self.free_at[0], now) + forward[0] + backward[0]
            self.free_at[0] = self.open_until
            return
        if now > self.open_until * (1 + ROUNDING):
            self.drain()
        stages, free_at = self.num_stages, self.free_at
        batch, ready_at = _Batch(backward, send), now
        for stage in range(stages):
            waiting = self._waiting[stage]
            if len(waiting) == stages - stage:
                self._go_back(stage)
            start = max(free_at[stage], ready_at)
            free_at[stage] = start + forward[stage]
            ready_at = free_at[stage] + send
            waiting.append(batch)
        self._returned_at[-1].append(free_at[-1])
        self.open_until = free_at[0]

    def score(self, forward: Sequence[float], send: float, now: float) -> None:
        """Put a micro-batch through in one direction."""
        self.drain()
        ready_at = now
        for stage in range(self.num_stages):
            start = max(self.free_at[stage], ready_at)
            self.free_at[stage] = start + forward[stage]
            ready_at = self.free_at[stage] + send
        self.open_until = self.free_at[0]

    def drain(self) -> float:
        """Do the backward passes that are left; return when all stages are free."""
        for stage in range(self.num_stages - 1, -1, -1):
            while self._waiting[stage]:
                self._go_back(stage)
        return max(self.free_at)

    def pause(self, seconds: float, now: float) -> None:
        """Let every stage spend seconds in which nothing else can be done, once it is free."""
        self.drain()
        self.free_at = [max(now, free) + seconds for free in self.free_at]

    def resume_at(self, instant: float) -> None:
        """Let no stage do more before `instant`, by when all are free."""
        self.free_at = [instant] * self.num_stages

    def occupy(self, free_at: Sequence[float]) -> None:
        """Take when another order of passes leaves each stage free, and the first one open."""
        self.free_at, self.open_until = list(free_at), free_at[0]

    def _go_back(self, stage: int) -> None:
        batch = self._waiting[stage].popleft()
        start = max(self.free_at[stage], self._returned_at[stage].popleft())
        self.free_at[stage] = start + batch.backward[stage]
        if stage:
            self._returned_at[stage - 1].append(self.free_at[stage] + batch.send)

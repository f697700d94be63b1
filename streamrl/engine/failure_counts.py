"""Count failures, so that policies can drop a hopeless rollout or stop a run without progress."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, Rollout

# kinds of reasons counted separately: reasons with random names would be unlimited
MOST_KINDS = 1000
NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class FailureCounts:
    """Counts of failed rollouts, dropped groups and reasons; `state` updates it."""

    failed_at: deque[float]
    """Times of the last failures of rollouts and rewards, at most as many as are too many within a
    minute. Failures caused by a lost replica do not count, because replica losses have a limit
    of their own.
    """
    failed: dict[int, Rollout] = field(default_factory=dict)
    """Rollouts that failed and are not ready yet, by id."""
    num_dropped: int = 0
    """Consecutive dropped groups with a failed rollout; a completed group resets it."""
    num_failed_pushes: int = 0
    """Consecutive failed pushes."""
    last_step_at: float = 0.0
    """When the primary trainer made its last step, or the run began, in seconds."""
    _counts: Counter[str] = field(default_factory=Counter)
    """Failed commands since the last step, by reason; reasons that differ only in numbers count as
    one.
    """
    _examples: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the most frequent reason since the last step; empty if nothing failed."""
        if not self._counts:
            return ""
        ((kind, count),) = self._counts.most_common(1)
        return f", mostly for {self._examples[kind]!r} ({count:,} of {self._counts.total():,} failures)"

    def is_storm(self, now: float, seconds: float) -> bool:
        """Whether as many failures as fit in `failed_at` happened within the last `seconds`."""
        failed_at = self.failed_at
        return len(failed_at) == failed_at.maxlen and now - failed_at[0] <= seconds

    # Changes --------------------------------------------------------------------------------------

    def enter(self, reason: str) -> None:
        """Count the reason why a command failed."""
        kind = NUMBER.sub("", reason)
        if kind in self._examples or len(self._examples) < MOST_KINDS:
            self._counts[kind] += 1
            self._examples.setdefault(kind, reason)

    def fail(self, rollout: Rollout, now: float | None) -> None:
        """Record that a rollout, or its reward, failed at `now` seconds; `now` is None if its replica was lost."""
        rollout.failures += 1
        self.failed[rollout.id] = rollout
        if now is not None:
            self.failed_at.append(now)

    def recover(self, rollout: Rollout) -> None:
        """Record that a rollout has its reward, which may complete its group."""
        self.failed.pop(rollout.id, None)
        if not rollout.group.num_missing:
            self.num_dropped = 0

    def drop(self, group: Group) -> None:
        """Enter that a group is dropped."""
        if self.failed and any(rollout.id in self.failed for rollout in group.rollouts):
            self.num_dropped += 1

    def end_step(self, now: float) -> None:
        """Record that a step was made, and reset the counts of the time before it."""
        self.last_step_at = now
        self._counts.clear()
        self._examples.clear()

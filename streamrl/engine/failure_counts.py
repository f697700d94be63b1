"""Count failures, so that a policy can tell a hopeless rollout, or a run without progress."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, Rollout

MOST_KINDS = 1000  # kinds of reasons that are counted apart: what names random things has too many
NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class FailureCounts:
    """Rollouts that failed, groups dropped for them, and reasons; `state` tells it what happens."""

    failed_at: deque[float]
    """Instants of the last failures of rollouts and rewards, at most as many as are too many within a minute. What
    was lost with a replica is left out: that loss is counted elsewhere."""
    failed: dict[int, Rollout] = field(default_factory=dict)
    """Rollouts that failed and are not ready yet, by id."""
    num_dropped: int = 0
    """Groups dropped in a row in which a rollout failed: none got all its rewards in between."""
    num_failed_pushes: int = 0
    """Pushes that failed in a row."""
    last_step_at: float = 0.0
    """When the leading trainer made its last step, or the run began."""
    _counts: Counter[str] = field(default_factory=Counter)
    """By reason, without the numbers in which those of one kind differ: commands that failed since the last step."""
    _examples: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say which reason is the most frequent since the last step; nothing where nothing failed."""
        if not self._counts:
            return ""
        ((kind, count),) = self._counts.most_common(1)
        return f", mostly for {self._examples[kind]!r} ({count:,} of {self._counts.total():,} failures)"

    def is_storm(self, now: float, seconds: float) -> bool:
        """Whether as many failures as `failed_at` holds came within the last `seconds`."""
        failed_at = self.failed_at
        return len(failed_at) == failed_at.maxlen and now - failed_at[0] <= seconds

    # Changes --------------------------------------------------------------------------------------

    def enter(self, reason: str) -> None:
        """Enter why a command failed."""
        kind = NUMBER.sub("", reason)
        if kind in self._examples or len(self._examples) < MOST_KINDS:
            self._counts[kind] += 1
            self._examples.setdefault(kind, reason)

    def fail(self, rollout: Rollout, now: float | None) -> None:
        """Enter that a rollout, or its reward, failed at `now` seconds, or was lost with its replica."""
        rollout.failures += 1
        self.failed[rollout.id] = rollout
        if now is not None:
            self.failed_at.append(now)

    def recover(self, rollout: Rollout) -> None:
        """Enter that a rollout has its reward, and with it perhaps its group all of them."""
        if self.failed:
            self.failed.pop(rollout.id, None)
        if not rollout.group.num_missing:
            self.num_dropped = 0

    def drop(self, group: Group) -> None:
        """Enter that a group is dropped."""
        if self.failed and any(rollout.id in self.failed for rollout in group.rollouts):
            self.num_dropped += 1

    def end_step(self, now: float) -> None:
        """Enter that a step was made: whatever failed before did not keep the run from it."""
        self.last_step_at = now
        self._counts.clear()
        self._examples.clear()

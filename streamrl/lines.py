"""Where rollouts and groups wait for their turn; what no longer waits is skipped at the head."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from streamrl.entities import Group, Phase, Rollout


class WaitingRollouts:
    """Rollouts to dispatch, oldest draw first, also after they come back."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Rollout]] = []
        """(id, number of additions before it, rollout): one that comes back may stand there twice."""
        self._num_added = 0

    def add(self, rollout: Rollout) -> None:
        """Let a rollout wait."""
        rollout.phase = Phase.WAITING
        heappush(self.heap, (rollout.id, self._num_added, rollout))
        self._num_added += 1

    def first(self) -> Rollout | None:
        """Give the oldest rollout that still waits."""
        heap = self.heap
        while heap:
            rollout = heap[0][2]
            if rollout.phase is Phase.WAITING and not rollout.group.is_dropped:
                return rollout
            heappop(heap)
        return None

    def of_step(self, step: int) -> list[Rollout]:
        """Give every rollout of `step` that still waits, oldest draw first."""
        found = {
            entry[0]: entry[2]
            for entry in sorted(self.heap)
            if entry[2].phase is Phase.WAITING
            and entry[2].group.step == step
            and not entry[2].group.is_dropped
        }
        return list(found.values())


class WaitingGroups:
    """Groups that a step could take, in the order they were added."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, group: Group) -> None:
        """Let a group wait."""
        self._groups.append(group)

    def first(self) -> Group | None:
        """Give the first group that no step has taken and that was not dropped."""
        while self._groups:
            if self._groups[0].is_free:
                return self._groups[0]
            self._groups.popleft()
        return None

"""Where rollouts and groups wait for their turn; what no longer waits is skipped at the head."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from streamrl.engine.entities import Group, Phase, Rollout

Place = tuple[int, ...]
"""Where a rollout stands in line: smaller is earlier."""


class WaitingRollouts:
    """Rollouts to dispatch, oldest draw first, also after they come back; or in order of what was learnt.

    Learning, the oldest step comes first, and in it one rollout of each group, which tells of its siblings
    (Seer, arXiv 2511.14617, calls it a speculative request); each part by expected length, longest first.
    """

    def __init__(self, learns: bool = False) -> None:
        self.heap: list[tuple[Place, int, Rollout]] = []
        """(place, number of additions before it, rollout): what comes back, or changes place, may stand there
        twice."""
        self._num_added = 0
        self._learns = learns

    def add(self, rollout: Rollout) -> None:
        """Let a rollout wait."""
        rollout.phase = Phase.WAITING
        place = self._place(rollout) if self._learns else (rollout.id,)
        heappush(self.heap, (place, self._num_added, rollout))
        self._num_added += 1

    def learn_from(self, finished: Rollout) -> None:
        """Let the siblings of a rollout that finished wait where its length puts them, if that is asked for."""
        if not self._learns:
            return
        for sibling in finished.group.learn(finished.tokens):
            if sibling.phase is Phase.WAITING:
                self.add(sibling)

    def first(self) -> Rollout | None:
        """Return the first rollout that still waits."""
        heap = self.heap
        while heap:
            place, _, rollout = heap[0]
            is_here = rollout.phase is Phase.WAITING and not rollout.group.is_dropped
            if is_here and (not self._learns or place == self._place(rollout)):
                return rollout
            heappop(heap)
        return None

    def of_step(self, step: int) -> list[Rollout]:
        """Return every rollout of `step` that still waits, first in line first."""
        found = {
            entry[2].id: entry[2]
            for entry in sorted(self.heap)
            if entry[2].phase is Phase.WAITING
            and entry[2].group.step == step
            and not entry[2].group.is_dropped
        }
        return list(found.values())

    def _place(self, rollout: Rollout) -> Place:
        """Return the place of a rollout by what is known now."""
        group = rollout.group
        tells = not group.num_known and rollout is group.rollouts[0]
        return (group.step, not tells, -rollout.expected_tokens, rollout.id)


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
        """Return the first group that no step has taken and that was not dropped."""
        while self._groups:
            if self._groups[0].is_free:
                return self._groups[0]
            self._groups.popleft()
        return None

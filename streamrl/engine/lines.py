"""Where rollouts and groups wait for their turn; what no longer waits is skipped at the head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush

from streamrl.engine.entities import Group, Rollout

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
        rollout.phase = "waiting"
        place = self._place(rollout) if self._learns else (rollout.id,)
        heappush(self.heap, (place, self._num_added, rollout))
        self._num_added += 1

    def expect(self, rollout: Rollout, tokens: int) -> None:
        """Let a rollout, wherever it is, be expected to be so long; one that waits may change its place."""
        rollout.expected_tokens = tokens
        rollout.group.is_told = True
        if self._learns and rollout.phase == "waiting":
            self.add(rollout)

    def first(self) -> Rollout | None:
        """Return the first rollout that still waits."""
        heap = self.heap
        while heap:
            place, _, rollout = heap[0]
            is_here = rollout.phase == "waiting" and not rollout.group.is_dropped
            if is_here and (not self._learns or place == self._place(rollout)):
                return rollout
            heappop(heap)
        return None

    def of_step(self, step: int) -> list[Rollout]:
        """Return every rollout of `step` that still waits, first in line first."""
        found = {
            entry[2].id: entry[2]
            for entry in sorted(self.heap)
            if entry[2].phase == "waiting"
            and entry[2].group.step == step
            and not entry[2].group.is_dropped
        }
        return list(found.values())

    def _place(self, rollout: Rollout) -> Place:
        """Return the place of a rollout by what is known now."""
        group = rollout.group
        tells = not group.is_told and rollout is group.rollouts[0]
        return (group.step, not tells, -rollout.expected_tokens, rollout.id)


class GroupLine:
    """Groups that lie ahead of a trainer's cursor on the stream, in the order in which they were added."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, group: Group) -> bool:
        return group.id in self._groups

    def add(self, group: Group) -> None:
        """Let a group wait."""
        self._groups[group.id] = group

    def remove(self, group: Group) -> bool:
        """Let a group wait no longer; return whether it did."""
        return self._groups.pop(group.id, None) is not None

    def first(self) -> Group | None:
        """Return the group that waits longest."""
        return next(iter(self._groups.values()), None)

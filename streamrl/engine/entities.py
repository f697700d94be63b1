"""What the engine's state is made of: rollouts, groups and replicas, and the queues in which they wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from streamrl.engine.concurrency import ConcurrencyLimit
from streamrl.engine.messages import DrawnGroup

Phase = Literal["waiting", "generating", "finished", "verifying", "ready"]
"""Where a rollout is on its way from prompt to gradient.

One that is finished is generated, and nobody has asked for its reward yet; one that is ready has it, and how far each
trainer is with it, the trainer's batch knows.
"""


@dataclass(slots=True, eq=False)
class Rollout:
    """One sampled response."""

    id: int
    group: Group
    expected_tokens: int
    phase: Phase = "waiting"
    replica: Replica | None = None
    is_aborting: bool = False
    tokens: int = 0
    born: int | None = None
    """Version that its first token was sampled from; None before any token."""
    reward: float = 0.0
    failures: int = 0
    sent_at: float = 0.0
    """When it was last sent to a replica."""


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one prompt."""

    id: int
    step: int
    """The step it was drawn for."""
    oldest_version: int
    prompt_tokens: int
    rollouts: list[Rollout] = field(default_factory=list)
    is_dropped: bool = False
    num_missing: int = 0
    """Rollouts that are not ready yet."""
    is_told: bool = False
    """Whether other lengths are expected of its rollouts than when it was drawn."""
    family: str | None = None
    """Of its prompt, where anybody heeds it."""

    @property
    def is_uniform(self) -> bool:
        """Whether all its rewards are known, and equal."""
        return not self.num_missing and len({rollout.reward for rollout in self.rollouts}) == 1

    @classmethod
    def draw(cls, drawn: DrawnGroup, step: int, oldest_version: int) -> Group:
        """Make a group, with its rollouts, as it was drawn for `step`."""
        group = cls(drawn.group, step, oldest_version, drawn.prompt_tokens)
        group.num_missing = len(drawn.rollouts)
        group.family = drawn.family
        group.rollouts = [
            Rollout(rollout, group, expected)
            for rollout, expected in zip(drawn.rollouts, drawn.expected_tokens, strict=True)
        ]
        for number, tokens, version in kept_of(drawn):
            rollout = group.rollouts[drawn.rollouts.index(number)]
            rollout.tokens, rollout.born = tokens, version
        return group


def kept_of(drawn: DrawnGroup) -> Iterator[tuple[int, int, int]]:
    """Yield each rollout that has tokens from before the run was resumed, how many, and the version of the first."""
    for rollout, (tokens, version) in zip(drawn.rollouts, drawn.kept, strict=False):
        if tokens:
            yield rollout, tokens, version


@dataclass(slots=True, eq=False)
class Replica:
    """One inference engine with its GPUs."""

    id: int
    version: int
    kind: int = 0
    """Which of the fleet's kinds it is."""
    share: float = 1.0
    """Rollouts that it gets for each that a replica of the first kind gets."""
    load: float = 0.0
    """What it would have on its hands with one rollout more, by its share; the fleet keeps it."""
    is_serving: bool = False
    loading: int | None = None
    """Version that a `LoadWeights` under way brings."""
    promised: int | None = None
    """Version that what is sent now starts under, or a newer one; None while it may be sent nothing."""
    must_load: bool = False
    """Whether what it has, or loads, are weights that its trainer has lost: it may be sent nothing before it loads."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """What was sent there and has not ended, queued or running."""
    places: ConcurrencyLimit | None = None
    """How many of these it may have, where that follows its KV cache."""

    @property
    def has_place(self) -> bool:
        """Whether it may be sent one more."""
        return self.places is None or len(self.rollouts) < self.places.limit

    def promises(self, oldest_version: int) -> bool:
        """Whether what is sent there now starts under `oldest_version` or newer."""
        return self.promised is not None and self.promised >= oldest_version


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

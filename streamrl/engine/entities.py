"""The parts of the engine's state: rollouts, groups and replicas, and their queues."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal

import msgspec

from streamrl.engine.concurrency import ConcurrencyLimit
from streamrl.engine.messages import HELD_OUT, DrawnGroup

Phase = Literal[
    "queued", "acting", "waiting", "prefilled", "generating", "finished", "verifying", "ready"
]
"""The phase of a rollout between prompt and gradient.

With prefill replicas a rollout generates there first. It is "prefilled" until a replica decodes it.

With an environment a rollout is "queued" until its environment may start or act, and "acting" while
it does. "finished" means generated, before its reward is requested; "ready" means that its reward is known.
Each trainer's batch records how far that trainer is with a ready rollout.
"""


class Rollout(msgspec.Struct, eq=False):
    """One sampled response: an episode of one turn, or of several with an environment."""

    id: int
    group: Group
    expected_tokens: int
    phase: Phase = "waiting"
    replica: Replica | None = None
    is_aborting: bool = False
    tokens: int = 0
    born: int | None = None
    """Version that sampled its first token; None before the first token."""
    reward: float = 0.0
    failures: int = 0
    sent_at: float = 0.0
    """When it was last sent to a replica, in seconds."""

    turn: int = 0
    """Turns that its environment has answered."""
    observed: int = 0
    """Tokens of its observations."""
    is_turn_over: bool = False
    """Whether its last turn has ended and has no answer yet."""
    has_environment: bool = False
    """Whether an environment is starting or open for it."""
    is_under_way: bool = False
    """Whether its environment was started and its episode has not ended."""
    is_truncated: bool = False
    """Whether the time of its episode is over."""
    deadline: float = inf
    """Instant at which its episode ends, in seconds."""
    home: int | None = None
    """Replica of its last turn, which generates its next one if it can."""
    prefilled_on: int | None = None
    """Prefill replica that last computed its context; None before one did."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is an episode of an evaluation."""
        return self.id >= HELD_OUT

    @property
    def context(self) -> int:
        """Tokens of its prompt, its output and its observations."""
        return self.group.prompt_tokens + self.tokens + self.observed

    def start_over(self) -> None:
        """Forget its tokens and turns, because its episode begins again."""
        self.tokens = self.turn = self.observed = 0
        self.born = None
        self.is_turn_over = self.is_truncated = False


class Group(msgspec.Struct, eq=False):
    """The rollouts of one prompt."""

    id: int
    step: int
    """The step that it was drawn for."""
    oldest_version: int
    prompt_tokens: int
    rollouts: list[Rollout] = []
    is_dropped: bool = False
    num_missing: int = 0
    """Rollouts that are not ready yet."""
    is_told: bool = False
    """Whether the expected lengths of its rollouts have changed since it was drawn."""
    family: str | None = None
    """Family of its prompt, if a trainer uses families."""

    @property
    def is_uniform(self) -> bool:
        """Whether all its rewards are known and equal."""
        return not self.num_missing and len({rollout.reward for rollout in self.rollouts}) == 1

    @classmethod
    def draw(cls, drawn: DrawnGroup, step: int, oldest_version: int) -> Group:
        """Return a new group, with its rollouts, that was drawn for `step`."""
        group = cls(drawn.group, step, oldest_version, drawn.prompt_tokens, family=drawn.family)
        numbers, expected = drawn.rollouts, drawn.expected_tokens
        group.num_missing = len(numbers)
        group.rollouts = [
            Rollout(number, group, tokens) for number, tokens in zip(numbers, expected, strict=True)
        ]
        if drawn.kept:
            group.keep(drawn)
        return group

    def keep(self, drawn: DrawnGroup) -> None:
        """Set the tokens from before a resume."""
        for number, tokens, version in kept_of(drawn):
            rollout = self.rollouts[drawn.rollouts.index(number)]
            rollout.tokens, rollout.born = tokens, version
        for rollout, kept in zip(self.rollouts, drawn.turns, strict=False):
            rollout.turn, rollout.observed = kept.answered, kept.observed
            rollout.is_turn_over = kept.is_turn_over


def kept_of(drawn: DrawnGroup) -> Iterator[tuple[int, int, int]]:
    """Yield each rollout with tokens from before a resume: its id, their number, and the version of the first token."""
    for rollout, (tokens, version) in zip(drawn.rollouts, drawn.kept, strict=False):
        if tokens:
            yield rollout, tokens, version


@dataclass(slots=True, eq=False)
class Replica:
    """One inference engine with its GPUs."""

    id: int
    version: int
    kind: int = 0
    """Index of its kind in the fleet."""
    share: float = 1.0
    """Rollouts that it gets for each rollout of a replica of the first kind."""
    is_lent: bool = False
    """Whether it is on GPUs of the primary trainer, and sleeps except while they are lent to it."""
    prefills: bool = False
    """Whether it only prefills contexts, which other replicas decode."""
    is_serving: bool = False
    loading: int | None = None
    """Version that its running `LoadWeights` brings."""
    promised: int | None = None
    """Minimum version for rollouts sent now; None while no rollout may be sent."""
    must_load: bool = False
    """Whether it has, or loads, weights that the trainer lost. Then no rollout may be sent before
    it loads again.
    """
    is_excused: bool = False
    """Whether it started or loaded when the trainer was lost with its weights. If it ends before it
    has them, its end does not count as a loss.
    """
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Rollouts that were sent to it and have not ended, queued or running."""
    leaves_at: float | None = None
    """Instant at which its machine is taken away, in seconds; None without a notice. Until then it
    finishes what it can, but gets no more rollouts and no more weights.
    """
    empty_at: float = inf
    """Instant from which its rollouts move to other replicas, because its machine leaves."""
    places: ConcurrencyLimit | None = None
    """Limit on its rollouts, if it follows its KV cache."""

    @property
    def load(self) -> float:
        """Its number of rollouts plus one, divided by its share, or by its limit if it has one."""
        width = self.share if self.places is None else self.places.limit
        return (len(self.rollouts) + 1) / width

    @property
    def has_place(self) -> bool:
        """Whether one more rollout may be sent to it."""
        return self.places is None or len(self.rollouts) < self.places.limit

    def promises(self, oldest_version: int) -> bool:
        """Whether a rollout that is sent now starts under `oldest_version` or newer."""
        return self.promised is not None and self.promised >= oldest_version


Place = int | tuple[int, ...]
"""Sort key of a waiting rollout: smaller is earlier. In draw order it is the id."""


class WaitingRollouts:
    """Rollouts to dispatch, in draw order; or ordered by what their siblings show.

    With `learns`, the oldest step comes first. Within a step, one rollout of each group comes
    first, because it predicts the length of its siblings (a speculative request in Seer, arXiv
    2511.14617). Within both parts, longer expected lengths come first.
    """

    def __init__(self, learns: bool = False) -> None:
        self.heap: list[tuple[Place, int, Rollout]] = []
        """(place, number of earlier additions, rollout). A rollout that comes back or changes its
        place may be in it twice.
        """
        self._num_added = 0
        self._learns = learns

    def add(self, rollout: Rollout) -> None:
        """Add a rollout to the queue."""
        rollout.phase = "waiting"
        place = self._place(rollout) if self._learns else rollout.id
        heappush(self.heap, (place, self._num_added, rollout))
        self._num_added += 1

    def add_new(self, rollouts: Collection[Rollout]) -> None:
        """Add rollouts that were just drawn, in draw order."""
        heap, first = self.heap, self._num_added
        self._num_added += len(rollouts)
        places = map(self._place, rollouts) if self._learns else (each.id for each in rollouts)
        entries = zip(places, range(first, self._num_added), rollouts, strict=True)
        if len(rollouts) < len(heap):
            for entry in entries:
                heappush(heap, entry)
        else:
            heap += entries
            heapify(heap)

    def expect(self, rollout: Rollout, tokens: int) -> None:
        """Set the expected length of a rollout in any phase; a waiting one may change its place."""
        rollout.expected_tokens = tokens
        rollout.group.is_told = True
        if self._learns and rollout.phase == "waiting":
            self.add(rollout)

    def first(self) -> Rollout | None:
        """Return the first waiting rollout, or None."""
        heap, learns = self.heap, self._learns
        while heap:
            place, _, rollout = heap[0]
            if (
                rollout.phase == "waiting"
                and not rollout.group.is_dropped
                and (not learns or place == self._place(rollout))
            ):
                return rollout
            heappop(heap)
        return None

    def of_step(self, step: int) -> list[Rollout]:
        """Return the waiting rollouts of `step`, in queue order."""
        found = {
            entry[2].id: entry[2]
            for entry in sorted(self.heap)
            if entry[2].phase == "waiting"
            and entry[2].group.step == step
            and not entry[2].group.is_dropped
        }
        return list(found.values())

    def _place(self, rollout: Rollout) -> Place:
        """Return the current sort key of a rollout."""
        group = rollout.group
        tells = not group.is_told and rollout is group.rollouts[0]
        return (group.step, not tells, -rollout.expected_tokens, rollout.id)


class GroupLine:
    """Groups that are ahead of a trainer's cursor on the stream, in the order of addition."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __contains__(self, group: Group) -> bool:
        return group.id in self._groups

    def add(self, group: Group) -> None:
        """Add a group."""
        self._groups[group.id] = group

    def remove(self, group: Group) -> bool:
        """Remove a group; return whether it was in the line."""
        return self._groups.pop(group.id, None) is not None

    def first(self) -> Group | None:
        """Return the group that waits longest, or None."""
        return next(iter(self._groups.values()), None)

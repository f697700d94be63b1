"""What the state is made of: rollouts, their groups, and the replicas that generate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from streamrl.engine.messages import DrawnGroup
from streamrl.engine.places import Places

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
    places: Places | None = None
    """How many of these it may have, where that follows its KV cache."""

    @property
    def has_place(self) -> bool:
        """Whether it may be sent one more."""
        return self.places is None or len(self.rollouts) < self.places.limit

    def promises(self, oldest_version: int) -> bool:
        """Whether what is sent there now starts under `oldest_version` or newer."""
        return self.promised is not None and self.promised >= oldest_version

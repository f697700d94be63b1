"""What the state is made of: rollouts, their groups, and the replicas that generate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from streamrl.engine.messages import DrawnGroup

PRIOR_SAMPLES = 1
"""Finished siblings that what was expected at first counts for. On real groups (R1-Distill-1.5B on AIME, Qwen3-1.7B
on GPQA) least squares puts it between 0.5 and 1.5, whether no past sample of the prompt was known or one."""


class Phase(Enum):
    """Where a rollout is on its way from prompt to gradient."""

    WAITING = auto()
    GENERATING = auto()
    FINISHED = auto()
    """Generated; nobody has asked for its reward yet."""
    VERIFYING = auto()
    READY = auto()
    """Has a reward; whether it can be trained on depends on its group."""
    TRAINING = auto()
    """In the trainer's hands: forward passes or gradient."""
    TRAINED = auto()
    """In the gradient of the coming step."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One sampled response."""

    id: int
    group: Group
    expected_tokens: int
    phase: Phase = Phase.WAITING
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
    taken_for: int | None = None
    is_dropped: bool = False
    num_missing: int = 0
    """Rollouts that are not ready yet."""
    num_known: int = 0
    """Rollouts whose length its siblings have learnt from."""

    @classmethod
    def draw(cls, drawn: DrawnGroup, step: int, oldest_version: int) -> Group:
        """Make a group, with its rollouts, as it was drawn for `step`."""
        group = cls(drawn.group, step, oldest_version, drawn.prompt_tokens)
        group.num_missing = len(drawn.rollouts)
        group.rollouts = [
            Rollout(rollout, group, expected)
            for rollout, expected in zip(drawn.rollouts, drawn.expected_tokens, strict=True)
        ]
        return group

    def learn(self, tokens: int) -> list[Rollout]:
        """Blend the length of a rollout that finished into what is expected of its siblings; return these.

        With n lengths known the mean of these and of what was expected at first, which counts as
        `PRIOR_SAMPLES`: an estimate moves towards a new length by the share that the length then has.
        """
        self.num_known += 1
        share = 1 / (PRIOR_SAMPLES + self.num_known)
        unfinished = [r for r in self.rollouts if r.phase in (Phase.WAITING, Phase.GENERATING)]
        for rollout in unfinished:
            rollout.expected_tokens += round((tokens - rollout.expected_tokens) * share)
        return unfinished

    @property
    def is_free(self) -> bool:
        """Whether a step could still take it."""
        return self.taken_for is None and not self.is_dropped


@dataclass(slots=True, eq=False)
class Replica:
    """One inference engine with its GPUs."""

    id: int
    version: int
    is_serving: bool = False
    loading: int | None = None
    """Version that a `LoadWeights` under way brings."""
    promised: int | None = None
    """Version that what is sent now starts under, or a newer one; None while it may be sent nothing."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """What was sent there and has not ended, queued or running."""

    def promises(self, oldest_version: int) -> bool:
        """Whether what is sent there now starts under `oldest_version` or newer."""
        return self.promised is not None and self.promised >= oldest_version

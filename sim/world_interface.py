"""The part of the simulated world that replicas, trainers, transfers and verifiers may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import simpy

from streamrl.engine.messages import Event
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.handling import Handling
from streamrl.workload.episodes import Episode
from streamrl.workload.workload import Draw


class WorldInterface(Protocol):
    """The clock, the run and its costs, the rollouts by id, and a receiver of events."""

    @property
    def env(self) -> simpy.Environment:
        """Simulated time."""
        ...

    @property
    def cores(self) -> Cores:
        """Cores that roles compute on."""
        ...

    @property
    def run_file(self) -> Run:
        """The run file."""
        ...

    @property
    def costs(self) -> Costs:
        """Seconds, bytes and capacities of the run's hardware."""
        ...

    @property
    def handling(self) -> Handling:
        """The CPU time of rollouts and turns outside of the model."""
        ...

    @property
    def disruptions(self) -> Disruptions:
        """Current slowdowns and stalls."""
        ...

    @property
    def rollouts(self) -> Mapping[int, SimRollout]:
        """All drawn rollouts by id."""
        ...

    def emit(self, event: Event) -> None:
        """Report an event at this instant."""
        ...


@dataclass(slots=True)
class Disruptions:
    """Current slowdowns and stalls of resources."""

    slowness: float = 1.0
    """Factor on the duration of a push that begins now."""
    stalled_until: float = 0.0
    """Instant until which verifiers are stalled, in seconds since the run's start."""


class Reached(msgspec.Struct):
    """How far an episode has come. It may end before its last turn, when its time is over."""

    tokens: int = 0
    """Generated tokens and tokens of observations."""


class SimRollout(msgspec.Struct, frozen=True, gc=False):
    """The data of a rollout that only the world knows, from the moment it is drawn."""

    group: int
    prompt_tokens: int
    length: int
    """Output tokens when it is finished."""
    episode: Episode | None = None
    """Its turns; None without an environment."""
    reached: Reached | None = None

    @property
    def sequence_tokens(self) -> int:
        """Tokens that a trainer or a reward model reads: the prompt, the output, and observations."""
        return self.prompt_tokens + (self.length if self.reached is None else self.reached.tokens)


def rollouts_of(draws: Iterable[Draw]) -> dict[int, SimRollout]:
    """Return the rollouts of groups by id."""
    found: dict[int, SimRollout] = {}
    for drawn, lengths, episodes in draws:
        group, prompt_tokens = drawn.group, drawn.prompt_tokens
        if not episodes:
            for rollout, length in zip(drawn.rollouts, lengths, strict=False):
                found[rollout] = SimRollout(group, prompt_tokens, length)
        else:
            for rollout, length, episode in zip(drawn.rollouts, lengths, episodes, strict=False):
                found[rollout] = SimRollout(group, prompt_tokens, length, episode, Reached())
    return found

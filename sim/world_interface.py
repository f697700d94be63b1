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
from streamrl.workload.workload import Draw


class WorldInterface(Protocol):
    """A clock to wait with, the run and its costs, the rollouts by id, and someone to tell what happened."""

    @property
    def env(self) -> simpy.Environment:
        """Simulated time."""
        ...

    @property
    def cores(self) -> Cores:
        """What roles compute on."""
        ...

    @property
    def run_file(self) -> Run:
        """The run file."""
        ...

    @property
    def costs(self) -> Costs:
        """Seconds, bytes and capacities of its hardware."""
        ...

    @property
    def disruptions(self) -> Disruptions:
        """What keeps resources from their usual pace just now."""
        ...

    @property
    def rollouts(self) -> Mapping[int, SimRollout]:
        """Every rollout that was drawn, by id."""
        ...

    def emit(self, event: Event) -> None:
        """Take note that something happened, at this instant."""
        ...


@dataclass(slots=True)
class Disruptions:
    """What keeps resources from their usual pace."""

    slowness: float = 1.0
    """How many times as long as it should a push takes that begins now."""
    stalled_until: float = 0.0
    """Seconds since the run's start before which verifiers look at nothing."""


class SimRollout(msgspec.Struct, frozen=True, gc=False):
    """What only the world knows of a rollout, from the moment it is drawn."""

    group: int
    prompt_tokens: int
    length: int
    """Output tokens that it will have."""


def rollouts_of(draws: Iterable[Draw]) -> dict[int, SimRollout]:
    """Return the rollouts of groups by id."""
    return {
        rollout: SimRollout(draw.drawn.group, draw.drawn.prompt_tokens, length)
        for draw in draws
        for rollout, length in zip(draw.drawn.rollouts, draw.lengths, strict=True)
    }

"""The simulated verifier pool: rewards cost time; only their being known matters here."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from streamrl.engine.messages import Verified, Verify

if TYPE_CHECKING:
    from sim.world import SimWorld

REWARD = 0.0  # a simulated rollout has no text to reward


class Verifier:
    """One process a worker, first come, first served."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._time = world.run_file.verifier.time
        self._inbox = simpy.Store(world.env)
        if self._time:
            for _ in range(world.run_file.verifier.workers):
                world.env.process(self._run())

    def begin(self, command: Verify) -> None:
        """Queue a rollout; a verifier that takes no time answers at once."""
        if self._time:
            self._inbox.put(command)
        else:
            self._world.emit(Verified(command.rollout, REWARD))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            command: Verify = yield self._inbox.get()
            yield self._world.env.timeout(self._time)
            self._world.emit(Verified(command.rollout, REWARD))

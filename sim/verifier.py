"""The simulated verifier pool: rewards cost time; only their being known matters here."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from sim.surroundings import Surroundings
from streamrl.engine.messages import Verified, Verify

REWARD = 0.0  # a simulated rollout has no text to reward


class Verifier:
    """One process a worker, first come, first served."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._time = around.run_file.verifier.time
        self._inbox = simpy.Store(around.env)
        if self._time:
            for _ in range(around.run_file.verifier.workers):
                around.env.process(self._run())

    def verify(self, command: Verify) -> None:
        """Reward a rollout after those before it; a verifier that takes no time answers at once."""
        if self._time:
            self._inbox.put(command)
        else:
            self._around.emit(Verified(command.rollout, REWARD))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            command: Verify = yield self._inbox.get()
            yield self._around.env.timeout(self._time)
            self._around.emit(Verified(command.rollout, REWARD))

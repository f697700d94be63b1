"""The CPU time of rollouts and turns outside of the model: controller, verifier, environment, and the server of a replica.

One process makes the decisions, so it handles one after the other. On a host whose cores they share, this slows
replicas and the trainer down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import simpy

from streamrl.sim.cpu_contention import WorkTime


class Handling:
    """Spends the CPU time of each rollout that ends and of each turn that its environment answers."""

    def __init__(self, env: simpy.Environment, core: WorkTime, seconds: float) -> None:
        self.seconds = seconds
        """CPU seconds of one; 0 if they were not measured. A turn is assumed to take as long as a rollout."""
        self._core = core
        self._waiting: simpy.Store = simpy.Store(env)
        if seconds:
            env.process(self._run())

    def then(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` after the CPU time of this one and of earlier ones; at once if it takes none."""
        if self.seconds:
            self._waiting.put(go_on)
        else:
            go_on()

    def _run(self) -> Generator[simpy.Event, Callable[[], None], None]:
        while True:
            go_on = yield self._waiting.get()
            yield self._core.work(self.seconds)
            go_on()

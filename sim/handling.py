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
        """CPU seconds of a rollout; 0 if they were not measured."""
        self._core = core
        self._waiting: simpy.Store = simpy.Store(env)
        if seconds:
            env.process(self._run())

    def then(self, go_on: Callable[[], None], seconds: float | None = None) -> None:
        """Call `go_on` after CPU time, of a rollout unless `seconds` are given, and after earlier ones; at once if it takes none."""
        if self.seconds:
            self._waiting.put((go_on, self.seconds if seconds is None else seconds))
        else:
            go_on()

    def _run(self) -> Generator[simpy.Event, tuple[Callable[[], None], float], None]:
        while True:
            go_on, seconds = yield self._waiting.get()
            yield self._core.work(seconds)
            go_on()

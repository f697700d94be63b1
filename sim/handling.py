"""The CPU time of rollouts and turns outside of the model: controller, verifier, environment, and the server of a replica.

One process makes the decisions, so it handles one after the other. On a host whose cores they share, this slows
replicas and the trainer down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import simpy

from streamrl.sim.cpu_contention import WorkTime

ACTION_SHARE = 0.1
"""CPU time of an action or a start of an environment, relative to a rollout's. Assumption from one run of
examples/agentic-tools.toml on two cores: a rollout with 3.4 actions and a start took 10.5 to 12 ms, where its profile
has 7.8 ms for a rollout of one turn.
"""


class Handling:
    """Spends the CPU time of each rollout that ends and of each turn that its environment answers."""

    def __init__(self, env: simpy.Environment, core: WorkTime, seconds: float) -> None:
        self.seconds = seconds
        """CPU seconds of a rollout; 0 if they were not measured."""
        self._core = core
        self._waiting: simpy.Store = simpy.Store(env)
        if seconds:
            env.process(self._run())

    def then(self, go_on: Callable[[], None], share: float = 1.0) -> None:
        """Call `go_on` after a share of a rollout's CPU time, and after earlier ones; at once if it takes none."""
        if self.seconds:
            self._waiting.put((go_on, share * self.seconds))
        else:
            go_on()

    def _run(self) -> Generator[simpy.Event, tuple[Callable[[], None], float], None]:
        while True:
            go_on, seconds = yield self._waiting.get()
            yield self._core.work(seconds)
            go_on()

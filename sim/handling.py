"""The CPU time of rollouts and turns outside of the model: controller, verifier, replica servers, and environments.

One process makes the decisions, so it handles one after the other. Each environment has a process of its own, so as many
compute at a time as the host has cores. On a host whose cores they share, all of them slow replicas and the trainer down.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import simpy

from streamrl.sim.cpu_contention import Cores, WorkTime


class Handling:
    """Spends the CPU time of the controller for each rollout that ends and for each action."""

    def __init__(self, env: simpy.Environment, core: WorkTime, seconds: float) -> None:
        self.seconds = seconds
        """CPU seconds of a rollout; 0 if they were not measured."""
        self._waiting: simpy.Store = simpy.Store(env)
        if seconds:
            env.process(_serve(self._waiting, core))

    def then(self, go_on: Callable[[], None], seconds: float | None = None) -> None:
        """Call `go_on` after CPU time, of a rollout unless `seconds` are given, and after earlier ones; at once if it takes none."""
        if self.seconds:
            self._waiting.put((go_on, self.seconds if seconds is None else seconds))
        else:
            go_on()


class EnvironmentProcesses:
    """Spends the CPU time of environments in their own processes."""

    def __init__(self, env: simpy.Environment, cores: Cores) -> None:
        self._waiting: simpy.Store = simpy.Store(env)
        for _ in range(cores.num_shared):
            env.process(_serve(self._waiting, cores.time_of("acting")))

    def then(self, go_on: Callable[[], None], seconds: float) -> None:
        """Call `go_on` after CPU time, on the first core that no other environment uses; at once if it takes none."""
        if seconds:
            self._waiting.put((go_on, seconds))
        else:
            go_on()


def _serve(
    waiting: simpy.Store, core: WorkTime
) -> Generator[simpy.Event, tuple[Callable[[], None], float], None]:
    """Spend the CPU time of one after the other."""
    while True:
        go_on, seconds = yield waiting.get()
        yield core.work(seconds)
        go_on()

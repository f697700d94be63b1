"""How many replicas there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.messages import Command, StartReplica, StartTrainer, Stop
from streamrl.state import State


class KeepReplicas:
    """Bring up the trainer and `num_replicas` replicas, and a new replica for each that is lost.

    A replacement gets an id of its own. After `max_restarts` of them the run stops: what kills replicas
    so often will kill the next one too.
    """

    def __init__(self, num_replicas: int, max_restarts: int) -> None:
        self.num_replicas = num_replicas
        self.max_restarts = max_restarts

    def decide(self, state: State) -> Iterable[Command]:
        """Yield what is missing."""
        is_complete = state.trainer_is_ready and len(state.fleet.replicas) == self.num_replicas
        if is_complete or not state.has_started or state.is_stopping:
            return ()
        return self._start(state)

    def _start(self, state: State) -> Iterator[Command]:
        if not state.trainer_is_ready and state.trainer_command is None:
            yield StartTrainer()
        while len(state.fleet.replicas) < self.num_replicas:
            if state.fleet.num_started >= self.num_replicas + self.max_restarts:
                yield Stop(f"{self.max_restarts} replicas were restarted and another was lost")
                return
            yield StartReplica(state.fleet.num_started, state.pushed_version)

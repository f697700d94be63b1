"""Which replica generates a rollout.

Rollouts are sent as soon as a replica promises a fresh enough version, and wait in its queue. Commands to
a replica take effect in order, so a rollout sent after a load starts under what was loaded or newer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.entities import Replica
from streamrl.messages import Command, Generate
from streamrl.policies.order import Order
from streamrl.state import State


class Dispatch:
    """Send every rollout that may start to the replica that `choose` gives."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def decide(self, state: State) -> Iterable[Command]:
        """Yield rollouts in draw order until no replica may take the next one."""
        if not state.waiting.heap or state.stop_reason is not None or not state.fleet.has_come_up:
            return ()
        return self._send(state)

    def _send(self, state: State) -> Iterator[Command]:
        while (rollout := state.waiting.first()) is not None:
            replica = self.choose(state, rollout.group.oldest_version)
            if replica is None:
                return
            yield Generate(
                rollout.id, replica.id, self.order.priority(rollout), prefix=rollout.tokens
            )

    def choose(self, state: State, oldest_version: int) -> Replica | None:
        """Give a replica that promises `oldest_version` or newer, or None while there is none."""
        raise NotImplementedError


class LeastLoaded(Dispatch):
    """Send a rollout to the replica that has the fewest."""

    def choose(self, state: State, oldest_version: int) -> Replica | None:
        """Give the least loaded replica that is fresh enough."""
        return state.fleet.least_loaded(oldest_version)


class RoundRobin(Dispatch):
    """Send rollouts to the replicas in turn, whatever they have."""

    def choose(self, state: State, oldest_version: int) -> Replica | None:
        """Give the next replica by id that is fresh enough."""
        return state.fleet.next_in_turn(oldest_version)

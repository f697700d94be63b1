"""Batches that do not mix on a replica: it finishes its share of one, and begins its share of the next.

Replicas do so each in its own time, and load between the two where `LoadBetweenBatches` has them. StreamRL
(arXiv 2504.15930) generates batches back to back with the newest weights received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.messages import Command
from streamrl.engine.policies.dispatch import Dealt, Dispatch, in_units
from streamrl.engine.state import State


class EvenShares(Dealt):
    """Deal in draw order, the next to whoever has least: what other dispatch comes to where all are idle."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__(dispatch.order, dispatch.keeps_groups)

    def deal(self, state: State, units: list[list[Rollout]], replicas: list[Replica]) -> None:
        """Share the units out."""
        self.share_out(units, replicas)


class BatchByBatch(Dispatch):
    """Deal a batch as another dispatch does, and send each replica its share once it is idle.

    A batch is dealt when the last share of the one before is sent. What comes back is dealt again.
    """

    def __init__(self, dealt: Dealt) -> None:
        super().__init__(dealt.order, dealt.keeps_groups)
        self.dealt = dealt
        self._shares: dict[int, list[Rollout]] = {}
        """What each replica begins with once it is idle."""
        self._places: dict[int, int] = {}
        """Replica of each rollout of the batch that was dealt last."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the shares of idle replicas."""
        return super().decide(state) if state.fleet.idle else ()

    def _send(self, state: State) -> Iterator[Command]:
        if not self._is_dealt(state) and not self._deal(state):
            return
        for replica in [state.fleet.replicas[r] for r in state.fleet.idle if r in self._shares]:
            yield from self._begin(replica)

    def _begin(self, replica: Replica) -> Iterator[Command]:
        oldest = max(rollout.group.oldest_version for rollout in self._shares[replica.id])
        if not replica.promises(oldest):
            return  # it loads first
        for rollout in self._shares.pop(replica.id):
            if not rollout.group.is_dropped:
                yield self.send(rollout, replica)

    def _is_dealt(self, state: State) -> bool:
        """Return whether the first rollout in line has a replica, and that is still there."""
        first = state.waiting.first()
        if first is None:
            return True
        replica = self._places.get(first.id)
        return replica in self._shares and replica in state.fleet.replicas

    def _deal(self, state: State) -> bool:
        """Share out what waits of the oldest step over all replicas, once an idle one may begin with it.

        Who is still busy, or has older weights, is dealt its share too: it will load before it begins.
        """
        first = state.waiting.first()
        assert first is not None
        oldest = first.group.oldest_version
        if not any(replica.promises(oldest) for replica in state.fleet.idle.values()):
            return False
        self.dealt.places.clear()
        units = in_units(state.waiting.of_step(first.group.step), self.keeps_groups)
        self.dealt.deal(state, units, state.fleet.serving())
        self._shares, self._places = defaultdict(list), {}
        for unit in units:
            replica = self.dealt.places[unit[0].id]
            self._shares[replica] += unit
            self._places |= {rollout.id: replica for rollout in unit}
        return True

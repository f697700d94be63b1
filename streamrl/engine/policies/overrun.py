"""Rollouts that outgrow what was expected of them, and move to the replicas of the tail.

Skewness-aware dispatch gives the rollouts expected to be longest replicas of their own, whose batches are small. A
ranker misses some of these: they run among the others, in large batches, until the step waits for them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nsmallest

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.latency import Latency
from streamrl.engine.messages import Command
from streamrl.engine.policies.migration import MoveRollouts, expected_rest
from streamrl.engine.policies.order import Order
from streamrl.engine.policies.skew import Partition, SkewnessAware
from streamrl.engine.recent import quantile
from streamrl.engine.state import State

LOOKS = 32  # while a rollout alone grows as long as the tail's shortest: it is seen 3 % late


class MoveOverrun(MoveRollouts):
    """Move a rollout that is longer than all but `tail_share` of the last ones were to a replica of its step's tail.

    What the ranker expects of it does not count, of which only the order is relied on. What a replica has generated so far nobody tells. A rollout counts as running from when it is first seen among the
    replica's first by priority, as many as it runs, so that it is no shorter than it is taken for.
    """

    def __init__(
        self,
        order: Order,
        latency: Latency,
        context_time: float,
        dispatch: SkewnessAware,
        moves_caches: bool = False,
    ) -> None:
        """Take the dispatch that knows which replicas are a step's tail, beside what `MoveRollouts` takes."""
        super().__init__(order, latency, context_time, moves_caches)
        self.dispatch = dispatch
        self._look_at = 0.0
        self._since: dict[int, tuple[int, float]] = {}
        """Where each rollout was first seen running, and when."""

    def look(self, state: State) -> Iterable[Command]:
        """Yield what begins the move of the rollout that has most ahead, of one step after the other."""
        if state.now < self._look_at or not state.recent.is_full:
            return ()
        partitions = {s: p for s, p in self.dispatch.partitions.items() if p is not None}
        if not partitions:
            return ()
        self._note_running(state)
        shortest = quantile(state.recent.ordered, 1 - self.dispatch.tail_share)
        for step, partition in partitions.items():
            if (found := self._choose(state, step, partition, shortest)) is not None:
                return self.begin(state, *found)
        self._look_at = state.now + self.latency.step_time(1) * shortest / LOOKS
        return ()

    def _note_running(self, state: State) -> None:
        since: dict[int, tuple[int, float]] = {}
        for replica in state.fleet.replicas.values():
            for rollout in self._running(replica):
                seen = self._since.get(rollout.id)
                if seen is None or seen[0] != replica.id:
                    seen = replica.id, state.now
                since[rollout.id] = seen
        self._since = since

    def _running(self, replica: Replica) -> Iterable[Rollout]:
        most, rollouts = self.latency.most_running, replica.rollouts.values()
        if len(rollouts) <= most:
            return rollouts
        return nsmallest(most, rollouts, key=lambda r: (self.order.priority(r), r.id))

    def _choose(
        self, state: State, step: int, partition: Partition, shortest: int
    ) -> tuple[Rollout, Replica, Replica] | None:
        """Return the rollout that has most ahead of those that overran and gain by a move, from where, and to where."""
        target = min(self._targets(state, partition), key=_by_load, default=None)
        if target is None:
            return None
        best: tuple[float, int] | None = None
        there = self.latency.step_time(len(target.rollouts) + 1)
        for source in state.fleet.replicas.values():
            if source.id in partition.tail or source.version != target.version:
                continue
            here = self.latency.step_time(min(len(source.rollouts), self.latency.most_running))
            for rollout in filter(self.may_move, source.rollouts.values()):
                done = self._done(state, rollout, here)
                if rollout.group.step != step or done <= shortest:
                    continue
                rest = expected_rest(state, rollout, done)
                is_worth = self.pays(rollout, rest, done, here - there)
                is_promised = target.promises(rollout.group.oldest_version)
                if is_worth and is_promised and (best is None or (rest, -rollout.id) > best):
                    best = (rest, -rollout.id)
        if best is None:
            return None
        rollout = state.rollouts[-best[1]]
        assert rollout.replica is not None, "it runs"
        return rollout, rollout.replica, target

    def _targets(self, state: State, partition: Partition) -> Iterator[Replica]:
        """Yield the tail's replicas that run all that they have, and could run one more."""
        for replica_id in partition.tail:
            replica = state.fleet.replicas.get(replica_id)
            if replica is None or not replica.is_serving or replica.loading is not None:
                continue
            if len(replica.rollouts) < self.latency.most_running:
                yield replica

    def _done(self, state: State, rollout: Rollout, step_time: float) -> float:
        """Return the tokens that a rollout has at least."""
        if rollout.id not in self._since:
            return 0.0
        return rollout.tokens + (state.now - self._since[rollout.id][1]) / step_time


def _by_load(replica: Replica) -> tuple[int, int]:
    return len(replica.rollouts), replica.id

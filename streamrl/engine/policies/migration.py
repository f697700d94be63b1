"""Move rollouts to replicas where they decode faster: stragglers, and those that outgrow their expected length.

Stragglers: near the end of a step some replicas are idle while others run several long rollouts. A
straggler decodes faster alone, and so do the rollouts that it leaves. The price is that its context
is computed again, or that its KV cache is transferred.

Overrun: skewness-aware dispatch gives the rollouts expected to be longest their own replicas with
small batches. A ranker misses some of them. These run in large batches among the others, until the
step waits only for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest

from streamrl.engine.entities import Replica, Rollout
from streamrl.engine.estimates import Latency, quantile
from streamrl.engine.messages import Abort, Command, Generate
from streamrl.engine.policies.dispatch import Order
from streamrl.engine.policies.skew import Partition, SkewnessAware
from streamrl.engine.state import State

MOST_MOVES = 2  # of one rollout: each computes its whole context again


@dataclass(frozen=True, slots=True)
class Move:
    """A rollout that is being moved."""

    rollout: int
    replica: int
    """Its new replica."""
    version: int
    """Version that computed its KV cache."""


class MoveRollouts:
    """Abort a rollout, and continue it on another replica of the same version.

    A move must save more by the smaller batch than the context costs. One rollout moves at a time;
    the next event looks again.
    """

    def __init__(
        self, order: Order, latency: Latency, context_time: float, moves_caches: bool = False
    ) -> None:
        self.order = order
        self.latency = latency
        self.context_time = context_time
        """Seconds for each token of context that moves."""
        self.moves_caches = moves_caches
        """Whether the KV cache moves with the rollout, unless its new replica has other weights by
        then.
        """
        self._move: Move | None = None
        """The rollout that was aborted to move."""
        self._num_moves: dict[int, int] = {}

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the second half of a move, and the first half of the next."""
        if self._move is not None:
            return self._go_on(state, self._move)
        if not state.num_generating or state.is_stopping:
            return ()
        return self.look(state)

    def look(self, state: State) -> Iterable[Command]:
        """Yield the commands that begin a move, if one is worth it."""
        raise NotImplementedError

    def begin(
        self, state: State, rollout: Rollout, source: Replica, target: Replica
    ) -> Iterator[Command]:
        """Yield the commands that begin the move of `rollout` from `source` to `target`."""
        self._num_moves = {r: n for r, n in self._num_moves.items() if r in state.rollouts}
        self._num_moves[rollout.id] = self._num_moves.get(rollout.id, 0) + 1
        self._move = Move(rollout.id, target.id, source.version)
        yield Abort(rollout.id, source.id)

    def may_move(self, rollout: Rollout) -> bool:
        """Whether `rollout` is not moving now, and has not reached the limit of moves."""
        return not rollout.is_aborting and self._num_moves.get(rollout.id, 0) < MOST_MOVES

    def pays(self, rollout: Rollout, rest: float, done: float, saved: float) -> bool:
        """Whether saving `saved` seconds on each of `rest` tokens outweighs the context of `done` tokens."""
        return rest * saved > self.context_time * (rollout.group.prompt_tokens + done)

    def _go_on(self, state: State, move: Move) -> Iterator[Command]:
        rollout = state.rollouts.get(move.rollout)
        if rollout is not None and rollout.phase == "generating":
            return  # it ends after the running decode step
        self._move = None
        replica = state.fleet.replicas.get(move.replica)
        if rollout is None or rollout.phase != "waiting" or rollout.group.is_dropped:
            return  # it finished before the abort, or was dropped
        if replica is not None and replica.promises(rollout.group.oldest_version):
            yield Generate(
                rollout.id,
                replica.id,
                self.order.priority(rollout),
                prefix=rollout.tokens,
                brings_cache=self._brings_cache(rollout, replica, move.version),
            )

    def _brings_cache(self, rollout: Rollout, replica: Replica, version: int) -> bool:
        is_same = replica.version == version and replica.loading is None
        return self.moves_caches and is_same and rollout.tokens > 0


class MoveStragglers(MoveRollouts):
    """Move the rollout with the most remaining tokens from the busiest replica to an idle one, when none waits."""

    def look(self, state: State) -> Iterable[Command]:
        """Yield the commands that begin a move from the busiest replica to an idle one."""
        if state.waiting.heap:
            return ()
        idle = state.fleet.least_loaded(0)
        if idle is None or idle.rollouts or not idle.is_serving or idle.loading is not None:
            return ()
        source = state.fleet.most_loaded()
        if source is None or len(source.rollouts) < 2 or source.version != idle.version:
            return ()
        rollout = self._choose(state, source)
        if rollout is None or not idle.promises(rollout.group.oldest_version):
            return ()
        return self.begin(state, rollout, source, idle)

    def _choose(self, state: State, source: Replica) -> Rollout | None:
        """Return the rollout with the most remaining tokens among those that gain by a move; ties go by expected length."""
        best: tuple[float, int, int] | None = None
        batch = len(source.rollouts)
        saved = self.latency.step_time(batch) - self.latency.step_time(1)
        for rollout in filter(self.may_move, source.rollouts.values()):
            done = rollout.tokens + (state.now - rollout.sent_at) / self.latency.step_time(batch)
            rest = expected_rest(state, rollout, done)
            found = (rest, rollout.expected_tokens, -rollout.id)
            if self.pays(rollout, rest, done, saved) and (best is None or found > best):
                best = found
        return None if best is None else state.rollouts[-best[2]]


def expected_rest(state: State, rollout: Rollout, done: float) -> float:
    """Return a rollout's expected remaining tokens: from its siblings, else from rollouts as long, else from its ranker."""
    if rollout.group.is_told and rollout.expected_tokens > done:
        return rollout.expected_tokens - done
    if state.recent.is_full:
        return state.recent.expected_rest(done)
    return max(0.0, rollout.expected_tokens - done)


# looks while a rollout grows to the tail's shortest length: an overrun is seen at most 3 % late
LOOKS = 32


class MoveOverrun(MoveRollouts):
    """Move a rollout that is longer than all but `tail_share` of the last ones to a tail replica of its step.

    The ranker's expected length is not used, because only its order is reliable. Replicas do not
    report the tokens of running rollouts. So a rollout counts as running from when it is first seen
    among the first by priority that its replica can run. Its length is therefore never
    overestimated.
    """

    def __init__(
        self,
        order: Order,
        latency: Latency,
        context_time: float,
        dispatch: SkewnessAware,
        moves_caches: bool = False,
    ) -> None:
        """Take the dispatch policy that knows the tail replicas of a step, and the arguments of `MoveRollouts`."""
        super().__init__(order, latency, context_time, moves_caches)
        self.dispatch = dispatch
        self._look_at = 0.0
        self._since: dict[int, tuple[int, float]] = {}
        """Where and when each rollout was first seen running."""

    def look(self, state: State) -> Iterable[Command]:
        """Yield the commands that move the overrun rollout with the most remaining tokens, step by step."""
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
        """Return the overrun rollout with the most remaining tokens that gains by a move, its replica and its new replica."""
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
        """Yield the tail replicas that run all their rollouts and have room for one more."""
        for replica_id in partition.tail:
            replica = state.fleet.replicas.get(replica_id)
            if replica is None or not replica.is_serving or replica.loading is not None:
                continue
            if len(replica.rollouts) < self.latency.most_running:
                yield replica

    def _done(self, state: State, rollout: Rollout, step_time: float) -> float:
        """Return the minimum number of tokens that a rollout has."""
        if rollout.id not in self._since:
            return 0.0
        return rollout.tokens + (state.now - self._since[rollout.id][1]) / step_time


def _by_load(replica: Replica) -> tuple[int, int]:
    return len(replica.rollouts), replica.id

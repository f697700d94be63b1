"""How a new policy version reaches the replicas: pushed once, then loaded by each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.messages import (
    Abort,
    Command,
    Generated,
    LoadWeights,
    PushWeights,
    Step,
    Verified,
)
from streamrl.engine.state import State


class DrainThenLoad:
    """Push at once; each replica finishes its running rollouts, loads, and then starts the waiting ones.

    No rollout is sampled from two versions. The batch of a draining replica shrinks.
    """

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each replica behind it."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=True)


class LoadInFlight:
    """Push at once; each replica pauses, loads, and continues its rollouts.

    Rollouts keep their KV cache, and each token records its version. Nothing drains, and nothing is
    computed twice.
    """

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each replica behind it."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=False)


class AbortAndResume:
    """Push at once; each replica aborts its rollouts, loads, and continues them from their prefix.

    The prefix is prefilled again under the new version. This costs compute, but avoids the drain.
    """

    ignores = (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push, then for each replica behind it the aborts and the load."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        for replica in _to_load(state):
            for rollout in state.fleet.replicas[replica].rollouts.values():
                if not rollout.is_aborting:
                    yield Abort(rollout.id, replica)
            yield LoadWeights(replica, state.pushed_version, drain=True)


class Barrier:
    """Push only while nothing is generated; all replicas wait until each has loaded."""

    ignores = (Verified,)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push once generation is idle, then a load for each replica."""
        return () if self.is_at_rest(state) else self._sync(state)

    def is_at_rest(self, state: State) -> bool:
        """Return whether every replica has the newest version that is due."""
        return not _is_behind(state)

    def _sync(self, state: State) -> Iterator[Command]:
        if not state.is_generating:
            yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=True)


class LoadBetweenBatches:
    """Push at once; each replica loads when it is idle.

    For `BatchByBatch`. As with `DrainThenLoad`, no rollout is sampled from two versions. But a
    replica drains at the end of its share of a batch, when its longest rollouts are done, not
    whenever new weights arrive.
    """

    ignores = (Verified,)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each idle replica behind it."""
        return () if self.is_at_rest(state) else self._sync(state)

    def is_at_rest(self, state: State) -> bool:
        """Return whether every replica has the newest version that is due."""
        return not _is_behind(state)

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        outdated = _to_load(state)
        if outdated:
            for replica in [r for r in state.fleet.idle if r in outdated]:
                yield LoadWeights(replica, state.pushed_version, drain=True)


def _is_behind(state: State) -> bool:
    """Return whether a replica lacks a version that it could load."""
    may_load = not state.is_stopping or state.awaits_evaluation
    return (bool(state.fleet.outdated) or state.must_push) and may_load


def _push(state: State) -> Iterator[Command]:
    """Yield a push of the newest version if one is due and not running; only every `sync_every`-th version is due.

    No push begins during an optimizer step: the version that the step makes is pushed instead.
    """
    leader = state.leader
    is_stepping = isinstance(leader.command, Step)
    is_able = leader.is_ready and not leader.is_lent
    if state.pushing is None and is_able and state.must_push and not is_stepping:
        yield PushWeights(leader.version, leader.id)


def _to_load(state: State) -> list[int]:
    """Return the replicas that should load the pushed version; none if that version is lost or its weights changed."""
    is_lost = state.pushed_version > state.leader.version or state.has_new_weights
    return [] if is_lost else list(state.fleet.outdated)

"""How a new policy version reaches the replicas: pushed once, then loaded by each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.messages import Abort, Command, LoadWeights, PushWeights, Step
from streamrl.engine.state import State


class DrainThenLoad:
    """Push at once; each replica finishes what it runs, loads, and only then starts what waits on it.

    No rollout is sampled from two versions. A replica that drains runs at a falling batch size.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each replica behind it."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=True)


class LoadInFlight:
    """Push at once; each replica pauses, loads, and goes on with what it runs.

    Rollouts keep their KV cache and carry one version a token. Nothing drains, nothing is computed twice.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each replica behind it."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=False)


class AbortAndResume:
    """Push at once; each replica gives up what it has, loads, and takes it up again from the prefix.

    The prefix is prefilled once more under the new version, which costs compute and saves the drain.
    """

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
    """Push only while nothing is generated; everyone waits until every replica has loaded."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push once generation is idle, then a load for each replica."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        if not state.num_generating:
            yield from _push(state)
        for replica in _to_load(state):
            yield LoadWeights(replica, state.pushed_version, drain=True)


class LoadBetweenBatches:
    """Push at once; each replica loads once it has nothing on its hands.

    For `BatchByBatch`. No rollout is sampled from two versions, as with `DrainThenLoad`; but a replica drains
    where its share of a batch ends, when the longest rollouts are done, not wherever new weights catch it.
    """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the push of the newest version, then a load for each idle replica behind it."""
        return self._sync(state) if _is_behind(state) else ()

    def _sync(self, state: State) -> Iterator[Command]:
        yield from _push(state)
        outdated = _to_load(state)
        if outdated:
            for replica in [r for r in state.fleet.idle if r in outdated]:
                yield LoadWeights(replica, state.pushed_version, drain=True)


def _is_behind(state: State) -> bool:
    """Return whether any replica lacks a version that it could be given."""
    return (bool(state.fleet.outdated) or state.must_push) and not state.is_stopping


def _push(state: State) -> Iterator[Command]:
    """Yield a push where one is due that is not on its way: of the newest version, every `sync_every` of them.

    What waits while an optimizer step is made, as after a push that took as long as all before it, is the next version.
    """
    leader = state.leader
    is_stepping = isinstance(leader.command, Step)
    if state.pushing is None and leader.is_ready and state.must_push and not is_stepping:
        yield PushWeights(leader.version, leader.id)


def _to_load(state: State) -> list[int]:
    """Return who should load what is pushed; nobody where that version is lost, or has other weights now."""
    is_lost = state.pushed_version > state.leader.version or state.has_new_weights
    return [] if is_lost else list(state.fleet.outdated)

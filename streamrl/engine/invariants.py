"""What is true of every state between two events; tests check it after each one."""

from __future__ import annotations

from streamrl.engine.entities import Phase
from streamrl.engine.state import State


def check(state: State) -> None:
    """Raise `AssertionError` naming the first invariant that `state` breaks.

    1. Every drawn rollout is known, trained, or dropped with a reason; none is two of these.
    2. A rollout is on a replica exactly while it is being generated.
    3. Only rollouts of taken groups are in the trainer's lines or hands.
    4. No step holds more groups than a batch.
    5. No replica is newer than the pushed weights, nor those newer than the trainer's.
    """
    _check_accounts(state)
    _check_replicas(state)
    _check_training(state)


def _check_accounts(state: State) -> None:
    dropped = sum(state.dropped.values())
    lingering = sum(rollout.group.is_dropped for rollout in state.rollouts.values())
    known = len(state.rollouts) - lingering
    assert state.num_drawn == known + state.num_trained + dropped, (
        f"{state.num_drawn} rollouts drawn, but {known} known, {state.num_trained} trained, "
        f"{dropped} dropped"
    )
    for rollout_id, rollout in state.rollouts.items():
        assert rollout.id == rollout_id
        if not rollout.group.is_dropped:
            assert state.groups.get(rollout.group.id) is rollout.group, f"{rollout_id}: no group"
    for group in state.groups.values():
        missing = sum(
            rollout.phase not in (Phase.READY, Phase.TRAINING, Phase.TRAINED)
            for rollout in group.rollouts
        )
        assert group.num_missing == missing, f"group {group.id}: {group.num_missing} != {missing}"


def _check_replicas(state: State) -> None:
    generating = [r for r in state.rollouts.values() if r.phase is Phase.GENERATING]
    assert state.num_generating == len(generating)
    for rollout in state.rollouts.values():
        is_placed = rollout.replica is not None
        assert is_placed == (rollout.phase is Phase.GENERATING), (
            f"rollout {rollout.id} is misplaced"
        )
    serving: dict[int, int] = {}
    for replica in state.fleet.replicas.values():
        assert replica.version <= state.pushed_version <= state.version
        if replica.is_serving:
            serving[replica.version] = serving.get(replica.version, 0) + 1
        is_idle = replica.is_serving and replica.loading is None and not replica.rollouts
        assert is_idle == (replica.id in state.fleet.idle), f"replica {replica.id}: idle or not?"
        for rollout_id, rollout in replica.rollouts.items():
            assert rollout.id == rollout_id and rollout.replica is replica
    assert serving == state.fleet.num_serving, f"{serving} serve, not {state.fleet.num_serving}"


def _check_training(state: State) -> None:
    assert len(state.batch.groups) <= state.prompts_per_step, (
        f"{len(state.batch.groups)} groups in one step"
    )
    for line in (state.batch.unscored, state.batch.trainable):
        for rollout in line:
            assert rollout.group.id in state.batch.groups, f"rollout {rollout.id} was not taken"
            assert rollout.phase is Phase.READY, f"rollout {rollout.id} is {rollout.phase}"
    trained = sum(r.phase is Phase.TRAINED for r in state.rollouts.values())
    assert state.batch.num_in_gradient == trained, (
        f"{state.batch.num_in_gradient} in gradient, not {trained}"
    )
    verifying = sum(r.phase is Phase.VERIFYING for r in state.rollouts.values())
    assert state.num_verifying == verifying

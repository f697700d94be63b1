"""Invariants of the state between two events; tests check them after each event."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.engine.entities import Rollout
from streamrl.engine.environments import Environments
from streamrl.engine.evaluation import Evaluations
from streamrl.engine.messages import HELD_OUT
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide


def check(state: State) -> None:
    """Raise `AssertionError` with the first invariant that `state` breaks.

    1. For every drawn rollout and trainer, exactly one holds: it is open, trained, or lost with a
    reason.
    2. A rollout is on a replica exactly while it is generated.
    3. A trainer's queues and gradient contain only rollouts of taken groups.
    4. No step has more groups than a batch.
    5. A replica with a rollout limit has a limit of at least one, and at most what a replica may
    run.
    6. No replica is newer than the pushed weights, and these are not newer than the trainer, except
    for lost versions.
    7. Open environments and episodes in flight are those that are counted, and at most as many as
    allowed. An episode acts and generates only with an environment; one with a reward has none
    left to close.
    8. While replicas have GPUs of the primary trainer, it works on nothing. Only such replicas sleep.
    9. Each rollout of a running evaluation is to be sent, on a replica, or ended; none is on a
    replica that is gone. Replicas with such rollouts have the version that is evaluated. Others may
    have started meanwhile with an older one.
    10. A replica whose machine leaves gets no rollouts. Each such machine is away until it is replaced.
    11. A rollout with a prefilled context waits for a replica that decodes it.
    """
    _check_accounts(state)
    _check_replicas(state)
    for trainer in state.trainers:
        _check_trainer(state, trainer)
    if state.environments is not None:
        _check_environments(state, state.environments)
    if state.evaluations is not None:
        _check_evaluation(state, state.evaluations)
    verifying = sum(r.phase == "verifying" for r in [*state.rollouts.values(), *_held_out(state)])
    assert state.num_verifying == verifying


def _held_out(state: State) -> Collection[Rollout]:
    """Return the episodes of evaluations."""
    return () if state.evaluations is None else state.evaluations.episodes.values()


def _check_accounts(state: State) -> None:
    for rollout_id, rollout in state.rollouts.items():
        assert rollout.id == rollout_id
        if not rollout.group.is_dropped:
            assert state.groups.get(rollout.group.id) is rollout.group, f"{rollout_id}: no group"
    for group in state.groups.values():
        missing = sum(rollout.phase != "ready" for rollout in group.rollouts)
        assert group.num_missing == missing, f"group {group.id}: {group.num_missing} != {missing}"
        is_wanted = any(trainer.wants(group) for trainer in state.trainers)
        assert is_wanted, f"group {group.id}: kept though no trainer may train on it"


def _check_replicas(state: State) -> None:
    generating = [r for r in state.rollouts.values() if r.phase == "generating"]
    assert state.num_generating == len(generating)
    for rollout in state.rollouts.values():
        is_placed = rollout.replica is not None
        assert is_placed == (rollout.phase == "generating"), f"rollout {rollout.id} is misplaced"
    for rollout_id, rollout in state.prefilled.items():
        assert rollout.phase == "prefilled" and rollout.prefilled_on is not None, (
            f"rollout {rollout_id} has no context to decode from"
        )
        assert state.rollouts.get(rollout_id) is rollout and not rollout.group.is_dropped
    serving: dict[int, int] = {}
    for replica in state.fleet.replicas.values():
        is_settled = replica.loading is None and not replica.must_load
        if is_settled and state.pushed_version <= state.leader.version:
            assert replica.version <= state.pushed_version
        if replica.is_serving:
            serving[replica.version] = serving.get(replica.version, 0) + 1
        assert not (replica.must_load and replica.promised is not None), (
            f"replica {replica.id} promises what is lost"
        )
        limit = 1 if replica.places is None else replica.places.limit
        assert 1 <= limit <= max(1, state.fleet.most_places), (
            f"replica {replica.id}: {limit} places"
        )
        is_idle = replica.is_serving and replica.loading is None and not replica.rollouts
        assert is_idle == (replica.id in state.fleet.idle), f"replica {replica.id}: idle or not?"
        for rollout_id, rollout in replica.rollouts.items():
            assert rollout.id == rollout_id and rollout.replica is replica
    fleet = state.fleet
    leaving = [r.id for r in fleet.replicas.values() if r.leaves_at is not None]
    assert sorted(fleet.leaving) == sorted(leaving), f"{leaving} leave, not {list(fleet.leaving)}"
    assert all(not r.is_serving and r.promised is None for r in fleet.leaving.values())
    num_away = sum(kind.num_away for kind in fleet.kinds)
    assert num_away == len(fleet.away), f"{num_away} machines are away, not {list(fleet.away)}"
    own = [replica.id for replica in state.fleet.replicas.values() if replica.is_lent]
    asleep = [replica.id for replica in state.fleet.asleep.values() if replica.is_lent]
    assert sorted([*asleep, *state.fleet.lent]) == own, "a replica sleeps and is lent"
    assert state.leader.borrowable or len(asleep) == len(state.fleet.asleep), "a replica sleeps"
    assert not (state.leader.has_borrowed and state.fleet.num_serving), "GPUs train and generate"
    for replica in state.fleet.asleep.values():
        assert not replica.is_serving and replica.promised is None and replica.loading is None
    assert state.leader.is_lent == bool(state.fleet.lent)
    assert state.leader.can_lend or not state.fleet.lent or not state.leader.is_ready, (
        "the trainer works while its GPUs are lent"
    )
    assert serving == state.fleet.num_serving, f"{serving} serve, not {state.fleet.num_serving}"


def _check_environments(state: State, own: Environments) -> None:
    rollouts = [*state.rollouts.values(), *_held_out(state)]
    num_open = sum(rollout.has_environment for rollout in rollouts)
    assert own.num_open == num_open, f"{num_open} environments are open, not {own.num_open}"
    under_way = [rollout for rollout in rollouts if rollout.is_under_way]
    assert own.num_under_way == len(under_way)
    assert own.num_acting + own.num_acting_held_out == sum(r.phase == "acting" for r in rollouts)
    assert own.config.sandboxes is None or num_open <= own.config.sandboxes
    assert own.config.max_episodes is None or len(under_way) <= own.config.max_episodes
    for rollout in rollouts:
        is_live = (
            rollout.phase in ("acting", "waiting", "prefilled", "generating")
            and not rollout.group.is_dropped
        )
        assert not is_live or rollout.has_environment, f"rollout {rollout.id} has no environment"
        assert not is_live or rollout.is_under_way, f"rollout {rollout.id} has ended"
        if rollout.phase == "ready" and not rollout.is_held_out:
            assert not rollout.has_environment, f"rollout {rollout.id} kept its environment"
        assert rollout.turn <= own.config.max_turns, f"rollout {rollout.id} has too many turns"


def _check_evaluation(state: State, own: Evaluations) -> None:
    for episode in own.episodes.values():
        is_sent = episode.id - HELD_OUT in own.sent
        assert is_sent == (episode.phase == "generating") == (episode.replica is not None)
    if own.running is None:
        assert not own.to_send, "rollouts wait for no evaluation"
        return
    between = ("queued", "acting", "finished", "verifying")
    num_open = len(own.to_send) + len(own.sent)
    num_open += sum(episode.phase in between for episode in own.episodes.values())
    assert num_open + own.num_ended == own.num_rollouts or own.is_void, (
        f"{own.num_rollouts} rollouts evaluate, but {num_open} are open and {own.num_ended} ended"
    )
    if not own.is_void:
        replicas = state.fleet.replicas
        versions = {replicas[each].version for each in own.sent.values() if each in replicas}
        assert versions <= {own.running}, f"replicas evaluate {versions}, not {own.running}"


def _check_trainer(state: State, trainer: TrainerSide) -> None:
    batch = trainer.batch
    still_open = sum(len(group.rollouts) for group in state.groups.values() if trainer.wants(group))
    lost = sum(trainer.lost.values())
    assert state.num_drawn == still_open + trainer.num_trained + lost, (
        f"trainer {trainer.id}: {state.num_drawn} rollouts drawn, but {still_open} open, "
        f"{trainer.num_trained} trained, {lost} lost"
    )
    assert len(batch.groups) <= trainer.prompts_per_step, f"{len(batch.groups)} groups in one step"
    assert not any(group in trainer.line for group in batch.groups.values())
    for line in (batch.unscored, batch.trainable, batch.in_gradient):
        for rollout in line:
            assert rollout.group.id in batch.groups, f"rollout {rollout.id} was not taken"
            assert rollout.phase == "ready", f"rollout {rollout.id} is {rollout.phase}"
    handled = [*batch.unscored, *batch.trainable, *batch.in_gradient, *batch.in_hand]
    assert len({rollout.id for rollout in handled}) == len(handled), "a rollout is in two places"

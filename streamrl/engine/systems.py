"""Build the engine of a run: its policies, in order of precedence, and its initial state."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import assert_never

from streamrl.engine.engine import Engine, Policy
from streamrl.engine.entities import WaitingRollouts
from streamrl.engine.estimates import RecentLengths, latency_of
from streamrl.engine.failure_counts import FailureCounts
from streamrl.engine.fleet import make_fleet
from streamrl.engine.messages import TrainerJoined
from streamrl.engine.policies.checkpoint import CheckpointEvery
from streamrl.engine.policies.dispatch import (
    BatchByBatch,
    Dealt,
    Dispatch,
    EvenShares,
    FirstInFirstOut,
    FromOutside,
    LongestFirst,
    Order,
)
from streamrl.engine.policies.migration import MoveOverrun, MoveRollouts, MoveStragglers
from streamrl.engine.policies.oversampling import DropSurplus, KeepSurplus, SkipUniform
from streamrl.engine.policies.resize import AdjustReplicas, KeepReplicas, Promotion
from streamrl.engine.policies.retry import RetryThenDrop, StartOver, StopWithoutProgress, WindDown
from streamrl.engine.policies.secondary_trainers import (
    JoinedTrainers,
    SkipOutsideShare,
    StopDetached,
)
from streamrl.engine.policies.skew import SkewnessAware
from streamrl.engine.policies.staleness import (
    BoundedAdmission,
    BoundedBacklog,
    DropStale,
    TakeInLine,
)
from streamrl.engine.policies.streaming import Stream, VerifyOnArrival, WholeBatch
from streamrl.engine.policies.weight_sync import (
    AbortAndResume,
    Barrier,
    DrainThenLoad,
    LoadBetweenBatches,
    LoadInFlight,
)
from streamrl.engine.presets import AdmissionWindow, choose_system, window_of
from streamrl.engine.state import State
from streamrl.engine.trainer_side import LEADER, Batch, StreamShare, TrainerSide
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DISPATCH, dispatch_named
from streamrl.runfile.errors import shown
from streamrl.runfile.files import with_secondary_trainer
from streamrl.runfile.gpu_pools import most_replicas, replicas_per_node
from streamrl.runfile.policies_config import (
    LeftOverName,
    MigrationName,
    OrderName,
    PoliciesConfig,
    StreamingName,
    WeightSyncName,
)
from streamrl.runfile.roles_config import ReplicasConfig, TrainerConfig

PASSES_PER_COMMAND = (
    4  # a streamed command has at most this many fills, so that new rollouts do not wait long
)


ENDLESS = sys.maxsize  # steps of a run that is stopped from outside


def build_policies(run: Run) -> list[Policy]:
    """Return the policies of a run, in order of precedence."""
    system, window = (
        choose_system(run.policies),
        window_of(run.policies, run.algorithm.prompts_per_step),
    )
    return [
        VerifyOnArrival(),
        *([build_resize(run)] if run.policies.resize == "adjust" else []),
        KeepReplicas(
            run.policies.max_restarts, Promotion.of(run.policies, run.secondary_trainer_names)
        ),
        RetryThenDrop(run.policies.max_attempts),
        StopWithoutProgress(run.policies.max_dropped_groups, run.policies.max_step_time),
        StartOver(),
        WindDown(),
        CheckpointEvery(LEADER, run.execute.checkpoint_every, run.policies.max_attempts),
        *_leave_out(run, LEADER),
        *([DropStale(system.staleness_bound)] if system.over_staleness == "drop" else []),
        TakeInLine(LEADER),
        *_leave_over(run.policies.left_over, window),
        BoundedAdmission(window, system.waits_for_whole_batches),
        _streaming(run, LEADER, system.streaming),
        _weight_sync(system.weight_sync),
        *build_dispatch(run),
        *(
            policy
            for trainer in range(LEADER + 1, run.num_trainers)
            for policy in _follow(run, trainer)
        ),
        JoinedTrainers(run.num_trainers, _policies_of_joined),
    ]


def _policies_of_joined(trainer: TrainerSide) -> Sequence[Policy]:
    """Return the policies of a trainer that joined after the run began."""
    assert trainer.joined_as is not None, "it joined"
    return list(_follow(trainer.joined_as, trainer.id))


def _follow(run: Run, trainer: int) -> Iterator[Policy]:
    """Yield the policies of a secondary trainer, which works on complete groups at its own pace."""
    seen = run.as_seen_by(trainer)
    backlog = run.followers[trainer - 1].backlog
    if run.followers[trainer - 1].takes_share:
        yield SkipOutsideShare(trainer)
    yield CheckpointEvery(trainer, run.execute.checkpoint_every, run.policies.max_attempts)
    yield StopDetached(trainer)
    yield from _leave_out(run, trainer)
    yield TakeInLine(trainer)
    yield BoundedBacklog(trainer, backlog * run.algorithm.prompts_per_step)
    yield _streaming(seen, trainer, "stream")


def _leave_out(run: Run, trainer: int) -> Iterator[Policy]:
    """Yield the policy that skips groups of equal rewards, if the trainer or its possible successor asks for it."""
    promotion = (
        Promotion.of(run.policies, run.secondary_trainer_names) if trainer == LEADER else None
    )
    heirs = () if promotion is None else (promotion.trainer,)
    if any(run.as_seen_by(each).algorithm.leaves_out_uniform for each in (trainer, *heirs)):
        yield SkipUniform(trainer)


def _leave_over(left_over: LeftOverName, window: AdmissionWindow) -> Iterator[Policy]:
    """Yield the policy for the surplus groups of a full step, if the run draws more groups than it trains on."""
    if not window.num_extra:
        return
    match left_over:
        case "drop":
            yield DropSurplus(window)
        case "keep":
            yield KeepSurplus(window)
        case _:
            assert_never(left_over)


def build_dispatch(run: Run) -> list[Policy]:
    """Return the policies that move rollouts between replicas and send them to replicas.

    Raises:
        ValueError: a policy needs seconds that are missing, or cannot be made.
    """
    dispatch = _choose_dispatch(run)
    migration = _migration(run.policies, run.rollout.migration_transfer, dispatch)
    if choose_system(run.policies).weight_sync == "between-batches":
        dispatch = BatchByBatch(dispatch if isinstance(dispatch, Dealt) else EvenShares(dispatch))
    name = choose_system(run.policies).dispatch
    last = dispatch if name in DISPATCH.own else FromOutside(dispatch, name)
    return [last] if migration is None else [migration, last]


def _choose_dispatch(run: Run) -> Dispatch:
    system = choose_system(run.policies)
    policy = DISPATCH.class_of(system.dispatch, Dispatch)
    made: object = DISPATCH.make(system.dispatch, lambda: policy.make(run, _order(system.order)))
    if not isinstance(made, Dispatch):
        raise DISPATCH.refusal(system.dispatch, f"cannot be used: its make returned {shown(made)}")
    return made


def _order(name: OrderName) -> Order:
    match name:
        case "fifo":
            return FirstInFirstOut()
        case "longest-first":
            return LongestFirst()
        case _:
            assert_never(name)


def _streaming(run: Run, trainer: int, name: StreamingName) -> Policy:
    most = most_per_command(run.trainer, run.algorithm.rollouts_per_step, name)
    match name:
        case "stream":
            return Stream(trainer, rollouts_that_fill(run.trainer), most)
        case "whole-batch":
            shares_gpus = trainer == LEADER and run.policies.shares_gpus
            return WholeBatch(trainer, most, shares_gpus)
        case _:
            assert_never(name)


def _weight_sync(name: WeightSyncName) -> Policy:
    match name:
        case "barrier":
            return Barrier()
        case "drain-then-load":
            return DrainThenLoad()
        case "load-in-flight":
            return LoadInFlight()
        case "abort-and-resume":
            return AbortAndResume()
        case "between-batches":
            return LoadBetweenBatches()
        case _:
            assert_never(name)


def _migration(
    policies: PoliciesConfig, migration_transfer: str, dispatch: Dispatch
) -> MoveRollouts | None:
    """Return the policy that moves stragglers to other replicas; None if rollouts do not move."""
    if policies.migration == "none":
        return None
    latency = latency_of(policies, f"policies.migration {policies.migration!r}")
    if policies.context_time is None:
        raise ValueError(
            "policies.context_time is missing: migration needs the seconds of context that is computed again or sent"
        )
    order = _order(choose_system(policies).order)
    seconds = (order, latency, policies.context_time)
    if policies.migration == "consolidate":
        return MoveStragglers(*seconds, moves_caches(policies.migration, migration_transfer))
    if not isinstance(dispatch, SkewnessAware):
        why = "cannot be used: policies.migration 'overrun' needs a subclass of SkewnessAware"
        raise DISPATCH.refusal(choose_system(policies).dispatch, why)
    return MoveOverrun(*seconds, dispatch, moves_caches(policies.migration, migration_transfer))


def build_resize(run: Run) -> AdjustReplicas:
    """Return the policy that changes the number of replicas.

    Raises:
        ValueError: it needs a latency that is missing.
    """
    policies = run.policies
    return AdjustReplicas(
        latency_of(policies, f"policies.resize {policies.resize!r}"),
        unit=policies.resize_unit or replicas_per_node(run.rollout, run.cluster.pools),
        most=policies.max_replicas or most_replicas(run),
        window=policies.resize_window,
        shrink_after=policies.shrink_after,
    )


def needs_latency(policies: PoliciesConfig) -> bool:
    """Whether a policy of the run needs `policies.latency`."""
    return (
        dispatch_named(choose_system(policies).dispatch).needs_latency
        or policies.resize == "adjust"
        or policies.migration != "none"
    )


def needs_costs(policies: PoliciesConfig, others: tuple[ReplicasConfig, ...]) -> bool:
    """Whether costs must fill in a value before the engine of the run can be built."""
    return needs_latency(policies) or any(other.share is None for other in others)


def moves_caches(migration: MigrationName, migration_transfer: str) -> bool:
    """Whether the KV cache of a rollout moves with it."""
    return migration != "none" and migration_transfer == "kv"


def most_per_command(
    trainer: TrainerConfig, rollouts_per_step: int, streaming: StreamingName
) -> int:
    """Return the maximum number of rollouts in one command to the trainer."""
    match streaming:
        case "stream":
            return PASSES_PER_COMMAND * rollouts_that_fill(trainer)
        case "whole-batch":
            return rollouts_per_step
        case _:
            assert_never(streaming)


def rollouts_that_fill(trainer: TrainerConfig) -> int:
    """Return the number of rollouts that keep every data-parallel rank busy for one micro-batch."""
    return trainer.data_parallel * trainer.micro_batch


def build_engine(run: Run, *, is_endless: bool = False) -> Engine:
    """Return the engine of a run, before its first event. An endless one continues after the run's last step."""
    return Engine(build_state(run, is_endless=is_endless), build_policies(run))


def build_state(run: Run, *, is_endless: bool = False) -> State:
    """Return the state of a run before its `RunStarted`."""
    trainers = [_build_side(run, trainer) for trainer in range(run.num_trainers)]
    return State(
        num_steps=ENDLESS if is_endless else run.algorithm.steps,
        trainers=trainers,
        leader=trainers[LEADER],
        fleet=make_fleet(run.policies, run.rollout, run.algorithm, run.workload),
        recent=RecentLengths(enough=run.algorithm.rollouts_per_step),
        waiting=WaitingRollouts(run.policies.learns_from_siblings),
        failure_counts=FailureCounts(deque(maxlen=run.policies.max_failures_per_minute)),
        make_side=partial(_side_that_joins, run),
        sync_every=run.policies.sync_every,
    )


def _side_that_joins(run: Run, sides: Sequence[TrainerSide], event: TrainerJoined) -> TrainerSide:
    """Return the state of a trainer that joins, given the trainers that joined before."""
    before = sides[-1].joined_as or run
    side = _build_side(joined := with_secondary_trainer(before, event.follower), event.trainer)
    side.joined_as = joined
    return side


def _build_side(run: Run, trainer: int) -> TrainerSide:
    algorithm = run.as_seen_by(trainer).algorithm
    return TrainerSide(
        id=trainer,
        prompts_per_step=algorithm.prompts_per_step,
        rollouts_per_step=algorithm.rollouts_per_step,
        batch=Batch(algorithm.trains_whole_groups, algorithm.needs_score),
        takes_unfinished=trainer == LEADER
        and choose_system(run.policies).consumption == "strict-fifo",
        share=StreamShare.of(run.followers[trainer - 1]) if trainer else None,
        most_gen_batches=algorithm.max_gen_batches if algorithm.leaves_out_uniform else 1,
    )

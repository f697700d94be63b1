"""Build the engine of a run: its policies, in order of precedence, and its initial state."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import assert_never

from msgspec.structs import replace

from streamrl.engine.engine import Engine, Policy
from streamrl.engine.entities import WaitingRollouts
from streamrl.engine.environments import Environments
from streamrl.engine.estimates import RecentLengths, latency_of
from streamrl.engine.evaluation import Evaluations
from streamrl.engine.failure_counts import FailureCounts
from streamrl.engine.fleet import make_fleet
from streamrl.engine.messages import TrainerJoined
from streamrl.engine.policies.checkpoint import CheckpointEvery
from streamrl.engine.policies.disaggregation import PrefillThenDecode
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
from streamrl.engine.policies.environments import EndOverdue, RunEnvironments
from streamrl.engine.policies.evaluation import EvaluateVersions, HoldStep, WhileNotEvaluating
from streamrl.engine.policies.lending import BorrowReplicas, LendTrainer, WhileNotLending
from streamrl.engine.policies.migration import MoveOverrun, MoveRollouts, MoveStragglers
from streamrl.engine.policies.oversampling import DropSurplus, KeepSurplus, SkipUniform
from streamrl.engine.policies.resize import (
    AdjustReplicas,
    EmptyLeavingReplicas,
    KeepReplicas,
    Promotion,
    ResizeTrainers,
)
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
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DISPATCH, dispatch_named
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import shown
from streamrl.runfile.evaluation_config import EvaluationConfig
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
from streamrl.runfile.roles_config import (
    LendingConfig,
    ReplicasConfig,
    RolloutConfig,
    TrainerConfig,
)

PASSES_PER_COMMAND = (
    4  # a streamed command has at most this many fills, so that new rollouts do not wait long
)


ENDLESS = sys.maxsize  # steps of a run that is stopped from outside


def build_policies(run: Run) -> list[Policy]:
    """Return the policies of a run, in order of precedence."""
    policies, execute = run.policies, run.execute
    system = choose_system(policies)
    window = window_of(policies, run.algorithm.prompts_per_step)
    per_node = replicas_per_node(run.rollout, run.cluster.pools)
    promotion = Promotion.of(policies, run.secondary_trainer_names)
    leaders = (LEADER,) if promotion is None else (LEADER, promotion.trainer)
    lending = _lending(run.lending, run.trainer)
    skips_uniform = any(run.as_seen_by(each).algorithm.leaves_out_uniform for each in leaders)
    return [
        # first, because an episode that it ends needs its reward
        *([EndOverdue()] if run.environment is not None else []),
        VerifyOnArrival(),
        *(
            [build_resize(policies, unit=per_node, most=most_replicas(run))]
            if policies.resize == "adjust"
            else []
        ),
        KeepReplicas(policies.max_restarts, promotion),
        EmptyLeavingReplicas(),
        RetryThenDrop(policies.max_attempts, has_environment=run.environment is not None),
        StopWithoutProgress(policies.max_dropped_groups, policies.max_step_time),
        # before the policies that an evaluation holds, which go on when it ends
        *([EvaluateVersions(run.environment is not None)] if run.evaluation is not None else []),
        StartOver(),
        WindDown(),
        CheckpointEvery(
            LEADER,
            execute.checkpoint_every,
            policies.max_attempts,
            run.evaluation if execute.checkpoints.keep_best else None,
        ),
        # before the policies that give the trainer work
        BorrowReplicas() if run.trainer.borrows else ResizeTrainers(),
        *([SkipUniform(LEADER)] if skips_uniform else []),
        *([DropStale(system.staleness_bound)] if system.over_staleness == "drop" else []),
        TakeInLine(LEADER),
        *_leave_over(policies.left_over, window),
        BoundedAdmission(window, system.waits_for_whole_batches),
        *([lending] if lending is not None else []),
        _hold_step(
            run.evaluation,
            lending,
            _streaming(
                LEADER,
                run.trainer,
                run.algorithm.rollouts_per_step,
                system.streaming,
                shares_gpus=policies.shares_gpus,
            ),
        ),
        *_hold_weights(run.evaluation, [_weight_sync(system.weight_sync)]),
        *([RunEnvironments()] if run.environment is not None else []),
        *_hold_training(
            # with environments their starts are held, and episodes that have one go on
            run.evaluation if run.environment is None else None,
            build_dispatch(policies, run.rollout, run.seed),
        ),
        *(
            policy
            for trainer in range(LEADER + 1, run.num_trainers)
            for policy in _follow(run, trainer)
        ),
        JoinedTrainers(run.num_trainers, _policies_of_joined),
    ]


def _lending(config: LendingConfig | None, trainer: TrainerConfig) -> LendTrainer | None:
    """Return the policy that lends the primary trainer's GPUs; None if the run lends none."""
    if config is None:
        return None
    return LendTrainer(config.until, rollouts_that_fill(trainer), adapts=config.adapts)


def _hold_step(
    evaluation: EvaluationConfig | None, lending: LendTrainer | None, policy: Policy
) -> Policy:
    """Return the policy of the primary trainer's work, whose step an evaluation may hold, and whose GPUs may be lent."""
    held = policy if lending is None else WhileNotLending(policy, lending)
    return held if evaluation is None else HoldStep(held)


def _hold_weights(evaluation: EvaluationConfig | None, policies: list[Policy]) -> list[Policy]:
    """Return policies of the weight sync that load no weights into replicas during an evaluation."""
    if evaluation is None:
        return policies
    return [WhileNotEvaluating(each, lambda own: own.running is not None) for each in policies]


def _hold_training(evaluation: EvaluationConfig | None, policies: list[Policy]) -> list[Policy]:
    """Return dispatch policies that start no training rollout while an evaluation holds training."""
    if evaluation is None or evaluation.beside:
        return policies
    return [WhileNotEvaluating(each, lambda own: own.holds_training) for each in policies]


def _policies_of_joined(trainer: TrainerSide) -> Sequence[Policy]:
    """Return the policies of a trainer that joined after the run began."""
    assert trainer.joined_as is not None, "it joined"
    return list(_follow(trainer.joined_as, trainer.id))


def _follow(run: Run, trainer: int) -> Iterator[Policy]:
    """Yield the policies of a secondary trainer, which works on complete groups at its own pace."""
    config, algorithm = run.followers[trainer - 1], run.as_seen_by(trainer).algorithm
    if config.takes_share:
        yield SkipOutsideShare(trainer)
    yield CheckpointEvery(trainer, run.execute.checkpoint_every, run.policies.max_attempts)
    yield StopDetached(trainer)
    if algorithm.leaves_out_uniform:
        yield SkipUniform(trainer)
    yield TakeInLine(trainer)
    yield BoundedBacklog(trainer, config.backlog * run.algorithm.prompts_per_step)
    yield _streaming(trainer, config, algorithm.rollouts_per_step, "stream")


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


def build_dispatch(policies: PoliciesConfig, rollout: RolloutConfig, seed: int) -> list[Policy]:
    """Return the policies that move rollouts between replicas and send them to replicas.

    Raises:
        ValueError: a policy needs seconds that are missing, or cannot be made.
    """
    system = choose_system(policies)
    dispatch = _choose_dispatch(policies, rollout, seed)
    migration = _migration(policies, rollout.migration_transfer, dispatch)
    if system.weight_sync == "between-batches":
        dispatch = BatchByBatch(dispatch if isinstance(dispatch, Dealt) else EvenShares(dispatch))
    if rollout.prefill_kinds:
        dispatch = PrefillThenDecode.of(dispatch, rollout)
    name = system.dispatch
    last = dispatch if name in DISPATCH.own else FromOutside(dispatch, name)
    return [last] if migration is None else [migration, last]


def _choose_dispatch(policies: PoliciesConfig, rollout: RolloutConfig, seed: int) -> Dispatch:
    system = choose_system(policies)
    name, order = system.dispatch, _order(system.order)
    policy = DISPATCH.class_of(name, Dispatch)
    made: object = DISPATCH.make(name, lambda: policy.make(policies, rollout, seed, order))
    if not isinstance(made, Dispatch):
        raise DISPATCH.refusal(name, f"cannot be used: its make returned {shown(made)}")
    return made


def _order(name: OrderName) -> Order:
    match name:
        case "fifo":
            return FirstInFirstOut()
        case "longest-first":
            return LongestFirst()
        case _:
            assert_never(name)


def _streaming(
    trainer: int,
    config: TrainerConfig,
    rollouts_per_step: int,
    name: StreamingName,
    *,
    shares_gpus: bool = False,
) -> Policy:
    match name:
        case "stream":
            return Stream(trainer, config.micro_batch, PASSES_PER_COMMAND)
        case "whole-batch":
            most = most_per_command(config, rollouts_per_step, name)
            before_more = most_per_command(config, rollouts_per_step, "stream")
            return WholeBatch(trainer, most, shares_gpus, before_more)
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


def build_resize(policies: PoliciesConfig, *, unit: int, most: int) -> AdjustReplicas:
    """Return the policy that changes the number of replicas.

    Args:
        policies: its section of the run file.
        unit: replicas that start or stop at once, unless the run file says it.
        most: maximum number of replicas, unless the run file says it.

    Raises:
        ValueError: it needs a latency that is missing.
    """
    return AdjustReplicas(
        latency_of(policies, f"policies.resize {policies.resize!r}"),
        unit=policies.resize_unit or unit,
        most=policies.max_replicas or most,
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


def needs_costs(
    policies: PoliciesConfig,
    others: tuple[ReplicasConfig, ...],
    lending: LendingConfig | None = None,
) -> bool:
    """Whether costs must fill in a value before the engine of the run can be built."""
    lacks_share = lending is not None and lending.share is None
    lacks_share |= any(other.share is None for other in others if not other.prefills)
    return needs_latency(policies) or lacks_share


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
    is_strict = choose_system(run.policies).consumption == "strict-fifo"
    trainers = [
        _build_side(
            number,
            run.trainers[number],
            run.as_seen_by(number).algorithm,
            share,
            takes_unfinished=is_strict and number == LEADER,
            borrowable=run.borrowed_ranks if number == LEADER else 0,
        )
        for number, share in enumerate((None, *map(StreamShare.of, run.followers)))
    ]

    def make_side(sides: Sequence[TrainerSide], event: TrainerJoined) -> TrainerSide:
        """Return the state of a trainer that joins, given the trainers that joined before."""
        joined = with_secondary_trainer(sides[-1].joined_as or run, event.follower)
        share = StreamShare.of(joined.followers[event.trainer - 1])
        algorithm = joined.as_seen_by(event.trainer).algorithm
        side = _build_side(event.trainer, joined.trainers[event.trainer], algorithm, share)
        side.joined_as = joined
        return side

    return State(
        num_steps=ENDLESS if is_endless else run.algorithm.steps,
        trainers=trainers,
        leader=trainers[LEADER],
        fleet=make_fleet(
            run.policies, run.rollout, run.algorithm, run.workload, run.lending, run.lent
        ),
        recent=RecentLengths(enough=run.algorithm.rollouts_per_step),
        waiting=WaitingRollouts(run.policies.learns_from_siblings),
        failure_counts=FailureCounts(deque(maxlen=run.policies.max_failures_per_minute)),
        make_side=make_side,
        environments=_build_environments(run.environment, run.policies),
        evaluations=None
        if run.evaluation is None
        else Evaluations(
            # a run that is simulated in parts times at least the first evaluation
            replace(run.evaluation, before=True) if is_endless else run.evaluation,
            ENDLESS if is_endless else run.algorithm.steps,
            run.policies.max_attempts,
        ),
        sync_every=run.policies.sync_every,
        loses_pushed=run.sync.is_direct,
    )


def _build_environments(
    config: EnvironmentConfig | None, policies: PoliciesConfig
) -> Environments | None:
    """Return the environments of a run before its first episode; None if episodes have one turn."""
    if config is None:
        return None
    is_aware = policies.turn_placement == "cache-aware"
    is_sticky = is_aware or policies.turn_placement == "sticky"
    return Environments(config, is_sticky, policies.turn_imbalance if is_aware else None)


def _build_side(
    trainer: int,
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    share: StreamShare | None,
    *,
    takes_unfinished: bool = False,
    borrowable: int = 0,
) -> TrainerSide:
    """Return the state of a trainer before it starts, with the algorithm as it sees it."""
    return TrainerSide(
        id=trainer,
        prompts_per_step=algorithm.prompts_per_step,
        rollouts_per_step=algorithm.rollouts_per_step,
        batch=Batch(algorithm.trains_whole_groups, algorithm.needs_score),
        takes_unfinished=takes_unfinished,
        sizes=config.sizes,
        data_parallel=config.data_parallel,
        share=share,
        most_gen_batches=algorithm.max_gen_batches if algorithm.leaves_out_uniform else 1,
        borrowable=borrowable,
    )

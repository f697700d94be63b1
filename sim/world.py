"""The simulated world: one SimPy process per resource, and a clock that jumps from event to event."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, assert_never

import simpy

from streamrl.engine.messages import (
    Abort,
    Act,
    Close,
    Command,
    DrawEvaluation,
    DrawPrompts,
    Drop,
    EndEvaluation,
    Evaluate,
    Event,
    Failed,
    Generate,
    Generated,
    Lend,
    LoadWeights,
    MachineReplaced,
    Postpone,
    Promote,
    PromptsDrawn,
    PushWeights,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Resize,
    ResizeTrainer,
    RunStarted,
    SaveCheckpoint,
    Score,
    Skip,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    Stop,
    StopReplica,
    StopTrainer,
    Take,
    TakeBack,
    Train,
    TrainerLeaving,
    TrainerLost,
    TrainerStopped,
    Truncate,
    Verified,
    Verify,
    WakeAt,
    Woke,
)
from streamrl.engine.systems import build_engine
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER, check_reach
from streamrl.engine.world import GroupReferences, World
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs, TrainerCosts
from streamrl.sim.costs.cpu_contention import RoleKind
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.environment import Environments
from streamrl.sim.evaluation import HeldOut
from streamrl.sim.faults import (
    CAN_BE_LOST,
    TAKEN,
    Failures,
    SimFaults,
    replacement_time,
)
from streamrl.sim.handling import Handling
from streamrl.sim.kv_transfer import Handover
from streamrl.sim.network_latency import DelayedChannel, S
from streamrl.sim.replica import Replica
from streamrl.sim.trace import StepTrace
from streamrl.sim.trainer import Trainer
from streamrl.sim.transfer import Transfer
from streamrl.sim.verifier import Verifier
from streamrl.sim.world_interface import Disruptions, SimRollout, rollouts_of
from streamrl.workload.prompt_order import count_held_out
from streamrl.workload.workload import Draw, SimulatedWorkload, Workload

KEPT_STEPS = 2
"""Steps of the primary trainer for which a group is kept after the last trainer is done with it.
Replicas may still generate a dropped group until it is aborted.
"""


class LiveRollouts:
    """The rollouts that are still in use; finished ones are removed, so that memory does not grow."""

    def __init__(self, num_trainers: int) -> None:
        self.rollouts: dict[int, SimRollout] = {}
        """Rollouts by id, for generation and training."""
        self._groups: dict[int, tuple[int, ...]] = {}
        self._done_with = GroupReferences(num_trainers)
        self._leaving: dict[int, int] = {}
        """By group: version of the primary trainer when the last trainer was done with it."""
        self._version = 0

    def add(self, draws: list[Draw]) -> None:
        """Add new groups."""
        self.rollouts.update(rollouts_of(draws))
        self._groups.update({draw.drawn.group: draw.drawn.rollouts for draw in draws})

    def end_step(self, version: int, groups: Iterable[int], trainer: int) -> None:
        """Record that a trainer has made a step from these groups, and forget groups that are long finished."""
        for group in groups:
            if self._done_with.leave(group, trainer):
                self._retire(group)
        if trainer == LEADER:
            self._version = version
            gone = [g for g, since in self._leaving.items() if since <= version - KEPT_STEPS]
            for group in gone:
                self._forget(group)

    def leave(self, group: int, trainer: int) -> None:
        """Record that a trainer is done with a group."""
        if self._done_with.leave(group, trainer):
            self._retire(group)

    def drop(self, group: int) -> None:
        """Record that no trainer uses a group any more."""
        self._done_with.drop(group)
        self._retire(group)

    def of_group(self, group: int) -> tuple[int, ...]:
        """Return the rollouts of a group; none if it was forgotten."""
        return self._groups.get(group, ())

    def _retire(self, group: int) -> None:
        if group in self._groups:
            self._leaving[group] = self._version

    def _forget(self, group: int) -> None:
        del self._leaving[group]
        for rollout in self._groups.pop(group):
            del self.rollouts[rollout]


COLLECTED_STEPS = 50
"""Steps between two garbage collections of the youngest objects: those made since the last collection."""
ALL_COLLECTED_STEPS = 500
"""Steps between two garbage collections of all objects. A replica or trainer that is lost, and a dropped group, may have
outlived a collection, and then only this one frees them. It takes some 10 ms."""
YOUNGEST, ALL = 0, 2
"""Generations of `gc.collect`."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Turn off automatic garbage collection while worlds run.

    A run makes many objects and few cycles, and automatic collection would cost 5 to 10 % of the
    time.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


class SimWorld(World[Trace]):
    """Executes commands in simulated time."""

    def __init__(
        self,
        run: Run,
        costs: Costs,
        workload: Workload,
        *,
        is_endless: bool = False,
        trace: StepTrace | None = None,
    ) -> None:
        """Create a world before its first event.

        Args:
            run: the run file.
            costs: its costs.
            workload: prompts and lengths.
            is_endless: whether the run continues after its last step, until the caller stops.
            trace: records the run; if None, a trace that keeps all entries.

        Raises:
            RunError: a trainer asks for groups of a staleness that never occurs.
        """
        check_reach(run.policies, run.followers)
        trace = trace or StepTrace(run, costs, is_endless=is_endless)
        super().__init__(build_engine(run, is_endless=is_endless), trace, workload.learn)
        self.run_file = run
        self.costs = costs
        self.env = simpy.Environment()
        self.cores = Cores(self.env, costs.sharing)
        # Losses to environments are measured with the process that calls them.
        caller: RoleKind = "handling" if run.environment is None else "acting"
        self.handling = Handling(self.env, self.cores.time_of(caller), costs.handling_time)
        self.steps = trace.steps
        self._handover: Handover | None = None
        """Contexts on their way to decode replicas; None if all replicas prefill and decode."""
        if run.rollout.prefill_kinds:
            self._handover = Handover(self.env, costs.cache_routes)
        self._live_rollouts = LiveRollouts(run.num_trainers)
        self._stepping: dict[int, tuple[int, ...]] = {}
        """Groups of the current step of each trainer; a restarted trainer repeats the step with
        them.
        """
        self.rollouts: dict[int, SimRollout] = self._live_rollouts.rollouts
        self.replicas: dict[int, Replica] = {}
        self._channels: dict[int, DelayedChannel] = {}
        """Channels to the replicas behind a link."""
        self._workload = workload
        self._next_group = 0
        self.trainers: dict[int, Trainer] = {}
        self._leads_as = LEADER
        """Trainer whose costs apply to the primary trainer; it changes with a promotion."""
        self.disruptions = Disruptions()
        self._transfer = Transfer(self)
        self.verifier = Verifier(self)
        environment = run.environment
        self.environments = None if environment is None else Environments(self, environment)
        self._failures = Failures(self, self.lose, self.lose_trainer, self.give_notice)
        self._kinds: dict[int, int] = {}
        """Kind of each replica that starts or serves, until it stops or is lost."""
        self._stopping: set[int] = set()
        """Replicas that are being stopped."""
        self._taken: set[int] = set()
        """Replicas whose machines went while they started."""
        self.faults = SimFaults(self) if run.faults else None
        if self.faults is not None:
            self._prepare = dict.fromkeys(CAN_BE_LOST, self.faults.result)
        self._prepare[Stepped] = self._end_step
        self._held_out: HeldOut | None = None
        if run.evaluation is not None:
            held_out, size = run.on_held_out_prompts, run.algorithm.group_size
            self._held_out = HeldOut(
                run.evaluation.samples,
                count_held_out(run.evaluation, run.workload),
                SimulatedWorkload(held_out),
                size,
                held_out.rollout.max_tokens,
                self.rollouts,
            )
            for kind in (Generated, Verified, Failed):
                self._prepare[kind] = self._translator(self._prepare.get(kind))

    @property
    def now(self) -> float:
        """Simulated seconds since the run's start."""
        return self.env.now

    def run(
        self,
        watch: Callable[[int], None] = lambda version: None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Trace:
        """Simulate to the end, or until `is_enough` returns true after a step.

        Args:
            watch: called with each new policy version.
            is_enough: called after each step; returns whether to stop there.

        Raises:
            RuntimeError: the run is stuck.
        """
        with collecting_seldom():
            for _ in self.walk(watch):
                if is_enough():
                    break
        return self.trace

    def walk(self, watch: Callable[[int], None] = lambda version: None) -> Iterator[None]:
        """Simulate to the end, and yield after each step of the primary trainer.

        Raises:
            RuntimeError: the run is stuck.
        """
        try:
            yield from self._walk(watch)
        except simpy.core.EmptySchedule:
            raise RuntimeError(f"the run is stuck at {self.now:.3f} s: {self.engine}") from None

    def _walk(self, watch: Callable[[int], None]) -> Iterator[None]:
        state, step = self.engine.state, self.env.step
        self.emit(RunStarted(0, 0))
        version = num_made = 0
        while not (state.is_stopping and state.is_finished):
            step()
            if state.leader.version != version:
                version = state.leader.version
                watch(version)
            if self.steps.num_made != num_made:
                num_made = self.steps.num_made
                if not num_made % COLLECTED_STEPS:
                    gc.collect(YOUNGEST if num_made % ALL_COLLECTED_STEPS else ALL)
                yield

    def _end_step(self, event: Stepped) -> Stepped:
        """Remove rollouts that all trainers have used."""
        groups = self._stepping.pop(event.trainer)
        self._live_rollouts.end_step(event.version, groups, event.trainer)
        return event

    def start(self, command: Command) -> None:
        """Pass a command to its resource."""
        if self.faults is not None:
            self.faults.strike(command, self.engine.version)
        # by exact type, because a class pattern that does not match takes 20 times as long
        if type(command) is Generate and not self._channels:
            self.replicas[command.replica].generate(command)
        elif type(command) is Verify:
            self.verifier.verify(command)
        elif type(command) is not Take:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Generate():
                self._send(command, self.replicas[command.replica].generate)
            case Verify():
                self.verifier.verify(command)
            case Act():
                self._own_environments.act(command)
            case Close():
                self._own_environments.close(command)
            case Truncate():
                if self._held_out is not None:
                    self._held_out.truncate(command.rollout)
                self._forget_contexts((command.rollout,))
            case Take() | Postpone() | Resize():
                pass
            case Skip():
                self._live_rollouts.leave(command.group, command.trainer)
            case Stop():
                pass
            case Drop():
                self._forget_contexts(self._live_rollouts.of_group(command.group))
                self._live_rollouts.drop(command.group)
                self._workload.forget(command.group)
            case Score():
                self.trainers[command.trainer].score(command)
            case Train():
                self.trainers[command.trainer].train(command)
            case Step():
                self._stepping[command.trainer] = command.groups
                self.trainers[command.trainer].step(command)
            case StartTrainer():
                self._start_trainer(command)
            case StopTrainer():
                self.env.process(self._stop_trainer(command))
            case ResizeTrainer():
                costs = self.costs.with_ranks(command.data_parallel)
                self.trainers[command.trainer].resize(command, costs)
            case SaveCheckpoint():
                self.trainers[command.trainer].save(command)
            case PushWeights():
                self._transfer.push(command)
            case LoadWeights():
                self._send(command, self.replicas[command.replica].load)
            case Lend():
                self.replicas[command.replica].lend(command)
            case TakeBack():
                self.replicas[command.replica].take_back(command)
            case Abort():
                self._abort(command)
            case DrawPrompts():
                self._draw(command)
            case StartReplica():
                self._kinds[command.replica] = command.kind
                self.env.process(self._start_replica(command))
            case StopReplica():
                self._kinds.pop(command.replica, None)  # nothing can happen to it any more
                self._stopping.add(command.replica)
                self.env.process(self._stop_replica(command))
            case Promote():
                self._leads_as = command.trainer
                self.env.process(self._promote(command))
            case DrawEvaluation():
                self.emit(self._own_held_out.draw(command))
            case Evaluate():
                self._send(
                    self._own_held_out.begin(command), self.replicas[command.replica].generate
                )
            case EndEvaluation():
                for abort in self._own_held_out.aborts():
                    self._abort(abort)
            case WakeAt():
                self.env.process(self._wake(command))
            case _:
                assert_never(command)

    @property
    def _own_environments(self) -> Environments:
        assert self.environments is not None, "only a run with an environment acts"
        return self.environments

    def _translator(
        self, prepare: Callable[[Any], Event | None] | None
    ) -> Callable[[Any], Event | None]:
        """Return what passes on events of training, and turns those of evaluation rollouts into theirs."""

        def translate(event: Event) -> Event | None:
            translated = self._own_held_out.translate(event)
            if isinstance(translated, Verify):
                self.verifier.verify(translated)
                return None
            return prepare(event) if prepare is not None and translated is event else translated

        return translate

    @property
    def _own_held_out(self) -> HeldOut:
        assert self._held_out is not None, "only a run with [evaluation] evaluates"
        return self._held_out

    def lose(self, replica_id: int, reason: str) -> None:
        """Let a replica die."""
        self._kinds.pop(replica_id, None)
        ends = self._take_away(replica_id)
        if replica_id not in self._stopping:  # else an event on its way has led to its stop
            self.emit(ReplicaLost(replica_id, reason))
        self._fail(ends, reason)

    def lose_trainer(self, trainer_id: int, reason: str) -> None:
        """Let a trainer die; if it is the primary trainer, its push is lost too."""
        lost = self.trainers.pop(trainer_id).stop()
        if trainer_id == LEADER:
            lost += self._transfer.stop()
        self.emit(TrainerLost(trainer_id, reason))
        self._fail(lost, reason)

    def _fail(self, ends: Sequence[Command | Generated], reason: str) -> None:
        """Report how lost work ends: a command fails, and a rollout with new tokens is interrupted."""
        for end in ends:
            if isinstance(end, Generate | Generated):
                self._forget_contexts((end.rollout,))
            self.emit(end if isinstance(end, Generated) else Failed(end, reason))

    def _forget_contexts(self, rollouts: Iterable[int]) -> None:
        """Free the contexts of rollouts on prefill replicas, because no decode replica receives them."""
        if self._handover is not None:
            for rollout in rollouts:
                self._handover.drop(rollout)

    def _take_away(self, replica_id: int) -> list[Command | Generated]:
        """Deliver all events that a replica has sent, and stop it; return how its commands end."""
        channel = self._channels.get(replica_id)
        if channel is not None:
            channel.bring_back()
        ends = list(self.replicas.pop(replica_id).stop())
        if channel is not None:
            ends += self._channels.pop(replica_id).cut()
        if self._handover is not None:
            self._handover.lose(replica_id)
        return ends

    def _send(self, command: S, take: Callable[[S], None]) -> None:
        """Pass a command to a replica, after the link's latency if there is a link."""
        channel = self._channels.get(command.replica)
        if channel is None:
            take(command)
        else:
            channel.send(command, take)

    def _abort(self, command: Abort) -> None:
        replica = self.replicas.get(command.replica)
        if replica is not None:  # if the replica is lost, a `Failed` is already on its way
            self._send(command, lambda sent: replica.abort(sent.rollout))

    def _draw(self, command: DrawPrompts) -> None:
        draws = self._workload.draw(self._next_group, command.num_groups)
        self._next_group += command.num_groups
        self._live_rollouts.add(draws)
        groups = tuple([draw.drawn for draw in draws])
        self.emit(PromptsDrawn(command.step, command.oldest_version, groups))

    def _start_replica(self, command: StartReplica) -> Generator[simpy.Event, Any, None]:
        seconds, emit = self.costs.of_kind(command.kind).message_time, self.emit
        yield self.env.timeout(seconds + self.run_file.rollout.start_time)
        if command.replica in self._taken:
            self._taken.discard(command.replica)
            del self._kinds[command.replica]
            self.emit(Failed(command, TAKEN))
            return
        if seconds:
            channel = self._channels[command.replica] = DelayedChannel(self.env, seconds, self.emit)
            emit = channel.emit
        replica = Replica(
            self, command.replica, command.version, command.kind, emit, self._handover
        )
        self.replicas[command.replica] = replica
        self._failures.watch(replica)
        tokens = (
            self.costs.of_kind(command.kind).kv_capacity
            if self.run_file.policies.follows_pressure
            else None
        )
        emit(ReplicaStarted(command.replica, command.version, cache_tokens=tokens))

    def _stop_replica(self, command: StopReplica) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(0)  # let the process that emitted the causing event finish first
        if command.replica in self.replicas:
            self._take_away(command.replica)
        self._stopping.discard(command.replica)
        self.emit(ReplicaStopped(command.replica))

    def _start_trainer(self, command: StartTrainer) -> None:
        everyone: tuple[TrainerCosts, ...] = (self.costs, *self.costs.followers)
        costs = everyone[command.trainer or self._leads_as]
        if command.data_parallel is not None:
            costs = self.costs.with_ranks(command.data_parallel)
        trainer = self.trainers[command.trainer] = Trainer(self, command.trainer, costs)
        self._failures.watch_trainer(trainer)
        trainer.start(command)

    def _stop_trainer(self, command: StopTrainer) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(0)  # let the process that emitted the causing event finish first
        trainer = self.trainers.pop(command.trainer, None)
        if trainer is not None:  # None if it was lost meanwhile
            trainer.stop()
        self.emit(TrainerStopped(command.trainer))

    def _promote(self, command: Promote) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(0)  # let the process that emitted the causing event finish first
        self.emit(TrainerLeaving(command.trainer))

    def _wake(self, command: WakeAt) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(max(0.0, command.time - self.now))
        self.emit(Woke(command.time))

    def give_notice(self, replica_id: int, warning: float) -> None:
        """Announce that a replica's machine is taken away in `warning` seconds, and take it away then."""
        kind = self._kinds.get(replica_id)
        if kind is not None:
            self.emit(ReplicaLeaving(replica_id, warning))
            self.env.process(self._take_machine(replica_id, kind, warning))

    def _take_machine(
        self, replica_id: int, kind: int, warning: float
    ) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(warning)
        if replica_id in self._kinds:
            if replica_id in self.replicas:
                self.lose(replica_id, TAKEN)
            else:
                self._taken.add(replica_id)
        run = self.run_file
        pool = run.cluster.pools[run.replica_kinds[kind].pool]
        yield self.env.timeout(replacement_time(pool, run.seed, replica_id))
        self.emit(MachineReplaced(replica_id))


def simulate(run: Run, watch: Callable[[int], None] = lambda version: None) -> Trace:
    """Simulate a run file from its first prompt to its last step.

    For the steady state see `streamrl.sim.steady_state`.

    Raises:
        ValueError: the run file does not fit its profiles or the GPU memory.
    """
    costs = Costs.load(run)
    return SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run(watch)

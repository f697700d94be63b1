"""Failures in a simulated run: random GPU failures, and the faults that the run file plans."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf, log, log1p, sqrt
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np
import simpy

from streamrl.engine.fault_plan import Fault, FaultPlan, Struck
from streamrl.engine.fleet import DRAIN_TIME
from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Event,
    Failed,
    Generate,
    Generated,
    PushWeights,
    SaveCheckpoint,
    TakeBack,
    WeightsPushed,
)
from streamrl.engine.trainer_side import LEADER
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.failure_rates import (
    notices_per_gpu_day,
    replica_gpu_failures_per_day,
    trainer_gpu_failures_per_day,
)
from streamrl.runfile.simulation_config import FaultConfig
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.replica import Replica
from streamrl.sim.trainer import Trainer
from streamrl.sim.verifier import Verifier
from streamrl.sim.world_interface import WorldInterface

STREAM, TRAINER_STREAM, NOTICE_STREAM, REPLACEMENT_STREAM = 0xFA11, 0xFA12, 0xFA13, 0xFA14
"""Random streams of failures, separate from those of lengths and prompts for every seed."""
REASON = "a GPU failed"
TAKEN = "its spot machine was taken away"


def time_to_failure(failures_per_day: float, seed: int, *stream: int) -> float:
    """Return the seconds until one GPU of a trainer or replica fails; infinite at a rate of 0.

    The time is exponential with mean 1 / rate. Each role has its own random stream, so replica 3 of
    a seed fails after the same time whatever the others do.

    Args:
        failures_per_day: of all GPUs of the role.
        seed: of the run.
        stream: what tells the role, and its start, from the others.
    """
    rate = failures_per_day / SECONDS_PER_DAY
    if not rate:
        return inf
    return float(np.random.default_rng([seed, *stream]).exponential(1 / rate))


def replacement_time(pool: PoolConfig, seed: int, replica: int) -> float:
    """Return the seconds from the loss of a replica's spot machine to its replacement.

    They are log-normal with the mean m and the relative standard deviation c of the pool: the
    variance of the logarithm is ln(1 + c^2), and its mean is ln(m) minus half of that.
    """
    mean, variation = pool.spot_replacement_time, pool.spot_replacement_variation
    if not mean or not variation:
        return mean
    variance = log1p(variation**2)
    source = np.random.default_rng([seed, REPLACEMENT_STREAM, replica])
    return float(source.lognormal(log(mean) - variance / 2, sqrt(variance)))


class Failures:
    """Lets replicas and trainers die at random times, and spot machines go after a notice."""

    def __init__(
        self,
        around: WorldInterface,
        lose_replica: Callable[[int, str], None],
        lose_trainer: Callable[[int, str], None],
        give_notice: Callable[[int, float], None],
    ) -> None:
        self._around = around
        self._lose_replica = lose_replica
        self._lose_trainer = lose_trainer
        self._give_notice = give_notice
        self._num_started: dict[int, int] = {}
        """Starts of each trainer so far."""

    def watch(self, replica: Replica) -> None:
        """Schedule the failure and the notice of a new replica; they have no effect if it is gone by then."""
        run = self._around.run_file
        if replica.kind == run.rollout.num_kinds:
            return  # the failures of the trainer's GPUs are those of the trainer
        config = run.rollout.kinds[replica.kind]
        pool = run.cluster.pools[config.pool]
        rate = replica_gpu_failures_per_day(run.failures, pool)
        seconds = time_to_failure(rate * config.gpus_per_replica, run.seed, STREAM, replica.id)
        if seconds < inf:
            self._around.env.process(self._fail(replica, seconds, self._lose_replica))
        per_day = notices_per_gpu_day(pool) * config.gpus_per_replica
        seconds = time_to_failure(per_day, run.seed, NOTICE_STREAM, replica.id)
        if seconds < inf:
            warning = min(pool.spot_warning, DRAIN_TIME)
            seconds += pool.spot_warning - warning
            self._around.env.process(self._notice(replica, seconds, warning))

    def watch_trainer(self, trainer: Trainer) -> None:
        """Schedule the failure of a new trainer, if the run has trainer failures."""
        run = self._around.run_file
        config = run.trainers[trainer.id]
        rate = trainer_gpu_failures_per_day(run.failures, run.cluster.pools[config.pool])
        if not rate:
            return
        count = self._num_started[trainer.id] = self._num_started.get(trainer.id, 0) + 1
        stream = (TRAINER_STREAM, trainer.id, count)
        seconds = time_to_failure(rate * config.num_gpus, run.seed, *stream)
        if seconds < inf:
            self._around.env.process(self._fail(trainer, seconds, self._lose_trainer))

    def _fail(
        self, who: Replica | Trainer, seconds: float, lose: Callable[[int, str], None]
    ) -> Generator[simpy.Event, Any, None]:
        yield self._around.env.timeout(seconds)
        if not who.has_stopped:
            lose(who.id, REASON)

    def _notice(
        self, replica: Replica, seconds: float, warning: float
    ) -> Generator[simpy.Event, Any, None]:
        yield self._around.env.timeout(seconds)
        if not replica.has_stopped:
            self._give_notice(replica.id, warning)


Process = Generator[simpy.Event, Any, None]


class Victims(WorldInterface, Protocol):
    """A world whose roles can fail."""

    replicas: dict[int, Replica]
    trainers: dict[int, Trainer]
    verifier: Verifier

    def lose(self, replica_id: int, reason: str) -> None:
        """Let a replica die."""

    def lose_trainer(self, trainer_id: int, reason: str) -> None:
        """Let a trainer die."""


CAN_BE_LOST = (Generated, WeightsPushed, CheckpointSaved)
"""Events that a planned fault may turn into failures."""


class Strike(NamedTuple):
    """A fault that has occurred."""

    fault: Fault
    time: float


class SimFaults:
    """Injects the planned faults; sees each command before it starts and each event before it is handled."""

    def __init__(self, victims: Victims) -> None:
        """Read the planned faults of a run.

        Raises:
            RunError: a planned fault cannot be simulated.
        """
        run = victims.run_file
        for number, fault in enumerate(run.faults):
            if fault.kind == "driver-dies":
                text = f"faults.{number}.kind {fault.kind!r} can be executed but not simulated: a simulation has no driver"
                raise RunError(f"faults.{number}.kind", fault.kind, None, text)
        self._victims = victims
        self._hindrances = victims.disruptions
        self._plan = FaultPlan.of(run)
        self._refused: dict[int | type[Command], Struck] = {}
        """Commands that will fail instead of returning a result: generation by rollout, others by
        type.
        """
        self.strikes: list[Strike] = []

    def strike(self, command: Command, version: int) -> None:
        """Apply the faults that are planned for the role that is about to receive a command."""
        now = self._victims.env.now
        fault = self._plan.strike(command, version, now)
        if fault is not None:
            self.strikes.append(Strike(fault, now))
            self._carry_out(fault.config, command)

    def result(self, event: Event) -> Event:
        """Return the event of a command, or a failure if its result is refused or lost."""
        match event:
            case Generated(rollout):
                return self._fail(rollout, event, "an answer that is none")
            case WeightsPushed():
                return self._fail(PushWeights, event, "the link dropped it")
            case CheckpointSaved(trainer=trainer) if trainer == LEADER:
                return self._fail(SaveCheckpoint, event, "no space left on device")
            case _:
                return event

    def _fail(self, key: int | type[Command], event: Event, reason: str) -> Event:
        command = self._refused.pop(key, None) if self._refused else None
        return event if command is None else Failed(command, reason)

    def _carry_out(self, fault: FaultConfig, command: Command) -> None:
        match fault.kind:
            case "replica-dies" | "replica-hangs":
                assert isinstance(command, Generate)
                patience = self._victims.run_file.execute.patience
                hang_time = patience if fault.kind == "replica-hangs" else 0.0
                self._victims.env.process(self._lose_replica(command.replica, hang_time))
            case "replica-dies-returning":
                assert isinstance(command, TakeBack)
                self._victims.env.process(self._lose_replica(command.replica, 0.0))
            case (
                "trainer-dies-training"
                | "trainer-dies-pushing"
                | "trainer-dies-saving"
                | "trainer-dies-lending"
            ):
                self._victims.env.process(self._lose_trainer())
            case "replica-garbles":
                assert isinstance(command, Generate)
                self._refused[command.rollout] = command
            case "link-drops" | "disk-full":
                assert isinstance(command, PushWeights | SaveCheckpoint)
                self._refused[type(command)] = command
            case "link-slows":
                self._victims.env.process(self._slow_down(fault))
            case "verifier-stalls":
                assert fault.duration is not None
                self._hindrances.stalled_until = self._victims.env.now + fault.duration
            case "reward-model-dies" | "reward-model-hangs":
                patience = self._victims.run_file.execute.patience
                hang_time = patience if fault.kind == "reward-model-hangs" else 0.0
                self._victims.env.process(self._lose_reward_model(hang_time))
            case "driver-dies":
                raise AssertionError("is not simulated")
            case _:
                assert_never(fault.kind)

    def _lose_replica(self, replica_id: int, hang_time: float) -> Process:
        """Let a replica die; if it hangs, its loss is noticed after `hang_time` seconds."""
        replicas = self._victims.replicas
        yield self._victims.env.timeout(
            0
        )  # let the process that emitted the causing event finish first
        if hang_time and replica_id in replicas:
            replicas[replica_id].stop()  # and ignore the result
            yield self._victims.env.timeout(hang_time)
        if replica_id in replicas:
            self._victims.lose(replica_id, f"a fault: it {_how(hang_time)}")

    def _lose_trainer(self) -> Process:
        yield self._victims.env.timeout(0)
        if LEADER in self._victims.trainers:
            self._victims.lose_trainer(LEADER, "a fault: it died")

    def _lose_reward_model(self, hang_time: float) -> Process:
        for _ in range(2):  # an idle replica has started the affected command by then
            yield self._victims.env.timeout(0)
        for victim in self._victims.verifier.reward_models()[:1]:
            victim.lose(f"a fault: it {_how(hang_time)}", hang_time)

    def _slow_down(self, fault: FaultConfig) -> Process:
        """Slow down the weight pushes that begin from now on, for a while."""
        assert fault.factor is not None and fault.duration is not None
        self._hindrances.slowness = fault.factor
        yield self._victims.env.timeout(fault.duration)
        self._hindrances.slowness = 1.0


def _how(hang_time: float) -> str:
    return f"gave no sign of life for {hang_time:g} s" if hang_time else "died"

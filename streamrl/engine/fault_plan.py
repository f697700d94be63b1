"""When the faults of a run file strike: at the same commands in a simulated and a real run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import NamedTuple

from streamrl.engine.messages import (
    Command,
    Generate,
    Lend,
    PushWeights,
    SaveCheckpoint,
    TakeBack,
    Train,
    Verify,
)
from streamrl.engine.presets import choose_system
from streamrl.engine.systems import most_per_command
from streamrl.engine.trainer_side import LEADER
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.simulation_config import FaultConfig, FaultKind

Struck = Generate | Lend | TakeBack | Train | PushWeights | SaveCheckpoint | Verify
STRUCK: dict[FaultKind, type[Struck]] = {
    "replica-dies": Generate,
    "replica-hangs": Generate,
    "replica-garbles": Generate,
    "replica-dies-returning": TakeBack,
    "trainer-dies-lending": Lend,
    "trainer-dies-training": Train,
    "trainer-dies-pushing": PushWeights,
    "trainer-dies-saving": SaveCheckpoint,
    "link-slows": PushWeights,
    "link-drops": PushWeights,
    "verifier-stalls": Verify,
    "reward-model-dies": Verify,
    "reward-model-hangs": Verify,
    "disk-full": SaveCheckpoint,
    "driver-dies": Train,
}
"""The commands at which each kind strikes."""


class Fault(NamedTuple):
    """One planned fault."""

    number: int
    """Its index in the plan."""
    config: FaultConfig
    step: int
    """The first step in which it may strike."""
    num_spared: int
    """Commands of its kind in that step that are spared first."""


@dataclass
class FaultPlan:
    """The faults that have not struck yet. A world calls it before it carries out each command."""

    rollouts_per_step: int
    faults: list[Fault]
    _num_seen: dict[tuple[type[Command], int], int] = field(default_factory=dict)
    """Commands so far by kind and step, only for steps with a planned fault."""

    @classmethod
    def of(cls, run: Run, struck: Collection[int] = ()) -> FaultPlan:
        """Return the plan of a run file, without the faults that struck before the run was resumed (`struck`)."""
        size = run.algorithm.rollouts_per_step
        streaming = choose_system(run.policies).streaming
        num_trains = ceil(size / most_per_command(run.trainer, size, streaming))
        faults = enumerate(_draw(run.faults, run.seed, run.algorithm, num_trains))
        left = [Fault(number, *each) for number, each in faults if number not in struck]
        return cls(size, left)

    def strike(self, command: Command, version: int, now: float) -> Fault | None:
        """Return the fault that strikes at a command, and remove it from the plan.

        Args:
            command: the command that is carried out next.
            version: the version of the primary trainer.
            now: seconds since the run began.
        """
        if not self.faults or not isinstance(command, Struck):
            return None
        if isinstance(command, Train | SaveCheckpoint) and command.trainer != LEADER:
            return None
        step, kind = self._step_of(command, version), type(command)
        waiting = [fault for fault in self.faults if STRUCK[fault.config.kind] is kind]
        num_before = 0
        if any(fault.step == step for fault in waiting):
            num_before = self._num_seen.get((kind, step), 0)
            self._num_seen[kind, step] = num_before + 1
        for fault in waiting:
            if _is_due(fault, step, num_before, now):
                self.faults.remove(fault)
                return fault
        return None

    def _step_of(self, command: Struck, version: int) -> int:
        """Return the step of a command; for rollouts usually the step that they were drawn for."""
        match command:
            case Generate() | Verify():
                return command.rollout // self.rollouts_per_step + 1
            case Train() | Lend() | TakeBack():
                return version + 1
            case PushWeights() | SaveCheckpoint():
                return command.version


def _is_due(fault: Fault, step: int, num_before: int, now: float) -> bool:
    if fault.config.time is not None:
        return now >= fault.config.time
    return step > fault.step or (step == fault.step and num_before >= fault.num_spared)


def _draw(
    faults: Sequence[FaultConfig], seed: int, algorithm: AlgorithmConfig, num_trains: int
) -> Iterator[tuple[FaultConfig, int, int]]:
    """Yield each fault with its step and the number of commands of that step that it spares.

    Args:
        faults: as the run file plans them.
        seed: of the run, for faults without their own.
        algorithm: its section of the run file.
        num_trains: minimum number of `Train` commands in a step.
    """
    num_commands = {
        Train: num_trains,
        Generate: algorithm.rollouts_per_step,
        Verify: algorithm.rollouts_per_step,
    }
    for place, fault in enumerate(faults):
        if fault.count is None:
            yield fault, fault.step or 1, 0
            continue
        source = Random(f"{seed if fault.seed is None else fault.seed} {place}")
        for _ in range(fault.count):
            step = source.randint(1, fault.last_step(algorithm.steps))
            yield fault, step, source.randrange(num_commands.get(STRUCK[fault.kind], 1))

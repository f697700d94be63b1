"""Log what happens to a run: a line for each loss, restart, resize, refusal, dropped group and change of trainers."""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeVar

from streamrl.engine.messages import (
    HELD_OUT,
    Act,
    Command,
    Drop,
    Evaluate,
    Event,
    Failed,
    Generate,
    Lend,
    LoadWeights,
    MachineReplaced,
    Promote,
    PushWeights,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    Resize,
    StartReplica,
    Stop,
    StopReplica,
    TakeBack,
    TrainerJoined,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
    TrainerStopped,
    Verify,
)
from streamrl.engine.state import State
from streamrl.engine.trainer_side import LEADER, TrainerCommand
from streamrl.runfile.formatting import counted

logger = logging.getLogger(__name__)

MOST_ALIKE = 20
"""Failures alike that are logged one by one: enough to see a pattern."""
COUNTED = 100
"""Further failures alike that are logged as one line. A wrong scorer may fail for each of a million rollouts."""

T = TypeVar("T")


class RunLog:
    """Logs a run; call `see` before the engine handles an event, and `write` after that."""

    def __init__(self, state: State, secondary_trainers: Sequence[str]) -> None:
        """Read the engine's `state`, without changing it; `secondary_trainers` has names for log lines."""
        self._state = state
        self._names = ["trainer", *(f"secondary trainer {name}" for name in secondary_trainers)]
        self._num_first = state.fleet.num_wanted
        """Replicas at the start of the run; later ones are replacements or come from a resize."""
        self._lost_replicas: deque[int] = deque()
        """Lost replicas without a replacement so far."""
        self._replaced_by: dict[int, int] = {}
        """Lost replica by the number of its replacement, which is starting."""
        self._lost_trainers: set[int] = set()
        self._num_replicas = state.fleet.kinds[0].num_wanted
        """Replicas of the kind that a resize changes."""
        self._num_rollouts = 0
        """Rollouts on the lost replica."""
        self._version = 0
        """Version of the lost trainer."""
        self._group: int | None = None
        """Group of the failed rollout."""
        self._is_part_of_loss = False
        """Whether a command failed only because its role was lost, which was logged already."""
        self._num_alike: Counter[tuple[str, str]] = Counter()
        """Failures so far by what failed and why, without the numbers in the reason."""

    def see(self, event: Event) -> None:
        """Record the state before `event`, which `write` needs."""
        self._group = None
        match event:
            case ReplicaLost(replica):
                self._num_rollouts = len(self._state.fleet.replicas[replica].rollouts)
            case TrainerLost(trainer):
                self._version = self._state.trainers[trainer].version
            case Failed(command):
                self._is_part_of_loss = self._is_lost(command)
                if isinstance(command, Generate | Verify) and command.rollout < HELD_OUT:
                    self._group = self._state.rollouts[command.rollout].group.id

    def _is_lost(self, command: Command) -> bool:
        """Return whether the role of a command is known to be lost."""
        match command:
            case Generate() | LoadWeights() | Lend() | TakeBack():
                return command.replica not in self._state.fleet.replicas
            case Evaluate():
                own = self._state.evaluations
                is_ended = own is None or own.running != command.version
                return is_ended or command.replica not in self._state.fleet.replicas
            case PushWeights():
                return self._state.pushing is None
            case _ if isinstance(command, TrainerCommand):
                return self._state.trainers[command.trainer].is_lost
        return False

    def write(self, event: Event, commands: Sequence[Command]) -> None:
        """Log an event, its commands, and the consequences of a loss."""
        logger.debug("event %s", event)
        match event:
            case ReplicaLost(replica, reason):
                self._write_replica_loss(replica, reason, commands)
            case TrainerLost(trainer, reason):
                self._write_trainer_loss(trainer, reason, commands)
            case Failed(command, reason):
                self._write_failure(command, reason, commands)
            case ReplicaLeaving(replica, warning):
                self._write_notice(replica, warning)
            case MachineReplaced(replica):
                if self._lacks_replica(commands):
                    self._lost_replicas.append(replica)
                self._inform(f"a machine is there in place of that of replica {replica}")
            case ReplicaStarted(replica, version):
                self._write_replica_start(replica, version)
            case TrainerStarted(trainer, version) if trainer in self._lost_trainers:
                self._lost_trainers.discard(trainer)
                self._inform(f"{self._names[trainer]} restarted at step {version}")
            case TrainerResized(trainer, data_parallel):
                ranks = counted(data_parallel, "data-parallel rank")
                self._inform(f"{self._names[trainer]} continues with {ranks} at step {self._step}")
            case TrainerJoined(trainer, section):
                self._write_attach(trainer, section["name"])
            case TrainerStopped(trainer) if trainer != self._state.promoted:
                saved = self._state.trainers[trainer].checkpoint_version
                self._inform(f"{self._names[trainer]} detached; its checkpoint is of step {saved}")
        for command in commands:
            self._write_command(command)

    def _write_replica_loss(self, replica: int, reason: str, commands: Sequence[Command]) -> None:
        if self._lacks_replica(commands):
            self._lost_replicas.append(replica)
        rollouts = f"its {counted(self._num_rollouts, 'rollout')} {self._where_rollouts_go()}"
        what = rollouts if self._num_rollouts else "it had no rollouts"
        self._warn(
            f"replica {replica} lost at step {self._step} ({_how(reason)}); "
            f"{what}; {self._replacement(commands)}"
        )

    def _write_notice(self, replica: int, warning: float) -> None:
        leaving = self._state.fleet.replicas.get(replica)
        if leaving is not None:
            rollouts = f"its {counted(len(leaving.rollouts), 'rollout')} finish or move in time"
            self._warn(
                f"the machine of replica {replica} is taken away in {warning:g} s; {rollouts}"
            )

    def _where_rollouts_go(self) -> str:
        verb = "restarts" if self._num_rollouts == 1 else "restart"
        serving = self._state.fleet.serving()
        if self._state.is_stopping:
            return "end with the run"
        if not serving:
            return f"{verb} on the next replica"
        if len(serving) == 1:
            return f"{verb} on replica {serving[0].id}"
        return f"{verb} on the other {len(serving)} replicas"

    def _replacement(self, commands: Sequence[Command]) -> str:
        """Return text about the replacement of a replica that is lost or did not start."""
        if (stop := _first(Stop, commands)) is not None:
            return f"the run stops: {stop.reason}"
        if (start := _first(StartReplica, commands)) is not None:
            return f"replica {start.replica} starts in its place"
        if self._state.is_stopping:
            return "no replacement is needed"
        if not self._lacks_replica(commands):
            is_away = bool(self._state.fleet.away)
            return "a replacement waits for a machine" if is_away else "no replacement is needed"
        return "a replacement starts after the next push"

    def _lacks_replica(self, commands: Sequence[Command]) -> bool:
        """Return whether a lost replica has a replacement, or should get one."""
        fleet = self._state.fleet
        return fleet.num_lacking > 0 or _first(StartReplica, commands) is not None

    def _write_trainer_loss(self, trainer: int, reason: str, commands: Sequence[Command]) -> None:
        self._lost_trainers.add(trainer)
        saved = self._state.trainers[trainer].version
        back = f"rolled back from step {self._version} to step {saved}"
        what = back if saved < self._version else f"its step {saved} is saved"
        groups = sum(isinstance(command, Drop) for command in commands)
        dropped = f"; {counted(groups, 'group')} dropped" if groups else ""
        self._warn(
            f"{self._names[trainer]} lost at step {self._version + 1} ({_how(reason)}); {what}{dropped}"
        )

    def _write_failure(self, command: Command, reason: str, commands: Sequence[Command]) -> None:
        if self._is_part_of_loss:
            return
        if isinstance(command, StartReplica):
            self._lost_replicas.append(self._replaced_by.pop(command.replica, command.replica))
        stop = _first(Stop, commands)
        if stop is not None:
            then = "the run stops"
        elif isinstance(command, StartReplica):
            then = self._replacement(commands)
        elif self._group is not None and self._group not in self._state.groups:
            then = f"group {self._group} is dropped"
        elif isinstance(command, TrainerCommand) and command.trainer != LEADER:
            then = "the run continues without it"
        else:
            then = "it is repeated"
        what = f"{self._what(command)} failed at step {self._step}"
        self._warn_seldom(
            f"{type(command).__name__} failed", reason, f"{what} ({_how(reason)}); {then}"
        )

    def _what(self, command: Command) -> str:
        """Return the role and its work."""
        match command:
            case Generate():
                return f"replica {command.replica}: rollout {command.rollout}"
            case Evaluate():
                return f"replica {command.replica}: rollout {command.rollout} of the evaluation of step {command.version}"
            case Verify(rollout) | Act(rollout) if rollout >= HELD_OUT:
                role = "verifier: score" if isinstance(command, Verify) else "environment"
                return f"{role} of rollout {rollout - HELD_OUT} of an evaluation"
            case Verify():
                return f"verifier: score of rollout {command.rollout}"
            case LoadWeights():
                return f"replica {command.replica}: load of step {command.version}"
            case Lend():
                return f"replica {command.replica}: waking up on GPUs that the trainer had"
            case TakeBack():
                return f"replica {command.replica}: giving its GPUs to the trainer"
            case StartReplica() | StopReplica():
                verb = "start" if isinstance(command, StartReplica) else "stop"
                return f"replica {command.replica}: {verb}"
            case PushWeights():
                return f"transfer: push of step {command.version}"
            case _ if isinstance(command, TrainerCommand):
                return f"{self._names[command.trainer]}: {type(command).__name__}"
        return type(command).__name__

    def _warn_seldom(self, what: str, reason: str, line: str) -> None:
        """Log a failure; after `MOST_ALIKE` alike, log only how many more there were, every `COUNTED` of them."""
        alike = (what, re.sub(r"\d+", "", reason))
        self._num_alike[alike] += 1
        left_out = self._num_alike[alike] - MOST_ALIKE
        if left_out == 0:
            self._warn(f"{line}; from now on, {COUNTED} such lines are logged as one")
        elif left_out < 0:
            self._warn(line)
        elif left_out % COUNTED == 0:
            self._warn(f"{what} {COUNTED} more times ({_how(reason)})")

    def _warn(self, line: str) -> None:
        logger.warning(_joined(line))

    def _inform(self, line: str) -> None:
        logger.info(_joined(line))

    def _write_replica_start(self, replica: int, version: int) -> None:
        lost = self._replaced_by.pop(replica, None)
        if lost is not None:
            self._inform(f"replica {replica} started at step {version} in place of replica {lost}")
        elif replica >= self._num_first:
            self._inform(f"replica {replica} started at step {version}")

    def _write_attach(self, trainer: int, name: str) -> None:
        if trainer == len(self._names):
            self._names.append(f"secondary trainer {name}")
        self._inform(f"{self._names[trainer]} attached at step {self._step}")

    def _write_command(self, command: Command) -> None:
        logger.debug("command %s", command)
        match command:
            case StartReplica(replica) if self._lost_replicas:
                self._replaced_by[replica] = self._lost_replicas.popleft()
            case Resize(num_replicas):
                self._inform(self._resize(num_replicas))
                self._num_replicas = num_replicas
            case Promote(trainer, version):
                self._inform(
                    f"{self._names[trainer]} is promoted at step {version}: "
                    "it takes the place of the lost trainer"
                )
            case Drop(group, reason) if group == self._group and not self._state.is_stopping:
                line = f"group {group} dropped ({_how(reason)}); no trainer trains on it"
                self._warn_seldom("a group was dropped", reason, line)

    def _resize(self, num_replicas: int) -> str:
        is_more = num_replicas > self._num_replicas
        why = "generation is slower than training" if is_more else "training is slower"
        then = "more start" if is_more else "idle ones stop"
        return (
            f"replicas resized from {self._num_replicas} to {num_replicas} "
            f"at step {self._step} ({why}); {then}"
        )

    @property
    def _step(self) -> int:
        """The step that the primary trainer works on."""
        return self._state.leader.version + 1


def _first(kind: type[T], commands: Sequence[Command]) -> T | None:
    return next((command for command in commands if isinstance(command, kind)), None)


def _joined(text: str) -> str:
    """Return a text of several lines as one line."""
    return " ".join(text.split())


def _how(reason: str) -> str:
    """Return a short reason, such as `process 4711 ended with signal 9`."""
    plain = reason.removeprefix("WorkerLostError: ").removeprefix("worker ")
    return re.sub(r"ended with status -(\d+)", r"ended with signal \1", plain)

"""List the losses and failures of a run, and what became of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Failed,
    Generate,
    Interrupted,
    Lend,
    LoadWeights,
    MachineReplaced,
    PushWeights,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    SaveCheckpoint,
    StartReplica,
    Stepped,
    Stop,
    StopReplica,
    TakeBack,
    TrainerLost,
    TrainerStarted,
    WeightsPushed,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.runfile.formatting import format_duration


@dataclass
class Incident:
    """One loss or failure."""

    time: float
    """Seconds since the start of the run."""
    step: int
    """The step under way."""
    what: str
    """Such as "replica 0 lost"."""
    reason: str
    outcome: str = ""
    """What became of it; empty if the record does not show it."""
    num_failed: int = 0
    """Rollouts that failed with it."""
    num_more: int = 0
    """Later failures of the same command for the same reason."""


def find_incidents(trace: Trace) -> list[Incident]:
    """Return the incidents of a trace, in order of time."""
    reader = _Reader()
    for block in trace.blocks():
        for entry in block:
            reader.read(entry)
    return list(reader.finish())


class _Reader:
    """Reads entries and follows each loss until it is repaired."""

    def __init__(self) -> None:
        self._found: list[Incident] = []
        self._version = 0
        self._replicas: dict[int, Incident] = {}
        """By lost replica: its incident."""
        self._leaving: dict[int, Incident] = {}
        """By replica whose machine is taken away: its notice, until the machine is replaced."""
        self._awaited: dict[int, Incident] = {}
        """By replacement: the incident that it repairs."""
        self._trainers: dict[int, Incident] = {}
        """By trainer that restarts: its incident."""
        self._failed: dict[tuple[str, str], Incident] = {}
        """By command and reason: the first of these failures."""
        self._repeated: dict[str, tuple[Incident, float]] = {}
        """By command that is repeated until it succeeds: its incident, and when it last failed."""

    def read(self, entry: Entry) -> None:
        """Read one entry."""
        time, event, commands = entry
        match event:
            case ReplicaLost(replica, reason):
                self._replicas[replica] = self._add(time, f"replica {replica} lost", reason)
                self._await(self._replicas[replica], commands)
            case ReplicaLeaving(replica, warning):
                why = f"its machine is taken away in {format_duration(warning)}"
                self._leaving[replica] = self._add(time, f"replica {replica} leaves", why)
            case ReplicaStopped(replica):
                if (noticed := self._leaving.get(replica)) is not None:
                    noticed.outcome = f"empty after {format_duration(time - noticed.time)}"
            case MachineReplaced(replica):
                if (noticed := self._leaving.pop(replica, None)) is not None:
                    self._await(noticed, commands)
            case ReplicaStarted(replica):
                if (repaired := self._awaited.pop(replica, None)) is not None:
                    took = format_duration(time - repaired.time)
                    took_over = f"replica {replica} took over after {took}"
                    parts = (repaired.outcome, took_over)
                    repaired.outcome = "; ".join(part for part in parts if part)
            case TrainerLost(trainer, reason):
                who = "trainer" if trainer == LEADER else f"trainer {trainer}"
                self._trainers[trainer] = self._add(time, f"{who} lost", reason)
            case TrainerStarted(trainer, version):
                if (repaired := self._trainers.pop(trainer, None)) is not None:
                    repaired.outcome = self._restarted(repaired, time, version)
                if trainer == LEADER:
                    self._version = version
            case WeightsPushed() | CheckpointSaved():
                kind = (
                    PushWeights if isinstance(event, WeightsPushed) else SaveCheckpoint
                ).__name__
                if (failed := self._repeated.pop(kind, None)) is not None:
                    repaired, since = failed
                    repaired.outcome = f"repeated, done after {format_duration(time - since)}"
            case Stepped(version, trainer):
                self._version = version if trainer == LEADER else self._version
            case Failed(command, reason):
                self._fail(time, command, reason)
            case Interrupted(reason):
                self._add(time, "interrupted", reason)
            case _:
                pass
        for command in commands:
            if type(command) is Stop:
                self._add(time, "stopped", command.reason).outcome = "the run ended"

    def _add(self, time: float, what: str, reason: str) -> Incident:
        made = Incident(time, self._version + 1, what, reason)
        self._found.append(made)
        return made

    def _await(self, incident: Incident, commands: Iterable[Command]) -> None:
        for command in commands:
            if type(command) is StartReplica:
                self._awaited[command.replica] = incident

    def _restarted(self, lost: Incident, time: float, version: int) -> str:
        took, repeated = format_duration(time - lost.time), lost.step - 1 - version
        again = f", {repeated} steps repeated" if repeated > 1 else ""
        again = ", 1 step repeated" if repeated == 1 else again
        return f"restarted from version {version} after {took}{again}"

    def _fail(self, time: float, command: Command, reason: str) -> None:
        """Count commands of a lost replica with its loss; other failures are incidents of their own."""
        if isinstance(command, Generate | LoadWeights | Lend | TakeBack | StopReplica):
            lost = self._replicas.get(command.replica)
            if lost is not None:
                lost.num_failed += type(command) is Generate
                return
        kind = type(command).__name__
        if lost_with(self._trainers.values(), time):
            return
        incident = self._failed.get((kind, reason))
        if incident is None:
            incident = self._add(time, f"{COMMANDS.get(kind, kind)} failed", reason)
            self._failed[kind, reason] = incident
        else:
            incident.num_more += 1
            incident.outcome = ""
        if isinstance(command, PushWeights | SaveCheckpoint):
            self._repeated[kind] = incident, time

    def finish(self) -> Iterator[Incident]:
        """Yield the incidents, with what became of their rollouts."""
        for incident in self._found:
            if incident.num_more:
                incident.what += f", and {incident.num_more} more {'time' if incident.num_more == 1 else 'times'}"
            if incident.num_failed:
                told = f"{incident.num_failed} rollouts went on elsewhere"
                incident.outcome = "; ".join(part for part in (incident.outcome, told) if part)
            yield incident


def lost_with(incidents: Iterable[Incident], time: float) -> bool:
    """Return whether a trainer was lost at this time, so that its running command failed with it."""
    return any(incident.time <= time for incident in incidents)


COMMANDS = {
    "Generate": "a rollout",
    "Verify": "a verification",
    "Score": "scoring",
    "Train": "a micro-batch",
    "Step": "an optimizer step",
    "PushWeights": "a push of weights",
    "LoadWeights": "loading weights",
    "Lend": "lending trainer GPUs",
    "TakeBack": "taking back trainer GPUs",
    "SaveCheckpoint": "a checkpoint",
    "StartReplica": "the start of a replica",
    "StartTrainer": "the start of a trainer",
    "StopReplica": "the stop of a replica",
    "StopTrainer": "the stop of a trainer",
    "ResizeTrainer": "a change of the trainer's ranks",
}
"""Words for commands that may fail."""

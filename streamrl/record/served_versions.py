"""Check which weight versions replicas served, and that the checksum they loaded is the one that was pushed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamrl.engine.messages import (
    Command,
    Event,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    WeightsLoaded,
    WeightsPushed,
)


class AssignedVersion(NamedTuple):
    """What a replica was told to serve."""

    version: int
    checksum: str | None
    """The one that it must find; None where nobody pushed the version."""


@dataclass(slots=True)
class Serving:
    """A version that a replica serves. What is sent to it meanwhile holds on to this one and so to all after it."""

    version: int
    next: Serving | None = None


class Sent(NamedTuple):
    """A rollout under way, and what its replica served when it was sent."""

    command: Generate
    serving: Serving | None


class ServedVersions:
    """Compares the checksum that a replica found with the one that was pushed, and what it samples with with what it loaded.

    A version that nobody pushed is what the run began with: replicas load its files, not the trainer's.
    """

    def __init__(self, complain: Callable[[str], None]) -> None:
        """Begin with nothing pushed.

        Args:
            complain: told what is wrong.
        """
        self.checksummed: set[int] = set()
        self.unverified: set[int] = set()
        """Versions that were pushed without a checksum."""
        self._complain = complain
        self._pushed: dict[int, str | None] = {}
        """Checksum by version; None of the one that the run began with."""
        self._loading: dict[int, AssignedVersion] = {}
        """What each replica was told to serve and does not yet."""
        self._serving: dict[int, Serving] = {}
        """What each replica serves."""
        self._sent: dict[int, Sent] = {}
        """Rollouts under way."""
        self._early: dict[int, int] = {}
        """By replica: a rollout that it sampled with what it was told to load, before it said that it had."""
        self.observe: dict[type[Event], Callable[[Any], None]] = {
            WeightsPushed: self._see_pushed,
            WeightsLoaded: self._see_served,
            ReplicaStarted: self._see_served,
            Failed: self._see_failed,
        }
        self.obey: dict[type[Command], Callable[[Any], None]] = {
            LoadWeights: self._begin_load,
            StartReplica: self._begin_load,
            Generate: self._send,
        }

    def begin(self, version: int) -> None:
        """Record that the run starts or resumes with a version that is on disk; every other version is pushed again."""
        self.check_end()
        self._pushed = {version: None}
        for of_before in (self._loading, self._serving, self._sent, self._early):
            of_before.clear()

    def check_end(self) -> None:
        """Take note of what replicas sampled with and never said that they had loaded."""
        for replica in list(self._early):
            self._check_early(replica)

    def see_sampled(self, event: Generated) -> None:
        """Compare the version that an attempt began with with those that its replica served since it was sent."""
        sent = self._sent.pop(event.rollout, None)
        if sent is None:
            self._complain(f"rollout {event.rollout} was generated, though it was sent nowhere")
            return
        command, serving = sent
        if event.tokens <= command.prefix:
            return  # it sampled nothing, so its version says nothing
        while serving is not None:
            if serving.version == event.version:
                return
            serving = serving.next
        told = self._loading.get(command.replica)
        if told is not None and told.version == event.version:
            self._early[command.replica] = event.rollout
        else:
            self._complain(_tell_unloaded(command.replica, event.rollout, event.version))

    def _see_pushed(self, event: WeightsPushed) -> None:
        self._pushed[event.version] = event.checksum

    def _begin_load(self, command: LoadWeights | StartReplica) -> None:
        if command.version not in self._pushed:
            self._complain(
                f"replica {command.replica} loads version {command.version}, never pushed"
            )
        self._check_early(command.replica)
        self._loading[command.replica] = AssignedVersion(
            command.version, self._pushed.get(command.version)
        )

    def _see_failed(self, event: Failed) -> None:
        match event.command:
            case LoadWeights(replica) | StartReplica(replica):
                self._loading.pop(replica, None)
                self._early.pop(replica, None)
            case Generate(rollout):
                self._sent.pop(rollout, None)
            case _:
                pass  # served nothing

    def _see_served(self, event: WeightsLoaded | ReplicaStarted) -> None:
        told, version = self._loading.pop(event.replica, None), event.version
        if told is None or told.version != version:
            self._complain(
                f"replica {event.replica} served version {version}, which it was not told to load"
            )
            return
        self._early.pop(event.replica, None)
        self._serve(event)
        pushed = told.checksum
        if pushed is None:
            return
        if event.checksum != pushed:
            self._complain(
                f"replica {event.replica} served version {version} with checksum "
                f"{event.checksum or 'none'}, pushed was {pushed or 'none'}"
            )
        elif pushed:
            self.checksummed.add(version)
        else:
            self.unverified.add(version)

    def _serve(self, event: WeightsLoaded | ReplicaStarted) -> None:
        """Enter what a replica serves from now on; one that comes up anew has nothing from before."""
        serving, before = Serving(event.version), self._serving.get(event.replica)
        if before is not None and isinstance(event, WeightsLoaded):
            before.next = serving
        self._serving[event.replica] = serving

    def _send(self, command: Generate) -> None:
        self._sent[command.rollout] = Sent(command, self._serving.get(command.replica))

    def _check_early(self, replica: int) -> None:
        if (rollout := self._early.pop(replica, None)) is not None:
            version = self._loading[replica].version
            self._complain(_tell_unloaded(replica, rollout, version))


def _tell_unloaded(replica: int, rollout: int, version: int) -> str:
    return (
        f"replica {replica} sampled rollout {rollout} with version {version}, which it never loaded"
    )

"""Check that replicas sample only with versions that they loaded, and that checksums match the push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.engine.messages import (
    Failed,
    Generate,
    Generated,
    Lend,
    Lent,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.record.message_reader import Handlers


class AssignedVersion(NamedTuple):
    """The version that a replica was last asked to load."""

    version: int
    checksum: str | None
    """The checksum of the push; None if the run started with this version and never pushed it."""


@dataclass(slots=True)
class Serving:
    """A version that a replica serves, linked to the version that it serves next.

    A rollout refers to the version at the moment it was sent. From there it can reach every later one.
    """

    version: int
    next: Serving | None = None


class Sent(NamedTuple):
    """A running rollout, and what its replica served when the rollout was sent."""

    command: Generate
    serving: Serving | None


class ServedVersions:
    """Compares loaded checksums with pushed ones, and the sampled version of a rollout with the loaded one.

    The version that the run started with is never pushed. Replicas load it from the model's files, so
    it has no checksum.
    """

    def __init__(self, report_fault: Callable[[str], None]) -> None:
        """Start with no pushed version; `report_fault` is called with the text of each fault."""
        self.checksummed: set[int] = set()
        self.unverified: set[int] = set()
        """Versions that were pushed without a checksum."""
        self._report_fault = report_fault
        self._pushed: dict[int, str | None] = {}
        """Checksum by version; None for the version that the run started with."""
        self._loading: dict[int, AssignedVersion] = {}
        """By replica: the version that it is loading."""
        self._serving: dict[int, Serving] = {}
        """By replica: the version that it serves."""
        self._sent: dict[int, Sent] = {}
        """Running rollouts."""
        self._early: dict[int, int] = {}
        """By replica: a rollout that it sampled with the version it is loading, before it reported the load."""

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message; `see_sampled` is called for every `Generated`."""
        yield {
            WeightsPushed: self._see_pushed,
            **dict.fromkeys((WeightsLoaded, Lent), self._see_served),
            ReplicaStarted: self._see_served,
            Failed: self._see_failed,
            **dict.fromkeys((LoadWeights, Lend), self._begin_load),
            StartReplica: self._begin_load,
            Generate: self._send,
        }

    def begin(self, version: int) -> None:
        """Record that the run starts or resumes with a version that is on disk; every other version is pushed again."""
        self.check_end()
        self._pushed = {version: None}
        for before_start in (self._loading, self._serving, self._sent, self._early):
            before_start.clear()

    def check_end(self) -> None:
        """Report versions that replicas sampled with but never reported to have loaded."""
        for replica in list(self._early):
            self._check_early(replica)

    def see_sampled(self, event: Generated) -> None:
        """Check that the first version of an attempt was served by its replica since the attempt was sent."""
        sent = self._sent.pop(event.rollout, None)
        if sent is None:
            self._report_fault(f"rollout {event.rollout} was generated, but was sent to no replica")
            return
        command, serving = sent
        if event.tokens <= command.prefix:
            return  # it sampled no token, so its version means nothing
        while serving is not None:
            if serving.version == event.version:
                return
            serving = serving.next
        assigned = self._loading.get(command.replica)
        if assigned is not None and assigned.version == event.version:
            self._early[command.replica] = event.rollout
        else:
            self._report_fault(_unloaded_fault(command.replica, event.rollout, event.version))

    def _see_pushed(self, event: WeightsPushed, _: float) -> None:
        self._pushed[event.version] = event.checksum

    def _begin_load(self, command: LoadWeights | Lend | StartReplica, _: float) -> None:
        if command.version not in self._pushed:
            self._report_fault(
                f"replica {command.replica} loads version {command.version}, which was never pushed"
            )
        self._check_early(command.replica)
        self._loading[command.replica] = AssignedVersion(
            command.version, self._pushed.get(command.version)
        )

    def _see_failed(self, event: Failed, _: float) -> None:
        match event.command:
            case LoadWeights(replica) | Lend(replica) | StartReplica(replica):
                self._loading.pop(replica, None)
                self._early.pop(replica, None)
            case Generate(rollout):
                self._sent.pop(rollout, None)
            case _:
                pass  # served nothing

    def _see_served(self, event: WeightsLoaded | Lent | ReplicaStarted, _: float) -> None:
        assigned, version = self._loading.pop(event.replica, None), event.version
        if assigned is None or assigned.version != version:
            self._report_fault(
                f"replica {event.replica} served version {version}, which it was not asked to load"
            )
            return
        self._early.pop(event.replica, None)
        self._serve(event)
        pushed = assigned.checksum
        if pushed is None:
            return
        if event.checksum != pushed:
            self._report_fault(
                f"replica {event.replica} served version {version} with checksum "
                f"{event.checksum or 'none'}, but the trainer pushed {pushed or 'none'}"
            )
        elif pushed:
            self.checksummed.add(version)
        else:
            self.unverified.add(version)

    def _serve(self, event: WeightsLoaded | Lent | ReplicaStarted) -> None:
        """Record the version that a replica serves from now on; a restarted replica has no earlier one."""
        serving, before = Serving(event.version), self._serving.get(event.replica)
        if before is not None and isinstance(event, WeightsLoaded | Lent):
            before.next = serving
        self._serving[event.replica] = serving

    def _send(self, command: Generate, _: float) -> None:
        self._sent[command.rollout] = Sent(command, self._serving.get(command.replica))

    def _check_early(self, replica: int) -> None:
        if (rollout := self._early.pop(replica, None)) is not None:
            version = self._loading[replica].version
            self._report_fault(_unloaded_fault(replica, rollout, version))


def _unloaded_fault(replica: int, rollout: int, version: int) -> str:
    return (
        f"replica {replica} sampled rollout {rollout} with version {version}, which it never loaded"
    )

"""Which versions of the weights replicas served, and whether what they loaded is what was pushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamrl.engine.messages import (
    Command,
    Event,
    Failed,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    WeightsLoaded,
    WeightsPushed,
)


class ServedVersions:
    """Compares the checksum that a replica found with the one that was pushed.

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
        self._loading: dict[int, str | None] = {}
        """Checksum that each replica must find, None where nobody pushed what it loads."""
        self.observe: dict[type[Event], Callable[[Any], None]] = {
            WeightsPushed: self._see_pushed,
            WeightsLoaded: self._see_served,
            ReplicaStarted: self._see_served,
            Failed: self._see_failed,
        }
        self.obey: dict[type[Command], Callable[[Any], None]] = {
            LoadWeights: self._begin_load,
            StartReplica: self._begin_load,
        }

    def begin(self, version: int) -> None:
        """Enter that the run begins, or goes on, with a version that lies on disk; all others are pushed anew."""
        self._pushed = {version: None}
        self._loading.clear()

    def _see_pushed(self, event: WeightsPushed) -> None:
        self._pushed[event.version] = event.checksum

    def _begin_load(self, command: LoadWeights | StartReplica) -> None:
        if command.version not in self._pushed:
            self._complain(
                f"replica {command.replica} loads version {command.version}, never pushed"
            )
        self._loading[command.replica] = self._pushed.get(command.version)

    def _see_failed(self, event: Failed) -> None:
        if isinstance(event.command, LoadWeights | StartReplica):
            self._loading.pop(event.command.replica, None)

    def _see_served(self, event: WeightsLoaded | ReplicaStarted) -> None:
        pushed, version = self._loading.pop(event.replica, None), event.version
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

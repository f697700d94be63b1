"""The way of weights to replicas of the trainer's machine: a pushed version lies in shared memory until it is too old."""

from __future__ import annotations

from collections import Counter

from executor.roles import TransferRole, Write
from executor.samples import Manifest
from executor.transfer.shared_directory import SharedDirectory
from executor.transfer.version_directory import remove_version
from streamrl.engine.messages import PushWeights, WeightsPushed


class Transfer(TransferRole):
    """Owner of the shared directory and of the versions in it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._directory = SharedDirectory("weights")
        self.manifests: dict[int, Manifest] = {}
        """What a replica loads, by version; the one that the run began with was never pushed."""
        self._held: Counter[int] = Counter()
        """How many replicas load a version, or are about to."""
        self._newest: int | None = None
        self._pushed: set[int] = set()

    def join(self, replica: int, place: str) -> None:
        """Every replica loads from the one directory."""

    def leave(self, replica: int) -> None:
        """Nothing was kept for it."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to where replicas can load it."""
        try:
            manifest = await self._write(command.version, self._directory.path)
        except Exception:
            if command.version not in self.manifests:
                remove_version(self._directory.path, command.version)
            raise
        self.manifests[command.version] = manifest
        self._newest = command.version
        self._pushed.add(command.version)
        self._remove_unwanted()
        return WeightsPushed(command.version, manifest.num_bytes, manifest.checksum)

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return what every replica loads."""
        if version in self._pushed and version not in self.manifests:
            raise ConnectionError(f"weights of step {version} are gone")
        return self.manifests.get(version)

    def hold(self, version: int) -> None:
        """Keep a version for someone who will load it, also where a newer one is there."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """Let go of a version that was held."""
        self._held[version] -= 1
        self._remove_unwanted()

    def _remove_unwanted(self) -> None:
        for version in list(self.manifests):
            if version != self._newest and not self._held[version]:
                del self.manifests[version]
                remove_version(self._directory.path, version)

    async def close(self) -> None:
        """Remove what there is."""
        self.stop()

    def stop(self) -> None:
        """Remove the directory with all that lies in it, also of a push that broke off."""
        self._directory.remove()

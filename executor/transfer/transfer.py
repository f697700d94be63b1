"""The way of weights to replicas of the trainer's machine: a pushed version lies in shared memory until it is too old."""

from __future__ import annotations

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.roles import TransferRole, Write
from streamrl.executor.samples import Manifest
from streamrl.executor.transfer.shared_directory import SharedDirectory
from streamrl.executor.transfer.version_directory import remove_version
from streamrl.executor.transfer.wanted_versions import WantedVersions


class Transfer(TransferRole):
    """Owner of the shared directory and of the versions in it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._directory = SharedDirectory("weights")
        self.manifests: dict[int, Manifest] = {}
        """What a replica loads, by version; the one that the run began with was never pushed."""
        self._wanted = WantedVersions()

    def join(self, replica: int, place: str) -> None:
        """Every replica loads from the one directory."""

    def leave(self, replica: int) -> None:
        """Nothing was kept for it."""

    async def prepare(self) -> None:
        """The directory is there."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to where replicas can load it."""
        try:
            manifest = await self._write(command.version, self._directory.path)
        except Exception:
            if command.version not in self.manifests:
                remove_version(self._directory.path, command.version)
            raise
        self.manifests[command.version] = manifest
        self._wanted.enter(command.version)
        self._remove_unwanted()
        return WeightsPushed(command.version, manifest.num_bytes, manifest.checksum)

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return what every replica loads."""
        if self._wanted.was_pushed(version) and version not in self.manifests:
            raise ConnectionError(f"weights of step {version} are gone")
        return self.manifests.get(version)

    def hold(self, version: int) -> None:
        """Keep a version for someone who will load it, also where a newer one is there."""
        self._wanted.hold(version)

    def release(self, version: int) -> None:
        """Let go of a version that was held."""
        self._wanted.release(version)
        self._remove_unwanted()

    def _remove_unwanted(self) -> None:
        for version in list(self.manifests):
            if version not in self._wanted:
                del self.manifests[version]
                remove_version(self._directory.path, version)

    async def close(self) -> None:
        """Remove what there is."""
        self.stop()

    def stop(self) -> None:
        """Remove the directory with all that lies in it, also of a push that broke off."""
        self._directory.remove()

"""Send weights to the replicas of the trainer's machine through shared memory, and remove versions that nobody needs."""

from __future__ import annotations

from collections import Counter

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.roles import Manifest, TransferRole, Write
from streamrl.executor.transfer.shared_directory import SharedDirectory, remove_version


class RetainedVersions:
    """The newest version, one on its way and those that are held: a few numbers, however long a run goes on."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        """How many replicas load a version, or are about to."""
        self._oldest: int | None = None
        self._newest: int | None = None
        self._on_its_way: int | None = None

    def begin(self, version: int) -> None:
        """Want a version that is about to be pushed; also if that fails, until another one is: it is tried again."""
        self._on_its_way = version

    def enter(self, version: int) -> None:
        """Enter that a version was pushed, which is the newest now."""
        self._newest = version
        self._oldest = version if self._oldest is None else min(self._oldest, version)

    def was_pushed(self, version: int) -> bool:
        """Whether a version is not the one that the run began with, which never is."""
        return self._oldest is not None and version >= self._oldest

    def hold(self, version: int) -> None:
        """Want a version also where a newer one is there."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """Let go of a version that was held."""
        self._held[version] -= 1
        if not self._held[version]:
            del self._held[version]

    def __contains__(self, version: int) -> bool:
        return version in (self._newest, self._on_its_way) or version in self._held


class Transfer(TransferRole):
    """Owner of the shared directory and of the versions in it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._directory = SharedDirectory("weights")
        self.manifests: dict[int, Manifest] = {}
        """What a replica loads, by version; the one that the run began with was never pushed."""
        self._wanted = RetainedVersions()

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

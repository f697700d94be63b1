"""Send weights through shared memory to replicas on the trainer's machine; remove unneeded versions."""

from __future__ import annotations

from collections import Counter

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.roles import Manifest, TransferRole, WeightTarget, Write
from streamrl.executor.transfer.shared_directory import SharedDirectory, remove_version


class RetainedVersions:
    """The versions to keep: the newest, the one being pushed, and those that replicas load.

    It stores only a few numbers, however long a run is.
    """

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        """Number of replicas that load a version, or will."""
        self._oldest: int | None = None
        self._newest: int | None = None
        self._on_its_way: int | None = None

    def begin(self, version: int) -> None:
        """Keep a version that is about to be pushed; after a failed push too, because the push is repeated."""
        self._on_its_way = version

    def enter(self, version: int) -> None:
        """Record that a version was pushed; it is the newest now."""
        self._newest = version
        self._oldest = version if self._oldest is None else min(self._oldest, version)

    def was_pushed(self, version: int) -> bool:
        """Return whether a version was pushed during this run; the initial version never is."""
        return self._oldest is not None and version >= self._oldest

    def hold(self, version: int) -> None:
        """Keep a version even if there is a newer one."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """Undo one `hold` of a version."""
        self._held[version] -= 1
        if not self._held[version]:
            del self._held[version]

    def __contains__(self, version: int) -> bool:
        return version in (self._newest, self._on_its_way) or version in self._held


class Transfer(TransferRole):
    """Owns the shared directory and the versions in it."""

    def __init__(self, write: Write, room: int = 0) -> None:
        """Create the shared directory; `room` is the number of bytes that versions take in it."""
        self._write = write
        self._directory = SharedDirectory("weights", room)
        self.manifests: dict[int, Manifest] = {}
        """Manifests by version; the initial version has none, because it was never pushed."""
        self._wanted = RetainedVersions()

    def join(self, replica: int, place: str, target: WeightTarget | None = None) -> None:
        """Do nothing: all replicas load from the same directory."""

    def leave(self, replica: int) -> None:
        """Do nothing: no data is kept for a single replica."""

    async def prepare(self) -> None:
        """Do nothing: the directory exists already."""

    async def reach(self, replica: int) -> None:
        """Do nothing: replicas read the directory themselves."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Write a version to the shared directory."""
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
        """Return the manifest for a replica; None for the initial version."""
        if self._wanted.was_pushed(version) and version not in self.manifests:
            raise ConnectionError(f"weights of step {version} were removed; load a newer version")
        return self.manifests.get(version)

    def hold(self, version: int) -> None:
        """Keep a version for a replica that will load it, even if there is a newer one."""
        self._wanted.hold(version)

    def release(self, version: int) -> None:
        """Undo one `hold` of a version."""
        self._wanted.release(version)
        self._remove_unwanted()

    def _remove_unwanted(self) -> None:
        for version in list(self.manifests):
            if version not in self._wanted:
                del self.manifests[version]
                remove_version(self._directory.path, version)

    async def close(self) -> None:
        """Remove the shared directory."""
        self.stop()

    def stop(self) -> None:
        """Remove the directory with its content, including that of an interrupted push."""
        self._directory.remove()

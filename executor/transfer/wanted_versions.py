"""Which pushed versions someone may yet load."""

from __future__ import annotations

from collections import Counter


class WantedVersions:
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

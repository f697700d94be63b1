"""The way of weights from the trainer to the replicas: a pushed version lies in shared memory until it is too old."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from executor.roles import TransferRole
from executor.samples import Manifest
from executor.transfer.shared_memory import remove_version, shared_directory
from streamrl.engine.messages import PushWeights, WeightsPushed

Write = Callable[[int, Path], Awaitable[Manifest]]
"""Writes the weights of a version to a directory: a trainer's `push`."""


class Transfer(TransferRole):
    """Owner of the shared directory and of the versions in it."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._directory = shared_directory("streamrl")
        self.manifests: dict[int, Manifest] = {}
        """What a replica loads, by version; the one that the run began with was never pushed."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to where replicas can load it."""
        manifest = await self._write(command.version, self._directory)
        self.manifests[command.version] = manifest
        return WeightsPushed(command.version, manifest.num_bytes)

    def remove_before(self, version: int) -> None:
        """Remove the versions older than `version`, which nobody will load any more."""
        for old in [pushed for pushed in self.manifests if pushed < version]:
            del self.manifests[old]
            remove_version(self._directory, old)

    def stop(self) -> None:
        """Remove the directory with all that lies in it, also of a push that broke off."""
        if self._directory.exists():
            shutil.rmtree(self._directory)

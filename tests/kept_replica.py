"""A replica that goes on from test to test, where its engine takes long to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker

Served = tuple[asyncio.Runner, ReplicaWorker]
"""A replica, and the event loop that it is called on."""


class Kept:
    """A replica that waits for a next scenario of the same settings: vLLM takes ten seconds of a core to start.

    Close it before another engine of vLLM starts in this process: their processes are each other's.
    """

    def __init__(self, version: int) -> None:
        """Take the version that its weights are at first."""
        self._version = version
        self._settings: ReplicaSettings | None = None
        self._served: Served | None = None
        self._ends = ExitStack()

    def of(self, settings: ReplicaSettings) -> Served:
        """Return the replica of some settings; one of others is ended."""
        if self._served is None or settings != self._settings:
            self.close()
            self._served = self._ends.enter_context(started(settings, None, self._version))
            self._settings = settings
        return self._served

    def close(self) -> None:
        """End it."""
        self._served = None
        self._ends.close()


@contextmanager
def started(settings: ReplicaSettings, manifest: Manifest | None, version: int) -> Iterator[Served]:
    """Have a replica, and stop it whatever happens."""
    with asyncio.Runner() as runner:
        replica = ReplicaWorker(settings)
        runner.run(replica.start(manifest, version))
        try:
            yield runner, replica
        finally:
            runner.run(replica.stop())

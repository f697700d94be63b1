"""Start roles as processes of this machine, or in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from streamrl.engine.trainer_side import LEADER
from streamrl.executor.launchers.handles import Config, Handle, InProcess, LocalProcess, RankHandles
from streamrl.executor.launchers.launcher import (
    RELAY,
    REPLICA,
    REWARD_MODEL,
    TRAINER,
    Launcher,
    name_of,
    worker_environment,
)
from streamrl.executor.launchers.placement import LocalGpus, Place, Placement, device_of, threads_of
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.record import RunDirectory
from streamrl.runfile.config import Run

THIS_MACHINE = "this machine"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""Over which ranks talk: all are on this machine."""


class LocalLauncher(Launcher):
    """Puts each role on the GPUs of this machine that its place stands for."""

    def __init__(self, run: Run, directory: RunDirectory, gpus: Sequence[str] = ()) -> None:
        super().__init__(run, directory)
        self._placement = Placement(run)
        self._gpus = LocalGpus(run, gpus)
        self._num_trainers = 0
        """Trainers with several ranks that were started."""

    @property
    def num_threads(self) -> int:
        """CPU threads of each role."""
        return threads_of(self._run)

    def device(self, pool: str) -> str:
        """Return the device, as a role's own process names it: one of its own sees no GPUs but those of its place."""
        device = super().device(pool)
        return device if self._run.execute.launcher == "in-process" else device.partition(":")[0]

    def join(self, run: Run) -> None:
        """Take the run with one more trainer, and the GPUs that this one has.

        Raises:
            RuntimeError: its pool has too few that are free, or the run claimed none for it.
        """
        if device_of(run.execute.device, run.cluster.pools, run.trainers[-1].pool) == "cuda":
            raise RuntimeError("a run on this machine's GPUs claims them all as it begins")
        self._placement.join(run)
        super().join(run)

    def free(self, replica_id: int) -> None:
        """Give the GPUs of a replica that is gone back."""
        self._placement.free(replica_id)

    def place_of(self, replica_id: int) -> str:
        """All replicas share a relay."""
        return THIS_MACHINE

    def trainer_place(self) -> str:
        """All is on one machine."""
        return THIS_MACHINE

    async def _start_replica(self, replica_id: int, kind: int, config: Config) -> Handle:
        place = self._placement.replica(replica_id, kind)
        return await self._start(REPLICA, config, f"replica-{replica_id}", place)

    async def _start_trainer(self, number: int, config: Config) -> Handle:
        place = self._placement.trainers[number][0]
        return await self._start(self._trainer_role(number), config, name_of(number), place)

    async def _start_ranks(self, number: int, configs: list[Config]) -> Handle:
        self._num_trainers += 1
        name = f".rendezvous-{os.getpid()}-{self._num_trainers}"
        rendezvous = self._directory.logs.resolve() / name
        rendezvous.unlink(missing_ok=True)
        ranks = [
            self._start(
                TRAINER,
                {**config, "rendezvous": f"file://{rendezvous}"},
                f"{name_of(number)}-{rank}",
                place,
            )
            for rank, (config, place) in enumerate(
                zip(configs, self._placement.trainers[number], strict=True)
            )
        ]
        return RankHandles(await asyncio.gather(*ranks), lambda: rendezvous.unlink(missing_ok=True))

    async def _start_reward_model(self, number: int, config: Config) -> Handle:
        place = self._placement.reward_models[number]
        return await self._start(REWARD_MODEL, config, f"reward-model-{number}", place)

    async def _start_relay(self, place: str | None, config: Config, name: str) -> Handle:
        return await self._start(RELAY, config, name, self._placement.trainers[LEADER][0])

    async def _start(self, role: str, config: Config, name: str, place: Place) -> Handle:
        if self._run.execute.launcher == "in-process":
            return InProcess(role, config)
        run, log = self._run, self._directory.logs / f"{name}.log"
        begin = begin_for(
            device_of(run.execute.device, run.cluster.pools, place.pool), config.get("backend")
        )
        return await LocalProcess.start(
            role, config, log, self.environment(place), run.execute.patience, begin
        )

    def environment(self, place: Place) -> dict[str, str]:
        """Return what the process of a role finds in its environment beside what this one has."""
        return {
            **worker_environment(self.num_threads),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK),
            **self._gpus.environment(place),
        }

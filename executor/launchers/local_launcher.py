"""Start roles as processes on this machine, or inside this process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path

from streamrl.engine.trainer_side import LEADER
from streamrl.executor.launchers.handles import (
    Config,
    Handle,
    InProcess,
    LocalProcess,
    RankHandles,
)
from streamrl.executor.launchers.launcher import (
    RELAY,
    REPLICA,
    REWARD_MODEL,
    TRAINER,
    Launcher,
    name_of,
    worker_environment,
)
from streamrl.executor.launchers.placement import (
    LocalGpus,
    NoGpusLeftError,
    Place,
    PlacedRoles,
    Placement,
    Servers,
    threads_of,
)
from streamrl.executor.launchers.processes import begin_for, begin_imports
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.runfile.roles_config import SecondaryTrainerConfig

THIS_MACHINE = "this machine"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""Network interface between ranks, which are all on this machine."""


TICK = 0.25
"""Seconds between two looks for free GPUs."""


class LocalLauncher(Launcher):
    """Starts each role on those GPUs of this machine that correspond to its place."""

    def __init__(
        self,
        configs: RoleConfigs,
        roles: PlacedRoles,
        directory: RunDirectory,
        gpus: Sequence[str] = (),
    ) -> None:
        super().__init__(configs, roles, directory)
        self._placement = Placement(roles)
        self._gpus = LocalGpus(roles, gpus)
        self._servers = Servers.of(roles.rollout)
        self._num_groups = 0
        """Number of groups of ranks so far."""

    @property
    def num_threads(self) -> int:
        """CPU threads of each role."""
        return threads_of(self._roles)

    def device(self, pool: str) -> str:
        """Return the torch device; a worker process sees only its own GPUs, so it needs no index."""
        device = super().device(pool)
        return device if self._roles.execute.launcher == "in-process" else device.partition(":")[0]

    def begin_imports(self) -> None:
        """Start the prefork server of the primary trainer, which replicas also use, except those of vLLM."""
        if self._roles.execute.launcher != "in-process":
            place = self._placement.trainers[LEADER][0]
            begin_imports(self.environment(place), self._roles.device_of(place.pool))

    def join(self, follower: SecondaryTrainerConfig, wanted_replicas: Sequence[int]) -> None:
        """Add a trainer to the run, and reserve its place.

        Raises:
            RuntimeError: its pool has too few free GPUs, or it needs a GPU, which the run did not claim at its start.
        """
        if self._roles.device_of(follower.pool) == "cuda":
            raise RuntimeError("a run on this machine's GPUs claims them all as it begins")
        self._placement.join(follower, wanted_replicas)
        super().join(follower, wanted_replicas)

    def free(self, replica_id: int) -> None:
        """Release the GPUs or the server of a replica that has ended."""
        self._placement.free(replica_id)
        if self._servers is not None:
            self._servers.free(replica_id)

    def place_of(self, replica_id: int) -> str:
        """Return this machine: all replicas share one relay."""
        return THIS_MACHINE

    def trainer_place(self) -> str:
        """Return this machine."""
        return THIS_MACHINE

    async def _start_replica(self, replica_id: int, kind: int, config: Config) -> Handle:
        place = await self._free_place(replica_id, kind)
        if self._servers is not None:
            config["server"] = self._configs.server(self._servers.take(replica_id))
        return await self._start(REPLICA, config, f"replica-{replica_id}", place)

    async def _free_place(self, replica_id: int, kind: int) -> Place:
        """Reserve GPUs for a replica; wait up to `execute.patience` for them, so that a failed start is no busy loop.

        Raises:
            NoGpusLeftError: no node has enough free GPUs.
        """
        until = time.monotonic() + self._roles.execute.patience
        while True:
            try:
                return self._placement.replica(replica_id, kind)
            except NoGpusLeftError:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(TICK)

    async def _start_trainer(self, number: int, config: Config) -> Handle:
        place = self._placement.trainers[number][0]
        return await self._start(self._trainer_role(number), config, name_of(number), place)

    async def _start_ranks(self, number: int, configs: list[Config]) -> Handle:
        rendezvous = self._new_rendezvous()
        ranks = await asyncio.gather(
            *(self._start_rank(number, config, rendezvous) for config in configs)
        )
        return RankHandles(
            ranks,
            lambda: rendezvous.unlink(missing_ok=True),
            self._roles.trainers[number].ranks_alike,
        )

    def _new_rendezvous(self) -> Path:
        """Return the file in which the ranks of a trainer meet; each group of ranks needs a new one."""
        self._num_groups += 1
        rendezvous = (
            self._directory.logs.resolve() / f".rendezvous-{os.getpid()}-{self._num_groups}"
        )
        rendezvous.unlink(missing_ok=True)
        return rendezvous

    async def _start_rank(self, number: int, config: Config, rendezvous: Path) -> Handle:
        """Start one rank of a trainer at its place."""
        rank = config["rank"]
        assert isinstance(rank, int)
        return await self._start(
            TRAINER,
            {**config, "rendezvous": f"file://{rendezvous}"},
            f"{name_of(number)}-{rank}",
            self._placement.trainers[number][rank],
        )

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        """See `Launcher`. Processes on the GPUs of replicas start with a trainer that borrows these, and load no model."""
        handle = await super().trainer(number, data_parallel)
        num_borrowed = self._roles.borrowed_ranks
        if number != LEADER or not num_borrowed:
            return handle
        ranks = handle
        if not isinstance(ranks, RankHandles):
            ranks = RankHandles([ranks], lambda: None)
        num_own = len(ranks.ranks)
        started = await asyncio.gather(
            *self._starting(range(num_own, num_own + num_borrowed), self._new_rendezvous()),
            return_exceptions=True,
        )
        ranks.parked = [each for each in started if isinstance(each, Handle)]
        for error in started:
            if isinstance(error, BaseException):
                ranks.kill(f"was killed with the other ranks: {error}")
                raise error
        return ranks

    def _starting(self, ranks: Sequence[int], rendezvous: Path) -> Iterator[Awaitable[Handle]]:
        """Yield the starts of more ranks of the primary trainer."""
        own = self._roles.trainer.with_ranks(ranks[-1] + 1 if ranks else 1)
        config = self._trainer_config(LEADER, own) | {"zero": own.zero, "num_ranks": own.num_gpus}
        for rank in ranks:
            yield self._start_rank(LEADER, {**config, "rank": rank}, rendezvous)

    async def resize_trainer(self, handle: Handle, data_parallel: int) -> Handle:
        """See `Launcher`."""
        before = handle if isinstance(handle, RankHandles) else None
        had = [handle] if before is None else list(before.ranks)
        parked = [] if before is None else before.parked
        rendezvous = self._new_rendezvous()
        missing = range(len(had), data_parallel)
        handle.watch(None)
        if parked and missing:
            started: list[Handle | BaseException] = list(parked)
        else:
            starting = self._starting(missing, rendezvous)
            started = await asyncio.gather(*starting, return_exceptions=True)
        new = [each for each in started if isinstance(each, Handle)]
        ranks = RankHandles(
            [*had[:data_parallel], *new], lambda: rendezvous.unlink(missing_ok=True)
        )
        try:
            for error in started:
                if isinstance(error, BaseException):
                    raise error
            await ranks.regroup(len(had), f"file://{rendezvous}", before)
        except BaseException as error:
            for each in (*had, *new):
                each.kill(f"was killed with the other ranks: {error}")
            ranks.forget_rendezvous()
            raise
        if before is not None:
            before.forget_rendezvous()
        if self._roles.borrowed_ranks and not missing:
            ranks.park(had[data_parallel:])
        else:
            ranks.let_go(had[data_parallel:])
        return ranks

    def reserve_ranks(self, data_parallel: int, wanted_replicas: Sequence[int]) -> None:
        """See `Launcher`."""
        self._placement.resize_trainer(data_parallel, wanted_replicas)

    async def _start_reward_model(self, number: int, config: Config) -> Handle:
        place = self._placement.reward_models[number]
        return await self._start(REWARD_MODEL, config, f"reward-model-{number}", place)

    async def _start_relay(self, place: str | None, config: Config, name: str) -> Handle:
        return await self._start(RELAY, config, name, self._placement.trainers[LEADER][0])

    async def _start(self, role: str, config: Config, name: str, place: Place) -> Handle:
        if self._roles.execute.launcher == "in-process":
            return InProcess(role, config)
        self._directory.logs.mkdir(exist_ok=True)  # a cleaner of logs may have removed it
        log, patience = self._directory.logs / f"{name}.log", self._roles.execute.patience
        device = str(config.get("device", self._roles.device_of(place.pool)))
        begin = begin_for(device, config.get("backend"))
        environment = self.environment(None if device == "cpu" else place)
        return await LocalProcess.start(role, config, log, environment, patience, begin)

    def environment(self, place: Place | None) -> dict[str, str]:
        """Return the environment variables that a role on GPUs, or on the CPU, gets in addition to this process's."""
        return {
            **worker_environment(self.num_threads),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK),
            **({} if place is None else self._gpus.environment(place)),
        }

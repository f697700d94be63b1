"""Start the roles of a run on their places: what every kind of launcher has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from streamrl.executor.launchers.handles import Config, Handle
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.runfile.backend_choice import engine_named, training_backend_named
from streamrl.runfile.roles_config import SecondaryTrainerConfig, TrainerConfig

REPLICA = "streamrl.executor.rollout.replica_worker:ReplicaWorker"
TRAINER = "streamrl.executor.trainer.trainer_worker:TrainerWorker"
REWARD_MODEL = "streamrl.executor.verifier.reward_model:RewardWorker"
COUNTER = "streamrl.executor.subscribers.counting_trainer:CountingTrainer"
RELAY = "streamrl.executor.transfer.relay:RelayWorker"
KEPT_BYTES = 2**30
"""Freed host memory, in bytes, that a worker keeps for its next tensors. By default glibc returns tensors above about
1 MB to the kernel, and their pages fault again in every step. That made decode steps of 64 rollouts on a CPU two to
three times slower."""
KEPT_KERNELS = 2**13
"""Compiled oneDNN kernels that a worker caches, of 26 KB each. In half precision oneDNN compiles one for each number of
tokens. Prefixes lead to some hundred pass sizes. With the default cache of 1,024 no kernel was reused, and passes took
twice as long."""


class Launcher(ABC):
    """Starts roles and returns a handle on each."""

    def __init__(self, configs: RoleConfigs, roles: PlacedRoles, directory: RunDirectory) -> None:
        """Start nothing yet.

        Args:
            configs: builds the configuration of each role.
            roles: the roles of the run.
            directory: gets the log of each role.
        """
        self._configs = configs
        self._roles = roles
        self._directory = directory
        self._num_relays = 0

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """CPU threads of each role."""

    def join(self, follower: SecondaryTrainerConfig, wanted_replicas: Sequence[int]) -> None:
        """Add a trainer to the run, and reserve its GPUs beside `wanted_replicas` of each kind.

        Raises:
            RuntimeError: its pool has too few free GPUs.
        """
        self._configs.join(follower)
        self._roles = replace(self._roles, followers=(*self._roles.followers, follower))

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        """Start a replica of a kind, on GPUs that no other replica uses."""
        own = self._roles.replica_kinds[kind]
        config = self._configs.replica(replica_id, kind, model) | self._computing(own.pool)
        if engine_named(own.backend).runs_elsewhere:  # the process is only a client
            config["device"] = "cpu"
        return await self._start_replica(replica_id, kind, config)

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        """Start a trainer on all of its ranks; `data_parallel` replaces that of its section."""
        own = self._roles.trainers[number]
        if data_parallel is not None:
            own = own.with_ranks(data_parallel)
        num_ranks = own.num_gpus
        config = self._trainer_config(number, own)
        if num_ranks == 1 and not training_backend_named(own.backend).always_has_ranks:
            return await self._start_trainer(number, config)
        config |= {
            "zero": own.zero,
            "num_ranks": num_ranks,
            "tensor_parallel": own.tensor_parallel,
            "context_parallel": own.context_parallel,
        }
        ranks = [{**config, "rank": rank} for rank in range(num_ranks)]
        return await self._start_ranks(number, ranks)

    def _trainer_config(self, number: int, own: TrainerConfig) -> Config:
        """Return the settings of a trainer, without those of its ranks."""
        return self._configs.trainer(number, self.device(own.pool)) | self._computing(own.pool)

    async def resize_trainer(self, handle: Handle, data_parallel: int) -> Handle:
        """Let the primary trainer continue with other data-parallel ranks; the ranks that stay do not restart.

        The trainer must be between two steps. Return its new handle. If this fails, all ranks are killed.

        Raises:
            WorkerLostError: a rank is lost, or cannot be started.
        """
        raise NotImplementedError("check_resize requires launcher local")

    def reserve_ranks(self, data_parallel: int, wanted_replicas: Sequence[int]) -> None:
        """Reserve GPUs for `resize_trainer`; those of the sizes in the run file are reserved at the start.

        GPUs for `wanted_replicas` of each kind stay free, also if a replica is lost or its machine is away.

        Raises:
            RuntimeError: the pool of the trainer has too few free GPUs.
        """
        raise NotImplementedError("check_resize requires launcher local")

    async def reward_model(self, number: int) -> Handle:
        """Start a replica of the reward model."""
        pool = self._roles.verifier.pool
        assert pool is not None, "check_rewards wants one"
        config = self._configs.reward_model() | self._computing(pool)
        return await self._start_reward_model(number, config)

    def _trainer_role(self, number: int) -> str:
        """Return the role of a trainer with one rank."""
        only_counts = number > 0 and self._roles.followers[number - 1].counts_only
        return COUNTER if only_counts else TRAINER

    async def relay(self, place: str | None) -> Handle:
        """Start the weight relay of a place; None means the primary trainer's node."""
        self._num_relays += 1
        return await self._start_relay(place, self._configs.relay(), f"relay-{self._num_relays}")

    @abstractmethod
    def free(self, replica_id: int) -> None:
        """Release the GPUs of a replica that has ended."""

    def leaving(self) -> dict[int, float]:
        """Return the replicas whose machines will be taken away, with the seconds until then."""
        return {}

    @abstractmethod
    def place_of(self, replica_id: int) -> str:
        """Return the place where a replica loads weights; replicas of one place share a relay."""

    @abstractmethod
    def trainer_place(self) -> str:
        """Return the place of the primary trainer's first rank."""

    @abstractmethod
    async def _start_replica(self, replica_id: int, kind: int, config: Config) -> Handle: ...

    @abstractmethod
    async def _start_trainer(self, number: int, config: Config) -> Handle: ...

    @abstractmethod
    async def _start_ranks(self, number: int, configs: list[Config]) -> Handle: ...

    @abstractmethod
    async def _start_reward_model(self, number: int, config: Config) -> Handle: ...

    @abstractmethod
    async def _start_relay(self, place: str | None, config: Config, name: str) -> Handle: ...

    def device(self, pool: str) -> str:
        """Return the torch device of a pool's roles, as their own process names it."""
        return self._roles.device_of(pool)

    def _computing(self, pool: str) -> Config:
        """Return the settings with which a role in a pool computes."""
        return {"device": self.device(pool), "num_threads": self.num_threads}


def name_of(trainer: int) -> str:
    """Return the base name of a trainer's log file."""
    return f"follower-{trainer}" if trainer else "trainer"


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that every worker gets in addition to those of this process."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS),
    }

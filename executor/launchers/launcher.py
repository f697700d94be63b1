"""Build the configuration of each role from the run file, for every kind of launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from msgspec.structs import replace

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.launchers.handles import Config, Handle
from streamrl.executor.launchers.placement import device_of
from streamrl.executor.record import RunDirectory
from streamrl.runfile.backend_choice import training_backend_named
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import SecondaryTrainerConfig

REPLICA = "streamrl.executor.rollout.replica_worker:ReplicaWorker"
TRAINER = "streamrl.executor.trainer.trainer_worker:TrainerWorker"
REWARD_MODEL = "streamrl.executor.verifier.reward_model:RewardWorker"
COUNTER = "streamrl.executor.subscribers.counting_trainer:CountingTrainer"
RELAY = "streamrl.executor.transfer.relay:RelayWorker"
LOGITS_CHUNK = 1024
"""Tokens for which logits are computed at once. Liger and prime-rl use the same chunk."""
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

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        self._run = run
        self._directory = directory
        self._num_relays = 0

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """CPU threads of each role."""

    def join(self, follower: SecondaryTrainerConfig) -> None:
        """Add a trainer to the run, and reserve its GPUs.

        Raises:
            RuntimeError: its pool has too few free GPUs.
        """
        self._run = replace(self._run, followers=(*self._run.followers, follower))

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        """Start a replica of a kind, on GPUs that no other replica uses."""
        run = self._run.of_kind(kind)
        config: Config = {
            "model": model,
            "tokenizer": model,
            "max_running": run.rollout.max_running,
            "max_tokens": run.rollout.max_tokens,
            "max_prompt_tokens": run.workload.max_prompt_tokens,
            "temperature": run.rollout.temperature,
            "seed": run.seed + replica_id,
            "backend": run.rollout.backend,
            "tensor_parallel": run.rollout.tensor_parallel,
            "expert_parallel": run.rollout.expert_parallel,
            "memory_utilization": run.rollout.memory_utilization,
            "takes_turns": run.policies.shares_gpus,
            "shares_prefixes": run.shares_prefixes,
            "save_time": float(run.execute.save_tokens_every),
            **self._common(run.rollout.pool),
        }
        if self._run.serves_adapters:  # a checkpoint has merged weights and separate adapters
            is_first = model == run.model.path
            config["model"] = run.model.path
            config["adapters"] = None if is_first else str(Path(model) / ADAPTERS)
            config["adapter_rank"] = run.sync.adapter_rank
        return await self._start_replica(replica_id, kind, config)

    async def trainer(self, number: int) -> Handle:
        """Start a trainer on all of its ranks."""
        run = self._run.as_seen_by(number)
        algorithm, common = run.algorithm, self._common(run.trainer.pool)
        config: Config = {
            "model": run.model.path,
            "learning_rate": algorithm.learning_rate,
            "temperature": run.rollout.temperature,
            "algorithm": algorithm.name,
            "correction": algorithm.corrected_by,
            "correction_cap": algorithm.correction_cap,
            "second_moment": algorithm.second_moment,
            "clip": algorithm.clip,
            "clip_high": algorithm.clip_high,
            "kl_coefficient": algorithm.kl_coefficient,
            "kl_estimator": algorithm.kl_estimator,
            "kl_in": algorithm.kl_in,
            "entropy_coefficient": algorithm.entropy_coefficient,
            "rollouts_per_update": run.rollouts_per_update,
            "loss_mean": algorithm.loss_mean,
            "max_grad_norm": algorithm.max_grad_norm,
            "beta": algorithm.beta,
            "critic_learning_rate": algorithm.critic_rate if algorithm.has_critic else None,
            "gae_lambda": algorithm.gae_lambda,
            "max_tokens_per_pass": run.trainer.max_tokens_per_pass,
            "packing": run.trainer.packing,
            "recompute": "none" if common["device"] == "cpu" else run.trainer.recompute,
            "logits_chunk": LOGITS_CHUNK if run.trainer.logits in ("chunked", "fused") else None,
            "seed": run.seed,
            "backend": run.trainer.backend,
            "adapter_rank": run.sync.adapter_rank,
            **common,
        }
        num_ranks = run.trainer.num_gpus
        if num_ranks == 1 and not training_backend_named(run.trainer.backend).always_has_ranks:
            return await self._start_trainer(number, config)
        config |= {"zero": run.trainer.zero, "num_ranks": num_ranks}
        ranks = [{**config, "rank": rank} for rank in range(num_ranks)]
        return await self._start_ranks(number, ranks)

    async def reward_model(self, number: int) -> Handle:
        """Start a replica of the reward model."""
        verifier = self._run.verifier
        reward, pool = verifier.reward_model, verifier.pool
        assert reward is not None and pool is not None, "check_rewards wants both"
        config: Config = {
            "model": reward.model,
            "step_end": reward.step_end,
            "over_steps": reward.over_steps,
            "max_tokens_per_pass": verifier.max_tokens_per_pass,
            **self._common(pool),
        }
        return await self._start_reward_model(number, config)

    def _trainer_role(self, number: int) -> str:
        """Return the role of a trainer with one rank."""
        return COUNTER if self._run.only_counts(number) else TRAINER

    async def relay(self, place: str | None) -> Handle:
        """Start the weight relay of a place; None means the primary trainer's node."""
        run = self._run
        config: Config = {
            "model": run.model.path,
            "dtype": run.model.dtype,
            "merges_adapters": not run.serves_adapters,
        }
        self._num_relays += 1
        return await self._start_relay(place, config, f"relay-{self._num_relays}")

    @abstractmethod
    def free(self, replica_id: int) -> None:
        """Release the GPUs of a replica that has ended."""

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
        return device_of(self._run.execute.device, self._run.cluster.pools[pool])

    def _common(self, pool: str) -> Config:
        return {
            "device": self.device(pool),
            "dtype": self._run.model.dtype,
            "num_threads": self.num_threads,
            "deterministic": self._run.execute.deterministic,
        }


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

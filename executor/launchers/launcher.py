"""Tell each role its configuration as it starts, whatever launcher starts it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from streamrl.executor.adapter_layers import ADAPTERS
from streamrl.executor.launchers.handles import Config, Handle
from streamrl.executor.launchers.placement import device_of
from streamrl.executor.record import RunDirectory
from streamrl.runfile.backend_choice import training_backend_named
from streamrl.runfile.config import Run

REPLICA = "streamrl.executor.rollout.replica_worker:ReplicaWorker"
TRAINER = "streamrl.executor.trainer.trainer_worker:TrainerWorker"
REWARD_MODEL = "streamrl.executor.verifier.reward_model:RewardWorker"
COUNTER = "streamrl.executor.subscribers.counting_trainer:CountingTrainer"
RELAY = "streamrl.executor.transfer.relay:RelayWorker"
LOGITS_CHUNK = 1024
"""Tokens whose logits exist at once in chunks: as many as the losses of Liger and prime-rl take."""
KEPT_BYTES = 2**30
"""Freed host memory that a worker keeps for its next tensors. glibc hands tensors of more than about a megabyte
back to the kernel and faults their pages in again every step: on a CPU that made decode steps of 64 rollouts
two to three times slower."""
KEPT_KERNELS = 2**13
"""What a worker keeps of the kernels that oneDNN compiles for each number of tokens in half precision: of the 1,024 that it
keeps by itself passes of some hundred sizes, which prefixes give, use none a second time and take twice as long. 26 KB each."""


class Launcher(ABC):
    """Makes handles on roles."""

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        self._run = run
        self._directory = directory
        self._num_relays = 0

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """CPU threads of each role."""

    def join(self, run: Run) -> None:
        """Take the run with one more trainer, and the GPUs that this one has.

        Raises:
            RuntimeError: its pool has too few that are free.
        """
        self._run = run

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        """Start the role of a replica of a kind on GPUs that no living replica has."""
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
        if self._run.serves_adapters:  # a checkpoint has them merged, and apart
            is_first = model == run.model.path
            config["model"] = run.model.path
            config["adapters"] = None if is_first else str(Path(model) / ADAPTERS)
            config["adapter_rank"] = run.sync.adapter_rank
        return await self._start_replica(replica_id, kind, config)

    async def trainer(self, number: int) -> Handle:
        """Start the role of a trainer, on each of its ranks."""
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
        """Start the role of a replica of the reward model."""
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
        """Return what a trainer of one rank is."""
        return COUNTER if self._run.only_counts(number) else TRAINER

    async def relay(self, place: str | None) -> Handle:
        """Start the relay of a place, or the one beside the trainer."""
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
        """Give the GPUs of a replica that is gone back."""

    @abstractmethod
    def place_of(self, replica_id: int) -> str:
        """Return where a replica loads weights: those of one place share a relay."""

    @abstractmethod
    def trainer_place(self) -> str:
        """Return the place of the leading trainer's first rank."""

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
        """Return the device, as a role's own process names it, of roles in a pool."""
        return device_of(self._run.execute.device, self._run.cluster.pools, pool)

    def _common(self, pool: str) -> Config:
        return {
            "device": self.device(pool),
            "dtype": self._run.model.dtype,
            "num_threads": self.num_threads,
            "deterministic": self._run.execute.deterministic,
        }


def name_of(trainer: int) -> str:
    """Return what the log of a trainer is called."""
    return f"follower-{trainer}" if trainer else "trainer"


def worker_environment(threads: int) -> dict[str, str]:
    """Return what a worker process finds in its environment beside what this one has."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS),
    }

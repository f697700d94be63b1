"""Where roles live: starts replicas and the trainer as processes of this machine, or in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from executor.carriers.handles import Handle, InProcess, LocalProcess
from executor.carriers.local_cores import threads_of
from executor.carriers.local_gpus import LocalGpus, device_of
from executor.carriers.placement import Place, Placement
from executor.carriers.rank_handles import RankHandles
from executor.record import RunDirectory
from streamrl.runfile.config import Run

REPLICA = "executor.rollout.replica_worker:ReplicaWorker"
TRAINER = "executor.trainer.trainer_worker:TrainerWorker"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""Over which ranks talk: all are on this machine."""
KEPT_BYTES = 2**30
"""Freed host memory that a worker keeps for its next tensors. glibc hands tensors of more than about a megabyte
back to the kernel and faults their pages in again every step: on a CPU that made decode steps of 64 rollouts
two to three times slower."""


class Launcher:
    """Makes handles on roles, each on the GPUs of this machine that its place stands for."""

    def __init__(self, run: Run, directory: RunDirectory, gpus: Sequence[str] = ()) -> None:
        self._run = run
        self._directory = directory
        self._placement = Placement(run)
        self._gpus = LocalGpus(run, gpus)
        self._num_trainers = 0
        """Trainers with several ranks that were started."""

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        """Start the role of a replica of a kind on GPUs that no living replica has."""
        run = self._run.of_kind(kind)
        place = self._placement.replica(replica_id, kind)
        config: dict[str, object] = {
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
            "takes_turns": run.shares_gpus,
            "shares_prefixes": run.rollout.shares_prefixes,
            "save_time": float(run.execute.save_tokens_every),
            **self._common(run.rollout.pool),
        }
        return await self._start(REPLICA, config, f"replica-{replica_id}", place)

    def free(self, replica_id: int) -> None:
        """Give the GPUs of a replica that is gone back."""
        self._placement.free(replica_id)

    async def trainer(self) -> Handle:
        """Start the role of the trainer, on each of its ranks."""
        run = self._run
        algorithm = run.algorithm
        config: dict[str, object] = {
            "model": run.model.path,
            "learning_rate": algorithm.learning_rate,
            "temperature": run.rollout.temperature,
            "correction": algorithm.correction,
            "clip": algorithm.clip,
            "kl_coefficient": algorithm.kl_coefficient,
            "loss_mean": algorithm.loss_mean,
            "max_grad_norm": algorithm.max_grad_norm,
            "max_tokens_per_pass": run.trainer.max_tokens_per_pass,
            "packing": run.trainer.packing,
            "seed": run.seed,
            "backend": run.trainer.backend,
            **self._common(run.trainer.pool),
        }
        places = self._placement.trainer
        if len(places) == 1 and run.trainer.backend == "torch":
            return await self._start(TRAINER, config, "trainer", places[0])
        self._num_trainers += 1
        rendezvous = self._directory.logs / f".rendezvous-{os.getpid()}-{self._num_trainers}"
        rendezvous.unlink(missing_ok=True)
        config |= {
            "zero": run.trainer.zero,
            "num_ranks": len(places),
            "rendezvous": str(rendezvous.resolve()),
        }
        ranks = [
            self._start(TRAINER, {**config, "rank": rank}, f"trainer-{rank}", place)
            for rank, place in enumerate(places)
        ]
        return RankHandles(await asyncio.gather(*ranks), rendezvous)

    def _common(self, pool: str) -> dict[str, object]:
        return {
            "device": device_of(self._run, pool),
            "dtype": self._run.model.dtype,
            "num_threads": threads_of(self._run),
            "deterministic": self._run.execute.deterministic,
        }

    async def _start(self, role: str, config: dict[str, object], name: str, place: Place) -> Handle:
        if self._run.execute.launcher == "in-process":
            return InProcess(role, config)
        log = self._directory.logs / f"{name}.log"
        return await LocalProcess.start(
            role, config, log, self.environment(place), self._run.execute.patience
        )

    def environment(self, place: Place) -> dict[str, str]:
        """Return what the process of a role finds in its environment beside what this one has."""
        return worker_environment(threads_of(self._run)) | self._gpus.environment(place)


def worker_environment(threads: int) -> dict[str, str]:
    """Return what a worker process finds in its environment beside what this one has."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK),
    }

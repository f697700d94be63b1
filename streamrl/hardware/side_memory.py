"""Compute what takes the memory of one GPU of each side."""

from __future__ import annotations

import msgspec

from streamrl.hardware.memory import (
    fullest_stage,
    replica_workspace,
    reward_model_bytes,
    trainer_memory,
)
from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.resolved import (
    ReplicaHardware,
    ResolvedRun,
    RewardHardware,
    TrainerHardware,
)
from streamrl.runfile.gpu_pools import kind_name, trainer_names


class SideMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What takes the memory of one GPU."""

    side: str
    gpu: str
    num_gpus: int
    capacity: float
    """Bytes of the GPU."""
    usable: float
    """Bytes of it that the run file lets this side take."""
    parts: dict[str, float]
    """Bytes by what takes them; what stays unused is not among them."""

    @property
    def need(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def memory_of(resolved: ResolvedRun) -> list[SideMemory]:
    """Return the memory of every side that holds a model whose shape is known.

    Also where it does not fit: then with the cache of one longest rollout.

    Raises:
        ValueError: a profile is missing, or the model cannot be split as the run file says.
    """
    run = resolved.run
    trainers = [
        msgspec.structs.replace(trainer_side(resolved.trainers[number]), side=name)
        for number, name in enumerate(trainer_names(run.followers))
        if not run.only_counts(number)
    ]
    replicas = [
        msgspec.structs.replace(replica_side(replica), side=kind_name(kind))
        for kind, replica in enumerate(resolved.replicas)
    ]
    verifier = None if resolved.reward is None else reward_side(resolved.reward)
    return [*replicas, *trainers, *([] if verifier is None else [verifier])]


def replica_side(replica: ReplicaHardware) -> SideMemory:
    """Return the memory of a GPU that generates: weights, and the cache that fills what is left."""
    gpu, fullest = replica.gpu, fullest_stage(replica)
    usable = gpu.usable_memory * replica.config.memory_utilization
    workspace = replica_workspace(replica)
    held, per_token = fullest.held, fullest.token
    room = usable - held - workspace
    num_tokens = max(int(max(0.0, room) // per_token), replica.longest_sequence)
    return SideMemory(
        side="rollout",
        gpu=gpu.name,
        num_gpus=replica.config.num_gpus,
        capacity=gpu.usable_memory,
        usable=usable,
        parts={
            "weights": held,
            "workspace": workspace,
            "kv_cache": num_tokens * per_token,
        },
    )


def trainer_side(trainer: TrainerHardware) -> SideMemory:
    """Return the memory of the fullest GPU that trains."""
    gpu = trainer.gpu
    return SideMemory(
        side="trainer",
        gpu=gpu.name,
        num_gpus=trainer.config.num_gpus,
        capacity=gpu.usable_memory,
        usable=gpu.usable_memory,
        parts=trainer_memory(trainer),
    )


def reward_side(reward: RewardHardware) -> SideMemory | None:
    """Return the memory of a GPU that computes rewards; None where the model or its pool is not known."""
    parts = reward_model_bytes(reward)
    if not parts or reward.pool is None:
        return None
    gpu = load_gpu(reward.pool.gpu)
    return SideMemory(
        side="verifier",
        gpu=gpu.name,
        num_gpus=reward.config.num_gpus,
        capacity=gpu.usable_memory,
        usable=gpu.usable_memory,
        parts=parts,
    )

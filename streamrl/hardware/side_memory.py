"""Compute the memory of one GPU of each side, by what uses it."""

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
    """The memory of one GPU of a side, by what uses it."""

    side: str
    gpu: str
    num_gpus: int
    capacity: float
    """Bytes of the GPU that tensors can use."""
    usable: float
    """Bytes of it that the run file allows this side to use."""
    parts: dict[str, float]
    """Bytes by what uses them, without unused bytes."""

    @property
    def need(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def memory_of(resolved: ResolvedRun) -> list[SideMemory]:
    """Return the memory of every side with a model of known shape.

    If a replica does not fit, its KV cache counts as that of one longest rollout.

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
    """Return the memory of a GPU of a replica: weights, workspace, and a KV cache that fills the rest."""
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
    """Return the memory of the fullest GPU of a trainer."""
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
    """Return the memory of a GPU with the reward model; None if the model's shape or its pool is unknown."""
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

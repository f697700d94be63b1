"""Compute what takes the memory of one GPU of each side."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from streamrl.hardware.memory import (
    fullest_stage,
    longest_sequence,
    replica_workspace,
    reward_model_bytes,
    trainer_memory,
)
from streamrl.hardware.profiles import Gpu, load_gpu
from streamrl.runfile.config import Run
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


def memory_of(run: Run) -> list[SideMemory]:
    """Return the memory of every side that holds a model whose shape is known.

    Also where it does not fit: then with the cache of one longest rollout.

    Raises:
        ValueError: a profile is missing, or the model cannot be split as the run file says.
    """
    trainers = [
        msgspec.structs.replace(trainer_side(run.as_seen_by(number)), side=name)
        for number, name in enumerate(trainer_names(run.followers))
        if not run.only_counts(number)
    ]
    replicas = [
        msgspec.structs.replace(replica_side(run.of_kind(kind)), side=kind_name(kind))
        for kind in range(run.rollout.num_kinds)
    ]
    return [*replicas, *trainers, *verifier_side(run)]


def _gpu(run: Run, pool: str) -> Gpu:
    return load_gpu(run.cluster.pools[pool].gpu)


def replica_side(run: Run) -> SideMemory:
    """Return the memory of a GPU that generates: weights, and the cache that fills what is left."""
    rollout, gpu, fullest = run.rollout, _gpu(run, run.rollout.pool), fullest_stage(run)
    usable = gpu.usable_memory * rollout.memory_utilization
    workspace = replica_workspace(run)
    held, per_token = fullest.held, fullest.token
    room = usable - held - workspace
    num_tokens = max(int(max(0.0, room) // per_token), longest_sequence(run))
    return SideMemory(
        side="rollout",
        gpu=gpu.name,
        num_gpus=rollout.num_gpus,
        capacity=gpu.usable_memory,
        usable=usable,
        parts={
            "weights": held,
            "workspace": workspace,
            "kv_cache": num_tokens * per_token,
        },
    )


def trainer_side(run: Run) -> SideMemory:
    """Return the memory of the fullest GPU that trains."""
    gpu = _gpu(run, run.trainer.pool)
    return SideMemory(
        side="trainer",
        gpu=gpu.name,
        num_gpus=run.trainer.num_gpus,
        capacity=gpu.usable_memory,
        usable=gpu.usable_memory,
        parts=trainer_memory(run),
    )


def verifier_side(run: Run) -> Iterator[SideMemory]:
    """Yield the memory of a GPU that computes rewards, where there are such and their model is known."""
    parts, pool = reward_model_bytes(run), run.verifier.pool
    if parts and pool is not None:
        gpu = _gpu(run, pool)
        yield SideMemory(
            side="verifier",
            gpu=gpu.name,
            num_gpus=run.verifier.num_gpus,
            capacity=gpu.usable_memory,
            usable=gpu.usable_memory,
            parts=parts,
        )

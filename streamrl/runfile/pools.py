"""Who has which GPUs of a run, and what lies between the two sides; raises `ValueError` where that cannot be."""

from __future__ import annotations

from streamrl.runfile.config import Run
from streamrl.runfile.sides_config import SyncConfig


def find_link(run: Run) -> int | None:
    """Give the index of the link between the two sides, or None within one pool."""
    wanted = {run.rollout.pool, run.trainer.pool}
    for index, link in enumerate(run.cluster.links):
        if set(link.between) == wanted and len(wanted) == 2:
            return index
    return None


def replicas_per_node(run: Run) -> int:
    """Give the replicas that fill a node of the rollout pool."""
    return run.cluster.pools[run.rollout.pool].gpus_per_node // run.rollout.tensor_parallel


def most_replicas(run: Run) -> int:
    """Give the replicas that the rollout pool has GPUs for, beside the trainer where it is there too."""
    num_gpus = run.cluster.pools[run.rollout.pool].num_gpus
    if run.trainer.pool == run.rollout.pool and not run.shares_gpus:
        num_gpus -= run.trainer.num_gpus
    return num_gpus // run.rollout.tensor_parallel


def check_pools(run: Run) -> None:
    """Raise `ValueError` where a side names no pool, or asks for GPUs or links that are not there."""
    pools = run.cluster.pools
    for side, pool_name in (("rollout", run.rollout.pool), ("trainer", run.trainer.pool)):
        if pool_name not in pools:
            raise ValueError(f"{side}.pool {pool_name!r} is none of the pools {sorted(pools)}")
    for index, link in enumerate(run.cluster.links):
        for pool_name in link.between:
            if pool_name not in pools:
                raise ValueError(
                    f"cluster.links[{index}].between names {pool_name!r}, which is no pool"
                )
        if link.bandwidth <= 0:
            raise ValueError(
                f"cluster.links[{index}].bandwidth must be above 0, got {link.bandwidth}"
            )
    per_node = pools[run.rollout.pool].gpus_per_node
    degree = run.rollout.tensor_parallel
    if degree > per_node or per_node % degree:
        raise ValueError(
            f"rollout.tensor_parallel must divide the {per_node} GPUs of a node, got {degree}"
        )
    if run.rollout.expert_parallel not in (1, degree):
        raise ValueError(
            f"rollout.expert_parallel must be 1 or tensor_parallel {degree}, "
            f"got {run.rollout.expert_parallel}"
        )
    _check_trainer(run)
    if run.shares_gpus:
        _check_shared(run)
    _check_num_gpus(run)
    _check_resize(run)


def _check_trainer(run: Run) -> None:
    trainer = run.trainer
    per_node = run.cluster.pools[trainer.pool].gpus_per_node
    if per_node % trainer.tensor_parallel:
        raise ValueError(
            f"trainer.tensor_parallel must divide the {per_node} GPUs of a node, "
            f"got {trainer.tensor_parallel}"
        )
    ranks = trainer.data_parallel * trainer.tensor_parallel
    if ranks % trainer.expert_parallel:
        raise ValueError(
            f"trainer.expert_parallel must divide data_parallel x tensor_parallel = {ranks}, "
            f"got {trainer.expert_parallel}"
        )
    if trainer.efficiency is not None and not 0 < trainer.efficiency <= 1:
        raise ValueError(f"trainer.efficiency must be in (0, 1], got {trainer.efficiency}")


def _check_shared(run: Run) -> None:
    """Generation and training that take turns on one set of GPUs cannot overlap, or send over a wire."""
    if run.rollout.pool != run.trainer.pool:
        raise ValueError(
            f"policies.system 'colocated' shares GPUs, so trainer.pool must be rollout.pool "
            f"{run.rollout.pool!r}, got {run.trainer.pool!r}"
        )
    policies, sync = run.policies, run.sync
    for key, value, only in (
        ("policies.max_staleness", policies.max_staleness, 0),
        ("policies.waits_for_whole_batches", policies.waits_for_whole_batches, False),
        ("policies.streaming", policies.streaming, "whole-batch"),
        ("policies.weight_sync", policies.weight_sync, "barrier"),
        ("policies.resize", policies.resize, "keep"),
        ("sync.mode", sync.mode, "full"),
        ("sync.backend", sync.backend, SyncConfig().backend),
    ):
        if value is not None and value != only:
            raise ValueError(
                f"{key} must be {only!r} where policies.system is 'colocated', got {value!r}"
            )


def _check_num_gpus(run: Run) -> None:
    rollout, trainer = run.rollout, run.trainer
    for name, pool in run.cluster.pools.items():
        needs, users = [0], []
        if rollout.pool == name:
            needs.append(rollout.num_gpus)
            users.append(
                f"rollout.replicas={rollout.replicas} x tensor_parallel={rollout.tensor_parallel}"
            )
        if trainer.pool == name:
            needs.append(trainer.num_gpus)
            users.append(
                f"trainer.data_parallel={trainer.data_parallel} x tensor_parallel="
                f"{trainer.tensor_parallel} x pipeline_parallel={trainer.pipeline_parallel}"
            )
        need = max(needs) if run.shares_gpus else sum(needs)
        if need > pool.num_gpus:
            raise ValueError(
                f"pool {name!r} has {pool.num_gpus} GPUs, but {' and '.join(users)} need {need}"
            )
    if run.rollout.pool != run.trainer.pool and find_link(run) is None:
        raise ValueError(
            f"cluster.links has no link between {run.rollout.pool!r} and {run.trainer.pool!r}"
        )


def _check_resize(run: Run) -> None:
    """Refuse to adjust replicas where there could be neither more nor fewer."""
    policies, room = run.policies, most_replicas(run)
    least, most = run.rollout.replicas, policies.max_replicas or room
    if not least <= most <= room:
        raise ValueError(
            f"policies.max_replicas must be between rollout.replicas={least} and {room}, for which pool "
            f"{run.rollout.pool!r} has GPUs, got {most}"
        )
    if policies.resize == "keep":
        return
    if run.shares_gpus:
        raise ValueError("policies.resize must be 'keep' where policies.system is 'colocated'")
    unit = policies.resize_unit or replicas_per_node(run)
    if least + unit > most and policies.shrink_after is None:
        raise ValueError(
            f"policies.resize 'adjust' adds {unit} replicas at once, but there may be {most} in pool "
            f"{run.rollout.pool!r} and rollout.replicas is {least}"
        )


def powers_of_two(most: int) -> list[int]:
    """Give 1, 2, 4, ... up to `most`: the degrees that are tried where nobody says which."""
    return [1 << bits for bits in range(most.bit_length())]

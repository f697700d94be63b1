"""Place the GPUs of replicas and trainer on nodes, in the terms in which frameworks ask for them.

verl, slime and OpenRLHF take a number of equal parts of nodes for each side. NeMo-RL takes whole nodes, or two parts of
one node. A placement is None if there is none, with the reason.
"""

from __future__ import annotations

from itertools import product
from math import lcm
from typing import NamedTuple

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


class Parts(NamedTuple):
    """Equal parts of nodes: all GPUs of a part are in one node."""

    number: int
    gpus: int
    """GPUs of each part."""


class Placement(NamedTuple):
    """The parts of both sides, or the reason why there are none."""

    rollout: Parts | None
    trainer: Parts | None
    refusal: str = ""


def place_in_parts(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> Placement:
    """Return the fewest parts of nodes that hold both sides.

    A replica and a tensor-parallel group stay inside a part, or fill whole nodes. Parts of both sides
    may be in one node.
    """
    generate, train = pools[rollout.pool], pools[trainer.pool]
    replica, group = rollout.gpus_per_replica, trainer.tensor_parallel
    if shares_gpus:
        both = _parts(trainer.num_gpus, lcm(replica, group), train.gpus_per_node)
        return _found(both[:1], both[:1], trainer, trainer.num_gpus, train)
    ours = _parts(rollout.num_gpus, replica, generate.gpus_per_node)
    theirs = _parts(trainer.num_gpus, group, train.gpus_per_node)
    if rollout.pool != trainer.pool:
        return _found(ours[:1], theirs[:1], trainer, rollout.num_gpus, train)
    pairs = [pair for pair in product(ours, theirs) if _fits(*pair, train)]
    best = sorted(pairs, key=lambda pair: (pair[0].number + pair[1].number, pair[1].number))[:1]
    return _found(
        [pair[0] for pair in best], [pair[1] for pair in best], trainer, rollout.num_gpus, train
    )


def _found(
    rollout: list[Parts],
    trainer: list[Parts],
    config: TrainerConfig,
    generate: int,
    pool: PoolConfig,
) -> Placement:
    if rollout and trainer:
        return Placement(rollout[0], trainer[0])
    text = (
        f"no equal parts of nodes hold the {generate} GPUs of the replicas beside the {config.num_gpus} of the trainer: "
        f"pool {config.pool} has {pool.nodes} nodes of {pool.gpus_per_node}, and a replica or a tensor-parallel group "
        "would be split over nodes"
    )
    return Placement(None, None, text)


def _parts(num_gpus: int, group: int, per_node: int) -> list[Parts]:
    """Return the equal parts in which GPUs can be taken, the largest first: groups stay whole, or fill nodes."""
    sizes = [size for size in range(min(per_node, num_gpus), 0, -1) if num_gpus % size == 0]
    if group > per_node:
        return [Parts(num_gpus // size, size) for size in sizes if size == per_node]
    return [Parts(num_gpus // size, size) for size in sizes if size % group == 0]


def _fits(one: Parts, other: Parts, pool: PoolConfig) -> bool:
    """Whether the parts of both sides fit on the nodes of a pool; true where both need more GPUs than it has."""
    if one.number * one.gpus + other.number * other.gpus > pool.num_gpus:
        return True
    large, small = sorted((one, other), key=lambda parts: -parts.gpus)
    each = pool.gpus_per_node // large.gpus
    full, rest = divmod(large.number, each)
    left = pool.nodes - full - (rest > 0)
    if left < 0:
        return False
    room = full * ((pool.gpus_per_node - each * large.gpus) // small.gpus)
    room += (rest > 0) * ((pool.gpus_per_node - rest * large.gpus) // small.gpus)
    return room + left * (pool.gpus_per_node // small.gpus) >= small.number


class WholeNodes(NamedTuple):
    """Nodes of a cluster in which each side has nodes of its own, or GPUs of the only node."""

    nodes: int | None
    gpus: int | None
    """GPUs on each node, alike on both sides."""
    rollout: Parts | None
    refusal: str = ""


def place_on_whole_nodes(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> WholeNodes:
    """Return the nodes of a cluster whose sides share no node unless it is the only one."""
    generate, train = (
        _nodes(rollout.num_gpus, rollout.pool, pools),
        _nodes(trainer.num_gpus, trainer.pool, pools),
    )
    total, pool = rollout.num_gpus + trainer.num_gpus, pools[trainer.pool]
    if shares_gpus and train is not None:
        return WholeNodes(train.number, train.gpus, train)
    is_shared = rollout.pool == trainer.pool
    if is_shared and total <= pool.gpus_per_node:
        return WholeNodes(1, total, Parts(1, rollout.num_gpus))
    if generate is None or train is None or generate.gpus != train.gpus:
        text = (
            f"replicas and trainer have whole nodes of their own, with as many GPUs on each: {rollout.num_gpus} and "
            f"{trainer.num_gpus} GPUs do not divide so"
        )
        return WholeNodes(None, None, None, text)
    nodes = generate.number + train.number
    if is_shared and nodes > pool.nodes and total <= pool.num_gpus:
        text = (
            f"replicas and trainer have whole nodes of their own: {generate.number} and {train.number}, and pool "
            f"{trainer.pool} has {pool.nodes}"
        )
        return WholeNodes(None, None, None, text)
    return WholeNodes(nodes, generate.gpus, generate)


def _nodes(num_gpus: int, pool: str, pools: dict[str, PoolConfig]) -> Parts | None:
    """Distribute GPUs evenly over the fewest nodes that hold them; None if they do not divide."""
    nodes = -(-num_gpus // pools[pool].gpus_per_node)
    return None if num_gpus % nodes else Parts(nodes, num_gpus // nodes)


def why_replicas_are_split(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> str:
    """Return why a replica would span nodes if GPUs are numbered node by node, the trainer's first; "" if none does."""
    per_node, replica = pools[rollout.pool].gpus_per_node, rollout.gpus_per_replica
    is_behind = rollout.pool == trainer.pool and not shares_gpus
    first = trainer.num_gpus if is_behind else 0
    whole = min(replica, per_node)
    if per_node % whole == 0 and first % whole == 0 and replica % whole == 0:
        return ""
    behind = f" after the {first} GPUs of the trainer" if first else ""
    return f"replicas take the next {replica} GPUs each{behind}, so one of them would be split over two nodes of {per_node}"

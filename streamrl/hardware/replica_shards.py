"""What each GPU of a replica has of a model: the layers of its pipeline stage, and of these its tensor ranks' share.

Attention ranks (`rollout.data_parallel`) have all of it but the experts, which all of them share out. The first stage has
the embedding, the last one the output head.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.slices import stage_layers
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.sides_config import RolloutConfig


class ReplicaShard(NamedTuple):
    """A GPU of one pipeline stage of a replica."""

    parameters: float
    num_layers: int
    linear_parameters: float
    """Those of linear layers, which may be kept in a narrow format."""


def replica_shards(model: ModelShape, rollout: RolloutConfig) -> list[ReplicaShard]:
    """Return what a GPU of each pipeline stage has, the first stage first.

    Raises:
        RunError: the model has fewer layers than there are stages, or no experts to share out.
    """
    _check_split(model, rollout)
    shard = model.shard_parameters(rollout.tensor_parallel, rollout.expert_parallel)
    stages = rollout.pipeline_parallel
    layers = stage_layers(model.num_layers, stages)
    parameters = over_stages(model, shard, stages, rollout.tensor_parallel)
    linear = model.linear_parameters(rollout.tensor_parallel, rollout.expert_parallel)
    return [
        ReplicaShard(held, count, linear * count / model.num_layers)
        for held, count in zip(parameters, layers, strict=True)
    ]


def over_stages(
    model: ModelShape, shard: float, stages: int, tensor_parallel: int = 1
) -> list[float]:
    """Deal the parameters of all layers, embedding and head on a tensor rank out to pipeline stages.

    A tied table is on the first and on the last one, where they are two.
    """
    table = model.num_embedding_parameters / tensor_parallel
    tables = table * (1 if model.has_tied_embeddings else 2)
    each = (shard - tables) / model.num_layers
    found = [each * count for count in stage_layers(model.num_layers, stages)]
    if len(found) == 1:
        return [found[0] + tables]
    return [found[0] + table, *found[1:-1], found[-1] + table]


def _check_split(model: ModelShape, rollout: RolloutConfig) -> None:
    if rollout.pipeline_parallel > model.num_layers:
        raise RunError(
            "rollout.pipeline_parallel",
            rollout.pipeline_parallel,
            Bounds(1, model.num_layers),
            f"rollout.pipeline_parallel must be at most the {model.num_layers} layers of {model.name}, "
            f"got {rollout.pipeline_parallel}",
        )
    if rollout.data_parallel > 1 and model.experts is None:
        raise RunError(
            "rollout.data_parallel",
            rollout.data_parallel,
            OneOf([1]),
            f"rollout.data_parallel must be 1: {model.name} has no experts to share out, "
            f"got {rollout.data_parallel}",
            ("rollout.expert_parallel",),
        )

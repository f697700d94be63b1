"""Split a model over GPUs (pipeline stages, tensor ranks, experts, context), and the cores of a host over roles.

A GPU of a replica has its tensor rank's share of the layers in its pipeline stage. The first stage also
has the embedding, and the last one the output head. Attention ranks (`rollout.data_parallel`) each have
all attention weights, and the experts are sharded over all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.model_shape import ModelShape
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.gpu_pools import divisors
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


def threads_per_role(cores: int, num_roles: int) -> int:
    """Return the CPU threads of each role: an equal share of the cores, and at least one."""
    return max(1, cores // max(1, num_roles))


def stage_layers(num_layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage, in order.

    If the layers do not divide evenly, the stages in the middle get one more, because the first stage
    also has the embedding and the last one the output head. Megatron's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split do the same.

    Raises:
        ValueError: there are more stages than layers, embedding and head.
    """
    if stages > num_layers + 2:
        raise ValueError(
            f"{stages} pipeline stages are more than {num_layers} layers, embedding and head; use fewer"
        )
    each, rest = divmod(num_layers, stages)
    layers = [each] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in middle[:rest]:
        layers[stage] += 1
    return layers


def end_stage_layers(num_layers: int, stages: int) -> tuple[int, int] | None:
    """Return the layers of the first and of the last stage, if all stages between them have the same number.

    Each stage between them has the layers of the fullest stage. Megatron takes no other uneven split without a
    layout by hand. None: nothing would be left for the first or the last stage.
    """
    if stages == 1:
        return None
    rest = num_layers - (stages - 2) * -(-num_layers // stages)
    return (rest - rest // 2, rest // 2) if rest >= 2 else None


class ReplicaShard(NamedTuple):
    """The part of a model on one GPU of a replica's pipeline stage."""

    parameters: float
    num_layers: int
    linear_parameters: float
    """Parameters of linear layers, which may be in a narrow format."""


def replica_shards(model: ModelShape, rollout: RolloutConfig) -> list[ReplicaShard]:
    """Return the part of the model on a GPU of each pipeline stage, in order.

    Raises:
        RunError: the model has fewer layers than stages, or `rollout.data_parallel` needs experts and
            it has none.
    """
    _check_split(model, rollout)
    shard = model.shard_parameters(rollout.tensor_parallel, rollout.expert_parallel)
    stages = rollout.pipeline_parallel
    layers = stage_layers(model.num_layers, stages)
    parameters = split_over_stages(model, shard, stages, rollout.tensor_parallel)
    linear = model.linear_parameters(rollout.tensor_parallel, rollout.expert_parallel)
    return [
        ReplicaShard(held, count, linear * count / model.num_layers)
        for held, count in zip(parameters, layers, strict=True)
    ]


def split_over_stages(
    model: ModelShape, shard: float, stages: int, tensor_parallel: int = 1
) -> list[float]:
    """Return the parameters of each pipeline stage.

    With two or more stages, a tied embedding table is on both the first and the last one.

    Args:
        model: the model.
        shard: parameters of one tensor rank: all layers, embedding and head.
        stages: number of pipeline stages.
        tensor_parallel: number of tensor ranks.
    """
    table = model.num_embedding_parameters / tensor_parallel
    tables = table * (1 if model.has_tied_embeddings else 2)
    each = (shard - tables) / model.num_layers
    layers = [each * count for count in stage_layers(model.num_layers, stages)]
    if len(layers) == 1:
        return [layers[0] + tables]
    return [layers[0] + table, *layers[1:-1], layers[-1] + table]


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
            f"rollout.data_parallel must be 1, because {model.name} has no experts to shard, "
            f"got {rollout.data_parallel}",
            ("rollout.expert_parallel",),
        )


def check_split(model: ModelShape, trainer: TrainerConfig, key: str = "trainer") -> None:
    """Raise `RunError` if the model cannot be split as the trainer section `key` says."""
    if trainer.pipeline_parallel > model.num_layers:
        raise RunError(
            f"{key}.pipeline_parallel",
            trainer.pipeline_parallel,
            Bounds(1, model.num_layers),
            f"{key}.pipeline_parallel must be at most the {model.num_layers} layers of "
            f"{model.name}, got {trainer.pipeline_parallel}",
        )
    if trainer.num_slices > model.num_layers + 2:
        raise RunError(
            f"{key}.virtual_stages",
            trainer.virtual_stages,
            Bounds(1, (model.num_layers + 2) // trainer.pipeline_parallel),
            f"{key}.virtual_stages={trainer.virtual_stages} x pipeline_parallel="
            f"{trainer.pipeline_parallel} must be at most the {model.num_layers} layers, embedding and "
            f"head of {model.name}",
            (f"{key}.pipeline_parallel",),
        )
    _check_experts(model, trainer, key)
    if not splits_context(model, trainer):
        heads = model.num_heads // trainer.tensor_parallel
        raise RunError(
            f"{key}.context_parallel",
            trainer.context_parallel,
            OneOf(divisors(heads)),
            f"{key}.context_parallel must divide the {heads} heads of a tensor rank of {model.name}, because "
            f"context_exchange 'all-to-all' splits the heads, got {trainer.context_parallel}",
            (f"{key}.context_exchange", f"{key}.tensor_parallel"),
        )


def _check_experts(model: ModelShape, trainer: TrainerConfig, key: str) -> None:
    degrees = {
        "expert_parallel": trainer.expert_parallel,
        "expert_tensor_parallel": trainer.expert_tensor_parallel or 1,
    }
    for name, degree in degrees.items():
        if degree > 1 and model.experts is None:
            text = f"{key}.{name} must be 1, because {model.name} has no experts, got {degree}"
            raise RunError(f"{key}.{name}", degree, OneOf([1]), text)
    if not slices_experts(model, trainer):
        name, width = f"{key}.expert_tensor_parallel", expert_width(model)
        text = (
            f"{name} must divide the {width:,} channels of an expert of {model.name}, "
            f"got {trainer.expert_tensor_parallel}"
        )
        raise RunError(name, trainer.expert_tensor_parallel, OneOf(divisors(width)), text)


def slices_experts(model: ModelShape, trainer: TrainerConfig) -> bool:
    """Return whether the ranks that share an expert get whole channels of it."""
    return expert_width(model) % (trainer.expert_tensor_parallel or 1) == 0


def expert_width(model: ModelShape) -> int:
    """Return the channels of one expert; 0 without experts."""
    return 0 if model.experts is None else model.experts.intermediate_size


def splits_context(model: ModelShape, trainer: TrainerConfig) -> bool:
    """Return whether context ranks can share a pass. Only all-to-all needs a whole number of heads on each rank."""
    heads = model.num_heads // trainer.tensor_parallel
    return trainer.context_exchange != "all-to-all" or heads % trainer.context_parallel == 0

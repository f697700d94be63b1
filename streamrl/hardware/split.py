"""Whether a trainer can split a model as the run file says: its layers, heads and experts."""

from __future__ import annotations

from streamrl.hardware.model_shape import ModelShape
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.pools import divisors
from streamrl.runfile.sides_config import TrainerConfig


def check_split(model: ModelShape, trainer: TrainerConfig, key: str = "trainer") -> None:
    """Raise `RunError` where the model cannot be split as a trainer, whose section is `key`, says."""
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
            f"{key}.context_parallel must divide the {heads} heads of a tensor rank of {model.name}, which "
            f"context_exchange 'all-to-all' deals out, got {trainer.context_parallel}",
            (f"{key}.context_exchange", f"{key}.tensor_parallel"),
        )


def _check_experts(model: ModelShape, trainer: TrainerConfig, key: str) -> None:
    degrees = {
        "expert_parallel": trainer.expert_parallel,
        "expert_tensor_parallel": trainer.expert_tensor_parallel or 1,
    }
    for name, degree in degrees.items():
        if degree > 1 and model.experts is None:
            text = f"{key}.{name} must be 1: {model.name} has no experts, got {degree}"
            raise RunError(f"{key}.{name}", degree, OneOf([1]), text)
    if not slices_experts(model, trainer):
        name, width = f"{key}.expert_tensor_parallel", expert_width(model)
        text = (
            f"{name} must divide the {width:,} channels of an expert of {model.name}, "
            f"got {trainer.expert_tensor_parallel}"
        )
        raise RunError(name, trainer.expert_tensor_parallel, OneOf(divisors(width)), text)


def slices_experts(model: ModelShape, trainer: TrainerConfig) -> bool:
    """Whether ranks that share each expert get whole channels of it."""
    return expert_width(model) % (trainer.expert_tensor_parallel or 1) == 0


def expert_width(model: ModelShape) -> int:
    """Return the channels of one expert; none where there are no experts."""
    return 0 if model.experts is None else model.experts.intermediate_size


def splits_context(model: ModelShape, trainer: TrainerConfig) -> bool:
    """Whether context ranks can share a pass: as all do that exchange keys and values, of heads whole ones."""
    heads = model.num_heads // trainer.tensor_parallel
    return trainer.context_exchange != "all-to-all" or heads % trainer.context_parallel == 0

"""Layouts for which no script is written: the framework would not start, or would split the model differently."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.parallelism import end_stage_layers
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import Framework, Layout
from streamrl.runfile.gpu_pools import MORE_RANKS
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


def layout_of(framework: Framework, trainer: TrainerConfig) -> Layout:
    """Return the training back end of a framework that splits the model as a trainer does.

    Raises:
        RunError: no back end has all degrees and the ZeRO stage. The error lists what each one lacks, and its key
            is of the back end that lacks the fewest.
    """
    layout = framework.layout_for(trainer)
    if layout is not None:
        return layout
    unsupported = {layout.name: layout.unsupported(trainer) for layout in framework.layouts}
    each = (
        f"{back_end} has no {' and no '.join(f'{key}={value}' for key, value in keys.items())}"
        for back_end, keys in unsupported.items()
    )
    key, value = next(iter(min(unsupported.values(), key=len).items()))
    text = (
        f"no training back end of {framework.name} splits the trainer as planned: {', '.join(each)}. "
        f"Plan again with --for {framework.name}: the search then keeps to its layouts"
    )
    raise RunError(key, value, text=text)


def check_replica_degrees(rollout: RolloutConfig, known: Iterable[str], name: str) -> None:
    """Raise `RunError` if replicas have stages or attention ranks, and a framework has no option for them.

    Args:
        rollout: the replicas.
        known: names of the planned values that the framework has an option for.
        name: the framework.
    """
    for degree in MORE_RANKS:
        value = getattr(rollout, degree)
        if value > 1 and f"rollout_{degree}" not in known:
            key = f"rollout.{degree}"
            text = (
                f"{key} is {value}, and {name} has no option for it. Set {key} = 1, or plan again"
            )
            raise RunError(key, value, text=text)


def check_stages(model: ModelShape, trainer: TrainerConfig) -> None:
    """Raise `RunError` if Megatron cannot distribute the layers of a model over the pipeline stages of a trainer.

    It takes layers that the stages do not divide if the first and the last stage have a number of their own.
    With virtual stages, all slices must be equal here.
    """
    stages, slices = trainer.pipeline_parallel, trainer.num_slices
    if model.num_layers % slices == 0:
        return
    if trainer.virtual_stages > 1:
        key = "trainer.virtual_stages"
        text = (
            f"{key}={trainer.virtual_stages} x trainer.pipeline_parallel={stages} = {slices} must divide the "
            f"{model.num_layers} layers of {model.name}, or Megatron does not start. Set {key} = 1"
        )
        raise RunError(key, trainer.virtual_stages, text=text)
    if end_stage_layers(model.num_layers, stages) is None:
        key = "trainer.pipeline_parallel"
        text = (
            f"Megatron cannot distribute the {model.num_layers} layers of {model.name} over {key}={stages}. With "
            f"{-(-model.num_layers // stages)} in each middle stage, too few are left for the first and the last. "
            "Choose fewer stages"
        )
        raise RunError(key, stages, text=text)

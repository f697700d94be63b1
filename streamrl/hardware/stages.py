"""How a pipeline deals the layers of a model out to its stages."""

from __future__ import annotations


def stage_layers(num_layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, the first first.

    Layers that do not divide go to the stages in the middle: the first has the embedding beside its own, the last
    the output head (as Megatron's account_for_embedding_in_pipeline_split and …_loss_… do).

    Raises:
        ValueError: there are more stages than layers, embedding and head.
    """
    if stages > num_layers + 2:
        raise ValueError(f"{stages} pipeline stages for {num_layers} layers")
    each, rest = divmod(num_layers, stages)
    layers = [each] * stages
    middle = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in middle[:rest]:
        layers[stage] += 1
    return layers

"""Bytes on a GPU of each pipeline stage of a replica: its layers and attention ranks' share, in the formats it keeps them in."""

from __future__ import annotations

from typing import NamedTuple

from streamrl.hardware.draft import draft_bytes
from streamrl.hardware.formats import kept_bytes
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.precision import rollout_precision
from streamrl.hardware.replica_shards import replica_shards
from streamrl.runfile.config import Run


class StageBytes(NamedTuple):
    """What a GPU of one stage holds."""

    weights: float
    """Of the model, in `rollout.dtype`, scales among them."""
    draft: float
    """Weights of what drafts tokens."""
    token: float
    """Keys and values of one token in `rollout.kv_dtype`, of model and draft."""

    @property
    def held(self) -> float:
        """Bytes of all weights."""
        return self.weights + self.draft


def stage_bytes(run: Run, model: ModelShape) -> list[StageBytes]:
    """Return what a GPU of each stage holds of a model, the first stage first.

    Raises:
        RunError: as `replica_shards`.
    """
    own, rollout = rollout_precision(run), run.rollout
    per_layer = model.shard_kv_bytes_per_token(own.cache, rollout.tensor_parallel)
    per_layer /= model.num_layers
    draft, drafted = draft_bytes(run, model)
    found = []
    for shard in replica_shards(model, rollout):
        sizes = (shard.parameters, shard.linear_parameters)
        weights = kept_bytes(*sizes, own.weights, own.wide, model.hidden_size)
        found.append(StageBytes(weights, draft, per_layer * shard.num_layers + drafted))
    return found

"""What drafts tokens for a model to check: its own module for multi-token prediction, or a smaller model."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.hardware.formats import shard_weight_bytes
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.precision import rollout_precision
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.sides_config import SpeculativeConfig


def draft_of(model: ModelShape, config: SpeculativeConfig) -> ModelShape:
    """Return the shape of a draft: one layer of the model, with attention to everything, where no other is named.

    A module for multi-token prediction has a product of two hidden sizes beside it (DeepSeek-V3, arXiv 2412.19437, section 2.2),
    which is not counted.
    """
    if config.model is not None:
        return load_model(ModelConfig(name=config.model))
    experts = model.experts and replace(model.experts, num_dense_layers=0)
    window = {"sliding_window": None, "num_window_layers": None}
    return replace(model, num_layers=1, experts=experts, linear=None, **window)


def draft_bytes(run: Run, model: ModelShape) -> tuple[float, float]:
    """Return the bytes of a draft's weights on a GPU of a replica, and those that a token leaves in its cache there.

    It is in the formats of the replica. A module shares embedding and head with its model.
    """
    rollout, own = run.rollout, rollout_precision(run)
    if rollout.drafts is None:
        return 0.0, 0.0
    draft, degree = draft_of(model, rollout.drafts), rollout.tensor_parallel
    experts = rollout.expert_parallel if draft.experts is not None else 1
    weights = shard_weight_bytes(draft, own.weights, own.wide, degree, experts)
    if rollout.drafts.model is None:
        num_tables = 1 if draft.has_tied_embeddings else 2
        weights -= num_tables * draft.num_embedding_parameters / degree * BYTES[own.wide]
    return weights, draft.shard_kv_bytes_per_token(own.cache, degree)

"""What one weight synchronisation sends: all weights, LoRA adapters, or the values that changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from streamrl.hardware.linear_layers import linear_layers, lora_parameters
from streamrl.hardware.memory import weight_bytes
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.precision import rollout_precision
from streamrl.hardware.profiles import load_model
from streamrl.runfile.config import Run
from streamrl.sim.costs.sync_profiles import load_delta


@dataclass(frozen=True)
class Payload:
    """One copy of what is sent."""

    num_bytes: int
    num_tensors: int

    @classmethod
    def load(cls, run: Run) -> Payload:
        """Return the payload of a run's `sync.mode`."""
        model, sync = load_model(run.model), run.sync
        match sync.mode:
            case "full":
                return cls(_sent_bytes(run), num_tensors(model))
            case "lora":
                parameters = lora_parameters(model, sync.lora_rank)
                num_adapted = sum(count for _, _, count in linear_layers(model))
                return cls(parameters * BYTES[run.model.dtype], 2 * num_adapted)
            case "delta":
                changed = model.num_parameters * sync.changed_share
                return cls(round(changed * load_delta().bytes_per_value), num_tensors(model))
            case _:
                assert_never(sync.mode)


def _sent_bytes(run: Run) -> int:
    """Bytes of all weights: as replicas keep them, or as they are trained where each replica quantises its own."""
    if run.sync.quantise_at == "trainer":
        return weight_bytes(run)
    return load_model(run.model).num_parameters * BYTES[rollout_precision(run).wide]


def num_tensors(model: ModelShape) -> int:
    """Tensors of a checkpoint as the hub has it, each expert's projections apart."""
    linear = sum(count for _, _, count in linear_layers(model))
    per_layer = 2 + 3 * model.has_qkv_bias + 2 * model.has_qk_norm
    if model.latent is not None:
        per_layer += 1 if model.latent.q_lora_rank is None else 2
    per_router = 0 if model.experts is None else 1 + model.experts.has_router_bias
    tables = 1 if model.has_tied_embeddings else 2
    return (
        linear
        + model.num_layers * per_layer
        + model.num_expert_layers * per_router
        + tables
        + 1  # the last norm
    )

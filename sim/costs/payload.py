"""What one weight synchronisation sends: all weights, LoRA adapters, or the values that changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from sim.costs.sync_profiles import load_delta
from streamrl.hardware.memory import weight_bytes
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.precision import rollout_precision
from streamrl.hardware.profiles import load_model
from streamrl.runfile.config import Run


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


def lora_parameters(model: ModelShape, rank: int) -> int:
    """Parameters of adapters on every linear layer of attention and MLP.

    rank * (in + out) each: A is rank x in, B is out x rank (Hu et al. 2021, arXiv 2106.09685).
    """
    return sum(rank * (inner + outer) * count for inner, outer, count in linear_layers(model))


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


def linear_layers(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, how many) of the linear layers of attention and MLP; routers are none."""
    hidden = model.hidden_size
    for inner, outer in _attention(model):
        yield inner, outer, model.num_layers
    if model.num_dense_layers:
        yield hidden, model.intermediate_size, 2 * model.num_dense_layers
        yield model.intermediate_size, hidden, model.num_dense_layers
    if model.experts is not None:
        experts = model.experts
        count = model.num_expert_layers * (experts.num_experts + experts.num_shared_experts)
        yield hidden, experts.intermediate_size, 2 * count
        yield experts.intermediate_size, hidden, count


def _attention(model: ModelShape) -> Iterator[tuple[int, int]]:
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        yield hidden, heads * model.head_dim
        yield hidden, model.num_kv_heads * model.head_dim
        yield hidden, model.num_kv_heads * model.head_dim
        yield heads * model.head_dim, hidden
        return
    queries = heads * (latent.nope_head_dim + latent.rope_head_dim)
    if latent.q_lora_rank is None:
        yield hidden, queries
    else:
        yield hidden, latent.q_lora_rank
        yield latent.q_lora_rank, queries
    yield hidden, latent.kv_lora_rank + latent.rope_head_dim
    yield latent.kv_lora_rank, heads * (latent.nope_head_dim + latent.v_head_dim)
    yield heads * latent.v_head_dim, hidden

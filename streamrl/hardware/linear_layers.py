"""The linear layers of attention and MLP, and the adapters beside them."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.hardware.model_shape import ModelShape


def lora_parameters(model: ModelShape, rank: int) -> int:
    """Parameters of adapters on every linear layer of attention and MLP.

    rank * (in + out) each: A is rank x in, B is out x rank (Hu et al. 2021, arXiv 2106.09685).
    """
    return sum(rank * (inner + outer) * count for inner, outer, count in linear_layers(model))


def linear_layers(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, how many) of the linear layers of attention and MLP; routers are none."""
    yield from _layers(model, 0 if model.experts is None else model.experts.num_experts)


def passed_layers(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield the same of those that a token passes: of experts, its own."""
    yield from _layers(model, 0 if model.experts is None else model.experts.experts_per_token)


def _layers(model: ModelShape, num_experts: int) -> Iterator[tuple[int, int, int]]:
    hidden = model.hidden_size
    for inner, outer in _attention(model):
        yield inner, outer, model.num_layers
    if model.num_dense_layers:
        yield hidden, model.intermediate_size, 2 * model.num_dense_layers
        yield model.intermediate_size, hidden, model.num_dense_layers
    if model.experts is not None:
        experts = model.experts
        count = model.num_expert_layers * (num_experts + experts.num_shared_experts)
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

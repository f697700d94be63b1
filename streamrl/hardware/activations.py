"""Compute the bytes of activations and logits that forward passes keep for backward passes on a trainer's GPU.

| channels of a token in one layer, by `trainer.recompute` | none | selective | mlp   | full      |
|----------------------------------------------------------|------|-----------|-------|-----------|
| inputs of the two norms                                  | kept | kept      | kept  | the first |
| outputs of the two norms                                 | kept | again     | again | again     |
| queries, keys and values expanded from latent vectors    | kept | again     | again | again     |
| other queries, keys and values, latent vectors, output   | kept | kept      | kept  | again     |
| copies sent to experts, gate and up projection           | kept | kept      | again | again     |
| product of gate and up                                   | kept | again     | again | again     |

"Again" means recomputed in the backward pass, one layer at a time. Attention scores are never kept.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from streamrl.hardware.model_shape import BYTES, LatentAttention, ModelShape
from streamrl.hardware.parallelism import stage_layers
from streamrl.runfile.roles_config import TrainerConfig

EAGER_LOGIT_BYTES = 16
"""Bytes per logit with separate operations: the logit in 16 bits, its float32 copy, the log-softmax and its gradient in
float32, and the gradient in 16 bits. Measured: peaks of prime-rl's supervised steps are 14 to 17 bytes per logit above
those of its RL steps, which use chunks (559b447, benchmarks/baselines, Qwen3 0.6B, 4B and 30B-A3B)."""
FUSED_LOGIT_BYTES = 4
"""Bytes per logit if one kernel computes the loss and overwrites logits with their gradients: 16 bits of each, or float32
(Megatron-LM's theoretical_memory_usage counts the same)."""
SCORED_SHARE = 10 / 16
"""Bytes of a logit in a pass that only scores, as a share of those in training: without both gradients."""
LOGIT_CHUNK = 1024
"""Tokens whose logits exist at once with chunked logits (prime-rl's
fused_lm_head_token_chunk_size).
"""
EAGER_AGAIN = 2.5
"""Bytes that an eager layer needs during recomputation, for each byte that it would keep: activations and their
gradients, and float32 copies in its norms. Measured: for each token above 16K, peaks of prime-rl's RL steps grow by 2.5
for Qwen3 0.6B and 4B, and by 3.6 for 30B-A3B (559b447, benchmarks/baselines)."""


class LayerActivations(NamedTuple):
    """The channels of a token that one layer's forward pass keeps, by kind, as a mean over layers."""

    inputs: float
    """Inputs of the two norms."""
    norms: float
    attention: float
    expanded: float
    """Queries, keys and values expanded from latent vectors."""
    dispatched: float
    """One copy for each expert of a token."""
    projections: float
    """Gate and up projections."""
    products: float

    @property
    def total(self) -> float:
        """Channels of all kinds."""
        return sum(self)


def layer_activations(model: ModelShape) -> LayerActivations:
    """Return a layer's activations as in Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1).

    There is no dropout here. A gated MLP of width 8h/3 has as many parameters as a plain MLP of width 4h.
    With it, the sum is 32 bytes per channel in 16 bits. The paper's 34 bytes include two dropout masks. With
    hyper-connections, the input of a block is all streams, and their sum is kept beside the norm's output.
    """
    hidden, num_layers = float(model.hidden_size), model.num_layers
    attention, expanded = _attention(model)
    width, dispatched = model.num_dense_layers * model.intermediate_size / num_layers, 0.0
    if model.experts is not None:
        experts, share = model.experts, model.num_expert_layers / num_layers
        passed = experts.experts_per_token + experts.num_shared_experts
        width += share * passed * experts.intermediate_size
        dispatched = share * experts.experts_per_token * model.expert_input_size
    blocks = model.num_blocks / num_layers
    streams = model.hyper_connections.num_streams if model.hyper_connections else 1
    return LayerActivations(
        inputs=blocks * hidden * streams,
        norms=blocks * hidden * (2 if streams > 1 else 1),
        attention=attention,
        expanded=expanded,
        dispatched=dispatched,
        projections=(model.num_mlp_products - 1) * width,
        products=width,
    )


def _attention(model: ModelShape) -> tuple[float, float]:
    """Return the channels that a mean layer's attention keeps, and the channels expanded from latent vectors."""
    plain, expanded = _attention_layer(model)
    if model.window_heads is None and model.num_attention_layers == model.num_layers:
        return plain, expanded
    num_windowed = 0 if model.window_heads is None else model.num_windowed_layers
    num_plain = model.num_attention_layers - num_windowed
    kept = num_plain * plain + num_windowed * _attention_layer(model.windowed)[0]
    if model.linear is not None:
        linear = model.linear
        deltas = (
            linear.projected_dim
            + linear.mixed_dim
            + linear.value_dim
            + linear.num_widened * linear.value_dim
        )
        kept += linear.num_layers * deltas
    return kept / model.num_layers, num_plain * expanded / model.num_layers


def _attention_layer(model: ModelShape) -> tuple[float, float]:
    """Return the same for one layer with attention."""
    if model.latent is not None:
        kept, expanded = _latent_attention(model.latent, model.num_heads)
        return kept + _index_channels(model), expanded
    if model.compressed is not None:
        queries = model.num_heads * model.head_dim
        return model.compressed.kept_channels(queries, model.head_dim), 0.0
    gates = model.num_heads * model.head_dim * model.has_output_gate
    channels = model.head_dim + model.value_head_dim
    kept = float((model.num_heads + model.num_kv_heads) * channels + gates)
    return kept + _index_channels(model), 0.0


def _index_channels(model: ModelShape) -> float:
    """Return the channels of an indexer: its queries, key and weights of heads."""
    if model.indexer is None:
        return 0.0
    channels = sum(outer for outer, _ in model.indexer.products(model.hidden_size, 1))
    return channels * model.indexer.share(model.num_attention_layers)


def _latent_attention(latent: LatentAttention, heads: int) -> tuple[float, float]:
    """Return the same for latent attention. Each latent vector is kept before and after its norm.

    Queries without a latent vector are kept directly.
    """
    queries = heads * (latent.nope_head_dim + latent.rope_head_dim)
    keys, values = queries, heads * latent.v_head_dim
    kept = values + 2 * latent.kv_lora_rank + latent.rope_head_dim
    if latent.q_lora_rank is None:
        return float(kept + queries), float(keys + values)
    return float(kept + 2 * latent.q_lora_rank), float(queries + keys + values)


def layer_bytes(model: ModelShape, trainer: TrainerConfig, dtype: str) -> tuple[float, float]:
    """Return the bytes of a token that a layer keeps, and those that it needs during recomputation.

    Unfused experts also keep their outputs, because the backward pass of the weighted sum needs them. Ranks
    that share an expert have each other's copies of tokens. The bytes are those of all tensor ranks.
    """
    channels, whole = layer_activations(model), trainer.copies_of_norms
    channels = channels._replace(inputs=whole * channels.inputs, norms=whole * channels.norms)
    if trainer.shards_experts:
        channels = channels._replace(dispatched=trainer.expert_slices * channels.dispatched)
    if trainer.kernels != "fused":
        channels = channels._replace(dispatched=2 * channels.dispatched)
    cheap = channels.norms + channels.expanded + channels.products
    match trainer.recompute:
        case "none":
            again = 0.0
        case "selective":
            again = cheap
        case "mlp":
            again = cheap + channels.dispatched + channels.projections
        case "full":
            again = channels.total - whole * model.hidden_size
        case _:
            assert_never(trainer.recompute)
    needed = again * EAGER_AGAIN if trainer.kernels == "eager" else again
    return (channels.total - again) * BYTES[dtype], needed * BYTES[dtype]


def activation_bytes(
    model: ModelShape, trainer: TrainerConfig, dtype: str, num_tokens: int
) -> list[float]:
    """Return the bytes of activations on a GPU of each pipeline stage for passes of `num_tokens`.

    Stage s of p holds the activations of p - s micro-batches, because forward and backward passes
    alternate. With v interleaved slices it holds up to (p - s - 1) 2 + (v - 1) p + 1 slices of 1/v
    of its layers (Narayanan et al. 2021). Tensor ranks split every activation (sequence
    parallelism, Korthikanti et al. 2022, section 4.2), or all but norms and residuals. Context ranks split the tokens of every
    activation except keys and values: a GPU receives all keys and values of the layer that computes
    attention.
    """
    stages, slices = trainer.pipeline_parallel, trainer.virtual_stages
    kept, again = layer_bytes(model, trainer, dtype)
    of_stages = []
    for stage, num_layers in enumerate(stage_layers(model.num_layers, stages)):
        under_way = float(stages - stage)
        if slices > 1:
            under_way = ((stages - stage - 1) * 2 + (slices - 1) * stages + 1) / slices
        per_token = under_way * num_layers * kept + again
        num_bytes = num_tokens * per_token / trainer.tensor_parallel / trainer.context_parallel
        of_stages.append(num_bytes)
    received = exchanged_bytes(model, trainer, dtype) * num_tokens
    return [num_bytes + received for num_bytes in of_stages]


def exchanged_bytes(model: ModelShape, trainer: TrainerConfig, dtype: str) -> float:
    """Return the bytes per token of a pass that a GPU needs for one layer's exchange between context ranks.

    - ring: the keys and values in use, and those that arrive at the same time.
    - all-gather: the keys and values of all tokens.
    - all-to-all: queries, output, keys and values of all tokens for the rank's own heads.
    """
    ranks = trainer.context_parallel
    if ranks == 1:
        return 0.0
    queries, caches = context_channels(model, trainer)
    match trainer.context_exchange:
        case "ring":
            held = 2 * caches / ranks
        case "all-gather":
            held = caches
        case "all-to-all":
            held = (2 * queries + caches) / ranks
        case other:
            assert_never(other)
    return held * BYTES[dtype]


def context_channels(model: ModelShape, trainer: TrainerConfig) -> tuple[float, float]:
    """Return the channels of a token on a tensor rank: of its queries or their output, and of its keys and values.

    Latent vectors are expanded to the keys and values of every head before they are sent.
    """
    degree = trainer.tensor_parallel
    heads, caches = model.num_heads / degree, max(1.0, model.num_kv_heads / degree)
    values = model.value_head_dim
    return heads * values, caches * (model.head_dim + values)


def logit_bytes(model: ModelShape, trainer: TrainerConfig, num_tokens: int) -> float:
    """Return the bytes of logits and their gradients on a GPU of the last stage.

    Tensor ranks split the vocabulary, context ranks the tokens.
    """
    match trainer.logits or ("fused" if trainer.kernels == "fused" else "eager"):
        case "eager":
            held = num_tokens * EAGER_LOGIT_BYTES
        case "fused":
            held = num_tokens * FUSED_LOGIT_BYTES
        case "chunked":
            chunk = LOGIT_CHUNK * trainer.context_parallel
            held = min(num_tokens, chunk) * EAGER_LOGIT_BYTES
        case other:
            assert_never(other)
    return held * model.vocab_size / trainer.tensor_parallel / trainer.context_parallel


def scored_logit_bytes(model: ModelShape, trainer: TrainerConfig, num_tokens: int) -> float:
    """Return the bytes of logits in a pass that only scores: the same without gradients."""
    return SCORED_SHARE * logit_bytes(model, trainer, num_tokens)


def tokens_in_pass(trainer: TrainerConfig, longest: int) -> int:
    """Return the tokens of the largest pass: a micro-batch of longest rollouts, limited to `max_tokens_per_pass`."""
    return min(trainer.micro_batch * longest, max(longest, trainer.max_tokens_per_pass))

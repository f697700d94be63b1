"""Compute the GPU memory of the trainer that `execute` starts: backend torch, float32 weights, passes under autocast.

The memory model of plans (`streamrl.hardware.memory`) describes published frameworks. Our trainer keeps other tensors.

| bytes of a token in one layer, in bfloat16             | none | mlp, selective | full |
|--------------------------------------------------------|------|----------------|------|
| input of each norm, float32                            | kept | kept           | the first |
| its normalized input, float32                          | kept | again          | again |
| input of the MLP as a whole, float32                   | -    | kept           | -     |
| a 16-bit copy of the input for each of q, k and v      | kept | kept           | again |
| q and k before their norm (float32), after it, rotated | kept | kept           | again |
| v, and the output of attention                         | kept | kept           | again |
| 16-bit copies for gate and up; gate, silu, up, product | kept | again          | again |

"kept" tensors stay in memory from the forward to the backward pass. "again" marks tensors that the backward pass
recomputes. If a model has no norm of q and k, only the rotated tensors are kept. Packed passes keep the output of
attention twice: per rollout, and concatenated. In float32 there are no 16-bit copies, and every value has 4 bytes.

Memory use peaks at one of two moments:

- when the backward pass begins, with the gradients of the logits
- when the backward pass computes the last layer, with its recomputed tensors and gradients
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.executor.launchers.role_configs import LOGITS_CHUNK
from streamrl.hardware.activations import tokens_in_pass
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.resolved import TrainerHardware
from streamrl.runfile.backend_choice import training_backend_named
from streamrl.runfile.roles_config import Recompute

WIDE = 4
"""Bytes of a float32 value: weights, gradients, and hidden states between layers."""
LOGIT_BYTES = 3 * WIDE
"""Bytes per logit: its log-softmax, the gradient of that, and the gradient of the logit, all in float32."""
ENTROPY_BYTES = 3 * WIDE
"""Additional bytes per logit for an entropy bonus: a second log-softmax, the probabilities, and a gradient."""


class LayerBytes(NamedTuple):
    """Bytes of one token in one layer, and bytes of the 16-bit copies of the layer's weights."""

    stream: int
    """One hidden state in float32."""
    normalized: int
    """Normalized inputs of the two norms."""
    attention: float
    """Attention, from the copies for q, k and v to the output."""
    mlp: float
    """MLP, from the copies for gate and up to their product."""
    gradients: float
    """Largest total of gradients at one time in the backward pass of the MLP."""
    attention_weights: float
    mlp_weights: float

    @property
    def total(self) -> float:
        """Bytes that a token keeps in a layer without recomputation."""
        return 2 * self.stream + self.normalized + self.attention + self.mlp


def executed_memory(trainer: TrainerHardware, max_tokens: int) -> dict[str, float] | None:
    """Return the peak bytes of the trainer on a GPU by kind of tensor, or None if the formula does not apply.

    The largest pass has rollouts with the longest prompt and `max_tokens` output tokens. The formula applies to models
    with plain attention that are trained without adapters, and to `trainer.backend = "torch"`.
    """
    model, config = trainer.model, trainer.config
    is_plain = model.latent is None and model.linear is None and model.window_heads is None
    is_plain = is_plain and model.has_gated_mlp and model.num_blocks == 2 * model.num_layers
    if (
        not training_backend_named(config.backend).counts_memory
        or trainer.adapter_rank is not None
        or not is_plain
    ):
        return None
    trained, parameters = trainer.num_trained_models, float(model.num_parameters)
    longest = trainer.longest_sequence
    num_tokens = tokens_in_pass(config, longest)
    held = {
        "weights": WIDE * parameters * trainer.num_models,
        "gradients": WIDE * parameters * trained,
        "optimizer": 2 * WIDE * parameters * trained,
    }
    outputs = num_tokens * max_tokens / longest
    first, last = _moments(trainer, num_tokens, outputs)
    return {**held, **(first if sum(first.values()) >= sum(last.values()) else last)}


def _moments(
    trainer: TrainerHardware, num_tokens: int, outputs: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of a pass when its backward pass begins, and in the backward pass of the last layer."""
    model, config = trainer.model, trainer.config
    width = 2 if trainer.dtype != "float32" else WIDE
    layer = layer_bytes(model, width, config.packing == "packed")
    kept, again, copies = _recomputed(config.recompute, layer)
    table = float(model.num_embedding_parameters)
    is_chunked = config.logits in ("chunked", "fused")
    head = width * table if width < WIDE else 0.0
    activations = num_tokens * (kept * model.num_layers + 2 * layer.stream)
    activations += outputs * model.hidden_size * (WIDE if is_chunked else width)
    copied = copies * model.num_layers
    chosen = min(outputs, LOGITS_CHUNK) if is_chunked else outputs
    per_logit = LOGIT_BYTES + ENTROPY_BYTES * (trainer.algorithm.entropy_coefficient > 0)
    logits = chosen * model.vocab_size * per_logit
    if is_chunked:  # the gradient of the output layer's copy, which accumulates over chunks
        logits += width * table
    first = {"activations": activations, "copies": copied + head, "logits": logits}
    waiting = WIDE * table if model.has_tied_embeddings else 0.0
    inside = num_tokens * (kept * model.num_layers + again + layer.gradients)
    made = layer.attention_weights + layer.mlp_weights if again else 0.0
    last = {"activations": inside, "copies": copied + made, "logits": waiting}
    return first, last


def _recomputed(choice: Recompute, layer: LayerBytes) -> tuple[float, float, float]:
    """Return three sizes of a layer: kept bytes per token, recomputed bytes per token, kept copies of weights."""
    match choice:
        case "none":
            return layer.total, 0.0, layer.attention_weights + layer.mlp_weights
        case "full":
            return layer.stream, layer.total - layer.stream, 0.0
        case _:
            return 3 * layer.stream + layer.attention, layer.mlp, layer.attention_weights


def layer_bytes(model: ModelShape, width: int, is_packed: bool) -> LayerBytes:
    """Return the bytes of one layer of our trainer, if matrix products use `width` bytes per value."""
    hidden = model.hidden_size
    is_cast = width < WIDE
    attention_weights = model.attention_parameters() * width * is_cast
    mlp_weights = float(model.num_parameters) - 2.0 * model.num_embedding_parameters
    mlp_weights += model.num_embedding_parameters * model.has_tied_embeddings
    mlp_weights = mlp_weights / model.num_layers - model.attention_parameters()
    mlp, widest = _mlp(model, width)
    return LayerBytes(
        stream=WIDE * hidden,
        normalized=2 * WIDE * hidden,
        attention=_attention(model, width, is_packed),
        mlp=mlp,
        gradients=WIDE * hidden + 3 * widest * width,
        attention_weights=attention_weights,
        mlp_weights=mlp_weights * width * is_cast,
    )


def _attention(model: ModelShape, width: int, is_packed: bool) -> float:
    """Return the bytes per token that attention keeps."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inputs = (3 * width if width < WIDE else WIDE) * model.hidden_size
    before = (WIDE + width) * model.has_qk_norm
    rotated = before + width
    attended = keys if width < WIDE else queries  # no float32 kernel supports grouped queries
    outputs = (1 + is_packed) * width * queries
    return inputs + rotated * queries + before * keys + 2 * width * attended + outputs


def _mlp(model: ModelShape, width: int) -> tuple[float, float]:
    """Return the bytes per token of a layer's MLP or experts, and their channels, as means over the layers."""
    inputs = (2 * width if width < WIDE else WIDE) * model.hidden_size
    channels = float(model.num_dense_layers * model.intermediate_size)
    dispatched = 0.0
    if model.experts is not None:
        experts, num = model.experts, model.num_expert_layers
        passed = experts.experts_per_token + experts.num_shared_experts
        channels += num * passed * experts.intermediate_size
        dispatched = 2 * width * num * experts.experts_per_token * model.hidden_size
    channels, dispatched = channels / model.num_layers, dispatched / model.num_layers
    return inputs + 4 * width * channels + dispatched, channels

"""Count the GPU memory of the trainer that `execute` starts: backend torch, float32 weights, passes under autocast.

The memory model of plans (`streamrl.hardware.memory`) counts what published frameworks keep. Ours keeps other tensors.

| bytes of a token in one layer, in bfloat16             | none | mlp, selective | full |
|--------------------------------------------------------|------|----------------|------|
| input of each norm, float32                            | kept | kept           | the first |
| its normalized input, float32                          | kept | again          | again |
| input of the MLP as a whole, float32                   | -    | kept           | -     |
| a 16-bit copy of the input for each of q, k and v      | kept | kept           | again |
| q and k before their norm (float32), after it, rotated | kept | kept           | again |
| v, and the output of attention                         | kept | kept           | again |
| 16-bit copies for gate and up; gate, silu, up, product | kept | again          | again |

Where no norm follows the projection of q and k, the rotated ones alone are kept. Packed passes keep the output of attention
twice: per rollout, and put together. In float32 there are no 16-bit copies, and every tensor has 4 bytes a value.

The trainer is fullest at one of two moments: as the backward pass begins, with the gradients of the logits; or as it
computes the last layer, with what is made again and the gradients there.
"""

from __future__ import annotations

from typing import NamedTuple

from streamrl.executor.launchers.launcher import LOGITS_CHUNK
from streamrl.hardware.activations import tokens_in_pass
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.resolved import TrainerHardware
from streamrl.runfile.backend_choice import training_backend_named
from streamrl.runfile.roles_config import Recompute

WIDE = 4
"""Bytes of a value in float32: weights, gradients, and what lies between layers."""
LOGIT_BYTES = 3 * WIDE
"""Bytes a logit: its log-softmax, the gradient of that, and its own, all in float32."""
ENTROPY_BYTES = 3 * WIDE
"""Bytes a logit where the loss has an entropy: a second log-softmax, the probabilities, and their product's gradient."""


class LayerBytes(NamedTuple):
    """Bytes of one token in one layer, and of 16-bit copies of its weights."""

    stream: int
    """One hidden state in float32."""
    normalized: int
    """Inputs of the two norms after division by their size."""
    attention: float
    """From the copies for q, k and v to the output."""
    mlp: float
    """From the copies for gate and up to the product."""
    gradients: float
    """Most gradients that exist at once while the layer's backward pass computes its MLP."""
    attention_weights: float
    mlp_weights: float

    @property
    def total(self) -> float:
        """Bytes of all that a token leaves without recomputation."""
        return 2 * self.stream + self.normalized + self.attention + self.mlp


def executed_memory(trainer: TrainerHardware, max_tokens: int) -> dict[str, float] | None:
    """Return the bytes on a GPU of the trainer at its fullest moment; None where they are not counted.

    Its largest pass is of rollouts of the longest prompt and `max_tokens` of output.

    Counted are models with plain attention, all of whose weights learn, with `trainer.backend` torch.
    """
    model, config = trainer.model, trainer.config
    is_plain = model.latent is None and model.linear is None
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
    """Return what a pass takes as its backward half begins, and in the backward pass of its last layer."""
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
    if is_chunked:  # the gradient of the output layer's copy, which chunks add to
        logits += width * table
    first = {"activations": activations, "copies": copied + head, "logits": logits}
    waiting = WIDE * table if model.has_tied_embeddings else 0.0
    inside = num_tokens * (kept * model.num_layers + again + layer.gradients)
    made = layer.attention_weights + layer.mlp_weights if again else 0.0
    last = {"activations": inside, "copies": copied + made, "logits": waiting}
    return first, last


def _recomputed(choice: Recompute, layer: LayerBytes) -> tuple[float, float, float]:
    """Return bytes of a token that a layer keeps, and that it makes again, and of copies of its weights that it keeps."""
    match choice:
        case "none":
            return layer.total, 0.0, layer.attention_weights + layer.mlp_weights
        case "full":
            return layer.stream, layer.total - layer.stream, 0.0
        case _:
            return 3 * layer.stream + layer.attention, layer.mlp, layer.attention_weights


def layer_bytes(model: ModelShape, width: int, is_packed: bool) -> LayerBytes:
    """Return what one layer of our trainer keeps of a token, where its products compute with `width` bytes a value."""
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
    """Return the bytes that attention keeps of a token."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inputs = (3 * width if width < WIDE else WIDE) * model.hidden_size
    before = (WIDE + width) * model.has_qk_norm
    rotated = before + width
    attended = keys if width < WIDE else queries  # no kernel takes groups in float32
    outputs = (1 + is_packed) * width * queries
    return inputs + rotated * queries + before * keys + 2 * width * attended + outputs


def _mlp(model: ModelShape, width: int) -> tuple[float, float]:
    """Return the bytes that the MLP or the experts of a layer keep of a token, on average, and their channels."""
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

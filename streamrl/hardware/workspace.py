"""What an inference engine takes of a GPU beside weights and KV cache: the fullest moment of a forward pass.

vLLM runs one pass of as many tokens as it may, samples for as many rollouts as may run, and gives the cache what is
then left of `memory_utilization`. CUDA graphs are captured later, outside of that share.
"""

from __future__ import annotations

from streamrl.hardware.model_shape import BYTES, ModelShape

CHUNK = 8192
"""Tokens of one forward pass: vLLM's default of max_num_batched_tokens for throughput."""
SAMPLE_BYTES = 20
"""Bytes a logit while sampling: logits and probabilities in float32, sorted ones, and their places in 64 bits."""


def workspace_bytes(
    model: ModelShape,
    dtype: str,
    max_running: int,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
) -> float:
    """Return the bytes on one GPU that a pass of `CHUNK` tokens or sampling needs, whichever is more.

    A pass holds the residual stream, its norm and the widest of its blocks: gate, up and their product. Logits
    of every rollout are whole on each GPU.
    """
    width = max(2, BYTES.get(dtype, 2))
    mlp = 3.0 * model.intermediate_size / tensor_parallel if model.num_dense_layers else 0.0
    routed = 0.0
    if model.experts is not None:
        split = max(tensor_parallel, expert_parallel)
        chosen = model.experts.experts_per_token
        routed = chosen * (3.0 * model.experts.intermediate_size + model.hidden_size) / split
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim / tensor_parallel
    a_pass = CHUNK * (2 * model.hidden_size + max(mlp, routed, attention)) * width
    return max(a_pass, float(max_running) * model.vocab_size * SAMPLE_BYTES)

"""Which known kind of model an unknown `config.json` is nearest to, and what reading it as that would leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping

EVERY = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size", "head_dim"),
    }
)
_QWEN_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
SHAPE_KEYS: Mapping[str, frozenset[str]] = {
    "qwen2": EVERY,
    "qwen3": EVERY,
    "llama": EVERY,
    "mistral": EVERY | {"sliding_window"},
    "mixtral": EVERY | {"sliding_window", "num_local_experts", "num_experts_per_tok"},
    "qwen3_moe": EVERY | _QWEN_EXPERTS | {"decoder_sparse_step", "mlp_only_layers"},
    "gpt_oss": EVERY
    | {"sliding_window", "num_local_experts", "num_experts_per_tok", "layer_types"},
    "gemma3_text": EVERY | {"sliding_window", "layer_types"},
    "qwen3_next": EVERY
    | _QWEN_EXPERTS
    | {"shared_expert_intermediate_size", "layer_types", "decoder_sparse_step"}
    | {f"linear_{key}" for key in ("num_key_heads", "num_value_heads", "conv_kernel_dim")}
    | {"linear_key_head_dim", "linear_value_head_dim"},
    "deepseek_v3": EVERY
    | {"q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
    | {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"}
    | {"n_shared_experts", "first_k_dense_replace"},
}
"""Keys that say how large a model of each type is, and of what it is made; types that differ in less come after others."""
OPTIONAL = frozenset({"head_dim", "decoder_sparse_step", "mlp_only_layers"})

_NO_SHAPE = re.compile(
    r"(.*_token_id|.*max_position_embeddings|pretraining_tp|chunk_size_feed_forward|n_group|topk_group|.*_window_layers)"
)
"""Numbers that change neither parameters nor arithmetic."""


def tell_nearest(table: Mapping[str, object]) -> str:
    """Return the known type that shares most keys with a `config.json`, what it asks for beside, and what it would ignore."""
    found = {key for key, value in table.items() if _says_shape(key, value)}
    nearest = max(SHAPE_KEYS, key=lambda kind: _likeness(found, SHAPE_KEYS[kind]))
    lacking = sorted(SHAPE_KEYS[nearest] - OPTIONAL - found)
    ignored = sorted(found - SHAPE_KEYS[nearest])
    says = [f"needs {', '.join(lacking)}"] if lacking else []
    says += [f"would ignore {', '.join(ignored)}"] if ignored else []
    return f"the nearest is {nearest}" + (f", which {' and '.join(says)}" if says else "")


def _likeness(found: set[str], known: frozenset[str]) -> float:
    return len(found & known) / len(found | known)


def _says_shape(key: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (is_number or (isinstance(value, list) and key != "architectures")) and not (
        _NO_SHAPE.fullmatch(key)
    )

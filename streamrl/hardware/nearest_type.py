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
PLAINEST = "llama"
"""Of types that are equally near: it has neither biases nor norms of queries."""
OPTIONAL = frozenset({"head_dim", "decoder_sparse_step", "mlp_only_layers", "sliding_window"})
WITH_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text")
"""Types that norm queries and keys."""

_NO_SHAPE = re.compile(
    r".*_token_id|.*_token_index|.*max_position_embeddings|pretraining_tp|ep_size|chunk_size_feed_forward|n_group|"
    r"topk_group|.*_window_layers|rope_theta|no_rope_layers|floor_scale|attn_temperature_tuning|.*_multipliers|"
    r"num_logits_to_keep"
)
"""Numbers that change neither parameters nor arithmetic."""
_EVERY_ONE = re.compile(r".*(_freq|_step|_period|_interval)")
"""Every how many layers something is: 1 says nothing, as that is what types are read as."""
_SHAPELY = re.compile(r".*bias|.*qk_.*norm")
"""Switches that add parameters."""
_SAME = {"num_local_experts": "num_experts"}
"""Names of one thing."""


def tell_nearest(table: Mapping[str, object]) -> str:
    """Return the known type that shares most keys with a `config.json`, what it asks for beside, and what it would ignore.

    Of a model that sees or hears the part that reads text is told.
    """
    text = table.get("text_config")
    if not isinstance(text, dict) or "hidden_size" in table:
        return f"the nearest is {_told(table, [])}"
    others = [key for key, value in table.items() if key.endswith("_config") and value]
    left_out = [key for key in others if isinstance(table[key], dict) and key != "text_config"]
    return f"the nearest to its text_config is {_told(text, left_out)}"


def _told(table: Mapping[str, object], left_out: list[str]) -> str:
    """Return the nearest type with what it asks for and ignores, parts that are left out among that."""
    found = {_named(key) for key, value in table.items() if _says_shape(key, value)}
    nearest = _nearest(table.get("model_type"), found)
    stated, known = {_named(key) for key in table}, {_named(key) for key in SHAPE_KEYS[nearest]}
    lacking = sorted(key for key in SHAPE_KEYS[nearest] - OPTIONAL if _named(key) not in stated)
    ignored = sorted(
        key
        for key, value in table.items()
        if _named(key) not in known and _adds(key, value, nearest)
    )
    says = [f"needs {', '.join(lacking)}"] if lacking else []
    says += [f"would ignore {', '.join([*ignored, *left_out])}"] if ignored or left_out else []
    return nearest + (f", which {' and '.join(says)}" if says else "")


def _nearest(own: object, found: set[str]) -> str:
    if isinstance(own, str) and own in SHAPE_KEYS:
        return own
    return max(SHAPE_KEYS, key=lambda kind: (_likeness(found, SHAPE_KEYS[kind]), kind == PLAINEST))


def _named(key: str) -> str:
    return _SAME.get(key, key)


def _likeness(found: set[str], known: frozenset[str]) -> float:
    """Return the share of keys that both have; what a type need not say is missed in none."""
    names, needed = ({_named(key) for key in keys} for keys in (known, known - OPTIONAL))
    return len(found & names) / len(found | needed)


def _adds(key: str, value: object, nearest: str) -> bool:
    """Whether a key that a type does not read makes a model other than it."""
    if value is True:
        is_known = nearest in WITH_QK_NORM and "norm" in key
        return _SHAPELY.fullmatch(key) is not None and not is_known
    is_usual = value in (0, []) or (value == 1 and _EVERY_ONE.fullmatch(key) is not None)
    return _says_shape(key, value) and not is_usual


def _says_shape(key: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (is_number or (isinstance(value, list) and key != "architectures")) and not (
        _NO_SHAPE.fullmatch(key)
    )

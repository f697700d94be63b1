"""List what a `model_type` fixes about a model that its config.json does not say.

Most of a shape follows from the fields of a config.json, whatever its type is
(`streamrl.hardware.model_config`). These entries add defaults of the config classes and parameters without a
field. The source of each is the model's class in transformers 5.24, or its file on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """What a `model_type` fixes."""

    refused: str | None = None
    """Why such a model is refused, where the fields do not show it."""
    required: tuple[str, ...] = ()
    """Fields that must be there, because the rules would read a file without them as another model. A line separates
    names of the same field."""
    is_tied: bool | None = False
    """Whether embeddings are tied without `tie_word_embeddings`; None if that is unknown."""
    has_gate: bool | None = True
    """Whether MLPs have a gate; None to derive it from the activation."""
    qk_norm: Literal["none", "head", "heads", "flag"] = "none"
    """Norms of queries and keys: over a head, over all heads, or as a field says."""
    has_qkv_bias: bool | None = None
    """None for `attention_bias`."""
    has_output_bias: bool | None = None
    """None for `attention_bias`."""
    has_sinks: bool = False
    has_output_gate: bool = False
    has_head_gates: bool = False
    """Whether attention has a gate for each head, or for each channel if `gating` says so."""
    norms_per_layer: int = 2
    window: Literal["stated", "flag", "never", "unknown"] = "never"
    """Which layers have a window if the file names no kinds of layers: all, all if `use_sliding_window`, or none."""
    default_window: int | None = None
    full_every: int | None = None
    """Without kinds of layers, every N-th layer has full attention, and all others the other kind."""
    others: Literal["sliding", "linear"] = "sliding"
    expert_width: str = "moe_intermediate_size"
    """Field with the channels of an expert."""
    dense_width: str = "intermediate_size"
    """Field with the channels of a plain MLP."""
    num_shared_experts: int = 0
    """Shared experts without a field for their number."""
    has_router_bias: bool = False
    has_expert_bias: bool = False
    has_shared_gate: bool = False
    num_draft_layers: int = 0
    """Draft layers without a field for their number."""
    has_linear_bias: bool | None = None
    """Whether all linear layers have biases without `use_bias` and `bias`; None if these fields do not tell."""
    has_parallel_mamba: bool = False
    """Whether each layer has Mamba-2 beside attention."""
    needs_kv_heads: bool = True
    """Whether `num_key_value_heads` must be there; otherwise it is the number of heads."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Values of fields that may be left out, where the config class has them and no rule would derive them."""
    unread: frozenset[str] = frozenset()
    """Fields that such a model has and does not use."""


UNKNOWN = ModelType(
    is_tied=None, has_gate=None, qk_norm="flag", window="unknown", needs_kv_heads=False
)
"""A type that is not in the table."""
_PLAIN = ModelType()
_QWEN2 = ModelType(has_qkv_bias=True, has_output_bias=False, window="flag")
_QWEN3 = ModelType(qk_norm="head", window="flag")
_QWEN3_MOE = replace(_QWEN3, required=("num_experts|num_local_experts", "moe_intermediate_size"))
_QWEN3_NEXT = ModelType(
    required=(
        *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    ),
    qk_norm="head",
    has_output_gate=True,
    full_every=4,
    others="linear",
    has_shared_gate=True,
    unread=frozenset({"attn_output_gate", "mtp_use_dedicated_embeddings"}),
)
_DEEPSEEK = ModelType(
    required=(
        "q_lora_rank",
        "kv_lora_rank",
        "n_routed_experts|num_local_experts",
        "n_shared_experts",
        "first_k_dense_replace|mlp_layer_types",
    ),
    has_router_bias=True,
    needs_kv_heads=False,
    unread=frozenset({"head_dim", "qk_head_dim", "indexer_rope_interleave"}),
)
_GEMMA = ModelType(
    qk_norm="head", norms_per_layer=4, is_tied=True, window="stated", default_window=4096
)
_GEMMA4 = replace(
    _GEMMA,
    full_every=6,
    default_window=512,
    defaults={"head_dim": 256, "global_head_dim": 512},
    unread=frozenset({"enable_moe_block", "use_bidirectional_attention"}),
)
_GEMMA3_SIZES = {
    **{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
_MINIMAX_M3 = ModelType(
    qk_norm="head",
    expert_width="intermediate_size",
    has_router_bias=True,
    unread=frozenset({"use_qk_norm", "qk_norm_type", "use_gemma_norm", "moe_intermediate_size"}),
)
_STEP = ModelType(
    qk_norm="head",
    has_router_bias=True,
    has_head_gates=True,
    window="stated",
    unread=frozenset(
        {"use_qk_norm", "use_head_wise_attn_gate", "use_rope_layers", "yarn_only_types"}
        | {"moe_layer_offset", "swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors"}
        | {"mtp_layer_types", "mtp_mlp_layer_types", "use_bidirectional_attention"}
    ),
)
_COHERE = ModelType(
    is_tied=True, norms_per_layer=1, qk_norm="flag", unread=frozenset({"use_gated_activation"})
)
_HUNYUAN = ModelType(qk_norm="flag", is_tied=True, unread=frozenset({"cla_share_factor"}))
_LFM2 = ModelType(
    is_tied=True,
    qk_norm="head",
    unread=frozenset(
        {"block_auto_adjust_ff_dim", "block_multiple_of", "block_dim", "conv_dim", "conv_dim_out"}
        | {"num_heads", "block_use_swiglu", "conv_use_xavier_init", "tie_embedding"}
    ),
)
_OLMO2 = ModelType(qk_norm="heads")
_MISTRAL = ModelType(window="stated", default_window=4096, defaults={"num_attention_heads": 32})

MODEL_TYPES: dict[str, ModelType] = {
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN3, required=("head_dim",)),
    "llama": replace(_PLAIN, needs_kv_heads=False),
    "mistral": _MISTRAL,
    "mixtral": ModelType(
        window="stated",
        expert_width="intermediate_size",
        required=("num_local_experts|num_experts",),
    ),
    "qwen3_moe": _QWEN3_MOE,
    "gpt_oss": ModelType(
        window="stated",
        default_window=128,
        full_every=2,
        has_qkv_bias=True,
        has_output_bias=True,
        has_sinks=True,
        expert_width="intermediate_size",
        has_router_bias=True,
        has_expert_bias=True,
        required=("num_local_experts|num_experts",),
    ),
    "gemma3_text": replace(_GEMMA, full_every=6, defaults=_GEMMA3_SIZES),
    "qwen3_next": replace(
        _QWEN3_NEXT, num_draft_layers=1, required=(*_QWEN3_NEXT.required, "moe_intermediate_size")
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": replace(_DEEPSEEK, has_router_bias=False),
    "deepseek_v32": replace(_DEEPSEEK, required=(*_DEEPSEEK.required, "index_topk")),
    "deepseek_v4": ModelType(
        required=("compress_ratios|layer_types", "n_routed_experts|num_local_experts", "hc_mult"),
        has_router_bias=True,
        unread=frozenset({"expert_dtype"}),
    ),
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": ModelType(
        has_router_bias=True,
        unread=frozenset({"head_dim", "mla_use_nope", "latent_moe_use_norm"}),
    ),
    "glm_moe_dsa": replace(_DEEPSEEK, required=(*_DEEPSEEK.required, "index_topk")),
    "glm4_moe": ModelType(qk_norm="flag", has_output_bias=False, has_router_bias=True),
    "glm4_moe_lite": _DEEPSEEK,
    "glm4": ModelType(norms_per_layer=4, has_output_bias=False),
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5_moe_text": replace(
        _QWEN3_NEXT, required=(*_QWEN3_NEXT.required, "moe_intermediate_size")
    ),
    "qwen2_moe": replace(_QWEN2, has_shared_gate=True),
    "minimax_m2": ModelType(
        qk_norm="heads",
        expert_width="intermediate_size",
        has_router_bias=True,
        unread=frozenset({"use_qk_norm", "qk_norm_type"}),
    ),
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "mimo": _QWEN2,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mimo_v2_flash": ModelType(
        has_output_bias=False,
        has_router_bias=True,
        unread=frozenset({"attention_chunk_size", "sliding_window_size"}),
    ),
    "nemotron_h": ModelType(has_gate=False, norms_per_layer=1, has_router_bias=True),
    "llama4_text": ModelType(
        expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        num_shared_experts=1,
        unread=frozenset({"use_qk_norm"}),
    ),
    "gemma2": ModelType(
        norms_per_layer=4,
        is_tied=True,
        window="stated",
        default_window=4096,
        full_every=2,
        defaults={"head_dim": 256},
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma3n_text": ModelType(
        refused="its layers mix several residual streams (altup) and have a low-rank branch (laurel)"
    ),
    "olmo": _PLAIN,
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window="stated", default_window=4096, full_every=4),
    "smollm3": ModelType(is_tied=True, window="flag"),
    "phi3": ModelType(window="stated", has_qkv_bias=False, has_output_bias=False),
    "ministral": _MISTRAL,
    "ministral3": ModelType(window="stated"),
    "seed_oss": ModelType(has_output_bias=False),
    "arcee": ModelType(has_gate=False),
    "laguna": ModelType(qk_norm="head", has_router_bias=True, has_head_gates=True),
    "granite": _PLAIN,
    "granitemoe": ModelType(expert_width="intermediate_size"),
    "granitemoehybrid": ModelType(
        expert_width="intermediate_size", dense_width="shared_intermediate_size", is_tied=True
    ),
    "bamba": ModelType(unread=frozenset({"attn_rotary_emb"})),
    "falcon_h1": ModelType(has_parallel_mamba=True),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, window="stated", default_window=4096, full_every=4),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "ernie4_5": ModelType(is_tied=True),
    "ernie4_5_moe": ModelType(is_tied=True, has_router_bias=True),
    "apertus": ModelType(has_gate=False, qk_norm="head"),
    "nemotron": ModelType(has_gate=False),
    "gemma": ModelType(is_tied=True),
    "minicpm3": ModelType(
        is_tied=True, needs_kv_heads=False, unread=frozenset({"dim_model_base", "scale_emb"})
    ),
    "starcoder2": ModelType(
        has_gate=False, is_tied=True, has_linear_bias=True, window="stated", default_window=4096
    ),
    "phi": ModelType(has_gate=False, has_linear_bias=True, norms_per_layer=1, needs_kv_heads=False),
    "gpt_neox": ModelType(has_gate=False, has_linear_bias=True, needs_kv_heads=False),
    "afmoe": ModelType(
        qk_norm="head",
        has_output_gate=True,
        has_router_bias=True,
        norms_per_layer=4,
        window="stated",
        unread=frozenset({"global_attn_every_n_layers", "num_expert_groups", "num_limited_groups"}),
    ),
    "chatglm": ModelType(
        unread=frozenset(
            {"apply_residual_connection_post_layernorm", "post_layer_norm", "rmsnorm"}
            | {"multi_query_attention", "bias_dropout_fusion", "add_bias_linear"}
        )
    ),
    "hy_v4": replace(_DEEPSEEK, has_output_gate=True, has_sinks=True),
    "beam": ModelType(qk_norm="head", has_output_gate=True, norms_per_layer=4, window="stated"),
    "jais2": ModelType(has_gate=False),
    "apertus1p5_text": ModelType(has_gate=False, qk_norm="head"),
    "jetmoe": ModelType(refused="its attention is a mixture of heads, which is not simulated"),
    "nemotron-nas": _PLAIN,
    "dbrx": ModelType(expert_width="intermediate_size"),
}
"""By `model_type`. Keys and defaults are those of the config classes in transformers."""
EXECUTED_TYPES = (
    *("qwen2", "qwen3", "llama", "mistral", "mixtral", "qwen3_moe", "gpt_oss", "gemma3_text"),
    *("qwen3_next", "deepseek_v3"),
)
"""Types that `streamrl execute` runs. All others are planned and simulated."""

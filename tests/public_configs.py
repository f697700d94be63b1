"""Shapes of public models whose types differ, as their config.json has them."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_scaling": None, "rope_theta": 10000, "hidden_act": "silu", "rms_norm_eps": 1e-05}
_COMMON = {
    **_ROPE,
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02},
    **{"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.44.0"},
}


def _model(kind: str, sizes: tuple[int, int, int, int, int, int], **own: Any) -> dict[str, Any]:
    """Return a config of a hidden size, layers, heads, key-value heads, width of an MLP and vocabulary."""
    keys = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("intermediate_size", "vocab_size"),
    )
    table = {"architectures": ["SomeForCausalLM"], "model_type": kind, **_COMMON}
    return {**table, **dict(zip(keys, sizes, strict=True)), **own}


_DEEPSEEK: dict[str, Any] = {
    **{"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "norm_topk_prob": False},
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_group": 1, "topk_group": 1, "seq_aux": True, "pretraining_tp": 1},
}
_MAMBA = {f"mamba_{key}": value for key, value in (("d_conv", 4), ("d_state", 128), ("expand", 2))}
PUBLIC: dict[str, dict[str, Any]] = {
    "Mistral-7B-v0.3": _model(
        "mistral", (4096, 32, 32, 8, 14336, 32768), sliding_window=None, rope_theta=1000000.0
    ),
    "Mistral-Small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        **{"model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2},
        "text_config": _model("mistral", (5120, 40, 32, 8, 32768, 131072), head_dim=128),
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24},
    },
    "Mixtral-8x7B": _model(
        "mixtral",
        (4096, 32, 32, 8, 14336, 32000),
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Phi-4": _model(
        "phi3",
        (5120, 40, 40, 10, 17920, 100352),
        **{"sliding_window": None, "original_max_position_embeddings": 16384, "embd_pdrop": 0.0},
    ),
    "Phi-3-mini": _model(
        "phi3",
        (3072, 32, 32, 32, 8192, 32064),
        **{"sliding_window": 2047, "original_max_position_embeddings": 4096},
    ),
    "Falcon-H1-1.5B": _model(
        "falcon_h1",
        (2048, 24, 8, 2, 4096, 65537),
        **{**_MAMBA, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1},
        **{"mamba_d_ssm": 3072, "mamba_chunk_size": 256, "mamba_conv_bias": True},
        **{"mamba_proj_bias": False, "mlp_bias": False, "head_dim": 128, "mlp_multipliers": [1.0]},
        **{"ssm_multipliers": [0.5, 0.5], "num_logits_to_keep": 1, "mlp_expansion_factor": 8},
    ),
    "Jamba-v0.1": _model(
        "jamba",
        (4096, 32, 32, 8, 14336, 65536),
        **{"attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1},
        **{"expert_layer_period": 2, "num_experts": 16, "num_experts_per_tok": 2},
        **{**_MAMBA, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_conv_bias": True},
        **{"num_logits_to_keep": 1, "sliding_window": None, "mamba_proj_bias": False},
    ),
    "Llama-4-Scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        **{"model_type": "llama4", "boi_token_index": 200080, "image_token_index": 200092},
        "text_config": _model(
            "llama4_text",
            (5120, 48, 40, 8, 8192, 202048),
            **{"attention_chunk_size": 8192, "attn_temperature_tuning": 4, "floor_scale": 8192},
            **{"head_dim": 128, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384},
            **{"num_experts_per_tok": 1, "num_local_experts": 16, "no_rope_layers": []},
            **{"use_qk_norm": True, "eos_token_id": [200001, 200007, 200008]},
        ),
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
    },
    "Granite-3.3-8B": _model(
        "granite",
        (4096, 40, 32, 8, 12800, 49159),
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "mlp_bias": False},
        **{"logits_scaling": 16.0, "residual_multiplier": 0.22, "tie_word_embeddings": True},
    ),
    "Granite-3.1-3B-A800M": _model(
        "granitemoe",
        (1536, 32, 24, 8, 512, 49155),
        **{"num_local_experts": 40, "num_experts_per_tok": 8, "logits_scaling": 6.0},
    ),
    "OLMo-2-7B": _model("olmo2", (4096, 32, 32, 32, 11008, 100352)),
    "OLMo-7B": _model("olmo", (4096, 32, 32, 32, 11008, 50304), clip_qkv=None),
    "DeepSeek-V2-Lite": _model(
        "deepseek_v2",
        (2048, 27, 16, 16, 10944, 102400),
        **{**_DEEPSEEK, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    ),
    "Kimi-K2": _model(
        "kimi_k2",
        (7168, 61, 64, 64, 18432, 163840),
        **{**_DEEPSEEK, "q_lora_rank": 1536, "n_routed_experts": 384, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 1},
        **{"num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "fp8"}},
    ),
}

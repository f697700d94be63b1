"""Read the shape of a model from the config.json of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.hardware.layer_types import num_window_layers, read_linear, shared_experts
from streamrl.hardware.model_shape import Experts, LatentAttention, ModelShape
from streamrl.hardware.nearest_type import SHAPE_KEYS, WITH_QK_NORM, tell_nearest
from streamrl.runfile.errors import RunError, shown

MODEL_TYPES = tuple(SHAPE_KEYS)
"""The `model_type`s that are known; keys and defaults are those of their config classes in transformers."""

WINDOWED = ("mistral", "mixtral", "gpt_oss", "gemma3_text")
"""Types that have a window where they name one."""
DRAFTING = ("deepseek_v3", "qwen3_next")
"""Types that may come with layers for multi-token prediction."""
WINDOW = 4096
"""Of a sliding window whose size is not named."""


def read_config_json(path: Path) -> ModelShape:
    """Read a model's shape from the config.json of a Hugging Face directory.

    Raises:
        RunError: the file cannot be read, is of a type not in `MODEL_TYPES`, lacks a key, or has a value
            that no model of the type can have; with file, key and value.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise _wrong(path, f"{path} must hold a JSON object, got {shown(table)}")
    try:
        return _read_shape(table, path)
    except ValueError as error:
        raise _wrong(path, f"{path}: {error}") from None


def read_positions(directory: Path) -> int | None:
    """Return the tokens of the longest sequence that a Hugging Face directory says its model takes; None where it does not."""
    try:
        table = json.loads((directory / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    found = table.get("max_position_embeddings") if isinstance(table, dict) else None
    return found if isinstance(found, int) else None


def _wrong(path: Path, text: str) -> RunError:
    return RunError("model.path", str(path.parent), text=f"model.path: {text}")


def _read_shape(table: dict[str, object], path: Path) -> ModelShape:
    kind = table.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"model_type {kind!r} is none of {known}; {tell_nearest(table)}")
    for key in ("attention_bias", "mlp_bias"):
        if _flag(table, key) and (kind, key) != ("gpt_oss", "attention_bias"):
            raise ValueError(f"{key} = true is not known for {kind}")
    if table.get("quantization_config"):
        raise ValueError(
            "quantization_config is not known: take it out for the figures of whole weights in model.dtype"
        )
    num_heads = _count(table, "num_attention_heads")
    latent = _read_latent(table) if kind == "deepseek_v3" else None
    has_window = _sliding_window(table) is not None
    return ModelShape(
        name=path.absolute().parent.name,
        source=str(path),
        hidden_size=_count(table, "hidden_size"),
        num_layers=_count(table, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if latent is not None else _num_kv_heads(table),
        head_dim=_head_dim(table, latent),
        intermediate_size=_count(table, "intermediate_size"),
        vocab_size=_count(table, "vocab_size"),
        has_qkv_bias=kind == "qwen2" or _flag(table, "attention_bias"),
        has_output_bias=_flag(table, "attention_bias"),
        has_sinks=kind == "gpt_oss",
        has_output_gate=kind == "qwen3_next",
        norms_per_layer=4 if kind == "gemma3_text" else 2,
        has_tied_embeddings=_flag(table, "tie_word_embeddings", default=kind == "gemma3_text"),
        has_qk_norm=kind in WITH_QK_NORM,
        experts=_read_experts(table),
        latent=latent,
        linear=read_linear(table) if kind == "qwen3_next" else None,
        sliding_window=_sliding_window(table),
        num_window_layers=num_window_layers(table) if has_window else None,
        num_draft_layers=_num_draft_layers(table),
    )


def _num_draft_layers(table: dict[str, object]) -> int:
    """Qwen3-Next comes with one and does not say so (vLLM's qwen3_next_mtp.py reads 1 where the key is absent)."""
    key, kind = "num_nextn_predict_layers", table["model_type"]
    if kind not in DRAFTING or (key not in table and kind == "deepseek_v3"):
        return 0
    return _count({key: table.get(key, 1)}, key, least=0)


def _sliding_window(table: dict[str, object]) -> int | None:
    """Mistral and Mixtral have the window that they name, and Mistral one by default; Qwen where it is switched on."""
    default = WINDOW if table["model_type"] != "mixtral" else None
    window = table.get("sliding_window", default)
    has_window = table["model_type"] in WINDOWED or _flag(table, "use_sliding_window")
    return (
        None
        if window is None or not has_window
        else _count({"sliding_window": window}, "sliding_window")
    )


def _num_kv_heads(table: dict[str, object]) -> int:
    """Llama models from before grouped-query attention name no key-value heads."""
    if table["model_type"] == "llama" and table.get("num_key_value_heads") is None:
        return _count(table, "num_attention_heads")
    return _count(table, "num_key_value_heads")


def _head_dim(table: dict[str, object], latent: LatentAttention | None) -> int:
    """Where no size is named heads share out the hidden state, but for Qwen3, whose default is a constant."""
    if latent is not None:
        return latent.nope_head_dim + latent.rope_head_dim
    if table.get("head_dim") is not None or table["model_type"] == "qwen3":
        return _count(table, "head_dim")
    hidden_size, num_heads = _count(table, "hidden_size"), _count(table, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(
            f"num_attention_heads must divide hidden_size {hidden_size}, got {num_heads}"
        )
    return hidden_size // num_heads


def _read_latent(table: dict[str, object]) -> LatentAttention:
    has_rank = "q_lora_rank" not in table or table["q_lora_rank"] is not None
    return LatentAttention(
        q_lora_rank=_count(table, "q_lora_rank") if has_rank else None,
        kv_lora_rank=_count(table, "kv_lora_rank"),
        rope_head_dim=_count(table, "qk_rope_head_dim"),
        nope_head_dim=_count(table, "qk_nope_head_dim"),
        v_head_dim=_count(table, "v_head_dim"),
    )


def _read_experts(table: dict[str, object]) -> Experts | None:
    match table["model_type"]:
        case "qwen3_moe":
            # transformers 5 saves as num_local_experts what earlier versions called num_experts
            key = "num_local_experts" if "num_local_experts" in table else "num_experts"
            return Experts(
                num_experts=_count(table, key),
                experts_per_token=_count(table, "num_experts_per_tok"),
                intermediate_size=_count(table, "moe_intermediate_size"),
                num_dense_layers=_num_first_dense(table),
            )
        case "qwen3_next":
            return Experts(
                num_experts=_count(
                    table, "num_experts" if "num_experts" in table else "num_local_experts"
                ),
                experts_per_token=_count(table, "num_experts_per_tok"),
                intermediate_size=_count(table, "moe_intermediate_size"),
                num_shared_experts=shared_experts(table),
                num_dense_layers=_num_first_dense(table),
                has_shared_gate=True,
            )
        case "gpt_oss":
            return Experts(
                num_experts=_count(table, "num_local_experts"),
                experts_per_token=_count(table, "num_experts_per_tok"),
                intermediate_size=_count(table, "intermediate_size"),
                has_router_bias=True,
                has_bias=True,
            )
        case "mixtral":
            return Experts(
                num_experts=_count(table, "num_local_experts"),
                experts_per_token=_count(table, "num_experts_per_tok"),
                intermediate_size=_count(table, "intermediate_size"),
            )
        case "deepseek_v3":
            return Experts(
                num_experts=_count(table, "n_routed_experts"),
                experts_per_token=_count(table, "num_experts_per_tok"),
                intermediate_size=_count(table, "moe_intermediate_size"),
                num_shared_experts=_count(table, "n_shared_experts", least=0),
                num_dense_layers=_count(table, "first_k_dense_replace", least=0),
                has_router_bias=True,
            )
    return None


def _num_first_dense(table: dict[str, object]) -> int:
    """Qwen3 may put plain MLPs anywhere; only first layers are known here, and no model has others."""
    if table.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"decoder_sparse_step must be 1, got {table['decoder_sparse_step']!r}")
    dense = table.get("mlp_only_layers") or []
    if not isinstance(dense, list) or {*map(repr, dense)} != {*map(repr, range(len(dense)))}:
        raise ValueError(f"mlp_only_layers must be the first layers, got {dense!r}")
    return len(dense)


def _count(table: dict[str, object], key: str, least: int = 1) -> int:
    if key not in table:
        raise ValueError(f"{key} is missing")
    value = table[key]
    if type(value) is not int or value < least:  # `True` is an int
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return value


def _flag(table: dict[str, object], key: str, *, default: bool = False) -> bool:
    """Read a boolean that is false where absent, as in most config classes of `MODEL_TYPES`."""
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value

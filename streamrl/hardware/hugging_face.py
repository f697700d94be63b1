"""Read a Hugging Face model directory: the model's shape from config.json, and whether its weight files are complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl.hardware.model_shape import Experts, LatentAttention, LinearAttention, ModelShape
from streamrl.runfile.errors import RunError, shown

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PERIODS = {"gpt_oss": 2, "gemma3_text": 6, "qwen3_next": 4}
"""By `model_type`: without `layer_types`, every N-th layer has full attention (source: the config classes)."""


def layers_of(table: Mapping[str, object], kind: str) -> int | None:
    """Return the number of layers of a kind; None if all layers of this model type are of one kind.

    Raises:
        ValueError: `layer_types` has an unknown type, or not one type for each layer.
    """
    total, types = table.get("num_hidden_layers"), table.get("layer_types")
    if isinstance(types, list):
        unknown = [each for each in types if each not in (FULL, SLIDING, LINEAR)]
        if unknown or len(types) != total:
            raise ValueError(
                f"layer_types must name {FULL}, {SLIDING} or {LINEAR} for each of {total} layers, got {types!r}"
            )
        return types.count(kind)
    period = table.get("full_attention_interval") or PERIODS.get(str(table.get("model_type")))
    if type(period) is not int or period < 1 or type(total) is not int:
        return None
    others = LINEAR if table.get("model_type") == "qwen3_next" else SLIDING
    full = total // period
    return {FULL: full, others: total - full}.get(kind, 0)


def num_window_layers(table: Mapping[str, object]) -> int | None:
    """Return the number of layers with a sliding window; None if all layers are of one kind."""
    if table.get("model_type") not in PERIODS and not isinstance(table.get("layer_types"), list):
        return None
    return layers_of(table, SLIDING)


def read_linear(table: Mapping[str, object]) -> LinearAttention | None:
    """Return the gated delta net of a config.json; None if no layer has one."""
    num_layers = layers_of(table, LINEAR)
    if not num_layers:
        return None
    return LinearAttention(
        num_layers=num_layers,
        num_key_heads=_layer_count(table, "linear_num_key_heads"),
        key_head_dim=_layer_count(table, "linear_key_head_dim"),
        num_value_heads=_layer_count(table, "linear_num_value_heads"),
        value_head_dim=_layer_count(table, "linear_value_head_dim"),
        conv_kernel=_layer_count(table, "linear_conv_kernel_dim"),
    )


def shared_experts(table: Mapping[str, object]) -> int:
    """Return the width of the shared expert as a number of routed experts.

    Raises:
        ValueError: this is not a whole number.
    """
    shared = _layer_count(table, "shared_expert_intermediate_size")
    one = _layer_count(table, "moe_intermediate_size")
    if shared % one:
        raise ValueError(
            f"shared_expert_intermediate_size must be a multiple of moe_intermediate_size {one}, got {shared}"
        )
    return shared // one


def _layer_count(table: Mapping[str, object], key: str) -> int:
    if key not in table:
        raise ValueError(f"{key} is missing")
    value = table[key]
    if type(value) is not int or value < 1:  # `True` is an int
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value


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
"""By `model_type`: the keys that determine the shape of a model. Of equally near types, the first one is suggested."""
PLAINEST = "llama"
"""Preferred among equally near types, because it has neither biases nor norms of queries."""
OPTIONAL = frozenset({"head_dim", "decoder_sparse_step", "mlp_only_layers", "sliding_window"})
WITH_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text")
"""Types with norms of queries and keys."""

_NO_SHAPE = re.compile(
    r".*_token_id|.*_token_index|.*max_position_embeddings|pretraining_tp|ep_size|chunk_size_feed_forward|n_group|"
    r"topk_group|.*_window_layers|rope_theta|no_rope_layers|floor_scale|attn_temperature_tuning|.*_multipliers|"
    r"num_logits_to_keep"
)
"""Numbers that change neither parameters nor arithmetic."""
_EVERY_ONE = re.compile(r".*(_freq|_step|_period|_interval)")
"""Periods of a kind of layer. The value 1 changes nothing, because every layer is of that kind by default."""
_ADDS_PARAMETERS = re.compile(r".*bias|.*qk_.*norm")
"""Boolean keys that add parameters."""
_SAME = {"num_local_experts": "num_experts"}
"""Keys with the same meaning."""


def describe_nearest_type(table: Mapping[str, object]) -> str:
    """Return the known type that shares most keys with a `config.json`, which keys it needs, and which it would ignore.

    For a multimodal model, describe the part for text.
    """
    text = table.get("text_config")
    if not isinstance(text, dict) or "hidden_size" in table:
        return f"the nearest is {_nearest_text(table, [])}"
    others = [key for key, value in table.items() if key.endswith("_config") and value]
    left_out = [key for key in others if isinstance(table[key], dict) and key != "text_config"]
    return f"the nearest to its text_config is {_nearest_text(text, left_out)}"


def _nearest_text(table: Mapping[str, object], left_out: list[str]) -> str:
    """Return the nearest type, the keys that it needs, and the keys and parts that it would ignore."""
    stated = {_same_key(key) for key, value in table.items() if _is_shape(key, value)}
    nearest = _nearest(table.get("model_type"), stated)
    present, known = (
        {_same_key(key) for key in table},
        {_same_key(key) for key in SHAPE_KEYS[nearest]},
    )
    lacking = sorted(key for key in SHAPE_KEYS[nearest] - OPTIONAL if _same_key(key) not in present)
    ignored = sorted(
        key
        for key, value in table.items()
        if _same_key(key) not in known and _changes_shape(key, value, nearest)
    )
    says = [f"needs {', '.join(lacking)}"] if lacking else []
    says += [f"would ignore {', '.join([*ignored, *left_out])}"] if ignored or left_out else []
    return nearest + (f", which {' and '.join(says)}" if says else "")


def _nearest(own: object, stated: set[str]) -> str:
    if isinstance(own, str) and own in SHAPE_KEYS:
        return own
    return max(SHAPE_KEYS, key=lambda kind: (_likeness(stated, SHAPE_KEYS[kind]), kind == PLAINEST))


def _same_key(key: str) -> str:
    return _SAME.get(key, key)


def _likeness(stated: set[str], known: frozenset[str]) -> float:
    """Return the share of keys that both have; missing optional keys do not lower it."""
    names, needed = ({_same_key(key) for key in keys} for keys in (known, known - OPTIONAL))
    return len(stated & names) / len(stated | needed)


def _changes_shape(key: str, value: object, nearest: str) -> bool:
    """Return whether a key that the nearest type does not read makes the model different from it."""
    if value is True:
        is_known = nearest in WITH_QK_NORM and "norm" in key
        return _ADDS_PARAMETERS.fullmatch(key) is not None and not is_known
    is_usual = value in (0, []) or (value == 1 and _EVERY_ONE.fullmatch(key) is not None)
    return _is_shape(key, value) and not is_usual


def _is_shape(key: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (is_number or (isinstance(value, list) and key != "architectures")) and not (
        _NO_SHAPE.fullmatch(key)
    )


MODEL_TYPES = tuple(SHAPE_KEYS)
"""The known values of `model_type`. Keys and defaults are those of their config classes in transformers."""

WINDOWED = ("mistral", "mixtral", "gpt_oss", "gemma3_text")
"""Types that use `sliding_window` whenever it has a value."""
DRAFTING = ("deepseek_v3", "qwen3_next")
"""Types that may have layers for multi-token prediction."""
DEFAULT_WINDOW = 4096
"""Tokens of a sliding window without a stated size."""


def read_config_json(path: Path) -> ModelShape:
    """Read a model's shape from the config.json of a Hugging Face directory.

    Raises:
        RunError: the file cannot be read, its type is not in `MODEL_TYPES`, or a key is missing or
            has an invalid value. The text has the file, the key and the value.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise _wrong(path, f"{path} must contain a JSON object, got {shown(table)}")
    try:
        return _read_shape(table, path)
    except ValueError as error:
        raise _wrong(path, f"{path}: {error}") from None


def read_positions(directory: Path) -> int | None:
    """Return `max_position_embeddings` of a Hugging Face directory, in tokens; None if it is not stated."""
    try:
        table = json.loads((directory / "config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    positions = table.get("max_position_embeddings") if isinstance(table, dict) else None
    return positions if isinstance(positions, int) else None


def _wrong(path: Path, text: str) -> RunError:
    return RunError("model.path", str(path.parent), text=f"model.path: {text}")


def _read_shape(table: dict[str, object], path: Path) -> ModelShape:
    kind = table.get("model_type")
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"model_type {kind!r} is none of {known}; {describe_nearest_type(table)}")
    for key in ("attention_bias", "mlp_bias"):
        if _flag(table, key) and (kind, key) != ("gpt_oss", "attention_bias"):
            raise ValueError(f"{key} = true is not known for {kind}")
    if table.get("quantization_config"):
        raise ValueError(
            "quantization_config is not supported; remove it to compute with all weights in model.dtype"
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
    """Return the number of draft layers. Qwen3-Next has one without stating it (vLLM's qwen3_next_mtp.py assumes 1)."""
    key, kind = "num_nextn_predict_layers", table["model_type"]
    if kind not in DRAFTING or (key not in table and kind == "deepseek_v3"):
        return 0
    return _count({key: table.get(key, 1)}, key, least=0)


def _sliding_window(table: dict[str, object]) -> int | None:
    """Return the window in tokens. `WINDOWED` types use it whenever it is stated, Qwen only with `use_sliding_window`.

    Mistral has a window by default.
    """
    default = DEFAULT_WINDOW if table["model_type"] != "mixtral" else None
    window = table.get("sliding_window", default)
    has_window = table["model_type"] in WINDOWED or _flag(table, "use_sliding_window")
    return (
        None
        if window is None or not has_window
        else _count({"sliding_window": window}, "sliding_window")
    )


def _num_kv_heads(table: dict[str, object]) -> int:
    """Return the key-value heads. Llama models without grouped-query attention do not state them."""
    if table["model_type"] == "llama" and table.get("num_key_value_heads") is None:
        return _count(table, "num_attention_heads")
    return _count(table, "num_key_value_heads")


def _head_dim(table: dict[str, object], latent: LatentAttention | None) -> int:
    """Return the channels of a head. The default is `hidden_size` / heads, except for Qwen3, which must state it."""
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
            # transformers 5 writes num_local_experts; earlier versions wrote num_experts
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
    """Return the number of first layers with plain MLPs. The format allows other layers, but no known model has them."""
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
    """Return a boolean. A missing key is false, as in most config classes of `MODEL_TYPES`."""
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


INDEX = "model.safetensors.index.json"
"""The index of sharded weights: the file name of each tensor (huggingface.co/docs/safetensors)."""
LENGTH_BYTES = 8
"""First bytes of a safetensors file: the length of its header, little-endian. The header follows, and then the tensors
without gaps."""
MOST_HEADER = 100 * 10**6
"""Maximum bytes of a header, the limit of safetensors."""


def weight_problems(directory: Path) -> Iterator[str]:
    """Yield a text for each missing, damaged or truncated weight file of a Hugging Face directory."""
    named = _indexed_files(directory)
    missing = [name for name in named if not (directory / name).is_file()]
    if missing:
        yield f"lacks {', '.join(missing)}"
    files = [directory / name for name in named] or sorted(directory.glob("*.safetensors"))
    if not files:
        yield "lacks weights (*.safetensors)"
    for path in files:
        if path.is_file() and (problem := _weight_problem(path)):
            yield f"has a damaged {path.name}: {problem}"


def _indexed_files(directory: Path) -> list[str]:
    """Return the file names in the index; none without an index."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8-sig"))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []


def _weight_problem(path: Path) -> str:
    """Return what is wrong with the header or the size of a file; "" if nothing is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER, size - LENGTH_BYTES):
                return f"its {size} bytes do not begin with a safetensors header"
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        wanted = LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return str(error.strerror)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return "its header is not a safetensors header"
    return "" if size == wanted else f"it has {size} bytes, but its header says {wanted}"

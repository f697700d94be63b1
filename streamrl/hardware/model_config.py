"""Read the shape of a decoder from a config.json by rules, whatever its `model_type` is.

| part               | fields                                                                                        |
|--------------------|-----------------------------------------------------------------------------------------------|
| kinds of layers    | `layer_types`, `hybrid_override_pattern`, `layers_block_type`, `hybrid_layer_pattern`,        |
|                    | `sliding_window_pattern`, `full_attention_interval`, `linear_attn_config`, `attn_type_list`   |
| full attention     | `num_attention_heads`, `num_key_value_heads`, `head_dim`, `v_head_dim`, `global_head_dim`     |
| sliding window     | `sliding_window`, `use_sliding_window`, `attention_chunk_size`, `swa_*`                       |
| latent attention   | `kv_lora_rank`, `q_lora_rank`, `qk_rope_head_dim`, `qk_nope_head_dim`, `v_head_dim`           |
| sparse attention   | `index_n_heads`, `index_head_dim`, `index_topk`                                               |
| compressed tokens  | `compress_ratios`, `compress_rates`, `o_groups`, `o_lora_rank`, with `index_*`                |
| residual streams   | `hc_mult`                                                                                     |
| linear attention   | `linear_*` (gated delta), `linear_attn_config` (Kimi), `mamba_*` and `ssm_state_size`         |
| MLP                | `intermediate_size`, `intermediate_size_mlp`, `hidden_act`                                    |
| experts            | `num_experts`, `n_routed_experts`, `num_local_experts`, `moe_intermediate_size`, ...          |
| layers of experts  | `first_k_dense_replace`, `moe_layer_freq`, `decoder_sparse_step`, `mlp_only_layers`, ...      |
| draft layers       | `num_nextn_predict_layers`, `mtp_num_hidden_layers`, `num_mtp_modules`                        |

`streamrl.hardware.model_types` has what known types fix beyond these fields. A field that may change the shape and has
no rule is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from streamrl.hardware.compressed_attention import CompressedAttention, HyperConnections
from streamrl.hardware.config_fields import Fields
from streamrl.hardware.indexer import Indexer
from streamrl.hardware.model_shape import (
    Experts,
    LatentAttention,
    LinearAttention,
    ModelShape,
    WindowHeads,
)
from streamrl.hardware.model_types import MODEL_TYPES, UNKNOWN, ModelType

MOST_LAYERS = 10_000
"""More layers than any model has."""
SMALL_HEAD = 0.005
"""Share of a model's parameters below which an output head may be assumed."""
NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "experts_per_token",
    "moe_topk",
)
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm")
GATED = ("silu", "swish", "swiglu")
"""Activations of MLPs with a gate. Others, such as relu2 and gelu, are used with and without one."""
FULL, SLIDING, LINEAR, DENSE, MIXTURE = "full", "sliding", "linear", "dense", "mixture"
LAYER_KINDS = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "linear_attention": LINEAR,
    "chunked_attention": SLIDING,
    "indexed_attention": FULL,
}
"""Kinds in `layer_types`."""
SPARSE_ENTRIES, DENSE_ENTRIES = "sparse entries", "dense entries"
ENTRY_TYPES = {
    "sliding_attention": SLIDING,
    "compressed_sparse_attention": SPARSE_ENTRIES,
    "heavily_compressed_attention": DENSE_ENTRIES,
}
"""Kinds in `layer_types` of a model with compressed attention."""
COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
ENTRY_RATIOS = {0: SLIDING, 4: SPARSE_ENTRIES, 128: DENSE_ENTRIES}
"""Kinds by the tokens of an entry, in `compress_ratios`."""
BLOCK_KINDS = {
    **{"M": LINEAR, "*": FULL, "-": DENSE, "E": MIXTURE},
    **{"mamba": LINEAR, "attention": FULL, "mlp": DENSE, "moe": MIXTURE},
    **{"linear_attention": LINEAR, "full_attention": FULL},
}
"""Kinds of layers that are one block: `hybrid_override_pattern` and `layers_block_type`."""


class Mixing(NamedTuple):
    """Number of layers by what mixes their tokens, and of layers that are one block."""

    full: int
    sliding: int = 0
    linear: int = 0
    blocks: Mapping[str, int] | None = None
    """Number of MLPs and mixtures that are layers of their own; None if they follow attention in each layer."""
    window: int | None = None
    """Tokens of the window."""


def read_shape(table: Mapping[str, object], name: str, source: str) -> tuple[ModelShape, list[str]]:
    """Return the shape of a decoder without vision tower, and what was assumed.

    Raises:
        ValueError: a field is missing, has a value that no model has, or changes the shape in a way without a rule.
    """
    fields = Fields(table)
    kind = fields.value("model_type")
    known = MODEL_TYPES.get(kind, UNKNOWN) if isinstance(kind, str) else UNKNOWN
    fields.read.update(known.unread)
    _fill_in(fields, known.defaults)
    _check_decoder(fields)
    for key in known.required:
        if not any(each in table for each in key.split("|")):
            raise ValueError(f"{key.partition('|')[0]} is missing")
    shape = _shape(fields, known, name, source)
    _check_head(fields, known, shape)
    if known is UNKNOWN:
        fields.assume(f"model_type {kind!r} has no entry of its own: read by its fields alone")
    if rest := fields.not_understood(is_known=known is not UNKNOWN):
        raise ValueError(
            f"{', '.join(rest)} may change the shape of the model and {'is' if len(rest) == 1 else 'are'} not "
            f"understood; without {'it' if len(rest) == 1 else 'them'} this would be {describe(shape)}. "
            "Remove the fields to assume this"
        )
    return shape, fields.assumed


def _fill_in(fields: Fields, defaults: Mapping[str, int]) -> None:
    """Add the defaults of the config class for fields that the file leaves out, and note them."""
    for name, value in defaults.items():
        if fields.table.get(name) is None:
            fields.table = {**fields.table, name: value}
            fields.assume(f"{name} = {value}, the default of its model_type")


def describe(shape: ModelShape) -> str:
    """Return a shape in a few words: parameters, and layers by kind."""
    counts = {
        "full attention": shape.num_full_layers,
        "a sliding window": shape.num_windowed_layers,
        "linear attention": shape.num_linear_layers,
        "experts": shape.num_expert_layers,
    }
    told = ", ".join(f"{count} with {what}" for what, count in counts.items() if count)
    return f"{shape.num_parameters / 1e9:.4g}B parameters in {shape.num_layers} layers, {told}"


def _check_decoder(fields: Fields) -> None:
    if fields.value("is_encoder_decoder") is True:
        raise ValueError("is_encoder_decoder = true: only decoders are supported")
    if fields.flag("mlp_bias"):
        raise ValueError(
            f"mlp_bias = true is not known for {fields.table.get('model_type')}; MLPs without biases would be assumed"
        )


def _shape(fields: Fields, known: ModelType, name: str, source: str) -> ModelShape:
    num_heads = fields.count("num_attention_heads")
    entries = _entries(fields)
    latent = _latent(fields) if entries is None else None
    mixing = _mixing(fields, known)
    unmixed = sum((mixing.blocks or {}).values())
    num_layers = mixing.full + mixing.sliding + mixing.linear + unmixed
    heads = _heads(fields, known, num_heads, latent)
    own, windowed = _by_kind(fields, heads, mixing)
    has_gate = _has_gate(fields, known)
    experts = _experts(fields, known, num_layers, mixing, has_gate=has_gate)
    biases = _biases(fields, known)
    return ModelShape(
        name=name,
        source=source,
        hidden_size=fields.count("hidden_size"),
        num_layers=num_layers,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        values_dim=own.values_dim,
        has_value_projection=entries is None
        and not (fields.flag("attention_k_eq_v") and windowed is not None),
        window_heads=windowed,
        intermediate_size=_dense_width(fields, known, experts),
        vocab_size=fields.count("vocab_size"),
        has_qkv_bias=biases[0] and latent is None,
        has_output_bias=biases[1],
        has_sinks=own.has_sinks or entries is not None,
        has_output_gate=known.has_output_gate or fields.flag("attn_output_gate"),
        has_head_gates=_has_head_gates(fields, known),
        norms_per_layer=_norms_per_layer(fields, known),
        has_gated_mlp=has_gate,
        has_tied_embeddings=_is_tied(fields, known),
        has_qk_norm=_qk_norm(fields, known) != "none" and latent is None,
        qk_norm_spans_heads=_qk_norm(fields, known) == "heads",
        experts=experts,
        latent=latent,
        indexer=_indexer(fields, num_layers) if entries is None else None,
        compressed=None if entries is None else _compressed(fields, entries),
        hyper_connections=_hyper_connections(fields),
        linear=_linear(fields, mixing.linear),
        sliding_window=mixing.window,
        num_window_layers=_num_window_layers(fields, mixing, num_layers),
        num_draft_layers=_num_draft_layers(fields, known),
        num_unmixed_layers=unmixed,
        num_bare_layers=num_layers - unmixed if mixing.blocks else 0,
    )


def _num_window_layers(fields: Fields, mixing: Mixing, num_layers: int) -> int | None:
    """Return the layers with the window; None for all, or without a window."""
    return None if mixing.window is None or mixing.sliding == num_layers else mixing.sliding


def _norms_per_layer(fields: Fields, known: ModelType) -> int:
    """Return the norms of a layer. Gemma 4 has three more around its experts, and a scale of the router's inputs."""
    return known.norms_per_layer + 4 * fields.flag("enable_moe_block")


# Kinds of layers ----------------------------------------------------------------------------------


def _mixing(fields: Fields, known: ModelType) -> Mixing:
    """Return the number of layers of each kind, from the first field that tells it."""
    if (blocks := _blocks(fields)) is not None:
        return blocks
    total = fields.count("num_hidden_layers", "n_layer", "num_layers")
    if total > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {total}")
    counts = _stated_kinds(fields, known, total)
    if counts is None:
        return _of_one_kind(fields, known, total)
    sliding = counts.get(SLIDING, 0)
    fields.read.update(("sliding_window", "use_sliding_window", "max_window_layers"))
    window = _window(fields, known) if sliding or SPARSE_ENTRIES in counts else None
    return Mixing(counts.get(FULL, 0), sliding, counts.get(LINEAR, 0), window=window)


def _blocks(fields: Fields) -> Mixing | None:
    """Return the layers of a model whose layers are one block each; None for any other model."""
    stated = fields.value("hybrid_override_pattern", "layers_block_type")
    if stated is None:
        return None
    if not isinstance(stated, str | list):
        raise ValueError(f"hybrid_override_pattern must be text, got {stated!r}")
    name = "layers_block_type" if isinstance(stated, list) else "hybrid_override_pattern"
    kinds = _kinds(list(stated), BLOCK_KINDS, name)
    total = fields.count_or(len(kinds), "num_hidden_layers")
    if total != len(kinds):
        raise ValueError(f"{name} must name {total} layers, got {len(kinds)}")
    fields.read.update(("mtp_hybrid_override_pattern", "mtp_layers_block_type", "sliding_window"))
    blocks = {each: kinds.count(each) for each in (DENSE, MIXTURE)}
    return Mixing(kinds.count(FULL), 0, kinds.count(LINEAR), blocks)


def _kinds(values: list[object], known: Mapping[str, str], name: str) -> list[str]:
    kinds = [known.get(each) if isinstance(each, str) else None for each in values]
    if None in kinds:
        wrong = values[kinds.index(None)]
        raise ValueError(f"{name} must name only {', '.join(known)}, got {wrong!r}")
    return [kind for kind in kinds if kind is not None]


def _stated_kinds(fields: Fields, known: ModelType, total: int) -> dict[str, int] | None:
    """Return the number of layers of each kind; None if the file names none."""
    types = fields.words("layer_types")
    linear = fields.part("linear_attn_config")
    pattern = fields.words("hybrid_layer_pattern")
    fields.read.update(
        ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern")
    )
    if (entries := _entries(fields)) is not None:
        return {FULL: entries[SPARSE_ENTRIES] + entries[DENSE_ENTRIES], **entries}
    if types is not None:
        return _of_layer_types(types, total)
    if linear is not None:
        return _of_listed_layers(linear, total)
    if pattern is not None:
        return _of_marks("hybrid_layer_pattern", pattern, total, {0: FULL, 1: SLIDING})
    if (marks := fields.words("attn_type_list")) is not None:
        return _of_marks("attn_type_list", marks, total, {1: FULL})
    if fields.has("attention_chunk_size") and fields.value("model_type") == "llama4_text":
        return _of_chunks(fields, total)
    return _of_period(fields, known, total)


def _of_layer_types(types: list[object], total: int) -> dict[str, int]:
    unknown = [each for each in types if not isinstance(each, str) or each not in LAYER_KINDS]
    if unknown or len(types) != total:
        *most, last = LAYER_KINDS
        raise ValueError(
            f"layer_types must name {', '.join(most)} or {last} for each of {total} layers, got {types!r}"
        )
    kinds = [LAYER_KINDS[str(each)] for each in types]
    return {kind: kinds.count(kind) for kind in (FULL, SLIDING, LINEAR)}


def _of_listed_layers(table: Mapping[str, object], total: int) -> dict[str, int]:
    """Return the layers of Kimi's `linear_attn_config`, which lists them by number."""
    lists = [table.get(key) for key in ("full_attn_layers", "kda_layers")]
    full, linear = (each if isinstance(each, list) else [] for each in lists)
    if sorted(map(repr, [*full, *linear])) != sorted(map(repr, range(1, total + 1))):
        raise ValueError(
            f"linear_attn_config must list each of {total} layers once in full_attn_layers or kda_layers"
        )
    return {FULL: len(full), LINEAR: len(linear)}


def _of_marks(
    name: str, marks: list[object], total: int, kinds: Mapping[int, str]
) -> dict[str, int]:
    """Return the layers of a list with one number for each."""
    wrong = [mark for mark in marks if type(mark) is not int or mark not in kinds]
    if wrong or len(marks) != total:
        meant = ", ".join(f"{mark} ({kind} attention)" for mark, kind in kinds.items())
        got = f"{wrong[0]!r}" if wrong else f"{len(marks)} numbers"
        raise ValueError(f"{name} must be {meant} for each of {total} layers, got {got}")
    found = [kinds[int(str(mark))] for mark in marks]
    return {kind: found.count(kind) for kind in kinds.values()}


def _of_chunks(fields: Fields, total: int) -> dict[str, int]:
    """Return the layers of Llama 4: those with rotary positions attend within a chunk, all others to all tokens."""
    rotary = fields.words("no_rope_layers")
    if rotary:
        return _of_marks("no_rope_layers", rotary, total, {0: FULL, 1: SLIDING})
    every = fields.count_or(4, "no_rope_layer_interval", least=1)
    return {FULL: total // every, SLIDING: total - total // every}


def _of_period(fields: Fields, known: ModelType, total: int) -> dict[str, int] | None:
    """Return the layers of a model in which every N-th layer has full attention."""
    stated = fields.table.get("sliding_window_pattern", fields.table.get("_sliding_window_pattern"))
    if isinstance(stated, str):  # "LLLG": three local layers, then a global one
        stated = len(stated) if stated.endswith("G") and set(stated[:-1]) == {"L"} else stated
    linear = fields.table.get("full_attention_interval")
    period = linear or stated or known.full_every
    if period is None:
        return None
    if type(period) is not int or period < 1:
        raise ValueError(
            f"the period of layers with full attention must be a whole number, got {period!r}"
        )
    others = LINEAR if linear or known.others == "linear" else SLIDING
    return {FULL: total // period, others: total - total // period}


def _of_one_kind(fields: Fields, known: ModelType, total: int) -> Mixing:
    """Return a model whose file names no kinds of layers: all have the window, or all have full attention."""
    first = fields.count_or(0, "max_window_layers")
    is_used = fields.flag("use_sliding_window")
    if known.window == "never" or (known.window == "flag" and not is_used):
        fields.read.update(("sliding_window", "max_window_layers"))
        return Mixing(total)
    if known.window == "unknown" and not is_used:
        return Mixing(_all_full(fields, total))
    window = _window(fields, known)
    if window is None:
        return Mixing(total)
    full = (
        min(first, total) if known.window == "flag" and "max_window_layers" in fields.table else 0
    )
    return Mixing(full, total - full, window=window if full < total else None)


def _all_full(fields: Fields, total: int) -> int:
    """Return all layers of an unknown type as layers with full attention.

    Raises:
        ValueError: it has a window that may change some of its layers.
    """
    window, most = fields.value("sliding_window"), fields.table.get("max_position_embeddings")
    if window is None or "use_sliding_window" in fields.table:
        return total
    if isinstance(window, int) and isinstance(most, int) and window >= most:
        return total
    raise ValueError(
        f"sliding_window = {window!r} is not understood without layer_types or use_sliding_window; full attention in "
        "all layers would be assumed"
    )


def _window(fields: Fields, known: ModelType) -> int | None:
    """Return the tokens of the window; None if the file says that there is none."""
    keys = ("sliding_window", "sliding_window_size", "attention_chunk_size")
    if fields.value("model_type") == "llama4_text":
        fields.assume("layers that attend within chunks count as layers with a sliding window")
        return fields.count("attention_chunk_size")
    if "sliding_window" in fields.table and fields.value("sliding_window") is None:
        return None
    stated = fields.has("sliding_window", "sliding_window_size")
    if not stated and known.default_window is not None:
        return known.default_window
    if not stated and known.window == "stated":
        return None
    return fields.count(*keys[:2])


# Attention ----------------------------------------------------------------------------------------


def _heads(
    fields: Fields, known: ModelType, num_heads: int, latent: LatentAttention | None
) -> WindowHeads:
    """Return the heads of a layer, as `num_attention_heads` and its siblings say."""
    if latent is not None:
        head_dim = latent.nope_head_dim + latent.rope_head_dim
        fields.read.update(("num_key_value_heads", "head_dim", "qk_head_dim"))
        return WindowHeads(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    head_dim = _head_dim(fields, num_heads)
    values = fields.count_or(head_dim, "v_head_dim", least=1)
    return WindowHeads(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, known, num_heads),
        head_dim=head_dim,
        values_dim=values if values != head_dim else None,
        has_sinks=known.has_sinks or fields.flag("add_full_attention_sink_bias"),
    )


def _by_kind(
    fields: Fields, heads: WindowHeads, mixing: Mixing
) -> tuple[WindowHeads, WindowHeads | None]:
    """Return the heads of layers without a window, and those of layers with one if they differ.

    `global_*` fields are of layers without a window (Gemma 4), `swa_*` fields of layers with one (MiMo-V2).
    """
    layers = _of_full_layers(fields)
    head_dim = layers.count_or(heads.head_dim, "global_head_dim", "head_dim", least=1)
    kv_names = ("num_global_key_value_heads", "num_key_value_heads")
    kv_heads = layers.count_or(heads.num_kv_heads, *kv_names, least=1)
    own = WindowHeads(
        num_heads=heads.num_heads,
        num_kv_heads=kv_heads
        if fields.flag("attention_k_eq_v", default=True)
        else heads.num_kv_heads,
        head_dim=head_dim,
        values_dim=heads.values_dim,
        has_sinks=heads.has_sinks,
    )
    own, num_windowed = _heads_of_layers(fields, own)
    wide = fields.count_or(heads.head_dim, "swa_head_dim", least=1)
    values = fields.count_or(heads.values_dim or wide, "swa_v_head_dim", least=1)
    windowed = WindowHeads(
        num_heads=fields.count_or(num_windowed, "swa_num_attention_heads", least=1),
        num_kv_heads=fields.count_or(heads.num_kv_heads, "swa_num_key_value_heads", least=1),
        head_dim=wide,
        values_dim=values if values != wide else None,
        has_sinks=fields.flag("add_swa_attention_sink_bias", default=heads.has_sinks),
    )
    if windowed == own or not mixing.sliding:
        return own, None
    return (own, windowed) if mixing.full else (windowed, None)


def _heads_of_layers(fields: Fields, own: WindowHeads) -> tuple[WindowHeads, int]:
    """Return heads with the number of full layers, and the number of heads in layers with a window.

    `num_attention_heads_per_layer` lists them (Laguna).

    Raises:
        ValueError: layers of one kind have different numbers of heads.
    """
    listed, types = fields.words("num_attention_heads_per_layer"), fields.table.get("layer_types")
    if not listed:
        return own, own.num_heads
    kinds = types if isinstance(types, list) and len(types) == len(listed) else []
    counts: dict[object, set[object]] = {"full_attention": set(), "sliding_attention": set()}
    for kind, count in zip(kinds, listed, strict=False):
        counts.setdefault(str(kind), set()).add(count)
    full, windowed = counts["full_attention"], counts["sliding_attention"] or {own.num_heads}
    numbers = [*full, *windowed]
    if (
        len(full) != 1
        or len(windowed) != 1
        or any(type(each) is not int or each < 1 for each in numbers)
    ):
        raise ValueError(
            "num_attention_heads_per_layer must have one number for all layers of a kind in layer_types, "
            f"got {listed!r}"
        )
    first, second = (int(str(each)) for each in numbers)
    return msgspec.structs.replace(own, num_heads=first), second


def _of_full_layers(fields: Fields) -> Fields:
    """Return the fields that only layers with full attention have.

    transformers 5 saves them in `per_layer_config`, once for each of these layers.

    Raises:
        ValueError: other layers have their own fields, or these layers differ.
    """
    names = ("global_head_dim", "num_global_key_value_heads")
    own = {name: fields.value(name) for name in names if fields.has(name)}
    fields.read.update(names)
    layers = fields.value("per_layer_config")
    if not isinstance(layers, dict) or not layers:
        return Fields(own)
    types, tables = fields.table.get("layer_types"), list(layers.values())
    full = (
        {str(at) for at, kind in enumerate(types) if kind == "full_attention"}
        if isinstance(types, list)
        else set()
    )
    first = tables[0]
    is_known = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
    if not is_known or full != layers.keys() or any(each != first for each in tables):
        raise ValueError(
            "per_layer_config is understood only as head_dim and num_key_value_heads of all layers with full attention"
        )
    return Fields(first)


def _num_kv_heads(fields: Fields, known: ModelType, num_heads: int) -> int:
    if not known.needs_kv_heads and not fields.has("num_key_value_heads"):
        fields.read.add("num_key_value_heads")
        if known is UNKNOWN:
            fields.assume(f"no num_key_value_heads: as many as heads, {num_heads}")
        return num_heads
    return fields.count("num_key_value_heads")


def _head_dim(fields: Fields, num_heads: int) -> int:
    """Return the channels of a head; the default is `hidden_size` / heads."""
    if fields.has("head_dim", "attention_head_dim"):
        return fields.count("head_dim", "attention_head_dim")
    fields.read.update(("head_dim", "attention_head_dim"))
    hidden_size = fields.count("hidden_size")
    if hidden_size % num_heads:
        raise ValueError(
            f"num_attention_heads must divide hidden_size {hidden_size}, got {num_heads}"
        )
    return hidden_size // num_heads


def _latent(fields: Fields) -> LatentAttention | None:
    if not fields.has("kv_lora_rank") and "q_lora_rank" not in fields.table:
        return None
    has_rank = fields.table.get("q_lora_rank") is not None
    fields.read.add("q_lora_rank")
    return LatentAttention(
        q_lora_rank=fields.count("q_lora_rank") if has_rank else None,
        kv_lora_rank=fields.count("kv_lora_rank"),
        rope_head_dim=fields.count("qk_rope_head_dim"),
        nope_head_dim=fields.count("qk_nope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
    )


def _entries(fields: Fields) -> dict[str, int] | None:
    """Return the layers by the entries that they attend to; None without compressed attention.

    `compress_ratios` may also name the draft layers, after all others.

    Raises:
        ValueError: the kind of a layer is not known, or is not stated.
    """
    ratios, types = fields.words("compress_ratios"), fields.value("layer_types")
    is_named = isinstance(types, list) and any(f"{each}".endswith(COMPRESSED) for each in types)
    if ratios is None and not is_named and not fields.has("compress_rates"):
        return None
    total = fields.count("num_hidden_layers", "n_layer", "num_layers")
    if isinstance(types, list):
        kinds = _kinds(types, ENTRY_TYPES, "layer_types")
    elif ratios is not None:
        drafts = fields.count_or(0, "num_nextn_predict_layers")
        named = ratios[:total] if len(ratios) == total + drafts else ratios
        return _of_marks("compress_ratios", named, total, ENTRY_RATIOS)
    else:
        raise ValueError(
            "compress_rates needs layer_types or compress_ratios, which name the kind of each layer"
        )
    if len(kinds) != total:
        raise ValueError(f"layer_types must name {total} layers, got {len(kinds)}")
    return {kind: kinds.count(kind) for kind in ENTRY_TYPES.values()}


def _compressed(fields: Fields, entries: Mapping[str, int]) -> CompressedAttention:
    """Return the attention of a model whose layers attend to a window and to entries."""
    rates = fields.value("compress_rates")
    rates = Fields(rates if isinstance(rates, dict) else {})
    return CompressedAttention(
        num_sparse_layers=entries[SPARSE_ENTRIES],
        sparse_ratio=rates.count_or(4, "compressed_sparse_attention", least=1),
        num_dense_layers=entries[DENSE_ENTRIES],
        dense_ratio=rates.count_or(128, "heavily_compressed_attention", least=1),
        q_lora_rank=fields.count("q_lora_rank"),
        rope_head_dim=_rope_head_dim(fields),
        output_groups=fields.count("o_groups"),
        output_rank=fields.count("o_lora_rank"),
        indexer=Indexer(
            num_heads=fields.count("index_n_heads"),
            head_dim=fields.count("index_head_dim"),
            top_k=fields.count("index_topk"),
        ),
    )


def _rope_head_dim(fields: Fields) -> int:
    """Return the channels of a head with the position, stated as a number or as a share of the head."""
    share = fields.value("partial_rotary_factor")
    if fields.has("qk_rope_head_dim") or not isinstance(share, float):
        return fields.count("qk_rope_head_dim")
    return round(fields.count("head_dim") * share)


def _hyper_connections(fields: Fields) -> HyperConnections | None:
    """Return the residual streams of a model with hyper-connections; None for a plain residual connection."""
    fields.read.update(("hc_sinkhorn_iters", "hc_eps", "num_hash_layers"))
    if not fields.has("hc_mult"):
        return None
    return HyperConnections(num_streams=fields.count("hc_mult"))


def _indexer(fields: Fields, num_layers: int) -> Indexer | None:
    if not fields.has("index_topk"):
        return None
    return Indexer(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        top_k=fields.count("index_topk"),
        num_layers=_num_indexers(fields, num_layers),
    )


def _num_indexers(fields: Fields, num_layers: int) -> int | None:
    """Return the layers with an indexer of their own; None for all. The others take the tokens of one before them."""
    types, pattern = fields.value("indexer_types"), fields.value("index_topk_pattern")
    every = fields.count_or(1, "index_topk_freq", least=1)
    offset = fields.count_or(2, "index_skip_topk_offset")
    if isinstance(types, list):
        own = len(_of_names("indexer_types", types, num_layers, ("full", "shared"), "full"))
    elif isinstance(pattern, str):
        own = len(_of_names("index_topk_pattern", [*pattern], num_layers, ("F", "S"), "F"))
    elif pattern is not None or types is not None:
        raise ValueError(f"indexer_types must be a list, got {types or pattern!r}")
    else:
        own = sum(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))
    return None if own == num_layers else own


def _qk_norm(fields: Fields, known: ModelType) -> str:
    """Return over what queries and keys are normed: "none", "head" or "heads"."""
    if known.qk_norm in ("head", "heads"):
        fields.read.update(QK_NORM)
        return known.qk_norm
    if known.qk_norm == "none":
        return "none"
    has_norm = fields.flag(*QK_NORM)
    if fields.value("qk_norm_type") == "per_layer":
        return "heads" if has_norm else "none"
    return "head" if has_norm else "none"


def _has_head_gates(fields: Fields, known: ModelType) -> bool:
    """Return whether attention has a gate for each head.

    Raises:
        ValueError: `gating` asks for other gates.
    """
    if not known.has_head_gates:
        return False
    gating = fields.value("gating")
    if gating not in (None, True, "per-head"):
        raise ValueError(
            f"gating must be true or 'per-head', got {gating!r}; a gate for each head would be assumed"
        )
    return True


def _biases(fields: Fields, known: ModelType) -> tuple[bool, bool]:
    """Return whether queries, keys and values have biases, and whether the output has one."""
    stated = fields.flag("attention_bias", "use_qkv_bias", "qkv_bias", "attention_qkv_bias")
    own = known.has_qkv_bias, known.has_output_bias
    return (stated if own[0] is None else own[0], stated if own[1] is None else own[1])


# Linear attention ---------------------------------------------------------------------------------


def _linear(fields: Fields, num_layers: int) -> LinearAttention | None:
    if not num_layers:
        return None
    config = fields.part("linear_attn_config")
    if config is not None:
        fields.read.update(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        return _kimi_delta(Fields(config), num_layers)
    if fields.has("linear_num_heads"):
        return _kimi_delta(fields, num_layers)
    if fields.has("ssm_state_size", "mamba_num_heads"):
        return _mamba(fields, num_layers)
    return LinearAttention(
        num_layers=num_layers,
        num_key_heads=fields.count("linear_num_key_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        num_value_heads=fields.count("linear_num_value_heads"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_kernel=fields.count("linear_conv_kernel_dim"),
    )


def _kimi_delta(config: Fields, num_layers: int) -> LinearAttention:
    """Return Kimi's layers, from `linear_attn_config` or from the `linear_*` fields that transformers 5 saves."""
    own = "num_heads" in config.table
    heads = config.count("num_heads" if own else "linear_num_heads")
    channels = config.count("head_dim" if own else "linear_head_dim")
    kernel = "short_conv_kernel_size" if own else "linear_conv_kernel_dim"
    return LinearAttention(
        kind="kimi-delta",
        num_layers=num_layers,
        num_key_heads=heads,
        key_head_dim=channels,
        num_value_heads=heads,
        value_head_dim=channels,
        conv_kernel=config.count(kernel),
    )


def _mamba(fields: Fields, num_layers: int) -> LinearAttention:
    """Return Mamba-2 layers: groups are key heads, and states have `ssm_state_size` channels of a key."""
    if not fields.flag("use_conv_bias", default=True):
        raise ValueError("use_conv_bias = false is not understood; a bias would be assumed")
    fields.read.update(("mamba_ssm_cache_dtype", "mamba_hidden_act"))
    if fields.table.get("mamba_ssm_cache_dtype") != "float32":
        fields.assume("states of Mamba-2 layers are in float32")
    return LinearAttention(
        kind="mamba-2",
        num_layers=num_layers,
        num_key_heads=fields.count("n_groups", "mamba_n_groups"),
        key_head_dim=fields.count("ssm_state_size"),
        num_value_heads=fields.count("mamba_num_heads"),
        value_head_dim=fields.count("mamba_head_dim"),
        conv_kernel=fields.count("conv_kernel"),
    )


# MLPs and experts ---------------------------------------------------------------------------------


def _has_gate(fields: Fields, known: ModelType) -> bool:
    """Return whether MLPs have a gate.

    Raises:
        ValueError: the type is unknown, and its activation is used with and without gates.
    """
    stated = fields.value(*(key for key in ACTIVATION if fields.has(key)))
    if known.has_gate is not None:
        return known.has_gate
    if stated is None:
        fields.assume("no hidden_act: MLPs have a gate")
        return True
    if stated not in GATED:
        raise ValueError(
            f"hidden_act = {stated!r} of an unknown model_type does not tell whether MLPs have a gate; "
            "a gate would be assumed"
        )
    return True


def _experts(
    fields: Fields, known: ModelType, num_layers: int, mixing: Mixing, *, has_gate: bool
) -> Experts | None:
    if mixing.blocks is not None and not mixing.blocks[MIXTURE]:
        return None
    if not fields.has(*NUM_EXPERTS) and not fields.has(*EXPERTS_PER_TOKEN):
        return None
    width = _expert_width(fields, known)
    if mixing.blocks is not None:
        num_dense = mixing.blocks[DENSE]
    else:
        num_dense = _num_dense_layers(fields, num_layers)
    return Experts(
        num_experts=fields.count(*_named_first(fields, NUM_EXPERTS)),
        experts_per_token=fields.count(*_named_first(fields, EXPERTS_PER_TOKEN)),
        intermediate_size=width,
        num_shared_experts=_num_shared_experts(fields, known, width),
        num_dense_layers=num_dense,
        has_router_bias=_has_router_bias(fields, known),
        has_bias=known.has_expert_bias,
        has_shared_gate=known.has_shared_gate,
        has_gate=has_gate,
        latent_size=_latent_size(fields),
    )


def _named_first(fields: Fields, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names with those first that the file has."""
    return tuple(sorted(names, key=lambda name: name not in fields.table))


def _latent_size(fields: Fields) -> int | None:
    return fields.count("moe_latent_size") if fields.has("moe_latent_size") else None


def _has_router_bias(fields: Fields, known: ModelType) -> bool:
    """Return whether each expert has a bias or a scale in the router."""
    stated = fields.flag("use_routing_bias") or fields.flag("enable_moe_block")
    return known.has_router_bias or stated or fields.table.get("topk_method") == "noaux_tc"


def _expert_width(fields: Fields, known: ModelType) -> int:
    if known.expert_width == "intermediate_size":
        return fields.count("intermediate_size")
    if known is UNKNOWN and not fields.has("moe_intermediate_size"):
        fields.assume("no moe_intermediate_size: experts have intermediate_size channels")
        return fields.count("intermediate_size")
    return fields.count("moe_intermediate_size")


def _dense_width(fields: Fields, known: ModelType, experts: Experts | None) -> int:
    """Return the channels of a plain MLP; those of an expert if there is none."""
    if known.dense_width in fields.table or experts is None:
        return fields.count(known.dense_width)
    fields.read.add("intermediate_size")
    if experts.num_dense_layers:
        return fields.count("intermediate_size")
    return fields.count_or(experts.intermediate_size, "intermediate_size", least=1)


def _num_shared_experts(fields: Fields, known: ModelType, width: int) -> int:
    """Return the shared experts, in experts of the routed ones' width.

    Raises:
        ValueError: their width is no multiple of it.
    """
    number = fields.count_or(0, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    if fields.flag(
        "enable_moe_block"
    ):  # Gemma 4: the plain MLP of each layer processes every token
        return _multiple(fields, "intermediate_size", width)
    for name in SHARED_WIDTH:
        if fields.count_or(0, name):
            fields.read.update(SHARED_WIDTH)
            return _multiple(fields, name, width)
    return number or known.num_shared_experts


def _multiple(fields: Fields, name: str, width: int) -> int:
    shared = fields.count(name)
    if shared % width:
        raise ValueError(
            f"{name} must be a multiple of moe_intermediate_size {width}, got {shared}"
        )
    return shared // width


def _num_dense_layers(fields: Fields, total: int) -> int:
    """Return the number of layers with a plain MLP."""
    first = fields.count_or(0, "first_k_dense_replace", "moe_layer_start_index")
    fields.read.update(("moe_layer_freq", "interleave_moe_layer_step"))
    if (kinds := fields.words("mlp_layer_types")) is not None:
        return len(_of_names("mlp_layer_types", kinds, total, BLOCKS, "dense"))
    if isinstance(fields.table.get("moe_layer_freq"), list):
        marks = fields.words("moe_layer_freq") or []
        return _of_marks("moe_layer_freq", marks, total, {0: DENSE, 1: MIXTURE})[DENSE]
    if named := fields.words("moe_layers"):
        return total - len(named)
    listed = fields.words("mlp_only_layers") or []
    if any(type(each) is not int or not 0 <= each < total for each in listed):
        raise ValueError(f"mlp_only_layers must name layers below {total}, got {listed!r}")
    every = fields.count_or(1, "moe_layer_freq", least=1)
    step = fields.count_or(1, "decoder_sparse_step", "interleave_moe_layer_step", least=1)
    if (every, step, listed) == (1, 1, []):
        return first
    mixtures = (
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in listed
        for layer in range(total)
    )
    return total - sum(mixtures)


def _of_names(
    name: str, values: list[object], total: int, known: tuple[str, ...], wanted: str
) -> list[object]:
    """Return the values of a list of names that are the wanted one."""
    if len(values) != total or any(each not in known for each in values):
        raise ValueError(
            f"{name} must be {' or '.join(known)} for each of {total} layers, got {values!r}"
        )
    return [each for each in values if each == wanted]


BLOCKS = ("dense", "sparse", "moe", "hash_moe")
"""Kinds in `mlp_layer_types`. A router with a table of tokens (`hash_moe`) has as many parameters as any other."""

# The rest -----------------------------------------------------------------------------------------


def _is_tied(fields: Fields, known: ModelType) -> bool:
    """Return whether the output head is the embedding."""
    return fields.flag("tie_word_embeddings", default=bool(known.is_tied))


def _check_head(fields: Fields, known: ModelType, shape: ModelShape) -> None:
    """Note that a separate output head is assumed.

    Raises:
        ValueError: the head is more than `SMALL_HEAD` of the model.
    """
    if known.is_tied is not None or fields.has("tie_word_embeddings"):
        return
    if shape.num_embedding_parameters > SMALL_HEAD * shape.num_parameters:
        raise ValueError(
            "tie_word_embeddings is missing, and this model_type is unknown; a separate output head would be assumed"
        )
    fields.assume("no tie_word_embeddings: a separate output head")


def _num_draft_layers(fields: Fields, known: ModelType) -> int:
    """Return the number of layers for multi-token prediction."""
    keys = (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "mtp_num_layers",
    )
    number = fields.count_or(known.num_draft_layers, *keys)
    return number * fields.count_or(1, "mtp_transformer_layers", least=1)

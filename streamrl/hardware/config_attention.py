"""Read the attention of a config.json: heads, latent and sparse attention, compressed tokens, norms and biases."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streamrl.hardware.compressed_attention import CompressedAttention, HyperConnections
from streamrl.hardware.config_fields import Fields
from streamrl.hardware.config_layers import (
    DENSE_ENTRIES,
    SPARSE_ENTRIES,
    Mixing,
    of_marks,
    of_names,
)
from streamrl.hardware.indexer import Indexer
from streamrl.hardware.model_shape import LatentAttention, WindowHeads
from streamrl.hardware.model_types import UNKNOWN, ModelType

QK_NORM = ("use_qk_norm", "qk_norm", "qk_layernorm")
ATTENTION_BIAS = (
    "attention_bias",
    "use_qkv_bias",
    "qkv_bias",
    "attention_qkv_bias",
    "add_qkv_bias",
)
UNUSED_OF_BLOCKS = (
    *("use_sparse_attention", "sparse_disable_index_value", "sparse_init_block"),
    *("index_local_blocks", "sparse_score_type"),
)
"""Fields that change which blocks MiniMax-M3 chooses, but not how many."""


def attention_heads(
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


def heads_by_kind(
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
        {at for at, kind in enumerate(types) if kind == "full_attention"}
        if isinstance(types, list)
        else set()
    )
    named = {int(at) for at in layers if at.isdecimal()}  # as "5" or as "05"
    first = tables[0]
    is_known = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
    if not is_known or full != named or any(each != first for each in tables):
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


def latent_attention(fields: Fields) -> LatentAttention | None:
    """Return latent attention; None for a model without it."""
    if not fields.has("kv_lora_rank", "q_lora_rank"):
        fields.read.update(("kv_lora_rank", "q_lora_rank"))
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


def compressed_attention(fields: Fields, entries: Mapping[str, int]) -> CompressedAttention:
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


def hyper_connections(fields: Fields) -> HyperConnections | None:
    """Return the residual streams of a model with hyper-connections; None for a plain residual connection."""
    fields.read.update(("hc_sinkhorn_iters", "hc_eps", "num_hash_layers"))
    if not fields.has("hc_mult"):
        return None
    return HyperConnections(num_streams=fields.count("hc_mult"))


def token_indexer(fields: Fields, num_layers: int) -> Indexer | None:
    """Return the indexer of sparse attention; None for a model without one."""
    if fields.has("index_topk_blocks"):
        return _block_indexer(fields, num_layers)
    if not fields.has("index_topk"):
        return None
    return Indexer(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        top_k=fields.count("index_topk"),
        num_layers=_num_indexers(fields, num_layers),
    )


def _block_indexer(fields: Fields, num_layers: int) -> Indexer:
    """Return the indexer of MiniMax-M3, which chooses blocks of tokens. Some layers attend to all tokens."""
    fields.read.update(UNUSED_OF_BLOCKS)
    marks, types = fields.words("sparse_attention_freq"), fields.words("layer_types")
    size = fields.count("index_block_size")
    if marks is not None:
        kinds = {0: "full", 1: "sparse"}
        own = of_marks("sparse_attention_freq", marks, num_layers, kinds)["sparse"]
    else:
        own = (types or []).count("minimax_m3_sparse")
    if not own:
        raise ValueError("index_topk_blocks needs sparse_attention_freq with sparse layers")
    fields.assume("index keys of sparse attention are kept in 16 bits")
    return Indexer(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        top_k=fields.count("index_topk_blocks") * size,
        num_layers=None if own == num_layers else own,
        block_size=size,
    )


def _num_indexers(fields: Fields, num_layers: int) -> int | None:
    """Return the layers with an indexer of their own; None for all. The others take the tokens of one before them."""
    types, pattern = fields.value("indexer_types"), fields.value("index_topk_pattern")
    every = fields.count_or(1, "index_topk_freq", least=1)
    offset = fields.count_or(2, "index_skip_topk_offset")
    if isinstance(types, list):
        own = len(of_names("indexer_types", types, num_layers, ("full", "shared"), "full"))
    elif isinstance(pattern, str):
        own = len(of_names("index_topk_pattern", [*pattern], num_layers, ("F", "S"), "F"))
    elif pattern is not None or types is not None:
        raise ValueError(f"indexer_types must be a list, got {types or pattern!r}")
    else:
        own = sum(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))
    return None if own == num_layers else own


def normed_over(fields: Fields, known: ModelType) -> str:
    """Return over what queries and keys are normed: "none", "head" or "heads"."""
    if known.qk_norm in ("head", "heads"):
        fields.read.update(QK_NORM)
        return known.qk_norm
    if known.qk_norm == "none":
        return "none"
    has_norm = fields.flag(*QK_NORM)
    if fields.value("qk_norm_type") == "per_layer":  # "per_head" is the usual norm
        return "heads" if has_norm else "none"
    return "head" if has_norm else "none"


def has_head_gates(fields: Fields, known: ModelType) -> bool:
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


def attention_biases(fields: Fields, known: ModelType) -> tuple[bool, bool]:
    """Return whether queries, keys and values have biases, and whether the output has one."""
    stated = fields.flag(*ATTENTION_BIAS)
    own = known.has_qkv_bias, known.has_output_bias
    if known.has_linear_bias is not None:
        stated = fields.flag("use_bias", "bias", default=known.has_linear_bias)
    return (stated if own[0] is None else own[0], stated if own[1] is None else own[1])

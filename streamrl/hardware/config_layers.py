"""Read the kinds of layers of a config.json: what mixes tokens in each, and which layers have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from streamrl.hardware.config_fields import Fields
from streamrl.hardware.config_names import block_parts
from streamrl.hardware.model_types import ModelType
from streamrl.runfile.errors import shown

MOST_LAYERS = 10_000
"""More layers than any model has."""
FULL, SLIDING, LINEAR, DENSE, MIXTURE = "full", "sliding", "linear", "dense", "mixture"
LAYER_KINDS = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "linear_attention": LINEAR,
    "chunked_attention": SLIDING,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "minimax_m3_sparse": FULL,
    "attention": FULL,
    "mamba": LINEAR,
    "conv": LINEAR,
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
    unmixed: int = 0
    """Number of layers with an MLP alone, of a model whose other layers have both."""
    bare: int = 0
    """Number of layers with attention alone, of such a model."""
    is_parallel: bool = False
    """Whether each layer has both full attention and linear attention (Falcon-H1)."""

    @property
    def num_unmixed(self) -> int:
        """Number of layers that mix no tokens."""
        return self.unmixed + sum((self.blocks or {}).values())

    @property
    def num_layers(self) -> int:
        """Number of all layers."""
        linear = 0 if self.is_parallel else self.linear
        return self.full + self.sliding + linear + self.num_unmixed


def token_mixing(fields: Fields, known: ModelType) -> Mixing:
    """Return the number of layers of each kind, from the first field that tells it."""
    if (blocks := _blocks(fields)) is not None:
        return blocks
    total = fields.count("num_hidden_layers")
    if total > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {total}")
    if (listed := fields.words("block_configs")) is not None:
        full, bare = (total - len([*block_parts(listed, name)]) for name in ("attention", "ffn"))
        return Mixing(total - full, unmixed=full, bare=bare)
    if known.has_parallel_mamba:
        fields.read.add("attn_layer_indices")
        return Mixing(total, linear=total, is_parallel=True)
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
    if stated is None or _names_whole_layers(stated):
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


def _names_whole_layers(stated: object) -> bool:
    """Return whether a list names what mixes tokens alone: each layer then has an MLP too (Bamba)."""
    whole = ("mamba", "attention", "linear_attention", "full_attention")
    return isinstance(stated, list) and bool(stated) and all(each in whole for each in stated)


def _kinds(values: list[object], known: Mapping[str, str], name: str) -> list[str]:
    kinds = [known.get(each) if isinstance(each, str) else None for each in values]
    if None in kinds:
        wrong = values[kinds.index(None)]
        raise ValueError(f"{name} must name only {', '.join(known)}, got {wrong!r}")
    return [kind for kind in kinds if kind is not None]


def _stated_kinds(fields: Fields, known: ModelType, total: int) -> dict[str, int] | None:
    """Return the number of layers of each kind; None if the file names none."""
    types = fields.words("layer_types") or fields.words("layers_block_type")
    linear = fields.part("linear_attn_config")
    pattern = fields.words("hybrid_layer_pattern")
    fields.read.update(
        ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern")
    )
    if (entries := compressed_layers(fields)) is not None:
        return {FULL: entries[SPARSE_ENTRIES] + entries[DENSE_ENTRIES], **entries}
    if types is not None:
        drafts = fields.count_or(0, "num_nextn_predict_layers")
        fields.read.update(("attn_layer_indices", "full_attn_idxs"))
        return _of_layer_types(types[:total] if len(types) == total + drafts else types, total)
    if (
        indices := fields.words("attn_layer_indices") or fields.words("full_attn_idxs")
    ) is not None:
        return _of_indices(indices, total)
    if linear is not None:
        return _of_listed_layers(linear, total)
    if pattern is not None:
        return of_marks("hybrid_layer_pattern", pattern, total, {0: FULL, 1: SLIDING})
    if (marks := fields.words("attn_type_list")) is not None:
        return of_marks("attn_type_list", marks, total, {1: FULL})
    if fields.has("attention_chunk_size") and fields.value("model_type") == "llama4_text":
        return _of_chunks(fields, total)
    return _of_period(fields, known, total)


def _of_layer_types(types: list[object], total: int) -> dict[str, int]:
    unknown = [each for each in types if not isinstance(each, str) or each not in LAYER_KINDS]
    if unknown or len(types) != total:
        *most, last = LAYER_KINDS
        got = shown(unknown[0]) if unknown else f"{len(types)} names"
        raise ValueError(
            f"layer_types must name {', '.join(most)} or {last} for each of {total} layers, got {got}"
        )
    kinds = [LAYER_KINDS[str(each)] for each in types]
    return {kind: kinds.count(kind) for kind in (FULL, SLIDING, LINEAR)}


def _of_indices(indices: list[object], total: int) -> dict[str, int]:
    """Return the layers of a list of those with full attention; all others have linear attention."""
    if any(type(each) is not int or not 0 <= each < total for each in indices):
        raise ValueError(f"attn_layer_indices must name layers below {total}, got {shown(indices)}")
    return {FULL: len(set(indices)), LINEAR: total - len(set(indices))}


def _of_listed_layers(table: Mapping[str, object], total: int) -> dict[str, int]:
    """Return the layers of Kimi's `linear_attn_config`, which lists them by number."""
    lists = [table.get(key) for key in ("full_attn_layers", "kda_layers")]
    full, linear = (each if isinstance(each, list) else [] for each in lists)
    if sorted(map(repr, [*full, *linear])) != sorted(map(repr, range(1, total + 1))):
        raise ValueError(
            f"linear_attn_config must list each of {total} layers once in full_attn_layers or kda_layers"
        )
    return {FULL: len(full), LINEAR: len(linear)}


def compressed_layers(fields: Fields) -> dict[str, int] | None:
    """Return the layers by the entries that they attend to; None without compressed attention.

    `compress_ratios` may also name the draft layers, after all others.

    Raises:
        ValueError: the kind of a layer is not known, or is not stated.
    """
    ratios, types = fields.words("compress_ratios"), fields.value("layer_types")
    is_named = isinstance(types, list) and any(f"{each}".endswith(COMPRESSED) for each in types)
    if ratios is None and not is_named and not fields.has("compress_rates"):
        return None
    total = fields.count("num_hidden_layers")
    if isinstance(types, list):
        kinds = _kinds(types, ENTRY_TYPES, "layer_types")
    elif ratios is not None:
        drafts = fields.count_or(0, "num_nextn_predict_layers")
        named = ratios[:total] if len(ratios) == total + drafts else ratios
        return of_marks("compress_ratios", named, total, ENTRY_RATIOS)
    else:
        raise ValueError(
            "compress_rates needs layer_types or compress_ratios, which name the kind of each layer"
        )
    if len(kinds) != total:
        raise ValueError(f"layer_types must name {total} layers, got {len(kinds)}")
    return {kind: kinds.count(kind) for kind in ENTRY_TYPES.values()}


def _of_chunks(fields: Fields, total: int) -> dict[str, int]:
    """Return the layers of Llama 4: those with rotary positions attend within a chunk, all others to all tokens."""
    rotary = fields.words("no_rope_layers")
    if rotary:
        return of_marks("no_rope_layers", rotary, total, {0: FULL, 1: SLIDING})
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
    window, most = _stated_window(fields), fields.table.get("max_position_embeddings")
    if window is None or "use_sliding_window" in fields.table:
        return total
    if isinstance(window, int) and isinstance(most, int) and window >= most:
        return total
    raise ValueError(
        f"sliding_window = {window!r} is not understood without layer_types or use_sliding_window; full attention in "
        "all layers would be assumed"
    )


def _stated_window(fields: Fields) -> object:
    """Return the stated tokens of a window; None for -1, which some files have for no window."""
    window = fields.value("sliding_window", "sliding_window_size")
    return None if window == -1 else window


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


def of_marks(
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


def of_names(
    name: str, values: list[object], total: int, known: tuple[str, ...], wanted: str
) -> list[object]:
    """Return the values of a list of names that are the wanted one."""
    if len(values) != total or any(each not in known for each in values):
        raise ValueError(
            f"{name} must be {' or '.join(known)} for each of {total} layers, got {values!r}"
        )
    return [each for each in values if each == wanted]

"""Give the fields of a config.json their common names, where a family of models has its own.

| family            | names                                                                                      |
|-------------------|--------------------------------------------------------------------------------------------|
| ChatGLM, Step     | `num_layers`, `ffn_hidden_size`, `kv_channels`, `multi_query_group_num`, ...               |
| DBRX              | `d_model`, `n_heads`, `n_layers`, and objects: `attn_config`, `ffn_config`                 |
| LFM2              | `block_ff_dim`, from which the channels of an MLP are computed                             |
| MiniMax-M3        | `sparse_attention_config`                                                                  |
| Nemotron NAS      | `block_configs`: key-value heads and MLP of each layer                                     |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.runfile.errors import shown

NAMES = {
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("d_model", "n_embd"), "hidden_size"),
    **dict.fromkeys(
        ("kv_n_heads", "multi_query_group_num", "num_attention_groups"), "num_key_value_heads"
    ),
    **dict.fromkeys(("kv_channels", "attention_head_dim"), "head_dim"),
    **dict.fromkeys(("ffn_hidden_size", "block_ff_dim"), "intermediate_size"),
    "padded_vocab_size": "vocab_size",
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""The common name of a field by its other names."""
OBJECTS = ("attn_config", "ffn_config", "sparse_attention_config")
"""Objects whose fields belong to the model."""
OF_WINDOWS = ("num_attention_heads", "num_attention_groups", "head_dim")
"""Fields of Step's `attention_other_setting` that change a shape."""
MULTIPLE = 256
"""Channels of an MLP of Nemotron NAS are a multiple of it (`_find_multiple` in modeling_decilm.py on the hub)."""
NOT_UNDERSTOOD = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")
"""Fields of a block of Nemotron NAS that change what it computes."""


def common_names(table: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the fields with their common names, and what was assumed.

    Raises:
        ValueError: two names of a field have different values, or a block is not understood.
    """
    parts = [part for name in OBJECTS if isinstance(part := table.get(name), dict)]
    fields = {name: value for name, value in table.items() if not _is_lifted(name, value)}
    for part in parts:
        fields = {**{key: value for key, value in part.items() if key != "model_type"}, **fields}
    for name, common in NAMES.items():
        if (value := fields.get(name)) is None:
            continue
        if fields.get(common) not in (None, value):
            raise ValueError(
                f"{name} = {shown(value)} and {common} = {shown(fields[common])} mean the same and must be equal"
            )
        fields[common] = value
        del fields[name]
    if isinstance(other := fields.pop("attention_other_setting", None), dict):
        fields.update(_of_windows(other))
    if fields.get("block_auto_adjust_ff_dim"):
        fields["intermediate_size"] = _adjusted_width(fields)
    blocks = fields.get("block_configs")
    if not isinstance(blocks, list) or not blocks:
        return fields, []
    return _of_blocks(fields, blocks)


def _of_windows(setting: Mapping[str, object]) -> dict[str, object]:
    """Return the fields for layers with a window, of Step's object for the other kind of layers.

    Raises:
        ValueError: it is about another kind.
    """
    kind = setting.get("attention_type", "sliding_attention")
    if kind != "sliding_attention":
        raise ValueError(
            f"attention_other_setting.attention_type must be sliding_attention, got {kind!r}"
        )
    return {f"swa_{NAMES.get(key, key)}": setting[key] for key in OF_WINDOWS if key in setting}


def _is_lifted(name: str, value: object) -> bool:
    return name in OBJECTS and isinstance(value, dict)


def _adjusted_width(fields: Mapping[str, object]) -> object:
    """Return the channels of LFM2's MLP: two thirds of `block_ff_dim`, scaled and rounded up (Lfm2MLP in transformers)."""
    width, factor = fields.get("intermediate_size"), fields.get("block_ffn_dim_multiplier")
    multiple = fields.get("block_multiple_of")
    if type(width) is not int or type(multiple) is not int or multiple < 1:
        return width
    scale = factor if isinstance(factor, int | float) else 1.0
    return -(-int(scale * int(2 * width / 3)) // multiple) * multiple


def _of_blocks(
    fields: dict[str, object], blocks: list[object]
) -> tuple[dict[str, object], list[str]]:
    """Return the fields with the key-value heads of all blocks, and with the mean width of their MLPs."""
    total, heads = fields.get("num_hidden_layers"), fields.get("num_attention_heads")
    hidden = fields.get("hidden_size")
    if type(heads) is not int or type(hidden) is not int:
        raise ValueError("num_attention_heads and hidden_size must be whole numbers")
    if len(blocks) != total:
        raise ValueError(f"block_configs must have {total} blocks, got {len(blocks)}")
    groups = {part.get("n_heads_in_group") for part in block_parts(blocks, "attention")}
    widths = [_width(part.get("ffn_mult"), hidden) for part in block_parts(blocks, "ffn")]
    sizes = [group for group in groups if type(group) is int and group > 0]
    if len(groups) != 1 or len(sizes) != 1 or not widths:
        raise ValueError(
            f"block_configs must have one number for n_heads_in_group, got {shown(groups)}"
        )
    mean = round(sum(widths) / len(widths))
    known = {"num_key_value_heads": heads // sizes[0], "intermediate_size": mean}
    notes = []
    if len(set(widths)) > 1:
        told = f"MLPs of {len(set(widths))} widths count as {len(widths)} of their mean, {mean:,} channels"
        notes.append(told)
    return {**fields, **known}, notes


def block_parts(blocks: list[object], name: str) -> Iterator[Mapping[str, object]]:
    """Yield the part of that name of each block that has one.

    Raises:
        ValueError: a block is no object, or has a part that is not understood.
    """
    for block in blocks:
        part = block.get(name) if isinstance(block, dict) else None
        if not isinstance(part, dict):
            raise ValueError(f"block_configs must have {name} in each block, got {shown(block)}")
        if part.get("no_op"):
            continue
        if wrong := [key for key in NOT_UNDERSTOOD if part.get(key)]:
            raise ValueError(
                f"{wrong[0]} = {shown(part[wrong[0]])} in block_configs is not understood; {name} would be assumed"
            )
        yield part


def _width(factor: object, hidden: int) -> int:
    """Return the channels of an MLP (`_ffn_mult_to_intermediate_size` in modeling_decilm.py on the hub)."""
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        raise ValueError(f"ffn_mult in block_configs must be a positive number, got {factor!r}")
    return -(-int(2 * factor * hidden / 3) // MULTIPLE) * MULTIPLE

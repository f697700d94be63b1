"""Count the parameters of the vision tower in a config.json. Nothing simulates it."""

from __future__ import annotations

from collections.abc import Mapping

DEPTH = ("depth", "num_hidden_layers", "vt_num_hidden_layers")
HIDDEN = ("embed_dim", "hidden_size", "vt_hidden_size")
"""Channels of the tower. Next to `embed_dim`, `hidden_size` is that of the language model (Qwen2-VL)."""
MLP = ("intermediate_size", "vt_intermediate_size")
PATCH = ("patch_size", "vt_patch_size")


def vision_parameters(table: Mapping[str, object], text_size: int) -> int | None:
    """Return the parameters of a `vision_config`; None if it lacks a size.

    A layer has four products of attention, the products of an MLP, and their biases and norms. The tower also has
    patches, positions, and a projection to the `text_size` channels of the language model. This is exact for
    Qwen3-VL and Qwen3.5, and within 3 % for others.
    """
    sizes = [_size(table, names) for names in (DEPTH, HIDDEN, MLP, PATCH)]
    ratio = table.get("mlp_ratio")
    if sizes[2] is None and sizes[1] is not None and isinstance(ratio, int | float):
        sizes[2] = round(sizes[1] * ratio)
    if None in sizes:
        return None
    depth, hidden, mlp, patch = (size or 0 for size in sizes)
    is_gated = table.get("model_type") == "gemma4_vision" or "fullatt_block_indexes" in table
    layer = 4 * hidden * (hidden + 1) + 4 * hidden
    layer += 3 * hidden * mlp if is_gated else 2 * hidden * mlp + hidden + mlp
    frames = _size(table, ("temporal_patch_size",)) or 1
    patches = hidden * (3 * frames * patch**2 + 1)
    positions = hidden * _positions(table)
    return depth * layer + patches + positions + _projection(table, hidden, text_size)


def _positions(table: Mapping[str, object]) -> int:
    """Return the learned positions of patches."""
    if (stated := _size(table, ("num_position_embeddings",))) is not None:
        return stated
    if (grid := _size(table, ("position_embedding_size",))) is not None:
        return 2 * grid
    height, width = (_size(table, (f"init_pos_emb_{side}",)) or 0 for side in ("height", "width"))
    return height * width


def _projection(table: Mapping[str, object], hidden: int, text_size: int) -> int:
    """Return the parameters between tower and language model; each deep layer of Qwen3-VL has its own."""
    merge = _size(table, ("spatial_merge_size",)) or 1
    if isinstance(kernel := table.get("merge_kernel_size"), list) and kernel:
        merge = kernel[0] if isinstance(kernel[0], int) else 1
    wide = hidden * merge**2
    if merge == 1:
        return hidden * text_size
    products = wide * (wide + 1) + (wide + 1) * text_size
    deep = table.get("deepstack_visual_indexes")
    num_deep = len(deep) if isinstance(deep, list) else 0
    return products + 2 * hidden + num_deep * (products + 2 * wide)


def _size(table: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = table.get(name)
        if type(value) is int and value > 0:
            return value
    return None

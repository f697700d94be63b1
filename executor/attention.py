"""Call torch's attention so that a fused kernel can compute it.

Fused kernels on GPUs (torch 2.11 to 2.13, `sdp_utils.cpp`):

| kernel           | mask | float32 | grouped queries |
|------------------|------|---------|-----------------|
| flash attention  | no   | no      | yes             |
| memory-efficient | yes  | yes     | no              |

cuDNN's kernel takes masks and grouped queries in half precision, but `streamrl.executor.pretrained` disables it.
Without a fused kernel, torch computes the matrix of all attention scores, and training keeps it in memory.

Packed passes have many rollouts one after the other. `attend_packed` computes all of them in one call where a kernel for
sequences of different lengths exists, else in one call of `attend` for each:

| kernel                            | needs                                                                            |
|-----------------------------------|----------------------------------------------------------------------------------|
| torch.nn.attention.varlen         | a GPU, half precision, heads of at most 256 values in multiples of 8, torch 2.13 |
| flash_attn_varlen_func            | the same, and the package flash-attn instead of torch 2.13                       |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

MOST_HEAD, HEAD_STEP = 256, 8
"""Sizes of heads that flash attention computes (Dao-AILab/flash-attention, README)."""
VarlenKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "Bounds", tuple[int, int], int | None, float | None],
    torch.Tensor,
]
"""Returns causal attention of each sequence to itself, [tokens, heads, size].

The arguments are those of `attend_packed`, with query, key and value as [tokens, heads, size]. Bounds and the longest length
are those of queries and of keys. If a sequence has more keys than queries, its queries are the last tokens.
"""
Bounds = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """Return attention of shape (batch, heads, queries, size); `key` and `value` may have fewer heads (grouped queries)."""
    times = query.shape[1] // key.shape[1]
    if times > 1 and repeats(query, mask):
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def repeats(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether keys and values must be repeated, because no fused kernel supports grouped queries here."""
    if query.device.type != "cuda":
        return False
    return mask is not None or _computed_in(query) == torch.float32


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lengths: list[int],
    bounds: torch.Tensor,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Return causal attention of each sequence of a packed batch to itself, (1, tokens, heads, size).

    Args:
        query: (1, heads, tokens, size).
        key: the same shape, but for fewer heads with grouped queries.
        value: as `key`.
        lengths: tokens of each sequence.
        bounds: where each sequence starts, and the end of the last one, int32 on the device.
        window: number of tokens that each token attends to, itself included; None: all before it.
        scaling: factor of the scores; None: one over the root of the size.
    """
    kernel = varlen_kernel(query, value)
    if kernel is not None:
        dtype = _computed_in(query)
        of_query, of_key, of_value = (
            each[0].transpose(0, 1).to(dtype) for each in (query, key, value)
        )
        both, longest = (bounds, bounds), (max(lengths), max(lengths))
        return kernel(of_query, of_key, of_value, both, longest, window, scaling)[None]
    split = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    masks = (causal_mask(length, window, query.device) for length in lengths)
    attended = [
        attend(own_query, own_key, own_value, mask=mask, is_causal=mask is None, scaling=scaling)
        for own_query, own_key, own_value, mask in zip(*split, masks, strict=True)
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


class Segment(NamedTuple):
    """Queries of one sequence, next to each other, and the keys that they attend to. Both end at the same token."""

    queries: tuple[int, int]
    """First query, and the one after the last."""
    keys: tuple[int, int]


def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segments: list[Segment],
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Return causal attention of each segment's queries to its keys, (1, queries, heads, size).

    Args:
        query: (1, heads, queries, size).
        key: (1, heads, keys, size), with fewer heads for grouped queries.
        value: as `key`.
        segments: all queries, in order.
        window: as in `attend_packed`.
        scaling: as there.
    """
    kernel = varlen_kernel(query, value)
    if kernel is not None:
        dtype, device = _computed_in(query), query.device
        ranges = [torch.arange(*segment.keys) for segment in segments]
        taken = torch.cat(ranges).to(device)
        of_query, of_key, of_value = (
            each[0].transpose(0, 1).to(dtype)
            for each in (query, key[:, :, taken], value[:, :, taken])
        )
        queries = [end - first for (first, end), _ in segments]
        bounds = _bounds_of(queries, device), _bounds_of([len(each) for each in ranges], device)
        longest = max(queries), max(map(len, ranges))
        return kernel(of_query, of_key, of_value, bounds, longest, window, scaling)[None]
    attended = []
    for (first, end), (start, stop) in segments:
        mask = causal_mask(end - first, window, query.device, stop - start)
        attended.append(
            attend(
                query[:, :, first:end],
                key[:, :, start:stop],
                value[:, :, start:stop],
                mask=mask,
                is_causal=mask is None,
                scaling=scaling,
            )
        )
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous()


def _bounds_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Return where each sequence starts, and the end of the last one, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def varlen_kernel(query: torch.Tensor, value: torch.Tensor) -> VarlenKernel | None:
    """Return the kernel that computes sequences of different lengths in one call; None where there is none."""
    size = query.shape[-1]
    is_fit = size == value.shape[-1] and size <= MOST_HEAD and size % HEAD_STEP == 0
    if query.device.type != "cuda" or _computed_in(query) == torch.float32 or not is_fit:
        return None
    return _installed_kernel()


@cache
def _installed_kernel() -> VarlenKernel | None:
    if has_varlen():
        return _by_torch
    return _by_flash_attn if find_spec("flash_attn") is not None else None


def has_varlen() -> bool:
    """Return whether this torch has the kernel with grouped queries and windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"enable_gqa", "window_size", "scale"} <= inspect.signature(
        varlen_attn
    ).parameters.keys()


def _by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    longest: tuple[int, int],
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query,
        key,
        value,
        *bounds,
        *longest,
        scale=scaling,
        window_size=_before(window),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, torch.Tensor)  # without auxiliary results
    return attended


def _by_flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds,
    longest: tuple[int, int],
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    attended: torch.Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        *bounds,
        *longest,
        softmax_scale=scaling,
        causal=True,
        window_size=_before(window),
    )
    return attended


def _before(window: int | None) -> tuple[int, int]:
    """Return the tokens before and after a token that it attends to; -1: all."""
    return (-1 if window is None else window - 1, 0)


def causal_mask(
    length: int, window: int | None, device: torch.device, num_keys: int | None = None
) -> torch.Tensor | None:
    """Return the attention mask, (length, keys); None if it is the causal one of a whole sequence.

    The queries are the last tokens of the keys.
    """
    keys = length if num_keys is None else num_keys
    if keys == length and (window is None or length <= window):
        return None
    mask = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
    return mask if window is None else mask.triu(keys - length + 1 - window)


def _computed_in(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which attention to a tensor is computed."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype

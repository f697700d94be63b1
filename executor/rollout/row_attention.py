"""Attention of continuous batching where every sequence has a row of the cache to itself.

A page of the cache is as long as the longest rollout, so that the cache of a layer is a tensor (rows, tokens, heads,
size), in which a pass writes its new keys and values, and which attention reads where it lies: nothing is gathered for
a step. `RowAttention` says once a pass which row each sequence has; transformers' own way would gather all keys and
values by token, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from streamrl.executor.attention import attend

BY_ROW = "streamrl_by_row"
"""Name of our attention in transformers' registry."""
DENSE = 0.5
"""Share of the rows between the first and the last that decode, from which on the others are computed along: below
it rows are copied together."""


@dataclass(frozen=True, eq=False)
class RowPrefix:
    """A sequence that computes its prefix, or a part of it."""

    queries: slice
    row: int
    length: int
    """Keys that the last query attends to."""


@dataclass(frozen=True, eq=False)
class RowPass:
    """What attention does in every layer of a forward pass."""

    cache: Any
    """Of continuous batching."""
    written: torch.Tensor
    """(tokens,) where in the cache each token's keys and values go."""
    stride: int
    """Pages from a row's page of a layer to the next row's."""
    queries: torch.Tensor
    """(decoding,) the query of each sequence that decodes."""
    rows: torch.Tensor
    """(decoding,) its row."""
    span: slice
    """Rows that are read where they lie; empty where those of `rows` are copied together."""
    longest: int
    """Most keys of a decoding sequence."""
    mask: torch.Tensor
    """(rows read, 1, 1, longest) whether a place holds a key of the row's sequence."""
    prefixes: list[RowPrefix]


class AttentionsOwn:
    """A cache as a model gets it whose attention writes there itself: models from transformers 5.24 on ask it to, before they attend."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write nothing, and return what this pass has."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Return no length: continuous batching gives positions, where some models would count from what was there."""
        return 0


def attend_by_row(model: Any) -> Any:
    """Let a model whose continuous batching has one page a sequence attend by rows until you remove what this returns."""
    AttentionInterface.register(BY_ROW, row_attention)
    model.set_attn_implementation(BY_ROW)
    return model.register_forward_pre_hook(_plan, with_kwargs=True)


def _plan(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add to a forward pass of continuous batching what its attention does."""
    cache = kwargs["cache"]
    allocator = cache.layer_to_allocator[0]
    allocator.get_read_indices = _nowhere
    tokens_per_page = allocator.tokens_per_page
    stride = allocator.block_physical_stride // tokens_per_page
    written = kwargs["write_index"][allocator.index]
    ends = kwargs["cu_seq_lens_q"].long()
    last = written[ends[1:] - 1].long()
    rows, lengths = last // tokens_per_page // stride, last % tokens_per_page + 1
    is_decoding = ends.diff() == 1
    prefixes = [
        RowPrefix(slice(start, end), row, length)
        for start, end, row, length in torch.stack([ends[:-1], ends[1:], rows, lengths])[
            :, ~is_decoding
        ].T.tolist()
    ]
    decoding = _decoding(ends[:-1][is_decoding], rows[is_decoding], lengths[is_decoding])
    row_pass = RowPass(cache, written, stride, *decoding, prefixes)
    return args, {**kwargs, "cache": AttentionsOwn(cache), "row_pass": row_pass}


def _nowhere(*_: object) -> list[int]:
    """Return where a sequence's keys are gathered from: batches need no lists of that, which take long to make."""
    return []


def _decoding(
    queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, slice, int, torch.Tensor]:
    """Return the fields of `RowPass` from `queries` to `mask`."""
    if not len(rows):
        return queries, rows, slice(0, 0), 0, rows
    first, last, longest = int(rows.min()), int(rows.max()), int(lengths.max())
    span = slice(first, last + 1)
    if len(rows) < DENSE * (last + 1 - first):
        span = slice(0, 0)
    else:
        read = lengths.new_ones(last + 1 - first)  # one key, of whatever: no row may have none
        read[rows - first] = lengths
        lengths = read
    places = torch.arange(longest, device=rows.device)
    return queries, rows, span, longest, (places < lengths[:, None])[:, None, None]


def row_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed batch, `query` (1, heads, queries, size), over the keys and values of its rows.

    Those of this pass, `key` and `value`, are written there first. Returns (1, queries, heads, size).
    """
    ours: RowPass = kwargs["row_pass"]
    allocator = ours.cache.layer_to_allocator[module.layer_idx]
    pages = allocator.get_cache_for_block_table(module.layer_idx)
    for cached, new in zip(pages, (key, value), strict=True):
        cached.flatten(0, 1).index_copy_(0, ours.written, new[0].transpose(0, 1))
    keys, values = (cached[:: ours.stride] for cached in pages)
    queries = query[0].transpose(0, 1)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if len(ours.queries):
        output[ours.queries] = _attend_decoding(queries[ours.queries], keys, values, ours, scaling)
    for prefix in ours.prefixes:
        own_keys, own_values = (cached[prefix.row, : prefix.length] for cached in (keys, values))
        output[prefix.queries] = _attend_prefix(
            queries[prefix.queries], own_keys, own_values, scaling
        )
    return output[None], None


def _attend_decoding(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ours: RowPass,
    scaling: float | None,
) -> torch.Tensor:
    """One query a sequence, (sequences, heads, size), over the keys of its row."""
    num_groups = keys.shape[2]
    grouped = queries.view(len(queries), num_groups, -1, queries.shape[-1])
    in_place = ours.span.stop > 0
    read: slice | torch.Tensor = ours.span if in_place else ours.rows
    if in_place:
        places = ours.rows - ours.span.start
        spread = grouped.new_zeros(ours.span.stop - ours.span.start, *grouped.shape[1:])
        spread[places] = grouped
        grouped = spread
    attended = scaled_dot_product_attention(
        grouped,
        keys[read, : ours.longest].transpose(1, 2),
        values[read, : ours.longest].transpose(1, 2),
        attn_mask=ours.mask,
        scale=scaling,
    )
    if in_place:
        attended = attended[places]
    return attended.reshape(queries.shape)


def _attend_prefix(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The last queries of one sequence, (queries, heads, size), each over the keys up to its own."""
    behind, mask = len(keys) - len(queries), None
    if behind:
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device).tril(
            behind
        )
    heads = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    attended = attend(*heads, mask=mask, is_causal=not behind, scaling=scaling)
    return attended[0].transpose(0, 1)

"""Attention of a packed pass to a KV cache in which each sequence has its own row.

The cache of a layer is a tensor (rows, heads, tokens, size). A pass has the next token of the first rows, which decode,
and then parts of the prefixes of later rows. `RowPass.plan` decides once for each pass where its keys and values are
written. Every layer writes them there, and reads the keys and values of the first rows in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from streamrl.executor.attention import attend, causal_mask

BY_ROW = "streamrl_by_row"
"""Name of this attention in transformers' registry."""
PASS = "row_pass"
"""Keyword argument of a model's forward pass that has the plan."""


class RowCache:
    """Keys and values of all layers; a layer's tensors are allocated when it first writes to them."""

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.num_rows = num_rows
        self.max_length = max_length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By layer: keys and values, (rows, heads, tokens, size)."""
        self.plan: RowPass | None = None
        """Plan of the current pass."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, (1, heads, tokens, size), and return them, as a model calls its cache."""
        assert self.plan is not None, "a pass plans first"
        if layer not in self.layers:
            self.layers[layer] = self._allocate(keys), self._allocate(values)
        for cached, new in zip(self.layers[layer], (keys, values), strict=True):
            places = self.plan.places(cached.shape[1])
            cached.view(-1, cached.shape[-1]).index_copy_(0, places, new[0].flatten(0, 1))
        return keys, values

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another row."""
        for layer in self.layers.values():
            for cached in layer:
                cached[target, :, :length] = cached[source, :, :length]

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: a pass has positions, but some models would add the cached length to them."""
        return 0

    def _allocate(self, new: torch.Tensor) -> torch.Tensor:
        # Zeros: attention multiplies values of later positions by 0, which must not be infinite.
        return new.new_zeros(self.num_rows, new.shape[1], self.max_length, new.shape[-1])


class Prefix(NamedTuple):
    """Part of a sequence's prefix in a pass."""

    row: int
    start: int
    """Number of tokens before it."""
    length: int


@dataclass(frozen=True, eq=False)
class RowPass:
    """Plan of one forward pass, which attention uses in every layer."""

    cache: RowCache
    rows: torch.Tensor
    """(tokens,) row of each token."""
    positions: torch.Tensor
    """(tokens,) position of each token in its row."""
    num_decoding: int
    """Number of rows, from the first, that have one token in this pass; these are its first tokens."""
    longest: int
    """Largest number of keys of a decoding row."""
    prefixes: list[Prefix]
    """The other tokens."""
    _places: dict[int, torch.Tensor] = field(default_factory=dict)
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _biases: dict[tuple[int | None, int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        cache: RowCache,
        lengths: npt.NDArray[np.int64],
        prefixes: list[Prefix],
        device: torch.device,
    ) -> RowPass:
        """Plan a pass for decoding rows with `lengths` cached tokens each, and for parts of prefixes."""
        count = len(lengths)
        rows = [np.arange(count), *(np.full(each.length, each.row) for each in prefixes)]
        positions = [lengths, *(np.arange(each.length) + each.start for each in prefixes)]
        return cls(
            cache=cache,
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            num_decoding=count,
            longest=int(lengths.max(initial=-1)) + 1,
            prefixes=prefixes,
        )

    def places(self, num_heads: int) -> torch.Tensor:
        """Return where keys are written in a layer whose first three dimensions are flat, (heads * tokens,)."""
        if num_heads not in self._places:
            heads = torch.arange(num_heads, device=self.rows.device)[:, None]
            rows = self.rows * num_heads + heads
            self._places[num_heads] = (rows * self.cache.max_length + self.positions).flatten()
        return self._places[num_heads]

    def mask(self, window: int | None) -> torch.Tensor:
        """Return whether a decoding row attends to each position, (rows, 1, 1, longest)."""
        if window not in self._masks:
            own = self.positions[: self.num_decoding, None]
            positions = torch.arange(self.longest, device=own.device)
            is_read = positions <= own
            if window is not None:
                is_read &= positions > own - window
            self._masks[window] = is_read[:, None, None]
        return self._masks[window]

    def bias(self, window: int | None, num_heads: int, group: int) -> torch.Tensor:
        """Return the mask as a term of float32 scores, (rows * heads, group, longest)."""
        key = window, num_heads, group
        if key not in self._biases:
            mask = self.mask(window)
            term = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -math.inf)
            spread = term.expand(-1, num_heads, group, -1)
            self._biases[key] = spread.reshape(-1, group, self.longest)
        return self._biases[key]


def attend_by_row(model: Any) -> None:
    """Make a model attend by rows; its passes then need the argument `PASS` and a `RowCache`."""
    AttentionInterface.register(BY_ROW, row_attention)
    model.set_attn_implementation(BY_ROW)


def row_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a packed pass, `query` (1, heads, queries, size), to the cached rows of its sequences.

    `key` and `value` are those of this pass, which the cache has already. Return (1, queries, heads, size).
    """
    ours: RowPass = kwargs[PASS]
    keys, values = ours.cache.layers[module.layer_idx]
    parts, first = [], ours.num_decoding
    if first:
        parts.append(_decode(query[0, :, :first], keys, values, ours, scaling, sliding_window))
    # The rollouts of a group have prefixes of one length, and come one after the other.
    for (start, length), some in groupby(ours.prefixes, lambda each: (each.start, each.length)):
        rows = [each.row for each in some]
        end = first + len(rows) * length
        own = query[0, :, first:end].view(query.shape[1], len(rows), length, -1)
        reach = slice(rows[0], rows[-1] + 1), slice(None), slice(start + length)
        mask = causal_mask(length, sliding_window, query.device, start + length)
        attended = attend(
            own.transpose(0, 1),
            keys[reach],
            values[reach],
            mask=mask,
            is_causal=mask is None,
            scaling=scaling,
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
        first = end
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ours: RowPass,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend with one query for each of the first rows, (heads, rows, size), over the keys of its row.

    Return (rows, heads, size).
    """
    count, num_heads = query.shape[1], keys.shape[1]
    queries = query.transpose(0, 1).view(count, num_heads, -1, query.shape[-1])
    read = slice(count), slice(None), slice(ours.longest)
    if query.device.type != "cpu" or query.dtype != torch.float32:
        attended = scaled_dot_product_attention(
            queries, keys[read], values[read], attn_mask=ours.mask(window), scale=scaling
        )
        return attended.flatten(1, 2)
    # For single queries matrix products are faster than the CPU's fused kernel.
    scores = torch.baddbmm(
        ours.bias(window, num_heads, queries.shape[2]),
        queries.flatten(0, 1),
        keys[:count].flatten(0, 1)[:, : ours.longest].transpose(1, 2),
        alpha=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
    )
    attended = torch.bmm(
        scores.softmax(-1), values[:count].flatten(0, 1)[:, : ours.longest]
    )  # (rows * key heads, group, size)
    return attended.view(count, query.shape[0], -1)

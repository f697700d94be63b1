"""Attention over compressed tokens, and the residual streams around it (DeepSeek-V4, arXiv 2606.19348, section 2).

Every layer attends to the last tokens in a sliding window. Most layers also attend to entries. Each entry
compresses several tokens into one vector, which is both key and value of all heads.

| a layer attends to         | entries                        | keeps of a long rollout                     |
|----------------------------|--------------------------------|---------------------------------------------|
| the window alone           | none                           | the vectors of the window                   |
| chosen entries (sparse)    | the `top_k` that an index gives | also an entry and an index key per 4 tokens |
| all entries (dense)        | all                            | also an entry per 128 tokens                |

A compressor also keeps the tokens of the entry that is not complete, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.hardware.indexer import Indexer
from streamrl.hardware.profile_table import ProfileTable, check_positive

Floats: TypeAlias = NDArray[np.float64]
COMPRESSOR_BYTES = 4
"""Bytes of a value in the state of a compressor: float32 (vLLM's CompressorStateCache)."""
NARROW_SCALE_BYTES = 8
"""Bytes of the scales of an fp8 vector of 512 channels, whose rotary channels stay in 16 bits (vLLM's
DeepseekCompressor: 448 + 2 x 64 + 8 = 584 bytes)."""


class CompressedAttention(ProfileTable, frozen=True, kw_only=True):
    """Attention over a window and over entries that compress tokens (DeepSeek-V4, section 2.3)."""

    num_sparse_layers: int
    """Number of layers that attend to chosen entries."""
    sparse_ratio: int
    """Tokens of an entry in these layers. An entry also weighs the tokens of the entry before it."""
    num_dense_layers: int
    """Number of layers that attend to all entries."""
    dense_ratio: int
    """Tokens of an entry in these layers."""
    q_lora_rank: int
    """Size of the latent vector of queries."""
    rope_head_dim: int
    """Channels of a vector with the position."""
    output_groups: int
    """Groups of heads whose outputs are projected apart."""
    output_rank: int
    """Channels to which the output of each group is projected."""
    indexer: Indexer
    """The index of the sparse layers. It has compressed keys of its own."""

    def __post_init__(self) -> None:
        check_positive(self, ("num_sparse_layers", "num_dense_layers"))
        if self.indexer.num_layers is not None:
            raise ValueError(
                "compressed.indexer.num_layers must be left out: all sparse layers have one"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers with entries."""
        return self.num_sparse_layers + self.num_dense_layers

    @property
    def without_entries(self) -> CompressedAttention:
        """The attention of a layer that attends to the window alone, such as a draft layer."""
        return replace(self, num_sparse_layers=0, num_dense_layers=0)

    def seen_by(self, longest: int) -> CompressedAttention:
        """Return the attention for sequences of at most `longest` tokens: all entries if the index never leaves any out."""
        most = self.indexer.top_k
        if most is None or longest > most * self.sparse_ratio:
            return self
        return replace(self, indexer=replace(self.indexer, top_k=None))

    # Parameters ---------------------------------------------------------------------------------------

    def products(
        self, hidden_size: int, head_dim: int, queries: float, groups: float
    ) -> Iterator[tuple[float, float]]:
        """Yield (inputs, outputs) of the products that every layer has, as engines fuse them.

        The first makes latent queries and the vector of a token. Each group of heads has a part of the third one.

        Args:
            hidden_size: channels of the hidden state.
            head_dim: channels of a vector.
            queries: channels of the queries of all heads on a GPU.
            groups: groups of heads on a GPU.
        """
        yield hidden_size, self.q_lora_rank + head_dim
        yield self.q_lora_rank, queries
        yield queries / groups, groups * self.output_rank
        yield groups * self.output_rank, hidden_size

    def compressors(self, hidden_size: int, head_dim: int) -> Iterator[tuple[float, float, int]]:
        """Yield (inputs, outputs, layers) of the products of compressors and of the index; each GPU has all of them.

        One product makes vectors and their weights.
        """
        sparse, index = self.num_sparse_layers, self.indexer
        yield hidden_size, 2 * self._width(head_dim, is_sparse=True), sparse
        yield hidden_size, 2 * self._width(index.head_dim, is_sparse=True), sparse
        yield self.q_lora_rank, index.num_heads * index.head_dim, sparse
        yield hidden_size, index.num_heads, sparse
        yield hidden_size, 2 * self._width(head_dim, is_sparse=False), self.num_dense_layers

    def parameters(self, hidden_size: int, head_dim: int, num_heads: float, degree: int) -> float:
        """Return the parameters of one layer's attention without its compressor, on one of `degree` GPUs.

        The products to the latent vector of queries and to the vector of a token belong to no head, so every GPU
        has all of them.
        """
        queries, groups = num_heads * head_dim, self.output_groups / degree
        own = self.products(hidden_size, head_dim, queries, groups)
        products = sum(inner * outer for inner, outer in own)
        norms = self.q_lora_rank + head_dim
        return products + norms + num_heads

    def compressor_parameters(self, hidden_size: int, head_dim: int) -> tuple[int, int]:
        """Return the parameters of compressor and index in one sparse layer, and of the compressor in a dense one."""
        index = self.indexer
        queries = self.q_lora_rank * index.num_heads * index.head_dim
        indexed = queries + hidden_size * index.num_heads
        sparse = sum(
            self._compressor(hidden_size, channels, is_sparse=True)
            for channels in (head_dim, index.head_dim)
        )
        return sparse + indexed, self._compressor(hidden_size, head_dim, is_sparse=False)

    def _compressor(self, hidden_size: int, channels: int, *, is_sparse: bool) -> int:
        """Return the parameters of a compressor: products for vectors and weights, a bias by position, and a norm."""
        width = self._width(channels, is_sparse=is_sparse)
        ratio = self.sparse_ratio if is_sparse else self.dense_ratio
        return 2 * hidden_size * width + ratio * width + channels

    def _width(self, channels: int, *, is_sparse: bool) -> int:
        """Return the channels of a token in a compressor. Sparse layers have a vector for each of two entries."""
        return 2 * channels if is_sparse else channels

    # Cache --------------------------------------------------------------------------------------------

    def vector_bytes(self, head_dim: int, width: int) -> int:
        """Return the bytes of the vector of a token or of an entry, with `width` bytes a value."""
        if width > 1:
            return head_dim * width
        return head_dim - self.rope_head_dim + 2 * self.rope_head_dim + NARROW_SCALE_BYTES

    def token_bytes(self, head_dim: int, width: int) -> tuple[float, float]:
        """Return the bytes by which a token grows the cache of one sparse layer, and of one dense layer."""
        entry = self.vector_bytes(head_dim, width)
        sparse = (entry + self.indexer.cached_bytes) / self.sparse_ratio
        return sparse, entry / self.dense_ratio

    def state_bytes(self, head_dim: int) -> tuple[int, int]:
        """Return the bytes of compressors in one sparse layer, and in one dense layer.

        A compressor keeps vector and weight of each token that the next entry weighs.
        """
        sparse, dense = 2 * self.sparse_ratio, self.dense_ratio
        channels = 2 * (head_dim + self.indexer.head_dim)
        return (
            2 * sparse * channels * COMPRESSOR_BYTES,
            2 * dense * head_dim * COMPRESSOR_BYTES,
        )

    # Activations --------------------------------------------------------------------------------------

    def kept_channels(self, queries: int, head_dim: int) -> float:
        """Return the channels of a token that a mean layer's attention keeps for the backward pass.

        These are latent queries and the vector of the token before and after their norms, queries, outputs of
        heads and of groups, and the products of compressors and of the index.
        """
        own = (
            2 * self.q_lora_rank
            + 2 * head_dim
            + 2 * queries
            + self.output_groups * self.output_rank
        )
        layers = self.num_layers
        if not layers:
            return float(own)
        made = sum(outputs * count for _, outputs, count in self.compressors(1, head_dim))
        return own + made / layers

    # Arithmetic ---------------------------------------------------------------------------------------

    def pairs(self, num_tokens: float, context_pairs: float) -> tuple[float, float]:
        """Return the pairs of a token and an entry that it attends to, in one sparse layer and in one dense layer."""
        compressed = context_pairs / self.sparse_ratio
        most = self.indexer.top_k
        chosen = compressed if most is None else min(compressed, most * num_tokens)
        return chosen, context_pairs / self.dense_ratio

    def causal_shares(self, contexts: Floats) -> tuple[Floats, Floats]:
        """Return the pairs with entries relative to the pairs of causal attention, in a sparse and in a dense layer.

        The i-th token attends to i / ratio entries, in sparse layers to at most `top_k`.
        """
        ratio = self.sparse_ratio
        full = np.minimum(contexts, float(self.indexer.top_k or np.inf) * ratio)
        chosen = (full * full / 2 + full * (contexts - full)) / ratio
        return chosen / (contexts * contexts / 2), 0 * contexts + 1 / self.dense_ratio

    def score_flops(self, context_pairs: float) -> float:
        """Return the FLOPs of the index in one sparse layer."""
        return self.indexer.pair_flops * context_pairs / self.sparse_ratio


class HyperConnections(ProfileTable, frozen=True, kw_only=True):
    """Several residual streams that every block reads, writes and mixes (DeepSeek-V4, section 2.2)."""

    num_streams: int

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def num_weights(self) -> int:
        """Weights of a token at one block: to read the streams, to write them, and to mix them."""
        return (2 + self.num_streams) * self.num_streams

    def parameters(self, hidden_size: int, num_blocks: int) -> int:
        """Return the parameters of all blocks and of the head, which reads the streams. Every GPU has all of them.

        A block has a product, a bias and three scales, and the head a product, a bias and one scale.
        """
        channels = self.num_streams * hidden_size
        block = self.num_weights * (channels + 1) + 3
        return num_blocks * block + self.num_streams * (channels + 1) + 1

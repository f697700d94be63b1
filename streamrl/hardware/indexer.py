"""The indexer of sparse attention, which chooses the tokens or entries that a token attends to."""

from __future__ import annotations

from streamrl.hardware.profile_table import ProfileTable, check_positive

INDEX_KEY_SCALE_BYTES = 4
"""Bytes of the scale of an index key. Engines keep these keys in fp8, whatever the format of the KV cache is (vLLM's
DeepseekV32IndexerCache)."""


class Indexer(ProfileTable, frozen=True, kw_only=True):
    """The indexer of sparse attention: it chooses the tokens that a token attends to (DeepSeek-V3.2-Exp, section 2.1)."""

    num_heads: int
    head_dim: int
    top_k: int | None
    """Tokens that a token attends to; None if no sequence is longer."""
    num_layers: int | None = None
    """Number of layers with an indexer of their own; None for all. The others use the tokens of one before them, or
    attend to all tokens if `block_size` is given."""
    block_size: int | None = None
    """Tokens that are chosen together, from queries of the hidden state (MiniMax-M3). None for tokens that are chosen
    alone, from latent queries."""

    def share(self, num_layers: int) -> float:
        """Return the share of `num_layers` layers that have an indexer of their own."""
        return 1.0 if self.num_layers is None else self.num_layers / num_layers

    def __post_init__(self) -> None:
        check_positive(self)

    def products(self, hidden_size: int, q_lora_rank: int) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of its matrix products: queries, the key of a token, weights of heads."""
        queries = self.num_heads * self.head_dim
        if self.block_size is not None:
            return ((queries, hidden_size), (self.head_dim, hidden_size))
        return ((queries, q_lora_rank), (self.head_dim, hidden_size), (self.num_heads, hidden_size))

    def parameters(self, hidden_size: int, q_lora_rank: int) -> int:
        """Return the parameters in one layer, on every GPU.

        A norm of keys has weight and bias. With blocks, queries and keys have norms without bias.
        """
        products = self.products(hidden_size, q_lora_rank)
        return sum(outer * inner for outer, inner in products) + 2 * self.head_dim

    @property
    def cached_bytes(self) -> int:
        """Bytes of one index key in one layer. With blocks it is assumed to be in 16 bits."""
        if self.block_size is not None:
            return 2 * self.head_dim
        return self.head_dim + INDEX_KEY_SCALE_BYTES

    @property
    def pair_flops(self) -> float:
        """FLOPs of the score of one pair of tokens in one layer."""
        return 2.0 * self.num_heads * self.head_dim

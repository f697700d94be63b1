"""Inputs of each layer from an embedding of their own (Gemma 4 E4B)."""

from __future__ import annotations

from streamrl.hardware.profile_table import ProfileTable, check_positive


class LayerInputs(ProfileTable, frozen=True, kw_only=True):
    """A narrow vector for each layer, from a table of tokens and from the hidden state (Gemma4TextModel in transformers)."""

    vocab_size: int
    channels: int
    """Channels of the vector of one layer."""

    def __post_init__(self) -> None:
        check_positive(self)

    def table_parameters(self, num_layers: int) -> int:
        """Return the parameters of the table, of which a token reads one row."""
        return self.vocab_size * self.channels * num_layers

    def products(self, hidden_size: int, num_layers: int) -> tuple[tuple[int, int, int], ...]:
        """Return (inputs, outputs, number) of the products: one for all layers, then a gate and an output in each."""
        return (
            (hidden_size, self.channels * num_layers, 1),
            (hidden_size, self.channels, num_layers),
            (self.channels, hidden_size, num_layers),
        )

    def parameters(self, hidden_size: int, num_layers: int) -> int:
        """Return the parameters of products and norms, without the table."""
        products = self.products(hidden_size, num_layers)
        norms = self.channels + num_layers * hidden_size
        return sum(inner * outer * count for inner, outer, count in products) + norms

"""Linear attention: layers that keep a state of one size, however long the context is (gated delta nets, Qwen3-Next's).

A token's keys and values change a matrix of each value head, from which its queries read (Yang et al. 2024, Gated Delta
Networks, arXiv 2412.06464); queries, keys and values pass a short causal convolution first.
"""

from __future__ import annotations

from streamrl.hardware.profile_table import ProfileTable, check_positive

STATE_BYTES = 4
"""Bytes of a value of the state: float32, as the gated delta kernels of H20's tables update it at 2.2 TB/s."""


class LinearAttention(ProfileTable, frozen=True, kw_only=True):
    """The gated delta net that stands in for attention in some layers."""

    num_layers: int
    """Layers that have it."""
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        check_positive(self)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads must divide num_value_heads {self.num_value_heads}, got {self.num_key_heads}"
            )

    @property
    def key_dim(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values, of their gate, and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def mixed_dim(self) -> int:
        """Channels that the convolution mixes: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def projected_dim(self) -> int:
        """Channels that a token's hidden state is projected to: those, the gate, and two numbers for each value head."""
        return self.mixed_dim + self.value_dim + 2 * self.num_value_heads

    def projection_parameters(self, hidden_size: int) -> int:
        """Parameters of the two matrix products of one layer."""
        return hidden_size * (self.projected_dim + self.value_dim)

    def parameters(self, hidden_size: int, tensor_parallel: int = 1) -> float:
        """Parameters of one layer on one of `tensor_parallel` GPUs; the norm of a head is whole on each."""
        projections = self.projection_parameters(hidden_size)
        others = self.mixed_dim * self.conv_kernel + 2 * self.num_value_heads
        return (projections + others) / tensor_parallel + self.value_head_dim

    def state_bytes(self, width: int, tensor_parallel: int = 1) -> float:
        """Bytes that one rollout keeps in one layer on one GPU: states, and what the convolution looks back at."""
        states = self.num_value_heads * self.key_head_dim * self.value_head_dim * STATE_BYTES
        return (states + self.mixed_dim * (self.conv_kernel - 1) * width) / tensor_parallel

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in one layer: its key reads each state, changes it, and its query reads it."""
        return 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim

"""The shape of a decoder-only transformer, and the parameters, bytes and FLOPs that follow from it.

| a layer mixes tokens by  | fields                            | keeps of a token or a rollout               |
|--------------------------|-----------------------------------|---------------------------------------------|
| full attention           | `num_heads`, `num_kv_heads`, ...  | keys and values of each token               |
| a sliding window         | `sliding_window`, `window_heads`  | keys and values of the window               |
| latent attention         | `latent`                          | one latent vector of each token             |
| sparse attention         | `indexer`, with `latent`          | the same, and an index key of each token    |
| attention to entries     | `compressed`                      | the window, and an entry of several tokens  |
| linear attention         | `linear`                          | one state of constant size for each rollout |
| a short convolution      | `linear`                          | the channels of the last tokens             |
| nothing                  | `num_unmixed_layers`              | nothing                                     |

A linear-attention layer keeps a state of constant size, however long the context is. Each value
head has a state matrix. The keys and values of a token update it, and queries read from it (Yang et
al. 2024, Gated Delta Networks, arXiv 2412.06464). Queries, keys and values first pass a short
causal convolution. A Mamba-2 layer has the same parts: its groups are the key heads, B and C are
the keys and queries, and x are the values (Dao and Gu 2024, arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, assert_never

from msgspec.structs import replace

from streamrl.hardware.compressed_attention import CompressedAttention, HyperConnections
from streamrl.hardware.indexer import Indexer
from streamrl.hardware.layer_inputs import LayerInputs
from streamrl.hardware.profile_table import ProfileTable, check_positive

MEASURED_STATE = 128 * 128
"""Values in the state of one head of the measured kernels."""
STATE_BYTES = 4
"""Bytes of a value of the state: float32. With it, the gated delta kernels in H20's tables reach 2.2 TB/s."""


class LinearAttention(ProfileTable, frozen=True, kw_only=True):
    """The linear attention that replaces attention in some layers: a gated delta net, Kimi's, Mamba-2, or a convolution.

    A short convolution (LFM2) mixes the last tokens, between two gates. It keeps their channels, and no other state.
    """

    kind: Literal["gated-delta", "kimi-delta", "mamba-2", "short-convolution"] = "gated-delta"
    num_layers: int
    """Number of such layers."""
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int
    is_parallel: bool = False
    """Whether these layers have full attention too, beside linear attention (Falcon-H1)."""
    has_wide_gate: bool = False
    """Whether Kimi's gate of the output is one product with the hidden state (Kimi-K3) instead of two narrow ones."""

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
        if self.kind == "short-convolution":
            return self.value_dim
        return 2 * self.key_dim + self.value_dim

    @property
    def projected_dim(self) -> int:
        """Output channels of the products with the hidden state.

        These are the mixed channels, the gate, and two numbers for each value head. Mamba-2 has one number for
        each head. Kimi's has one number for each head, and computes gate and decay from two narrow products.
        """
        match self.kind:
            case "gated-delta":
                return self.mixed_dim + self.value_dim + 2 * self.num_value_heads
            case "mamba-2":
                return self.mixed_dim + self.value_dim + self.num_value_heads
            case "kimi-delta":
                gate = self.value_dim if self.has_wide_gate else self.value_head_dim
                return self.mixed_dim + self.num_value_heads + self.value_head_dim + gate
            case "short-convolution":  # the channels, and the gates of input and output
                return 3 * self.value_dim
            case _:
                assert_never(self.kind)

    @property
    def num_widened(self) -> int:
        """Number of products that widen a narrow vector to all values: gate and decay of Kimi's."""
        if self.kind != "kimi-delta":
            return 0
        return 1 if self.has_wide_gate else 2

    def projection_parameters(self, hidden_size: int) -> int:
        """Return the parameters of the matrix products of one layer."""
        widened = self.value_head_dim * self.num_widened * self.value_dim
        return hidden_size * (self.projected_dim + self.value_dim) + widened

    def parameters(self, hidden_size: int, tensor_parallel: int = 1) -> float:
        """Return the parameters of one layer on one of `tensor_parallel` GPUs; each GPU has the whole norm of a head."""
        projections = self.projection_parameters(hidden_size)
        others = self.mixed_dim * self.conv_kernel
        match self.kind:
            case "gated-delta":
                others += 2 * self.num_value_heads
            case (
                "mamba-2"
            ):  # a bias of the convolution, three numbers for each head, the norm of all heads
                others += self.mixed_dim + 3 * self.num_value_heads + self.value_dim
                return (projections + others) / tensor_parallel
            case "kimi-delta":
                others += self.num_value_heads + self.value_dim
            case "short-convolution":
                return (projections + others) / tensor_parallel
            case _:
                assert_never(self.kind)
        return (projections + others) / tensor_parallel + self.value_head_dim

    def state_bytes(self, width: int, tensor_parallel: int = 1) -> float:
        """Return the bytes of one rollout in one layer on one GPU: states, and the last inputs of the convolution."""
        states = self.num_value_heads * self.key_head_dim * self.value_head_dim * STATE_BYTES
        if self.kind == "short-convolution":
            states = 0
        return (states + self.mixed_dim * (self.conv_kernel - 1) * width) / tensor_parallel

    @property
    def measured_heads(self) -> float:
        """Value heads of the measured size (128 x 128) with as large states."""
        if self.kind == "gated-delta":
            return self.num_value_heads
        return self.num_value_heads * self.key_head_dim * self.value_head_dim / MEASURED_STATE

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in one layer: its key reads and changes each state, and its query reads it."""
        if self.kind == "short-convolution":
            return 2.0 * (self.conv_kernel + 2) * self.value_dim
        return 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim


BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of one value by dtype."""


class Experts(ProfileTable, frozen=True, kw_only=True):
    """The mixture of experts that replaces the MLP, except in `num_dense_layers` layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Channels of one expert."""
    num_shared_experts: int = 0
    """Experts that process every token, in addition to those that the router chooses."""
    num_dense_layers: int = 0
    """Number of layers with a plain MLP: usually the first ones."""
    has_router_bias: bool = False
    """Whether the router has a bias for each expert: a correction of its scores (DeepSeek-V3, section 2.1.2), or a plain
    bias (gpt-oss)."""
    has_bias: bool = False
    """Whether the products of an expert have biases (gpt-oss)."""
    has_shared_gate: bool = False
    """Whether a gate weights the shared experts for each token (Qwen3-Next)."""
    has_gate: bool = True
    """Whether an expert has a gate projection beside up and down (not in Nemotron-H)."""
    latent_size: int | None = None
    """Channels of the vector that experts get and return, if a projection narrows the hidden state (Nemotron-3 Super)."""

    @property
    def num_products(self) -> int:
        """Matrix products of an expert: up, down, and the gate if there is one."""
        return 2 + self.has_gate

    @property
    def gated_width(self) -> float:
        """Channels of a gated expert with as many parameters. Kernels were measured with gated ones."""
        return (
            self.intermediate_size * self.num_products / 3
            if not self.has_gate
            else self.intermediate_size
        )

    def __post_init__(self) -> None:
        check_positive(self, ("num_shared_experts", "num_dense_layers"))
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts {self.num_experts}, "
                f"got {self.experts_per_token}"
            )


class LatentAttention(ProfileTable, frozen=True, kw_only=True):
    """Multi-head latent attention: a token's context is one short vector (DeepSeek-V2, section 2.1)."""

    q_lora_rank: int | None = None
    """Size of the latent vector of queries; None if queries are computed from the hidden state."""
    kv_lora_rank: int
    """Size of the latent vector of keys and values."""
    rope_head_dim: int
    """Channels with the position. All heads share the key of these channels."""
    nope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        check_positive(self)

    def parameters(self, hidden_size: int, num_heads: float) -> float:
        """Return the parameters of one layer's attention on a GPU with `num_heads` heads.

        The projections to the latent vectors belong to no head, so every GPU has all of them.
        """
        queries = num_heads * (self.nope_head_dim + self.rope_head_dim)
        if self.q_lora_rank is None:
            query = hidden_size * queries
        else:
            query = self.q_lora_rank * (hidden_size + 1 + queries)
        latent = hidden_size * (self.kv_lora_rank + self.rope_head_dim) + self.kv_lora_rank
        keys_values = self.kv_lora_rank * num_heads * (self.nope_head_dim + self.v_head_dim)
        return query + latent + keys_values + num_heads * self.v_head_dim * hidden_size


class WindowHeads(ProfileTable, frozen=True, kw_only=True):
    """The heads of layers with a sliding window, if they differ from those of the other layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    values_dim: int | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


class ModelShape(ProfileTable, frozen=True, kw_only=True, dict=True):
    """The shape of a decoder-only transformer: MLPs or experts, RMS norms, one output head."""

    name: str
    source: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels of a query or key in one head."""
    intermediate_size: int
    """Channels of a plain MLP; unused if every layer has experts."""
    vocab_size: int
    has_qkv_bias: bool
    has_tied_embeddings: bool
    has_qk_norm: bool = False
    """Whether there are RMS norms over the channels of a query head and of a key head (Qwen3)."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    sliding_window: int | None = None
    """Tokens of the sliding window; None if all layers have full attention."""
    num_window_layers: int | None = None
    """Number of layers with the window; None for all layers with attention."""
    has_output_bias: bool = False
    """Whether the output projection of attention has a bias (gpt-oss)."""
    has_sinks: bool = False
    """Whether each head has a learned score that belongs to no token (gpt-oss)."""
    has_output_gate: bool = False
    """Whether the output of attention has a gate as wide as the queries (Qwen3-Next)."""
    norms_per_layer: int = 2
    num_draft_layers: int = 0
    """Additional layers that draft tokens (multi-token prediction)."""
    values_dim: int | None = None
    """Channels of a value in one head; None for as many as `head_dim`. Latent attention has its own."""
    has_value_projection: bool = True
    """Whether values have their own projection. Otherwise the projected keys are the values (Gemma 4)."""
    window_heads: WindowHeads | None = None
    """Heads of the layers with the window; None if they are those of the other layers."""
    qk_norm_spans_heads: bool = False
    """Whether the norms of queries and of keys span all heads instead of each head (OLMo 2, MiniMax-M2)."""
    has_gated_mlp: bool = True
    """Whether MLPs have a gate projection beside up and down (not in Nemotron-H)."""
    num_unmixed_layers: int = 0
    """Number of layers that mix no tokens (MLPs and experts of Nemotron-H)."""
    num_bare_layers: int = 0
    """Number of layers without MLP or experts (attention and Mamba-2 of Nemotron-H)."""
    indexer: Indexer | None = None
    compressed: CompressedAttention | None = None
    """Attention to entries that compress tokens. All layers have the sliding window; those without entries count as
    `num_window_layers`, and those with entries as layers with full attention."""
    hyper_connections: HyperConnections | None = None
    has_head_gates: bool = False
    """Whether the output of attention has one gate for each head (Laguna)."""
    has_mlp_bias: bool = False
    """Whether the products of a plain MLP have biases (StarCoder2)."""
    layer_inputs: LayerInputs | None = None
    num_shared_full: int = 0
    """Number of layers with full attention to the keys and values of an earlier one. They compute and keep none."""
    num_shared_windowed: int = 0
    """The same of layers with a window."""
    num_vision_parameters: int = 0
    """Parameters of a vision tower. Memory and full syncs include them, but no other number does, and no simulation
    computes with them."""

    def __post_init__(self) -> None:
        zeros = ("num_window_layers", "num_draft_layers", "num_unmixed_layers", "num_bare_layers")
        check_positive(
            self, (*zeros, "num_vision_parameters", "num_shared_full", "num_shared_windowed")
        )
        if self.num_full_layers < 0:
            raise ValueError(
                f"num_window_layers and linear.num_layers must be at most num_layers {self.num_layers} together, "
                f"got {self.num_layers - self.num_full_layers}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.experts is not None and self.experts.num_dense_layers > self.num_layers:
            raise ValueError(
                f"experts.num_dense_layers must be at most num_layers {self.num_layers}, "
                f"got {self.experts.num_dense_layers}"
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.compressed is not None:
            self._check_compressed(self.compressed)
        self._check_parts()

    def _check_parts(self) -> None:
        """Check that the parts of a layer fit together."""
        if min(self.num_dense_layers, self.num_expert_layers) < 0:
            raise ValueError(
                f"num_bare_layers must be at most the layers without MLPs of {self.num_layers}, "
                f"got {self.num_bare_layers}"
            )
        if self.experts is not None and self.experts.has_gate != self.has_gated_mlp:
            raise ValueError(
                f"experts.has_gate must be has_gated_mlp, {self.has_gated_mlp}, got {self.experts.has_gate}"
            )
        if self.indexer is not None and (self.indexer.num_layers or 0) > self.num_layers:
            raise ValueError(f"indexer.num_layers must be at most num_layers {self.num_layers}")
        if (
            self.indexer is not None
            and self.indexer.block_size is None
            and (self.latent is None or self.latent.q_lora_rank is None)
        ):
            raise ValueError("an indexer needs latent.q_lora_rank, from which it computes queries")
        shared = self.num_shared_full, self.num_shared_windowed
        if shared[0] > self.num_full_layers or shared[1] > self.num_windowed_layers:
            raise ValueError(
                "num_shared_full and num_shared_windowed must be at most the layers of their kind, "
                f"{self.num_full_layers} and {self.num_windowed_layers}, got {shared[0]} and {shared[1]}"
            )
        if self.window_heads is not None and self.num_windowed_layers == 0:
            raise ValueError("window_heads needs layers with a sliding_window")

    def splits_over(self, degree: int) -> bool:
        """Return whether `degree` tensor ranks can share the heads.

        Each rank needs whole attention heads. Key-value heads must divide over ranks, or ranks over them.
        """
        caches = 1 if self.latent is not None else self.num_kv_heads
        splits_caches = caches % degree == 0 or degree % caches == 0
        if self.linear is not None and self.linear.num_key_heads % degree:
            return False
        if self.window_heads is not None and not self.windowed.splits_over(degree):
            return False
        if self.compressed is not None and self.compressed.output_groups % degree:
            return False
        return self.num_heads % degree == 0 and splits_caches

    def _check_latent(self, latent: LatentAttention) -> None:
        """Check the fields that follow from latent attention, which expands to keys and values of every head."""
        expected = (self.num_heads, latent.nope_head_dim + latent.rope_head_dim, False, False)
        stated = (self.num_kv_heads, self.head_dim, self.has_qkv_bias, self.has_qk_norm)
        if stated != expected:
            raise ValueError(
                "with latent attention num_kv_heads, head_dim, has_qkv_bias and has_qk_norm must be "
                f"{expected}, got {stated}"
            )

    def _check_compressed(self, compressed: CompressedAttention) -> None:
        """Check the fields that follow from compressed attention: one vector is key and value of all heads."""
        if self.num_kv_heads != 1 or self.has_value_projection or self.sliding_window is None:
            raise ValueError(
                "with compressed attention num_kv_heads must be 1, has_value_projection false, and sliding_window "
                f"given, got {self.num_kv_heads}, {self.has_value_projection} and {self.sliding_window}"
            )
        if compressed.num_layers != self.num_full_layers:
            raise ValueError(
                "compressed.num_sparse_layers and num_dense_layers must be the layers without num_window_layers, "
                f"{self.num_full_layers}, got {compressed.num_layers}"
            )
        if self.num_heads % compressed.output_groups:
            raise ValueError(
                f"compressed.output_groups must divide num_heads {self.num_heads}, got {compressed.output_groups}"
            )

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of one embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        if self.experts is None:
            return self.num_layers - self.num_bare_layers
        return self.experts.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.num_bare_layers - self.num_dense_layers

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a residual connection: those that mix tokens, MLPs, and mixtures of experts."""
        return 2 * self.num_layers - self.num_unmixed_layers - self.num_bare_layers

    @property
    def num_linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return 0 if self.linear is None else self.linear.num_layers

    @property
    def num_attention_layers(self) -> int:
        """Number of layers that attend to keys and values."""
        beside = self.linear is not None and self.linear.is_parallel
        return self.num_layers - self.num_linear_layers * (not beside) - self.num_unmixed_layers

    @property
    def num_windowed_layers(self) -> int:
        """Number of layers with a sliding window."""
        if self.sliding_window is None:
            return 0
        attending = self.num_attention_layers
        return attending if self.num_window_layers is None else self.num_window_layers

    @property
    def num_full_layers(self) -> int:
        """Number of layers with full attention."""
        return self.num_attention_layers - self.num_windowed_layers

    @property
    def num_growing_layers(self) -> int:
        """Number of layers whose KV cache grows with every token.

        These are the layers with full attention. If there are none, engines keep all tokens of the windowed layers.
        """
        if self.num_full_layers:
            return self.num_full_layers - self.num_shared_full
        return self.num_windowed_layers - self.num_shared_windowed

    @property
    def windowed(self) -> ModelShape:
        """The model with the heads of its windowed layers in all layers."""
        heads = self.window_heads
        if heads is None:
            return self
        return replace(
            self,
            window_heads=None,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            values_dim=heads.values_dim,
            has_sinks=heads.has_sinks,
            has_value_projection=True,
        )

    @property
    def value_head_dim(self) -> int:
        """Channels of a value in one head."""
        if self.latent is not None:
            return self.latent.v_head_dim
        return self.values_dim or self.head_dim

    @property
    def values_width(self) -> int:
        """Channels of a value as attention kernels read it; those of latent attention count as a key."""
        return self.values_dim or self.head_dim

    @property
    def expert_input_size(self) -> int:
        """Channels that an expert gets and returns."""
        latent = None if self.experts is None else self.experts.latent_size
        return latent or self.hidden_size

    @property
    def index_input_size(self) -> int:
        """Channels from which an indexer computes its queries: the latent vector of queries, or the hidden state."""
        rank = None if self.latent is None else self.latent.q_lora_rank
        return rank or self.hidden_size

    @property
    def dense_share(self) -> float:
        """Share of the layers with attention that attend to all tokens, next to layers with sparse attention."""
        if self.indexer is None or self.indexer.block_size is None:
            return 0.0
        return 1 - self.indexer.share(self.num_attention_layers)

    @property
    def max_attended(self) -> int | None:
        """Most tokens that a token attends to in layers with sparse attention; None for all."""
        return None if self.indexer is None else self.indexer.top_k

    def seen_by(self, longest: int) -> ModelShape:
        """Return the model for sequences of at most `longest` tokens: without limits that they never reach.

        A window stays if its layers have other heads than the rest, because it tells which layers these are.
        """
        if self.compressed is not None:
            return replace(self, compressed=self.compressed.seen_by(longest))
        model = self
        if self.indexer is not None and self.indexer.top_k and longest <= self.indexer.top_k:
            model = replace(self, indexer=replace(self.indexer, top_k=None))
        if self.sliding_window is None or longest > self.sliding_window or self.window_heads:
            return model
        shared = model.num_shared_full + model.num_shared_windowed
        return replace(
            model,
            sliding_window=None,
            num_window_layers=None,
            num_shared_full=shared,
            num_shared_windowed=0,
        )

    def attention_parameters(self, tensor_parallel: int = 1) -> float:
        """Return the parameters of one layer's attention on one of `tensor_parallel` GPUs.

        Key-value heads are never split: with more than `num_kv_heads` GPUs, several have the same one. Every
        GPU has the whole norms of queries and keys.
        """
        num_heads = self.num_heads / tensor_parallel
        if self.latent is not None:
            gate = num_heads * self.value_head_dim * self.hidden_size * self.has_output_gate
            return self.latent.parameters(self.hidden_size, num_heads) + gate
        if self.compressed is not None:
            return self.compressed.parameters(
                self.hidden_size, self.head_dim, num_heads, tensor_parallel
            )
        queries, outputs = num_heads * self.head_dim, num_heads * self.value_head_dim
        kv_heads = max(1.0, self.num_kv_heads / tensor_parallel)
        keys_values = kv_heads * (self.head_dim + self.value_head_dim * self.has_value_projection)
        made = (1 + self.has_output_gate) * queries + outputs + num_heads * self.has_head_gates
        projections = self.hidden_size * (made + keys_values)
        biases = (queries + keys_values) * self.has_qkv_bias + num_heads * self.has_sinks
        biases += self.hidden_size * self.has_output_bias
        return projections + biases + self._qk_norm_parameters

    @property
    def _qk_norm_parameters(self) -> int:
        """Parameters of the norms of queries and keys in one layer."""
        heads = self.num_heads + self.num_kv_heads if self.qk_norm_spans_heads else 2
        return heads * self.head_dim * self.has_qk_norm

    def mixing_parameters(self, tensor_parallel: int = 1) -> float:
        """Return the parameters of attention in all layers on one GPU, without linear attention."""
        own = self.attention_parameters(tensor_parallel)
        if self.indexer is not None:
            indexed = self.indexer.parameters(self.hidden_size, self.index_input_size)
            own += indexed * self.indexer.share(self.num_attention_layers)
        if self.compressed is not None:
            return self.num_attention_layers * own + self.compressor_parameters
        kept = -self.num_shared_full * self.cached_projections(tensor_parallel)
        kept -= self.num_shared_windowed * self.windowed.cached_projections(tensor_parallel)
        if self.window_heads is None:
            return self.num_attention_layers * own + kept
        windowed = self.windowed.attention_parameters(tensor_parallel)
        return self.num_full_layers * own + self.num_windowed_layers * windowed + kept

    def cached_projections(self, tensor_parallel: int = 1) -> float:
        """Return the parameters that make keys and values in one layer on one GPU: their products, and the key's norm."""
        kv_heads = max(1.0, self.num_kv_heads / tensor_parallel)
        values = self.value_head_dim * self.has_value_projection
        products = self.hidden_size * kv_heads * (self.head_dim + values)
        return products + self.head_dim * self.has_qk_norm

    @property
    def compressor_parameters(self) -> int:
        """Parameters of compressors and of the index in all layers."""
        if self.compressed is None:
            return 0
        own = self.compressed
        sparse, dense = own.compressor_parameters(self.hidden_size, self.head_dim)
        return own.num_sparse_layers * sparse + own.num_dense_layers * dense

    @property
    def hyper_parameters(self) -> int:
        """Parameters of hyper-connections in all blocks and in the head."""
        if self.hyper_connections is None:
            return 0
        return self.hyper_connections.parameters(self.hidden_size, self.num_blocks)

    @property
    def layer_input_parameters(self) -> int:
        """Parameters of the inputs of each layer, with their table."""
        own = self.layer_inputs
        if own is None:
            return 0
        return own.table_parameters(self.num_layers) + own.parameters(
            self.hidden_size, self.num_layers
        )

    @property
    def num_mlp_products(self) -> int:
        """Matrix products of an MLP: up, down, and the gate if there is one."""
        return 2 + self.has_gated_mlp

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one plain MLP."""
        biases = (1 + self.has_gated_mlp) * self.intermediate_size + self.hidden_size
        products = self.num_mlp_products * self.hidden_size * self.intermediate_size
        return products + biases * self.has_mlp_bias

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        if self.experts is None:
            return 0
        width, inputs = self.experts.intermediate_size, self.expert_input_size
        biases = (1 + self.experts.has_gate) * width + inputs
        return self.experts.num_products * inputs * width + biases * self.experts.has_bias

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of one shared expert, which gets the whole hidden state; 0 without experts."""
        if self.experts is None or self.experts.latent_size is None:
            return self.expert_parameters
        return self.experts.num_products * self.hidden_size * self.experts.intermediate_size

    @property
    def expert_latent_parameters(self) -> int:
        """Parameters of the projections to the latent vector of experts and back, in one layer."""
        latent = None if self.experts is None else self.experts.latent_size
        return 2 * self.hidden_size * (latent or 0)

    def mixture_parameters(
        self, tensor_parallel: int = 1, expert_parallel: int = 1, expert_slices: int | None = None
    ) -> float:
        """Return the parameters of one layer's router, experts and shared experts on one GPU.

        Shared experts are sliced over `tensor_parallel`. Every GPU has the whole router.

        Args:
            tensor_parallel: without `expert_parallel`, each of so many GPUs has a slice of every expert.
            expert_parallel: each of so many GPUs has whole experts.
            expert_slices: number of GPUs that share each expert; None for the two rules above.

        Raises:
            ValueError: `expert_parallel` does not divide the number of experts.
        """
        if self.experts is None:
            return 0.0
        if self.experts.num_experts % expert_parallel:
            raise ValueError(
                f"expert_parallel must divide the {self.experts.num_experts} experts of {self.name}, "
                f"got {expert_parallel}"
            )
        if expert_slices is None:
            expert_slices = 1 if expert_parallel > 1 else tensor_parallel
        split = expert_parallel * expert_slices
        routed = self.experts.num_experts * self.expert_parameters / split
        shared = self.experts.num_shared_experts * self.shared_expert_parameters / tensor_parallel
        router = self.experts.num_experts * (self.hidden_size + self.experts.has_router_bias)
        router += self.hidden_size * self.experts.has_shared_gate
        return routed + shared + router + self.expert_latent_parameters

    def shard_parameters(
        self, tensor_parallel: int, expert_parallel: int = 1, expert_slices: int | None = None
    ) -> float:
        """Return the parameters on one GPU.

        Embedding tables, plain MLPs and attention heads are split over `tensor_parallel`, and experts as in
        `mixture_parameters`. Every GPU has all norms. This is the split of vLLM, SGLang and Megatron.

        Raises:
            ValueError: a degree is not positive, or `expert_parallel` does not divide the number of experts.
        """
        for key, degree in (
            ("tensor_parallel", tensor_parallel),
            ("expert_parallel", expert_parallel),
        ):
            if degree < 1:
                raise ValueError(f"{key} must be at least 1, got {degree}")
        num_tables = 1 if self.has_tied_embeddings else 2
        norms = (self.norms_per_layer * self.num_layers + 1) * self.hidden_size
        linear = 0.0
        if self.linear is not None:
            linear = self.linear.parameters(self.hidden_size, tensor_parallel)
        return (
            norms
            + self.hyper_parameters
            + self.layer_input_parameters / tensor_parallel
            + num_tables * self.num_embedding_parameters / tensor_parallel
            + self.mixing_parameters(tensor_parallel)
            + self.num_linear_layers * linear
            + self.num_dense_layers * self.mlp_parameters / tensor_parallel
            + self.num_expert_layers
            * self.mixture_parameters(tensor_parallel, expert_parallel, expert_slices)
        )

    def linear_parameters(self, tensor_parallel: int = 1, expert_parallel: int = 1) -> float:
        """Return the parameters of attention, MLPs and experts on one GPU, without embeddings, layer norms and routers."""
        mixture = self.mixture_parameters(tensor_parallel, expert_parallel)
        if self.experts is not None:
            mixture -= self.experts.num_experts * (self.hidden_size + self.experts.has_router_bias)
        linear = 0.0
        if self.linear is not None:
            linear = self.linear.projection_parameters(self.hidden_size) / tensor_parallel
        return (
            self.mixing_parameters(tensor_parallel)
            + self.num_linear_layers * linear
            + self.num_dense_layers * self.mlp_parameters / tensor_parallel
            + self.num_expert_layers * mixture
        )

    @cached_property
    def num_parameters(self) -> int:
        """Number of all parameters. A tied embedding counts once; modules for multi-token prediction do not count."""
        return round(self.shard_parameters(tensor_parallel=1))

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token is multiplied with.

        The input embedding and the experts that are not chosen do not count. A tied embedding counts as the
        output head.
        """
        idle = 0 if self.has_tied_embeddings else self.num_embedding_parameters
        if self.layer_inputs is not None:
            idle += self.layer_inputs.table_parameters(self.num_layers)
        if self.experts is not None:
            num_idle = self.experts.num_experts - self.experts.experts_per_token
            idle += self.num_expert_layers * num_idle * self.expert_parameters
        return self.num_parameters - idle

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the KV cache bytes of one token: its keys and values, or its latent vector."""
        return round(self.shard_kv_bytes_per_token(dtype, tensor_parallel=1))

    def shard_kv_bytes_per_token(self, dtype: str, tensor_parallel: int) -> float:
        """Return the KV cache bytes of one token on each of `tensor_parallel` GPUs, in layers whose cache grows.

        With more GPUs than key-value heads, each GPU has one head. Every GPU has the whole latent vector, and all
        entries of compressed attention.
        """
        if self.compressed is not None:
            sparse, dense = self.compressed.token_bytes(self.head_dim, BYTES[dtype])
            return (
                self.compressed.num_sparse_layers * sparse
                + self.compressed.num_dense_layers * dense
            )
        model = self if self.num_full_layers else self.windowed
        cached = self.num_growing_layers * model._cached_values(tensor_parallel) * BYTES[dtype]
        return cached + self.num_growing_layers * self._index_bytes

    @property
    def _index_bytes(self) -> float:
        """Bytes of one token's index key in a mean layer on each GPU."""
        if self.indexer is None:
            return 0.0
        return self.indexer.cached_bytes * self.indexer.share(self.num_attention_layers)

    def shard_state_bytes(self, dtype: str, tensor_parallel: int) -> float:
        """Return the bytes of a rollout on each of `tensor_parallel` GPUs that do not grow: windows and linear states."""
        if self.compressed is not None:
            return self._compressed_state_bytes(self.compressed, dtype)
        kept = self.num_windowed_layers - self.num_shared_windowed
        windowed = kept if self.num_full_layers else 0
        cached = self.windowed._cached_values(tensor_parallel)
        window = (self.sliding_window or 0) * cached * BYTES[dtype]
        states = 0.0
        if self.linear is not None:
            width = max(2, BYTES[dtype])
            states = self.linear.num_layers * self.linear.state_bytes(width, tensor_parallel)
        return windowed * window + states

    def _compressed_state_bytes(self, compressed: CompressedAttention, dtype: str) -> float:
        """Return the bytes of the window in all layers, and of the compressors."""
        vectors = (self.sliding_window or 0) * compressed.vector_bytes(self.head_dim, BYTES[dtype])
        sparse, dense = compressed.state_bytes(self.head_dim)
        states = compressed.num_sparse_layers * sparse + compressed.num_dense_layers * dense
        return float(self.num_layers * vectors + states)

    def _cached_values(self, tensor_parallel: int) -> float:
        """Return the number of values of one token in the KV cache of one layer on one GPU."""
        if self.latent is not None:
            return float(self.latent.kv_lora_rank + self.latent.rope_head_dim)
        return max(1.0, self.num_kv_heads / tensor_parallel) * (self.head_dim + self.value_head_dim)

    def forward_flops(self, num_tokens: float, context_pairs: float) -> float:
        """Return the FLOPs of a forward pass over `num_tokens` tokens.

        Each parameter takes two FLOPs for each token. In each head, a pair of a token and a token that it
        attends to takes two FLOPs for each channel of a key and of a value. Latent attention is counted with
        expanded keys and values, as in prefill and training. Decoding on latent vectors would take
        2 (2 `kv_lora_rank` + `rope_head_dim`) for each pair and head. In layers with a window, every token
        is assumed to have a full window. Sparse attention counts the score of every pair, and at most `top_k`
        pairs for each token. Compressed attention counts a full window, the entries, and the scores of the index.
        Linear attention counts its reads and changes of the states.

        Args:
            num_tokens: tokens of the pass.
            context_pairs: pairs of a token and a token that it attends to, in one layer with full attention.
        """
        of_pair, of_window = self._pair_flops, self.windowed._pair_flops
        of_token = 2.0 * self.num_active_parameters
        of_token += self.num_windowed_layers * of_window * (self.sliding_window or 0)
        if self.linear is not None:
            of_token += self.linear.num_layers * self.linear.token_flops
        scored = 0.0
        if self.indexer is not None:
            share = self.indexer.share(self.num_attention_layers)
            scored = self.indexer.pair_flops * context_pairs * share
        most = self.max_attended
        pairs = context_pairs if most is None else min(context_pairs, most * num_tokens)
        pairs += (context_pairs - pairs) * self.dense_share
        attended = self.num_full_layers * of_pair * pairs + self.num_full_layers * scored
        if self.compressed is not None:
            of_token += self.num_full_layers * of_pair * (self.sliding_window or 0)
            attended = self._compressed_flops(self.compressed, num_tokens, context_pairs)
        return of_token * num_tokens + attended

    def _compressed_flops(
        self, compressed: CompressedAttention, num_tokens: float, context_pairs: float
    ) -> float:
        """Return the FLOPs of attention to entries and of the index in all layers."""
        sparse, dense = compressed.pairs(num_tokens, context_pairs)
        entries = compressed.num_sparse_layers * sparse + compressed.num_dense_layers * dense
        scores = compressed.num_sparse_layers * compressed.score_flops(context_pairs)
        return self._pair_flops * entries + scores

    @property
    def _pair_flops(self) -> float:
        """FLOPs of one pair of tokens in one layer."""
        return 2.0 * self.num_heads * (self.head_dim + self.value_head_dim)


def lora_parameters(model: ModelShape, rank: int) -> int:
    """Return the parameters of LoRA adapters on every linear layer of attention and MLP.

    Each has rank * (in + out): A is rank x in, and B is out x rank (Hu et al. 2021, arXiv 2106.09685).
    """
    return sum(rank * (inner + outer) * count for inner, outer, count in linear_layers(model))


def linear_layers(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, number) of the linear layers of attention and MLPs, with all experts, without routers."""
    yield from _layers(model, 0 if model.experts is None else model.experts.num_experts)


def passed_layers(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, number) of the linear layers that one token passes, with only its chosen experts."""
    yield from _layers(model, 0 if model.experts is None else model.experts.experts_per_token)


def _layers(model: ModelShape, num_experts: int) -> Iterator[tuple[int, int, int]]:
    hidden, products = model.hidden_size, model.num_mlp_products
    yield from _mixing(model)
    if model.layer_inputs is not None:
        yield from model.layer_inputs.products(hidden, model.num_layers)
    if model.num_dense_layers:
        yield hidden, model.intermediate_size, (products - 1) * model.num_dense_layers
        yield model.intermediate_size, hidden, model.num_dense_layers
    if model.experts is None:
        return
    inputs, width = model.expert_input_size, model.experts.intermediate_size
    counts = {hidden: model.experts.num_shared_experts, inputs: num_experts}
    if inputs == hidden:
        counts = {hidden: num_experts + model.experts.num_shared_experts}
    else:
        yield hidden, inputs, model.num_expert_layers
        yield inputs, hidden, model.num_expert_layers
    for channels, count in counts.items():
        yield channels, width, (products - 1) * model.num_expert_layers * count
        yield width, channels, model.num_expert_layers * count


def _mixing(model: ModelShape) -> Iterator[tuple[int, int, int]]:
    """Yield the linear layers of attention and of linear attention."""
    others = 0 if model.window_heads is None else model.num_windowed_layers
    if model.compressed is not None:
        own, queries = model.compressed, model.num_heads * model.head_dim
        hidden, vector = model.hidden_size, model.head_dim
        for inputs, outputs in own.products(hidden, vector, queries, own.output_groups):
            yield int(inputs), int(outputs), model.num_layers
        yield from ((int(i), int(o), n) for i, o, n in own.compressors(hidden, vector))
        return
    for inner, outer in _attention(model):
        yield inner, outer, model.num_attention_layers - others
    if others:
        for inner, outer in _attention(model.windowed):
            yield inner, outer, others
    if model.indexer is not None:
        count = model.indexer.num_layers or model.num_attention_layers
        for outer, inner in model.indexer.products(model.hidden_size, model.index_input_size):
            yield inner, outer, count
    if model.linear is None:
        return
    linear, hidden = model.linear, model.hidden_size
    yield hidden, linear.projected_dim, linear.num_layers
    yield linear.value_dim, hidden, linear.num_layers
    if linear.num_widened:
        yield linear.value_head_dim, linear.value_dim, linear.num_widened * linear.num_layers


def _attention(model: ModelShape) -> Iterator[tuple[int, int]]:
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if model.has_output_gate and latent is not None:
        yield hidden, heads * latent.v_head_dim
    if latent is None:
        yield hidden, heads * model.head_dim
        yield hidden, model.num_kv_heads * model.head_dim
        if model.has_value_projection:
            yield hidden, model.num_kv_heads * model.value_head_dim
        yield heads * model.value_head_dim, hidden
        return
    queries = heads * (latent.nope_head_dim + latent.rope_head_dim)
    if latent.q_lora_rank is None:
        yield hidden, queries
    else:
        yield hidden, latent.q_lora_rank
        yield latent.q_lora_rank, queries
    yield hidden, latent.kv_lora_rank + latent.rope_head_dim
    yield latent.kv_lora_rank, heads * (latent.nope_head_dim + latent.v_head_dim)
    yield heads * latent.v_head_dim, hidden

"""The shape of a decoder-only transformer, and the parameters, bytes and FLOPs that follow from it.

It covers linear layers and linear attention. A linear-attention layer keeps a state of constant
size, however long the context is (the gated delta nets of Qwen3-Next). Each value head has a state
matrix. The keys and values of a token update it, and queries read from it (Yang et al. 2024, Gated
Delta Networks, arXiv 2412.06464). Queries, keys and values first pass a short causal convolution.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from streamrl.hardware.profile_table import ProfileTable, check_positive

STATE_BYTES = 4
"""Bytes of a value of the state: float32. With it, the gated delta kernels in H20's tables reach 2.2 TB/s."""


class LinearAttention(ProfileTable, frozen=True, kw_only=True):
    """The gated delta net that replaces attention in some layers."""

    num_layers: int
    """Number of such layers."""
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
        """Output channels of the input projection: mixed channels, the gate, and two numbers for each value head."""
        return self.mixed_dim + self.value_dim + 2 * self.num_value_heads

    def projection_parameters(self, hidden_size: int) -> int:
        """Return the parameters of the two matrix products of one layer."""
        return hidden_size * (self.projected_dim + self.value_dim)

    def parameters(self, hidden_size: int, tensor_parallel: int = 1) -> float:
        """Return the parameters of one layer on one of `tensor_parallel` GPUs; each GPU has the whole norm of a head."""
        projections = self.projection_parameters(hidden_size)
        others = self.mixed_dim * self.conv_kernel + 2 * self.num_value_heads
        return (projections + others) / tensor_parallel + self.value_head_dim

    def state_bytes(self, width: int, tensor_parallel: int = 1) -> float:
        """Return the bytes of one rollout in one layer on one GPU: states, and the last inputs of the convolution."""
        states = self.num_value_heads * self.key_head_dim * self.value_head_dim * STATE_BYTES
        return (states + self.mixed_dim * (self.conv_kernel - 1) * width) / tensor_parallel

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in one layer: its key reads and changes each state, and its query reads it."""
        return 6.0 * self.num_value_heads * self.key_head_dim * self.value_head_dim


BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of one value by dtype."""


class Experts(ProfileTable, frozen=True, kw_only=True):
    """The mixture of experts that replaces the MLP, except in the first `num_dense_layers` layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Channels of one expert."""
    num_shared_experts: int = 0
    """Experts that process every token, in addition to those that the router chooses."""
    num_dense_layers: int = 0
    """Number of first layers with a plain MLP."""
    has_router_bias: bool = False
    """Whether the router has a bias for each expert: a correction of its scores (DeepSeek-V3, section 2.1.2), or a plain
    bias (gpt-oss)."""
    has_bias: bool = False
    """Whether the products of an expert have biases (gpt-oss)."""
    has_shared_gate: bool = False
    """Whether a gate weights the shared experts for each token (Qwen3-Next)."""

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


class ModelShape(ProfileTable, frozen=True, kw_only=True):
    """The shape of a decoder-only transformer: gated MLPs, RMS norms, one output head."""

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

    def __post_init__(self) -> None:
        check_positive(self, ("num_window_layers", "num_draft_layers"))
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

    def splits_over(self, degree: int) -> bool:
        """Return whether `degree` tensor ranks can share the heads.

        Each rank needs whole attention heads. Key-value heads must divide over ranks, or ranks over them.
        """
        caches = 1 if self.latent is not None else self.num_kv_heads
        splits_caches = caches % degree == 0 or degree % caches == 0
        if self.linear is not None and self.linear.num_key_heads % degree:
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

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of one embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a plain MLP."""
        return self.num_layers if self.experts is None else self.experts.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return 0 if self.linear is None else self.linear.num_layers

    @property
    def num_attention_layers(self) -> int:
        """Number of layers that attend to keys and values."""
        return self.num_layers - self.num_linear_layers

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
        return self.num_full_layers or self.num_windowed_layers

    def seen_by(self, longest: int) -> ModelShape:
        """Return the model for sequences of at most `longest` tokens: without a window that they never fill."""
        if self.sliding_window is None or longest > self.sliding_window:
            return self
        return replace(self, sliding_window=None, num_window_layers=None)

    def attention_parameters(self, tensor_parallel: int = 1) -> float:
        """Return the parameters of one layer's attention on one of `tensor_parallel` GPUs.

        Key-value heads are never split: with more than `num_kv_heads` GPUs, several have the same one. Every
        GPU has the whole norms of queries and keys.
        """
        num_heads = self.num_heads / tensor_parallel
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, num_heads)
        queries = num_heads * self.head_dim
        keys_values = 2 * max(1.0, self.num_kv_heads / tensor_parallel) * self.head_dim
        projections = self.hidden_size * ((2 + self.has_output_gate) * queries + keys_values)
        biases = (queries + keys_values) * self.has_qkv_bias + num_heads * self.has_sinks
        biases += self.hidden_size * self.has_output_bias
        return projections + biases + 2 * self.head_dim * self.has_qk_norm

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one plain MLP: gate, up and down projection."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 without experts."""
        if self.experts is None:
            return 0
        biases = 2 * self.experts.intermediate_size + self.hidden_size
        products = 3 * self.hidden_size * self.experts.intermediate_size
        return products + biases * self.experts.has_bias

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
        shared = self.experts.num_shared_experts * self.expert_parameters / tensor_parallel
        router = self.experts.num_experts * (self.hidden_size + self.experts.has_router_bias)
        router += self.hidden_size * self.experts.has_shared_gate
        return routed + shared + router

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
            + num_tables * self.num_embedding_parameters / tensor_parallel
            + self.num_attention_layers * self.attention_parameters(tensor_parallel)
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
            self.num_attention_layers * self.attention_parameters(tensor_parallel)
            + self.num_linear_layers * linear
            + self.num_dense_layers * self.mlp_parameters / tensor_parallel
            + self.num_expert_layers * mixture
        )

    @property
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
        if self.experts is not None:
            num_idle = self.experts.num_experts - self.experts.experts_per_token
            idle += self.num_expert_layers * num_idle * self.expert_parameters
        return self.num_parameters - idle

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the KV cache bytes of one token: its keys and values, or its latent vector."""
        return round(self.shard_kv_bytes_per_token(dtype, tensor_parallel=1))

    def shard_kv_bytes_per_token(self, dtype: str, tensor_parallel: int) -> float:
        """Return the KV cache bytes of one token on each of `tensor_parallel` GPUs, in layers whose cache grows.

        With more GPUs than key-value heads, each GPU has one head. Every GPU has the whole latent vector.
        """
        return self.num_growing_layers * self._cached_values(tensor_parallel) * BYTES[dtype]

    def shard_state_bytes(self, dtype: str, tensor_parallel: int) -> float:
        """Return the bytes of a rollout on each of `tensor_parallel` GPUs that do not grow: windows and linear states."""
        windowed = self.num_windowed_layers if self.num_full_layers else 0
        window = (self.sliding_window or 0) * self._cached_values(tensor_parallel) * BYTES[dtype]
        states = 0.0
        if self.linear is not None:
            width = max(2, BYTES[dtype])
            states = self.linear.num_layers * self.linear.state_bytes(width, tensor_parallel)
        return windowed * window + states

    def _cached_values(self, tensor_parallel: int) -> float:
        """Return the number of values of one token in the KV cache of one layer on one GPU."""
        if self.latent is not None:
            return float(self.latent.kv_lora_rank + self.latent.rope_head_dim)
        return 2 * max(1.0, self.num_kv_heads / tensor_parallel) * self.head_dim

    def forward_flops(self, num_tokens: float, context_pairs: float) -> float:
        """Return the FLOPs of a forward pass over `num_tokens` tokens.

        Each parameter takes two FLOPs for each token. In each head, a pair of a token and a token that it
        attends to takes two FLOPs for each channel of a key and of a value. Latent attention is counted with
        expanded keys and values, as in prefill and training. Decoding on latent vectors would take
        2 (2 `kv_lora_rank` + `rope_head_dim`) for each pair and head. In layers with a window, every token
        is assumed to have a full window. Linear attention counts its reads and changes of the states.

        Args:
            num_tokens: tokens of the pass.
            context_pairs: pairs of a token and a token that it attends to, in one layer with full attention.
        """
        values_dim = self.head_dim if self.latent is None else self.latent.v_head_dim
        of_pair = 2.0 * self.num_heads * (self.head_dim + values_dim)
        of_token = 2.0 * self.num_active_parameters
        of_token += self.num_windowed_layers * of_pair * (self.sliding_window or 0)
        if self.linear is not None:
            of_token += self.linear.num_layers * self.linear.token_flops
        return of_token * num_tokens + self.num_full_layers * of_pair * context_pairs


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
    hidden = model.hidden_size
    for inner, outer in _attention(model):
        yield inner, outer, model.num_layers
    if model.num_dense_layers:
        yield hidden, model.intermediate_size, 2 * model.num_dense_layers
        yield model.intermediate_size, hidden, model.num_dense_layers
    if model.experts is not None:
        experts = model.experts
        count = model.num_expert_layers * (num_experts + experts.num_shared_experts)
        yield hidden, experts.intermediate_size, 2 * count
        yield experts.intermediate_size, hidden, count


def _attention(model: ModelShape) -> Iterator[tuple[int, int]]:
    hidden, heads, latent = model.hidden_size, model.num_heads, model.latent
    if latent is None:
        yield hidden, heads * model.head_dim
        yield hidden, model.num_kv_heads * model.head_dim
        yield hidden, model.num_kv_heads * model.head_dim
        yield heads * model.head_dim, hidden
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

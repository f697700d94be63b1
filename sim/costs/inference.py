"""Compose a replica's decode step and prefill from operators.

One layer has four matrix products (queries, keys and values; output; gate and up; down), attention,
the collectives of tensor parallelism, and elementwise kernels. The head is one more product. The
inference engine adds overheads (`streamrl.sim.costs.overheads`), which are the same for every model
and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from streamrl.hardware.compressed_attention import CompressedAttention
from streamrl.hardware.indexer import Indexer
from streamrl.hardware.model_shape import (
    BYTES,
    Experts,
    LatentAttention,
    LinearAttention,
    ModelShape,
)
from streamrl.hardware.operator_tables import (
    HEAD_DIM,
    LATENT_DIM,
    LATENT_HEAD,
    LATENT_HIDDEN,
    LATENT_QUERY_RANK,
    Floats,
)
from streamrl.hardware.precision import OF_EXPERTS, is_narrow, width_of
from streamrl.sim.costs.experts import dispatched_experts_time, experts_time
from streamrl.sim.costs.interconnect import Interconnect, all_to_all_time
from streamrl.sim.costs.kernels import Estimate, Kernels, total, unmeasured
from streamrl.sim.costs.overheads import ServingEngine, load_engine

SCORES_SHARE = 0.5
"""Share of attention's products that an indexer computes: scores of queries and keys, but no values."""
GATE_PASSES = 6
"""Passes of a short convolution over its channels: two products with a gate, each of two inputs and an output."""
WINDOWED = "layers with a window"
"""What the seconds of sliding-window attention are said to be for."""
ENTRIES = "attention to compressed tokens"
"""Name of these seconds where a band says what is not measured."""
MOST_MEASURED = 1024
"""Tokens up to which whole modules of latent attention were measured."""
SHORTEST_CONTEXT = 512.0
"""Tokens from which decode attention is fitted: the smallest context in its tables."""
NORM_BYTES, MLP_BYTES, SAMPLE_BYTES = 16, 6, 16
"""Bytes of elementwise kernels in 16 bits, per channel or logit. A layer reads and writes the
residual stream around two norms (4 passes of 2 + 2 bytes). The MLP's gate, up and product pass once
(3 of 2 bytes). Sampling reads and writes the logits in float32 twice.
"""
NORM_SUMS_BYTES = 8
"""Bytes of two sums in float32."""


@dataclass(frozen=True)
class Shard:
    """The part of a replica on one GPU."""

    model: ModelShape
    kernels: Kernels
    """Kernels of the GPU. The engine's own tables replace the GPU's, where it has them."""
    tensor_parallel: int = 1
    expert_parallel: int = 1
    engine: ServingEngine = field(default_factory=load_engine)
    pipeline_parallel: int = 1
    """Stages of the replica. This object counts the layers of all stages;
    `streamrl.sim.costs.curves` divides them.
    """
    data_parallel: int = 1
    """Groups of tensor ranks; each attends to its own tokens, and all share the experts."""
    overlaps_dispatch: bool = False
    """Whether the all-to-all of one half of a batch overlaps with computing the other half, if
    that is faster.
    """
    queries: int = 1
    """Tokens of each rollout in a decode step; more than one if drafted tokens are checked."""
    wires: Interconnect | None = None
    """None if NVLink joins all GPUs of a replica."""
    mixing_kernels: Kernels = field(init=False)
    """Kernels of the products around attention."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    def __post_init__(self) -> None:
        kernels = self.kernels.of_engine(self.engine.kernels)
        keeps = self.model.experts is not None and kernels.kept in OF_EXPERTS
        object.__setattr__(self, "kernels", kernels)
        object.__setattr__(self, "mixing_kernels", kernels.wide if keeps else kernels)

    # A layer ------------------------------------------------------------------------------------------

    def products(self, tokens: Floats, routed: Floats | None = None) -> Estimate:
        """Return the seconds of all layers without attention over cached tokens, for `tokens` new tokens per pass.

        With attention ranks, `tokens` is the number on the fullest rank, and the all-to-all is
        included. `routed` is the number on all ranks together; if None, all ranks have the same
        number.
        """
        routed = tokens * self.data_parallel if routed is None else routed
        computed = self._computed(tokens, routed)
        if self.data_parallel == 1:
            return computed
        whole = computed + self._all_to_all(tokens)
        if not self.overlaps_dispatch:
            return whole
        half = np.maximum(1.0, tokens / 2)
        parts = (self._computed(half, np.maximum(1.0, routed / 2)), self._all_to_all(half))
        seconds = 2 * np.maximum(*(part.seconds for part in parts))
        seconds = np.minimum(whole.seconds, seconds)
        return whole.taking(seconds)

    def _computed(self, tokens: Floats, routed: Floats) -> Estimate:
        """Return the seconds of the same layers without the all-to-all."""
        model, degree = self.model, self.tensor_parallel
        layers = [self._all_projections(tokens)]
        if model.linear is not None:
            layers.append(self._linear_projections(tokens, model.linear) * model.linear.num_layers)
        if model.num_dense_layers:
            layers.append(self._mlp(tokens, model.intermediate_size) * model.num_dense_layers)
        if model.experts is not None:
            layers.append(self._experts(tokens, routed) * model.num_expert_layers)
        if degree > 1:
            num_reduces = model.num_blocks
            num_reduces -= model.num_expert_layers if self.data_parallel > 1 else 0
            layers.append(self._all_reduce(tokens) * num_reduces)
            if model.qk_norm_spans_heads:
                layers.append(self._norms_reduced(tokens) * model.num_attention_layers)
        if model.hyper_connections is not None:
            layers.append(self._streams(tokens))
        norms = tokens * NORM_BYTES / 2 * self._width * model.hidden_size * (model.num_blocks / 2)
        return total([*layers, self.kernels.traffic(norms)])

    def head(self, rollouts: Floats) -> Estimate:
        """Return the seconds of logits and sampling for the last token of each rollout."""
        vocab = self.model.vocab_size / self.tensor_parallel
        product = self.kernels.wide_time("gemm", rollouts, n=vocab, k=self.model.hidden_size)
        return product + self.kernels.traffic(SAMPLE_BYTES * vocab * rollouts)

    @property
    def _width(self) -> int:
        return BYTES[self.kernels.wire_dtype]

    def _linear_projections(self, tokens: Floats, linear: LinearAttention) -> Estimate:
        """Return the seconds of the products for queries, keys, values, gates and output, and of the convolution."""
        degree, hidden = self.tensor_parallel, float(self.model.hidden_size)
        products = self._mixing(tokens, linear.projected_dim / degree, hidden)
        mixed = 2 * self._width * tokens * linear.mixed_dim / degree
        output = self._mixing(tokens, hidden, linear.value_dim / degree)
        found = total([products, self.kernels.traffic(mixed), output])
        if not linear.num_widened:
            return found
        widened = self._mixing(tokens, linear.value_dim / degree, float(linear.value_head_dim))
        return found + widened * linear.num_widened

    def _all_projections(self, tokens: Floats) -> Estimate:
        """Return the seconds of the products around attention in all layers."""
        model = self.model
        if model.compressed is not None:
            return self._compressed_projections(tokens, model.compressed)
        if model.window_heads is None:
            own = self._projections(tokens, model) * model.num_attention_layers
        else:
            own = self._projections(tokens, model) * model.num_full_layers
            own += self._projections(tokens, model.windowed) * model.num_windowed_layers
        if model.layer_inputs is None:
            return own
        products = model.layer_inputs.products(model.hidden_size, model.num_layers)
        return own + total(self._mixing(tokens, n, k) * count for k, n, count in products)

    def _compressed_projections(self, tokens: Floats, compressed: CompressedAttention) -> Estimate:
        """Return the seconds of the products around compressed attention in all layers, with those of compressors."""
        model, degree, hidden = self.model, self.tensor_parallel, self.model.hidden_size
        queries = model.num_heads * model.head_dim / degree
        groups = compressed.output_groups / degree
        own = compressed.products(hidden, model.head_dim, queries, groups)
        layer = total(self._mixing(tokens, outer, inner) for inner, outer in own)
        others = total(
            self._mixing(tokens, outer, inner) * count
            for inner, outer, count in compressed.compressors(hidden, model.head_dim)
        )
        return layer * model.num_layers + others

    def _streams(self, tokens: Floats) -> Estimate:
        """Return the seconds to read, write and mix the residual streams of hyper-connections in all blocks.

        A block reads all streams twice and writes them once. It also writes its input, and reads its output.
        """
        streams = self.model.hyper_connections
        assert streams is not None
        passes = 3 * streams.num_streams + 2
        moved = self._width * passes * self.model.hidden_size * self.model.num_blocks
        return self.kernels.traffic(tokens * moved)

    def _projections(self, tokens: Floats, model: ModelShape) -> Estimate:
        if model.latent is not None:
            return self._latent_projections(tokens)
        degree, hidden = self.tensor_parallel, float(model.hidden_size)
        heads, kv_heads = model.num_heads / degree, max(1.0, model.num_kv_heads / degree)
        gated = heads * model.head_dim * (1 + model.has_output_gate)
        values = model.value_head_dim * model.has_value_projection
        made = self._mixing(tokens, gated + kv_heads * (model.head_dim + values), hidden)
        inner = heads * model.value_head_dim
        found = made + self._mixing(tokens, hidden, inner, follows_norm=False)
        return (
            found if model.indexer is None else found + self._index_products(tokens, model.indexer)
        )

    def _all_reduce(self, tokens: Floats) -> Estimate:
        """Return the seconds of the all-reduce over tensor ranks."""
        return self._reduced(tokens * self.model.hidden_size * self._width)

    def _norms_reduced(self, tokens: Floats) -> Estimate:
        """Return the seconds to all-reduce a token's sums of squared queries and keys, in 4 bytes each."""
        return self._reduced(tokens * NORM_SUMS_BYTES)

    def _reduced(self, num_bytes: Floats) -> Estimate:
        """Return the seconds to all-reduce bytes in a node, between nodes of an NVLink domain, or between domains."""
        ranks, wires, kernels = self.tensor_parallel, self.wires, self.kernels
        if wires is not None and ranks > wires.domain:
            return wires.reduced(num_bytes, ranks // wires.domain)
        if wires is not None and ranks > wires.node and not self.engine.constants.spans_nodes:
            kernels = kernels.of_engine({"all_reduce": "nccl"})
        return kernels.time("all_reduce", num_bytes, gpus=ranks)

    def _linear(
        self,
        tokens: Floats,
        n: float,
        k: float,
        kernels: Kernels | None = None,
        *,
        follows_norm: bool = True,
    ) -> Estimate:
        """Return the seconds of a product with weights; some engines quantise its inputs in a separate kernel.

        In nvfp4, a norm quantises what it returns, but attention and activations do not. A product
        after those was measured together with the kernel that quantises its inputs.
        """
        kernels = kernels or self.kernels
        has_own = not follows_norm and kernels.has_table("quantised_gemm")
        product = kernels.time("quantised_gemm" if has_own else "gemm", tokens, n=n, k=k)
        if not is_narrow(kernels.dtype) or not self.engine.constants.quantises_apart:
            return product
        return product + kernels.time("quantise", tokens, k=k)

    def _mixing(self, tokens: Floats, n: float, k: float, *, follows_norm: bool = True) -> Estimate:
        """Return the seconds of a product around attention, which keeps 16 bits where only experts are narrow."""
        return self._linear(tokens, n, k, self.mixing_kernels, follows_norm=follows_norm)

    def _latent_projections(self, tokens: Floats) -> Estimate:
        """Return the seconds of projections to latent vectors and heads; each product absorbed into attention counts as one."""
        latent, hidden = self.model.latent, float(self.model.hidden_size)
        assert latent is not None
        heads = self.model.num_heads / self.tensor_parallel
        queries = heads * (latent.nope_head_dim + latent.rope_head_dim)
        rank = float(latent.kv_lora_rank)
        shapes = [
            (rank + latent.rope_head_dim, hidden),
            (rank, heads * latent.nope_head_dim),
            (heads * latent.v_head_dim, rank),
            (hidden, heads * latent.v_head_dim),
        ]
        if self.model.has_output_gate:
            shapes.append((heads * latent.v_head_dim, hidden))
        if latent.q_lora_rank is None:
            shapes.append((queries, hidden))
        else:
            shapes += [(latent.q_lora_rank, hidden), (queries, latent.q_lora_rank)]
        found = total(self._mixing(tokens, n, k) for n, k in shapes)
        found = self._as_measured(tokens, latent, heads, found)
        if self.model.indexer is None:
            return found
        return found + self._index_products(tokens, self.model.indexer)

    def _index_products(self, tokens: Floats, indexer: Indexer) -> Estimate:
        """Return the seconds of an indexer's products in a mean layer."""
        ranks = self.model.hidden_size, self.model.index_input_size
        indexed = total(self._mixing(tokens, n, k) for n, k in indexer.products(*ranks))
        return indexed * self._indexed_share

    def _as_measured(
        self, tokens: Floats, latent: LatentAttention, heads: float, found: Estimate
    ) -> Estimate:
        """Return the seconds of DeepSeek-V3's products as a whole module of them was measured, else `found`.

        The module was measured with up to `MOST_MEASURED` tokens. Beyond them it counts where it is
        faster, because its ratio to the roofline falls on.
        """
        sizes = latent.kv_lora_rank, latent.nope_head_dim, latent.v_head_dim
        is_known = sizes == (LATENT_DIM, LATENT_HEAD, LATENT_HEAD)
        is_known = is_known and latent.q_lora_rank == LATENT_QUERY_RANK
        is_known = is_known and self.model.hidden_size == LATENT_HIDDEN
        is_known = is_known and not self.engine.constants.composes_latent
        if not is_known or not self.mixing_kernels.has_table("latent_projections"):
            return found
        module = self.mixing_kernels.time("latent_projections", tokens, heads=heads)
        is_module = (tokens <= MOST_MEASURED) | (module.seconds < found.seconds)
        return module.where(is_module, found)

    @property
    def _indexed_share(self) -> float:
        """Share of the layers with attention that have an indexer of their own."""
        indexer = self.model.indexer
        return 0.0 if indexer is None else indexer.share(self.model.num_attention_layers)

    def _mlp(self, tokens: Floats, size: float) -> Estimate:
        width, hidden = size / self.tensor_parallel, float(self.model.hidden_size)
        made = (self.model.num_mlp_products - 1) * width
        products = self._linear(tokens, made, hidden)
        products += self._linear(tokens, hidden, width, follows_norm=False)
        return products + self.kernels.traffic(MLP_BYTES / 2 * self._width * width * tokens)

    def _experts(self, tokens: Floats, dealt: Floats) -> Estimate:
        experts = self.model.experts
        assert experts is not None
        constants, hidden = self.engine.constants, self.model.expert_input_size
        is_fused = constants.fuses_shared_experts and self.expert_parallel == 1
        is_fused = is_fused and experts.latent_size is None
        if self.data_parallel > 1:
            routed = self._dispatched_experts(dealt, experts)
        else:
            routed = experts_time(
                self.kernels,
                tokens,
                experts,
                hidden,
                self.tensor_parallel,
                self.expert_parallel,
                is_padded=self._pads_experts,
                num_fused=experts.num_shared_experts if is_fused else 0,
            )
        whole = self.model.hidden_size
        router = self.kernels.wide_time("gemm", tokens, n=experts.num_experts, k=whole)
        if experts.latent_size is not None:
            routed += self._linear(tokens, float(hidden), whole)
            routed += self._linear(tokens, float(whole), hidden)
        if is_fused or not experts.num_shared_experts:
            return routed + router
        shared = experts.num_shared_experts * experts.intermediate_size
        return total([routed, router, self._mlp(tokens, shared)])

    def _dispatched_experts(self, dealt: Floats, experts: Experts) -> Estimate:
        """Return the seconds of experts that all ranks share."""
        hidden, ranks = self.model.expert_input_size, self.expert_parallel
        return dispatched_experts_time(
            self.kernels, dealt, experts, hidden, ranks, is_padded=self._pads_experts
        )

    @property
    def _pads_experts(self) -> bool:
        """Return whether this engine puts fp8 experts into padded blocks on this GPU."""
        return self.kernels.gpu.generation in self.engine.constants.pads_experts

    def _all_to_all(self, tokens: Floats) -> Estimate:
        """Return the seconds of both all-to-alls in all layers, for `tokens` of each attention rank."""
        model, share = self.model, tokens / self.tensor_parallel
        assert self.wires is not None and model.experts is not None
        ranks, dtype = self.expert_parallel, self.kernels.dtype
        hidden = model.expert_input_size
        one = all_to_all_time(self.wires, share, model.experts, hidden, ranks, dtype)
        return one * model.num_expert_layers

    def sent_on(self, tokens: Floats) -> Estimate:
        """Return the seconds to send the residual stream to the next stage; each tensor rank sends its share."""
        assert self.wires is not None
        num_bytes = tokens * self.model.hidden_size * self._width / self.tensor_parallel
        return self.wires.sent_on(num_bytes, self.num_gpus)

    # Attention ----------------------------------------------------------------------------------------

    def decode_attention(self, rollouts: int, contexts: Floats) -> Estimate:
        """Return the seconds of attention in all layers; each rollout reads `contexts` cached tokens."""
        model = self.model
        found = []
        if model.compressed is not None:
            return self._compressed_decode(rollouts, contexts, model.compressed)
        if model.num_full_layers:
            found.append(self._decode_layer(rollouts, contexts, model) * model.num_full_layers)
        if model.num_windowed_layers:
            seen = np.minimum(contexts, float(model.sliding_window or 0))
            layer = self._decode_layer(rollouts, seen, model.windowed).within(WINDOWED)
            found.append(layer * model.num_windowed_layers)
        if model.linear is not None:
            batches = np.full(len(contexts), float(rollouts * self.queries))
            step = self._linear_decode(batches, model.linear)
            found.append(step * model.linear.num_layers)
        return total(found)

    def _compressed_decode(
        self, rollouts: int, contexts: Floats, compressed: CompressedAttention
    ) -> Estimate:
        """Return the seconds of attention to the window and to entries in all layers, and of the index.

        A vector is key and value of all heads, as a latent vector is. So a layer takes as long as latent
        attention over as many tokens. With the products, this is within 7 % in median, and 20 % at p90, of
        1,472 whole blocks in fp8 with vLLM 0.24 (aiconfigurator-core 0.12.0, H100, H200, B200, GB200).
        """
        window = np.minimum(contexts, float(self.model.sliding_window or 0))
        sparse = np.minimum(
            contexts / compressed.sparse_ratio, float(compressed.indexer.top_k or np.inf)
        )
        dense = contexts / compressed.dense_ratio
        layers = (
            (self.model.num_windowed_layers, 0 * contexts),
            (compressed.num_sparse_layers, sparse),
            (compressed.num_dense_layers, dense),
        )
        found = total(
            self._latent_decode(rollouts, window + entries) * count
            for count, entries in layers
            if count
        ).within(ENTRIES)
        indexed = rollouts * contexts / compressed.sparse_ratio * compressed.indexer.cached_bytes
        return found + self.kernels.traffic(indexed) * compressed.num_sparse_layers

    def _linear_decode(self, batches: Floats, linear: LinearAttention) -> Estimate:
        """Return the seconds of one layer's linear attention over a token of each rollout."""
        heads = linear.measured_heads / self.tensor_parallel
        match linear.kind:
            case "gated-delta":
                return self.kernels.time("linear_decode", batches, heads=heads)
            case "kimi-delta":
                return self.kernels.time("kimi_decode", batches, heads=heads)
            case "mamba-2":  # no table has the kernel of its states
                return self.kernels.roofline_time("linear_decode", batches, heads=heads)
            case "short-convolution":
                kept = linear.state_bytes(round(self._width), self.tensor_parallel)
                return self.kernels.traffic(2 * batches * kept)
            case _:
                assert_never(linear.kind)

    def _linear_prefill(
        self, sequences: float, contexts: Floats, linear: LinearAttention
    ) -> Estimate:
        """Return the seconds of one layer's linear attention over prompts."""
        heads, tokens = linear.measured_heads / self.tensor_parallel, sequences * contexts
        match linear.kind:
            case "gated-delta":
                return self.kernels.time("linear_prefill", tokens, heads=heads)
            case "kimi-delta":
                return self.kernels.time("kimi_prefill", tokens, heads=heads, batch=sequences)
            case "mamba-2":
                return self.kernels.roofline_time("linear_prefill", tokens, heads=heads)
            case "short-convolution":  # its gates; the projections count the convolution
                channels = linear.value_dim / self.tensor_parallel
                return self.kernels.traffic(GATE_PASSES * tokens * self._width * channels)
            case _:
                assert_never(linear.kind)

    def _decode_layer(self, rollouts: int, contexts: Floats, model: ModelShape) -> Estimate:
        """Return the seconds of one attention layer, in the format of the cache."""
        if model.indexer is None:
            return self._dense_decode_layer(rollouts, contexts, model)
        attended = np.minimum(contexts, float(model.max_attended or np.inf))
        keys = self.kernels.traffic(rollouts * contexts * model.indexer.cached_bytes)
        sparse = self._dense_decode_layer(rollouts, attended, model)
        if dense := model.dense_share:
            whole = self._dense_decode_layer(rollouts, contexts, model)
            sparse = sparse * (1 - dense) + whole * dense
        return sparse + keys * self._indexed_share

    def _dense_decode_layer(self, rollouts: int, contexts: Floats, model: ModelShape) -> Estimate:
        kernels = self.kernels
        if model.latent is not None:
            return self._latent_decode(rollouts, contexts)
        heads, kv_heads = self._heads(model)
        if self.engine.constants.reads_cache_per_head:
            kv_heads = heads
        return kernels.cached_time(
            "decode_attention",
            contexts,
            heads=heads * self.queries,
            kv_heads=kv_heads,
            batch=rollouts,
        )

    def _latent_decode(self, rollouts: int, contexts: Floats) -> Estimate:
        """Return the seconds of one layer in which all heads read the same vector of each token."""
        heads = self.model.num_heads / self.tensor_parallel * self.queries
        return self.kernels.cached_time(
            "latent_decode_attention", contexts, heads=heads, batch=rollouts
        )

    def prefill_attention(self, sequences: float, contexts: Floats) -> Estimate:
        """Return the seconds of causal attention in all layers over `sequences` prompts of `contexts` tokens each."""
        model, found = self.model, []
        if model.compressed is not None:
            return self._compressed_prefill(sequences, contexts, model.compressed)
        if model.num_full_layers:
            found.append(self._full_layer(sequences, contexts) * model.num_full_layers)
        if model.num_windowed_layers:
            found.append(self._windowed_layer(sequences, contexts) * model.num_windowed_layers)
        if model.linear is not None:
            pass_ = self._linear_prefill(sequences, contexts, model.linear)
            found.append(pass_ * model.linear.num_layers)
        return total(found)

    def _compressed_prefill(
        self, sequences: float, contexts: Floats, compressed: CompressedAttention
    ) -> Estimate:
        """Return the seconds of attention to the window and to entries in all layers, and of the index."""
        model, index = self.model, compressed.indexer
        window = self._windowed_layer(sequences, contexts) * model.num_layers
        whole = self._prefill_layer(sequences, contexts, model)
        heads = index.num_heads * index.head_dim / HEAD_DIM
        scores = self.kernels.time(
            "prefill_attention", contexts, heads=heads, kv_heads=1.0, batch=sequences
        )
        shares = compressed.causal_shares(contexts)
        seconds = window.seconds + whole.seconds * (
            compressed.num_sparse_layers * shares[0] + compressed.num_dense_layers * shares[1]
        )
        scored = scores.seconds * SCORES_SHARE / compressed.sparse_ratio
        seconds += scored * compressed.num_sparse_layers
        return unmeasured(
            seconds, "attention to entries: as causal attention with as many pairs", ENTRIES
        )

    def _full_layer(self, sequences: float, contexts: Floats) -> Estimate:
        """Return the seconds of a layer without a window; sparse attention scores all pairs and attends to few."""
        model = self.model
        if model.indexer is None:
            return self._prefill_layer(sequences, contexts, model)
        attended = self._limited(sequences, contexts, float(model.max_attended or np.inf), model)
        scored = self.kernels.time(
            "prefill_attention",
            contexts,
            heads=model.indexer.num_heads * model.indexer.head_dim / HEAD_DIM,
            kv_heads=1.0,
            batch=sequences,
        )
        seconds = scored.seconds * SCORES_SHARE * self._indexed_share
        if dense := model.dense_share:
            whole = self._prefill_layer(sequences, contexts, model)
            attended = attended * (1 - dense) + whole * dense
        return attended + unmeasured(
            seconds, "scores of an indexer: half of attention's products", "scores of an indexer"
        )

    def _prefill_layer(self, sequences: float, contexts: Floats, model: ModelShape) -> Estimate:
        heads, kv_heads = self._heads(model)
        return self.kernels.time(
            "prefill_attention", contexts, heads=heads, kv_heads=kv_heads, batch=sequences
        )

    def _windowed_layer(self, sequences: float, contexts: Floats) -> Estimate:
        """Return the seconds of a layer with the sliding window."""
        window = float(self.model.sliding_window or 0)
        return self._limited(sequences, contexts, window, self.model.windowed).within(WINDOWED)

    def _limited(
        self, sequences: float, contexts: Floats, most: float, model: ModelShape
    ) -> Estimate:
        """Return the seconds of a layer whose tokens attend to at most `most` tokens.

        A token past the limit has twice the mean pairs of one within it.
        """
        first = self._prefill_layer(sequences, np.minimum(contexts, most), model)
        times = np.maximum(1.0, 2 * contexts / most - 1)
        return first.taking(first.seconds * times)

    def _heads(self, model: ModelShape) -> tuple[float, float]:
        """Return the query and key heads on this GPU, in units of the measured 128 channels of keys and of values."""
        wide = (model.head_dim + model.values_width) / 2 / HEAD_DIM
        heads = model.num_heads / self.tensor_parallel
        return heads * wide, max(1.0, model.num_kv_heads / self.tensor_parallel) * wide

    # The datasheet's view -----------------------------------------------------------------------------

    def step_work(self, num_running: int, context: int) -> tuple[float, float]:
        """Return the FLOPs and bytes of memory traffic of one decode step on this GPU, at `context` tokens a rollout."""
        model, degree = self.model, self.tensor_parallel
        cache = model.shard_kv_bytes_per_token(self.kernels.cache_dtype, degree)
        tables = model.num_embedding_parameters / degree
        weights = model.shard_parameters(degree, self.expert_parallel)
        weights -= 0 if model.has_tied_embeddings else tables
        if model.experts is not None:
            experts = model.experts
            miss = (1 - experts.experts_per_token / experts.num_experts) ** num_running
            routed = experts.num_experts * model.expert_parameters / degree
            weights -= model.num_expert_layers * routed * miss
        flops = model.forward_flops(num_running, num_running * context) / degree
        width = width_of(self.kernels.kept, model.hidden_size)
        return flops, weights * width + cache * num_running * context

    # Overheads ----------------------------------------------------------------------------------------

    def overhead(self, rollouts: Floats, share: float = 1.0) -> Estimate:
        """Return the overhead of a step in seconds, for a stage with this share of the layers."""
        gpu = self.kernels.gpu
        if not self.kernels.is_composed:
            assumed = np.full(len(rollouts), float(gpu.roofline.step_overhead))
            source = f"assumed overhead of a step on {gpu.name}"
            return unmeasured(assumed, source, "overhead of a decode step")
        constants = self.engine.constants
        layers = self.model.num_blocks / 2
        seconds = constants.step + constants.layer * layers * share + 0 * rollouts
        seconds += (constants.request + constants.logit * self.model.vocab_size) * rollouts
        return Estimate(seconds, np.zeros_like(seconds), (self.engine.source,))

    def waiting(self, seconds: Floats) -> Estimate:
        """Return the seconds that the host needs to launch kernels beyond their `seconds` on the GPU."""
        launching = self.engine.constants.launch * self.model.num_blocks / 2
        is_modelled = float(self.kernels.is_composed)
        waited = np.maximum(0.0, launching - seconds) * is_modelled
        return Estimate(waited, np.zeros_like(waited), (self.engine.source,))

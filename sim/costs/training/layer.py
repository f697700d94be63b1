"""Compute the seconds of one layer's forward and backward passes on one GPU, with LoRA adapters and context parallelism.

One layer's passes over a micro-batch, term by term:

| term        | forward                                                                | backward |
|-------------|------------------------------------------------------------------------|----------|
| products    | FLOPs at the rate that kernel tables give for their size               | twice, once with adapters |
| adapters    | bytes through memory, see below                                        | its own  |
| attention   | the prefill kernel's seconds, a straight line in tokens and pairs      | 2.8 x    |
| linear      | linear-attention layers: seconds of a chunked prefill, by tokens       | 2.55 x   |
| activations | bytes that are kept, times `activation_traffic`, through memory        | twice    |
| softmax     | `logit_traffic` bytes a logit through memory, on the last stage        | twice    |
| loss        | instead of that softmax: bytes a logit, counted in a framework's code  | its own  |
| experts     | grouped products at a rate that falls with few tokens or few channels  | twice    |
| permutation | tokens into the order of their experts and back, through memory        | twice    |
| all-to-all  | once per node and GPU if copies are saved, else each copy              | as much  |
| slices      | ranks of one expert gather its tokens, and scatter their sums          | as much  |
| routing     | counts of tokens that hosts and GPUs wait for, longer on slower hosts  | as much  |
| reduce      | tensor ranks gather and scatter the hidden state twice                 | 1.5 x, or as much without sequence parallelism |

Recomputation adds the forward pass to the backward pass. With `mlp` it adds only the MLP's share,
and with `selective` only norms and activations. Every term has a constant part, a part per token,
and a part per pair of tokens.

LoRA adapters add bytes through memory; their products are small in comparison:

| bytes through memory, times a value       | fused                      | otherwise                  |
|-------------------------------------------|----------------------------|----------------------------|
| forward: of a layer's inputs, its outputs | 1, 2: added as it is made  | 1, 4: written, then added  |
| backward: the same of their gradients     | 3, 2                       | 5, 2                       |

In the forward pass, A reads the inputs, and B's product is added to the outputs. The backward pass
reads the outputs' gradient twice: for the gradient of B, and for the gradient that goes on to A. It
reads the inputs again for the gradient of A, and adds the result to the inputs' gradient. This is a
roofline, because no published measurement isolates adapters.

Context ranks exchange data so that the tokens of one attend to those of the others:

| exchange   | bytes that a rank sends of one layer, forward                           | backward | hidden behind            |
|------------|-------------------------------------------------------------------------|----------|--------------------------|
| ring       | keys and values of its tokens, c - 1 times, to its neighbour            | twice    | attention over the parts |
| all-gather | the same to all, by rings over all ports of a node                      | twice    | nothing                  |
| all-to-all | of its tokens' queries, keys, values and output the heads of the others | as much  | nothing                  |

The backward pass of the first two needs keys and values again, and returns their gradients.
Sources: ring attention (Liu et al. 2023, arXiv 2310.01889), all-gather (Llama 3, arXiv 2407.21783,
section 3.3.2), all-to-all of heads (DeepSpeed Ulysses, arXiv 2309.14509). Each rank gets two parts
of a sequence, so that all ranks have the same number of pairs. Slower kernels on the short parts of
a ring are not counted.
"""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt
from typing import NamedTuple, assert_never

import numpy as np
from msgspec import Struct

from streamrl.hardware.activations import context_channels, layer_activations
from streamrl.hardware.compressed_attention import CompressedAttention
from streamrl.hardware.model_shape import LinearAttention, ModelShape, passed_layers
from streamrl.hardware.operator_tables import HEAD_DIM, Floats
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.profile import Constants, ExpertRate, GemmRate
from streamrl.sim.costs.training.ranks import Ranks


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of a pass over one micro-batch."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    """Seconds for each pair of a token and one before it."""
    per_repeat: float = 0.0
    """Seconds for each token times the packed sequences of its micro-batch."""

    def __add__(self, other: Pass) -> Pass:
        """Add two passes, one after the other."""
        return Pass(
            fixed=self.fixed + other.fixed,
            per_token=self.per_token + other.per_token,
            per_pair=self.per_pair + other.per_pair,
            per_repeat=self.per_repeat + other.per_repeat,
        )

    def __mul__(self, times: float) -> Pass:
        """Repeat a pass `times` times."""
        return Pass(
            fixed=self.fixed * times,
            per_token=self.per_token * times,
            per_pair=self.per_pair * times,
            per_repeat=self.per_repeat * times,
        )

    def shared(self, ranks: int) -> Pass:
        """Return the seconds of one of `ranks` that share the micro-batch; a product of few tokens stays slow."""
        return Pass(
            fixed=self.fixed,
            per_token=self.per_token / ranks,
            per_pair=self.per_pair / ranks,
            per_repeat=self.per_repeat / ranks,
        )

    def time(self, tokens: Floats, pairs: Floats) -> Floats:
        """Return the seconds of micro-batches of one sequence, with these tokens and pairs."""
        return self.fixed + (self.per_token + self.per_repeat) * tokens + self.per_pair * pairs


def product(rate: GemmRate, columns: float, rows: float) -> Pass:
    """Return the seconds of (tokens, rows) times (rows, columns), at the rate of a product of that size."""
    seconds = 2 * columns * rows / rate.flops
    slower = 1 + rate.columns / columns + rate.rows / rows
    return Pass(fixed=seconds * rate.tokens, per_token=seconds * slower)


class LossPasses(NamedTuple):
    """Seconds that a counted loss adds to the passes of the last stage."""

    scored: Pass
    forward: Pass
    backward: Pass


def loss_passes(ranks: Ranks) -> LossPasses:
    """Return the seconds in which a framework's log-probs and loss move logits through memory; none if not counted."""
    loss, trainer = ranks.loss, ranks.trainer
    if loss is None:
        return LossPasses(Pass(), Pass(), Pass())
    bandwidth = ranks.gpu.memory_bandwidth * ranks.gpu.roofline.bandwidth_efficiency
    split = trainer.tensor_parallel * trainer.context_parallel
    second = ranks.model.vocab_size / split / bandwidth
    return LossPasses(
        Pass(per_token=loss.scored_bytes * second),
        Pass(per_token=loss.forward_bytes * second),
        Pass(per_token=loss.backward_bytes * second, per_repeat=loss.sequence_bytes * second),
    )


class AdapterPasses(NamedTuple):
    """Seconds that adapters add to a mean layer, if the actor trains adapters."""

    forward: Pass
    backward: Pass


def adapters_of(ranks: Ranks, flops: float) -> AdapterPasses:
    """Return the seconds that adapters add on one GPU.

    Args:
        ranks: the trainer's.
        flops: FLOP/s of its products.
    """
    if not ranks.frozen:
        return AdapterPasses(Pass(), Pass())
    layers = list(passed_layers(ranks.model))
    inputs = sum(inner * count for inner, _, count in layers)
    outputs = sum(outer * count for _, outer, count in layers)
    weights = ranks.adapter_rank * (inputs + outputs)
    once, added = (2, 3) if ranks.trainer.kernels == "fused" else (4, 5)
    bandwidth = ranks.gpu.memory_bandwidth * ranks.gpu.roofline.bandwidth_efficiency
    share = ranks.frozen / ranks.model.num_layers / ranks.trainer.tensor_parallel

    def a_pass(values: float, products: float) -> Pass:
        seconds = values * ranks.width / bandwidth + products * 2 * weights / flops
        return Pass(per_token=share * seconds)

    forward = a_pass(inputs + once * outputs, 1)
    return AdapterPasses(forward, a_pass(added * inputs + 2 * outputs, 2))


BACKWARD = 2.0
"""Cost of a backward pass in forward passes: the gradients of inputs and of weights."""
ATTENTION_BACKWARD = 2.8
"""Cost of attention's backward pass in forward passes: five products instead of two, at 640 and
570 TFLOP/s (FlashAttention-3, arXiv 2407.08608, Figures 5 and 6: causal, 128 channels, 16K tokens).
FlashAttention-2 reaches 73 and 63 % of the peak of A100, a cost of 2.9 (arXiv 2307.08691).
"""
LINEAR_BACKWARD = 2.55
"""Cost of linear attention's backward pass in forward passes, from FLA's kernels on Hopper. If
another kernel has the speed-ups f, b and t in forward, backward and both, the cost is (1 - t / f) /
(t / b - 1). It is 2.48 to 2.60 for six shapes of 32 and 64 heads, 4K to 64K tokens
(github.com/NVIDIA/Megatron-LM pull 5564).
"""
REDUCE_BACKWARD = 1.5
"""Collectives of tensor ranks in a backward pass with sequence parallelism, relative to the forward
pass: inputs are gathered again for the gradient of weights (Korthikanti et al. 2022, section 4.2.2).
"""
REDUCES = 4
"""Gathers and scatters of tensor ranks in one layer's forward pass, two of each."""
MLP_REDUCES = 0.5
"""Share of those that belong to the MLP."""
SCORES_SHARE = 0.5
"""Share of attention's products that an indexer computes: scores of queries and keys, but no values."""
GATE_PASSES = 6
"""Passes of a short convolution over its channels: two products with a gate, each of two inputs and an output."""
SELECTIVE = 0.3
"""Share of a forward pass's activation traffic that recomputing norms and activations takes."""
QUANTISE_BYTES = 6
"""Bytes through memory to quantise a 16-bit value to fp8. It is read for its scale and read again.
Then it is written by rows and by columns, because both passes multiply it (Transformer Engine's
current scaling).
"""
PASS_TOKENS = 16384
"""Tokens of a pass at which attention is measured, or one sequence if that is longer."""
LENGTHS = np.geomspace(512, 65536, 8)
"""Tokens of a sequence over which the straight line of attention is fitted."""


class Layer(Struct, frozen=True, kw_only=True):
    """One layer of a model on a GPU of the trainer, averaged over layers with and without experts."""

    ranks: Ranks
    gemm: GemmRate
    experts: ExpertRate
    constants: Constants
    narrow: GemmRate | None = None
    """Rate of products of linear layers in fp8, whose inputs are quantised first; if None, `gemm`
    is used.
    """

    # Passes ---------------------------------------------------------------------------------------

    def forward(self) -> Pass:
        """Return the forward pass."""
        attention = self.attention() + self._linear()
        added = adapters_of(self.ranks, self.gemm.flops).forward
        return self._computed() + added + attention + self._reduced() + self._routed()

    def backward(self) -> Pass:
        """Return the backward pass with its recomputation."""
        backward = (
            self._computed() * BACKWARD
            + (self._projections() + self._mlps(is_moved=False)) * -self.ranks.frozen
            + adapters_of(self.ranks, self.gemm.flops).backward
            + self.attention() * ATTENTION_BACKWARD
            + self._linear() * LINEAR_BACKWARD
            + self._reduced() * self._reduced_again
            + self._routed()
        )
        match self.ranks.trainer.recompute:
            case "none":
                return backward
            case "selective":
                return backward + self._activations() * SELECTIVE
            case "mlp":
                mlps = self._mlps() + self._routed() + self._reduced() * MLP_REDUCES
                return backward + self._activations() * SELECTIVE + mlps
            case "full":
                return backward + self.forward()
            case _:
                assert_never(self.ranks.trainer.recompute)

    def head(self) -> Pass:
        """Return the forward pass of the output head and its softmax, for the last stage.

        A loss whose passes were counted in its code has its seconds apart (`loss_passes`).
        """
        if self.ranks.loss is not None:
            return self._unembedded()
        moved = self._unfused_logits() * self.constants.logit_traffic * self._logits
        return self._unembedded() + Pass(per_token=moved / self.ranks.gpu.memory_bandwidth)

    def head_backward(self) -> Pass:
        """Return the backward pass of both; the head has no adapters."""
        return self.head() * BACKWARD + self._unembedded() * -self.ranks.frozen

    # Terms ----------------------------------------------------------------------------------------

    def _computed(self) -> Pass:
        """Return the part of a forward pass that costs twice as much backward if all weights are trained."""
        return self._projections() + self._activations() + self._mlps()

    @property
    def _logits(self) -> float:
        return self.ranks.model.vocab_size / self.ranks.trainer.tensor_parallel

    def _unembedded(self) -> Pass:
        return product(self.gemm, self._logits, self.ranks.model.hidden_size)

    def _mlps(self, *, is_moved: bool = True) -> Pass:
        """Return a mean layer's MLP, with or without the all-to-all of experts."""
        model = self.ranks.model
        dense, found = model.num_dense_layers / model.num_layers, Pass()
        if dense:
            found += self._mlp(model.intermediate_size) * dense
        if model.experts is not None:
            bare = model.num_bare_layers / model.num_layers
            found += self._mixture(is_moved=is_moved) * (1 - dense - bare)
        return found

    def _product(self, columns: float, rows: float) -> Pass:
        """Return the product (tokens, rows) times (rows, columns) of a linear layer."""
        if self.narrow is None:
            return product(self.gemm, columns, rows)
        return product(self.narrow, columns, rows) + self._quantised(rows)

    def _quantised(self, values: float) -> Pass:
        """Return the quantisation of a token's inputs to fp8; fused kernels write fp8 in two layouts instead of 16 bits."""
        if self.narrow is None or self.ranks.trainer.kernels == "fused":
            return Pass()
        return Pass(per_token=QUANTISE_BYTES * values / self.ranks.gpu.memory_bandwidth)

    def _projections(self) -> Pass:
        """Return a mean layer's products around attention and linear attention."""
        model = self.ranks.model
        plain = self._attention_projections(model)
        if model.window_heads is not None:
            windowed = model.num_windowed_layers / model.num_attention_layers
            others = self._attention_projections(model.windowed)
            plain = plain * (1 - windowed) + others * windowed
        attending = model.num_attention_layers / model.num_layers
        if model.layer_inputs is not None:
            for inner, outer, count in model.layer_inputs.products(
                model.hidden_size, model.num_layers
            ):
                plain += self._product(outer, inner) * (count / model.num_layers)
        if model.linear is None:
            return plain * attending if attending < 1 else plain
        linear = model.linear.num_layers / model.num_layers
        return plain * attending + self._linear_projections(model.linear) * linear

    def _linear_projections(self, linear: LinearAttention) -> Pass:
        degree, hidden = self.ranks.trainer.tensor_parallel, self.ranks.model.hidden_size
        deltas = self._product(linear.projected_dim / degree, hidden)
        deltas += self._product(hidden, linear.value_dim / degree)
        if linear.num_widened:
            widened = self._product(linear.value_dim / degree, linear.value_head_dim)
            deltas += widened * linear.num_widened
        return deltas

    def _attention_projections(self, model: ModelShape) -> Pass:
        degree = self.ranks.trainer.tensor_parallel
        hidden, heads = float(model.hidden_size), model.num_heads / degree
        if model.compressed is not None:
            return self._compressed_projections(model.compressed)
        if model.latent is None:
            kv_heads = max(1.0, model.num_kv_heads / degree)
            widths = model.head_dim + model.value_head_dim * model.has_value_projection
            caches = kv_heads * widths
            made = heads * model.head_dim * (1 + model.has_output_gate) + caches
            output = self._product(hidden, heads * model.value_head_dim)
            found = self._product(made, hidden) + output
            return found + self._index_products(model) if model.indexer else found
        latent = model.latent
        rank, queries = latent.kv_lora_rank, heads * (latent.nope_head_dim + latent.rope_head_dim)
        values = heads * latent.v_head_dim
        found = (
            self._product(rank + latent.rope_head_dim, hidden)
            + self._product(heads * latent.nope_head_dim + values, rank)
            + self._product(hidden, values)
        )
        if model.has_output_gate:
            found += self._product(values, hidden)
        if latent.q_lora_rank is None:
            return found + self._product(queries, hidden)
        if model.indexer is not None:
            found += self._index_products(model)
        query = self._product(queries, latent.q_lora_rank)
        return found + self._product(latent.q_lora_rank, hidden) + query

    def _index_products(self, model: ModelShape) -> Pass:
        """Return the products of an indexer in a mean layer."""
        found, indexer = Pass(), model.indexer
        if indexer is None:
            return found
        for columns, inputs in indexer.products(model.hidden_size, model.index_input_size):
            found += self._product(columns, inputs)
        return found * indexer.share(model.num_attention_layers)

    def _compressed_projections(self, compressed: CompressedAttention) -> Pass:
        """Return a mean layer's products around compressed attention, with compressors and the index on every rank."""
        model, degree = self.ranks.model, self.ranks.trainer.tensor_parallel
        hidden, queries = model.hidden_size, model.num_heads * model.head_dim / degree
        found, groups = Pass(), compressed.output_groups / degree
        for inner, outer in compressed.products(hidden, model.head_dim, queries, groups):
            found += self._product(outer, inner)
        for inner, outer, count in compressed.compressors(hidden, model.head_dim):
            found += self._product(outer, inner) * (count / model.num_layers)
        return found

    def _mlp(self, size: float) -> Pass:
        width, hidden = size / self.ranks.trainer.tensor_parallel, self.ranks.model.hidden_size
        made = (self.ranks.model.num_mlp_products - 1) * width
        return self._product(made, hidden) + self._product(hidden, width)

    def _activations(self) -> Pass:
        """Return elementwise work; `_mixture` has the traffic of tokens that experts receive."""
        ranks, constants = self.ranks, self.constants
        found = layer_activations(ranks.model)
        again = (ranks.trainer.copies_of_norms - 1) * (found.inputs + found.norms)
        kept = (found.total - found.dispatched + again) * ranks.width
        moved = self._unfused() * constants.activation_traffic * kept
        return Pass(per_token=moved / ranks.trainer.tensor_parallel / ranks.gpu.memory_bandwidth)

    def _unfused(self) -> float:
        """Return the traffic of elementwise work relative to fused kernels."""
        match self.ranks.trainer.kernels:
            case "fused":
                return 1.0
            case "uncompiled":
                return self.constants.uncompiled_traffic
            case "eager":
                return self.constants.eager_traffic
            case _:
                assert_never(self.ranks.trainer.kernels)

    def _unfused_logits(self) -> float:
        """Return the traffic of the softmax, whose kernels may differ from those of the layers."""
        match self.ranks.trainer.logits:
            case "fused":
                return 1.0
            case "eager":
                return max(self._unfused(), self.constants.eager_traffic)
            case "chunked" | None:  # a chunk has the kernels of the layers
                return self._unfused()
            case other:
                assert_never(other)

    def attention(self) -> Pass:
        """Return the attention of a forward pass; context ranks may each have some heads for all tokens."""
        trainer = self.ranks.trainer
        dealt = trainer.context_parallel if trainer.context_exchange == "all-to-all" else 1
        split = trainer.tensor_parallel * dealt
        return self._seen(split) * (dealt * self.constants.attention)

    def _line(self, model: ModelShape, split: int) -> Pass:
        """Return the attention of one layer with the heads of `model`, on one of `split` ranks."""
        ranks, wide = self.ranks, (model.head_dim + model.values_width) / 2 / HEAD_DIM
        heads, caches = model.num_heads / split, max(1.0, model.num_kv_heads / split)
        return _attention_line(ranks.gpu_name, ranks.dtype, heads * wide, caches * wide)

    def _seen(self, split: int) -> Pass:
        """Return a mean layer's attention over full and windowed layers; every token counts with its full window."""
        model = self.ranks.model
        if model.compressed is not None:
            return self._compressed(model.compressed, split)
        found = self._full(split) * (model.num_full_layers / model.num_layers)
        if model.num_windowed_layers:
            line = self._line(model.windowed, split)
            window = line.per_token + line.per_pair * (model.sliding_window or 0)
            found += Pass(per_token=window) * (model.num_windowed_layers / model.num_layers)
        return found

    def _compressed(self, compressed: CompressedAttention, split: int) -> Pass:
        """Return a mean layer's attention to the window and to entries, and the scores of the index."""
        ranks, model, index = self.ranks, self.ranks.model, compressed.indexer
        line = self._line(model, split)
        window = line.per_token + line.per_pair * (model.sliding_window or 0)
        found = Pass(per_token=window)
        sparse = compressed.num_sparse_layers / model.num_layers
        if index.top_k is None:
            chosen = Pass(per_pair=line.per_pair / compressed.sparse_ratio)
        else:
            chosen = Pass(per_token=line.per_pair * index.top_k)
        found += chosen * sparse
        dense = compressed.num_dense_layers / model.num_layers / compressed.dense_ratio
        found += Pass(per_pair=line.per_pair) * dense
        heads = index.num_heads * index.head_dim / HEAD_DIM
        scores = _attention_line(ranks.gpu_name, ranks.dtype, heads, 1.0)
        return found + scores * (SCORES_SHARE * sparse / compressed.sparse_ratio)

    def _full(self, split: int) -> Pass:
        """Return a layer without a window; sparse attention scores all pairs, and every token attends to `top_k`."""
        model = self.ranks.model
        line = self._line(model, split)
        if model.indexer is None:
            return line
        scoring = model.indexer.num_heads * model.indexer.head_dim / HEAD_DIM
        scores = _attention_line(self.ranks.gpu_name, self.ranks.dtype, scoring, 1.0)
        most = model.max_attended
        if most is not None:
            dense = model.dense_share
            sparse = Pass(per_token=line.per_token + line.per_pair * most)
            line = sparse * (1 - dense) + line * dense
        return line + scores * (SCORES_SHARE * model.indexer.share(model.num_attention_layers))

    def _linear(self) -> Pass:
        """Return a mean layer's linear attention in a forward pass; training runs the prefill kernels."""
        linear = self.ranks.model.linear
        if linear is None:
            return Pass()
        kernels, tokens = Kernels(self.ranks.gpu_name, self.ranks.dtype), float(PASS_TOKENS)
        heads = linear.measured_heads / self.ranks.trainer.tensor_parallel
        share = linear.num_layers / self.ranks.model.num_layers
        if linear.kind == "short-convolution":
            channels = linear.value_dim / self.ranks.trainer.tensor_parallel
            moved = GATE_PASSES * self.ranks.width * channels
            return Pass(per_token=moved / self.ranks.gpu.memory_bandwidth) * share
        is_measured = linear.kind == "gated-delta"
        time = kernels.time if is_measured else kernels.roofline_time
        whole = time("linear_prefill", np.array([tokens]), heads=heads).seconds[0]
        return Pass(per_token=float(whole) / tokens) * share

    def _reduced(self) -> Pass:
        """Return the collectives of tensor ranks; an all-reduce is a scatter and a gather."""
        ranks = self.ranks
        degree, hidden = ranks.trainer.tensor_parallel, ranks.model.hidden_size
        wire = (degree - 1) / degree * hidden * ranks.width / ranks.gpu.nvlink
        blocks = ranks.model.num_blocks / ranks.model.num_layers / 2
        return Pass(per_token=self.constants.reduce * REDUCES * wire * blocks)

    @property
    def _reduced_again(self) -> float:
        """Collectives of a backward pass, relative to the forward pass."""
        return REDUCE_BACKWARD if self.ranks.trainer.sequence_parallel else 1.0

    # Experts --------------------------------------------------------------------------------------

    def _copies(self) -> float:
        """Return the tokens on one GPU for one of its micro-batch, each counted once per chosen expert."""
        experts, trainer = self.ranks.model.experts, self.ranks.trainer
        assert experts is not None
        return experts.experts_per_token * trainer.expert_slices / trainer.tensor_parallel

    def _imbalance(self) -> float:
        """Return the tokens of the fullest rank relative to a mean rank.

        A rank has the mean of its experts, whose relative deviation is `imbalance`. The fullest of
        e ranks is sqrt(2 ln e) deviations above the mean (the largest of e normal values).
        """
        experts, trainer = self.ranks.model.experts, self.ranks.trainer
        ranks = trainer.expert_parallel
        if experts is None or trainer.routing == "balanced" or ranks == 1:
            return 1.0
        deviation = self.constants.imbalance * sqrt(ranks / experts.num_experts)
        return 1 + deviation * sqrt(2 * log(ranks))

    def _mixture(self, *, is_moved: bool) -> Pass:
        """Return grouped products, permutation, and the experts that process all tokens."""
        ranks, constants, rate = self.ranks, self.constants, self.experts
        experts, trainer = ranks.model.experts, ranks.trainer
        assert experts is not None
        hidden, width = (
            ranks.model.expert_input_size,
            experts.intermediate_size / trainer.expert_slices,
        )
        copies = self._copies()
        seconds = 2 * copies * experts.num_products * hidden * width / rate.flops
        share = copies * max(1, trainer.expert_parallel) / experts.num_experts
        traffic = constants.permutation_traffic
        if trainer.shards_experts and trainer.dispatch == "all-to-all":
            traffic += constants.unfused_traffic
        moved = traffic * 2 * copies * hidden * ranks.width / ranks.gpu.memory_bandwidth
        found = Pass(
            fixed=seconds * rate.tokens / share,
            per_token=seconds * (1 + rate.width / width) + moved * is_moved,
        )
        found += self._quantised(copies * (hidden + width))
        found *= self._imbalance()
        if experts.latent_size is not None:
            whole = ranks.model.hidden_size
            found += self._product(hidden, whole) + self._product(whole, hidden)
        if not experts.num_shared_experts:
            return found
        return found + self._mlp(experts.num_shared_experts * experts.intermediate_size)

    def _routed(self) -> Pass:
        """Return the wait for token counts, both all-to-alls of expert ranks, and the collectives of ranks of one expert."""
        model, constants = self.ranks.model, self.constants
        if model.experts is None:
            return Pass()
        shown = 1 - constants.trade_overlap if self.ranks.trainer.overlaps_dispatch else 1.0
        traded = 2 * constants.trade * self._all_to_all_time() * self._imbalance()
        share = model.num_expert_layers / model.num_layers
        sliced = 2 * constants.reduce * self._slice_time() * self._imbalance()
        waited = constants.routing_time * self.ranks.host_slowdown
        routed = Pass(fixed=waited, per_token=traded) * (share * shown)
        return routed + Pass(per_token=sliced) * share

    def _slice_time(self) -> float:
        """Return the seconds in which ranks of one expert gather each other's copies for a token of the micro-batch.

        If copies are saved, a token is sent to all of these ranks at once (Megatron's flex
        dispatcher).
        """
        ranks, trainer = self.ranks, self.ranks.trainer
        if not trainer.shards_experts or trainer.dispatch == "deduplicated":
            return 0.0
        num_bytes = ranks.model.expert_input_size * ranks.width
        own = self._copies() / trainer.expert_slices
        return (trainer.expert_slices - 1) * own * num_bytes / ranks.gpu.nvlink

    def _all_to_all_time(self) -> float:
        """Return the seconds of one all-to-all for a token of the micro-batch.

        If copies are saved, a token goes at most once to each other node and each GPU, even if
        several of its experts are there (as in DeepEP and HybridEP).
        """
        ranks, trainer, experts = self.ranks, self.ranks.trainer, self.ranks.model.experts
        degree = trainer.expert_parallel
        if not trainer.shards_experts or experts is None:
            return 0.0
        nodes = max(1.0, trainer.expert_ranks / ranks.nvlink_domain)
        chosen = experts.experts_per_token
        num_bytes = ranks.model.expert_input_size * ranks.width / trainer.tensor_parallel
        match trainer.dispatch:
            case "deduplicated":
                reached = nodes * (1 - (1 - 1 / nodes) ** chosen) if nodes > 1 else 0.0
                outside = reached * (nodes - 1) / nodes
                inside = (trainer.expert_ranks - 1) * (1 - (1 - 1 / degree) ** chosen)
            case "all-to-all":
                outside, inside = chosen * (nodes - 1) / nodes, chosen * (1 / nodes - 1 / degree)
            case _:
                assert_never(trainer.dispatch)
        return num_bytes * (outside / ranks.gpu.network + inside / ranks.gpu.nvlink)


@lru_cache(maxsize=1024)
def _attention_line(gpu: str, dtype: str, heads: float, caches: float) -> Pass:
    """Fit a straight line in tokens and pairs to the prefill kernel, by least squares of relative errors.

    A call has as many sequences as fill a pass, because a single short one would not fill the GPU.
    """
    kernels = Kernels(gpu, dtype)
    seconds = []
    for length in LENGTHS:
        batch = max(1.0, PASS_TOKENS / length)
        one = kernels.time(
            "prefill_attention", np.array([length]), heads=heads, kv_heads=caches, batch=batch
        )
        seconds.append(float(one.seconds[0]) / batch)
    terms = np.stack([LENGTHS, LENGTHS**2 / 2], axis=1) / np.array(seconds)[:, None]
    (per_token, per_pair), *_ = np.linalg.lstsq(terms, np.ones(len(LENGTHS)), rcond=None)
    if per_token < 0:
        per_token, per_pair = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    return Pass(per_token=float(per_token), per_pair=float(per_pair))


RETURNS = 2.0
"""Transfers of a backward pass relative to the forward pass, if keys and values are sent and not
heads.
"""


def late_forward(layer: Layer) -> Pass:
    """Return the seconds for which a layer's forward pass waits for other ranks; negative if it does not wait."""
    return Pass(per_token=_sent(layer.ranks)) + _meanwhile(layer) * -1.0


def late_backward(layer: Layer) -> list[Pass]:
    """Return the same for its backward pass, and for the forward pass that full recomputation adds."""
    again = [late_forward(layer)] if layer.ranks.trainer.recompute == "full" else []
    times = 1.0 if layer.ranks.trainer.context_exchange == "all-to-all" else RETURNS
    hidden = _meanwhile(layer) * -ATTENTION_BACKWARD
    return [Pass(per_token=times * _sent(layer.ranks)) + hidden, *again]


def _meanwhile(layer: Layer) -> Pass:
    """Return the attention that a rank computes during the exchange: all parts but the last."""
    ranks = layer.ranks.trainer.context_parallel
    if layer.ranks.trainer.context_exchange != "ring":
        return Pass()
    return layer.attention().shared(ranks) * ((ranks - 1) / ranks)


def _sent(ranks: Ranks) -> float:
    """Return the seconds of one layer's forward exchange, for each token of a micro-batch."""
    trainer = ranks.trainer
    degree, near = trainer.context_parallel, ranks.context_ranks_of_a_node
    queries, caches = context_channels(ranks.model, trainer)
    share = (degree - 1) / degree * ranks.width
    match trainer.context_exchange:
        case "ring":
            wire = ranks.gpu.nvlink if near == degree else ranks.network
            return ranks.collective * share * caches / wire
        case "all-gather":
            return ranks.ring_time(ranks.width * caches, degree, trainer.tensor_parallel)
        case "all-to-all":
            heads = max(1.0, ranks.model.num_kv_heads / trainer.tensor_parallel)
            num_bytes = (2 * queries + caches * max(1.0, degree / heads)) / degree * ranks.width
            outside, inside = (degree - near) / degree, (near - 1) / degree
            seconds = outside / ranks.network + inside / ranks.gpu.nvlink
            return ranks.collective * num_bytes * seconds
        case other:
            assert_never(other)

"""Compute the seconds of a trainer's pipeline stages: computing a micro-batch and sending it on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.parallelism import stage_layers
from streamrl.sim.costs.training.layer import (
    BACKWARD,
    Layer,
    LossPasses,
    Pass,
    adapters_of,
    late_backward,
    late_forward,
)
from streamrl.sim.costs.training.micro_batches import MicroBatch
from streamrl.sim.costs.training.ranks import Ranks

Lines: TypeAlias = tuple[Floats, Floats]
"""(slices,) seconds of a micro-batch, and (3, slices) seconds per token, per pair, and per token and sequence."""


class StageTimes(Struct, frozen=True, kw_only=True, dict=True):
    """Seconds of every slice of the model in order; a stage has one slice, or several if interleaved."""

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    scored: tuple[Pass, ...]
    """Forward passes without a backward pass."""
    gather_time: float = 0.0
    """Seconds of ZeRO 3 for the forward pass of a micro-batch, hidden or not."""
    scatter_time: float = 0.0
    """The same for its backward pass."""
    overlap: float = 0.0
    """Share of both that is hidden behind computing that lasts long enough."""
    send: float = 0.0
    """Seconds from stage to stage per token."""
    late_forward: tuple[tuple[Pass, ...], ...] = ()
    """Further waiting of context ranks for each other, one entry per exchange; counts if above 0."""
    late_backward: tuple[tuple[Pass, ...], ...] = ()
    late_scored: tuple[tuple[Pass, ...], ...] = ()

    @classmethod
    def compose(cls, ranks: Ranks, layer: Layer) -> StageTimes:
        """Combine layers, head and transfers between ranks."""
        return cls.of_layers(ranks, layer).with_transfers(ranks)

    @classmethod
    def of_layers(cls, ranks: Ranks, layer: Layer) -> StageTimes:
        """Combine layers and head, without transfers between stages and between data-parallel ranks."""
        shared = ranks.trainer.context_parallel
        passes = (layer.forward(), layer.backward(), layer.head())
        forward, backward, head = (one.shared(shared) for one in passes)
        layers = stage_layers(ranks.model.num_layers, ranks.trainer.num_slices)
        trained, heads = _with_draft_layer(ranks, layers)
        late = [[late_forward(layer)], late_backward(layer)] if shared > 1 else [[], []]
        lates = [tuple(tuple(one * count for count in layers) for one in some) for some in late]
        return cls(
            forward=_with_head(forward, trained, head * heads),
            backward=_with_head(backward, trained, layer.head_backward().shared(shared) * heads),
            scored=_with_head(forward, layers, head),
            overlap=layer.constants.gather_overlap,
            late_forward=lates[0],
            late_backward=lates[1],
            late_scored=lates[0],
        )

    def with_transfers(self, ranks: Ranks) -> StageTimes:
        """Add transfers between stages, and collectives of data-parallel ranks: those of the slowest stage."""
        gather, scatter = ranks.gather_time(), ranks.backward_gather_time() + ranks.scatter_time()
        slices = ranks.trainer.virtual_stages
        return replace(
            self,
            gather_time=gather / slices,
            scatter_time=scatter / slices,
            send=_send_time(ranks),
        )

    def with_loss(self, loss: LossPasses, score: float, train: float) -> StageTimes:
        """Add a counted loss to the last stage, with scoring and training passes faster by these factors."""
        return replace(
            self,
            scored=_with_last(self.scored, loss.scored * (1 / score)),
            forward=_with_last(self.forward, loss.forward * (1 / train)),
            backward=_with_last(self.backward, loss.backward * (1 / train)),
        )

    @classmethod
    def assumed(cls, ranks: Ranks, efficiency: float) -> StageTimes:
        """Return the stages at a share of peak FLOP/s, which includes recomputation and collectives."""
        model, trainer = ranks.model, ranks.trainer
        ways = trainer.tensor_parallel * trainer.context_parallel
        narrow, achieved = (
            ranks.gpu.flops[dtype] * efficiency * ways for dtype in (ranks.computes_in, ranks.dtype)
        )
        head, learning = 2.0 * model.num_embedding_parameters, BACKWARD - ranks.frozen
        layer = Pass(
            per_token=(model.forward_flops(1, 0) - head) / narrow / model.num_layers,
            per_pair=model.forward_flops(0, 1) / achieved / model.num_layers,
        )
        added, last = adapters_of(ranks, narrow), Pass(per_token=head / achieved)
        back = Pass(per_token=layer.per_token * learning, per_pair=layer.per_pair * BACKWARD)
        layers = stage_layers(model.num_layers, trainer.num_slices)
        trained, heads = _with_draft_layer(ranks, layers)
        scored = _with_head(layer + added.forward, layers, last)
        forward = _with_head(layer + added.forward, trained, last * heads)
        backward = _with_head(back + added.backward, trained, last * learning * heads)
        return cls(forward=forward, backward=backward, scored=scored)

    def at(self, score: float, train: float) -> StageTimes:
        """Return the stages with scoring and training passes faster by these factors."""
        if score == train == 1.0:
            return self
        return replace(
            self,
            forward=tuple(one * (1 / train) for one in self.forward),
            backward=tuple(one * (1 / train) for one in self.backward),
            scored=tuple(one * (1 / score) for one in self.scored),
            gather_time=self.gather_time / train,
            scatter_time=self.scatter_time / train,
            send=self.send / train,
            late_forward=_divided(self.late_forward, train),
            late_backward=_divided(self.late_backward, train),
            late_scored=_divided(self.late_scored, score),
        )

    # Micro-batches --------------------------------------------------------------------------------

    def forward_times(self, batches: Sequence[MicroBatch]) -> Floats:
        """Return (micro-batches, slices) seconds of forward passes that training needs."""
        return self._times(self.forward, batches, self.gather_time, self.late_forward)

    def backward_times(self, batches: Sequence[MicroBatch]) -> Floats:
        """Return (micro-batches, slices) seconds of backward passes."""
        return self._times(self.backward, batches, self.scatter_time, self.late_backward)

    def scored_times(self, batches: Sequence[MicroBatch]) -> Floats:
        """Return (micro-batches, slices) seconds of forward passes alone."""
        return self._times(self.scored, batches, self.gather_time, self.late_scored)

    def rollout_time(self, length: int) -> float:
        """Return the seconds of a rollout's own work, forward and backward, in all slices."""
        return self._per_token * length + self._per_pair * length * length / 2

    @cached_property
    def _per_token(self) -> float:
        """Seconds of a token of a rollout that is alone in its micro-batch."""
        return sum(one.per_token + one.per_repeat for one in (*self.forward, *self.backward))

    @cached_property
    def _per_pair(self) -> float:
        return sum(one.per_pair for one in (*self.forward, *self.backward))

    def _times(
        self,
        passes: tuple[Pass, ...],
        batches: Sequence[MicroBatch],
        wire_time: float,
        lates: tuple[tuple[Pass, ...], ...],
    ) -> Floats:
        fixed, slopes = _lines(passes)
        sizes = np.array(batches, dtype=float).reshape(-1, 3)
        computed = fixed + sizes @ slopes
        for late in lates:
            at_first, slopes = _lines(late)
            computed += np.maximum(0.0, at_first + sizes @ slopes)
        if not wire_time:
            return computed
        return computed + np.maximum((1 - self.overlap) * wire_time, wire_time - computed)


@lru_cache(maxsize=1024)
def _lines(passes: tuple[Pass, ...]) -> Lines:
    """Combine the passes of all slices. Trainers that differ in their data-parallel ranks share them."""
    fixed = np.array([one.fixed for one in passes])
    slopes = np.array(
        [
            [one.per_token for one in passes],
            [one.per_pair for one in passes],
            [one.per_repeat for one in passes],
        ]
    )
    return fixed, slopes


def _with_draft_layer(ranks: Ranks, layers: Sequence[int]) -> tuple[list[float], float]:
    """Return the layers of each slice and the passes of the head, with the draft layer that the last slice trains."""
    return [*layers[:-1], layers[-1] + ranks.drafted], 1 + ranks.drafted


def _with_head(one: Pass, layers: Sequence[float], head: Pass) -> tuple[Pass, ...]:
    *stages, last = (one * count for count in layers)
    return (*stages, last + head)


def _with_last(passes: tuple[Pass, ...], added: Pass) -> tuple[Pass, ...]:
    return (*passes[:-1], passes[-1] + added)


def _divided(lates: tuple[tuple[Pass, ...], ...], factor: float) -> tuple[tuple[Pass, ...], ...]:
    return tuple(tuple(one * (1 / factor) for one in late) for late in lates)


def _send_time(ranks: Ranks) -> float:
    """Return the seconds of a token between stages; each tensor rank sends its share.

    Stages are in different nodes, unless the whole trainer is in one.
    """
    trainer = ranks.trainer
    if trainer.pipeline_parallel == 1:
        return 0.0
    is_near = trainer.num_gpus <= ranks.nvlink_domain
    wire = ranks.gpu.nvlink if is_near else ranks.gpu.network
    split = trainer.tensor_parallel * trainer.context_parallel
    return ranks.model.hidden_size * ranks.width / split / wire

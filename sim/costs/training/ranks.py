"""Describe the trainer's GPUs: how they share one model, and how long their collectives take."""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct

from streamrl.hardware.memory import (
    draft_parameters,
    optimizer_bytes,
    shared_out_parameters,
    stage_parameters,
)
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import Gpu
from streamrl.hardware.resolved import TrainerHardware
from streamrl.runfile.frameworks import Loss
from streamrl.runfile.roles_config import TrainerConfig


class Ranks(Struct, frozen=True, kw_only=True, dict=True):
    """One model on the trainer's GPUs, split as the run file says."""

    model: ModelShape
    gpu: Gpu
    gpu_name: str
    """Name of the GPU whose kernel tables are used."""
    trainer: TrainerConfig
    nvlink_domain: int
    """GPUs in an NVLink domain: those of one or several nodes."""
    dtype: str
    """Dtype of weights, activations and messages between GPUs."""
    computes_in: str
    """Format of the products of linear layers."""
    frozen: float = 0.0
    """Share of the trained models that train adapters on frozen weights."""
    adapter_rank: int = 0
    trained: float = 1.0
    """Share of a model's parameters that are trained, on average over trained models."""
    drafted: float = 0.0
    """Draft layers that a trained model trains, on average over trained models: a critic has none."""
    loss: Loss | None = None
    """How log-probs and the loss move logits; None if nobody counted it, so that `trainer.logits` says it."""
    host_slowdown: float = 1.0
    """Seconds in which hosts launch an operation, relative to x86 hosts; 1 where CUDA graphs launch them."""
    collective: float = 1.0
    """Seconds of a collective for each second that its bytes take at the datasheet's bandwidth."""

    @classmethod
    def of(cls, trainer: TrainerHardware) -> Ranks:
        """Return the ranks of a trainer."""
        num_trained, adapter_rank = trainer.num_trained_models, trainer.adapter_rank or 0
        return cls(
            model=trainer.longest_model,
            gpu=trainer.gpu,
            gpu_name=trainer.pool.gpu,
            trainer=trainer.config,
            nvlink_domain=trainer.pool.domain,
            dtype=trainer.dtype,
            computes_in=trainer.computes_in,
            frozen=bool(adapter_rank) / num_trained,
            adapter_rank=adapter_rank,
            trained=trainer.trained_models / num_trained,
            drafted=trainer.trains_drafts / num_trained,
            host_slowdown=trainer.gpu.host_slowdown.middle,
            loss=trainer.loss,
        )

    @property
    def draft_share(self) -> float:
        """Parameters of the trained draft layer, as a share of a model's, on average over trained models."""
        if not self.drafted:
            return 0.0
        return self.drafted * draft_parameters(self.model) / self.model.num_parameters

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return BYTES[self.dtype]

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient."""
        return BYTES[self.trainer.gradient_dtype]

    @property
    def network(self) -> float:
        """Bytes per second that one GPU sends to another node, one direction."""
        return self.gpu.network

    @property
    def context_ranks_of_a_node(self) -> int:
        """Adjacent context ranks in a node or NVLink domain, each with its tensor ranks."""
        trainer = self.trainer
        return min(trainer.context_parallel, max(1, self.nvlink_domain // trainer.tensor_parallel))

    # Data-parallel ranks --------------------------------------------------------------------------

    def gather_time(self) -> float:
        """Seconds in which ZeRO 3 gathers the weights of a stage once.

        Every micro-batch gathers them for its forward pass and, unless they are kept, for its
        backward pass. It also scatters gradients.
        """
        return self._data_time(self.width) if self.trainer.zero == 3 else 0.0

    def backward_gather_time(self) -> float:
        """Seconds in which ZeRO 3 gathers weights again for a backward pass; 0 if they were kept since the forward."""
        return self.gather_time() if self.trainer.reshard_after_forward else 0.0

    def scatter_time(self) -> float:
        """Seconds in which ZeRO 2 and 3 reduce and scatter the gradients of a stage once, after every micro-batch.

        Sharding groups then sum their shards (PyTorch's FSDP2 with a mesh of two dimensions).
        """
        if self.trainer.zero < 2:
            return 0.0
        num_bytes = self.gradient_width * self.trained
        return self._data_time(num_bytes) + self._sum_over_groups_time(num_bytes)

    def _sum_over_groups_time(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce over sharding groups, `num_bytes` of each parameter of a shard."""
        trainer, (dense, _) = self.trainer, self._fullest_stage
        shards = trainer.shards
        spacing = shards * trainer.tensor_parallel
        return 2 * self.ring_time(num_bytes * dense / shards, trainer.copies // shards, spacing)

    def reduce_time(self) -> float:
        """Return the seconds in which a step reduces the remaining gradients over ranks and gathers new weights.

        ZeRO 0 reduces gradients and gathers their sums, 1 reduces them and gathers weights, 2
        gathers weights.
        """
        gradient = self.gradient_width
        width = {0: 2 * gradient, 1: gradient + self.width, 2: self.width, 3: 0}
        return self._data_time(width[self.trainer.zero] * self.trained)

    def _data_time(self, num_bytes: float) -> float:
        """Return the seconds of a ring over the shards of each parameter on the fullest stage, `num_bytes` of each.

        Experts that ranks share have fewer copies.
        """
        trainer, (dense, experts) = self.trainer, self._fullest_stage
        dense_time = self.ring_time(num_bytes * dense, trainer.shards, trainer.tensor_parallel)
        return dense_time + self.ring_time(
            num_bytes * experts, trainer.expert_copies, trainer.expert_ranks
        )

    @cached_property
    def _fullest_stage(self) -> tuple[float, float]:
        """Parameters on a GPU of the fullest stage: all but the experts that ranks share, and those experts."""
        experts = shared_out_parameters(self.model, self.trainer)
        return max(stage_parameters(self.model, self.trainer)) - experts, experts

    def ring_time(self, num_bytes: float, ranks: int, spacing: int = 1) -> float:
        """Return the seconds in which a ring gathers a message of `num_bytes`, or reduces and scatters it.

        Each of r ranks sends (r-1)/r of it. An all-reduce is both, one after the other.
        """
        share = (ranks - 1) / ranks
        return self.collective * share * num_bytes / self._ring_bandwidth(ranks, spacing)

    def _ring_bandwidth(self, ranks: int, spacing: int) -> float:
        """Return the bytes per second that each of `ranks` GPUs, `spacing` apart, sends around their rings.

        Within a node or NVLink domain, rings use NVLink. Beyond it, every rank of a node has its
        own network port, and a ring goes to the next node through one of them.
        """
        if ranks * spacing <= self.nvlink_domain:
            return self.gpu.nvlink
        ports = max(1, self.nvlink_domain // spacing)
        return min(self.gpu.nvlink, ports * self.gpu.network)

    # Optimizer ------------------------------------------------------------------------------------

    def update_time(self) -> float:
        """Return the seconds in which one model's optimizer reads gradients, and reads and writes its state."""
        learning = self.model.num_parameters * self.trained
        num_bytes = learning * (self.gradient_width + 2 * optimizer_bytes(self.trainer))
        achieved = self.gpu.memory_bandwidth * self.gpu.roofline.bandwidth_efficiency
        copies = self.trainer.copies if self.trainer.zero == 0 else 1
        if self.trainer.zero == 3:
            copies = self.trainer.copies // self.trainer.shards
        return num_bytes * copies / self.trainer.num_gpus / achieved

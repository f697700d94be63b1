"""Seconds of a forward or backward pass, and of what ranks send each other, on one trainer's GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sim.costs.training_profile import Constants
from streamrl.hardware.memory import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    layer_activation_bytes,
    shard_parameters,
)
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import Gpu
from streamrl.runfile.sides_config import TrainerConfig

BACKWARD = 2
"""Forward passes that a backward pass costs: one for the gradient of inputs, one for that of weights."""
REDUCES_PER_LAYER = 2
"""All-reduces of tensor ranks in one layer and direction (Shoeybi et al. 2019, Megatron-LM, section 3)."""
TRADES_PER_LAYER = 2
"""All-to-alls of expert ranks in one layer and direction: tokens to their experts, results back."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one pass over one model on one data-parallel rank."""

    per_token: float
    per_pair: float
    """For each pair of a token and one before it."""
    per_micro_batch: float = 0.0

    def rollout_time(self, length: int) -> float:
        """Return the seconds of a rollout of `length` tokens, its share of the micro-batch left out."""
        return self.per_token * length + self.per_pair * length * length / 2


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One model on the trainer's GPUs, split as the run file says."""

    model: ModelShape
    gpu: Gpu
    trainer: TrainerConfig
    gpus_per_node: int
    dtype: str
    collective: float = 1.0
    """Seconds of a collective for each second that its bytes take at the datasheet's bandwidth."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one data-parallel rank."""
        return self.trainer.tensor_parallel * self.trainer.pipeline_parallel

    @property
    def imbalance(self) -> float:
        """Layers of the fullest pipeline stage, which the others wait for, over those of a mean stage."""
        num_layers, stages = self.model.num_layers, self.trainer.pipeline_parallel
        return ceil(num_layers / stages) * stages / num_layers

    # Passes ---------------------------------------------------------------------------------------

    def assumed_passes(self, efficiency: float) -> tuple[Pass, Pass]:
        """Return a forward pass, and one with its backward pass, at a share of peak FLOP/s."""
        achieved = self.gpu.flops[self.dtype] * efficiency * self.num_gpus
        per_token = self.model.forward_flops(1, 0) / achieved
        per_pair = self.model.forward_flops(0, 1) / achieved
        times = 1 + BACKWARD
        return (
            Pass(per_token=per_token, per_pair=per_pair),
            Pass(per_token=times * per_token, per_pair=times * per_pair),
        )

    def fitted_passes(self, gemm_flops: float, constants: Constants) -> tuple[Pass, Pass]:
        """Return a forward pass, and one with its backward pass, from the fit of measured training.

        Full recomputation adds one forward pass of the layers and its collectives; the output head is not
        computed again.
        """
        model, gpus = self.model, self.num_gpus
        flops, memory = gemm_flops * gpus, self.gpu.memory_bandwidth * gpus
        head_flops = 2.0 * model.num_embedding_parameters
        kept = model.num_layers * layer_activation_bytes(model, self.dtype)
        layers = (model.forward_flops(1, 0) - head_flops) / flops
        layers += constants.activation_traffic * kept / memory
        layers *= self.imbalance
        pairs = model.forward_flops(0, 1) / flops
        pairs += constants.attention_traffic * model.forward_flops(0, 1) / 4 / memory
        pairs *= self.imbalance
        sent, head = self.tensor_time() + self.expert_time(), head_flops / flops
        again = self.trainer.recompute == "full"
        times = 1 + BACKWARD + again
        return (
            Pass(
                per_token=layers + head + sent,
                per_pair=pairs,
                per_micro_batch=self.gather_time(BYTES[self.dtype]),
            ),
            Pass(
                per_token=times * layers + (1 + BACKWARD) * head + (2 + again) * sent,
                per_pair=times * pairs,
                per_micro_batch=self.gather_time(2 * BYTES[self.dtype] + GRADIENT_BYTES),
            ),
        )

    # Collectives ----------------------------------------------------------------------------------

    def tensor_time(self) -> float:
        """Seconds of one token's all-reduces in one direction, averaged over pipeline stages."""
        trainer, model = self.trainer, self.model
        num_bytes = model.hidden_size * BYTES[self.dtype]
        num_reduces = REDUCES_PER_LAYER * model.num_layers / trainer.pipeline_parallel
        return num_reduces * 2 * self.ring_time(num_bytes, trainer.tensor_parallel)

    def expert_time(self) -> float:
        """Seconds of one token's all-to-alls in one direction, spread over tensor ranks and stages.

        A token goes to each of its experts, (e-1)/e of which are on another of e ranks; ranks of more than
        one node trade over the network.
        """
        model, ranks = self.model, self.trainer.expert_parallel
        if model.experts is None or ranks == 1:
            return 0.0
        num_bytes = model.experts.experts_per_token * model.hidden_size * BYTES[self.dtype]
        wire = self.gpu.nvlink if ranks <= self.gpus_per_node else self.gpu.network
        num_trades = TRADES_PER_LAYER * model.num_expert_layers / self.num_gpus
        return num_trades * self.collective * (ranks - 1) / ranks * num_bytes / wire

    def gather_time(self, num_bytes: float) -> float:
        """Seconds in which ZeRO 3 gathers or scatters `num_bytes` a parameter for one micro-batch."""
        trainer = self.trainer
        if trainer.zero == 1:
            return 0.0
        message = num_bytes * shard_parameters(self.model, trainer)
        return self.ring_time(message, trainer.data_parallel, trainer.tensor_parallel)

    def reduce_time(self) -> float:
        """Seconds in which a step of ZeRO 1 sums gradients over ranks and gathers the new weights.

        With ZeRO 3 both are part of the passes. Experts that ranks share out have fewer copies to sum over.
        """
        trainer = self.trainer
        if trainer.zero == 3:
            return 0.0
        num_bytes = GRADIENT_BYTES + BYTES[self.dtype]
        dense = shard_parameters(self.model, trainer) - self._shared_out_parameters()
        copies = trainer.data_parallel * trainer.tensor_parallel // trainer.expert_parallel
        return self.ring_time(
            num_bytes * dense, trainer.data_parallel, trainer.tensor_parallel
        ) + self.ring_time(
            num_bytes * self._shared_out_parameters(), copies, trainer.expert_parallel
        )

    def ring_time(self, num_bytes: float, ranks: int, spacing: int = 1) -> float:
        """Seconds in which a ring gathers a message of `num_bytes`, or reduces and scatters it.

        Each of r ranks sends (r-1)/r of it. An all-reduce is both, one after the other.
        """
        share = (ranks - 1) / ranks
        return self.collective * share * num_bytes / self._ring_bandwidth(ranks, spacing)

    def _ring_bandwidth(self, ranks: int, spacing: int) -> float:
        """Bytes a second that each of `ranks` GPUs, `spacing` apart, sends around their rings.

        Inside a node over NVLink. Beyond it every rank of a node brings its own network port, and a ring
        crosses to the next node through one of them.
        """
        if ranks * spacing <= self.gpus_per_node:
            return self.gpu.nvlink
        ports = max(1, self.gpus_per_node // spacing)
        return min(self.gpu.nvlink, ports * self.gpu.network)

    def _shared_out_parameters(self) -> float:
        """Parameters of experts on one GPU, where ranks share them out."""
        model, ranks = self.model, self.trainer.expert_parallel
        if model.experts is None or ranks == 1:
            return 0.0
        routed = model.num_expert_layers * model.experts.num_experts * model.expert_parameters
        return routed / ranks / self.trainer.pipeline_parallel

    # Optimizer ------------------------------------------------------------------------------------

    def update_time(self) -> float:
        """Seconds in which one model's optimizer reads gradients, and reads and writes its state."""
        num_bytes = self.model.num_parameters * (GRADIENT_BYTES + 2 * OPTIMIZER_BYTES)
        achieved = self.gpu.memory_bandwidth * self.gpu.roofline.bandwidth_efficiency
        return num_bytes / self.trainer.num_gpus / achieved

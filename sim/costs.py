"""Seconds of every operation, each from the best tier that has data; here, the roofline of datasheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.config import Run
from streamrl.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, check_memory, kv_capacity, weight_bytes
from streamrl.profile import BYTES, Gpu, ModelShape, load_gpu, load_model

Tier = Literal["measured", "composed", "roofline"]


@dataclass(frozen=True, kw_only=True)
class DecodeCurve:
    """A replica's decode step: `base[b] + per_context_token * S` seconds for b rollouts with S tokens in all."""

    base: list[float]
    per_context_token: float
    tier: Tier

    def step_time(self, num_running: int, context_tokens: float) -> float:
        """Give the seconds of one decode step."""
        return self.base[num_running] + self.per_context_token * context_tokens


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, bytes and capacities of one run's hardware."""

    decode: DecodeCurve
    kv_capacity: int
    """Tokens whose keys and values a replica holds."""
    weight_bytes: int
    load_time: float
    """Seconds in which a replica copies pushed weights into its GPUs."""
    optimizer_time: float
    """Seconds of gradient reduction and optimizer step."""
    tiers: dict[str, Tier]
    """The tier of each operation."""
    _model: ModelShape
    _prefill_flops: float
    """Achieved FLOP/s of a replica in prefill."""
    _train_flops: float
    """Achieved FLOP/s of one data-parallel rank of the trainer."""
    _run: Run

    @classmethod
    def load(cls, run: Run) -> Costs:
        """Put the costs of a run together.

        Raises:
            ValueError: a profile is missing, or a side does not fit its memory.
        """
        check_memory(run)
        model = load_model(run.model)
        replica_gpu = load_gpu(run.cluster.pools[run.rollout.pool].gpu)
        trainer_gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
        dtype, trainer = run.model.dtype, run.trainer
        per_rank = trainer.tensor_parallel * trainer.pipeline_parallel
        peak = replica_gpu.flops[dtype] * run.rollout.tensor_parallel
        train_peak = trainer_gpu.flops[dtype] * per_rank
        return cls(
            decode=_decode_roofline(run, model, replica_gpu),
            kv_capacity=kv_capacity(run),
            weight_bytes=weight_bytes(run),
            load_time=weight_bytes(run) / run.rollout.tensor_parallel / replica_gpu.host_link,
            optimizer_time=_optimizer_time(run, model, trainer_gpu),
            tiers=dict.fromkeys(("prefill", "decode", "score", "train", "sync"), "roofline"),
            _model=model,
            _prefill_flops=peak * replica_gpu.roofline.compute_efficiency,
            _train_flops=train_peak * trainer_gpu.roofline.training_efficiency,
            _run=run,
        )

    def prefill_time(self, num_tokens: int, context_pairs: float) -> float:
        """Give the seconds in which a replica prefills tokens that attend to `context_pairs` tokens in all."""
        return self._model.forward_flops(num_tokens, context_pairs) / self._prefill_flops

    def score_time(self, lengths: Sequence[int]) -> float:
        """Give the seconds of the forward passes that these rollouts (prompt + output tokens) need first."""
        algorithm = self._run.algorithm
        num_passes = (
            algorithm.has_reference + algorithm.has_critic + (algorithm.correction == "decoupled")
        )
        return num_passes * self._pass_time(lengths)

    def train_time(self, lengths: Sequence[int]) -> float:
        """Give the seconds of forward and backward passes; a backward pass costs two forward ones."""
        num_models = 2 if self._run.algorithm.has_critic else 1
        return 3.0 * num_models * self._pass_time(lengths)

    def _pass_time(self, lengths: Sequence[int]) -> float:
        """One forward pass: the fullest data-parallel rank, and the pipeline's bubble (p-1)/(m+p-1)."""
        per_token = self._model.forward_flops(1, 0)
        per_half_square = self._model.forward_flops(0, 1) / 2
        flops = [per_token * n + per_half_square * n * n for n in lengths]
        trainer = self._run.trainer
        fullest = max(sum(flops) / trainer.data_parallel, max(flops))
        num_micro = max(1, -(-len(lengths) // (trainer.data_parallel * trainer.micro_batch)))
        bubble = (trainer.pipeline_parallel - 1) / num_micro
        return fullest / self._train_flops * (1 + bubble)


def _decode_roofline(run: Run, model: ModelShape, gpu: Gpu) -> DecodeCurve:
    """A decode step reads weights and KV cache once, or multiplies at the achieved FLOP/s if that is slower."""
    degree, dtype = run.rollout.tensor_parallel, run.model.dtype
    bandwidth = gpu.memory_bandwidth * gpu.roofline.bandwidth_efficiency * degree
    flops = gpu.flops[dtype] * gpu.roofline.compute_efficiency * degree
    read = model.num_active_parameters * BYTES[dtype] / bandwidth
    base = [
        gpu.roofline.step_overhead
        + max(read, model.forward_flops(b, 0) / flops)
        + _all_reduce_time(model, gpu, degree, b, dtype)
        for b in range(run.rollout.max_running + 1)
    ]
    return DecodeCurve(
        base=base,
        per_context_token=model.kv_bytes_per_token(dtype) / bandwidth,
        tier="roofline",
    )


def _all_reduce_time(model: ModelShape, gpu: Gpu, degree: int, batch: int, dtype: str) -> float:
    """Two ring all-reduces a layer, each moving 2 (t-1)/t of the activations over NVLink."""
    num_bytes = batch * model.hidden_size * BYTES[dtype]
    return 2 * model.num_layers * 2 * (degree - 1) / degree * num_bytes / gpu.nvlink


def _optimizer_time(run: Run, model: ModelShape, gpu: Gpu) -> float:
    """Ring all-reduce of the gradients over data-parallel ranks, then one pass over optimizer memory."""
    trainer, parameters = run.trainer, model.num_parameters
    num_models = 2 if run.algorithm.has_critic else 1
    shard = parameters * GRADIENT_BYTES / (trainer.tensor_parallel * trainer.pipeline_parallel)
    ranks = trainer.data_parallel
    per_node = run.cluster.pools[trainer.pool].gpus_per_node
    wire = gpu.nvlink if trainer.num_gpus <= per_node else gpu.network
    reduce_time = 2 * (ranks - 1) / ranks * shard / wire
    memory_bytes = parameters * (GRADIENT_BYTES + 2 * OPTIMIZER_BYTES) / trainer.num_gpus
    update_time = memory_bytes / (gpu.memory_bandwidth * gpu.roofline.bandwidth_efficiency)
    return num_models * (reduce_time + update_time)

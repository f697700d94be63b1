"""What fits: bytes on a GPU of each side, and how many tokens of KV cache a replica holds."""

from __future__ import annotations

from streamrl.config import Run
from streamrl.profile import BYTES, load_gpu, load_model

OPTIMIZER_BYTES = 12
"""Bytes a parameter: float32 master copy and two Adam moments (Rajbhandari et al. 2020, ZeRO)."""
GRADIENT_BYTES = 4
"""Bytes a parameter: gradients accumulate in float32 over micro-batches."""


def weight_bytes(run: Run) -> int:
    """Bytes of the weights as they are sent and as a replica holds them."""
    return load_model(run.model).num_parameters * BYTES[run.model.dtype]


def kv_capacity(run: Run) -> int:
    """Tokens whose keys and values a replica can hold.

    Raises:
        ValueError: the weights alone, or one rollout of the longest kind, do not fit.
    """
    model, gpu = load_model(run.model), load_gpu(run.cluster.pools[run.rollout.pool].gpu)
    gpus = run.rollout.tensor_parallel
    usable = gpu.memory * run.rollout.memory_utilization * gpus
    free = usable - weight_bytes(run)
    capacity = int(free // model.kv_bytes_per_token(run.model.dtype)) if free > 0 else 0
    longest = run.rollout.max_tokens + run.workload.max_prompt_tokens
    if capacity < longest:
        raise ValueError(
            f"rollout.tensor_parallel={gpus}: {model.name} needs {weight_bytes(run) / 1e9:.1f} GB of "
            f"weights and {longest} tokens of KV cache, but {gpus} x {gpu.name} at "
            f"memory_utilization {run.rollout.memory_utilization} hold {usable / 1e9:.1f} GB, "
            f"which leaves {capacity} tokens"
        )
    return capacity


def trainer_bytes(run: Run) -> float:
    """Bytes that weights, gradients and optimizer take on each GPU of the trainer.

    Weights and gradients are split over tensor and pipeline ranks, the optimizer over all ranks. Actor,
    critic and reference take turns on the GPU, those that wait are offloaded, so one of them counts.
    """
    parameters = load_model(run.model).num_parameters
    split = run.trainer.tensor_parallel * run.trainer.pipeline_parallel
    resident = parameters * (BYTES[run.model.dtype] + GRADIENT_BYTES) / split
    return resident + parameters * OPTIMIZER_BYTES / run.trainer.num_gpus


def check_memory(run: Run) -> None:
    """Raise `ValueError` where a side does not fit its GPUs, with the numbers."""
    kv_capacity(run)
    gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
    need = trainer_bytes(run)
    if need > gpu.memory:
        raise ValueError(
            f"trainer: {need / 1e9:.1f} GB of weights, gradients and optimizer a GPU with "
            f"data_parallel={run.trainer.data_parallel}, tensor_parallel="
            f"{run.trainer.tensor_parallel}, pipeline_parallel={run.trainer.pipeline_parallel}, "
            f"but {gpu.name} has {gpu.memory / 1e9:.0f} GB"
        )

"""Compute how close operators, training and a replica come to a GPU's datasheet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.hardware.memory import workspace_bytes
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.operator_tables import OPERATORS
from streamrl.hardware.precision import (
    check_units,
    is_narrow,
    precision_of,
    shard_weight_bytes,
    training_dtype,
)
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.hardware.tiers import datasheet_share
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.costs.costs import kernels_of
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import Interconnect
from streamrl.sim.costs.kernels import DTYPE_OF_ATTENTION, Kernels, peak_of
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.studies.results import GenerationCurve, GenerationPoint, Series

COLUMNS = {"gemm": "m", "decode_attention": "context", "prefill_attention": "context"}
"""The last axis of the operators that can be studied."""


def operator_efficiency(
    gpu: str,
    operator: str,
    columns: Sequence[float],
    *,
    dtype: str = "bfloat16",
    backend: str | None = None,
    **shape: float,
) -> Series:
    """Return peak seconds over an operator's seconds: the share of the datasheet's speed that it reaches.

    Args:
        gpu: a name in profiles/gpus.
        operator: gemm, decode_attention or prefill_attention.
        columns: values of its last axis: m or context.
        dtype: dtype of the matrix product; attention is in 16 bits.
        backend: backend whose tables are used; None for the GPU's default.
        shape: values of its other axes.
    """
    places = np.array(columns, dtype=float)
    kernels = Kernels(gpu, dtype, backend)
    estimate = kernels.time(operator, places, **shape)
    axes = {name: np.array([value]) for name, value in shape.items()}
    axes[COLUMNS[operator]] = places
    kind = dtype if operator == "gemm" else DTYPE_OF_ATTENTION
    peak = OPERATORS[operator].roofline(peak_of(kernels.gpu, kind))(axes)
    return Series(
        label=f"{gpu} ({backend})" if backend else gpu,
        places=places.tolist(),
        values=(peak / estimate.seconds).tolist(),
        is_unmeasured=datasheet_share(estimate.provenance.shares) > 0.5,
    )


def training_mfu(run: Run, lengths: Sequence[int], rollouts: int = 256) -> Series:
    """Return the MFU of training on batches of equal rollouts, one for each length in tokens.

    It counts the FLOPs of a forward and a backward pass, without recomputation of activations.
    """
    costs, model = TrainingCosts.load(resolve(run)), load_model(run.model)
    gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
    peak = gpu.flops[training_dtype(run.trainer, run.model)] * run.trainer.num_gpus
    needed = [3 * costs.num_trained * rollouts * model.forward_flops(n, n * n / 2) for n in lengths]
    seconds = [costs.train_time([n] * rollouts) for n in lengths]
    trainer = run.trainer
    degrees = f"DP{trainer.data_parallel} TP{trainer.tensor_parallel} PP{trainer.pipeline_parallel}"
    return Series(
        label=f"{model.name} on {gpu.name}, {degrees}",
        places=[float(n) for n in lengths],
        values=[flops / peak / time for flops, time in zip(needed, seconds, strict=True)],
        is_unmeasured=datasheet_share(costs.provenance.shares) > 0.5,
    )


def study_generation(
    model: ModelShape,
    gpu: str,
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    weight_only: bool = False,
    context: int = 4000,
    max_running: int = 512,
    backend: str | None = None,
    memory_utilization: float = 0.9,
) -> GenerationCurve:
    """Compute the decode step at batches of powers of two, up to the batch that fits in memory.

    Nodes have 8 GPUs with NVLink. Tensor ranks on several nodes use the default network of the GPU.

    Raises:
        ValueError: the GPU is unknown, does not compute in this dtype, or cannot hold one rollout;
            or the tensor ranks do not fill whole nodes.
    """
    wide = "bfloat16" if is_narrow(dtype) else dtype
    own, degrees = (
        precision_of(dtype, kv_dtype, wide, weight_only=weight_only),
        (tensor_parallel, expert_parallel),
    )
    kernels, wires = kernels_of(gpu, own, backend), _wires(gpu, tensor_parallel)
    shard = Shard(model, kernels, *degrees, wires=wires)
    hardware = shard.kernels.gpu
    check_units(own, hardware.name, hardware.flops)
    weights = shard_weight_bytes(model, own.weights, own.wide, *degrees)
    per_token = model.shard_kv_bytes_per_token(own.cache, tensor_parallel)
    workspace = workspace_bytes(model, own.wide, max_running, tensor_parallel, expert_parallel)
    capacity = (hardware.usable_memory * memory_utilization - weights - workspace) / per_token
    most_running = int(capacity // context)
    if most_running < 1:
        raise ValueError(
            f"{tensor_parallel} x {hardware.name} have {hardware.usable_memory / 1e9:.0f} GB each. "
            f"The weights of {model.name} take {weights / 1e9:.1f} GB in all, and "
            f"no rollout of {context:,} tokens fits in the rest. Use more tensor ranks or a shorter context."
        )
    largest = min(max_running, most_running)
    curve = compose_decode(shard, largest, context, capacity)
    batches = [b for b in (2**i for i in range(20)) if b < largest] + [largest]
    price = hardware.price / SECONDS_PER_HOUR
    points = [_point(shard, curve.step_time(b, b * context), b, context, price) for b in batches]
    return GenerationCurve(
        model=model.name,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
        dtype=str(own),
        context=context,
        most_running=most_running,
        price=hardware.price,
        ridge=_ridge(shard),
        points=points,
        provenance=curve.provenance,
    )


def _wires(gpu: str, tensor_parallel: int) -> Interconnect | None:
    """Return the default interconnect between a replica's nodes; None for a replica in one node."""
    pool = PoolConfig(gpu=gpu)
    if pool.domain % tensor_parallel == 0:
        return None
    if tensor_parallel % pool.domain:
        raise ValueError(
            f"--tensor-parallel must divide the {pool.domain} GPUs of a node or be a multiple of them, "
            f"got {tensor_parallel}"
        )
    return Interconnect.of(pool)


def _point(
    shard: Shard, step_time: float, num_running: int, context: int, price: float
) -> GenerationPoint:
    gpu, dtype = shard.kernels.gpu, shard.kernels.dtype
    flops, num_bytes = shard.step_work(num_running, context)
    compute, memory = flops / gpu.flops[dtype], num_bytes / gpu.memory_bandwidth
    speed = num_running / step_time / shard.tensor_parallel
    return GenerationPoint(
        num_running=num_running,
        step_time=step_time,
        roofline_time=max(compute, memory),
        tokens_per_second=speed,
        tokens_per_dollar=speed / price,
        mbu=memory / step_time,
        mfu=compute / step_time,
        is_compute_bound=compute > memory,
    )


def _ridge(shard: Shard) -> float:
    """Return the batch at which matrix products take as long to compute as their weights take to read."""
    gpu, dtype = shard.kernels.gpu, shard.kernels.dtype
    batch = np.unique(np.geomspace(1, 65536, 400).round())
    work = [shard.step_work(int(b), 0) for b in batch]
    is_compute_bound = np.array(
        [flops / gpu.flops[dtype] > size / gpu.memory_bandwidth for flops, size in work]
    )
    return float(batch[np.argmax(is_compute_bound)]) if is_compute_bound.any() else float("inf")

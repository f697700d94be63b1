"""What the profiles say, as series to draw: how near operators and training come to the datasheet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.hardware.operators import OPERATORS
from streamrl.hardware.precision import training_dtype
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.report.profile_figures import Series
from streamrl.runfile.config import Run
from streamrl.sim.costs.kernels import DTYPE_OF_ATTENTION, Kernels, peak_of
from streamrl.sim.costs.training.training import TrainingCosts

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
    """Return the share of the datasheet's speed that an operator reaches: peak seconds over its seconds.

    Args:
        gpu: a name in profiles/gpus.
        operator: gemm, decode_attention or prefill_attention.
        columns: values of its last axis: m or context.
        dtype: of the matrix product; attention is in 16 bits.
        backend: whose tables are taken; the GPU profile's choice where absent.
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
        is_unmeasured=estimate.provenance.tier == "roofline",
    )


def training_mfu(run: Run, lengths: Sequence[int], rollouts: int = 256) -> Series:
    """Return the MFU of training on batches of equal rollouts, one for each length.

    Counted are the FLOPs that a forward and a backward pass need; recomputing activations is not among them.
    """
    costs, model = TrainingCosts.load(run), load_model(run.model)
    gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
    peak = gpu.flops[training_dtype(run)] * run.trainer.num_gpus
    needed = [3 * costs.num_trained * rollouts * model.forward_flops(n, n * n / 2) for n in lengths]
    seconds = [costs.train_time([n] * rollouts) for n in lengths]
    trainer = run.trainer
    degrees = f"DP{trainer.data_parallel} TP{trainer.tensor_parallel} PP{trainer.pipeline_parallel}"
    return Series(
        label=f"{model.name} on {gpu.name}, {degrees}",
        places=[float(n) for n in lengths],
        values=[flops / peak / time for flops, time in zip(needed, seconds, strict=True)],
        is_unmeasured=costs.provenance.tier == "roofline",
    )

"""Choose what an acceptance test measures for a plan, and compute the seconds that the plan rests on.

| point             | expected seconds                                                | what it changes in the plan |
|-------------------|-----------------------------------------------------------------|-----------------------------|
| matrix product    | the GPU's operator table, else its roofline                     | `gemm` tables, training     |
| attention         | the same, of another kernel than torch's                        | nothing                     |
| copy in memory    | bandwidth of the datasheet at `roofline.bandwidth_efficiency`   | `memory_bandwidth`          |
| copy from host    | `host_link`                                                     | `host_link`                 |
| all-reduce, all-gather | NCCL's table, else the roofline                            | their tables, `nvlink`      |
| link              | bandwidth of the run file at the transport's efficiency         | the key of the run file     |
| decode step       | the plan's decode curve                                         | `costs.generation_factor`   |

A copy that is faster than expected changes nothing on a GPU whose constants come from measurements: they were fitted
with the same share of the datasheet's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from streamrl.hardware.model_shape import ModelShape, passed_layers
from streamrl.hardware.node_readings import (
    COLLECTIVES,
    DecodeReading,
    LinkReading,
    NodePoint,
    NodeReading,
)
from streamrl.hardware.profiles import Gpu, gpu_of, load_gpu
from streamrl.hardware.resolved import ResolvedRun
from streamrl.runfile.cluster_config import ClusterConfig, PoolConfig
from streamrl.sim.acceptance.result import Comparison
from streamrl.sim.costs.kernels import Kernels, table_path
from streamrl.sim.costs.sync_profiles import load_transport

MEASURED_DTYPES = ("bfloat16", "float16", "float32", "fp8")
"""Formats in which torch multiplies; products in others are measured in bfloat16."""
ALIGNED = 16
"""Multiple of the columns that fp8 products need."""
ATTENTION_DTYPE = "bfloat16"
CPU = "cpu"


class Sizes(NamedTuple):
    """Sizes of the points on one kind of device."""

    rows: tuple[int, ...]
    """Rows of matrix products, from a small decode batch to a training pass."""
    context: int
    copied: int
    messages: tuple[int, ...]
    """Bytes of collectives."""


ON_GPU = Sizes((16, 128, 1024, 8192), 4096, 2**30, (2**20, 2**24, 2**28))
ON_CPU = Sizes((4, 32, 256), 256, 2**26, (2**17, 2**22))


def points_of(resolved: ResolvedRun, gpu: str, num_gpus: int) -> list[NodePoint]:
    """Return what to measure on one kind of GPU, for the sides of a plan that use it.

    Args:
        resolved: the plan's run.
        gpu: name in profiles/gpus.
        num_gpus: GPUs of the node that take part in collectives.
    """
    sizes = ON_CPU if gpu == CPU else ON_GPU
    points = [*_products(resolved, gpu, sizes), *_attention(resolved, gpu, sizes)]
    points.append(NodePoint(kind="memory_copy", dtype="float32", size=float(sizes.copied)))
    if gpu != CPU:  # a CPU has no link to its host
        points.append(NodePoint(kind="host_copy", dtype="float32", size=sizes.copied / 4))
    if num_gpus > 1:
        dtype = "float32" if gpu == CPU else ATTENTION_DTYPE
        points += [
            NodePoint(kind=kind, dtype=dtype, size=float(size), shape={"gpus": float(num_gpus)})
            for kind in COLLECTIVES
            for size in sizes.messages
        ]
    return list({point.text: point for point in points}.values())


def _sides(resolved: ResolvedRun, gpu: str) -> Iterator[tuple[ModelShape, str, int]]:
    """Yield the model, the format of products and the tensor ranks of each side on this GPU."""
    for kind in resolved.replicas:
        if kind.pool.gpu == gpu:
            yield kind.model, kind.precision.compute, kind.config.tensor_parallel
    for trainer in resolved.trainers:
        if trainer.pool.gpu == gpu:
            yield trainer.model, trainer.computes_in, trainer.config.tensor_parallel


def _products(resolved: ResolvedRun, gpu: str, sizes: Sizes) -> Iterator[NodePoint]:
    """Yield products with the largest matrix of a layer, for a decode batch up to a training pass."""
    for model, dtype, ranks in _sides(resolved, gpu):
        inner, outer, _ = max(passed_layers(model), key=lambda each: each[0] * each[1])
        columns = max(ALIGNED, outer // ranks // ALIGNED * ALIGNED)
        shape = {"n": float(columns), "k": float(inner)}
        own = dtype if dtype in MEASURED_DTYPES else ATTENTION_DTYPE
        for rows in sizes.rows:
            yield NodePoint(kind="gemm", dtype=own, size=float(rows), shape=shape)


def _attention(resolved: ResolvedRun, gpu: str, sizes: Sizes) -> Iterator[NodePoint]:
    """Yield causal attention over one prompt; none for latent or linear attention."""
    dtype = "float32" if gpu == CPU else ATTENTION_DTYPE
    for model, _, ranks in _sides(resolved, gpu):
        if model.latent is None and model.linear is None:
            heads, caches = (max(1, n // ranks) for n in (model.num_heads, model.num_kv_heads))
            shape = {"batch": 1.0, "heads": float(heads), "kv_heads": float(caches)}
            size = float(sizes.context)
            yield NodePoint(kind="prefill_attention", dtype=dtype, size=size, shape=shape)


def expected_time(point: NodePoint, gpu_name: str) -> float:
    """Return the seconds of a point that predictions rest on."""
    gpu = load_gpu(gpu_name)
    match point.kind:
        case "memory_copy":  # read and written
            return 2 * point.size / (gpu.memory_bandwidth * gpu.roofline.bandwidth_efficiency)
        case "host_copy":
            return point.size / gpu.host_link
        case _:
            kernels = Kernels(gpu_name, point.dtype, tables=_tables(gpu, point))
            found = kernels.time(point.kind, np.array([point.size]), **point.shape)
            return float(found.seconds[0])


def _tables(gpu: Gpu, point: NodePoint) -> dict[str, str]:
    """Return the GPU's tables, with NCCL's for collectives where it was measured."""
    tables = dict(gpu.tables)
    if point.kind in COLLECTIVES and point.kind in tables:
        place = f"{tables[point.kind].partition('/')[0]}/nccl"
        if table_path(place, point.kind, point.dtype) is not None:
            tables[point.kind] = place
    return tables


def compare_points(readings: Sequence[NodeReading], gpu_name: str) -> list[Comparison]:
    """Return each reading beside its expectation."""
    return [_compared(reading, gpu_name) for reading in readings]


FITTED = "faster than the datasheet share that constants were fitted with"
OTHER_KERNEL = "torch's kernel, not the inference engine's"
CHANGES = {
    "gemm": "matrix products, training",
    "prefill_attention": "",
    "memory_copy": "memory_bandwidth",
    "host_copy": "host_link",
    "all_reduce": "all-reduce, nvlink",
    "all_gather": "all-gather",
}


def _compared(reading: NodeReading, gpu_name: str) -> Comparison:
    point, gpu = reading.point, load_gpu(gpu_name)
    expected = expected_time(point, gpu_name)
    slowdown = reading.slowest / expected
    changes, note = CHANGES[point.kind], ""
    if point.kind == "prefill_attention":
        note = OTHER_KERNEL
    if point.kind in ("memory_copy", "host_copy") and slowdown < 1 and (gpu.tables or gpu.alike):
        changes, note = "", FITTED
    spread = reading.slowest / min(reading.seconds)
    if spread > 1 + UNEVEN:
        note = (
            f"{note}; " * bool(note)
            + f"slowest of {len(reading.seconds)} GPUs, {spread - 1:.0%} behind"
        )
    return Comparison(
        name=point.text,
        unit="s",
        expected=expected,
        measured=reading.slowest,
        slowdown=slowdown,
        changes=changes,
        note=note,
    )


UNEVEN = 0.05
"""Share by which the slowest GPU may be behind the fastest without a note."""


class PlannedLink(NamedTuple):
    """The connection of a plan that a peer is at the other end of."""

    name: str
    key: str
    """Key of the run file that states its bandwidth."""
    bandwidth: float
    """Bytes per second that the plan expects of one pair of GPUs, or of a whole link."""
    latency: float
    latency_key: str
    """"" if the run file does not state it."""
    efficiency: float
    share: float
    """Stated bandwidth over that of one pair of GPUs."""
    between_gpus: bool
    """Whether network cards read and write GPU memory, so that NCCL measures it."""


def link_of(cluster: ClusterConfig, pool_name: str) -> PlannedLink | None:
    """Return the link from a pool to another one, else the network between the pool's nodes; None without either."""
    pool = cluster.pools[pool_name]
    for index, link in enumerate(cluster.links):
        if pool_name in link.between:
            transport = load_transport(link.transport)
            return PlannedLink(
                name=f"link {' to '.join(link.between)}",
                key=f"cluster.links.{index}.bandwidth",
                bandwidth=link.bandwidth * transport.efficiency,
                latency=float(link.latency),
                latency_key=f"cluster.links.{index}.latency",
                efficiency=transport.efficiency,
                share=1.0,
                between_gpus=not transport.is_through_host and pool.gpu != CPU,
            )
    return _network_of(pool_name, pool) if pool.nodes > 1 else None


def _network_of(name: str, pool: PoolConfig) -> PlannedLink:
    transport = load_transport(pool.transport)
    return PlannedLink(
        name=f"network between nodes of {name}, one GPU",
        key=f"cluster.pools.{name}.node_bandwidth",
        bandwidth=gpu_of(pool).network * transport.efficiency,
        latency=float(transport.message_latency),
        latency_key="",
        efficiency=transport.efficiency,
        share=float(pool.gpus_per_node),
        between_gpus=not transport.is_through_host and pool.gpu != CPU,
    )


def compare_link(planned: PlannedLink, found: LinkReading) -> tuple[list[Comparison], list[str]]:
    """Return the comparisons of a link, and the settings that give it its measured bandwidth and latency."""
    rows = [
        Comparison(
            name=f"{planned.name}, {found.backend}",
            unit="B/s",
            expected=planned.bandwidth,
            measured=found.bandwidth,
            slowdown=planned.bandwidth / found.bandwidth,
            changes=planned.key,
        )
    ]
    stated = found.bandwidth / planned.efficiency * planned.share
    settings = [f"{planned.key}={stated / 1e9:.6g} GB/s"]
    if planned.latency_key and planned.latency:
        rows.append(
            Comparison(
                name=f"latency of {planned.name}, one way",
                unit="s",
                expected=planned.latency,
                measured=found.latency,
                slowdown=found.latency / planned.latency,
                changes=planned.latency_key,
            )
        )
        settings.append(f"{planned.latency_key}={found.latency * 1e3:.6g} ms")
    return rows, settings


def compare_decode(found: DecodeReading, expected: float) -> Comparison:
    """Return a measured decode step beside the plan's."""
    return Comparison(
        name=f"decode step, {found.running} rollouts of {found.context:,.0f} tokens",
        unit="s",
        expected=expected,
        measured=found.seconds,
        slowdown=found.seconds / expected,
        changes="costs.generation_factor",
    )

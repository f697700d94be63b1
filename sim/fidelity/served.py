"""Served points: published milliseconds per output token of models under load, and their predictions.

A point is a closed loop: a fixed number of requests is under way, and each that ends is replaced. A step
of the decode batch makes one token of each. In an aggregated deployment, a prompt of p tokens begins in
running / output of the steps and delays them:

    milliseconds per token = decode step + running / output x prefill of one prompt

Engines that prefill in steps of their own keep requests of equal length in waves. Each request of a wave
then waits for the prompts after its own, which are half of them. Lengths that are drawn at random break up the waves.

Unknown inputs make a point a range over all their values:

- decode workers of a disaggregated deployment, and whether their GPUs are tensor or attention ranks;
- draft tokens: models with a draft layer are served with and without it, and the sample does not say which.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil, inf
from typing import NamedTuple

import msgspec

from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.runfile.short_forms import usual_domain
from streamrl.sim.costs.curves import (
    DecodeCurve,
    PrefillCurve,
    compose_decode,
    compose_speculative,
)
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import Interconnect
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.published_rows import Row, read_published

PUBLISHED = PROFILES / "published"
MOST_BESIDE = 2048
"""Most decoding requests beside which a prefill is composed."""
DRAFTS = SpeculativeConfig(tokens=3, acceptance=0.85)
"""Draft tokens of the fastest reading of a point that may use them: three, as InferenceX configures them,
each accepted as often as the second token of DeepSeek-V3 (85 to 90 %, arXiv 2412.19437, section 5.4.3).
"""
PRODUCT, OF_BLOCKS = "gemm.fp8", "sglang"
"""Products in fp8, and the tables of those with a scale for each block. Without a backend, the GPU's table counts."""


class ServedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One published time per output token."""

    key: str
    """Name of the point in the sample."""
    engine: str
    """Name in profiles/engines."""
    version: str
    """Version that the sample states; empty if it states none."""
    gpu: str
    model: str
    dtype: str
    cache_dtype: str
    has_block_scales: bool
    """Whether weights in fp8 have a scale for each block of 128 by 128, not for each tensor."""
    is_split: bool
    """Whether prefill runs on other GPUs (disaggregated)."""
    tensor_parallel: int
    """0 if the layout is unknown: the point has no prediction."""
    data_parallel: int
    expert_parallel: int
    least_running: float
    """Fewest requests on one decode worker."""
    most_running: float
    may_draft: bool
    is_random: bool
    """Whether lengths are drawn at random."""
    prompt: float
    """Mean tokens of a prompt."""
    output: float
    tpot: float
    """Published mean milliseconds per output token."""


COLUMNS = ServedPoint.__struct_fields__


@cache
def read_served() -> tuple[ServedPoint, ...]:
    """Read profiles/published/served_points.csv."""
    lines = read_published(PUBLISHED / "served_points.csv")
    return tuple(msgspec.convert(line, ServedPoint, strict=False) for line in lines)


@cache
def others_predictions() -> dict[str, tuple[float, float]]:
    """Return AIConfigurator's own predictions in milliseconds, by the key of a point."""
    lines = read_published(PUBLISHED / "served_aiconfigurator.csv")
    return {line["key"]: (float(line["least"]), float(line["most"])) for line in lines}


class Worker(NamedTuple):
    """The inputs that determine the kernels of a worker."""

    engine: str
    gpu: str
    model: str
    dtype: str
    cache_dtype: str
    has_block_scales: bool
    tensor_parallel: int
    data_parallel: int
    expert_parallel: int


def predict_range(point: ServedPoint) -> tuple[float, float]:
    """Return the lowest and highest milliseconds per token over all unknown inputs of a point."""
    loads = {point.least_running, point.most_running}
    drafts = (False, True) if point.may_draft else (False,)
    found = [
        predict(point, worker, running, drafts_tokens=drafted)
        for worker in workers(point)
        for running in sorted(loads)
        for drafted in drafts
    ]
    return min(found), max(found)


def workers(point: ServedPoint) -> Iterator[Worker]:
    """Yield every worker that a point may have: its GPUs may be tensor or attention ranks if loads are unknown."""
    degrees = [(point.tensor_parallel, point.data_parallel, point.expert_parallel)]
    gpus = point.tensor_parallel
    if point.least_running < point.most_running and min(gpus, point.expert_parallel) > 1:
        degrees = [(gpus, 1, gpus), (1, gpus, gpus)]
    for tensor, data, experts in degrees:
        yield Worker(
            point.engine,
            point.gpu,
            point.model,
            point.dtype,
            point.cache_dtype,
            point.has_block_scales,
            tensor,
            data,
            data if data > 1 and experts == 1 else experts,
        )


def predict(
    point: ServedPoint, worker: Worker, running: float, *, drafts_tokens: bool = False
) -> float:
    """Return the milliseconds per token of a worker with `running` requests."""
    number = ceil(running)
    context = point.prompt + point.output / 2
    curve = _decode_curve(worker, _rounded(number), context, drafts_tokens)
    step = curve.step_time(number, number * context)
    if point.is_split:
        return 1e3 * step
    engine = load_engine(point.engine)
    prefill = _prefill_curve(worker).time(
        max(1, round(point.prompt)), point.prompt**2 / 2, min(number, MOST_BESIDE)
    )
    share = 1.0 if point.is_random or engine.mixes_prefill else 0.5
    return 1e3 * (step + share * number / point.output * prefill)


def _rounded(number: int) -> int:
    """Return the next power of two, so that points share curves."""
    return 1 << max(0, number - 1).bit_length()


@cache
def _decode_curve(worker: Worker, most: int, context: float, drafts_tokens: bool) -> DecodeCurve:
    shard, size = _shard(worker), (most, 2 * context, inf)
    if drafts_tokens:
        return compose_speculative(shard, DRAFTS, *size)
    return compose_decode(shard, *size)


@cache
def _prefill_curve(worker: Worker) -> PrefillCurve:
    engine = load_engine(worker.engine)
    return PrefillCurve(_shard(worker), MOST_BESIDE, is_mixed=engine.mixes_prefill)


def _shard(worker: Worker) -> Shard:
    gpu, engine = load_gpu(worker.gpu), load_engine(worker.engine)
    if worker.dtype == "fp8":
        own = engine.kernels.get(PRODUCT)
        by_tensor = "" if own is None or own == OF_BLOCKS else own
        backend = OF_BLOCKS if worker.has_block_scales else by_tensor
        kernels = {**engine.kernels, PRODUCT: backend}
        engine = msgspec.structs.replace(engine, kernels=kernels)
    compute = worker.dtype if worker.dtype in gpu.flops else "bfloat16"
    return Shard(
        load_model(ModelConfig(name=worker.model)),
        Kernels(worker.gpu, compute, cache_dtype=worker.cache_dtype, kept=worker.dtype),
        worker.tensor_parallel,
        worker.expert_parallel,
        engine,
        data_parallel=worker.data_parallel,
        wires=Interconnect.of(_pool(worker.gpu)),
    )


def _pool(gpu: str) -> PoolConfig:
    """Return a pool of a GPU, in which all GPUs that NVLink joins count as one node."""
    return PoolConfig(gpu=gpu, nodes=16, gpus_per_node=usual_domain(gpu))


# Rows ---------------------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """How many points of the sample have a prediction, and why the others have none."""

    points: int
    covered: int
    without_layout: int
    """Points whose degrees of parallelism do not add up."""
    above_peak: int
    """Points whose tokens need more products than their GPUs can compute, so an input is not as stated."""

    @property
    def text(self) -> str:
        """Return the coverage in a sentence."""
        return (
            f"{self.covered} of {self.points} served points ({self.covered / self.points:.0%}) have a prediction. The layout of "
            f"{self.without_layout} is unknown, and {self.above_peak} need more products than the peak of their GPUs."
        )


@cache
def covered() -> tuple[ServedPoint, ...]:
    """Return the points that have a prediction: their layout is known, and their GPUs can do the work."""
    laid_out = (point for point in read_served() if point.tensor_parallel)
    return tuple(point for point in laid_out if share_of_peak(point) <= 1)


def coverage() -> Coverage:
    """Count the points with a prediction, and those without."""
    points = read_served()
    laid_out = sum(point.tensor_parallel > 0 for point in points)
    able = len(covered())
    return Coverage(len(points), able, len(points) - laid_out, laid_out - able)


def share_of_peak(point: ServedPoint) -> float:
    """Return the least products of a point, relative to the highest peak of its GPUs' datasheet.

    Only products with weights count, of a generated token and of its share of a prompt. Attention is left out.
    """
    model, gpu = load_model(ModelConfig(name=point.model)), load_gpu(point.gpu)
    prompts = 0.0 if point.is_split else point.prompt / point.output
    weights = model.num_active_parameters - model.num_embedding_parameters
    products = 2 * weights * point.least_running * (1 + prompts)
    gpus = point.tensor_parallel * point.data_parallel
    return products / (1e-3 * point.tpot * gpus * max(gpu.flops.values()))


def known_rows() -> list[Row]:
    """Return the points whose inputs are known; nothing was fitted to any."""
    return [row for row in _rows() if row.width < SAME]


def range_rows() -> list[Row]:
    """Return the points with unknown inputs: each is a range."""
    return [row for row in _rows() if row.width >= SAME]


@cache
def _rows() -> tuple[Row, ...]:
    return tuple(_row(point) for point in covered())


SAME = 1e-9
"""Width of a range that is one figure."""


def _row(point: ServedPoint) -> Row:
    model = load_model(ModelConfig(name=point.model)).name
    low, high = predict_range(point)
    is_known = high / low - 1 < SAME
    degrees = f"TP{point.tensor_parallel} DP{point.data_parallel} EP{point.expert_parallel}"
    load = f"{point.most_running:g} requests, {point.prompt:,.0f} in, {point.output:,.0f} out"
    engine = load_engine(point.engine)
    mode = "disaggregated" if point.is_split else "aggregated"
    group = f"{engine.name.partition(',')[0]} on {point.gpu}, {mode}"
    return Row(
        name=f"{model}, {point.gpu} {degrees}, {load}",
        group=group,
        partitions=tuple(_partitions(point, model, mode, is_known=is_known)),
        shape=point.model,
        unit="ms",
        published=(point.tpot, point.tpot),
        predicted=(low, high),
        counts_as_range=not is_known,
        beside=others_predictions().get(point.key),
        note="" if is_known else "number of workers, kind of ranks or draft tokens unknown",
        source=f"ai-dynamo/aiconfigurator 095f58a51: {point.key}",
    )


def _partitions(point: ServedPoint, model: str, mode: str, *, is_known: bool) -> Iterator[str]:
    family = "Blackwell" if "nvfp4" in load_gpu(point.gpu).flops else "Hopper"
    yield family
    yield f"{family}, {mode}"
    if not is_known:
        return
    yield f"GPU {point.gpu}"
    yield f"engine {load_engine(point.engine).name.partition(',')[0]}"
    yield f"model {model}"
    yield f"format {point.dtype}"

"""Time the operations of an acceptance test on this machine: matrix products, attention, copies, collectives.

Every GPU runs the same points. On a GPU, CUDA events time replays of a CUDA graph, so launches take no time. On a CPU,
one thread counts as a GPU, and gloo replaces NCCL. Points that do not fit into the time limit are left out.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from streamrl.executor.attention import attend
from streamrl.executor.profiling.collectives import WARM_UP, event_seconds, time_collectives
from streamrl.hardware.node_readings import COLLECTIVES, NodePoint, NodeReading
from streamrl.hardware.operator_tables import HEAD_DIM
from streamrl.runfile.gpu_names import gpu_name

REPEATS, LAUNCHES = 5, 10
"""Timed replays of a CUDA graph, and least number of calls in the graph."""
CACHE = 2**27
"""Bytes of weights that take turns, more than the cache of a GPU holds."""
LONGEST_CALL = 0.2
"""Seconds of a call on a CPU above which it is called only `FEWEST` times."""
FEWEST = 3
SCALED = "fp8"

Watch = Callable[[str], None]


class Node(NamedTuple):
    """The GPUs of this machine that torch sees; CPU cores if there are none."""

    gpu: str
    """Name in profiles/gpus; "cpu" without a GPU."""
    device: str
    """Name that the device reports."""
    num_gpus: int


def find_node(cores: int) -> Node:
    """Return the GPUs of this machine, or its `cores` without any."""
    if not torch.cuda.is_available():
        return Node("cpu", "CPU", cores)
    name = torch.cuda.get_device_name()
    return Node(gpu_name(name), name, torch.cuda.device_count())


def measure_points(
    points: Sequence[NodePoint], num_gpus: int, is_over: Callable[[], bool], watch: Watch
) -> list[NodeReading]:
    """Measure points on every GPU, until the time is over.

    Args:
        points: what to measure; those of all collectives are measured by the same processes.
        num_gpus: GPUs of this machine to measure.
        is_over: whether no further point may begin.
        watch: called with the name of each point before it is measured.
    """
    readings = []
    for point in (each for each in points if each.kind not in COLLECTIVES):
        if is_over():
            break
        watch(point.text)
        devices = [f"cuda:{n}" for n in range(num_gpus)] if torch.cuda.is_available() else ["cpu"]
        seconds = [time_point(point, device) for device in devices]
        readings.append(NodeReading(point=point, seconds=seconds))
    shared = [each for each in points if each.kind in COLLECTIVES]
    if shared and num_gpus > 1 and not is_over():
        watch(f"collectives over {num_gpus} GPUs")
        seconds = time_collectives(shared, num_gpus)
        readings += [
            NodeReading(point=point, seconds=[each])
            for point, each in zip(shared, seconds, strict=True)
        ]
    return readings


# One GPU ------------------------------------------------------------------------------------------


def time_point(point: NodePoint, device: str) -> float:
    """Return the median seconds of one point on one device."""
    if device == "cpu":
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # a CPU core stands in for a GPU
        try:
            return _time(point, device)
        finally:
            torch.set_num_threads(before)
    with torch.cuda.device(device):
        return _time(point, device)


def _time(point: NodePoint, device: str) -> float:
    match point.kind:
        case "gemm":
            return seconds_of(list(_products(point, device)), device)
        case "prefill_attention":
            return seconds_of([_attention(point, device)], device)
        case "memory_copy":
            source = torch.randn(int(point.size) // 4, device=device)
            target = torch.empty_like(source)
            return median_seconds(partial(torch.neg, source, out=target), device)
        case "host_copy":
            pinned = device != "cpu"
            host = torch.empty(int(point.size) // 4, pin_memory=pinned)
            target = torch.empty_like(host, device=device)
            return median_seconds(partial(target.copy_, host, non_blocking=pinned), device)
        case _:
            raise ValueError(f"{point.kind} needs more than one GPU")


def _products(point: NodePoint, device: str) -> Iterator[Callable[[], object]]:
    """Yield products of the same inputs with weights that do not stay in the cache."""
    m, n, k = (int(each) for each in (point.size, point.shape["n"], point.shape["k"]))
    width = 1 if point.dtype == SCALED else getattr(torch, point.dtype).itemsize
    count = math.ceil(CACHE / (width * n * k)) if device != "cpu" else 1
    inputs = torch.randn(m, k, device=device)
    weights = [torch.randn(n, k, device=device) for _ in range(count)]
    if point.dtype == SCALED:
        yield from _scaled_products(inputs, weights)
        return
    inputs = inputs.to(getattr(torch, point.dtype))
    for weight in weights:
        yield partial(torch.nn.functional.linear, inputs, weight.to(inputs.dtype))


def _scaled_products(
    inputs: torch.Tensor, weights: Sequence[torch.Tensor]
) -> Iterator[Callable[[], object]]:
    """Yield products in fp8 with one scale for each tensor, and results in bfloat16."""
    one = torch.ones((), device=inputs.device)
    narrow = inputs.to(torch.float8_e4m3fn)
    how: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    for weight in weights:
        yield partial(torch._scaled_mm, narrow, weight.to(torch.float8_e4m3fn).t(), **how)


def _attention(point: NodePoint, device: str) -> Callable[[], object]:
    heads, kv_heads = int(point.shape["heads"]), int(point.shape["kv_heads"])
    dtype = getattr(torch, point.dtype)
    query, key, value = (
        torch.randn(int(point.shape["batch"]), count, int(point.size), HEAD_DIM, device=device)
        for count in (heads, kv_heads, kv_heads)
    )
    tensors = {"query": query.to(dtype), "key": key.to(dtype), "value": value.to(dtype)}
    return partial(attend, **tensors, mask=None, is_causal=True, scaling=None)


def seconds_of(calls: Sequence[Callable[[], object]], device: str) -> float:
    """Return the median seconds of one call. Calls take turns, so that no input stays in the cache.

    On a GPU, a CUDA graph captures the calls, so launches take no time. Calls that cannot be captured
    are launched one by one.
    """
    in_turn = [*calls] * math.ceil(LAUNCHES / len(calls))
    if device == "cpu":
        return _seconds_on_cpu(in_turn)
    for call in in_turn:
        call()
    torch.cuda.synchronize()
    replay = _captured(in_turn)
    found = [event_seconds(replay) / len(in_turn) for _ in range(REPEATS + 1)]
    return median(found[1:])


def median_seconds(call: Callable[[], object], device: str) -> float:
    """Return the median seconds of a long call, launched one by one: a graph may use another copy engine."""
    if device == "cpu":
        return _seconds_on_cpu([call] * LAUNCHES)
    return median([event_seconds(call) for _ in range(WARM_UP + LAUNCHES)][WARM_UP:])


def _seconds_on_cpu(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of calls after the first one, and fewer of them if each is long."""
    calls[0]()
    found: list[float] = []
    for call in calls:
        if len(found) >= FEWEST and sum(found) > LONGEST_CALL:
            break
        began_at = time.perf_counter()
        call()
        found.append(time.perf_counter() - began_at)
    return median(found)


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    def launch() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError as error:
        print(f"no CUDA graph: {error}", file=sys.stderr)
        return launch
    return graph.replay

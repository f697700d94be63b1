"""Published decode steps and throughputs of inference engines, and their predictions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from math import inf
from typing import Literal, assert_never

import msgspec

from streamrl.hardware.memory import workspace_bytes
from streamrl.hardware.precision import shard_weight_bytes
from streamrl.hardware.profiles import PROFILES, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.curves import DecodeCurve, PrefillCurve, compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import Overheads, load_engine
from streamrl.sim.fidelity.published_rows import Row

Kind = Literal["step", "busy step", "request", "batch", "full load"]
"""Published quantities.

- step: time of a decode step, in ms.
- busy step: the same, possibly with the prefill of new rollouts.
- request: time per output token of a single request, with its prefill, in ms.
- batch: time per step of a static batch, with its prefill, in ms.
- full load: output tokens per second and GPU, with as many rollouts as memory holds.
"""


class ServingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure of an engine."""

    engine: str
    """Name in profiles/engines."""
    version: str
    gpu: str
    model: str
    """Name in profiles/models. All published models with the same config are one shape."""
    dtype: str
    tensor_parallel: int
    expert_parallel: int
    kind: Kind
    batch: float | None
    """Number of running rollouts; None if the source does not state it."""
    prompt: float
    output: float
    context: float
    """Mean tokens of a running rollout."""
    value: float
    """Published value: milliseconds, or tokens/s for a full load."""
    source: str = ""


COLUMNS = tuple(name for name in ServingRow.__struct_fields__ if name != "source")


@cache
def read_serving() -> tuple[ServingRow, ...]:
    """Read all tables of profiles/published/serving_*.csv."""
    rows: list[ServingRow] = []
    for path in sorted((PROFILES / "published").glob("serving_*.csv")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [line for line in lines if line.startswith("#")]
        source = head[0].removeprefix("# source: ")
        for line in csv.DictReader(lines[len(head) :]):
            cells = {key: value or None for key, value in line.items()}
            rows.append(msgspec.convert({**cells, "source": source}, ServingRow, strict=False))
    return tuple(rows)


FREE_SHARE = 0.9
"""Share of the memory left by weights and workspace that TensorRT-LLM uses as cache
(free_gpu_memory_fraction).
"""
MOST_RUNNING = 2048
"""Maximum rollouts at full load, even if memory holds more: the limit of TensorRT-LLM's benchmark."""


class Replica(msgspec.Struct, frozen=True):
    """The inputs that determine the kernels of a row."""

    engine: str
    model: str
    gpu: str
    dtype: str
    tensor_parallel: int
    expert_parallel: int
    has_narrow_cache: bool
    """Return whether keys and values are stored in fp8, which is TensorRT-LLM's default for fp8
    weights.
    """


def predict_range(row: ServingRow, constants: Overheads | None = None) -> tuple[float, float]:
    """Return the lowest and highest prediction of a row, in its unit.

    A busy step has no prefill at the lowest end, and the prompts that begin in a step at the highest.

    Args:
        row: a published figure.
        constants: constants of the engine; by default those of its profile.
    """
    used = load_engine(row.engine).constants if constants is None else constants
    least = predict(row, used)
    if row.kind != "busy step":
        return least, least
    assert row.batch is not None, "a step has a stated batch"
    prompts = row.batch / row.output
    return least, least + 1e3 * prompts * prefill_time(row, used, row.batch)


def predict(row: ServingRow, constants: Overheads) -> float:
    """Return the prediction of a row, in its unit; a busy step is predicted without prefill."""
    match row.kind:
        case "step" | "busy step":
            return 1e3 * step_time(row, constants)
        case "request" | "batch":
            assert row.batch is not None, "a batch has a size"
            prefill = prefill_time(row, constants, 0, row.batch)
            return 1e3 * (step_time(row, constants) + prefill / row.output)
        case "full load":
            return full_load(row, constants)
        case _:
            assert_never(row.kind)


def step_time(row: ServingRow, constants: Overheads, batch: float | None = None) -> float:
    """Return the seconds of a decode step; a fractional mean batch is interpolated."""
    running = batch or row.batch
    assert running is not None, "a step has a stated batch"
    curve = decode_curve(replica_of(row), constants, int(running) + 1, row.context)
    low = int(running)
    steps = [curve.step_time(b, b * row.context) for b in (low, low + 1)]
    return steps[0] + (running - low) * (steps[1] - steps[0])


def prefill_time(row: ServingRow, constants: Overheads, beside: float, prompts: float = 1) -> float:
    """Return the seconds that the prefill of `prompts` prompts adds to `beside` decoding rollouts."""
    tokens = max(1, round(row.prompt * prompts))
    curve = prefill_curve(replica_of(row), constants, is_mixed=beside > 0)
    return curve.time(tokens, prompts * row.prompt**2 / 2, min(int(beside), MOST_RUNNING))


def full_load(row: ServingRow, constants: Overheads) -> float:
    """Return the output tokens per second and GPU of a replica whose memory is always full.

    A rollout of o output tokens takes 1/n of o decode steps of n rollouts, plus its prefill in these
    steps. Every finished rollout is replaced at once.
    """
    shard = _shard(replica_of(row), constants)
    model = shard.model
    degrees = row.tensor_parallel, row.expert_parallel
    weights = shard_weight_bytes(model, row.dtype, "bfloat16", *degrees)
    per_token = model.shard_kv_bytes_per_token(shard.kernels.cache_dtype, row.tensor_parallel)
    workspace = workspace_bytes(model, row.dtype, MOST_RUNNING, row.tensor_parallel)
    free = shard.kernels.gpu.usable_memory - weights - workspace
    room = free * FREE_SHARE
    batch = min(MOST_RUNNING, room / per_token / (row.prompt + row.output))
    decode = row.output * step_time(row, constants, batch) / batch
    seconds = decode + prefill_time(row, constants, batch)
    return row.output / seconds / row.tensor_parallel


def replica_of(row: ServingRow) -> Replica:
    """Return the replica that a row was measured on."""
    is_narrow = row.dtype == "fp8" and row.engine.startswith("tensorrt")
    degrees = row.tensor_parallel, row.expert_parallel
    return Replica(row.engine, row.model, row.gpu, row.dtype, *degrees, is_narrow)


@cache
def decode_curve(
    replica: Replica, constants: Overheads, max_running: int, context: float
) -> DecodeCurve:
    """Return the decode curve of up to `max_running` rollouts around a mean context."""
    return compose_decode(_shard(replica, constants), max_running, 2 * context, inf)


@cache
def prefill_curve(replica: Replica, constants: Overheads, *, is_mixed: bool) -> PrefillCurve:
    """Return the curve of prefill passes, mixed with decoding rollouts or alone."""
    return PrefillCurve(_shard(replica, constants), MOST_RUNNING, is_mixed=is_mixed)


def _shard(replica: Replica, constants: Overheads) -> Shard:
    engine = msgspec.structs.replace(load_engine(replica.engine), constants=constants)
    cache_dtype = "fp8" if replica.has_narrow_cache else None
    kernels = Kernels(replica.gpu, replica.dtype, cache_dtype=cache_dtype)
    model = load_model(ModelConfig(name=replica.model))
    return Shard(model, kernels, replica.tensor_parallel, replica.expert_parallel, engine)


def serving_rows() -> list[Row]:
    """Return every supported row. Each is predicted with engine constants that were fitted without its shape."""
    return [_row(row) for row in read_serving()]


def _row(row: ServingRow) -> Row:
    left_out = load_engine(row.engine).left_out.get(row.model)
    is_range = row.kind == "busy step"
    without = None if left_out is None or is_range else predict(row, left_out)
    return Row(
        name=_name(row),
        group=f"{row.engine.rsplit('-', 1)[0]} {row.version} on {row.gpu} in {row.dtype}: {row.kind}",
        shape=row.model,
        unit="tokens/s" if row.kind == "full load" else "ms",
        published=(row.value, row.value),
        predicted=predict_range(row, left_out if is_range else None),
        is_fitted=left_out is not None and not is_range,
        left_out=without,
        note="; ".join(_notes(row)),
        source=row.source,
    )


def _name(row: ServingRow) -> str:
    """Return model, GPUs and load, for readers of the tables."""
    model = load_model(ModelConfig(name=row.model)).name
    experts = f" EP{row.expert_parallel}" if row.expert_parallel > 1 else ""
    layout = f"{row.gpu} TP{row.tensor_parallel}{experts}"
    match row.kind:
        case "step" | "busy step":
            load = f"batch {row.batch:g}, context {row.context:,.0f}"
        case "request" | "batch":
            load = f"batch {row.batch:g}, {row.prompt:,.0f} in, {row.output:,.0f} out"
        case "full load":
            load = f"{row.prompt:,.0f} in, {row.output:,.0f} out"
        case _:
            assert_never(row.kind)
    return f"{model}, {layout}, {load}"


def _notes(row: ServingRow) -> Iterator[str]:
    if row.version == "not stated":
        yield f"version not stated: constants of {load_engine(row.engine).name}, the nearest"
    if note := _note(row.kind):
        yield note


def _note(kind: Kind) -> str:
    match kind:
        case "step":
            return ""
        case "busy step":
            return "half a prompt or more begins in a step: from a step without prefill to one with its share"
        case "request" | "batch":
            return "whole time over tokens of output, prefill in it"
        case "full load":
            return "batch not published: as many rollouts as memory holds whole, up to 2,048"
        case _:
            assert_never(kind)

"""Published steps and throughputs of inference engines beside what the costs of a replica say of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.published import Row
from streamrl.sim.fidelity.serving_prediction import predict, predict_range
from streamrl.sim.fidelity.serving_table import Kind, ServingRow, read_serving


def serving_rows() -> list[Row]:
    """Return every published row that is supported, each predicted without what its shape taught the engine."""
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
    """Model, GPUs and load, as a reader would look them up."""
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

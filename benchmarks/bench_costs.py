"""Measure the error of composed seconds against measured ones.

    python benchmarks/bench_costs.py          # cross-validation of the tables, and the composed decode curve
    python benchmarks/bench_costs.py --fit    # the two overheads that fit the curve best, for profiles/engines/streamrl.toml

Every operator table is cross-validated: a part of its cells is held out, and the other cells
interpolate them. Only held-out cells inside the range of the other cells count. Cells at the edges
would need extrapolation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from streamrl.hardware.interpolation import Surface
from streamrl.hardware.operator_tables import Floats, Table, read_table
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import MEASURED, Kernels, peak_of, table_path
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.paper import ENGINE, load_paper
from streamrl.sim.fidelity.paper_generation import CONTEXT

GPUS = ("h20", "h20-3e", "h800", "h100", "h200", "a100")
SPARSE = 1000
"""Number of cells. Smaller tables hold out a twentieth at a time, larger ones a fifth."""
PAPER_CURVE = {
    batch: milliseconds * 1e-3
    for batch, milliseconds in zip(
        load_paper().decode.batch, load_paper().decode.milliseconds, strict=True
    )
}
"""Seconds of one decode step of a 7B model on one H800 with vLLM."""


def main() -> None:
    """Print both parts; with --fit, print only the overheads."""
    if "--fit" in sys.argv:
        layer, rollout = fit_overheads()
        print(f'layer = "{layer * 1e6:.1f} us"\nrequest = "{rollout * 1e6:.2f} us"')
        return
    console = Console()
    console.print(validate_tables())
    console.print(validate_curve())


# Tables ----------------------------------------------------------------------------------------------


def validate_tables() -> RichTable:
    """Return the cross-validation errors of every table, with the GPUs whose costs use it."""
    view = RichTable(
        "operator", "measured on", "backend", "dtype", "cells", "median", "p90", "used for"
    )
    pooled: dict[tuple[str, str], list[Floats]] = {}
    for path in sorted(MEASURED.glob("*/*.csv"), key=lambda path: (path.name, path.parent.name)):
        table = read_table(path)
        facts = table.facts
        errors = held_out_errors(table)
        users = [gpu for gpu in GPUS if _uses(gpu, table)]
        for gpu in users:
            pooled.setdefault((gpu, facts.operator), []).append(errors)
        figures = [f"{np.quantile(errors, q):.1%}" if len(errors) else "-" for q in (0.5, 0.9)]
        names = facts.operator, facts.gpu, f"{facts.backend} {facts.version}", facts.dtype
        view.add_row(*names, f"{len(errors):,}", *figures, ", ".join(users) or "by costs.backend")
    for gpu in GPUS:
        for operator in ("gemm", "prefill_attention", "decode_attention"):
            errors = np.concatenate(pooled[gpu, operator])
            for name, value in (("median", np.median(errors)), ("p90", np.quantile(errors, 0.9))):
                print_figure(f"{gpu} {operator} held-out error {name}", float(value), "share")
    return view


def _uses(gpu: str, table: Table) -> bool:
    """Return whether a GPU's costs use a table by default."""
    facts = table.facts
    place = load_gpu(gpu).tables.get(facts.operator)
    path = table_path(place, facts.operator, facts.dtype) if place else None
    return path is not None and read_table(path).facts == facts


def held_out_errors(table: Table, seed: int = 0) -> Floats:
    """Return the relative errors of the held-out cells. Each is predicted without itself and some other cells.

    A table of one row or one column has no cells between others along that axis.
    """
    num_folds = 20 if table.seconds.size < SPARSE else 5
    folds = np.random.default_rng(seed).integers(0, num_folds, table.seconds.shape)
    is_measured = ~np.isnan(table.seconds)
    errors = [
        error
        for fold in range(num_folds)
        for error in _errors_of(table, (folds == fold) & is_measured)
    ]
    return np.concatenate([np.zeros(0), *errors])


def _errors_of(table: Table, is_held: np.ndarray) -> Iterator[Floats]:
    peak = peak_of(load_gpu(table.facts.gpu), table.facts.dtype)
    kept = np.where(is_held, np.nan, table.seconds)
    is_row_left = ~np.isnan(kept).all(axis=1)
    if not is_row_left.any():  # a table of one row
        return
    rest = replace(table, rows=table.rows[is_row_left], seconds=kept[is_row_left])
    surface = Surface(rest, peak)
    for row in np.flatnonzero(is_held.any(axis=1)):
        cells = is_held[row]
        shape = dict(zip(table.keys, table.rows[row].tolist(), strict=True))
        seconds, is_inside = surface.seconds(shape, table.columns[cells], peak)
        yield np.abs(seconds / table.seconds[row, cells] - 1)[is_inside]


# The composed decode curve ---------------------------------------------------------------------------


def validate_curve() -> RichTable:
    """Return the composed decode step of Qwen2.5-7B on one H800 next to the paper's."""
    shard = papers_shard()
    curve = compose_decode(shard, max(PAPER_CURVE), longest=20_400, capacity=1e6)
    view = RichTable("rollouts", "paper", "composed", "error", title="Qwen2.5-7B on one H800")
    errors = []
    for num_running, measured in PAPER_CURVE.items():
        seconds = curve.step_time(num_running, num_running * CONTEXT)
        errors.append(seconds / measured - 1)
        figures = f"{measured * 1e3:.2f} ms", f"{seconds * 1e3:.2f} ms", f"{errors[-1]:+.1%}"
        view.add_row(str(num_running), *figures)
    worst = max(map(abs, errors))
    print_figure("qwen2.5-7b on h800: worst error of the decode curve", worst, "share")
    return view


def papers_shard() -> Shard:
    """Return the shard of a 7B model on one H800, in the paper's engine."""
    model = load_model(ModelConfig(name="qwen2.5-7b"))
    return Shard(model, Kernels("h800", "bfloat16"), engine=load_engine(ENGINE))


def fit_overheads() -> tuple[float, float]:
    """Fit seconds per layer and seconds per rollout: least squares of relative errors over the curve."""
    shard = papers_shard()
    batch, measured = (np.array(list(v), dtype=float) for v in (PAPER_CURVE, PAPER_CURVE.values()))
    bare = shard.products(batch).seconds + shard.head(batch).seconds
    bare += [shard.decode_attention(int(b), np.array([float(CONTEXT)])).seconds[0] for b in batch]
    terms = np.stack([np.full(len(batch), shard.model.num_layers), batch], axis=1)
    layer, rollout = np.linalg.lstsq(
        terms / measured[:, None], (measured - bare) / measured, rcond=None
    )[0]
    return float(layer), float(rollout)


def print_figure(name: str, value: float, unit: str) -> None:
    """Print one figure as a JSON object on its own line."""
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit}))


if __name__ == "__main__":
    main()

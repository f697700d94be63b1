"""Compare the roofline with measurements: measured seconds over the roofline's, wherever both exist.

    python benchmarks/bench_roofline.py

Every cell of the operator tables of GPU profiles is compared with the datasheet's peak and the
default efficiencies. Cells are weighted by their measured seconds, so that launches of a few
microseconds do not dominate. One JSON object per figure ends the output.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from streamrl.hardware.operator_tables import OPERATORS, Floats, Table, read_table
from streamrl.hardware.profiles import PROFILES, load_gpu
from streamrl.sim.costs.kernels import peak_of, table_path

DTYPES = ("bfloat16", "fp8")
COVERAGE = 0.8


def main() -> None:
    """Compare, and print for each operator and for all the error that 80 % of the measured seconds stay below."""
    found: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
    for table in default_tables():
        if not OPERATORS[table.facts.operator].is_collective:
            found[table.facts.operator].append(ratios(table))
    every = [part for parts in found.values() for part in parts]
    for operator, parts in [*sorted(found.items()), ("all", every)]:
        ratio = np.concatenate([ratio for ratio, _ in parts])
        seconds = np.concatenate([seconds for _, seconds in parts])
        low, middle, high = weighted_quantiles(ratio, seconds, (0.05, 0.5, 0.95))
        (spread,) = weighted_quantiles(np.abs(np.log(ratio)), seconds, (COVERAGE,))
        print(
            f"{operator}: 5 % below {low:.2f}, median {middle:.2f}, 5 % above {high:.2f} rooflines"
        )
        print(json.dumps({"name": f"roofline_{operator}_spread", "value": spread, "unit": "log"}))


def default_tables() -> Iterator[Table]:
    """Return the tables that some GPU profile names, each once."""
    paths: dict[Path, None] = {}
    for gpu in sorted((PROFILES / "gpus").glob("*.toml")):
        for operator, place in load_gpu(gpu.stem).tables.items():
            found = [table_path(place, operator, dtype) for dtype in DTYPES]
            paths.update((path, None) for path in found[:1] if path is not None)
    return (read_table(path) for path in paths)


def ratios(table: Table) -> tuple[Floats, Floats]:
    """Return measured over roofline seconds of every cell, and the measured seconds."""
    gpu = load_gpu(table.facts.gpu)
    peak, roofline = peak_of(gpu, table.facts.dtype), gpu.roofline
    axes = {name: table.rows[:, i][:, None] for i, name in enumerate(table.keys)}
    axes[table.facts.columns] = table.columns[None, :]
    work = OPERATORS[table.facts.operator].count(axes, peak.width)
    compute = work.flops / (peak.flops * roofline.compute_efficiency)
    memory = work.memory / (peak.memory * roofline.bandwidth_efficiency)
    ratio = (table.seconds / np.maximum(compute, memory)).ravel()
    is_measured = np.isfinite(ratio)
    return ratio[is_measured], table.seconds.ravel()[is_measured]


def weighted_quantiles(values: Floats, weights: Floats, shares: tuple[float, ...]) -> list[float]:
    """Return the values below which these shares of the weights lie."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return [float(values[order][np.searchsorted(below, share)]) for share in shares]


if __name__ == "__main__":
    main()

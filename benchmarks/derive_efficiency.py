"""Derive profiles/efficiency from the operator tables of measured GPUs, and state the errors on GPUs left out.

    python benchmarks/derive_efficiency.py

For each generation of GPUs and each operator, the script writes the mean seconds of its measured GPUs,
scaled to the peak of one of them. `streamrl.sim.fidelity.datasheet` has the method. GPUs without
tables take these seconds in proportion to their datasheet. errors.toml has the errors that this method
has on measured GPUs whose tables are hidden. The table that the script prints has every operator.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from math import hypot

import numpy as np

from streamrl.hardware.operator_tables import UNITS, Floats, Table
from streamrl.sim.costs.kernels import EFFICIENCY
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.datasheet import (
    ENGINE,
    NEAREST,
    OPERATORS,
    LeftOut,
    decode_left_out,
    donors,
    operators_left_out,
    training_left_out,
    typical_table,
)

DATE = datetime.date(2026, 11, 29)
APART = 1.9
"""Smallest ratio between sizes that are kept: ratios to the roofline are smooth between them."""
SIZES = ("m", "n", "k", "heads", "batch", "context", "tokens", "bytes")
"""Axes of sizes. The others describe a model, and all their values are kept."""
CELL = "{:.4g}"
ENGINE_ERRORS = load_engine(ENGINE).held_out
"""Errors of an engine's own overheads, which the decode steps of two GPUs share."""


def main() -> None:
    """Write the typical tables of all generations, and the errors."""
    shutil.rmtree(EFFICIENCY, ignore_errors=True)
    for generation in sorted(NEAREST):
        for operator, dtypes in OPERATORS.items():
            for dtype in dtypes:
                write_typical(generation, operator, dtype)
    steps = [*decode_left_out(), *training_left_out()]
    (EFFICIENCY / "errors.toml").write_text("\n".join(errors_text(steps)) + "\n")
    for found in [*operators_left_out(), *steps]:
        print(line_of(found))


def write_typical(generation: str, operator: str, dtype: str) -> None:
    """Write the typical table of an operator, if a GPU of the generation was measured."""
    tables = donors((generation,), operator, dtype)
    if not tables:
        return
    table = thinned(typical_table(tables, generation))
    path = EFFICIENCY / generation / f"{operator}.{table.facts.dtype}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(table_text(table)) + "\n")


def thinned(table: Table) -> Table:
    """Return a table with sizes at least `APART` apart."""
    rows = np.ones(len(table.rows), dtype=bool)
    for axis, name in enumerate(table.keys):
        if name in SIZES:
            rows &= np.isin(table.rows[:, axis], apart(np.unique(table.rows[:, axis])))
    columns = np.isin(table.columns, apart(table.columns))
    kept = table.seconds[np.ix_(rows, columns)]
    is_measured = ~np.isnan(kept).all(axis=1)
    return Table(
        table.facts,
        table.keys,
        table.rows[rows][is_measured],
        table.columns[columns],
        kept[is_measured],
    )


def apart(values: Floats) -> list[float]:
    """Return the first value, and each one that is far enough from the last one kept; the largest always counts."""
    kept: list[float] = []
    for value in values.tolist():
        if not kept or value >= APART * kept[-1]:
            kept.append(value)
    return [*kept[:-1], max(kept[-1], float(values[-1]))]


def table_text(table: Table) -> Iterator[str]:
    """Yield the lines of a table's file."""
    facts = table.facts
    for name in facts.__struct_fields__:
        value = getattr(facts, name)
        if value != "":
            text = CELL.format(value) if isinstance(value, float) else value
            yield f"# {name}: {DATE if name == 'date' else text}"
    yield ",".join([*table.keys, *(f"{column:.0f}" for column in table.columns)])
    for row, seconds in zip(table.rows, table.seconds, strict=True):
        cells = ["" if np.isnan(s) else CELL.format(s / UNITS[facts.unit]) for s in seconds]
        yield ",".join([*(f"{value:.0f}" for value in row), *cells])


def errors_text(steps: list[LeftOut]) -> Iterator[str]:
    """Yield the lines of errors.toml."""
    yield 'name = "errors of GPUs without tables"'
    yield 'source = "measured GPUs whose tables were hidden: decode steps against their own tables (with the held-out errors of vLLM 0.11 on published steps), training steps against profiles/published/training.csv"'
    yield f"date = {DATE}"
    for found in steps:
        engine = ENGINE_ERRORS if found.name == "decode steps" else None
        yield ""
        yield f"[{found.kinship}.{found.name.split()[0]}]"
        yield f"gpus = {list(found.ratios)!r}".replace("'", '"')
        yield f"rows = {len(found.all_ratios)}"
        yield f"median = {hypot(found.error(50), engine.median if engine else 0.0):.4f}"
        yield f"p90 = {hypot(found.error(90), engine.p90 if engine else 0.0):.4f}"
        yield f"bias = {found.bias:.4f}"


def line_of(found: LeftOut) -> str:
    """Return a row of a Markdown table."""
    by_gpu = ", ".join(f"{gpu} {np.median(r) - 1:+.0%}" for gpu, r in found.ratios.items())
    errors = " | ".join(f"{found.error(p):.1%}" for p in (50, 80, 90))
    return f"| {found.kinship} | {found.name} | {len(found.all_ratios)} | {errors} | {by_gpu} |"


if __name__ == "__main__":
    main()

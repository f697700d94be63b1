"""Write a folder of profiles whose figures of one GPU are scaled to measurements of a node.

Everything else is a link to the profiles in use. `STREAMRL_PROFILES` names the folder to all commands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from streamrl.hardware.node_readings import NodeReading
from streamrl.hardware.operator_tables import UNITS, Floats, Table, read_table
from streamrl.hardware.profiles import PROFILES, Gpu, load_gpu
from streamrl.runfile.result_files import write_file
from streamrl.sim.acceptance.points import expected_time
from streamrl.sim.costs.kernels import peak_of, surface_of

SCALED = "scaled to a node by `streamrl profile accept`"
TRAINING = "measured/training.toml"
Slowdown = Callable[[Floats], Floats]
"""Measured over expected seconds, by the value of a table's last axis."""


def write_scaled(folder: Path, gpu_name: str, counted: Sequence[NodeReading]) -> None:
    """Write the folder.

    Args:
        folder: a new folder.
        gpu_name: the measured GPU, as profiles/gpus has it.
        counted: readings that change the plan.
    """
    _link_all(folder, [f"gpus/{gpu_name}.toml", TRAINING, f"measured/{gpu_name}"])
    gpu, slower = load_gpu(gpu_name), _slowdowns(gpu_name, counted)
    _write_gpu(folder / "gpus" / f"{gpu_name}.toml", gpu_name, gpu, counted, slower)
    _write_training(folder / TRAINING, gpu_name, slower)
    if gpu.tables:
        tables = folder / "measured" / gpu_name
        tables.mkdir()
        for path in _table_files(gpu_name, gpu):
            _write_table(tables / path.name, read_table(path), path, gpu_name, slower)


def _slowdowns(gpu_name: str, counted: Sequence[NodeReading]) -> dict[tuple[str, str], Slowdown]:
    """Return slowdowns by operator and format, interpolated between the measured sizes."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for reading in counted:
        point = reading.point
        ratio = reading.slowest / expected_time(point, gpu_name)
        sizes = found.setdefault((point.kind, _rate(point.dtype)), {})
        sizes.setdefault(point.size, []).append(ratio)
    return {key: _interpolation(sizes) for key, sizes in found.items()}


def _rate(dtype: str) -> str:
    """Return one name for both 16-bit formats, which run at the same rate."""
    return "bfloat16" if dtype == "float16" else dtype


def _interpolation(sizes: dict[float, list[float]]) -> Slowdown:
    """Return a function that is linear in the logarithms, and constant outside of the measured sizes."""
    places = np.log(sorted(sizes))
    values = [float(np.mean(np.log(sizes[size]))) for size in sorted(sizes)]
    return lambda columns: np.exp(np.interp(np.log(columns), places, values))


def _link_all(folder: Path, own: Sequence[str]) -> None:
    """Link everything of the profiles in use into a folder, without what is written anew."""
    folder.mkdir(parents=True)
    for entry in PROFILES.iterdir():
        inner = [name for name in own if name.startswith(f"{entry.name}/")]
        if not inner:
            (folder / entry.name).symlink_to(entry.resolve())
            continue
        (folder / entry.name).mkdir()
        for each in entry.iterdir():
            if f"{entry.name}/{each.name}" not in inner:
                (folder / entry.name / each.name).symlink_to(each.resolve())


def _write_gpu(
    path: Path,
    name: str,
    gpu: Gpu,
    counted: Sequence[NodeReading],
    slower: dict[tuple[str, str], Slowdown],
) -> None:
    """Write the GPU's profile; its tables are its own copies."""
    table = tomllib.loads((PROFILES / "gpus" / f"{name}.toml").read_text(encoding="utf-8"))
    table["source"] = f"{gpu.source}; {SCALED}"
    for dtype, peak in gpu.flops.items():
        ratio = _largest(slower, "gemm", _rate(dtype))
        table["flops"][dtype] = peak / ratio
    for key, kind in (("memory_bandwidth", "memory_copy"), ("host_link", "host_copy")):
        _divide(table, key, getattr(gpu, key), _largest(slower, kind, "float32"))
    of_reduce = [_largest(slower, kind, dtype) for kind, dtype in slower if kind == "all_reduce"]
    _divide(table, "nvlink", gpu.nvlink, of_reduce[0] if of_reduce else 1.0)
    for key, place in gpu.tables.items():
        table["tables"][key] = f"{name}/{place.partition('/')[2]}"
    write_file(path, tomli_w.dumps(table))


def _largest(slower: dict[tuple[str, str], Slowdown], kind: str, dtype: str) -> float:
    """Return the slowdown of the largest measured size; 1 if it was not measured."""
    found = slower.get((kind, dtype))
    return 1.0 if found is None else float(found(np.array([np.inf]))[0])


def _divide(table: dict[str, Any], key: str, value: float, ratio: float) -> None:
    table[key] = f"{value / ratio / 1e9:.9g} GB/s"


def _write_training(path: Path, gpu: str, slower: dict[tuple[str, str], Slowdown]) -> None:
    """Write the rates of training; products run at the rate of the largest measured one."""
    table = tomllib.loads((PROFILES / TRAINING).read_text(encoding="utf-8"))
    for section, dtype in (("gemm", "bfloat16"), ("gemm_fp8", "fp8")):
        if (rate := table[section].get(gpu)) is not None:
            rate["flops"] /= _largest(slower, "gemm", dtype)
            rate["source"] = f"{rate['source']}; {SCALED}"
    write_file(path, tomli_w.dumps(table))


def _table_files(gpu_name: str, gpu: Gpu) -> Iterator[Path]:
    """Yield the GPU's own tables, and those of others that it uses, with all their backends."""
    measured = PROFILES / "measured"
    seen = set()
    others = [(key.partition(".")[0], place.partition("/")[0]) for key, place in gpu.tables.items()]
    for operator, owner in [("*", gpu_name), *others]:
        for path in sorted((measured / owner).glob(f"{operator}.*.csv")):
            if path.name not in seen:
                seen.add(path.name)
                yield path


def _write_table(
    path: Path,
    table: Table,
    source: Path,
    gpu: str,
    slower: dict[tuple[str, str], Slowdown],
) -> None:
    """Write a table as this GPU reads it, with the slowdown of each column; a link if neither differs."""
    facts = table.facts
    slowdown = slower.get((facts.operator, _rate(facts.dtype)))
    if facts.gpu == gpu and slowdown is None:
        path.symlink_to(source.resolve())
        return
    if facts.dtype not in load_gpu(gpu).flops:
        return
    seconds = _as_read_by(table, gpu)
    if slowdown is not None:
        seconds = seconds * slowdown(table.columns)
    lines = [
        _head(line, gpu) for line in source.read_text(encoding="utf-8-sig").splitlines() if line
    ]
    body = next(n for n, line in enumerate(lines) if not line.startswith("#")) + 1
    cells = seconds / UNITS[facts.unit]
    rows = (
        ",".join(
            [*line.split(",")[: len(table.keys)], *("" if np.isnan(c) else f"{c:.6g}" for c in row)]
        )
        for line, row in zip(lines[body:], cells, strict=True)
    )
    write_file(path, "\n".join([*lines[:body], *rows]) + "\n")


def _head(line: str, gpu: str) -> str:
    """Return a line of the head with this GPU as owner, and the source marked as scaled."""
    if line.startswith("# gpu:"):
        return f"# gpu: {gpu}"
    return f"{line}; {SCALED}" if line.startswith("# source:") else line


def _as_read_by(table: Table, gpu: str) -> Floats:
    """Return the seconds of a table's cells on another GPU that uses it."""
    if table.facts.gpu == gpu:
        return table.seconds
    surface, peak = surface_of(table), peak_of(load_gpu(gpu), table.facts.dtype)
    rows = [
        surface.seconds(dict(zip(table.keys, row, strict=True)), table.columns, peak)[0]
        for row in table.rows.tolist()
    ]
    return np.where(np.isnan(table.seconds), np.nan, np.array(rows))

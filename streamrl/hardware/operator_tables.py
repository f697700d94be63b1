"""Read measured operator tables, compute the work of each operator, and check tables against the datasheet.

An operator table has the seconds of one kernel by its shape, measured on one GPU with one backend. It is
the CSV file `profiles/measured/GPU/OPERATOR.BACKEND.DTYPE.csv`. Comment lines state what was measured, by
whom, and under which licence. Then follow a row for each shape and a column for each value of the last
axis (tokens, context or bytes). A cell that was not measured is empty.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.model_shape import STATE_BYTES
from streamrl.hardware.profile_table import ProfileTable
from streamrl.runfile.reading import read_text

Floats: TypeAlias = NDArray[np.float64]
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class Facts(ProfileTable, frozen=True, kw_only=True):
    """The facts in the comment lines of a table."""

    operator: str
    gpu: str
    """Name in profiles/gpus."""
    device: str
    """Name that the device reported."""
    backend: str
    version: str
    dtype: str
    unit: str
    """Unit of every cell: us, ms or s."""
    source: str
    licence: str
    date: datetime.date
    columns: str
    """Axis of the columns."""
    distribution: str = ""
    """Distribution of tokens over experts, for experts only."""
    generation: str = ""
    """GPUs whose mean this is (profiles/efficiency), scaled to the peak of `gpu`; "" for a measurement."""
    launch: float = 0.0
    """Part of every cell, in the table's unit, that takes as long on a GPU with another peak."""


@dataclass(frozen=True)
class Table:
    """One operator's measured seconds.

    Attributes:
        keys: names of the axes of the rows.
        rows: (rows, keys) values of these axes.
        columns: (columns,) values of the last axis.
        seconds: (rows, columns), NaN where nothing was measured.
    """

    facts: Facts
    keys: tuple[str, ...]
    rows: Floats
    columns: Floats
    seconds: Floats

    @property
    def launch_time(self) -> float:
        """Seconds of a launch, which do not depend on the GPU's peak."""
        return self.facts.launch * UNITS[self.facts.unit]

    @property
    def origin(self) -> str:
        """The device, backend and source of the measurement, as the text of a source."""
        facts = self.facts
        return (
            f"{facts.operator} {facts.dtype} on {facts.device}, {facts.backend} {facts.version} "
            f"({facts.source}, {facts.licence})"
        )


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        ValueError: a fact is missing, or a cell is not a positive number. The text has file, row and column.
    """
    lines = read_text(path).splitlines()
    head = [line for line in lines if line.startswith("#")]
    facts = _read_facts(path, head)
    body = lines[len(head) :]
    if len(body) < 2:
        raise ValueError(f"{path}: no rows below the comment lines")
    names = body[0].split(",")
    keys = tuple(name for name in names if not name[:1].isdigit())
    columns = _numbers(path, len(head) + 1, names, names[len(keys) :])
    if not np.all(np.diff(columns) > 0):
        raise ValueError(f"{path}: row {len(head) + 1}: columns do not increase")
    cells = np.array(
        [
            _numbers(path, number, names, line.split(","), may_be_empty=len(keys))
            for number, line in enumerate(body[1:], len(head) + 2)
        ]
    )
    seconds = cells[:, len(keys) :] * UNITS[facts.unit]
    return Table(facts, keys, cells[:, : len(keys)], columns, seconds)


def _read_facts(path: Path, head: list[str]) -> Facts:
    pairs = (line.lstrip("# ").partition(": ") for line in head)
    texts = {key: value.strip() for key, _, value in pairs}
    try:
        facts = msgspec.convert(texts, Facts, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in ("source", "licence", "version", "backend", "device"):
        if not getattr(facts, name):
            raise ValueError(f"{path}: {name} is empty")
    if facts.unit not in UNITS:
        raise ValueError(f"{path}: unit {facts.unit!r} is unknown; known: {', '.join(UNITS)}")
    return facts


def _numbers(
    path: Path, row: int, names: list[str], cells: list[str], may_be_empty: int | None = None
) -> Floats:
    """Return the cells of one line. From column `may_be_empty` on, an empty cell becomes NaN."""
    if may_be_empty is not None and len(cells) != len(names):
        raise ValueError(f"{path}: row {row}: {len(cells)} cells under {len(names)} columns")
    try:
        values = [float(cell) if cell else np.nan for cell in cells]
    except ValueError:
        values = []
    allowed = len(cells) if may_be_empty is None else may_be_empty
    if not values or not all(
        (isfinite(value) and value > 0) or (not cells[i] and i >= allowed)
        for i, value in enumerate(values)
    ):
        _refuse(path, row, names[-len(cells) :], cells, allowed)
    return np.array(values)


def _refuse(path: Path, row: int, names: list[str], cells: list[str], allowed: int) -> None:
    """Raise `ValueError` for the first cell that is not a positive finite number."""
    for i, (name, cell) in enumerate(zip(names, cells, strict=True)):
        try:
            is_good = isfinite(float(cell)) and float(cell) > 0
        except ValueError:
            is_good = not cell and i >= allowed
        if not is_good:
            raise ValueError(f"{path}: row {row}, column {name}: {cell!r} is not a positive number")


HEAD_DIM = 128
"""Width of a head in every attention table."""
LATENT_DIM, LATENT_ROPE_DIM = 512, 64
"""Widths of DeepSeek-V3's compressed keys and values, the only measured ones."""
LATENT_HIDDEN, LATENT_QUERY_RANK, LATENT_HEAD = 7168, 1536, 128
"""DeepSeek-V3's residual stream, compressed queries, and a head without its rotary part."""

LINEAR_CHUNK = 64
"""Tokens of a chunk in gated delta kernels (flash-linear-attention)."""

Axes: TypeAlias = Mapping[str, Floats]
"""Values of an operator's axes by name. The arrays broadcast against each other."""


class Work(NamedTuple):
    """The work of one call of an operator on one GPU."""

    flops: Floats
    memory: Floats
    """Bytes read from and written to the GPU's memory."""
    wire: Floats
    """Bytes that the GPU sends over NVLink."""


@dataclass(frozen=True)
class Peak:
    """Peak rates of a datasheet: FLOP/s of one dtype, bytes/s of memory and NVLink; and the bytes of a value."""

    flops: float
    memory: float
    nvlink: float
    width: float


@dataclass(frozen=True)
class Operator:
    """One kernel or collective: its work, and how its table is interpolated."""

    count: Callable[[Axes, float], Work]
    """Work of a shape; the second argument is the bytes of a value."""
    coordinates: Callable[[Axes], tuple[Floats, ...]] = lambda axes: tuple(axes.values())
    """Coordinates along which seconds are smooth, computed from the axes of the rows."""
    fills_holes: bool = True
    """Whether missing cells are estimated from their neighbours along every axis."""
    is_collective: bool = False
    reads_caches: bool = False
    """Whether the last coordinate is a number of KV caches, each with as many tokens as the column says."""

    def roofline(self, peak: Peak) -> Callable[[Axes], Floats]:
        """Return a function for the seconds at the peak: the longest of arithmetic, memory traffic and wire."""

        def seconds(axes: Axes) -> Floats:
            work = self.count(axes, peak.width)
            compute, memory = work.flops / peak.flops, work.memory / peak.memory
            return np.maximum(np.maximum(compute, memory), work.wire / peak.nvlink)

        return seconds


NOTHING = np.zeros(1)


def _gemm(axes: Axes, width: float) -> Work:
    """Return the work of (m, k) times (k, n) with a 16-bit result."""
    m, n, k = axes["m"], axes["n"], axes["k"]
    return Work(2 * m * n * k, width * (m + n) * k + 2 * m * n, NOTHING)


def _quantise(axes: Axes, width: float) -> Work:
    """Return the work of quantising (m, k) 16-bit activations to fp8 with one scale for each row."""
    return Work(NOTHING, (2 + width) * axes["m"] * axes["k"], NOTHING)


def _decode_attention(axes: Axes, width: float) -> Work:
    """Return the work of decode attention: every new token reads the keys and values of its whole context."""
    read = axes["batch"] * axes["context"] * HEAD_DIM
    return Work(4 * read * axes["heads"], 2 * width * read * axes["kv_heads"], NOTHING)


def _caches(axes: Axes) -> tuple[Floats, ...]:
    """Return the query heads that share a cache, and the independent caches: a kernel divides its work by these."""
    return axes["heads"] / axes["kv_heads"], axes["batch"] * axes["kv_heads"]


def _prefill_attention(axes: Axes, width: float) -> Work:
    """Return the work of causal prefill attention: the i-th token attends to i tokens."""
    tokens = axes["batch"] * axes["context"] * HEAD_DIM
    flops = 4 * tokens * axes["heads"] * (axes["context"] + 1) / 2
    return Work(flops, 2 * width * tokens * (axes["heads"] + axes["kv_heads"]), NOTHING)


def _latent_decode_attention(axes: Axes, width: float) -> Work:
    """Return the work of latent attention with absorbed projections: all heads read one compressed cache."""
    read = axes["batch"] * axes["context"]
    flops = 2 * read * axes["heads"] * (2 * LATENT_DIM + LATENT_ROPE_DIM)
    return Work(flops, width * read * (LATENT_DIM + LATENT_ROPE_DIM), NOTHING)


def _latent_projections(axes: Axes, width: float) -> Work:
    """Return the work of DeepSeek-V3's products around latent attention, with absorbed projections."""
    heads, tokens = axes["heads"], axes["tokens"]
    per_head = LATENT_DIM * 2 * LATENT_HEAD + LATENT_HIDDEN * LATENT_HEAD
    per_head += LATENT_QUERY_RANK * (LATENT_HEAD + LATENT_ROPE_DIM)
    shared = LATENT_HIDDEN * (LATENT_QUERY_RANK + LATENT_DIM + LATENT_ROPE_DIM)
    weights = shared + heads * per_head
    return Work(2 * tokens * weights, width * (weights + 0 * tokens), NOTHING)


def _linear_decode(axes: Axes, width: float) -> Work:
    """Return the work for one token of each rollout.

    The token's key reads and changes the state of every value head. Then its query reads the state.
    """
    states = axes["batch"] * axes["heads"] * HEAD_DIM**2
    return Work(6 * states, 2 * STATE_BYTES * states, NOTHING)


def _linear_prefill(axes: Axes, width: float) -> Work:
    """Return the work for chunks of tokens of one or more sequences.

    In each chunk, keys are multiplied with keys and queries, and all of them with the state before it.
    """
    tokens = axes["tokens"] * axes["heads"] * HEAD_DIM
    flops = tokens * (6 * HEAD_DIM + 8 * LINEAR_CHUNK)
    return Work(flops, 8 * width * tokens, NOTHING)


def _moe(axes: Axes, width: float) -> Work:
    """Return the work of the experts' gated MLPs on one GPU, with tokens distributed evenly.

    Each expert with at least one token is read once. `tokens` counts the tokens of all GPUs that share
    the layer.
    """
    split = axes["tensor_parallel"] * axes["expert_parallel"]
    one_expert = 3 * axes["hidden"] * axes["intermediate"] / split
    chosen = axes["tokens"] * axes["topk"]
    num_read = np.minimum(axes["experts"], chosen)
    return Work(2 * chosen * one_expert, width * num_read * one_expert, NOTHING)


def weights_read(operator: str, axes: Axes) -> Floats:
    """Return the number of weights that a product reads: a whole matrix, or the experts that have tokens.

    Raises:
        KeyError: the operator reads no weights.
    """
    return {"gemm": _weights_of_gemm, "moe": _weights_of_experts}[operator](axes)


def _weights_of_gemm(axes: Axes) -> Floats:
    return axes["n"] * axes["k"]


def _weights_of_experts(axes: Axes) -> Floats:
    split = axes["tensor_parallel"] * axes["expert_parallel"]
    one_expert = 3 * axes["hidden"] * axes["intermediate"] / split
    return np.minimum(axes["experts"], axes["tokens"] * axes["topk"]) * one_expert


def _ring(factor: float) -> Callable[[Axes, float], Work]:
    """Return the work of a ring collective: each of g GPUs sends `factor` x (g - 1) / g of the message."""

    def count(axes: Axes, width: float) -> Work:
        gpus = axes["gpus"]
        return Work(NOTHING, NOTHING, factor * (gpus - 1) / gpus * axes["bytes"])

    return count


OPERATORS = {
    "gemm": Operator(_gemm),
    "quantised_gemm": Operator(_gemm),
    "quantise": Operator(_quantise),
    "decode_attention": Operator(_decode_attention, _caches, fills_holes=False, reads_caches=True),
    "prefill_attention": Operator(_prefill_attention),
    "latent_decode_attention": Operator(
        _latent_decode_attention, fills_holes=False, reads_caches=True
    ),
    "latent_projections": Operator(_latent_projections),
    "linear_decode": Operator(_linear_decode),
    "linear_prefill": Operator(_linear_prefill),
    "kimi_decode": Operator(_linear_decode),
    "kimi_prefill": Operator(_linear_prefill),
    "moe": Operator(_moe),
    "masked_moe": Operator(_moe),
    "contiguous_moe": Operator(_moe),
    "all_reduce": Operator(_ring(2.0), is_collective=True),
    "all_gather": Operator(_ring(1.0), is_collective=True),
    "all_to_all": Operator(_ring(1.0), is_collective=True),
    "reduce_scatter": Operator(_ring(1.0), is_collective=True),
}


FALL = 0.8
"""A cell is a fall if it takes less than this share of a smaller shape's seconds. Smaller differences are noise, or
another kernel was chosen."""
MOST_FALLS = 0.25
"""Maximum share of falls in a table. H100's all-to-all has 20 %, all other tables have under 8 %."""
MOST_TOO_FAST = 0.01
"""Maximum share of cells that beat the datasheet. Small shapes do, because they stay in the L2 cache between calls."""
UNCERTAIN = ("moe", "masked_moe", "contiguous_moe")
"""Operators whose traffic depends on the router's choices, which a table does not state."""


class Violation(NamedTuple):
    """A physically impossible or implausible part of a table."""

    is_wrong: bool
    """Whether the table is rejected for it; if not, it is only a note."""
    text: str


def check_table(table: Table, peak: Peak) -> list[Violation]:
    """Return violations: cells that beat the datasheet, and seconds that fall as the work grows."""
    return [*_too_fast(table, peak), *_falls(table)]


def _too_fast(table: Table, peak: Peak) -> list[Violation]:
    operator = OPERATORS[table.facts.operator]
    if table.facts.operator in UNCERTAIN:
        return []
    axes = {name: table.rows[:, i][:, None] for i, name in enumerate(table.keys)}
    axes[table.facts.columns] = table.columns[None, :]
    ratio = operator.roofline(peak)(axes) / table.seconds
    count, size = int(np.nansum(ratio > 1)), int(np.sum(~np.isnan(table.seconds)))
    if not count:
        return []
    row, column = np.unravel_index(np.nanargmax(ratio), ratio.shape)
    text = (
        f"{count} of {size} cells beat the datasheet, row {_name(table, int(row))}, "
        f"column {table.columns[column]:g} by {ratio[row, column]:.2f}"
    )
    return [Violation(count > MOST_TOO_FAST * size, text)]


def _falls(table: Table) -> list[Violation]:
    seconds = np.where(np.isnan(table.seconds), 0.0, table.seconds)
    most = np.maximum.accumulate(seconds, axis=1)[:, :-1]
    later = table.seconds[:, 1:]
    is_fall = later < FALL * most
    count, size = int(is_fall.sum()), int(np.sum(~np.isnan(later)))
    if not count:
        return []
    ratio = np.where(is_fall, later / np.where(most > 0, most, 1.0), 1.0)
    row, column = np.unravel_index(np.argmin(ratio), ratio.shape)
    text = (
        f"{count} of {size} cells take under {FALL:.0%} of a smaller shape's seconds, "
        f"row {_name(table, int(row))}, column {table.columns[column + 1]:g} "
        f"{ratio[row, column]:.0%}"
    )
    return [Violation(count > MOST_FALLS * size, text)]


def _name(table: Table, row: int) -> str:
    pairs = zip(table.keys, table.rows[row], strict=True)
    return " ".join(f"{key}={value:g}" for key, value in pairs)

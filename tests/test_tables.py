"""Operator tables: what is refused, and what is asked of shapes between and beyond the measured ones."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamrl.hardware.interpolation import Surface, extrapolate_contexts
from streamrl.hardware.operator_tables import OPERATORS, Facts, Peak, Table, read_table
from streamrl.hardware.profiles import PROFILES, load_gpu
from streamrl.sim.costs.kernels import Kernels, peak_of

HEAD = """# operator: gemm
# gpu: h100
# device: NVIDIA H100
# dtype: bfloat16
# unit: us
# date: 2026-11-21
# columns: m
# source: somewhere
# licence: Apache-2.0
# backend: vllm
# version: 1.0
"""
BODY = "n,k,1,16\n1024,512,10,12\n2048,512,20,\n"
PEAK = Peak(flops=1e15, memory=3e12, nvlink=4e11, width=2)


def write(path: Path, head: str = HEAD, body: str = BODY) -> Path:
    file = path / "gemm.vllm.bfloat16.csv"
    file.write_text(head + body)
    return file


def make_table(
    operator: str, keys: dict[str, list[float]], columns: dict[str, list[float]]
) -> Table:
    """A table of exact powers: seconds are the product of all axes, in microseconds."""
    (column, values) = next(iter(columns.items()))
    facts = Facts(
        operator=operator,
        gpu="h100",
        device="d",
        backend="b",
        version="v",
        dtype="bfloat16",
        unit="us",
        source="s",
        licence="l",
        date=datetime.date(2026, 11, 21),
        columns=column,
    )
    grids = np.meshgrid(*keys.values(), indexing="ij")
    rows = np.stack([grid.ravel() for grid in grids], axis=1)
    seconds = rows.prod(axis=1)[:, None] * np.array(values)[None, :] * 1e-6
    return Table(facts, tuple(keys), rows, np.array(values), seconds)


GEMM = make_table("gemm", {"n": [64.0, 1024.0], "k": [64.0, 4096.0]}, {"m": [1.0, 16.0, 256.0]})


# Reading -----------------------------------------------------------------------------------------


def test_a_table_holds_seconds_and_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    table = read_table(write(tmp_path))
    assert table.keys == ("n", "k")
    assert table.rows.tolist() == [[1024, 512], [2048, 512]]
    assert table.columns.tolist() == [1, 16]
    assert table.seconds[0].tolist() == pytest.approx([10e-6, 12e-6])
    assert np.isnan(table.seconds[1, 1])
    assert "vllm 1.0 (somewhere, Apache-2.0)" in table.origin


@pytest.mark.parametrize(
    ("line", "row", "column"),
    [
        ("1024,512,nan,12", 13, "1"),
        ("1024,512,10,inf", 13, "16"),
        ("1024,512,-10,12", 13, "1"),
        ("1024,512,0,12", 13, "1"),
        ("1024,,10,12", 13, "k"),
        ("1024,512,10,fast", 13, "16"),
    ],
)
def test_a_cell_that_is_no_positive_number_is_refused_by_file_row_and_column(
    tmp_path: Path, line: str, row: int, column: str
) -> None:
    path = write(tmp_path, body=f"n,k,1,16\n{line}\n")
    with pytest.raises(ValueError, match=rf"gemm\.vllm.*row {row}, column {column}: "):
        read_table(path)


def test_a_row_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 13: 3 cells under 4 columns"):
        read_table(write(tmp_path, body="n,k,1,16\n1024,512,10\n"))


def test_columns_must_increase(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 12: columns do not increase"):
        read_table(write(tmp_path, body="n,k,16,1\n1024,512,10,12\n"))


@pytest.mark.parametrize("name", ["source", "licence", "version", "unit"])
def test_a_missing_fact_is_refused(tmp_path: Path, name: str) -> None:
    head = "".join(line for line in HEAD.splitlines(keepends=True) if f"# {name}:" not in line)
    with pytest.raises(ValueError, match=f"csv: .*`{name}`"):
        read_table(write(tmp_path, head))


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="csv: source is empty"):
        read_table(write(tmp_path, HEAD.replace("somewhere", "")))


def test_an_unknown_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="csv: unit 'furlong' is unknown; known: us, ms, s"):
        read_table(write(tmp_path, HEAD.replace("unit: us", "unit: furlong")))


def test_every_table_loads_and_names_what_its_path_says() -> None:
    paths = sorted((PROFILES / "measured").glob("*/*.csv"))
    assert len(paths) > 40
    for path in paths:
        facts = read_table(path).facts
        assert path.parent.name == facts.gpu
        assert path.name == f"{facts.operator}.{facts.backend}.{facts.dtype}.csv"
        assert facts.operator in OPERATORS


def test_the_measured_profiles_stay_small() -> None:
    sizes = [path.stat().st_size for path in (PROFILES / "measured").rglob("*") if path.is_file()]
    assert sum(sizes) < 4.5e6  # about 350 kB for each GPU


# Interpolation -----------------------------------------------------------------------------------


def test_a_power_law_is_met_everywhere_inside_the_measured_range() -> None:
    surface = Surface(GEMM, PEAK)
    m = np.array([1.0, 3.0, 16.0, 100.0])
    for n, k in ((64, 64), (300, 64), (64, 700), (500, 2000)):
        seconds, is_inside = surface.seconds({"n": n, "k": k}, m, PEAK)
        roof = OPERATORS["gemm"].roofline(PEAK)({"n": np.array([n]), "k": np.array([k]), "m": m})
        assert is_inside.all()
        # what is interpolated is the ratio to the roofline, which is no power law across its ridge
        assert seconds == pytest.approx(n * k * m * 1e-6, rel=0.6)
        assert (seconds > roof).all()
    corner, _ = surface.seconds({"n": 64, "k": 64}, np.array([16.0]), PEAK)
    assert corner == pytest.approx(64 * 64 * 16 * 1e-6)


def test_along_the_roofline_interpolation_is_exact() -> None:
    reads = OPERATORS["decode_attention"].roofline(PEAK)
    keys = {"heads": [8.0, 32.0], "kv_heads": [8.0], "batch": [1.0, 64.0]}
    table = make_table("decode_attention", keys, {"context": [1024.0, 65536.0]})
    axes = {name: table.rows[:, i][:, None] for i, name in enumerate(table.keys)}
    exact = Table(
        table.facts,
        table.keys,
        table.rows,
        table.columns,
        3 * reads({**axes, "context": table.columns[None, :]}),
    )
    shape = {"heads": 20, "kv_heads": 8, "batch": 9}
    contexts = np.array([5000.0, 300_000.0])
    seconds, is_inside = Surface(exact, PEAK).seconds(shape, contexts, PEAK)
    at = {name: np.array([float(value)]) for name, value in shape.items()}
    assert seconds == pytest.approx(3 * reads({**at, "context": contexts}))
    assert is_inside.tolist() == [True, False]


def test_outside_the_range_the_nearest_ratio_to_the_roofline_holds_and_is_marked() -> None:
    surface = Surface(GEMM, PEAK)
    m = np.array([256.0])
    edge, is_edge_inside = surface.seconds({"n": 1024, "k": 4096}, m, PEAK)
    beyond, is_inside = surface.seconds({"n": 8192, "k": 4096}, m, PEAK)
    roof = OPERATORS["gemm"].roofline(PEAK)
    ratio = [
        roof({"n": np.array([float(n)]), "k": np.array([4096.0]), "m": m})[0] for n in (1024, 8192)
    ]
    assert is_edge_inside.all() and not is_inside.any()
    assert beyond / edge == pytest.approx(ratio[1] / ratio[0])
    below, is_below_inside = surface.seconds({"n": 32, "k": 4096}, m, PEAK)
    assert not is_below_inside.any() and below < edge


def test_a_gpu_of_slower_memory_takes_longer_where_memory_binds() -> None:
    surface = Surface(GEMM, PEAK)
    slow = Peak(flops=1e15, memory=1.5e12, nvlink=4e11, width=2)
    m = np.array([1.0])
    fast_time, _ = surface.seconds({"n": 1024, "k": 4096}, m, PEAK)
    slow_time, _ = surface.seconds({"n": 1024, "k": 4096}, m, slow)
    assert slow_time == pytest.approx(2 * fast_time)


def test_a_collective_on_another_nvlink_keeps_its_latency() -> None:
    table = make_table("all_reduce", {"gpus": [2.0, 8.0]}, {"bytes": [1e3, 1e6]})
    surface = Surface(table, PEAK)
    slow = Peak(flops=1e15, memory=3e12, nvlink=2e11, width=2)
    num_bytes = np.array([1e6])
    ours, _ = surface.seconds({"gpus": 8}, num_bytes, PEAK)
    theirs, _ = surface.seconds({"gpus": 8}, num_bytes, slow)
    assert theirs - ours == pytest.approx(2 * 7 / 8 * 1e6 * (1 / 2e11 - 1 / 4e11))


def test_a_hole_is_estimated_from_its_neighbours_along_every_axis() -> None:
    holed = GEMM.seconds.copy()
    holed[0, 1] = np.nan
    surface = Surface(Table(GEMM.facts, GEMM.keys, GEMM.rows, GEMM.columns, holed), PEAK)
    seconds, is_inside = surface.seconds({"n": 64, "k": 64}, np.array([16.0]), PEAK)
    assert is_inside.all()
    assert seconds == pytest.approx(64 * 64 * 16e-6, rel=0.6)


def test_attention_depends_on_caches_not_on_how_they_come_about() -> None:
    keys = {"heads": [8.0], "kv_heads": [1.0], "batch": [1.0, 8.0, 64.0]}
    table = make_table("decode_attention", keys, {"context": [1024.0, 8192.0]})
    launch = np.full_like(
        table.seconds, 20e-6
    )  # bound by launches: no ratio to the roofline is alike
    surface = Surface(Table(table.facts, table.keys, table.rows, table.columns, launch), PEAK)
    one, _ = surface.seconds({"heads": 8, "kv_heads": 1, "batch": 64}, np.array([2048.0]), PEAK)
    many, _ = surface.seconds({"heads": 64, "kv_heads": 8, "batch": 8}, np.array([2048.0]), PEAK)
    assert many == pytest.approx(one)


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_a_roofline_never_falls_as_work_grows(operator: str) -> None:
    axes = {
        **dict.fromkeys(("m", "n", "k", "heads", "batch", "context", "tokens"), np.array([64.0])),
        **dict.fromkeys(("hidden", "intermediate", "bytes"), np.array([1024.0])),
        **dict.fromkeys(
            ("kv_heads", "topk", "tensor_parallel", "expert_parallel"), np.array([2.0])
        ),
        **{"experts": np.array([8.0]), "gpus": np.array([4.0])},
    }
    roof = OPERATORS[operator].roofline(PEAK)
    small = roof(axes)
    for name in ("m", "n", "batch", "context", "tokens", "bytes"):
        grown = roof({**axes, name: axes[name] * 2})
        assert (grown >= small).all()
    assert small > 0


def test_experts_are_read_as_often_as_tokens_choose_them() -> None:
    shape = {"hidden": 1024.0, "intermediate": 512.0, "topk": 2.0, "experts": 64.0}
    shape |= {"tensor_parallel": 1.0, "expert_parallel": 1.0}
    axes = {name: np.array([value]) for name, value in shape.items()}
    one_expert = 3 * 1024 * 512 * 2
    count = OPERATORS["moe"].count
    assert count({**axes, "tokens": np.array([1.0])}, 2).memory == pytest.approx(2 * one_expert)
    assert count({**axes, "tokens": np.array([1e5])}, 2).memory == pytest.approx(64 * one_expert)


def test_a_shape_that_was_measured_several_times_takes_its_median_of_what_is_there() -> None:
    keys = {"heads": [32.0], "kv_heads": [8.0], "batch": [64.0]}
    once = make_table("decode_attention", keys, {"context": [1024.0, 4096.0, 8192.0]})
    hole = np.nan
    seconds = np.array([[9.0, 8.0, hole], [1.0, hole, hole], [3.0, 2.0, 7.0]]) * 1e-3
    table = replace(once, rows=once.rows.repeat(3, axis=0), seconds=seconds)
    shape = {name: values[0] for name, values in keys.items()}
    found, is_inside = Surface(table, PEAK).seconds(shape, once.columns, PEAK)
    # of an even number the geometric mean of the middle two: what is interpolated are logarithms
    assert found == pytest.approx([3e-3, 4e-3, 7e-3])
    assert is_inside.all()


# Longer contexts ---------------------------------------------------------------------------------

CONTEXTS = 512.0 * 2 ** np.arange(6)
BATCHES = [1.0, 4.0, 16.0, 64.0]


def test_a_batch_goes_on_as_smaller_ones_did_at_as_many_tokens() -> None:
    """A launch, a start of each rollout, and tokens: beyond its last column a batch pays for further tokens alone."""
    keys = {"heads": [8.0], "kv_heads": [8.0], "batch": BATCHES}
    table = make_table("decode_attention", keys, {"context": CONTEXTS.tolist()})
    batch = table.rows[:, 2][:, None]
    seconds = 10e-6 + 0.5e-6 * batch + 2e-9 * batch * table.columns
    seen = np.where(batch * table.columns <= 64 * 512, seconds, np.nan)
    surface = Surface(replace(table, seconds=seen), PEAK)
    for row, size in enumerate(BATCHES):
        shape = {"heads": 8, "kv_heads": 8, "batch": size}
        found, is_inside = surface.seconds(shape, CONTEXTS, PEAK)
        assert found == pytest.approx(seconds[row])
        assert is_inside.tolist() == (~np.isnan(seen[row])).tolist()


def test_further_tokens_are_no_faster_than_memory_and_no_slower_than_those_before() -> None:
    caches, columns = np.array([1.0, 2.0]), np.array([1.0, 2.0, 4.0, 8.0])
    roofline = caches[:, None] * columns
    for seconds, carried in (
        ([[9, 9.1, 9.2, 9.3], [9, np.nan, np.nan, np.nan]], [9, 11, 15, 23]),  # at the roofline
        ([[2, 4, 99, 299], [5, np.nan, np.nan, np.nan]], [5, 10, 20, 40]),  # at its own rate
    ):
        found = extrapolate_contexts(caches, columns, np.array(seconds, dtype=float), roofline)
        assert found[1] == pytest.approx(carried)


@pytest.mark.parametrize("name", ["vllm.fp8", "vllm.bfloat16", "trtllm.fp8"])
def test_more_rollouts_and_longer_ones_take_longer_and_are_read_no_slower(name: str) -> None:
    table = read_table(PROFILES / "measured" / "h100" / f"decode_attention.{name}.csv")
    peak = peak_of(load_gpu("h100"), table.facts.dtype)
    surface, contexts = Surface(table, peak), np.geomspace(512, 131_072, 25)
    for heads, kv_heads in ((40, 8), (32, 8), (16, 4)):
        seconds = []
        for batch in (64, 96, 128, 200, 256, 512, 1024):
            shape = {"heads": heads, "kv_heads": kv_heads, "batch": batch}
            found, is_inside = surface.seconds(shape, contexts, peak)
            slower = found[1:] / contexts[1:] > found[:-1] / contexts[:-1] * (1 + 1e-9)
            assert not slower[~is_inside[1:]].any()
            seconds.append(found)
        assert (np.diff(seconds, axis=0) > 0).all() and (np.diff(seconds, axis=1) > 0).all()


# Tables of engines and formats ------------------------------------------------------------------------


def seconds_of(some: Kernels, operator: str, columns: float, **shape: float) -> float:
    return float(some.time(operator, np.array([columns]), **shape).seconds[0])


def test_an_engine_takes_its_own_tables_where_the_gpu_has_them() -> None:
    plain, shape = Kernels("b200", "bfloat16"), {"gpus": 8.0}
    own = plain.of_engine({"all_reduce": "sglang", "gemm": "nobody"})
    assert seconds_of(own, "all_reduce", 65536.0, **shape) < seconds_of(
        plain, "all_reduce", 65536.0, **shape
    )
    assert seconds_of(own, "gemm", 64.0, n=4096, k=4096) == seconds_of(
        plain, "gemm", 64.0, n=4096, k=4096
    )
    chosen = Kernels("b200", "bfloat16", "vllm").of_engine({"all_reduce": "sglang"})
    assert seconds_of(chosen, "all_reduce", 65536.0, **shape) == seconds_of(
        plain, "all_reduce", 65536.0, **shape
    )


def test_an_engine_may_replace_one_format_alone() -> None:
    plain = Kernels("h200", "fp8")
    own, wide = (
        some.of_engine({"gemm.fp8": "sglang"}) for some in (plain, Kernels("h200", "bfloat16"))
    )
    assert own.backend("gemm") == "sglang" and plain.backend("gemm") == "vllm"
    assert wide.backend("gemm") == "vllm"


def test_a_larger_product_never_takes_less_in_tables_that_an_engine_may_pad() -> None:
    for name in ("gemm.vllm.fp8", "gemm.vllm.nvfp4", "all_reduce.vllm.bfloat16", "moe.vllm.fp8"):
        table = read_table(PROFILES / "measured" / "b200" / f"{name}.csv")
        for row in table.seconds:
            kept = row[~np.isnan(row)]
            assert (np.diff(kept) >= -1e-12).all(), name


# Linear attention --------------------------------------------------------------------------------

LINEAR = ("linear_decode", "linear_prefill", "kimi_decode", "kimi_prefill")
LEFT_OUT = {
    "linear_decode": 0.02,
    "linear_prefill": 0.05,
    "kimi_decode": 0.03,
    "kimi_prefill": 0.06,
}
"""Most of the median error on rows that were left out."""


def linear_tables(operator: str) -> list[Table]:
    paths = sorted((PROFILES / "measured").glob(f"*/{operator}.*.csv"))
    return [read_table(path) for path in paths]


@pytest.mark.parametrize("operator", LINEAR)
def test_tables_of_linear_attention_reproduce_themselves(operator: str) -> None:
    tables = linear_tables(operator)
    assert len(tables) >= 5
    for table in tables:
        peak = peak_of(load_gpu(table.facts.gpu), table.facts.dtype)
        surface = Surface(table, peak)
        for row, seconds in zip(table.rows, table.seconds, strict=True):
            is_measured = ~np.isnan(seconds)
            shape = dict(zip(table.keys, row.tolist(), strict=True))
            found, is_inside = surface.seconds(shape, table.columns[is_measured], peak)
            assert found == pytest.approx(seconds[is_measured], rel=1e-9) and is_inside.all()


@pytest.mark.parametrize("operator", LINEAR)
def test_rows_of_linear_attention_that_are_left_out_are_interpolated(operator: str) -> None:
    """Heads, or numbers of sequences, that lie between others are left out one value at a time."""
    errors: list[float] = []
    for table in linear_tables(operator):
        peak = peak_of(load_gpu(table.facts.gpu), table.facts.dtype)
        for axis in range(len(table.keys)):
            column = table.rows[:, axis]
            for value in np.unique(column)[1:-1]:
                is_kept = column != value
                kept = replace(table, rows=table.rows[is_kept], seconds=table.seconds[is_kept])
                surface = Surface(kept, peak)
                for row, seconds in zip(table.rows[~is_kept], table.seconds[~is_kept], strict=True):
                    shape = dict(zip(table.keys, row.tolist(), strict=True))
                    found, is_inside = surface.seconds(shape, table.columns, peak)
                    is_known = is_inside & ~np.isnan(seconds)
                    errors.extend(np.abs(found / seconds - 1)[is_known])
    assert np.median(errors) <= LEFT_OUT[operator]

"""Served points: how they are read, what has a prediction, and how far predictions are from them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.derive_served import Layout, layout_of, with_whole_blocks
from streamrl.sim.fidelity.published_rows import Row, grouped, summarise
from streamrl.sim.fidelity.served import (
    ServedPoint,
    coverage,
    covered,
    known_rows,
    others_predictions,
    predict,
    predict_range,
    range_rows,
    read_served,
    share_of_peak,
    workers,
)


def point(**changes: Any) -> ServedPoint:
    found = next(one for one in covered() if one.model == "qwen3-32b" and not one.is_split)
    return msgspec.structs.replace(found, **changes)


def milliseconds(some: ServedPoint) -> float:
    low, high = predict_range(some)
    assert low == high
    return high


def test_more_than_nine_of_ten_points_have_a_prediction() -> None:
    assert len(read_served()) == 2611
    assert len(covered()) > 0.95 * len(read_served())
    assert len(known_rows()) + len(range_rows()) == len(covered())


@pytest.mark.parametrize(("generation", "most"), [("Hopper", 0.08), ("Blackwell", 0.12)])
def test_points_with_known_inputs_are_met(generation: str, most: float) -> None:
    found = summarise(grouped(known_rows())[generation])
    assert found.median < most and abs(found.bias) < 0.05
    assert found.median_beside is not None and found.rows_beside > 0.9 * found.rows
    assert found.median < found.median_beside


def test_a_point_with_unknown_inputs_is_a_range_and_never_exact() -> None:
    assert all(row.width > 0.01 for row in range_rows())
    found = summarise(range_rows())
    assert found.in_band is None and found.within_range is not None and found.within_range > 0.6
    assert found.median > 0.1 and not any(row.error == 0 for row in range_rows())


def test_nothing_is_fitted_to_a_served_point() -> None:
    rows: list[Row] = [*known_rows(), *range_rows()]
    assert {row.evidence for row in rows} == {"not fitted"}


def test_another_tools_predictions_are_of_points_that_exist() -> None:
    keys = {one.key for one in read_served()}
    assert keys.issuperset(others_predictions()) and len(others_predictions()) > 2000


@pytest.mark.parametrize(
    ("degrees", "side", "layout"),
    [
        ((8, 1, 8, 1), "", Layout(8, 1, 1)),
        ((8, 1, 1, 8), "", Layout(8, 1, 8)),
        ((64, 1, 8, 8), "", Layout(8, 1, 8)),
        ((4, 4, 1, 16), "", Layout(4, 1, 4)),
        ((1, 64, 8, 8), "", Layout(1, 8, 8)),
        ((1, 8, 1, 8), "", Layout(1, 8, 8)),
        ((72, 1, 72, 1), "", None),
        ((1, 1, 1, 1), "decode_", None),
        ((16, 1, 1, 16), "decode_", Layout(16, 1, 16)),
    ],
)
def test_degrees_that_the_sample_multiplied_twice_are_read(
    degrees: tuple[int, ...], side: str, layout: Layout | None
) -> None:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    line = {f"{side}{name}": str(value) for name, value in zip(names, degrees, strict=True)}
    assert layout_of({**line, "model_path": "deepseek-ai/DeepSeek-R1"}, side) == layout


def test_experts_stay_whole_where_their_parts_would_cut_a_block_of_scales() -> None:
    assert with_whole_blocks(Layout(8, 1, 1), "minimax-m2.7") == Layout(8, 1, 8)
    assert with_whole_blocks(Layout(4, 1, 1), "minimax-m2.7") == Layout(4, 1, 1)
    assert with_whole_blocks(Layout(8, 1, 1), "qwen3-32b") == Layout(8, 1, 1)


def test_a_point_that_no_gpu_can_compute_has_no_prediction() -> None:
    some = point(is_split=False, least_running=64.0, most_running=64.0)
    assert share_of_peak(some) < 1
    faster = msgspec.structs.replace(some, tpot=some.tpot * share_of_peak(some) / 2)
    assert share_of_peak(faster) == pytest.approx(2)
    found = coverage()
    assert found.above_peak > 0
    assert found.points == found.covered + found.without_layout + found.above_peak


def test_requests_of_equal_length_wait_for_half_of_the_prompts_where_prefill_has_its_own_steps() -> (
    None
):
    some = point(engine="sglang-0.5", is_split=False, is_random=True, prompt=4096.0, output=128.0)
    step = milliseconds(msgspec.structs.replace(some, is_split=True))
    drawn, equal = (
        milliseconds(msgspec.structs.replace(some, is_random=flag)) - step for flag in (True, False)
    )
    assert equal == pytest.approx(drawn / 2)
    mixed = msgspec.structs.replace(some, engine="vllm-0.19")
    assert milliseconds(mixed) == milliseconds(msgspec.structs.replace(mixed, is_random=False))


def test_unknown_workers_are_tensor_or_attention_ranks() -> None:
    some = next(one for one in covered() if one.model == "deepseek-v3" and one.is_split)
    some = msgspec.structs.replace(
        some,
        tensor_parallel=8,
        data_parallel=1,
        expert_parallel=8,
        least_running=4.0,
        may_draft=False,
    )
    some = msgspec.structs.replace(some, most_running=64.0)
    assert [worker.data_parallel for worker in workers(some)] == [1, 8]
    each = [predict(some, worker, load) for worker in workers(some) for load in (4.0, 64.0)]
    assert predict_range(some) == (min(each), max(each))
    known = msgspec.structs.replace(some, least_running=64.0)
    assert [worker.data_parallel for worker in workers(known)] == [1]


def test_draft_tokens_make_a_range_that_begins_below_half() -> None:
    some = point(model="deepseek-v3", gpu="h200", tensor_parallel=8, may_draft=True, is_split=True)
    low, high = predict_range(some)
    assert low < 0.7 * high
    assert high == milliseconds(msgspec.structs.replace(some, may_draft=False))


def test_scales_of_tensors_and_of_blocks_take_their_own_products() -> None:
    some = point(dtype="fp8", cache_dtype="bfloat16", gpu="h200", tensor_parallel=1)
    tensor, blocks = (
        milliseconds(msgspec.structs.replace(some, engine="vllm-0.19", has_block_scales=flag))
        for flag in (False, True)
    )
    assert tensor != blocks

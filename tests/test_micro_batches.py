"""Rollouts become micro-batches: dealt out evenly, put together within bounds, none lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.hardware.resolved import resolve
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.training.micro_batches import (
    distribute_rollouts,
    fewest_micro_batches,
    micro_batches,
)
from streamrl.sim.costs.training.pipeline import SerialSchedule
from streamrl.sim.costs.training.training import TrainingCosts
from tests.test_training_costs import train_run

lengths_of_rollouts = st.lists(st.integers(1, 20000), max_size=60)
orders = st.sampled_from(["sorted", "arrival"])


def trainer(**keys: Any) -> TrainerConfig:
    return TrainerConfig(pool="p", **keys)


def quadratic(length: int) -> float:
    return length + length * length / 1e4


# Dealing ------------------------------------------------------------------------------------------


@given(lengths_of_rollouts, st.integers(1, 8), orders)
def test_every_rollout_is_dealt_to_one_rank(lengths: list[int], ranks: int, order: Any) -> None:
    dealt = distribute_rollouts(lengths, [0.0] * ranks, quadratic, trainer(order=order))
    assert sorted(length for part in dealt for length in part) == sorted(lengths)
    for part in dealt:
        assert order == "arrival" or part == sorted(part, reverse=True)


@given(st.lists(st.integers(1, 20000), min_size=1, max_size=60), st.integers(1, 8), orders)
def test_no_rank_has_more_than_a_mean_rank_and_one_rollout(
    lengths: list[int], ranks: int, order: Any
) -> None:
    dealt = distribute_rollouts(lengths, [0.0] * ranks, quadratic, trainer(order=order))
    loads = [sum(map(quadratic, part)) for part in dealt]
    longest = max(map(quadratic, lengths))
    assert max(loads) <= sum(loads) / ranks + longest * (1 - 1 / ranks) + 1e-6
    if order == "sorted":  # Graham 1969: at most 4/3 of the best, which has no less than either
        best = max(sum(loads) / ranks, longest)
        assert max(loads) <= (4 / 3) * best + longest / 3 + 1e-6


def test_the_longest_are_dealt_first_and_each_to_the_rank_with_least_to_do() -> None:
    dealt = distribute_rollouts([3, 9, 5, 4, 7], [0.0, 0.0], float, trainer())
    assert dealt == [[9, 4], [7, 5, 3]]
    assert distribute_rollouts([3, 9, 5, 4, 7], [0.0, 0.0], float, trainer(order="arrival")) == [
        [3, 5, 4],
        [9, 7],
    ]


def test_a_rank_that_is_still_busy_gets_less() -> None:
    assert distribute_rollouts([4, 4, 4], [8.0, 0.0], float, trainer()) == [[4], [4, 4]]
    assert distribute_rollouts([], [0.0, 0.0], float, trainer()) == [[], []]


# Micro-batches ------------------------------------------------------------------------------------


@given(
    lengths_of_rollouts,
    st.integers(1, 8),
    st.integers(1000, 30000),
    st.sampled_from(["packed", "padded"]),
)
def test_a_micro_batch_has_no_more_rollouts_and_tokens_than_it_may(
    lengths: list[int], most: int, tokens: int, packing: Any
) -> None:
    config = trainer(micro_batch=most, max_tokens_per_pass=tokens, packing=packing)
    batches = micro_batches(lengths, config)
    assert all(size <= max(tokens, *lengths) for size, _, _ in batches)
    assert len(batches) >= -(-len(lengths) // most)
    if packing == "packed":
        assert sum(size for size, _, _ in batches) == sum(lengths)
        assert sum(pairs for _, pairs, _ in batches) == sum(one * one for one in lengths) / 2
    else:
        assert sum(size for size, _, _ in batches) >= sum(lengths)


def test_micro_batches_end_at_their_rollouts_or_at_their_tokens_or_hold_one_long_rollout() -> None:
    config = trainer(micro_batch=2, max_tokens_per_pass=3000)
    assert [size for size, _, _ in micro_batches([100] * 4, config)] == [200, 200]
    assert [size for size, _, _ in micro_batches([2900, 1000, 1000], config)] == [2900, 2000]
    assert [size for size, _, _ in micro_batches([9000, 100], config)] == [9000, 100]
    assert micro_batches([], config) == []


def test_padded_rollouts_are_all_as_long_as_the_longest() -> None:
    config = trainer(micro_batch=4, max_tokens_per_pass=3000, packing="padded")
    assert micro_batches([1000, 500, 100], config) == [(3000, 3 * 1000**2 / 2, 0)]
    assert [size for size, _, _ in micro_batches([100, 500, 2000], config)] == [1000, 2000]
    packed = trainer(micro_batch=4, max_tokens_per_pass=3000)
    pairs = (1000**2 + 500**2 + 100**2) / 2
    assert micro_batches([1000, 500, 100], packed) == [(1600, pairs, 3 * 1600)]


@given(st.lists(st.integers(1, 900), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_ranks_get_as_many_full_micro_batches_and_pipelines_get_equal_ones(
    lengths: list[int], ranks: int, stages: int
) -> None:
    config = trainer(
        data_parallel=ranks, pipeline_parallel=stages, micro_batch=10, max_tokens_per_pass=1000
    )
    by_rank = fewest_micro_batches(lengths, [0.0] * ranks, config)
    sizes = [size for one in by_rank for size, _, _ in one]
    assert len(by_rank) == ranks and max(sizes) <= 1000
    assert sum(pairs for one in by_rank for _, pairs, _ in one) == sum(n * n for n in lengths) / 2
    if len(lengths) >= ranks + len(sizes):
        assert len({len(one) for one in by_rank}) == 1
    if stages > 1:
        assert len(set(sizes)) == 1
    else:
        assert sum(sizes) == sum(lengths)


def test_the_longest_come_first_each_where_it_fits_best() -> None:
    one = trainer(micro_batch=3, max_tokens_per_pass=1000)
    lengths = [300, 600, 500, 400, 100, 100]
    assert [size for size, _, _ in fewest_micro_batches(lengths, [0.0], one)[0]] == [1000, 900, 100]
    assert [size for size, _, _ in fewest_micro_batches([100] * 4, [0.0], one)[0]] == [300, 100]
    two = trainer(data_parallel=2, micro_batch=9, max_tokens_per_pass=1000)
    assert [repeats for _, _, repeats in fewest_micro_batches([100] * 4, [0.0], one)[0]] == [
        900,
        100,
    ]
    for loads, sizes in (([0.0, 0.0], [[700], [200]]), ([2.0, 1.0], [[200], [700]])):
        dealt = fewest_micro_batches([400, 300, 200], loads, two)
        assert [[size for size, _, _ in rank] for rank in dealt] == sizes
    assert fewest_micro_batches([], [0.0, 0.0], two) == [[], []]


def test_full_micro_batches_have_the_tokens_of_a_pass_and_the_pairs_of_their_rollouts() -> None:
    one = trainer(micro_batch=3, max_tokens_per_pass=1000)
    lengths = [300, 600, 500, 400, 100, 1200]
    packed = fewest_micro_batches(lengths, [0.0], one)[0]
    full = fewest_micro_batches(lengths, [0.0], one, is_full=True)[0]
    assert [size for size, _, _ in full] == [1200, 1000, 1000]
    assert [pairs for _, pairs, _ in full] == [pairs for _, pairs, _ in packed]
    assert sum(size for size, _, _ in packed) == sum(lengths)
    assert fewest_micro_batches([], [0.0], one, is_full=True) == [[]]


def times(name: str, stages: int) -> float:
    """Return the seconds of passes with a framework, most of whose micro-batches are half full; the loss is one for all."""
    keys = {"packing": "packed", "micro_batch": 4, "max_tokens_per_pass": 4096, "logits": "chunked"}
    system = {"policies.system": "disaggregated"}
    run = train_run(system, pipeline_parallel=stages, tensor_parallel=8 // stages, **keys)
    named = replace(run, framework=replace(run.framework, name=name))
    return TrainingCosts.load(resolve(named)).train_time([4000, *[2200] * 15])


def test_nemo_rl_pads_the_micro_batches_of_a_pipeline_and_others_do_not() -> None:
    """Its passes take 1.2 times as long as those of pretraining besides (NVIDIA-NeMo/RL issue 2129)."""
    assert times("nemo-rl", 1) == pytest.approx(1.2 * times("slime", 1), rel=0.02)
    assert times("nemo-rl", 2) > 1.5 * 1.2 * times("slime", 2)


def test_padding_takes_longer_where_lengths_differ_and_not_where_they_do_not() -> None:
    packed, padded = (
        TrainingCosts.load(resolve(train_run(packing=kind, micro_batch=4)))
        for kind in ("packed", "padded")
    )
    assert padded.train_time([1000] * 16) == pytest.approx(packed.train_time([1000] * 16))
    assert padded.train_time([4000, 300, 200, 100]) > packed.train_time([4000, 300, 200, 100])


# Ranks in step ------------------------------------------------------------------------------------


def test_ranks_that_gather_weights_wait_for_the_slowest_at_every_micro_batch() -> None:
    run = train_run(zero=3, data_parallel=2, micro_batch=1, order="arrival")
    costs = TrainingCosts.load(resolve(run))
    lengths = [8000, 500, 500, 500, 7600]  # rank 0 has the first, rank 1 all others
    sizes = [[(n, n * n / 2, n) for n in rank] for rank in ([8000], [500, 500, 500, 7600])]
    times = [
        costs.stages.forward_times(rank)[:, 0] + costs.stages.backward_times(rank)[:, 0]
        for rank in sizes
    ]
    expected = max(times[0][0], times[1][0]) + times[1][1:].sum()
    assert costs.train_time(lengths) == pytest.approx(expected)
    apart = TrainingCosts.load(resolve(train_run(data_parallel=2, micro_batch=1, order="arrival")))
    alone = TrainingCosts.load(resolve(train_run(micro_batch=1)))
    assert apart.train_time(lengths) == pytest.approx(alone.train_time(lengths[1:]))


def test_expert_ranks_go_in_step_and_plain_ranks_do_not() -> None:
    lengths = [8000, 500, 500, 500, 7600]
    mixture = {"model.name": "qwen3-30b-a3b"}
    keys = {"data_parallel": 2, "micro_batch": 1, "order": "arrival"}
    shared, apart = (
        TrainingCosts.load(resolve(train_run(mixture, expert_parallel=degree, **keys)))
        for degree in (2, 1)
    )
    one = TrainingCosts.load(resolve(train_run(mixture, micro_batch=1)))
    assert apart.train_time(lengths) == pytest.approx(one.train_time(lengths[1:]))
    sizes = [(n, n * n / 2, n) for n in (8000, 500, 500, 7600)]
    times = shared.stages.forward_times(sizes) + shared.stages.backward_times(sizes)
    assert shared.train_time(lengths) == pytest.approx(times.sum())


# A line without a pipeline ------------------------------------------------------------------------


def test_a_serial_line_does_one_command_after_the_other() -> None:
    line = SerialSchedule(score_time=lambda lengths: 1.0 * len(lengths), train_time=sum)
    assert line.score([5, 5], 10.0) == 12.0
    assert line.train([3], 12.0) == 15.0
    assert line.train([3], 13.0) == 18.0
    assert line.finish(14.0) == 18.0
    assert line.finish(20.0) == 20.0

"""When a trainer's passes end: the schedule against events and processes, and against closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.hardware.memory import model_state
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.frameworks import load_framework
from streamrl.sim.costs.corrections import framework_sources
from streamrl.sim.costs.costs import ScaledSchedule
from streamrl.sim.costs.training.micro_batches import MicroBatch, distribute_rollouts, micro_batches
from streamrl.sim.costs.training.pipeline import Pipeline, interleave
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.fidelity.rl_steps import load_published
from tests.runs import small_run
from tests.schedule_events import EventTrainer, InterleavedRun, Micro, PipelineRun

Floats = Sequence[Sequence[float]]
SPLITS: list[tuple[str, dict[str, int]]] = [
    ("qwen2.5-7b", {"data_parallel": 2, "pipeline_parallel": 4}),
    ("qwen3-30b-a3b", {"data_parallel": 2, "pipeline_parallel": 4}),
    ("qwen2.5-32b", {"pipeline_parallel": 8}),
    ("qwen2.5-32b", {"pipeline_parallel": 16}),
]


def train_run(
    model: str = "qwen2.5-7b", changes: dict[str, Any] | None = None, **trainer: Any
) -> Run:
    """Return a run that trains on four nodes of H800."""
    return small_run(
        {
            "model.name": model,
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "algorithm.prompts_per_step": 128,
            "trainer": {"pool": "near", "micro_batch": 8, **trainer},
            **(changes or {}),
        }
    )


def heavy_tailed(count: int, seed: int = 0) -> list[int]:
    """Return tokens of rollouts, most of them short and some up to 20,000."""
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.2, count)
    return [int(length) for length in drawn.clip(50, 20000)]


def micros_of(costs: TrainingCosts, batches: Sequence[MicroBatch]) -> list[Micro]:
    """Return micro-batches with the seconds of their passes."""
    forward = costs.stages.forward_times(batches).tolist()
    backward = costs.stages.backward_times(batches).tolist()
    sends = [costs.stages.send * tokens for tokens, *_ in batches]
    return [Micro(*each) for each in zip(forward, backward, sends, strict=True)]


def event_trainer(costs: TrainingCosts) -> EventTrainer:
    """Return the same trainer, event by event; ranks that go in step are one, which waits for the slowest."""
    trainer = costs.trainer
    goes_in_step = trainer.zero >= 2 or trainer.expert_parallel > 1

    def dealt(lengths: Sequence[int], loads: Sequence[float]) -> list[list[Micro]]:
        if goes_in_step:
            loads = [0.0] * trainer.data_parallel
        parts = distribute_rollouts(lengths, loads, costs.stages.rollout_time, trainer)
        ranks = [micros_of(costs, micro_batches(part, trainer)) for part in parts]
        return [slowest(ranks)] if goes_in_step else ranks

    num_ranks = 1 if goes_in_step else trainer.data_parallel
    return EventTrainer(num_ranks, trainer.pipeline_parallel, dealt)


def slowest(ranks: list[list[Micro]]) -> list[Micro]:
    """Return one rank's micro-batches, each as slow as the slowest of all ranks'."""
    found = []
    for index in range(max(map(len, ranks))):
        there = [rank[index] for rank in ranks if index < len(rank)]
        forward = [max(each) for each in zip(*(micro.forward for micro in there), strict=True)]
        backward = [
            max(each) for each in zip(*(micro.backward or () for micro in there), strict=True)
        ]
        found.append(Micro(forward, backward, max(micro.send for micro in there)))
    return found


# Against events -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sorted", "arrival"])
@pytest.mark.parametrize(("model", "degrees"), SPLITS)
def test_a_batch_at_once_takes_what_its_events_take(
    model: str, degrees: dict[str, int], order: str
) -> None:
    costs = TrainingCosts.load(resolve(train_run(model, order=order, **degrees)))
    lengths, events = heavy_tailed(256), event_trainer(costs)
    events.train(lengths, 0.0)
    assert costs.train_time(lengths) == pytest.approx(events.finish(), rel=1e-9)


@pytest.mark.parametrize("pause", [0.0, 0.5, 20.0])
@pytest.mark.parametrize("order", ["sorted", "arrival"])
@pytest.mark.parametrize(("model", "degrees"), SPLITS)
def test_a_stream_of_commands_takes_what_its_events_take(
    model: str, degrees: dict[str, int], order: str, pause: float
) -> None:
    costs = TrainingCosts.load(resolve(train_run(model, order=order, **degrees)))
    line, events, now, then = costs.line(), event_trainer(costs), 3.0, 3.0
    lengths = heavy_tailed(192, seed=1)
    for number, start in enumerate(range(0, len(lengths), 16)):
        now = line.train(lengths[start : start + 16], now) + pause * (number % 3)
        then = events.train(lengths[start : start + 16], then) + pause * (number % 3)
        assert now == pytest.approx(then, rel=1e-9)
    assert line.finish(0.0) == pytest.approx(events.finish(), rel=1e-9)


@pytest.mark.parametrize(
    "trainer",
    [
        {"zero": 2, "data_parallel": 4},
        {"zero": 3, "data_parallel": 4},
        {"zero": 3, "data_parallel": 2, "pipeline_parallel": 4},
    ],
)
def test_ranks_in_step_take_what_the_events_of_the_slowest_take(trainer: dict[str, Any]) -> None:
    costs = TrainingCosts.load(resolve(train_run(**trainer)))
    line, events, now = costs.line(), event_trainer(costs), 0.0
    for seed in range(4):
        lengths = heavy_tailed(13, seed)
        events.train(lengths, now)
        now = line.train(lengths, now)
    assert line.finish(0.0) == pytest.approx(events.finish(), rel=1e-9)


def test_expert_ranks_in_step_take_what_the_events_of_the_slowest_take() -> None:
    run = train_run("qwen3-30b-a3b", data_parallel=2, expert_parallel=2, pipeline_parallel=4)
    costs, lengths = TrainingCosts.load(resolve(run)), heavy_tailed(100)
    events = event_trainer(costs)
    events.train(lengths, 0.0)
    assert costs.train_time(lengths) == pytest.approx(events.finish(), rel=1e-9)


def test_scores_go_through_in_one_direction_and_training_follows_stage_by_stage() -> None:
    run = train_run(changes={"algorithm.kl_coefficient": 0.1}, pipeline_parallel=4)
    costs, lengths = TrainingCosts.load(resolve(run)), heavy_tailed(40)
    micros = micros_of(costs, micro_batches(sorted(lengths, reverse=True), run.trainer))
    scored = [Micro(micro.forward, None, micro.send) for micro in micros]
    assert costs.score_time(lengths) == pytest.approx(PipelineRun(4, scored).done_at)
    line, now = costs.line(), 0.0
    for _ in range(3):
        now = line.train(lengths, line.score(lengths, now))
    assert line.finish(0.0) == pytest.approx(PipelineRun(4, (scored + micros) * 3).done_at)


def test_scores_of_a_whole_batch_are_there_before_anything_else_begins() -> None:
    changes = {**PASSES, "policies.system": "disaggregated"}
    run = train_run(changes=changes, data_parallel=3, pipeline_parallel=4)
    costs, lengths = TrainingCosts.load(resolve(run)), heavy_tailed(40)
    assert costs.num_scored == 2
    ranks = distribute_rollouts(lengths, [0.0] * 3, costs.stages.rollout_time, run.trainer)
    dealt = [micros_of(costs, micro_batches(rank, run.trainer)) for rank in ranks]
    scored = [[Micro(micro.forward, None, micro.send) for micro in rank] for rank in dealt]
    one_pass = max(PipelineRun(4, rank).done_at for rank in scored)
    line = costs.line()
    scored_at = line.score(lengths, 0.0)
    assert scored_at == pytest.approx(2 * one_pass)
    line.train(lengths, scored_at)
    assert line.finish(0.0) - scored_at == pytest.approx(costs.train_time(lengths))


durations = st.floats(0.001, 10.0)
ROW = st.tuples(durations, durations, durations)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 30.0),
            st.booleans(),
            st.lists(st.tuples(ROW, ROW, st.floats(0.0, 2.0)), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_micro_batches_at_any_time_take_what_their_events_take(
    commands: list[tuple[float, bool, list[tuple[Sequence[float], Sequence[float], float]]]],
) -> None:
    pipeline, micros, now = Pipeline(3), [], 0.0
    for pause, is_score, rows in commands:
        now += pause
        for forward, backward, send in rows:
            if is_score:
                pipeline.score(forward, send, now)
            else:
                pipeline.train(forward, backward, send, now)
            micros.append(Micro(forward, None if is_score else backward, send, now))
    assert pipeline.drain() == pytest.approx(PipelineRun(3, micros).done_at, rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(2, 4), st.integers(2, 3), st.integers(1, 3))
def test_any_interleaved_micro_batches_take_what_their_events_take(
    data: st.DataObject, devices: int, slices: int, groups: int
) -> None:
    count, size = devices * groups, devices * slices
    row = st.lists(durations, min_size=size, max_size=size)
    rows = st.lists(row, min_size=count, max_size=count)
    forward, backward = data.draw(rows), data.draw(rows)
    sends = data.draw(st.lists(st.floats(0.0, 1.0), min_size=count, max_size=count))
    free = [0.0] * devices
    micros = [Micro(*each) for each in zip(forward, backward, sends, strict=True)]
    both = max(interleave(forward, backward, slices, free, sends))
    assert both == pytest.approx(InterleavedRun(devices, slices, micros).done_at, rel=1e-9)
    micros = [Micro(one, None, send) for one, send in zip(forward, sends, strict=True)]
    scored = max(interleave(forward, None, slices, free, sends))
    assert scored == pytest.approx(InterleavedRun(devices, slices, micros).done_at, rel=1e-9)


@pytest.mark.parametrize("num_rollouts", [5, 32, 200])
def test_an_interleaved_trainer_takes_what_its_events_take(num_rollouts: int) -> None:
    run = train_run(pipeline_parallel=4, virtual_stages=3, micro_batch=2)
    costs, lengths = TrainingCosts.load(resolve(run)), heavy_tailed(num_rollouts)
    micros = micros_of(costs, micro_batches(sorted(lengths, reverse=True), run.trainer))
    nothing = [0.0] * 12
    micros += [Micro(nothing, nothing)] * (-len(micros) % 4)
    assert costs.train_time(lengths) == pytest.approx(InterleavedRun(4, 3, micros).done_at)


# Closed forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_micro", [1, 2, 3, 8, 32])
def test_equal_micro_batches_wait_for_a_fill_of_all_stages_but_one(
    stages: int, num_micro: int
) -> None:
    pipeline = Pipeline(stages)
    for _ in range(num_micro):
        pipeline.train([1.0] * stages, [2.0] * stages, 0.0, 0.0)
    total = pipeline.drain()
    assert total == pytest.approx(3.0 * (num_micro + stages - 1))
    bubble = 1 - 3.0 * num_micro / total
    assert bubble == pytest.approx((stages - 1) / (num_micro + stages - 1))


@pytest.mark.parametrize(
    ("devices", "slices", "groups"), [(2, 2, 1), (4, 2, 2), (4, 4, 3), (8, 2, 1)]
)
def test_interleaved_slices_make_the_bubble_as_many_times_smaller(
    devices: int, slices: int, groups: int
) -> None:
    num_micro = devices * groups
    forward = [[1.0 / slices] * (devices * slices)] * num_micro
    backward = [[2.0 / slices] * (devices * slices)] * num_micro
    free_at = interleave(forward, backward, slices, [0.0] * devices, [0.0] * num_micro)
    assert max(free_at) == pytest.approx(3.0 * num_micro + 3.0 * (devices - 1) / slices)


def test_a_single_stage_takes_the_sum_of_its_passes() -> None:
    run = train_run(micro_batch=3)
    costs, lengths = TrainingCosts.load(resolve(run)), heavy_tailed(50)
    batches = micro_batches(sorted(lengths, reverse=True), run.trainer)
    total = costs.stages.forward_times(batches).sum() + costs.stages.backward_times(batches).sum()
    assert costs.train_time(lengths) == pytest.approx(total)


def test_scores_of_equal_micro_batches_fill_in_a_forward_pass_of_each_stage() -> None:
    pipeline = Pipeline(4)
    for _ in range(6):
        pipeline.score([1.0] * 4, 0.5, 2.0)
    assert pipeline.drain() == pytest.approx(2.0 + 6 + 3 * (1.0 + 0.5))


def test_one_micro_batch_crosses_the_stages_there_and_back() -> None:
    pipeline = Pipeline(3)
    pipeline.train([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 0.25, 10.0)
    assert pipeline.open_until == 11.0
    assert pipeline.drain() == pytest.approx(10.0 + 21.0 + 4 * 0.25)


# Streams ------------------------------------------------------------------------------------------


def test_what_comes_before_the_first_stage_is_free_fills_nothing_again() -> None:
    def total(pause: float) -> float:
        pipeline, now = Pipeline(4), 0.0
        for _ in range(5):
            pipeline.train([1.0] * 4, [2.0] * 4, 0.0, now)
            now = pipeline.open_until + pause
        return pipeline.drain()

    assert total(0.0) == 3.0 * (5 + 3)
    assert total(0.1) > 3.0 * (5 + 3) + 4 * 0.1  # four fills more


def test_rounding_makes_nothing_late() -> None:
    pipeline = Pipeline(2)
    pipeline.train([0.1, 0.1], [0.2, 0.2], 0.0, 0.3)
    pipeline.train([0.1, 0.1], [0.2, 0.2], 0.0, np.nextafter(pipeline.open_until, 1.0))
    assert pipeline.drain() == pytest.approx(0.3 + 3 * 0.3)


@pytest.mark.parametrize("factor", [0.3, 1.7])
def test_a_factor_changes_the_seconds_of_a_stream_and_not_its_schedule(factor: float) -> None:
    costs = TrainingCosts.load(resolve(train_run(data_parallel=3, pipeline_parallel=4)))
    line, now = costs.line(), 0.0
    scaled, later = ScaledSchedule(costs.line(), factor), 0.0
    for seed in range(20):
        lengths = heavy_tailed(24, seed)
        now, later = line.train(lengths, now), scaled.train(lengths, later)
    assert scaled.finish(later) == pytest.approx(line.finish(now) / factor)


def test_a_rank_that_is_dealt_nothing_holds_up_nobody() -> None:
    costs = TrainingCosts.load(resolve(train_run(data_parallel=4)))
    line, now = costs.line(), 100.0
    alone = costs.train_time([1000])
    assert line.train([1000], now) == pytest.approx(100 + alone / 4)
    assert line.finish(now) == pytest.approx(100 + alone)


def test_a_pipeline_is_nearly_as_fast_as_data_parallel_ranks_where_like_follows_like_and_else_half_so() -> (
    None
):
    lengths = heavy_tailed(1024)
    whole = {"algorithm.prompts_per_step": 1024}

    def seconds(**trainer: Any) -> float:
        run = train_run(changes=whole, micro_batch=2, **trainer)
        return TrainingCosts.load(resolve(run)).train_time(lengths)

    pipelined = seconds(data_parallel=2, pipeline_parallel=4)
    by_arrival = seconds(data_parallel=2, pipeline_parallel=4, order="arrival")
    assert pipelined == pytest.approx(seconds(data_parallel=8), rel=0.2)
    assert 1.6 * pipelined < by_arrival < 2.4 * pipelined


def test_a_controller_sends_padded_rollouts_before_every_pass() -> None:
    changes = {"algorithm.kl_coefficient": 0.1, "algorithm.old_log_probs": "trainer"}
    plain, slowed = (
        TrainingCosts.load(resolve(train_run(changes={**changes, "framework.transfer_time": each})))
        for each in ("0 s", "1 us")
    )
    longest = resolve(train_run()).trainer.longest_sequence
    lengths = heavy_tailed(128)
    sent_in = 128 * longest * 1e-6
    assert plain.num_scored == 2
    assert slowed.score_time(lengths) - plain.score_time(lengths) == pytest.approx(2 * sent_in)
    assert slowed.train_time(lengths) - plain.train_time(lengths) == pytest.approx(sent_in)


PASSES: dict[str, Any] = {"algorithm.kl_coefficient": 0.1, "algorithm.old_log_probs": "trainer"}
MEGATRON: dict[str, Any] = {"pipeline_parallel": 2, "tensor_parallel": 4, "zero": 1}


def nemo_rl(version: str | None, changes: dict[str, Any] | None = None) -> TrainingCosts:
    """Return the costs of a release of NeMo-RL whose model is on 8 of 32 GPUs; None is the commit that was read."""
    stated = {} if version is None else {"framework.version": version}
    own = {**PASSES, "framework.name": "nemo-rl", **stated, **(changes or {})}
    return TrainingCosts.load(resolve(train_run(changes=own, data_parallel=4, **MEGATRON)))


def test_ranks_of_a_model_share_what_a_controller_sends_unless_their_release_sends_copies() -> None:
    sending = load_framework("nemo-rl").sending
    assert sending is not None
    longest = resolve(train_run()).trainer.longest_sequence
    shared, copied = (nemo_rl(version).transfer_times for version in (None, "0.6"))
    once = [longest * each for each in sending.token_times(1)]
    assert shared == pytest.approx(once)
    assert copied == pytest.approx([8 * each for each in once])
    assert nemo_rl("0.6", {"framework.transfer_time": "0 s"}).transfer_times == (0.0, 0.0)


def test_verl_before_0_9_sends_batches_from_one_controller_as_its_published_steps_have_it() -> None:
    def verl(version: str | None, num_gpus: int) -> tuple[float, float]:
        stated = {} if version is None else {"framework.version": version}
        own = {**PASSES, "framework.name": "verl", **stated}
        run = train_run(changes=own, data_parallel=num_gpus // 4, tensor_parallel=4, zero=1)
        return TrainingCosts.load(resolve(run)).transfer_times

    longest = resolve(train_run()).trainer.longest_sequence
    published = [
        step.table["framework"]["transfer_time"]
        for step in load_published()
        if step.name.startswith("verl: ")
    ]
    assert set(published) == {"140 ns"}
    for version in ("0.5", "0.8"):
        assert verl(version, 32) == pytest.approx([longest * 140e-9] * 2, rel=0.02)
        assert verl(version, 8) == pytest.approx([longest * 40e-9] * 2, rel=0.02)
    assert verl("0.9", 32) == verl(None, 32) == (0.0, 0.0)


@pytest.mark.parametrize(("version", "is_told"), [("0.4", True), ("0.5", False)])
def test_the_sources_of_a_run_tell_what_its_release_sends_and_offloads(
    version: str, is_told: bool
) -> None:
    own = {**PASSES, "framework.name": "nemo-rl", "framework.version": version}
    told = list(framework_sources(resolve(train_run(changes=own, data_parallel=4, **MEGATRON))))
    assert any("8 copies of the batch" in source for source in told)
    assert any(source.startswith("the optimizer is in host memory") for source in told) == is_told


def test_a_release_that_offloads_the_optimizer_to_score_does_so_once_a_batch() -> None:
    lengths = heavy_tailed(128)
    keeps, offloads = (
        nemo_rl(version, {"framework.transfer_time": "0 s"}).score_time(lengths)
        for version in ("0.5", "0.4")
    )
    resolved = resolve(train_run(data_parallel=4, **MEGATRON, master_weights="remainders"))
    trainer = resolved.trainer
    moved = model_state(trainer.model, trainer.config, trainer.dtype).optimizer
    assert offloads - keeps == pytest.approx(moved * (1 / 1.8e9 + 1 / 16.1e9))


def test_larger_passes_change_scoring_alone() -> None:
    limits: dict[str, Any] = {"max_tokens_per_pass": 4096, "micro_batch": 64}
    plain, larger = (
        TrainingCosts.load(resolve(train_run("qwen3-30b-a3b", PASSES, **limits, **more)))
        for more in ({}, {"max_tokens_per_scoring_pass": 16384})
    )
    lengths, fewer = [1000] * 128, 128 // 4 - 128 // 16
    saved = plain.num_scored * fewer * plain.stages.scored[0].fixed
    assert larger.train_time(lengths) == plain.train_time(lengths)
    assert plain.score_time(lengths) - larger.score_time(lengths) == pytest.approx(saved)


def test_nemo_rl_pads_what_dtensor_trains_and_nothing_that_it_scores_or_megatron_trains() -> None:
    limits: dict[str, Any] = {"max_tokens_per_pass": 4096, "micro_batch": 64, "data_parallel": 2}
    own = {
        **PASSES,
        "framework": {"name": "nemo-rl", "step_time": "0 s", "transfer_time": "0 s"},
        "policies.system": "disaggregated",
    }
    short, full = [2100] * 8, [4096] * 8  # one of them in each micro-batch
    for zero, is_padded in ((3, True), (1, False)):
        costs = TrainingCosts.load(resolve(train_run(changes=own, zero=zero, **limits)))
        pairs = sum(
            one.per_pair * (4096**2 - 2100**2) / 2
            for one in (*costs.stages.forward, *costs.stages.backward)
        )
        less = costs.train_time(full) - costs.train_time(short)
        assert (less == pytest.approx(4 * pairs)) == is_padded
        assert costs.score_time(full) > 1.3 * costs.score_time(short)

"""What a run gave and cost, by pencil and paper."""

from __future__ import annotations

import pytest

from streamrl.engine.messages import (
    Drop,
    ReplicaStarted,
    RunStarted,
    StartReplica,
    StartTrainer,
    Train,
    TrainerStarted,
)
from streamrl.hardware.profiles import load_gpu
from streamrl.record.metrics import dollars_per_second, measure
from streamrl.record.trace import Trace
from tests.hand_traces import HandTrace


def two_steps(warm_up_steps: int) -> Trace:
    """Return a run of two steps, of 16 and 10 seconds, the second trained on a stale rollout."""
    hand = HandTrace(
        algorithm__steps=2, policies__system="stream-async", warm_up_steps=warm_up_steps
    )
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, 1)
    hand.generated(10.0, 0, run_time=10.0, tokens=100)
    hand.train(10.0, 16.0, 1, 0)
    hand.generated(20.0, 1, run_time=20.0, tokens=300)
    hand.train(20.0, 26.0, 2, 1)
    return hand.trace


def test_rates_count_tokens_between_the_warm_up_and_the_last_step() -> None:
    metrics = measure(two_steps(warm_up_steps=1))
    assert metrics.step_times == [16, 10]
    assert metrics.step_time == 10
    assert metrics.throughput == metrics.goodput == 300 / 10
    assert metrics.samples_per_second == 1 / 10
    assert measure(two_steps(warm_up_steps=0)).goodput == 400 / 26


def test_staleness_is_the_version_trained_from_minus_the_one_born_under() -> None:
    assert measure(two_steps(0)).staleness == {0: 1, 1: 1}


def test_a_resumed_run_counts_staleness_from_its_version() -> None:
    hand = HandTrace()
    hand.at(0.0, RunStarted(7, 7), StartTrainer(0, 0), StartReplica(0, 7))
    hand.at(0.0, ReplicaStarted(0, 7))
    hand.at(0.0, TrainerStarted(0, 7))
    hand.draw(0.0, 8, 1)
    hand.generate(0.0, 0)
    hand.generated(5.0, 0, run_time=5.0, version=7)
    hand.train(5.0, 6.0, 8, 0)
    assert measure(hand.trace).staleness == {0: 1}


def test_a_rollout_dropped_before_its_step_counts_as_dropped_only() -> None:
    hand = HandTrace(algorithm__steps=2)
    hand.begin()
    for step, start in ((1, 0.0), (2, 10.0)):
        hand.draw(start, step, 1)
        hand.generate(start, step - 1)
        hand.generated(start + 5, step - 1, run_time=5.0, version=step - 1)
        if step == 1:
            hand.train(5.0, 10.0, 1, 0)
    hand.command(15.0, Train((1,), 0))
    hand.command(16.0, Drop(1, "interrupted"))
    metrics = measure(hand.trace)
    assert metrics.dropped == {"interrupted": 1}
    assert metrics.staleness == {0: 1}
    assert metrics.rewards == [0.5]


def test_dollars_are_gpus_by_price_by_time() -> None:
    trace = two_steps(warm_up_steps=1)
    per_second = (1.85 + load_gpu("h800").price) / 3600
    metrics = measure(trace)
    assert dollars_per_second(trace.run) == pytest.approx(per_second)
    assert metrics.cost_per_step == pytest.approx(10 * per_second)
    assert metrics.cost_per_million_tokens == pytest.approx(per_second / 30 * 1e6)


def test_tiers_weigh_busy_seconds() -> None:
    metrics = measure(two_steps(0))
    assert metrics.tiers == {
        "measured": pytest.approx(20 / 32),
        "roofline": pytest.approx(12 / 32),
    }


def test_a_trace_without_a_step_is_refused() -> None:
    hand = HandTrace()
    hand.begin()
    with pytest.raises(ValueError, match="no finished step"):
        measure(hand.trace)

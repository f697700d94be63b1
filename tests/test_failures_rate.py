"""Replicas that fail at a rate: how often, when, and what is left of the run."""

from __future__ import annotations

from math import ceil, inf, sqrt
from statistics import mean
from typing import Any

import pytest

from streamrl.engine.messages import Generated, ReplicaLost, Stop
from streamrl.engine.trace import Trace, replay
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import expected_losses
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.faults import STREAM, time_to_failure
from streamrl.sim.planner.take import with_restarts
from streamrl.sim.steady_state import simulate_steady
from streamrl.sim.world import simulate
from tests.random_runs import simulate as simulate_checked
from tests.runs import of, small_run

EVERY_5_S = SECONDS_PER_DAY / 5  # failures per GPU-day
ENDLESS = {"policies.max_restarts": 100_000, "policies.max_attempts": 100_000}


def failing(per_gpu_day: float, **changes: Any) -> Run:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run({"failures.per_gpu_day": per_gpu_day, **ENDLESS, **keys})


def num_lost(trace: Trace) -> int:
    return sum(isinstance(entry.event, ReplicaLost) for entry in trace.entries)


def test_a_rate_of_zero_leaves_the_trace_byte_for_byte_as_it_is_without_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_rate_0 = simulate(failing(0.0)).encode()
    monkeypatch.setattr("streamrl.sim.faults.Failures.watch", lambda self, replica: None)
    assert at_rate_0 == simulate(small_run(ENDLESS)).encode()


def test_a_rate_too_small_to_matter_changes_no_event() -> None:
    assert simulate(failing(1e-9)).entries == simulate(failing(0.0)).entries


def test_the_same_seed_fails_at_the_same_times_and_another_seed_at_others() -> None:
    first, same = (failing(EVERY_5_S, seed=1) for _ in range(2))
    assert simulate(first).encode() == simulate(same).encode()
    rate = EVERY_5_S
    assert time_to_failure(rate, 1, 0) != time_to_failure(rate, 2, 0) != time_to_failure(rate, 2, 1)


@pytest.mark.parametrize("rate", [3.0, 12.0])
def test_a_replica_serves_for_the_inverse_of_its_rate_on_average(rate: float) -> None:
    times = [time_to_failure(rate, 0, n) for n in range(4000)]
    expected = SECONDS_PER_DAY / rate
    assert mean(times) == pytest.approx(expected, rel=4 / sqrt(len(times)))
    assert time_to_failure(0.0, 1, 0) == inf


@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_as_many_replicas_fail_as_the_rate_says_of_the_gpu_seconds_that_they_serve(
    tensor_parallel: int,
) -> None:
    """Poisson: the number has mean and variance rate x GPUs x seconds."""
    expected, found = 0.0, 0
    for seed in range(8):
        layout = {"rollout__tensor_parallel": tensor_parallel}
        trace = simulate(failing(EVERY_5_S, seed=seed, algorithm__steps=40, **layout))
        assert measure(trace).num_steps == 40
        expected += trace.run.rollout.num_gpus * trace.entries[-1].time / 5
        found += num_lost(trace)
    assert expected > 100
    assert abs(found - expected) < 4 * sqrt(expected)


def test_runs_with_failures_keep_the_invariants_and_replay() -> None:
    for system in ("stream-sync", "one-step-async", "fully-async", "colocated"):
        trace = simulate_checked(failing(EVERY_5_S, policies__system=system))
        assert num_lost(trace) > 0, system
        assert replay(trace) is None
        assert measure(trace).num_steps == 3


def test_a_replica_that_is_gone_does_not_fail_again() -> None:
    trace = simulate_checked(failing(EVERY_5_S, algorithm__steps=30), lost=[(0.1, 0), (0.1, 0)])
    reasons = [e.event.reason for e in trace.entries if isinstance(e.event, ReplicaLost)]
    assert reasons[:2] == ["pulled the plug"] * 2
    assert "a GPU failed" in reasons[2:]
    rate = EVERY_5_S * trace.run.rollout.tensor_parallel
    first = time_to_failure(rate, trace.run.seed, STREAM, 0)
    assert first < trace.entries[-1].time


def test_gpus_that_wait_for_a_replacement_idle_because_of_a_failure() -> None:
    calm, failed = (
        measure(simulate(failing(rate, rollout__start_time="3 s"))) for rate in (0.0, EVERY_5_S)
    )
    assert calm.idle["failure"] == 0
    assert failed.idle["failure"] > 0.05
    assert failed.step_time > calm.step_time


def test_a_run_gives_up_after_as_many_restarts_as_it_may_have() -> None:
    trace = simulate(failing(EVERY_5_S, algorithm__steps=40, policies__max_restarts=2))
    assert num_lost(trace) == 3
    assert any(of(Stop, entry.commands) for entry in trace.entries)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_by_name_and_value(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"failures\.per_gpu_day must be at least 0, got {rate}"):
        small_run({"failures.per_gpu_day": rate})


def test_a_plan_replaces_as_much_as_it_may_well_lose_until_its_last_step() -> None:
    run = small_run({"failures.per_gpu_day": 1.0, "algorithm.steps": 1000})
    day = 86_400 / 1000
    each = expected_losses(run, day).mean
    assert each == run.rollout.num_gpus
    many, few = (expected_losses(run, step_time) for step_time in (30 * day, day / 1000))
    allowed = with_restarts(run.policies, many).max_restarts
    assert allowed == ceil(30 * each + 3 * sqrt(30 * each))
    assert with_restarts(run.policies, few) == run.policies  # four are enough for that


def test_a_run_that_will_lose_more_than_it_replaces_is_told_so() -> None:
    changes = {"failures.per_gpu_day": 100.0, "algorithm.steps": 100_000, "simulate.max_steps": 12}
    note = measure(simulate_steady(small_run(changes))).note
    assert "policies.max_restarts=4 stops the run before its end" in note
    enough = {**changes, "policies.max_restarts": 10**9}
    assert "max_restarts" not in measure(simulate_steady(small_run(enough))).note


def test_a_replica_that_dies_in_a_prefill_leaves_no_token_of_it() -> None:
    run = failing(
        10 * EVERY_5_S,
        simulate__max_steps=8,
        algorithm__prompts_per_step=8,
        workload__lengths__prompt_tokens=2000,
    )
    ended = [e.event for e in simulate_steady(run).entries if isinstance(e.event, Generated)]
    assert any(event.finish == "aborted" for event in ended)
    assert all(event.prefill_time <= event.run_time + 1e-9 for event in ended)

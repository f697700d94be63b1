"""Runs that are simulated until their step time is known, whatever the length of the training."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.engine.messages import TrainerLost
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.systems import build_policies, build_state
from streamrl.engine.trace import read_trace, replay
from streamrl.record.metrics import Metrics, measure
from streamrl.record.run_comparison import is_beyond_chance, ratio_half_width
from streamrl.record.steady_state import (
    LEAST_STEPS,
    LeaderSteps,
    Steady,
    find_steady_so_far,
    read_steps,
    steady_state_caveats,
)
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.steady_state import Enough, open_world, simulate_steady
from streamrl.sim.trace import StepTrace
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload, drift_within
from tests.command_line import streamrl
from tests.random_runs import runs
from tests.runs import CheckedEngine, small_run
from tests.test_steady import autoregressive

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
SOME: dict[str, Any] = {
    "algorithm.prompts_per_step": 8,
    "simulate.interval": 0.03,
    "rollout.max_running": 8,
}


def some_run(**changes: Any) -> Run:
    """Return a small run with a few more rollouts a step, whose step time need not be known well."""
    return small_run({**SOME, **{key.replace("__", "."): v for key, v in changes.items()}})


def constant_run(path: Path, **changes: Any) -> Run:
    """Return a run whose rollouts are all of one length."""
    path.write_text("output_tokens\n100\n")
    lengths = {"workload__lengths__kind": "empirical", "workload__lengths__source": str(path)}
    return some_run(**lengths, workload__lengths__scale=1.0, **changes)


def figures(run: Run) -> Metrics:
    """Return the figures of a run's steady state."""
    return measure(simulate_steady(run))


# How long -----------------------------------------------------------------------------------------


def test_two_clusters_compare_alike_however_long_the_training_is() -> None:
    found = []
    for steps in (6, 500):
        clusters = [
            figures(some_run(algorithm__steps=steps, **{"rollout__replicas": replicas}))
            for replicas in (1, 3)
        ]
        found.append([(m.step_time, m.cost_per_million_tokens, m.idle) for m in clusters])
        assert [m.whole_run.steps for m in clusters] == [steps, steps]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_equal_steps_are_simulated_no_longer_than_needed(tmp_path: Path) -> None:
    metrics = figures(constant_run(tmp_path / "one.csv", policies__system="stream-sync"))
    assert metrics.num_steps == LEAST_STEPS + 1 and metrics.note == ""
    assert metrics.step_time_interval is not None
    assert metrics.step_time_interval == pytest.approx((metrics.step_time,) * 2, rel=1e-6)


def test_a_narrower_interval_takes_more_steps_and_is_met() -> None:
    wide, narrow = (figures(some_run(simulate__interval=share)) for share in (0.05, 0.015))
    assert narrow.num_steps > wide.num_steps
    for metrics, share in ((wide, 0.05), (narrow, 0.015)):
        assert metrics.step_time_interval is not None and metrics.note == ""
        low, high = metrics.step_time_interval
        assert (high - low) / 2 <= share * metrics.step_time
        assert metrics.counted_steps[1] == metrics.num_steps - 1


def test_where_there_are_too_many_steps_every_output_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    metrics = figures(some_run(simulate__interval=1e-6, simulate__max_steps=25))
    assert metrics.num_steps == 26 and metrics.step_time_interval is not None
    assert metrics.note == (
        "simulate.max_steps=25 came before the interval of 1e-06 that is wanted (simulate.interval)"
    )
    few = ("--set", "algorithm.prompts_per_step=16", "--set", "simulate.interval=1e-6")
    done = streamrl("simulate", EXAMPLE, *few, "--set", "simulate.max_steps=22", "--intervals")
    assert "simulate.max_steps=22 came before" in done.stdout and " ± " in done.stdout


def test_the_mean_is_that_of_a_run_many_times_as_long() -> None:
    metrics = figures(some_run(simulate__interval=0.02))
    long = figures(some_run(simulate__interval=1e-9, simulate__max_steps=400))
    assert metrics.step_time == pytest.approx(long.step_time, rel=0.03)


def test_a_simulation_that_ends_once_its_interval_is_narrow_holds_the_mean_as_often() -> None:
    world = open_world(small_run())  # known within 2 %
    run, found = world.run_file, []
    for seed in range(200):
        durations, steps = autoregressive(0.3, 0.03, 420, seed), LeaderSteps()
        world.steps = steps
        enough = Enough(world)
        for duration in durations.tolist():
            steps.ended_at.append((steps.ended_at or [0.0])[-1] + duration)
            steps.num_generated.append(4)
            steps.num_made += 1
            if enough.is_there():
                break
        interval = find_steady_so_far(run.policies, run.faults, steps, 1).interval
        assert interval is not None
        found.append(interval[0] <= 1 <= interval[1])
    assert 0.90 <= sum(found) / len(found) <= 0.99


# What is cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_nothing_starts_up_or_winds_down_in_the_steady_state(system: str) -> None:
    metrics = figures(some_run(policies__system=system, rollout__start_time="5 min"))
    assert metrics.idle["start-up"] == metrics.idle["wind-down"] == 0
    assert sum(metrics.busy.values()) + sum(metrics.idle.values()) == pytest.approx(1)
    assert metrics.goodput == metrics.throughput > 0


@settings(max_examples=25, deadline=None)
@given(run=runs(consumption=None), most=st.integers(1, 5))
def test_a_run_that_is_cut_keeps_all_invariants_and_replays(run: Run, most: int) -> None:
    run = replace(run, simulate=replace(run.simulate, max_steps=most))
    costs = Costs.load(run)
    run = fill_policies(run, costs)
    world = SimWorld(run, costs, SimulatedWorkload(run), is_endless=True)
    world.engine = CheckedEngine(build_state(run, is_endless=True), build_policies(run))
    trace = world.run(is_enough=Enough(world).is_there)
    assert replay(trace) is None
    assert world.steps.ended_at == read_steps(trace).ended_at
    if world.steps.num_made:
        metrics = measure(trace)
        assert metrics.goodput <= metrics.throughput
        assert metrics.step_times == pytest.approx(world.steps.durations())


def test_a_cut_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = simulate_steady(some_run(simulate__max_steps=4))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    again = read_trace(path)
    assert again.is_endless and measure(again) == measure(trace) and replay(again) is None


def test_steps_that_a_loss_takes_back_are_in_the_time_of_those_that_stay() -> None:
    failing = {"failures__per_gpu_day": 3000.0, "failures__trainers": True}
    limits = {"policies__max_restarts": 10_000, "policies__max_attempts": 10_000}
    often = {"execute__checkpoint_every": 3, "simulate__max_steps": 60}
    trace = simulate_steady(some_run(**failing, **limits, **often))
    metrics, sound = measure(trace), figures(some_run())
    assert read_steps(trace).num_failures >= 10 and "failure" not in metrics.note
    assert replay(trace) is None
    assert metrics.step_time > 1.1 * sound.step_time and metrics.throughput > metrics.goodput


def test_steps_that_planned_faults_take_back_leave_no_later_step_out() -> None:
    faults = [{"kind": "trainer-dies-training", "step": step} for step in (5, 6, 8)]
    changes = {"algorithm__steps": 8, "execute__checkpoint_every": 6, "faults": faults}
    trace = simulate_steady(some_run(**changes))
    steps = read_steps(trace)
    assert 8 <= len(steps) < steps.num_made
    lost = [entry for entry in trace.entries if isinstance(entry.event, TrainerLost)]
    assert len(lost) == 3


def test_too_few_failures_to_be_counted_are_told() -> None:
    metrics = figures(some_run(failures__per_gpu_day=1e-6, simulate__max_steps=30))
    assert metrics.note.endswith(
        "0 failures were seen, too few for their share to be in the interval"
    )


# Drift --------------------------------------------------------------------------------------------


def test_where_lengths_drift_the_whole_training_counts_and_that_is_said() -> None:
    drifting = {"workload__lengths__scale_to": 0.02, "algorithm__steps": 12}
    metrics = figures(some_run(**drifting))
    assert metrics.note == "lengths drift: figures are the mean over 11 steps"
    assert metrics.num_steps == 13 and metrics.counted_steps == (2, 12)
    assert metrics.step_times[10] > 1.3 * metrics.step_times[1]


def test_a_drift_longer_than_what_is_simulated_is_gone_through_faster() -> None:
    drifting = {"workload__lengths__scale_to": 0.02, "simulate__max_steps": 30}
    long = figures(some_run(**drifting, algorithm__steps=300))
    assert long.note.endswith("30 steps, which drift as far as the 300 of the training") or (
        long.note.endswith("29 steps, which drift as far as the 300 of the training")
    )
    whole = figures(some_run(**{**drifting, "simulate__max_steps": 300}, algorithm__steps=300))
    assert long.step_time == pytest.approx(whole.step_time, rel=0.04)
    lengths = some_run().workload.lengths
    assert lengths is not None and drift_within(lengths, 300, 30) == lengths


# Comparing ----------------------------------------------------------------------------------------


def test_the_ratio_of_two_runs_on_the_same_prompts_is_known_better_than_either() -> None:
    one, other = (
        figures(some_run(policies__system="stream-sync", rollout__tensor_parallel=degree))
        for degree in (1, 2)
    )
    width = ratio_half_width(one, other)
    assert one.step_time_interval is not None and width is not None
    assert width < (one.step_time_interval[1] / one.step_time - 1) / 1.5
    assert is_beyond_chance(one, other, one.step_time / other.step_time)
    assert not is_beyond_chance(one, one, 1.0)
    assert ratio_half_width(one, replace(one, counted_steps=(1, 3))) is None


# Memory -------------------------------------------------------------------------------------------


def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    peaks = [_peak(some_run(simulate__max_steps=most)) for most in (40, 160)]
    per_step = (peaks[1] - peaks[0]) / 120
    assert per_step < 2000  # bytes: a few numbers, where the rollouts of one step take 16 kB


def _peak(run: Run) -> int:
    """Return the most bytes that a run without entries in memory takes."""
    costs = Costs.load(run)
    trace = StepTrace(run, costs, is_endless=True, keeps_entries=False)
    world = SimWorld(run, costs, SimulatedWorkload(run), is_endless=True, trace=trace)
    tracemalloc.start()
    try:
        world.run(is_enough=lambda: world.steps.num_made == run.simulate.max_steps)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_few_steps_give_the_mean_of_many_where_generation_is_ahead(tmp_path: Path) -> None:
    short, long = (
        figures(
            constant_run(
                tmp_path / "one.csv", simulate__max_steps=steps, policies__system="stream-async"
            )
        )
        for steps in (8, 400)
    )
    assert short.step_time_interval is None and short.counted_steps == (4, 8)
    assert short.step_time == pytest.approx(long.step_time)


def test_a_run_without_a_steady_state_says_what_its_figures_are_and_what_to_do() -> None:
    run = small_run({"algorithm.steps": 12, "simulate.max_steps": 12})
    trace = simulate_steady(run)
    steady = Steady(first=4, last=12, step_time=10.0, half_width=1.0, has_settled=False)
    steps = read_steps(trace)
    for trace.is_endless, key in ((True, "simulate.max_steps"), (False, "algorithm.steps")):
        told = steady_state_caveats(trace, steps, steady, "")
        assert told.startswith("no steady state was found in 12 steps: step times may still change")
        assert f"are means over the later steps; more steps make them surer ({key})" in told

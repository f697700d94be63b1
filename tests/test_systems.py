"""Whole simulated runs, over seeds and combinations: what no run may ever do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.attribution import attribute
from streamrl.config import Run
from streamrl.messages import Drop, Generated, Interrupted, PromptsDrawn, Stop
from streamrl.systems import SYSTEMS, WEIGHT_SYNC, choose_system
from streamrl.timeline import read_timeline
from streamrl.trace import Trace, read_trace, replay
from tests.runs import call_at, checked_world, lose_replica_at, of, run_with_capacity, small_run
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
    staleness_of,
)

BOUNDS = {
    "colocated": 0,
    "disaggregated": 0,
    "stream-sync": 0,
    "one-step-async": 1,
    "stream-async": 1,
}

many_seeds = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def runs(
    draw: st.DrawFn, consumption: str | None = "strict-fifo", only_system: str | None = None
) -> Run:
    """Small runs that differ in everything a policy can tell."""
    system = only_system or draw(st.sampled_from(sorted(SYSTEMS)))
    changes: dict[str, Any] = {
        "seed": draw(st.integers(0, 999)),
        "policies.system": system,
        "algorithm.name": draw(st.sampled_from(["grpo", "ppo", "reinforce++"])),
        "algorithm.group_size": draw(st.integers(2, 4)),
        "algorithm.prompts_per_step": draw(st.integers(1, 5)),
        "rollout.replicas": draw(st.integers(1, 4)),
        "rollout.max_running": draw(st.integers(1, 6)),
        "rollout.start_time": draw(st.sampled_from(["0 s", "700 ms"])),
        "workload.max_prompt_tokens": 64,
        "trainer.micro_batch": draw(st.integers(1, 3)),
        "verifier.time": draw(st.sampled_from(["0 s", "30 ms", "2 s"])),
        "verifier.workers": draw(st.integers(1, 3)),
        "policies.dispatch": draw(st.sampled_from(["least-loaded", "round-robin"])),
        "policies.order": draw(st.sampled_from(["fifo", "longest-first"])),
        "workload.lengths.ranker": draw(st.sampled_from(["oracle", "none"])),
    }
    if system == "fully-async":
        changes["policies.max_staleness"] = draw(st.integers(0, 3))
    if system != "colocated" and draw(st.booleans()):
        changes["policies.weight_sync"] = draw(st.sampled_from(sorted(WEIGHT_SYNC)))
    if system != "colocated" and draw(st.booleans()):
        changes["policies.streaming"] = draw(st.sampled_from(["stream", "whole-batch"]))
    changes["policies.consumption"] = consumption or draw(
        st.sampled_from(["strict-fifo", "greedy"])
    )
    return run_with_capacity(330, changes) if draw(st.booleans()) else small_run(changes)


losses = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 3)), max_size=6)


def simulate(run: Run, lost: list[tuple[float, int]] | None = None) -> Trace:
    """Simulate with an engine that checks itself after every event, and with replicas that die."""
    world = checked_world(run)
    for time, which in lost or []:
        lose_replica_at(world, time, which)
    return world.run()


def has_stopped_early(trace: Trace) -> bool:
    return any(of(Stop, entry.commands) for entry in trace.entries)


@many_seeds
@given(runs(None))
def test_every_rollout_is_trained_exactly_once(run: Run) -> None:
    trace = simulate(run)
    check_every_rollout_is_accounted_for(trace)
    assert not any(of(Drop, entry.commands) for entry in trace.entries)
    assert len(staleness_of(trace)) == run.algorithm.steps * run.algorithm.rollouts_per_step


@many_seeds
@given(runs(None), losses)
def test_every_rollout_is_trained_or_dropped_with_a_reason_when_replicas_die(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    trace = simulate(run, lost)
    check_every_rollout_is_accounted_for(trace)
    if not has_stopped_early(trace):
        assert len(staleness_of(trace)) == run.algorithm.steps * run.algorithm.rollouts_per_step


@many_seeds
@given(runs(), losses)
def test_no_rollout_is_trained_on_past_the_staleness_bound(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    system = run.policies.system
    bound = BOUNDS.get(system, choose_system(run.policies).max_staleness)
    staleness = staleness_of(simulate(run, lost)).values()
    assert all(0 <= each <= bound for each in staleness)


@many_seeds
@given(runs(None), losses)
def test_no_rollout_starts_under_a_version_older_than_it_may(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    oldest: dict[int, int] = {}
    for entry in simulate(run, lost).entries:
        if isinstance(entry.event, PromptsDrawn):
            for group in entry.event.groups:
                oldest.update(dict.fromkeys(group.rollouts, entry.event.oldest_version))
        elif isinstance(entry.event, Generated) and entry.event.tokens:
            assert entry.event.version >= oldest[entry.event.rollout]


@many_seeds
@given(runs(None), losses)
def test_every_gpu_second_is_busy_or_idle_for_one_cause(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    trace = simulate(run, lost)
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1, abs=1e-9)
    assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9
    if trace.entries[-1].time:
        assert shares.gpu_seconds == pytest.approx(run.num_gpus * trace.entries[-1].time)


@many_seeds
@given(runs(None, "colocated"), losses)
def test_shared_gpus_never_generate_while_they_train_or_change_phase(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    timeline = read_timeline(simulate(run, lost))
    work = [span for span in timeline.trainer if span.activity in ("score", "train")]
    generating = [span for spans in timeline.rollouts.values() for span in spans]
    for other in [*work, *timeline.link]:
        for span in generating:
            assert min(span.end, other.end) - max(span.start, other.start) < 1e-9


@many_seeds
@given(runs(None), losses)
def test_every_command_ends_in_exactly_one_event(run: Run, lost: list[tuple[float, int]]) -> None:
    check_every_command_ends_once(simulate(run, lost))


@many_seeds
@given(runs(None), losses)
def test_a_replay_decides_identically_also_from_a_file(
    tmp_path: Path, run: Run, lost: list[tuple[float, int]]
) -> None:
    trace = simulate(run, lost)
    assert replay(trace) is None
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    again = read_trace(path)
    assert again.entries == trace.entries
    assert again.run == run
    assert replay(again) is None


def test_a_replay_finds_a_decision_that_was_tampered_with() -> None:
    trace = simulate(small_run())
    index = next(i for i, entry in enumerate(trace.entries) if len(entry.commands) > 1)
    trace.entries[index].commands.reverse()
    divergence = replay(trace)
    assert divergence is not None
    assert divergence.entry == index


@many_seeds
@given(runs(None), losses, st.floats(0.0, 20.0))
def test_an_interrupted_run_comes_to_an_end_with_every_rollout_accounted_for(
    run: Run, lost: list[tuple[float, int]], interrupted_at: float
) -> None:
    world = checked_world(run)
    for time, which in lost:
        lose_replica_at(world, time, which)
    call_at(world, interrupted_at, lambda: world.emit(Interrupted("ctrl-c")))
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None


@settings(max_examples=15, deadline=None)
@given(runs(), losses)
def test_the_same_seed_gives_the_same_trace_byte_for_byte(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    assert simulate(run, lost).encode() == simulate(run, lost).encode()


def test_different_seeds_give_different_traces() -> None:
    traces = {tuple(simulate(small_run({"seed": seed})).entries[-1][:1]) for seed in range(8)}
    assert len(traces) == 8


def test_greedy_consumption_breaks_the_bound_that_strict_fifo_keeps() -> None:
    def worst(consumption: str) -> int:
        changes = {
            "policies.system": "fully-async",
            "policies.max_staleness": 1,
            "policies.consumption": consumption,
            "algorithm.steps": 8,
            "workload.lengths.scale": 0.05,
            "rollout.max_tokens": 1000,
        }
        seeds = range(6)
        return max(
            max(staleness_of(simulate(small_run({**changes, "seed": seed}))).values())
            for seed in seeds
        )

    assert worst("strict-fifo") == 1
    assert worst("greedy") > 1


def test_a_run_stops_after_its_last_restart_and_drops_what_it_has() -> None:
    run = small_run({"policies.max_restarts": 1, "policies.max_attempts": 100})
    trace = simulate(run, [(0.05, 0), (0.1, 0), (0.15, 0)])  # while each has rollouts
    assert has_stopped_early(trace)
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)

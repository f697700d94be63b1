"""Whole simulated runs, over seeds and combinations: traces, replays, early ends.

What becomes of commands, rollouts and GPU-seconds is in `test_invariants`.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import Interrupted
from streamrl.engine.trace import read_trace, replay
from streamrl.runfile.config import Run
from tests.random_runs import (
    FaultyWorld,
    Losses,
    failures,
    has_stopped_early,
    losses,
    runs,
    simulate,
)
from tests.runs import call_at, lose_replica_at, small_run
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
    staleness_of,
)

FIXTURE = HealthCheck.function_scoped_fixture  # a file that every example writes anew


@settings(max_examples=8, deadline=None, suppress_health_check=[FIXTURE])
@given(runs(None), losses, failures)
def test_a_trace_is_read_from_a_file_as_it_was_written(
    tmp_path: Path, run: Run, lost: Losses, faults: frozenset[int]
) -> None:
    trace = simulate(run, lost, faults)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    again = read_trace(path)
    assert again.entries == trace.entries
    assert again.encode().splitlines()[0] == trace.encode().splitlines()[0]
    assert replay(again) is None


def test_a_replay_finds_a_decision_that_was_tampered_with() -> None:
    trace = simulate(small_run())
    index = next(i for i, entry in enumerate(trace.entries) if len(entry.commands) > 1)
    trace.entries[index].commands.reverse()
    divergence = replay(trace)
    assert divergence is not None
    assert divergence.entry == index


@settings(max_examples=20, deadline=None)
@given(runs(None), losses, st.floats(0.0, 20.0))
def test_an_interrupted_run_comes_to_an_end_with_every_rollout_accounted_for(
    run: Run, lost: Losses, interrupted_at: float
) -> None:
    world = FaultyWorld(run)
    for time, which in lost:
        lose_replica_at(world, time, which)
    call_at(world, interrupted_at, lambda: world.emit(Interrupted("ctrl-c")))
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None


@settings(max_examples=8, deadline=None)
@given(runs(), losses)
def test_the_same_seed_gives_the_same_trace_byte_for_byte(run: Run, lost: Losses) -> None:
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

"""Tail batching: the order of the data changes, its set does not, and what that is worth."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.presets import SYSTEMS, choose_system
from streamrl.engine.trace import replay
from streamrl.executor.prompts import PromptWorkload
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import simulate
from streamrl.workload.prompt_order import TailBatches
from streamrl.workload.workload import BLOCK, SimulatedWorkload
from tests.runs import SINGLE, checked_world, small_run
from tests.scripted import ScriptedTokenizer
from tests.test_execute import execute, real_run
from tests.traces import check_every_rollout_is_accounted_for, staleness_of

DEFER = {"policies.tail_batching": "defer", "workload.lengths.ranker": "oracle"}


def tail_run(**changes: Any) -> Run:
    """Return a small run of groups of one that puts its long prompts off."""
    table = {**SINGLE, **DEFER, "algorithm.prompts_per_step": 8, "algorithm.steps": 6}
    return small_run({**table, **{key.replace("__", "."): v for key, v in changes.items()}})


def lengths_by_step(run: Run, num_steps: int) -> list[list[int]]:
    """Return the longest rollout of every group of each step, in draw order."""
    workload, num = SimulatedWorkload(run), run.algorithm.prompts_per_step
    return [[max(d.lengths) for d in workload.draw(s * num, num)] for s in range(num_steps)]


# The order ----------------------------------------------------------------------------------------


def test_the_last_step_of_a_cycle_takes_the_longest_prompts_in_data_order() -> None:
    expected = [5, 9, 1, 8, 7, 2]
    tails = TailBatches(2, 3, lambda first, num: expected[first : first + num])
    assert [tails.source(group) for group in range(6)] == [0, 2, 4, 5, 1, 3]


def test_of_prompts_alike_the_later_ones_are_put_off() -> None:
    tails = TailBatches(1, 3, lambda first, num: [7] * num)
    assert [tails.source(group) for group in range(6)] == [0, 1, 2, 3, 4, 5]


@given(st.integers(1, 5), st.integers(2, 4), st.data())
def test_each_prompt_is_drawn_once_in_its_cycle(
    num_prompts: int, every: int, data: st.DataObject
) -> None:
    size = num_prompts * every
    expected = data.draw(st.lists(st.integers(1, 9), min_size=3 * size, max_size=3 * size))
    tails = TailBatches(num_prompts, every, lambda first, num: expected[first : first + num])
    for first in range(0, 3 * size, size):
        sources = [tails.source(group) for group in range(first, first + size)]
        assert sorted(sources) == list(range(first, first + size))
        short, long = sources[:-num_prompts], sources[-num_prompts:]
        assert max(expected[s] for s in short) <= min(expected[s] for s in long)
        assert short == sorted(short) and long == sorted(long)


# Workloads ----------------------------------------------------------------------------------------


def counted(steps: list[list[int]]) -> Counter[int]:
    return Counter(length for step in steps for length in step)


def test_a_simulation_draws_the_same_rollouts_in_another_order() -> None:
    plain, deferred = (
        lengths_by_step(tail_run(policies__tail_batching=how), 6) for how in ("none", "defer")
    )
    assert plain != deferred
    for cycle in (slice(0, 3), slice(3, 6)):
        assert counted(plain[cycle]) == counted(deferred[cycle])
    for step in (0, 1, 3, 4):
        assert max(deferred[step]) <= min(deferred[step // 3 * 3 + 2])


def test_a_group_is_the_same_however_the_draws_are_cut() -> None:
    run = tail_run(algorithm__prompts_per_step=BLOCK // 2 + 7)
    size = 3 * run.algorithm.prompts_per_step
    whole = SimulatedWorkload(run).draw(0, 2 * size)
    late = SimulatedWorkload(run)  # as a resumed run would ask
    assert late.draw(size - 3, 40) == whole[size - 3 : size + 37]
    assert [d.drawn.rollouts for d in whole] == [(group,) for group in range(2 * size)]


def test_the_longest_rollout_of_a_group_is_what_a_step_waits_for() -> None:
    steps = lengths_by_step(tail_run(algorithm__name="grpo", algorithm__group_size=4), 3)
    assert max(steps[0] + steps[1]) <= min(steps[2])


def prompts(path: Path, expected: list[int | None]) -> str:
    file = path / "prompts.jsonl"
    lines = [
        {
            "prompt": f"p{n}",
            "answer": "odd",
            **({} if tokens is None else {"expected_tokens": tokens}),
        }
        for n, tokens in enumerate(expected)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_prompts_may_say_what_a_ranker_expects_of_them(tmp_path: Path) -> None:
    source = prompts(tmp_path, [5, None, 70])
    workload = PromptWorkload(small_run({"workload.prompts": source}), ScriptedTokenizer())
    expected = {5, 256, 70}
    assert {d.drawn.expected_tokens for d in workload.draw(0, 3)} == {(e, e) for e in expected}
    for wrong in ('"many"', "0", "true", "NaN"):
        Path(source).write_text(f'{{"prompt": "p", "expected_tokens": {wrong}}}\n')
        with pytest.raises(ValueError, match=r"prompts.jsonl:1: expected_tokens must be from 1"):
            PromptWorkload(small_run({"workload.prompts": source}), ScriptedTokenizer())


def test_a_real_run_puts_its_long_prompts_off_and_trains_on_each_once(tmp_path: Path) -> None:
    changes = {key.replace(".", "__"): value for key, value in DEFER.items()}
    run = real_run(tmp_path, algorithm__steps=6, **changes)
    prompts(tmp_path, [10 * (n % 7 + 1) for n in range(9)])  # an epoch is a cycle: 3 steps of 3
    trace = execute(run)
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None
    workload = PromptWorkload(run, ScriptedTokenizer())
    for cycle in (0, 9):
        lines = [workload.line(group) for group in range(cycle, cycle + 9)]
        assert sorted(lines) == list(range(9))
        assert sorted(10 * (n % 7 + 1) for n in lines[6:]) == [50, 60, 70]


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload__lengths__ranker": "none"}, r"tail_batching 'defer' .*lengths.ranker 'none'"),
        ({"algorithm__steps": 7}, r"algorithm.steps .*policies.tail_every=3.* got 7"),
        ({"policies__tail_every": 1}, r"policies.tail_every must be at least 2, got 1"),
    ],
)
def test_a_run_that_cannot_put_off_what_it_should_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tail_run(**changes)


def test_prompts_of_which_nobody_knows_the_length_cannot_be_put_off(tmp_path: Path) -> None:
    source = prompts(tmp_path, [5, None])
    run = tail_run(workload__prompts=source)
    with pytest.raises(ValueError, match=r"'defer' .*prompts.jsonl:2 has no 'expected_tokens'"):
        PromptWorkload(run, ScriptedTokenizer())


# Runs ---------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.sampled_from(sorted(SYSTEMS)), st.integers(2, 3))
def test_whole_runs_keep_the_staleness_bound_train_on_all_and_replay(
    seed: int, system: str, every: int
) -> None:
    run = tail_run(
        seed=seed,
        policies__system=system,
        policies__tail_every=every,
        policies__order="longest-first",
        algorithm__prompts_per_step=3,
        workload__lengths__ranker="recall",
    )
    trace = checked_world(fill_policies(run, Costs.load(run))).run()
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None
    staleness = staleness_of(trace)
    assert sorted(staleness) == list(range(18))
    assert max(staleness.values()) <= choose_system(run.policies).max_staleness


def test_a_recorded_run_is_simulated_in_the_order_it_had(tmp_path: Path) -> None:
    trace = simulate(tail_run(workload__lengths__ranker="recall"))
    file = tmp_path / "trace.jsonl"
    file.write_bytes(trace.encode())
    again = msgspec.structs.replace(trace.run, workload=recorded_workload(trace, file))
    assert lengths_by_step(again, 6) == lengths_by_step(trace.run, 6)


def batch_run(tail_batching: str, system: str, ranker: str) -> Run:
    """Return a run whose steps take as long as their longest rollouts decode."""
    return tail_run(
        policies__tail_batching=tail_batching,
        policies__system=system,
        workload__lengths__ranker=ranker,
        workload__lengths__scale=1.0,
        rollout__max_tokens=20000,
        rollout__max_running=64,
        algorithm__prompts_per_step=64,
    )


SECOND_CYCLE = (4, 6)


@pytest.mark.parametrize("system", ["colocated", "stream-sync", "stream-async"])
def test_short_steps_take_less_than_the_long_one_takes_more(system: str) -> None:
    spread = measure(simulate(batch_run("none", system, "recall")), SECOND_CYCLE)
    deferred = measure(simulate(batch_run("defer", system, "recall")), SECOND_CYCLE)
    assert deferred.step_time < 0.95 * spread.step_time


def test_the_step_time_of_tail_batching_is_that_of_whole_cycles() -> None:
    metrics = measure(simulate(batch_run("defer", "stream-sync", "oracle")), SECOND_CYCLE)
    short, also_short, long = metrics.step_times[3:]
    assert long > 1.5 * max(short, also_short)
    assert metrics.step_time == pytest.approx((short + also_short + long) / 3)

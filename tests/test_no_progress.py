"""A run that cannot make progress ends, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from streamrl.engine.messages import (
    Command,
    Drop,
    Failed,
    Generate,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    Stop,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import read_trace, replay
from streamrl.executor.execute import execute as execute_for_real
from streamrl.executor.roles import Scoring
from streamrl.runfile.files import make_run
from streamrl.workload.prompt_records import Record
from tests.patients import local_table
from tests.random_runs import FaultyWorld
from tests.runs import Script, generated, of, singles, small_run
from tests.scripted import ScriptedVerifier, make_world
from tests.test_execute import real_run
from tests.traces import check_every_rollout_is_accounted_for


def fail(s: Script, rollouts: Iterable[int], reason: str) -> list[Command]:
    """Let rollouts be generated, and their rewards fail once."""
    commands: list[Command] = []
    for rollout in rollouts:
        told = s.tell(generated(rollout), Failed(Verify(rollout), reason))
        commands += told + s.draw(told)
    return commands


def test_a_run_stops_when_too_many_groups_in_a_row_are_dropped_and_says_why_most_were() -> None:
    s = singles(2, policies__max_attempts=1, policies__max_dropped_groups=3)
    s.draw(s.begin())
    assert not of(Stop, fail(s, [0], "record 17 has no answer"))
    assert not of(Stop, fail(s, [1], "time is up"))
    (stop,) = of(Stop, fail(s, [2], "record 4 has no answer"))
    assert "3 groups in a row were dropped (policies.max_dropped_groups)" in stop.reason
    assert "mostly for 'Verify: record 17 has no answer' (2 of 3 failures)" in stop.reason


def test_a_group_that_is_complete_ends_the_row_of_dropped_ones() -> None:
    s = singles(2, policies__max_attempts=1, policies__max_dropped_groups=2)
    s.draw(s.begin())
    for failing, well in ((0, 1), (4, 2), (5, 3)):
        assert not of(Stop, fail(s, [failing], "no reward"))
        s.finish(well)
    commands = fail(s, [6], "no reward")
    assert of(Drop, commands) and not of(Stop, commands)
    assert of(Stop, fail(s, [7], "no reward"))


def storming(most: int) -> Script:
    return singles(4, policies__max_attempts=99, policies__max_failures_per_minute=most)


def test_a_run_stops_when_too_much_fails_within_a_minute_but_not_when_it_takes_longer() -> None:
    s = storming(5)
    s.draw(s.begin())
    for _ in range(20):
        s.now += 15.0
        assert not of(Stop, s.tell(Failed(Generate(0, 0, 0), "its thread ended")))
    (stop,) = of(Stop, s.tell(Failed(Generate(0, 0, 0), "its thread ended")))
    assert "5 rollouts failed within a minute (policies.max_failures_per_minute)" in stop.reason
    assert "Generate: its thread ended" in stop.reason


def test_what_a_lost_replica_takes_with_it_is_no_storm_of_failures() -> None:
    s = storming(3)
    s.draw(s.begin())
    lost = [Failed(Generate(rollout, 0, 0), "gone") for rollout in (0, 2, 4, 6)]
    assert not of(Stop, s.tell(ReplicaLost(0, "gone"), *lost))


def test_a_run_stops_when_no_step_was_made_for_too_long_and_each_step_begins_anew() -> None:
    s = singles(1, policies__system="stream-sync", policies__max_step_time="1 min")
    s.draw(s.begin())
    s.now += 50.0
    s.finish(0)
    assert of(PushWeights, s.step(1))
    s.now += 50.0
    commands = s.tell(WeightsPushed(1, 1))
    assert of(LoadWeights, commands) and not of(Stop, commands)
    s.now += 10.0
    (stop,) = of(Stop, s.tell(WeightsLoaded(0, 1, 1.0)))
    assert stop.reason == "no step was made in 60 s (policies.max_step_time)"


def test_a_rollout_that_ends_after_the_longest_step_stops_the_run() -> None:
    s = singles(9, policies__system="stream-sync", policies__max_step_time="1 min")
    s.draw(s.begin())
    assert not of(Stop, s.finish(0, 1, 2, 3))
    s.now += 60.0
    (stop,) = of(Stop, s.tell(generated(4)))
    assert stop.reason == "no step was made in 60 s (policies.max_step_time)"


def test_a_simulated_run_in_which_every_reward_fails_ends() -> None:
    world = FaultyWorld(small_run({"policies.max_dropped_groups": 7}), range(10**6))
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    assert "7 groups in a row were dropped" in str(world.engine.stop_reason)
    assert "mostly for 'Generate: broken'" in str(world.engine.stop_reason)


def test_a_real_run_whose_verifier_always_raises_ends_with_the_reason(tmp_path: Path) -> None:
    run = real_run(tmp_path, policies__max_dropped_groups=10)

    async def go() -> None:
        await make_world(run, {}, verifier_class=HelplessVerifier).run()

    with pytest.raises(
        RuntimeError, match=r"10 groups in a row .* 'Verify: ImportError: no sympy'"
    ):
        asyncio.run(asyncio.wait_for(go(), timeout=30))
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None


class HelplessVerifier(ScriptedVerifier):
    """Cannot score anything."""

    async def verify(self, completion: str, num_tokens: int, record: Record) -> Scoring:
        raise ImportError("no sympy")


def test_a_real_run_in_which_nothing_can_be_generated_ends_in_seconds(tmp_path: Path) -> None:
    run = real_run(tmp_path, policies__max_attempts=10**6, policies__max_failures_per_minute=500)

    async def go() -> None:
        await make_world(run, {"failure_rate": 1.0, "slowest": 0.001}).run()

    with pytest.raises(RuntimeError, match=r"500 rollouts failed within a minute .* 'Generate: "):
        asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize(
    ("scorer", "line", "missing"),
    [
        ("exact", '{"prompt": "1+1="}', "'answer'"),
        ("reasoning-gym", '{"prompt": "1+1=", "answer": "2"}', "'task'"),
    ],
)
def test_prompts_that_cannot_be_scored_are_refused_before_anything_starts(
    tmp_path: Path, scorer: str, line: str, missing: str
) -> None:
    run = make_run(local_table(tmp_path, {"verifier.scorer": scorer}))
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "", "answer": "", "task": ""}}\n{line}\n')
    expected = (
        rf"workload\.prompts: 1 lines .* no {missing} \(lines 2\): verifier\.scorer '{scorer}'"
    )
    with pytest.raises(ValueError, match=expected):
        execute_for_real(run)
    assert not (tmp_path / "run").exists()

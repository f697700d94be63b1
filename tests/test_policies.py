"""What the engine answers to events: each policy on its own ground."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Abort,
    DrawPrompts,
    Failed,
    Generate,
    LoadWeights,
    PushWeights,
    Score,
    Step,
    Take,
    Train,
    WeightsLoaded,
    WeightsPushed,
)
from tests.runs import Script, done, generated, of, script, singles

# Admission ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2])
def test_prompts_are_drawn_for_steps_within_the_bound(k: int) -> None:
    s = script(policies__system="fully-async", policies__max_staleness=k, algorithm__steps=9)
    draws = of(DrawPrompts, s.begin())
    assert draws == [DrawPrompts(step, 2, 0) for step in range(1, k + 2)]


def test_a_step_admits_the_next_batch_with_the_oldest_version_it_may_start_under() -> None:
    s = script(policies__system="stream-async", algorithm__steps=9)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    assert of(DrawPrompts, s.step(1)) == [DrawPrompts(3, 2, oldest_version=1)]


def test_no_prompts_are_drawn_past_the_last_step() -> None:
    s = script(policies__system="fully-async", policies__max_staleness=5, algorithm__steps=2)
    assert [d.step for d in of(DrawPrompts, s.begin())] == [1, 2]


def test_one_step_async_draws_the_next_batch_only_when_the_last_is_generated() -> None:
    s = script(policies__system="one-step-async")
    draws = s.begin()
    assert of(DrawPrompts, draws) == [DrawPrompts(1, 2, 0)]
    s.draw(draws)
    assert not of(DrawPrompts, s.finish(0, 1, 2))
    assert of(DrawPrompts, s.finish(3)) == [DrawPrompts(2, 2, 0)]


def test_a_dropped_group_is_replaced_in_the_batch_that_lacks_it() -> None:
    s = script(policies__max_attempts=1)
    s.draw(s.begin())
    commands = s.tell(Failed(Generate(0, 0, 0), "broken"))
    assert of(DrawPrompts, commands) == [DrawPrompts(2, 1, 0)]


# Consumption --------------------------------------------------------------------------------------


def test_strict_fifo_takes_in_draw_order_and_greedy_in_completion_order() -> None:
    def taken(consumption: str) -> list[int]:
        s = singles(2, policies__consumption=consumption)
        commands = s.draw(s.begin())
        commands += s.finish(3, 1, 0, 2)
        return [take.group for take in of(Take, commands)]

    assert taken("strict-fifo") == [0, 1]
    assert taken("greedy") == [3, 1]


def test_greedy_leaves_a_straggler_behind_until_it_breaks_the_bound_and_strict_fifo_waits() -> None:
    s = singles(1, policies__consumption="greedy", algorithm__steps=5)
    s.draw(s.begin())
    for version in range(1, 4):
        s.finish(version, version=version - 1)
        s.draw(s.step(version))
        s.tell(WeightsPushed(version, 1), WeightsLoaded(1, version, 1.0))
    s.finish(0, version=0)
    s.step(4)
    assert (0, 3) in s.trained  # three versions old where the bound is 1

    s = singles(1, policies__consumption="strict-fifo", algorithm__steps=5)
    s.draw(s.begin())
    assert not of(Train, s.finish(1))
    assert of(Train, s.finish(0)) == [Train((0,), 0)]
    assert s.trained == [(0, 0)]


# Streaming ----------------------------------------------------------------------------------------


def test_streaming_trains_once_the_fill_is_there_or_only_the_rest_is_lacking() -> None:
    s = singles(3, trainer__micro_batch=2)
    s.draw(s.begin())
    assert not of(Train, s.finish(0))
    assert of(Train, s.finish(1)) == [Train((0, 1), 0)]
    s.tell(done(Train((0, 1), 0)))
    assert of(Train, s.finish(2)) == [Train((2,), 0)]
    assert of(Step, s.tell(done(Train((2,), 0)))) == [Step(1, (0, 1, 2), 0)]


def test_streaming_fills_every_data_parallel_rank() -> None:
    s = singles(8, trainer__micro_batch=2, trainer__data_parallel=2)
    s.draw(s.begin())
    assert not of(Train, s.finish(0, 1, 2))
    assert of(Train, s.finish(3)) == [Train((0, 1, 2, 3), 0)]


def test_whole_groups_reach_the_trainer_together_where_the_advantage_needs_them() -> None:
    s = script(trainer__micro_batch=1)
    s.draw(s.begin())
    assert not of(Train, s.finish(0, 2))
    assert of(Train, s.finish(1)) == [Train((0, 1), 0)]


def test_rollouts_that_need_forward_passes_are_scored_before_their_gradient() -> None:
    s = singles(2, algorithm__name="ppo", trainer__micro_batch=1)
    s.draw(s.begin())
    assert of(Score, s.finish(0)) == [Score((0,), 0)]
    assert of(Train, s.tell(done(Score((0,), 0)))) == [Train((0,), 0)]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_streaming_reaches_its_step_whatever_arrives_when(
    data: st.DataObject, num_prompts: int, micro_batch: int, group_size: int
) -> None:
    name = data.draw(st.sampled_from(["reinforce++", "ppo", "grpo"]))
    s = script(
        algorithm__name=name,
        algorithm__prompts_per_step=num_prompts,
        algorithm__group_size=group_size + (name == "grpo"),
        algorithm__steps=1,
        trainer__micro_batch=micro_batch,
    )
    s.draw(s.begin())
    arriving = list(data.draw(st.permutations(sorted(s.state.rollouts))))
    while s.state.leader.version == 0:
        command = s.state.leader.command
        assert arriving or command is not None, "the trainer waits for nothing"
        if arriving and (command is None or data.draw(st.booleans())):
            s.finish(arriving.pop())
        else:
            assert command is not None
            s.tell(done(command))
    assert sorted(r for r, _ in s.trained) == list(range(s.run.algorithm.rollouts_per_step))


def test_a_whole_batch_waits_for_its_last_rollout() -> None:
    s = script(policies__system="disaggregated")
    s.draw(s.begin())
    assert not of(Train, s.finish(3, 2, 0))
    assert of(Train, s.finish(1)) == [Train((2, 3, 0, 1), 0)]


def test_a_whole_batch_waits_until_every_replica_has_the_newest_weights() -> None:
    s = script(policies__system="one-step-async")
    s.draw(s.begin())
    s.draw(s.finish(0, 1, 2, 3))
    s.finish(4, 5, 6, 7)
    commands = s.step(1) + s.tell(WeightsPushed(1, 1), WeightsLoaded(0, 1, 1.0))
    assert not of(Train, commands)
    assert of(Train, s.tell(WeightsLoaded(1, 1, 1.0))) == [Train((4, 5, 6, 7), 0)]


# Weight sync --------------------------------------------------------------------------------------


def at_version_one(weight_sync: str) -> Script:
    """Return a run that has made version 1 while replica 0 runs 4 and 6, replica 1 runs 5 and 7."""
    s = script(policies__weight_sync=weight_sync)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    return s


def test_drain_then_load_pushes_at_once_and_lets_replicas_finish_what_they_run() -> None:
    s = at_version_one("drain-then-load")
    assert of(PushWeights, s.step(1)) == [PushWeights(1, 0)]
    commands = s.tell(WeightsPushed(1, 1))
    assert of(LoadWeights, commands) == [LoadWeights(0, 1, True), LoadWeights(1, 1, True)]
    assert not of(Abort, commands)


def test_load_in_flight_pauses_what_runs() -> None:
    s = at_version_one("load-in-flight")
    assert of(PushWeights, s.step(1)) == [PushWeights(1, 0)]
    commands = s.tell(WeightsPushed(1, 1))
    assert of(LoadWeights, commands) == [LoadWeights(0, 1, False), LoadWeights(1, 1, False)]
    assert not of(Abort, commands)


def test_abort_and_resume_aborts_each_replica_before_its_load_and_goes_on_from_the_prefix() -> None:
    s = at_version_one("abort-and-resume")
    s.step(1)
    assert [c for c in s.tell(WeightsPushed(1, 1)) if isinstance(c, Abort | LoadWeights)] == [
        Abort(4, 0),
        Abort(6, 0),
        LoadWeights(0, 1, True),
        Abort(5, 1),
        Abort(7, 1),
        LoadWeights(1, 1, True),
    ]
    (again,) = s.tell(generated(4, tokens=7, finish="aborted"))
    assert again == Generate(4, again.replica, 4, prefix=7)
    s.tell(generated(4, tokens=12, version=1))
    assert s.state.rollouts[4].born == 0  # its first token came from version 0


def test_a_barrier_pushes_only_while_nothing_is_generated() -> None:
    s = at_version_one("barrier")
    assert not of(PushWeights, s.step(1))
    assert not of(PushWeights, s.tell(*(generated(r) for r in (4, 5, 6))))
    assert of(PushWeights, s.tell(generated(7))) == [PushWeights(1, 0)]


def test_a_version_made_during_a_push_waits_for_it_and_versions_between_are_skipped() -> None:
    s = singles(1, policies__system="fully-async", policies__max_staleness=3, algorithm__steps=9)
    s.draw(s.begin())
    s.finish(0)
    assert of(PushWeights, s.step(1)) == [PushWeights(1, 0)]
    for version in (2, 3):
        s.finish(version - 1)
        assert not of(PushWeights, s.step(version))
    assert of(PushWeights, s.tell(WeightsPushed(1, 1))) == [PushWeights(3, 0)]

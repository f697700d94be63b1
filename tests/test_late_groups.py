"""Weights pushed every few steps, parts of a step ahead, and what becomes of groups that are late or too many."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.engine.messages import (
    Abort,
    DrawPrompts,
    Drop,
    Generate,
    Generated,
    LoadWeights,
    Postpone,
    PushWeights,
    Skip,
    Step,
    Take,
    Train,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.policies.oversampling import LEFT_OVER
from streamrl.engine.policies.staleness import STALE
from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace, replay
from streamrl.record.metrics import Metrics, measure
from streamrl.runfile.errors import RunError
from tests.random_runs import simulate
from tests.runs import done, generated, of, script, singles, small_run
from tests.traces import check_every_rollout_is_accounted_for, staleness_of

GREEDY = {"policies__consumption": "greedy"}
TOO_MANY = {**GREEDY, "policies__system": "stream-sync", "policies__oversampling": 1.5}
"""One group too many for each step of two."""


# Pushes every few steps ---------------------------------------------------------------------------


def test_weights_are_pushed_at_every_kth_version_alone() -> None:
    s = singles(1, policies__system="stream-sync", policies__sync_every=2, algorithm__steps=9)
    assert of(DrawPrompts, s.draw(s.begin())) == []
    s.finish(0)
    assert not of(PushWeights, s.step(1))
    s.finish(1)
    assert of(PushWeights, s.step(2)) == [PushWeights(2, 0)]


def test_two_batches_start_under_each_version_that_is_pushed_every_other_step() -> None:
    s = singles(1, policies__system="stream-sync", policies__sync_every=2, algorithm__steps=9)
    assert of(DrawPrompts, s.begin()) == [DrawPrompts(1, 1, 0), DrawPrompts(2, 1, 0)]


def test_a_whole_batch_does_not_wait_for_a_push_that_is_not_due() -> None:
    s = script(policies__system="disaggregated", policies__sync_every=2, algorithm__steps=9)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3, 4, 5, 6, 7)
    assert of(Train, s.step(1)) == [Train((4, 5, 6, 7), 0)]
    assert not of(Train, s.step(2))


# Parts of a step ahead ----------------------------------------------------------------------------


def test_half_a_step_may_be_generated_ahead() -> None:
    s = script(policies__max_staleness=0.5, algorithm__steps=9)
    commands = s.begin()
    assert of(DrawPrompts, commands) == [DrawPrompts(1, 2, 0), DrawPrompts(2, 1, 0)]
    s.draw(commands)
    s.finish(0, 1, 2, 3)
    assert of(DrawPrompts, s.step(1)) == [DrawPrompts(2, 1, 1), DrawPrompts(3, 1, 1)]


# What is too stale --------------------------------------------------------------------------------


def test_a_straggler_is_dropped_as_soon_as_no_step_within_the_bound_has_a_place_for_it() -> None:
    s = singles(1, **GREEDY, policies__over_staleness="drop", algorithm__steps=9)
    s.draw(s.begin())
    s.finish(1)
    assert not of(Drop, s.draw(s.step(1)))  # it could still be trained on one version behind
    s.tell(WeightsPushed(1, 1), WeightsLoaded(0, 1, 1.0), WeightsLoaded(1, 1, 1.0))
    s.finish(2, version=1)
    commands = s.tell(done(s.state.leader.command or Train((2,), 0)))
    assert of(Drop, commands) == [Drop(0, STALE)]
    assert [abort.rollout for abort in of(Abort, commands)] == [0]
    assert of(DrawPrompts, commands) == [DrawPrompts(3, 1, 1)]  # another one takes its place


# What is too much for a step ----------------------------------------------------------------------


def test_what_a_full_step_leaves_over_is_aborted_and_dropped_and_drawn_again_for_the_next() -> None:
    s = singles(2, **TOO_MANY, algorithm__steps=9)
    commands = s.begin()
    assert of(DrawPrompts, commands) == [DrawPrompts(1, 2, 0), DrawPrompts(1, 1, 0)]
    s.draw(commands)
    assert not of(Drop, s.finish(2))
    commands = s.finish(0)
    assert [take.group for take in of(Take, commands)] == [0]
    assert of(Drop, commands) == [Drop(1, LEFT_OVER)]
    assert [abort.rollout for abort in of(Abort, commands)] == [1]
    assert not of(DrawPrompts, commands)  # none is drawn too many while the step is full
    assert of(DrawPrompts, s.step(1)) == [DrawPrompts(2, 2, 1), DrawPrompts(2, 1, 1)]


def test_what_is_left_over_is_kept_and_goes_on_under_the_next_version() -> None:
    s = singles(2, **TOO_MANY, policies__left_over="keep", algorithm__steps=9)
    s.draw(s.begin())
    commands = s.finish(2, 0)
    assert not of(Drop, commands) and [abort.rollout for abort in of(Abort, commands)] == [1]
    assert of(Postpone, commands) == [Postpone(1, 1)]
    assert not of(Generate, s.tell(generated(1, tokens=7, finish="aborted")))
    commands = s.step(1)
    assert of(DrawPrompts, commands) == [DrawPrompts(2, 1, 1), DrawPrompts(2, 1, 1)]
    loaded = s.tell(WeightsPushed(1, 1), WeightsLoaded(0, 1, 1.0))
    (again,) = of(Generate, loaded)
    assert (again.rollout, again.prefix) == (1, 7)


def test_what_the_next_step_may_start_under_the_old_version_just_goes_on() -> None:
    keys = {**TOO_MANY, "policies__system": "stream-async", "policies__left_over": "keep"}
    s = singles(2, **keys, algorithm__steps=9)
    s.draw(s.begin())
    commands = s.finish(4, 0)
    assert [take.group for take in of(Take, commands)] == [4, 0]
    assert not of(Abort, commands) and not of(Postpone, commands) and not of(Drop, commands)


def test_half_a_step_ahead_holds_back_what_only_the_next_version_may_start() -> None:
    keys = {**TOO_MANY, "policies__system": "stream-async", "policies__left_over": "keep"}
    s = singles(2, **keys, policies__max_staleness=0.5, algorithm__steps=9)
    s.draw(s.begin())  # 0 and 1 for the first step, 2 for half of the second, 3 too many
    commands = s.finish(3, 0)
    assert of(Postpone, commands) == [Postpone(2, 1)]
    assert [abort.rollout for abort in of(Abort, commands)] == [2]


def test_gpus_that_both_sides_share_train_once_what_was_left_over_has_ended() -> None:
    s = singles(2, **{**TOO_MANY, "policies__system": "colocated"}, algorithm__steps=9)
    s.draw(s.begin())
    assert not of(Train, s.finish(2, 0))
    assert of(Train, s.tell(generated(1, tokens=3, finish="aborted"))) == [Train((2, 0), 0)]


def test_the_last_step_of_a_run_is_drawn_too_much_for_as_well() -> None:
    s = singles(2, **TOO_MANY, algorithm__steps=1)
    commands = s.begin()
    assert of(DrawPrompts, commands) == [DrawPrompts(1, 2, 0), DrawPrompts(1, 1, 0)]
    s.draw(commands)
    s.finish(1, 2)
    (ended,) = of(Step, s.tell(done(s.state.leader.command or Train((1, 2), 0))))
    s.tell(done(ended), generated(0, tokens=2, finish="aborted"))
    assert s.engine.has_all_steps and not s.state.rollouts


# Whole runs ---------------------------------------------------------------------------------------

LONG = {
    "algorithm.steps": 8,
    "algorithm.prompts_per_step": 4,
    "rollout.max_running": 16,
    "workload.lengths.scale": 0.03,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "half a step ahead": {"policies.max_staleness": 0.5},
    "a push every two steps": {"policies.sync_every": 2},
    "stale ones dropped": {
        "policies.consumption": "greedy",
        "policies.over_staleness": "drop",
        "policies.weight_sync": "load-in-flight",
        "algorithm.prompts_per_step": 1,
        "algorithm.steps": 30,
        "rollout.max_tokens": 2048,
        "workload.lengths.scale": 0.1,
    },
    "left over, dropped": {"policies.consumption": "greedy", "policies.oversampling": 1.5},
    "left over, kept": {
        "policies.consumption": "greedy",
        "policies.oversampling": 1.5,
        "policies.left_over": "keep",
        "policies.system": "stream-sync",
    },
}


def simulated(option: str) -> tuple[Trace, Metrics]:
    """Return a simulated run with an option, and its figures."""
    trace = simulate(small_run({**LONG, **OPTIONS[option]}))
    return trace, measure(trace, (1, trace.run.algorithm.steps))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_simulated_run_balances_its_books_keeps_its_bound_and_replays(option: str) -> None:
    trace, metrics = simulated(option)
    check_every_rollout_is_accounted_for(trace)
    system = choose_system(trace.run.policies)
    if system.keeps_bound:
        assert metrics.ledger.max_staleness == system.staleness_bound
        assert max(staleness_of(trace).values()) <= system.staleness_bound
    assert metrics.ledger.is_balanced, metrics.ledger.faults
    assert replay(trace) is None


def test_pushes_become_as_few_as_asked_for() -> None:
    trace, _ = simulated("a push every two steps")
    pushed = [push.version for entry in trace.entries for push in of(PushWeights, entry.commands)]
    assert pushed == [2, 4, 6]
    assert of(LoadWeights, [c for entry in trace.entries for c in entry.commands])


@pytest.mark.parametrize("option", ["left over, dropped", "left over, kept", "stale ones dropped"])
def test_wasted_tokens_are_those_of_groups_that_were_given_up_each_counted_once(
    option: str,
) -> None:
    trace, metrics = simulated(option)
    made: dict[int, int] = {}
    lost: dict[int, str] = {}
    rollouts: dict[int, tuple[int, ...]] = {}
    for entry in trace.entries:
        if isinstance(entry.event, Generated):
            made[entry.event.rollout] = entry.event.tokens
        for group in getattr(entry.event, "groups", ()) if hasattr(entry.event, "step") else ():
            rollouts[group.group] = group.rollouts
        for drop in (*of(Drop, entry.commands), *of(Skip, entry.commands)):
            lost.update(dict.fromkeys(rollouts[drop.group], drop.reason))
    total = sum(made.values())
    for reason, share in metrics.wasted.items():
        tokens = sum(made.get(rollout, 0) for rollout, why in lost.items() if why == reason)
        assert share * total == pytest.approx(tokens)
    assert sum(metrics.wasted.values()) > 0


def test_dropping_what_is_left_over_wastes_tokens_that_keeping_it_does_not() -> None:
    def left_over(option: str) -> float:
        return simulated(option)[1].wasted.get(LEFT_OVER, 0.0)

    assert left_over("left over, dropped") > 0
    assert left_over("left over, kept") == 0


# Run files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"policies.sync_every": 0}, "policies.sync_every must be at least 1, got 0"),
        ({"policies.max_staleness": 0.4}, "max_staleness=0.4 x .* is less than one group"),
        ({"policies.over_staleness": "drop"}, "'drop' needs policies.consumption 'greedy'"),
        ({"policies.oversampling": 1.5}, "oversampling=1.5 needs policies.consumption 'greedy'"),
        ({"policies.oversampling": 0.5}, "policies.oversampling must be in"),
        (
            {"policies.oversampling": 1.2, "policies.consumption": "greedy"},
            "oversampling=1.2 adds no group to algorithm.prompts_per_step=2",
        ),
        (
            {
                "policies.oversampling": 1.5,
                "policies.consumption": "greedy",
                "policies.system": "one-step-async",
            },
            "waits_for_whole_batches = false",
        ),
        (
            {"policies.sync_every": 2, "policies.system": "colocated"},
            "policies.sync_every must be 1 if policies.system is 'colocated', got 2",
        ),
    ],
)
def test_a_run_file_that_asks_for_what_cannot_be_is_refused_with_key_and_value(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        small_run(changes)

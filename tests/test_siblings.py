"""Rollouts that wait are expected to be as long as their siblings were, and sent once there is room."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.entities import Group
from streamrl.engine.invariants import check
from streamrl.engine.messages import (
    Abort,
    Command,
    DrawnGroup,
    DrawPrompts,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
)
from streamrl.engine.policies.dispatch import AHEAD
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, replay
from streamrl.record.attribution import attribute
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import simulate
from tests.runs import Script, checked_world, generated, lose_replica_at, of, script, small_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

LEARN = {"policies.learns_from_siblings": True, "policies.order": "longest-first"}
STEEP = [[1, 0.01], [2, 0.5], [8, 2.0]]


def group_of(expected: list[int]) -> Group:
    return Group.draw(DrawnGroup(0, tuple(range(len(expected))), 40, tuple(expected)), 1, 0)


def begun(expected: list[tuple[int, ...]], **changes: Any) -> tuple[Script, list[Generate]]:
    """Return a script of one replica, and what it was sent of groups of these expected lengths."""
    chosen = {key.replace(".", "__"): value for key, value in LEARN.items()}
    chosen |= {"rollout__replicas": 1, "rollout__max_running": 2, "algorithm__name": "grpo"}
    size = {
        "algorithm__prompts_per_step": len(expected),
        "algorithm__group_size": len(expected[0]),
    }
    s = script(policies__system="stream-sync", **{**chosen, **size, **changes})
    draw = of(DrawPrompts, s.begin())[0]
    first = 0
    groups = []
    for group, tokens in enumerate(expected):
        groups.append(DrawnGroup(group, tuple(range(first, first + len(tokens))), 40, tokens))
        first += len(tokens)
    commands = s.tell(PromptsDrawn(draw.step, draw.oldest_version, tuple(groups)))
    return s, of(Generate, commands)


def rollouts(commands: list[Command] | list[Generate]) -> list[int]:
    return [command.rollout for command in commands if isinstance(command, Generate)]


# Who is sent when ---------------------------------------------------------------------------------


def test_one_of_each_group_goes_first_the_longest_before_the_others() -> None:
    _, sent = begun([(100, 100), (900, 900), (500, 500), (700, 700)])
    assert rollouts(sent) == [2, 6, 4]


def test_a_replica_gets_what_it_runs_and_one_to_follow() -> None:
    _, sent = begun([(100,) * 8, (100,) * 8], rollout__max_running=3)
    assert len(sent) == 3 + AHEAD
    _, sent = begun([(100,) * 8, (100,) * 8], rollout__max_running=3, rollout__replicas=2)
    assert sorted(command.replica for command in sent) == [0] * (3 + AHEAD) + [1] * (3 + AHEAD)


def test_siblings_of_the_longest_go_next() -> None:
    s, sent = begun([(100,) * 3] * 3)
    assert rollouts(sent) == [0, 3, 6]
    assert rollouts(s.tell(generated(3, tokens=40))) == [
        1
    ]  # 0 and 6 have told nothing: expected 100
    assert rollouts(s.tell(generated(6, tokens=900))) == [7]
    assert rollouts(s.tell(generated(1, tokens=800))) == [
        8
    ]  # (100 + 900) / 2 before (100 + 800) / 2
    assert rollouts(s.tell(generated(0, tokens=10))) == [2]  # (100 + 800 + 10) / 3 before 70
    assert s.state.rollouts[4].expected_tokens == 70


def test_a_rollout_that_comes_back_waits_where_its_siblings_put_it() -> None:
    s, _ = begun([(100,) * 2, (300,) * 2])  # 2, 0 and one of the others
    s.tell(generated(0, tokens=5000))
    again = s.tell(Failed(Generate(2, 0, 0), "broken"))
    assert rollouts(again) == [2]  # the only one of its group that could tell
    assert rollouts(s.tell(generated(3, tokens=10))) == []
    assert s.state.rollouts[2].expected_tokens == 155
    check(s.state)


def test_without_learning_all_are_sent_at_once_in_draw_order() -> None:
    s = script(algorithm__prompts_per_step=3, rollout__max_running=1)
    commands = s.draw(s.begin())
    first = [command for command in of(Generate, commands) if command.rollout < 6]
    assert rollouts(first) == list(range(6))


def test_siblings_say_better_than_all_others_what_a_straggler_has_ahead() -> None:
    def moved(lesson: int, others: int) -> list[int]:
        s, _ = begun(
            [(50, 50), (50, 50), (50, 50)],
            rollout__replicas=2,
            policies__migration="consolidate",
            policies__latency=STEEP,
            policies__context_time=1.0,  # a move must save 40 s and more: 80 tokens
        )
        for _ in range(6):
            s.state.recent.add(others)
        commands = s.tell(*(generated(r, tokens=lesson) for r in (0, 2, 4)))
        on = {r.id: r.replica.id for r in s.state.rollouts.values() if r.replica is not None}
        assert len(on) == 3
        alone = next(r for r, where in on.items() if list(on.values()).count(where) == 1)
        commands += s.tell(generated(alone, tokens=lesson))
        return [abort.rollout for abort in of(Abort, commands)]

    assert moved(2, others=9000) == []
    assert len(moved(9000, others=2)) == 1


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies.order": "fifo"}, "policies.order must be 'longest-first' .*got 'fifo'"),
        (
            {"policies.dispatch": "random"},
            "policies.dispatch must be 'least-loaded' .*got 'random'",
        ),
        ({"policies.group_placement": "together"}, "policies.group_placement must be 'split'"),
        (
            {"algorithm.group_size": 1, "algorithm.name": "ppo"},
            "learns_from_siblings needs an algorithm.group_size of 2 or more, got 1",
        ),
    ],
)
def test_what_could_not_use_the_lesson_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_run({**LEARN, **changes})


# Runs ---------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from(sorted(SYSTEMS)),
    st.sampled_from([None, "abort-and-resume", "load-in-flight"]),
    st.sampled_from(["none", "consolidate"]),
    st.integers(1, 3),
    st.booleans(),
)
def test_whole_runs_lose_nothing_and_replay(
    seed: int, system: str, sync: str | None, migration: str, max_running: int, is_lossy: bool
) -> None:
    changes: dict[str, Any] = {**LEARN, "seed": seed, "policies.system": system}
    changes |= {"algorithm.group_size": 3, "algorithm.prompts_per_step": 5}
    changes |= {"rollout.max_running": max_running, "policies.migration": migration}
    changes |= {"workload.lengths.ranker": "recall"}
    if sync is not None and system != "colocated":
        changes["policies.weight_sync"] = sync
    run = small_run(changes)
    world = checked_world(fill_policies(run, Costs.load(run)))
    if is_lossy:
        lose_replica_at(world, 0.5, seed)
        lose_replica_at(world, 2.0, seed + 1)
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert world.engine.state.leader.version == 3
    assert replay(trace) is None
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1)


def generation_time(trace: Trace) -> float:
    """Return the seconds from the first draw to the last token of a run of one step."""
    drawn = next(e.time for e in trace.entries if isinstance(e.event, PromptsDrawn))
    return max(e.time for e in trace.entries if isinstance(e.event, Generated)) - drawn


def test_it_shortens_generation_where_siblings_are_alike_and_start_one_after_the_other(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    means = rng.lognormal(6, 1, 300)
    rows = "".join(
        f"{prompt},{int(mean * rng.uniform(0.8, 1.2)) + 1}\n"
        for prompt, mean in enumerate(means)
        for _ in range(8)
    )
    source = tmp_path / "groups.csv"
    source.write_text("prompt_id,output_tokens\n" + rows)

    def took(**policies: Any) -> float:
        lengths = {"kind": "groups", "source": str(source), "prompt_tokens": 40}
        changes: dict[str, Any] = {"algorithm.prompts_per_step": 64, "algorithm.group_size": 8}
        changes |= {"algorithm.steps": 1, "rollout.replicas": 4, "rollout.max_tokens": 20000}
        changes |= {"policies.system": "stream-sync", "rollout.max_running": 16}
        changes |= {f"policies.{key}": value for key, value in policies.items()}
        return mean(
            generation_time(
                simulate(small_run({"seed": seed, "workload.lengths": lengths} | changes))
            )
            for seed in range(4)
        )

    assert took(learns_from_siblings=True, order="longest-first") < 0.9 * took()

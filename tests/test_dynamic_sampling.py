"""Groups of one reward are left out, and others drawn for them: in both worlds, within a bound, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.doctor.diagnosis import examine
from streamrl.engine.messages import DrawPrompts, PromptsDrawn, Skip, Step, Verified
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import LEADER, UNIFORM
from streamrl.record.metrics import measure
from streamrl.record.recorded_workload import informative_share
from streamrl.record.run_directory import read_metrics
from streamrl.report.run_tables import metrics_table
from streamrl.runfile.errors import RunError
from streamrl.runfile.findings import changed
from streamrl.sim.verifier import BEST, REWARD, SimRewards
from tests.patients import full_run
from tests.runs import checked_world, of, small_run
from tests.test_execute import execute, real_run
from tests.test_ledger import balance_of

DYNAMIC: dict[str, Any] = {
    "algorithm.name": "grpo",
    "algorithm.dynamic_sampling": True,
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 4,
    "algorithm.steps": 12,
}


def steps_of(trace: Trace, trainer: int = LEADER) -> list[tuple[int, ...]]:
    """Return the groups of each of a trainer's steps."""
    commands = (command for entry in trace.entries for command in entry.commands)
    return [c.groups for c in commands if isinstance(c, Step) and c.trainer == trainer]


def left_out(trace: Trace, trainer: int = LEADER) -> list[int]:
    """Return the groups that a trainer passed over because of their rewards."""
    skips = (skip for entry in trace.entries for skip in of(Skip, entry.commands))
    return [s.group for s in skips if s.trainer == trainer and s.reason == UNIFORM]


def uniform(trace: Trace, size: int) -> set[int]:
    """Return the groups of which all rewards are known and equal."""
    rewards: dict[int, list[float]] = {}
    for entry in trace.entries:
        if isinstance(entry.event, Verified):
            rewards.setdefault(entry.event.rollout // size, []).append(entry.event.reward)
    return {g for g, found in rewards.items() if len(found) == size and len(set(found)) == 1}


# Simulated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumption", ["strict-fifo", "greedy"])
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_step_is_full_of_groups_that_teach_something(system: str, consumption: str) -> None:
    changes = {**DYNAMIC, "policies.system": system, "workload.informative_share": 0.5}
    run = small_run({**changes, "policies.consumption": consumption})
    trace = checked_world(run).run()
    steps = steps_of(trace)
    assert len(steps) == 12 and all(len(groups) == 4 for groups in steps)
    assert not uniform(trace, 4).intersection(*[set().union(*steps)])
    gone = left_out(trace)
    assert set(gone) <= uniform(trace, 4) and len(gone) > 12
    assert replay(trace) is None
    balance = balance_of(trace)
    assert balance.is_balanced, balance.faults
    assert balance.trainers[LEADER].dropped[UNIFORM] == 4 * len(gone)
    assert measure(trace).dropped[UNIFORM] == 4 * len(gone)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("system", ["stream-sync", "one-step-async", "stream-async"])
def test_another_group_is_drawn_as_one_is_left_out_while_the_others_go_on(
    system: str, waits: bool
) -> None:
    changes = {"policies.system": system, "policies.waits_for_whole_batches": waits or None}
    share = {"workload.informative_share": 0.5}
    trace = checked_world(small_run({**DYNAMIC, **changes, **share})).run()
    leaving = [entry.commands for entry in trace.entries if of(Skip, entry.commands)]
    assert len(leaving) > 12
    for commands in leaving:
        drawn = sum(draw.num_groups for draw in of(DrawPrompts, commands))
        assert drawn == len(list(of(Skip, commands)))


def test_what_leaving_out_costs_goes_by_the_share_of_groups_that_teach() -> None:
    drawn = {}
    for share in (1.0, 0.5, 0.25):
        run = small_run({**DYNAMIC, "algorithm.steps": 30, "workload.informative_share": share})
        trace = checked_world(run).run()
        drawn[share] = sum(
            len(entry.event.groups)
            for entry in trace.entries
            if isinstance(entry.event, PromptsDrawn)
        )
    assert drawn[1.0] == 30 * 4
    assert drawn[0.5] == pytest.approx(2 * 30 * 4, rel=0.2)
    assert drawn[0.25] == pytest.approx(4 * 30 * 4, rel=0.2)


def test_past_the_bound_a_step_trains_on_what_there_is() -> None:
    run = small_run({**DYNAMIC, "algorithm.max_gen_batches": 3, "workload.informative_share": 0.0})
    trace = checked_world(run).run()
    steps = steps_of(trace)
    assert [len(groups) for groups in steps] == [4] * 12
    before: list[int] = []
    since = 0
    for entry in trace.entries:
        for command in entry.commands:
            since += isinstance(command, Skip) and command.reason == UNIFORM
            if isinstance(command, Step):
                before.append(since)
                since = 0
    assert before == [2 * 4] * 12
    assert balance_of(trace).is_balanced


def test_followers_pass_over_uniform_groups_or_take_what_the_leader_leaves() -> None:
    learns = {"name": "learns", "pool": "aside", "algorithm": {"name": "reinforce++"}}
    filters = {"name": "filters", "pool": "aside", "algorithm": {"name": "rloo"}}
    changes = {
        **DYNAMIC,
        "cluster.pools.aside": {"gpu": "h20"},
        "model.name": "qwen2.5-1.5b",
        "workload.informative_share": 0.5,
        "followers": [{**learns, "backlog": 50}, {**filters, "backlog": 50}],
    }
    trace = checked_world(small_run(changes)).run()
    equal = uniform(trace, 4)
    assert equal & set().union(*steps_of(trace, 1))
    assert not equal & set().union(*steps_of(trace, 2)) and left_out(trace, 2)
    assert not left_out(trace, 1)
    assert balance_of(trace).is_balanced


def test_simulated_rewards_differ_in_as_many_groups_as_the_run_file_says() -> None:
    run = small_run({**DYNAMIC, "workload.informative_share": 0.3})
    rewards = SimRewards(run)
    best = sum(rewards.of(4 * group) == BEST for group in range(10_000))
    assert best == pytest.approx(3_000, abs=150)
    assert all(rewards.of(4 * group + 1) == REWARD for group in range(100))
    plain = SimRewards(small_run({"workload.informative_share": 0.3}))
    assert {plain.of(rollout) for rollout in range(100)} == {REWARD}
    other = SimRewards(small_run({**DYNAMIC, "seed": 1, "workload.informative_share": 0.3}))
    assert [rewards.of(4 * g) for g in range(50)] != [other.of(4 * g) for g in range(50)]


def test_an_algorithm_that_learns_from_equal_rewards_leaves_none_out() -> None:
    with pytest.raises(RunError, match=r"dynamic_sampling drops .* reinforce\+\+ learns from"):
        small_run({"algorithm.name": "reinforce++", "algorithm.dynamic_sampling": True})


@pytest.mark.parametrize(
    ("share", "name", "level"),
    [
        (1.0, "nothing-left-out", "warning"),
        (0.05, "too-few-batches", "warning"),
        (0.5, "left-out", "ok"),
    ],
)
def test_the_doctor_says_what_leaving_out_comes_to(share: float, name: str, level: str) -> None:
    run = full_run({"algorithm.dynamic_sampling": True, "workload.informative_share": share})
    (finding,) = [found for found in examine(run) if found.name == name]
    assert finding.level == level
    if name == "too-few-batches":
        assert finding.changes == {"algorithm.max_gen_batches": 40}
        assert "too-few-batches" not in {f.name for f in examine(changed(run, finding.changes))}


def test_a_reward_that_nobody_knows_is_not_told_as_if_it_were() -> None:
    changes = {"algorithm.dynamic_sampling": True, "workload.informative_share": 0.5}
    simulated = measure(checked_world(small_run(changes)).run())
    assert any(simulated.rewards)
    for world in ("simulated", "real"):
        told = metrics_table(replace(simulated, world=world))
        labels = [str(label) for label in told.columns[0].cells]
        assert ("mean reward" in labels) == (world == "real")


# Executed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["colocated", "stream-sync", "stream-async", "fully-async"])
def test_an_executed_run_leaves_out_what_teaches_nothing(tmp_path: Path, system: str) -> None:
    changes = {key.replace(".", "__"): value for key, value in DYNAMIC.items()}
    changes |= {"policies__system": system, "algorithm__group_size": 2, "seed": 3}
    run = real_run(tmp_path, **changes)
    trace = execute(run)
    steps = steps_of(trace)
    assert len(steps) == 12 and all(len(groups) == 4 for groups in steps)
    assert not uniform(trace, 2) & set().union(*steps)
    assert len(left_out(trace)) > 12
    assert [line["uniform_groups"] for line in read_metrics(tmp_path / "run")] == [0.0] * 12
    assert balance_of(trace).is_balanced and replay(trace) is None
    share = informative_share(trace)
    assert share == 48 / (48 + len(left_out(trace)))
    lines = map(json.loads, (tmp_path / "run" / "rollouts.jsonl").open())
    assert {line["group"] for line in lines} >= set(left_out(trace))

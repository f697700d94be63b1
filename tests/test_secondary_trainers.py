"""Several trainers on one stream of groups: a leader, and others that follow in their own time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Drop,
    Failed,
    Generate,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    RunStarted,
    SaveCheckpoint,
    Skip,
    StartReplica,
    StartTrainer,
    Stepped,
    Stop,
    Take,
    Train,
    TrainerLost,
    TrainerStarted,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.policies.staleness import BEHIND, FAILED
from streamrl.engine.systems import PASSES_PER_COMMAND, rollouts_that_fill
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import LEADER, ROLLED_BACK
from streamrl.hardware.profiles import load_model
from streamrl.report.page.assumptions import assumptions_of
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from tests.random_runs import runs, simulate
from tests.runs import (
    Script,
    checked_world,
    done,
    make_table,
    of,
    script,
    small_run,
)

QUICK = {
    "name": "quick",
    "pool": "near",
    "tensor_parallel": 4,
    "algorithm": {"name": "rloo", "prompts_per_step": 1},
}
SLOW = {
    "name": "slow",
    "pool": "aside",
    "algorithm": {"name": "reinforce++", "prompts_per_step": 3, "kl_coefficient": 0.1},
    "efficiency": 0.002,
    "backlog": 1,
}
THREE: dict[str, Any] = {
    "model.name": "qwen2.5-1.5b",
    "cluster.pools.aside": {"gpu": "h20"},
    "cluster.pools.near.nodes": 2,
    "algorithm.steps": 12,
    "followers": [QUICK, SLOW],
}


def steps(trace: Trace, trainer: int = LEADER) -> list[float]:
    """Return when a trainer made each of its versions."""
    return [
        entry.time
        for entry in trace.entries
        if isinstance(entry.event, Stepped) and entry.event.trainer == trainer
    ]


def alone(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if key != "followers"}


def most_told(trace: Trace, trainer: int) -> int:
    """Return the most rollouts that a trainer was told to train on at once."""
    told = (train for entry in trace.entries for train in of(Train, entry.commands))
    return max(len(train.rollouts) for train in told if train.trainer == trainer)


# Side by side -------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["stream-async", "stream-sync", "disaggregated", "fully-async"])
def test_a_slow_follower_never_delays_the_leader_nor_another_and_its_losses_are_counted(
    system: str,
) -> None:
    changes = {**THREE, "policies.system": system}
    world = checked_world(small_run(changes))
    trace = world.run()
    assert steps(trace) == steps(checked_world(small_run(alone(changes))).run())
    without_slow = checked_world(small_run({**changes, "followers": [QUICK]})).run()
    assert steps(trace, 1) == steps(without_slow, 1)
    leader, quick, slow = world.engine.state.trainers
    assert (leader.version, quick.version) == (12, 24)
    assert slow.version < 8
    assert slow.lost[BEHIND] > 0
    skipped = [s for e in trace.entries for s in of(Skip, e.commands) if s.reason == BEHIND]
    assert {s.trainer for s in skipped} == {2}
    assert slow.lost[BEHIND] == 2 * len(skipped)
    assert replay(trace) is None


def test_a_follower_is_told_to_work_in_portions_of_its_own_however_the_leader_trains() -> None:
    algorithm = {"name": "reinforce++", "prompts_per_step": 12}
    follower = {**SLOW, "efficiency": 0.003, "algorithm": algorithm}
    changes = {**THREE, "followers": [follower], "trainer.micro_batch": 1}
    most = {
        system: most_told(checked_world(small_run({**changes, **named})).run(), 1)
        for system in ("stream-sync", "disaggregated", "one-step-async")
        for named in ({"policies.system": system},)
    }
    fill = small_run(changes).as_seen_by(1)
    assert set(most.values()) == {PASSES_PER_COMMAND * rollouts_that_fill(fill.trainer)}


def test_every_trainer_makes_its_steps_of_its_own_batches() -> None:
    trace = checked_world(small_run(THREE)).run()
    for trainer, size in enumerate([2, 1, 3]):
        taken: dict[int, list[int]] = {}
        for entry in trace.entries:
            for take in of(Take, entry.commands):
                if take.trainer == trainer:
                    taken.setdefault(take.step, []).append(take.group)
        made = [e.event.version for e in trace.entries if _is_step(e.event, trainer)]
        assert made == list(range(1, len(made) + 1))
        assert all(len(taken[version]) == size for version in made)
        groups = [group for groups in taken.values() for group in groups]
        assert len(set(groups)) == len(groups), "no group is trained on twice"


def _is_step(event: object, trainer: int) -> bool:
    return isinstance(event, Stepped) and event.trainer == trainer


def test_only_the_leader_pushes_and_bounds_what_may_start() -> None:
    trace = checked_world(small_run(THREE)).run()
    pushes = [p for e in trace.entries for p in of(PushWeights, e.commands)]
    assert {push.trainer for push in pushes} == {LEADER}


def test_a_group_is_forgotten_when_its_last_trainer_is_done_with_it() -> None:
    s = both(backlog=1)
    s.draw(s.begin())
    s.tell(TrainerStarted(1, 0))
    s.finish(0, 1, 2, 3)
    s.step(1)
    assert set(s.state.groups) == {0, 1}  # the follower's batch has room for one
    s.tell(done(Train((0, 1), 1)))
    s.tell(Stepped(1, 1))
    assert set(s.state.groups) == {1}


def test_what_a_follower_has_no_room_for_is_given_up_oldest_first() -> None:
    s = both(backlog=1, steps=9)
    drawn = s.begin()
    s.tell(TrainerStarted(1, 0))
    skipped: list[Skip] = []
    for version in range(4):
        drawn = s.draw(drawn) and s.finish(*range(4 * version, 4 * version + 4), version=version)
        skipped += of(Skip, drawn)
        drawn = s.step(version + 1)
        skipped += of(Skip, drawn)
        drawn += [c for e in (WeightsPushed(version + 1, 1),) for c in s.tell(e)]
        drawn += s.tell(*(WeightsLoaded(r, version + 1, 1.0) for r in (0, 1)))
    assert [(skip.group, skip.trainer) for skip in skipped] == [(g, 1) for g in range(1, 6)]
    assert s.state.trainers[1].lost == {BEHIND: 10}


def both(backlog: int, steps: int = 5) -> Script:
    """Return a synchronous run of two prompts a step, and a follower with one."""
    follower = {**QUICK, "backlog": backlog, "algorithm": {"prompts_per_step": 1}}
    s = script(policies__system="stream-sync", algorithm__steps=steps, followers=[follower])
    return s


# Failures -----------------------------------------------------------------------------------------


def test_a_follower_that_fails_loses_its_own_data_and_nobody_elses() -> None:
    s = both(backlog=2)
    s.draw(s.begin())
    s.tell(TrainerStarted(1, 0))
    s.finish(0, 1)
    commands = s.tell(Failed(Train((0, 1), 1), "out of memory"))
    assert not of(Stop, commands)
    assert of(Skip, commands) == [Skip(0, 1, FAILED)]
    assert of(Skip, s.finish(2, 3)) == [Skip(1, 1, FAILED)]
    s.step(1)
    assert s.state.stop_reason is None


def test_a_lost_follower_begins_again_at_its_checkpoint_with_what_it_had_taken() -> None:
    s = both(backlog=2)
    s.draw(s.begin())
    s.tell(TrainerStarted(1, 0))
    s.finish(0, 1)
    commands = s.tell(TrainerLost(1, "gone"), Failed(Train((0, 1), 1), "gone"))
    assert of(StartTrainer, commands) == [StartTrainer(1, 0)]
    assert not of(Drop, commands)
    assert of(Train, s.tell(TrainerStarted(1, 0))) == [Train((0, 1), 1)]


def test_a_lost_leader_begins_again_at_its_checkpoint_and_replicas_load_that() -> None:
    s = script(policies__system="stream-async", algorithm__steps=9, execute__checkpoint_every=2)
    drawn = s.begin()
    for version in range(3):
        s.draw(drawn)
        s.finish(*range(4 * version, 4 * version + 4), version=version)
        drawn = s.step(version + 1)
        if of(SaveCheckpoint, drawn):
            drawn += s.tell(done(of(SaveCheckpoint, drawn)[0]))
        drawn += s.tell(WeightsPushed(version + 1, 1))
        drawn += s.tell(*(WeightsLoaded(r, version + 1, 1.0) for r in (0, 1)))
    s.draw(drawn)
    assert (s.state.leader.version, s.state.leader.checkpoint_version) == (3, 2)
    before = set(s.state.groups)
    commands = s.tell(TrainerLost(LEADER, "gone"))
    assert of(StartTrainer, commands) == [StartTrainer(LEADER, 2)]
    assert {drop.group for drop in of(Drop, commands)} == before
    assert not of(PushWeights, commands)
    assert s.state.leader.lost[ROLLED_BACK] >= 4
    commands = s.tell(TrainerStarted(LEADER, 2))
    assert of(PushWeights, commands) == [PushWeights(2, LEADER)]
    again = s.draw(commands)
    assert not of(Stop, again) and not of(Generate, again)
    commands = s.tell(WeightsPushed(2, 1))
    kinds = [type(c) for c in commands if isinstance(c, LoadWeights | Generate)]
    assert kinds[:3] == [LoadWeights, LoadWeights, Generate], "replicas load before they go on"
    assert [load.version for load in of(LoadWeights, commands)] == [2, 2]


def test_a_trainer_that_is_lost_while_it_comes_up_is_started_once_more() -> None:
    s = script()
    started = of(StartTrainer, s.tell(RunStarted(0, 0)))
    assert not of(StartTrainer, s.tell(TrainerLost(LEADER, "gone")))
    commands = s.tell(Failed(started[0], "gone"))
    assert of(StartTrainer, commands) == started and not of(Stop, commands)


def test_a_leader_that_is_lost_too_often_stops_the_run() -> None:
    s = script(policies__max_restarts=1)
    s.draw(s.begin())
    assert of(StartTrainer, s.tell(TrainerLost(LEADER, "gone")))
    s.tell(TrainerStarted(LEADER, 0))
    (stop,) = of(Stop, s.tell(TrainerLost(LEADER, "gone")))
    assert "restarted 1 times" in stop.reason


def test_no_replica_comes_up_with_weights_that_the_trainer_has_lost() -> None:
    s = script(algorithm__steps=9, execute__checkpoint_every=50)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    s.step(1)
    s.tell(WeightsPushed(1, 1))
    commands = s.tell(TrainerLost(LEADER, "gone"))
    assert not of(StartReplica, s.tell(ReplicaLost(0, "gone too")))
    s.tell(TrainerStarted(LEADER, 0))
    assert of(StartReplica, s.tell(WeightsPushed(0, 1))) == [StartReplica(2, 0)]
    assert commands


@settings(max_examples=30, deadline=None)
@given(
    st.data(),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 2)), max_size=4),
    st.integers(1, 3),
)
def test_runs_with_followers_account_for_every_rollout_whoever_is_lost(
    data: st.DataObject, lost: list[tuple[float, int]], every: int
) -> None:
    run = data.draw(runs(None, followers=[QUICK, {**SLOW, "pool": "near"}]))
    trace = simulate(run, trainers=lost, checkpoint_every=every)
    assert replay(trace) is None


# The run file -------------------------------------------------------------------------------------


def test_a_follower_is_named_by_its_place_in_the_list() -> None:
    for change, key in (
        ({**QUICK, "pool": "nowhere"}, "trainer.1.pool"),
        ({**QUICK, "micro_batch": 0}, "trainer.1.micro_batch"),
        ({**QUICK, "algorithm": {"clip": -1.0}}, "trainer.1.algorithm.clip"),
        ({**QUICK, "backlogs": 1}, "trainer.1.backlogs"),
        ({**QUICK, "name": "trainer"}, "trainer.1.name"),
        ({**QUICK, "name": "two\nlines"}, "trainer.1.name"),
        ({**QUICK, "algorithm": {"group_size": 8}}, "trainer.1.algorithm.group_size"),
    ):
        with pytest.raises(RunError) as caught:
            small_run({**THREE, "followers": [change]})
        assert caught.value.key == key


def test_a_follower_takes_of_the_leaders_algorithm_what_its_own_knows() -> None:
    """And the report says what it does not take."""
    leads = {"name": "ppo", "kl_in": "reward", "kl_coefficient": 0.1, "correction": "decoupled"}
    names = ["ppo", "reinforce++", "rloo", "raft", "dpo"]
    followers = [
        {**QUICK, "name": f"by {n}", "tensor_parallel": 1, "algorithm": {"name": n}} for n in names
    ]
    changes = {f"algorithm.{key}": value for key, value in leads.items()}
    run = small_run({**THREE, **changes, "followers": followers})
    seen = [run.as_seen_by(number).algorithm for number in range(1, 6)]
    assert [own.kl_in for own in seen] == ["reward", "reward", "loss", "loss", "loss"]
    assert [own.correction for own in seen] == [*["decoupled"] * 3, None, None]
    assert {own.kl_coefficient for own in seen} == {0.1}
    shown = assumptions_of(run, load_model(run.model), None, None)
    said = {each.what: each.value for each in shown if each.what.startswith("algorithm of")}
    assert "from the leader" not in said["algorithm of by ppo"]
    assert "; takes no kl_in from the leader" in said["algorithm of by rloo"]
    assert "; takes no correction and kl_in from the leader" in said["algorithm of by dpo"]


@pytest.mark.parametrize(
    ("leader", "name", "key", "value"),
    [
        ("reinforce++", "rloo", "kl_in", "reward"),
        ("rloo", "dpo", "correction", "decoupled"),
        ("rloo", "reinforce++", "dynamic_sampling", True),
    ],
)
def test_what_a_followers_algorithm_does_not_know_is_refused_where_it_says_so_itself(
    leader: str, name: str, key: str, value: object
) -> None:
    leads = {**THREE, "algorithm.name": leader, f"algorithm.{key}": value}
    small_run({**leads, "followers": [{**QUICK, "algorithm": {"name": name}}]})
    with pytest.raises(RunError) as caught:
        small_run({**leads, "followers": [{**QUICK, "algorithm": {"name": name, key: value}}]})
    assert caught.value.key == f"trainer.1.algorithm.{key}"


@pytest.mark.parametrize(
    ("trainers", "line"),
    [
        ([], "trainer is empty, got []; it must have at least one trainer"),
        (["a"], "trainer.0 must be a table, got 'a'"),
        ([{"pool": "near"}, 7], "trainer.1 must be a table, got 7"),
    ],
)
def test_a_list_of_trainers_holds_tables(trainers: list[object], line: str) -> None:
    with pytest.raises(RunError) as caught:
        make_run({**make_table(), "trainer": trainers})
    assert str(caught.value) == line


def test_one_trainer_may_stand_in_a_list() -> None:
    table = make_table()
    assert make_run({**table, "trainer": [table["trainer"]]}) == make_run(table)

"""What becomes of work that fails, of lost replicas and of runs that end early."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.engine.messages import (
    Abort,
    DrawPrompts,
    Drop,
    Failed,
    Generate,
    Interrupted,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    SaveCheckpoint,
    StartReplica,
    StartTrainer,
    Stop,
    Train,
    TrainerLost,
    TrainerStarted,
    Verified,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.systems import build_engine
from streamrl.engine.trainer_side import LEADER
from tests.runs import checked_world, done, generated, of, script, singles, small_run

# Failures and the end -----------------------------------------------------------------------------


def test_a_finished_rollout_is_verified_at_once_and_again_after_a_failure() -> None:
    s = script()
    s.draw(s.begin())
    assert of(Verify, s.tell(generated(1))) == [Verify(1)]
    assert of(Verify, s.tell(Failed(Verify(1), "timeout"))) == [Verify(1)]


def test_a_rollout_is_tried_again_until_it_has_failed_too_often_then_its_group_is_dropped() -> None:
    s = script(policies__max_attempts=3)
    s.draw(s.begin())
    for _ in range(2):
        commands = s.tell(Failed(Generate(0, 0, 0), "broken"))
        assert [c.rollout for c in of(Generate, commands)] == [0]
        assert not of(Drop, commands)
    commands = s.tell(Failed(Generate(0, 0, 0), "broken"))
    assert commands[:2] == [Abort(1, 1), Drop(0, "failed 3 times")]
    assert s.state.leader.lost == {"failed 3 times": 2}


def test_a_lost_replica_is_replaced_under_a_new_id_and_its_rollouts_go_elsewhere() -> None:
    s = script()
    s.draw(s.begin())
    assert s.tell(ReplicaLost(0, "gone")) == [StartReplica(2, 0)]
    again = of(Generate, s.tell(Failed(Generate(0, 0, 0), "gone")))
    assert [(c.rollout, c.replica) for c in again] == [(0, 1)]


def test_a_run_stops_when_more_replicas_are_lost_than_may_be_restarted() -> None:
    s = script(policies__max_restarts=1)
    s.draw(s.begin())
    assert s.tell(ReplicaLost(0, "gone")) == [StartReplica(2, 0)]
    commands = s.tell(ReplicaLost(1, "gone"))
    assert isinstance(commands[0], Stop)
    assert not of(StartReplica, commands)
    assert len(of(Drop, commands)) == 4


def test_a_start_without_weights_of_a_lost_trainer_waits_for_its_push_and_is_not_counted() -> None:
    changes = {"policies.max_restarts": 1, "execute.checkpoint_every": 1, "algorithm.steps": 5}
    run = small_run({"sync.wire": "broadcast", **changes})
    engine = build_engine(run)
    for entry in checked_world(run).run().entries:
        engine.handle(entry.event, entry.time)
        if isinstance(entry.event, WeightsPushed):
            break
    saved, now = engine.state.leader.checkpoint_version, entry.time
    assert (engine.state.pushed_version, saved) == (1, 2)
    assert of(StartReplica, engine.handle(ReplicaLost(0, "gone"), now)) == [StartReplica(2, 1)]
    commands = engine.handle(TrainerLost(LEADER, "gone"), now)
    assert of(StartTrainer, commands) == [StartTrainer(LEADER, saved)]
    commands = engine.handle(Failed(StartReplica(2, 1), "no weights"), now)
    assert not of(StartReplica, commands) and not of(Stop, commands)
    commands = engine.handle(TrainerStarted(LEADER, saved), now)
    assert of(PushWeights, commands) == [PushWeights(saved, LEADER)]
    commands = engine.handle(WeightsPushed(saved, 1), now)
    assert of(StartReplica, commands) == [StartReplica(3, saved)]
    commands = engine.handle(Failed(StartReplica(3, saved), "broken"), now)
    assert of(Stop, commands) and not of(StartReplica, commands)


@pytest.mark.parametrize(
    "command", [Train((0, 1), 0), DrawPrompts(1, 1, 0), LoadWeights(0, 1, True)]
)
def test_a_failure_beyond_one_rollout_stops_the_run_and_names_it(command: Any) -> None:
    s = script()
    s.draw(s.begin())
    s.finish(0, 1)
    (stop,) = of(Stop, s.tell(Failed(command, "out of memory")))
    assert "out of memory" in stop.reason


def test_an_interrupted_run_aborts_what_runs_and_drops_everything_with_the_reason() -> None:
    s = script(algorithm__steps=9)
    s.draw(s.begin())
    s.tell(generated(0), Verified(0, 1.0), generated(1), generated(2))
    commands = s.tell(Interrupted("ctrl-c"))
    assert [c.rollout for c in of(Abort, commands)] == [3, 4, 5, 6, 7]
    assert of(Drop, commands) == [Drop(group, "ctrl-c") for group in range(4)]
    assert not s.state.is_finished
    s.tell(Verified(1, 1.0), Verified(2, 1.0))
    after = s.tell(*(generated(r, finish="aborted") for r in range(3, 8)))
    assert not after
    assert s.state.is_finished
    assert s.state.leader.lost == {"ctrl-c": 8}


def test_a_checkpoint_is_saved_every_so_many_steps_and_after_the_last() -> None:
    s = singles(1, algorithm__steps=5, execute__checkpoint_every=2, policies__system="stream-sync")
    draws, saves = s.begin(), []
    for version in range(1, 6):
        s.draw(draws)
        s.finish(version - 1)
        commands = s.step(version)
        saves += of(SaveCheckpoint, commands)
        if of(SaveCheckpoint, commands):
            commands += s.tell(done(saves[-1]))
        s.tell(WeightsPushed(version, 1))
        s.tell(*(WeightsLoaded(r, version, 1.0) for r in (0, 1)))
        draws = commands
    assert saves == [SaveCheckpoint(2, 2, 0), SaveCheckpoint(4, 4, 0), SaveCheckpoint(5, 5, 0)]


def test_a_checkpoint_says_from_which_group_a_resumed_run_draws() -> None:
    s = singles(2, algorithm__steps=9, execute__checkpoint_every=1, policies__consumption="greedy")
    s.draw(s.begin())
    s.finish(0, 2)  # group 1 is behind, groups 1 and 3 are neither trained nor dropped
    assert of(SaveCheckpoint, s.step(1)) == [SaveCheckpoint(1, 1, 0, done_ahead=(2,))]


def test_an_interrupted_run_is_saved_before_its_groups_are_dropped_so_that_a_resume_draws_them() -> (
    None
):
    s = singles(1, algorithm__steps=9, execute__checkpoint_every=5, policies__system="stream-sync")
    s.draw(s.begin())
    s.finish(0)
    draws = s.step(1)
    s.tell(WeightsPushed(1, 1))
    s.tell(*(WeightsLoaded(r, 1, 1.0) for r in (0, 1)))
    s.draw(draws)
    commands = s.tell(Interrupted("terminated", saves=True))
    assert [c.rollout for c in of(Abort, commands)] == [1]
    (save,) = of(SaveCheckpoint, commands)
    assert save == SaveCheckpoint(1, 1, 0) and not of(Drop, commands)
    assert not s.tell(generated(1, finish="aborted"))
    assert of(Drop, s.tell(done(save))) == [Drop(1, "terminated")]
    assert s.state.is_finished and s.state.leader.checkpoint_version == 1


@pytest.mark.parametrize("saves", [True, False])
def test_an_interrupted_run_waits_for_no_save_that_is_not_wanted_needed_or_possible(
    saves: bool,
) -> None:
    s = singles(1, algorithm__steps=9, execute__checkpoint_every=1, policies__system="stream-sync")
    s.draw(s.begin())
    s.finish(0)
    (save,) = of(SaveCheckpoint, s.step(1))
    commands = s.tell(Interrupted("terminated", saves=saves))
    assert not of(SaveCheckpoint, commands)  # it is being saved
    commands = s.tell(Failed(save, "no space is left"))
    assert not of(SaveCheckpoint, commands) or not saves

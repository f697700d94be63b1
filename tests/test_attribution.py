"""Where GPU-seconds went: by pencil and paper, then over systems and seeds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings

from streamrl.engine.messages import (
    CheckpointSaved,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    RunStarted,
    SaveCheckpoint,
    StartReplica,
    StartTrainer,
    Take,
    Train,
    Trained,
    TrainerLost,
    TrainerStarted,
    Verified,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace
from streamrl.record import attribution
from streamrl.record.attribution import attribute, attribute_sides
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.world import simulate
from tests.hand_traces import LEARNERS, HandTrace
from tests.random_runs import FaultyWorld, failures, runs_of_several
from tests.runs import checked_world, lose_replica_at, small_run

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"


def gpu_seconds(hand: HandTrace) -> dict[str, float]:
    """Return what each activity and cause got, in GPU-seconds to the microsecond, zeroes left out."""
    shares = attribute(hand.trace)
    both = {**shares.busy, **shares.idle}
    return {name: round(share * shares.gpu_seconds, 6) for name, share in both.items() if share}


def seconds_of_sides(hand: HandTrace) -> dict[str, dict[str, float]]:
    """Return the same of each side."""
    found = {}
    for name, shares in attribute_sides(hand.trace).sides.items():
        both = {**shares.busy, **shares.idle}
        found[name] = {
            key: round(share * shares.gpu_seconds, 6) for key, share in both.items() if share
        }
    return found


def test_a_synchronous_step_is_generation_then_training_and_the_rest_pipeline() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0, prefill_time=2.0)
    hand.train(10.0, 16.0, 1, 0)
    assert gpu_seconds(hand) == {"prefill": 2, "decode": 8, "train": 6, "pipeline": 10 + 6}


def test_a_straggler_costs_the_other_replica_and_the_trainer_skew() -> None:
    hand = HandTrace(replicas=2, algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(10.0, 0, run_time=10.0)
    hand.generated(30.0, 1, run_time=30.0)
    hand.train(30.0, 40.0, 1, 0, 1)
    assert gpu_seconds(hand) == {
        "decode": 10 + 30,
        "train": 10,
        "skew": 20 + 20,  # replica 0 and the trainer, while replica 1 goes on
        "pipeline": 10 + 2 * 10,  # the trainer at first, both replicas at last
    }


def test_push_and_load_are_sync_for_whoever_waits() -> None:
    hand = HandTrace(algorithm__steps=2)
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0)
    hand.train(10.0, 16.0, 1, 0)
    hand.command(16.0, PushWeights(1, 0))
    hand.draw(16.0, 2, 1)
    hand.at(19.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=True), Generate(1, 0, 0))
    hand.at(21.0, WeightsLoaded(0, 1, 2.0))
    hand.generated(25.0, 1, run_time=4.0, version=1)
    hand.train(25.0, 26.0, 2, 1)
    assert gpu_seconds(hand) == {
        "decode": 14,
        "train": 7,
        "sync": 2 * 5,
        "pipeline": (10 + 6) + (4 + 1),
    }


def test_an_overlapped_push_costs_a_working_replica_nothing() -> None:
    hand = HandTrace(algorithm__steps=2, policies__system="stream-async")
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.train(4.0, 6.0, 1, 0)
    hand.command(6.0, PushWeights(1, 0))
    hand.at(8.0, WeightsPushed(1, 8))
    hand.generated(10.0, 1, run_time=10.0)
    hand.train(10.0, 12.0, 2, 1)
    assert "sync" not in gpu_seconds(hand)


def test_an_idle_replica_waits_for_the_weights_that_waiting_rollouts_need() -> None:
    hand = HandTrace(replicas=2, algorithm__steps=4, policies__system="stream-async")
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(8.0, 0, run_time=8.0)
    hand.train(8.0, 10.0, 1, 0)
    hand.command(10.0, Take(1, 2, 0), PushWeights(1, 0))
    hand.draw(10.0, 3, 1, is_taken=False)
    hand.at(13.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=True), Generate(2, 0, 0))
    hand.at(14.0, WeightsLoaded(0, 1, 1.0))
    hand.generated(20.0, 1, run_time=20.0)
    hand.train(20.0, 21.0, 2, 1)
    assert gpu_seconds(hand) == {
        "decode": 8 + 20 + 7,
        "train": 3,
        "sync": 4,
        "staleness": 2 + 1,  # replica 0 beside step 1, replica 1 beside step 2
        "skew": 3,  # the trainer, while replica 0 stands idle
        "pipeline": 8 + 7,
    }


def test_everyone_waits_for_the_slowest_start() -> None:
    hand = HandTrace(replicas=2)
    hand.begin(replicas_at=5.0, trainer_at=3.0)
    hand.draw(3.0, 1, 1)
    hand.generate(5.0, 0)
    hand.generated(9.0, 0, run_time=4.0)
    hand.train(9.0, 10.0, 1, 0)
    assert gpu_seconds(hand) == {
        "decode": 4,
        "train": 1,
        "start-up": 3 * 5,
        "skew": 4 + 4,  # the second replica has nothing, and the trainer waits beside it
        "pipeline": 2,
    }


def test_a_replica_waits_for_the_trainer_to_come_up() -> None:
    hand = HandTrace()
    hand.begin(replicas_at=1.0, trainer_at=6.0)
    hand.draw(6.0, 1, 1)
    hand.generate(6.0, 0)
    hand.generated(8.0, 0, run_time=2.0)
    hand.train(8.0, 10.0, 1, 0)
    assert gpu_seconds(hand)["start-up"] == 2 * 6


def test_a_lost_replica_costs_failure_until_its_replacement_serves() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.at(4.0, ReplicaLost(0, "gone"))
    hand.at(4.0, Failed(Generate(0, 0, 0), "gone"))
    hand.command(5.0, StartReplica(1, 0))
    hand.at(10.0, ReplicaStarted(1, 0), Generate(0, 1, 0))
    hand.generated(18.0, 0, run_time=8.0)
    hand.train(18.0, 20.0, 1, 0)
    assert gpu_seconds(hand) == {
        "decode": 4 + 8,
        "train": 2,
        "failure": 2 * 6,  # the replica, and the trainer that has no other
        "pipeline": 4 + 8 + 2,
    }


def test_a_replica_that_leaves_while_it_generates_counts_once() -> None:
    counts = Counter({"replicas": 1, "replica generate": 1, "replica switch": 1})
    counts["replica evaluate"] = 1
    assert attribution._num_evaluating(counts) == attribution._num_idle(counts) == 0


def test_survivors_of_a_loss_go_on_and_the_trainer_waits_for_their_rollouts() -> None:
    hand = HandTrace(replicas=2, algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.at(4.0, ReplicaLost(0, "gone"), StartReplica(2, 0))
    hand.at(4.0, Failed(Generate(0, 0, 0), "gone"), Generate(0, 1, 0))
    hand.generated(10.0, 1, run_time=10.0)
    hand.generated(12.0, 0, run_time=8.0)
    hand.at(12.0, ReplicaStarted(2, 0))
    hand.train(12.0, 14.0, 1, 0, 1)
    assert gpu_seconds(hand) == {
        "decode": 4 + 12,
        "train": 2,
        "failure": 8,
        "pipeline": 12 + 2 * 2,
    }


def test_a_replica_that_fails_to_start_costs_failure() -> None:
    hand = HandTrace()
    hand.at(0.0, RunStarted(0, 0), StartTrainer(0, 0), StartReplica(0, 0))
    hand.at(0.0, TrainerStarted(0, 0))
    hand.draw(0.0, 1, 1)
    hand.at(3.0, Failed(StartReplica(0, 0), "no memory"), StartReplica(1, 0))
    hand.at(8.0, ReplicaStarted(1, 0), Generate(0, 1, 0))
    hand.generated(10.0, 0, run_time=2.0)
    hand.train(10.0, 11.0, 1, 0)
    assert gpu_seconds(hand) == {
        "decode": 2,
        "train": 1,
        "start-up": 2 * 3,
        "failure": 2 * 5,
        "pipeline": 2 + 1,
    }


def test_a_slow_reward_costs_both_sides_verifier() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0, verified_at=13.0)
    hand.train(13.0, 15.0, 1, 0)
    assert gpu_seconds(hand) == {"decode": 10, "train": 2, "verifier": 2 * 3, "pipeline": 10 + 2}


def test_rewards_that_come_while_the_trainer_works_delay_nobody() -> None:
    hand = HandTrace(algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.at(4.0, Generated(1, 100, "stop", 0, 4.0, 0.0), Train((0,), 0))
    hand.at(6.0, Verified(1, 0.5))
    hand.at(7.0, Trained((0,), 0))
    hand.train(7.0, 9.0, 1, 1)
    assert gpu_seconds(hand) == {"decode": 4, "train": 5, "pipeline": 4 + 5}


@pytest.mark.parametrize(("steps", "cause"), [(3, "staleness"), (2, "wind-down")])
def test_a_replica_ahead_of_the_trainer_waits_for_it_or_for_the_end(steps: int, cause: str) -> None:
    hand = HandTrace(algorithm__steps=steps, policies__system="stream-async")
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.generated(5.0, 1, run_time=5.0)
    hand.train(4.0, 12.0, 1, 0)
    hand.trace.entries.sort(key=lambda entry: entry.time)
    assert gpu_seconds(hand) == {"decode": 5, "train": 8, "pipeline": 4, cause: 7}


def test_greedy_consumption_waits_for_rollouts_that_no_step_has_taken_yet() -> None:
    hand = HandTrace(
        replicas=2,
        algorithm__prompts_per_step=2,
        policies__system="fully-async",
        policies__consumption="greedy",
    )
    hand.begin()
    hand.draw(0.0, 1, 2, is_taken=False)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(10.0, 0, run_time=10.0)
    hand.command(10.0, Take(0, 1, 0))
    hand.generated(30.0, 1, run_time=30.0)
    hand.command(30.0, Take(1, 1, 0))
    hand.train(30.0, 40.0, 1, 0, 1)
    shares = gpu_seconds(hand)
    assert shares["skew"] == 20 + 20
    assert shares["pipeline"] == 10


def test_a_checkpoint_costs_the_trainer_its_seconds() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0)
    hand.train(10.0, 16.0, 1, 0)
    hand.command(16.0, SaveCheckpoint(1, 1, 0))
    hand.at(19.0, CheckpointSaved(1, 0))
    assert gpu_seconds(hand)["checkpoint"] == 3


def test_two_learners_and_their_verifiers_each_do_and_wait_for_their_own() -> None:
    hand = HandTrace(algorithm__steps=2, **LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0, verified_at=12.0)
    hand.command(12.0, Take(0, 1, 1))
    hand.train(12.0, 18.0, 1, 0)
    hand.draw(18.0, 2, 1)
    hand.generate(18.0, 1)
    hand.generated(28.0, 1, run_time=10.0, verified_at=30.0)
    hand.command(30.0, Take(1, 1, 1))
    hand.train(30.0, 36.0, 2, 1)
    hand.train(30.0, 40.0, 1, 0, 1, trainer=1)
    hand.sort()
    assert seconds_of_sides(hand) == {
        "rollout": {"decode": 20, "verifier": 4, "pipeline": 6 + 6 + 4},
        "trainer": {"train": 12, "verifier": 4, "pipeline": 10 + 10 + 4},
        # two GPUs: while the leader makes its step, nothing more is under way for the other
        "second": {"train": 2 * 10, "verifier": 2 * 4, "pipeline": 2 * (10 + 6 + 10)},
        # two workers, of which one at a time has a reward to compute
        "verifier": {"verify": 4, "pipeline": 2 * 36 + 4},
    }
    assert gpu_seconds(hand) == {
        "decode": 20,
        "train": 32,
        "verify": 4,
        "verifier": 16,
        "pipeline": 16 + 24 + 52 + 76,
    }


def test_whoever_waits_for_a_lost_leader_waits_for_a_failure() -> None:
    hand = HandTrace(algorithm__steps=2, **LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.generated(10.0, 0, run_time=10.0)
    hand.command(10.0, Take(0, 1, 1), Train((0,), 0))
    hand.at(12.0, TrainerLost(0, "gone"), StartTrainer(0, 0))
    hand.at(12.0, Failed(Train((0,), 0), "gone"))
    hand.at(15.0, TrainerStarted(0, 0), Take(0, 1, 0))
    hand.train(15.0, 20.0, 1, 0)
    assert seconds_of_sides(hand) == {
        "rollout": {"decode": 10, "pipeline": 2 + 5, "failure": 3},
        "trainer": {"pipeline": 10, "train": 2 + 5, "failure": 3},
        "second": {"pipeline": 2 * (10 + 2 + 5), "failure": 2 * 3},
        "verifier": {"pipeline": 2 * (10 + 2 + 5), "failure": 2 * 3},
    }


def test_a_follower_that_is_lost_delays_only_itself() -> None:
    hand = HandTrace(algorithm__steps=1, **LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.at(2.0, TrainerLost(1, "gone"), StartTrainer(1, 0))
    hand.at(6.0, TrainerStarted(1, 0))
    hand.generated(10.0, 0, run_time=10.0)
    hand.train(10.0, 14.0, 1, 0)
    found = seconds_of_sides(hand)
    assert found["rollout"] == {"decode": 10, "pipeline": 4}
    assert found["trainer"] == {"pipeline": 10, "train": 4}
    # two GPUs; the last prompt is drawn, and once it is generated no second one comes to make a batch
    assert found["second"] == {"pipeline": 2 * (2 + 4), "failure": 2 * 4, "wind-down": 2 * 4}


def test_a_leader_that_comes_up_again_waits_for_what_it_had_taken() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.at(4.0, TrainerLost(0, "gone"), StartTrainer(0, 0))
    hand.at(6.0, TrainerStarted(0, 0), Take(0, 1, 0))
    hand.generated(10.0, 0, run_time=10.0)
    hand.train(10.0, 14.0, 1, 0)
    assert seconds_of_sides(hand) == {
        "rollout": {"decode": 10, "pipeline": 4},
        "trainer": {"pipeline": 4 + 4, "failure": 2, "train": 4},
    }


def test_a_step_of_one_trainer_ends_nothing_that_another_waits_for() -> None:
    hand = HandTrace(replicas=2, algorithm__steps=3, **LEARNERS)
    hand.begin()
    for step in (1, 2):
        hand.draw(5.0 * (step - 1), step, 1)
        hand.generate(5.0 * (step - 1), step - 1)
        hand.generated(5.0 * step, step - 1, run_time=5.0)
        hand.train(5.0 * step, 5.0 * step, step, step - 1)
    hand.command(10.0, Take(0, 1, 1), Take(1, 1, 1))
    hand.draw(10.0, 3, 1)
    hand.generate(10.0, 2)
    hand.train(10.0, 13.0, 1, 0, 1, trainer=1)
    hand.generated(20.0, 2, run_time=10.0)
    found = seconds_of_sides(hand)
    assert found["rollout"] == {"decode": 20, "skew": 20}
    assert found["trainer"] == {"skew": 20}
    assert found["second"] == {"train": 2 * 3, "skew": 2 * (10 + 7)}


def test_a_follower_that_fails_for_good_is_a_failure_to_the_end() -> None:
    hand = HandTrace(algorithm__steps=1, **LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.command(0.0, SaveCheckpoint(0, 0, 1))
    hand.at(3.0, Failed(SaveCheckpoint(0, 0, 1), "disk full"))
    hand.generated(10.0, 0, run_time=10.0)
    hand.train(10.0, 14.0, 1, 0)
    assert seconds_of_sides(hand)["second"] == {"checkpoint": 2 * 3, "failure": 2 * 11}


@settings(max_examples=25, deadline=None)
@given(run=runs_of_several(), faults=failures)
def test_shares_are_whole_of_every_side_whatever_fails(run: Run, faults: frozenset[int]) -> None:
    trace = FaultyWorld(run, faults).run()
    whole, sides = attribute_sides(trace)
    end = trace.entries[-1].time
    if not end:
        return
    for shares in (whole, *sides.values()):
        assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1)
        assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9
    assert sum(shares.gpu_seconds for shares in sides.values()) == pytest.approx(whole.gpu_seconds)
    num_gpus = run.num_gpus + sum(each.num_gpus for each in run.followers) + run.verifier.num_gpus
    assert whole.gpu_seconds == pytest.approx(num_gpus * end)
    assert set(sides) >= {"verifier", *(follower.name for follower in run.followers)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_gpu_second_is_busy_or_idle_for_one_cause(system: str, seed: int) -> None:
    shares = attribute(simulate_small(system, seed))
    assert abs(sum(shares.busy.values()) + sum(shares.idle.values()) - 1) < 1e-9
    assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_gpu_seconds_are_all_gpus_for_the_whole_run(system: str) -> None:
    trace = simulate_small(system, 0)
    num_gpus = {"colocated": 16}.get(system, 4 + 16)
    assert attribute(trace).gpu_seconds == pytest.approx(num_gpus * trace.entries[-1].time)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_shares_stay_whole_when_a_replica_is_lost(system: str) -> None:
    world = checked_world(small_run({"policies.system": system, "rollout.start_time": "1 s"}))
    lose_replica_at(world, 1.5, 0)
    shares = attribute(world.run())
    assert abs(sum(shares.busy.values()) + sum(shares.idle.values()) - 1) < 1e-9
    assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9
    assert shares.idle["failure"] > 0


def test_on_policy_systems_never_wait_for_staleness() -> None:
    for system in ("colocated", "disaggregated", "stream-sync"):
        metrics = measure(simulate_small(system, 0))
        assert metrics.idle["staleness"] == metrics.idle["wind-down"] == 0
        assert list(metrics.staleness) == [0]


def simulate_small(system: str, seed: int) -> Trace:
    """Simulate the example on a few GPUs."""
    changes = (
        f"policies.system={system}",
        f"seed={seed}",
        "algorithm.prompts_per_step=64",
        "algorithm.steps=4",
        "rollout.replicas=4",
        "rollout.start_time=3 s",
        "trainer.start_time=5 s",
        "verifier.time=200 ms",
        f"cluster.pools.h20.nodes={2 if system == 'colocated' else 1}",
        f"trainer.pool={'h20' if system == 'colocated' else 'h800'}",
    )
    return simulate(load_run(EXAMPLE, changes))

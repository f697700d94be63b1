"""What a run gave and cost, by pencil and paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from streamrl.engine.messages import (
    Abort,
    CheckpointSaved,
    Drop,
    Failed,
    Generated,
    ReplicaStarted,
    RunStarted,
    SaveCheckpoint,
    Skip,
    StartReplica,
    StartTrainer,
    Take,
    Train,
    TrainerLost,
    TrainerStarted,
)
from streamrl.engine.trace import Trace
from streamrl.hardware.profiles import load_gpu
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure
from streamrl.record.rollout_flow import read_flow
from streamrl.record.steady_state import read_steps
from streamrl.runfile.config import Run
from streamrl.sim.steady_state import simulate_steady
from tests.hand_traces import LEARNERS, HandTrace
from tests.random_runs import FaultyWorld, failures, runs_of_several
from tests.runs import small_run

BOTH, ALL = (1, 2), (1, 3)
"""First and last step that count."""


def two_steps() -> Trace:
    """Return a run of two steps, of 16 and 10 seconds, the second trained on a stale rollout."""
    hand = HandTrace(algorithm__steps=2, policies__system="stream-async")
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, 1)
    hand.generated(10.0, 0, run_time=10.0, tokens=100)
    hand.train(10.0, 16.0, 1, 0)
    hand.generated(20.0, 1, run_time=20.0, tokens=300)
    hand.train(20.0, 26.0, 2, 1)
    return hand.trace


def test_rates_count_what_the_steps_that_count_are_made_of() -> None:
    metrics = measure(two_steps())
    assert metrics.counted_steps == (2, 2) and metrics.step_time_interval is None
    assert metrics.note.startswith("1 step counts, too few for an interval")
    assert metrics.step_times == [16, 10]
    assert metrics.step_time == 10
    assert metrics.throughput == metrics.goodput == 300 / 10
    assert metrics.samples_per_second == 1 / 10
    whole = measure(two_steps(), BOTH)
    assert (whole.step_time, whole.median_step_time, whole.goodput) == (13, 13, 400 / 26)


def test_staleness_is_the_version_trained_from_minus_the_one_born_under() -> None:
    assert measure(two_steps(), BOTH).staleness == {0: 1, 1: 1}


def test_a_resumed_run_counts_staleness_from_its_version() -> None:
    hand = HandTrace()
    hand.at(0.0, RunStarted(7, 7), StartTrainer(0, 0), StartReplica(0, 7))
    hand.at(0.0, ReplicaStarted(0, 7))
    hand.at(0.0, TrainerStarted(0, 7))
    hand.draw(0.0, 8, 1)
    hand.generate(0.0, 0)
    hand.generated(5.0, 0, run_time=5.0, version=7)
    hand.train(5.0, 6.0, 8, 0)
    assert measure(hand.trace).staleness == {0: 1}


def test_a_rollout_dropped_before_its_step_counts_as_dropped_only() -> None:
    hand = HandTrace(algorithm__steps=2)
    hand.begin()
    for step, start in ((1, 0.0), (2, 10.0)):
        hand.draw(start, step, 1)
        hand.generate(start, step - 1)
        hand.generated(start + 5, step - 1, run_time=5.0, version=step - 1)
        if step == 1:
            hand.train(5.0, 10.0, 1, 0)
    hand.command(15.0, Train((1,), 0))
    hand.command(16.0, Drop(1, "interrupted"))
    metrics = measure(hand.trace)
    assert metrics.dropped == {"interrupted": 1}
    assert metrics.staleness == {0: 1}
    assert metrics.rewards == [0.5]


def test_tokens_that_a_dropped_rollout_had_by_its_abort_are_generated_and_lost() -> None:
    hand = HandTrace(algorithm__steps=2, policies__system="stream-async")
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.draw(0.0, 2, 1, is_taken=False)
    hand.generate(0.0, 0, 1)
    hand.command(5.0, Abort(1, 0), Drop(1, "too old"))
    hand.at(5.0, Generated(1, 60, "aborted", 0, 5.0, 0.0))
    hand.generated(10.0, 0, run_time=10.0, tokens=100)
    hand.train(10.0, 16.0, 1, 0)
    metrics = measure(hand.trace, (1, 1))
    assert metrics.dropped == {"too old": 1}
    assert (metrics.goodput, metrics.throughput) == (100 / 16, 160 / 16)


def test_dollars_are_gpus_by_price_by_time() -> None:
    trace = two_steps()
    per_second = (1.85 + load_gpu("h800").price) / 3600
    metrics = measure(trace)
    assert PaidGpus.of(trace.run).dollars_per_second == pytest.approx(per_second)
    assert metrics.cost_per_step == pytest.approx(10 * per_second)
    assert metrics.cost_per_million_tokens == pytest.approx(per_second / 30 * 1e6)


def test_tiers_weigh_busy_seconds() -> None:
    metrics = measure(two_steps(), BOTH)
    assert metrics.tiers == {
        "measured": pytest.approx(20 / 32),
        "roofline": pytest.approx(12 / 32),
    }


def test_seconds_that_wait_for_weights_are_of_the_tier_of_the_sync() -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "transport": "rdma"}
    changes = {"simulate.max_steps": 6, "cluster.links": [link]}
    by_wires, as_measured = (
        measure(simulate_steady(small_run({**changes, "sync.backend": backend})))
        for backend in ("broadcast-tree", "nccl-buckets")
    )
    for metrics, tier in ((by_wires, "roofline"), (as_measured, "composed")):
        worked = sum(metrics.busy.values()) - metrics.busy.get("verify", 0.0)
        waited = metrics.idle["sync"]
        assert waited > 0.01
        assert metrics.tiers[tier] > waited / (worked + waited) - 1e-9
        assert sum(metrics.tiers.values()) == pytest.approx(1.0)
    assert as_measured.tiers.get("roofline", 0.0) < as_measured.idle["sync"]


def test_a_trace_without_a_step_is_refused() -> None:
    hand = HandTrace()
    hand.begin()
    with pytest.raises(ValueError, match="no finished step"):
        measure(hand.trace)


# Several trainers ---------------------------------------------------------------------------------


def two_learners() -> HandTrace:
    """Return a run of three steps of a leader that has 2, 4 and 6 seconds, and of one that follows on the first two."""
    hand = HandTrace(algorithm__steps=3, policies__system="stream-async", **LEARNERS)
    hand.begin()
    for rollout, (start, end) in enumerate([(0.0, 2.0), (2.0, 6.0), (6.0, 12.0)]):
        hand.draw(start, rollout + 1, 1)
        hand.generate(start, rollout)
        hand.generated(start + 1, rollout, run_time=1.0, version=max(0, rollout - 1), tokens=100)
        hand.train(start + 1, end, rollout + 1, rollout)
    hand.command(6.0, Take(0, 1, 1), Take(1, 1, 1))
    hand.train(7.0, 10.0, 1, 0, 1, trainer=1)
    hand.command(12.0, Skip(2, 1, "the trainer was behind"))
    hand.sort()
    return hand


def test_figures_are_the_leaders_and_each_trainer_has_its_own() -> None:
    metrics = measure(two_learners().trace, ALL)
    assert metrics.step_times == [2, 4, 6] and metrics.num_steps == 3
    assert metrics.staleness == {0: 1, 1: 2} and metrics.dropped == {}
    leader, second = metrics.trainers
    assert (leader.name, leader.num_steps, leader.mean_step_time) == ("trainer", 3, 4)
    assert (leader.trained, leader.goodput, leader.lost) == (3, 300 / 12, {})
    assert leader.staleness == metrics.staleness
    assert (second.name, second.num_steps, second.mean_step_time) == ("second", 1, 10)
    assert (second.trained, second.goodput) == (2, 200 / 12)
    assert second.lost == {"the trainer was behind": 1}


def test_a_follower_is_as_stale_as_its_rollouts_are_behind_the_leaders_newest() -> None:
    # both were born under version 0, and the leader had made version 2 when the follower trained on them
    assert measure(two_learners().trace, ALL).trainers[1].staleness == {2: 2}


def test_what_the_leader_skips_is_dropped_for_the_leader_alone() -> None:
    hand = two_learners()
    hand.draw(12.0, 3, 1, is_taken=False)
    hand.command(12.0, Skip(3, 0, "rolled back"))
    metrics = measure(hand.trace)
    assert metrics.dropped == metrics.trainers[0].lost == {"rolled back": 1}
    assert metrics.trainers[1].lost == {"the trainer was behind": 1}


def test_a_group_that_the_leader_has_trained_on_is_dropped_for_the_others_only() -> None:
    hand = two_learners()
    hand.draw(12.0, 4, 1)
    hand.generate(12.0, 3)
    hand.generated(13.0, 3, run_time=1.0, version=3)
    hand.train(13.0, 14.0, 4, 3)
    hand.command(14.0, Drop(3, "stopped"))
    metrics = measure(hand.trace)
    assert metrics.dropped == {} and metrics.trainers[0].trained == 4
    assert metrics.trainers[1].lost == {"the trainer was behind": 1, "stopped": 1}


def test_steps_that_a_loss_takes_back_are_lost_and_the_next_one_has_their_time() -> None:
    hand = HandTrace(algorithm__steps=3)
    hand.begin()
    for rollout, end in enumerate([4.0, 8.0, 12.0]):
        hand.draw(end - 4, rollout + 1, 1)
        hand.generate(end - 4, rollout)
        hand.generated(end - 2, rollout, run_time=2.0, version=rollout)
        hand.train(end - 2, end, rollout + 1, rollout)
        if rollout == 0:
            hand.command(end, SaveCheckpoint(1, 1, 0))
            hand.at(end, CheckpointSaved(1, 0))
    hand.command(12.0, Train((9,), 0))
    hand.at(13.0, TrainerLost(0, "gone"), StartTrainer(0, 1))
    hand.at(13.0, Failed(Train((9,), 0), "gone"))
    hand.at(14.0, TrainerStarted(0, 1))
    hand.draw(14.0, 2, 1)
    hand.generate(14.0, 3)
    hand.generated(16.0, 3, run_time=2.0, version=1)
    hand.train(16.0, 20.0, 2, 3)
    metrics = measure(hand.trace, BOTH)
    assert metrics.step_times == [4, 16]
    assert list(read_steps(hand.trace).num_generated) == [1, 3]
    assert metrics.dropped == {"rolled back": 2}
    assert metrics.staleness == {0: 2} and len(metrics.rewards) == 2


def test_tiers_weigh_what_each_trainer_takes_and_no_verifier() -> None:
    metrics = measure(two_learners().trace, ALL)
    generated, led, followed = 3, 1 + 3 + 5, 2 * 3
    assert metrics.tiers == {
        "measured": pytest.approx(generated / (generated + led + followed)),
        "roofline": pytest.approx(led / (generated + led + followed)),
        "composed": pytest.approx(followed / (generated + led + followed)),
    }


def test_the_shares_of_a_side_are_of_its_own_gpu_seconds() -> None:
    sides = measure(two_learners().trace, ALL).sides
    assert list(sides) == ["rollout", "trainer", "second", "verifier"]
    assert sides["second"].busy == {"train": pytest.approx(3 / 12)}
    for side in sides.values():
        assert sum(side.busy.values()) + sum(side.idle.values()) == pytest.approx(1)


@settings(max_examples=25, deadline=None)
@given(run=runs_of_several(), faults=failures)
def test_a_trace_tells_of_every_trainer_what_the_engine_counted(
    run: Run, faults: frozenset[int]
) -> None:
    world = FaultyWorld(run, faults)
    flow = read_flow(world.run())
    for found, trainer in zip(flow.trainers, world.engine.state.trainers, strict=True):
        assert dict(found.lost) == trainer.lost
        assert sum(found.made.num_rollouts) == trainer.num_trained
        assert len(found.made) == trainer.version
        assert found.made.staleness(0, trainer.version).total() == trainer.num_trained

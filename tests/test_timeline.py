"""Who did what when, read from traces written by hand."""

from __future__ import annotations

from streamrl.engine.messages import (
    Failed,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    RunStarted,
    StartReplica,
    StartTrainer,
    Train,
    TrainerLost,
    TrainerStarted,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.record.timeline import Span, read_timeline
from streamrl.runfile.formatting import counted
from tests.hand_traces import LEARNERS, HandTrace


def test_overlapping_rollouts_are_one_activity_of_their_replica() -> None:
    hand = HandTrace(algorithm__prompts_per_step=3)
    hand.begin()
    hand.draw(0.0, 1, 3)
    hand.generate(0.0, 0, 1, 2)
    hand.generated(10.0, 0, run_time=10.0)
    hand.generated(14.0, 1, run_time=6.0)
    hand.generated(30.0, 2, run_time=5.0)
    timeline = read_timeline(hand.trace)
    generating = [s[:3] for s in timeline.replicas[0] if s.activity == "generate"]
    assert generating == [(0.0, 14.0, "generate"), (25.0, 30.0, "generate")]
    assert timeline.rollouts[0] == [
        Span(0.0, 10.0, "generate", "0"),
        Span(8.0, 14.0, "generate", "1"),
        Span(25.0, 30.0, "generate", "2"),
    ]


def test_a_load_in_flight_interrupts_generation() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.command(1.0, PushWeights(1, 0))
    hand.at(3.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=False))
    hand.at(6.0, WeightsLoaded(0, 1, 2.0))
    hand.generated(10.0, 0, run_time=10.0)
    timeline = read_timeline(hand.trace)
    assert [s[:3] for s in timeline.replicas[0][1:]] == [
        (0.0, 4.0, "generate"),
        (4.0, 6.0, "sync"),
        (6.0, 10.0, "generate"),
    ]
    assert timeline.link == [Span(1.0, 3.0, "push", "v1")]


def test_the_trainer_works_from_command_to_event() -> None:
    hand = HandTrace()
    hand.begin(trainer_at=2.0)
    hand.draw(2.0, 1, 1)
    hand.generate(2.0, 0)
    hand.generated(5.0, 0, run_time=3.0)
    hand.train(6.0, 9.0, 1, 0)
    timeline = read_timeline(hand.trace)
    assert [s for s in timeline.trainers[0] if s.end > s.start] == [
        Span(0.0, 2.0, "start-up"),
        Span(6.0, 9.0, "train", "1 rollouts"),
    ]
    assert timeline.end == 9.0


def test_what_ran_on_a_lost_replica_ends_with_it() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.at(4.0, ReplicaLost(0, "gone"), StartReplica(1, 0))
    hand.at(5.0, Failed(Generate(0, 0, 0), "gone"))
    hand.at(9.0, ReplicaStarted(1, 0), Generate(0, 1, 0))
    hand.generated(12.0, 0, run_time=3.0)
    timeline = read_timeline(hand.trace)
    assert timeline.rollouts == {
        0: [Span(0.0, 4.0, "generate", "0")],
        1: [Span(9.0, 12.0, "generate", "0")],
    }
    assert timeline.starts() == {0: 0.0, 1: 4.0}


def test_a_replica_that_never_came_up_stops_starting_when_it_failed() -> None:
    hand = HandTrace()
    hand.at(0.0, RunStarted(0, 0), StartReplica(0, 0))
    hand.at(3.0, Failed(StartReplica(0, 0), "no memory"), StartReplica(1, 0))
    hand.at(8.0, ReplicaStarted(1, 0))
    timeline = read_timeline(hand.trace)
    assert timeline.replicas == {
        0: [Span(0.0, 3.0, "start-up")],
        1: [Span(3.0, 8.0, "start-up")],
    }


def test_a_rollout_aborted_in_the_queue_never_ran() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.at(5.0, Generated(0, 0, "aborted", 0, 0.0, 0.0))
    timeline = read_timeline(hand.trace)
    assert timeline.rollouts == {}
    assert [s.activity for s in timeline.replicas[0]] == ["start-up"]


def test_what_still_runs_at_the_end_lasts_to_the_end() -> None:
    hand = HandTrace(algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, 1)
    hand.generated(7.0, 0, run_time=2.0)
    timeline = read_timeline(hand.trace)
    assert [s[:3] for s in timeline.replicas[0][1:]] == [(0.0, 7.0, "generate")]


def test_each_trainer_works_on_its_own() -> None:
    hand = HandTrace(**LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.train(1.0, 5.0, 1, 0)
    hand.train(2.0, 9.0, 1, 0, 1, trainer=1)
    hand.sort()
    timeline = read_timeline(hand.trace)
    assert [s for s in timeline.trainers[0] if s.end > s.start] == [
        Span(1.0, 5.0, "train", "1 rollouts")
    ]
    assert [s for s in timeline.trainers[1] if s.end > s.start] == [
        Span(2.0, 9.0, "train", "2 rollouts")
    ]


def test_a_lost_trainer_fails_until_it_is_up_again_and_its_push_ends_with_it() -> None:
    hand = HandTrace()
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.command(1.0, Train((0,), 0), PushWeights(1, 0))
    hand.at(4.0, TrainerLost(0, "gone"))
    hand.at(4.0, Failed(Train((0,), 0), "gone"))
    hand.at(4.0, Failed(PushWeights(1, 0), "gone"), StartTrainer(0, 0))
    hand.at(5.0, TrainerLost(0, "gone again"), StartTrainer(0, 0))
    hand.at(5.0, Failed(StartTrainer(0, 0), "gone again"))
    hand.at(7.0, TrainerStarted(0, 0))
    hand.train(8.0, 9.0, 1, 0)
    timeline = read_timeline(hand.trace)
    assert [s for s in timeline.trainers[0] if s.end > s.start] == [
        Span(1.0, 4.0, "train", "1 rollouts"),
        Span(4.0, 7.0, "failure", "gone"),
        Span(8.0, 9.0, "train", "1 rollouts"),
    ]
    assert timeline.link == [Span(1.0, 4.0, "push", "v1")]


def test_verifiers_work_while_any_reward_is_computed() -> None:
    hand = HandTrace(algorithm__prompts_per_step=3)
    hand.begin()
    hand.draw(0.0, 1, 3)
    hand.generate(0.0, 0, 1, 2)
    hand.generated(1.0, 0, run_time=1.0, verified_at=4.0)
    hand.generated(3.0, 1, run_time=1.0, verified_at=6.0)
    hand.generated(8.0, 2, run_time=1.0, verified_at=9.0)
    hand.sort()
    assert read_timeline(hand.trace).verifier == [
        Span(1.0, 6.0, "verify"),
        Span(8.0, 9.0, "verify"),
    ]


def test_one_rank_has_no_plural() -> None:
    assert counted(1, "data-parallel rank") == "1 data-parallel rank"
    assert counted(2000, "data-parallel rank") == "2,000 data-parallel ranks"

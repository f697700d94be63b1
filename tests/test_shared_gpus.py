"""Who waits for what on GPUs that generate and train in turn, and who pays for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.engine.messages import (
    Abort,
    Drop,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    Score,
    Scored,
    StartReplica,
    Train,
    Trained,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import replay
from streamrl.record.attribution import attribute
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure
from streamrl.record.timeline import read_timeline
from streamrl.report.figures import timeline_figure
from streamrl.report.pictures.step_timeline import trained_on_replicas
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.gpu_pools import sides_of
from streamrl.sim.world import simulate
from tests.hand_traces import HandTrace
from tests.runs import small_run
from tests.test_attribution import gpu_seconds
from tests.test_colocation import H800, shared_run

EXAMPLE = Path(__file__).parent.parent / "examples" / "colocated.toml"


def test_the_example_is_ppo_on_32_gpus_that_both_sides_share(tmp_path: Path) -> None:
    run = load_run(EXAMPLE, ("algorithm.prompts_per_step=64", "algorithm.steps=3"))
    trace = simulate(run)
    metrics = measure(trace)
    assert metrics.num_gpus == {"shared": 32}
    assert metrics.cost_per_step == pytest.approx(metrics.step_time * 32 * H800.price / 3600)
    assert metrics.busy["score"] > 0 and metrics.idle["skew"] > 0
    assert replay(trace) is None
    timeline_figure(trace, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(("trainer_ranks", "rows"), [(2, 8), (1, 4)])
def test_a_figure_shows_training_on_the_replicas_whose_gpus_train(
    trainer_ranks: int, rows: int
) -> None:
    trace = simulate(shared_run(trainer__data_parallel=trainer_ranks))
    timeline = read_timeline(trace)
    trained = trained_on_replicas(
        trace.run.rollout, trace.run.trainer, trace.run.policies.shares_gpus, timeline
    )
    assert list(trained) == list(range(rows))
    assert {span.activity for span in trained[0]} == {"train"}
    apart = simulate(small_run())
    assert (
        trained_on_replicas(
            apart.run.rollout,
            apart.run.trainer,
            apart.run.policies.shares_gpus,
            read_timeline(apart),
        )
        == {}
    )


def gpus_of(run: Run) -> dict[str, int]:
    """Return the GPUs of each side."""
    return {side.name: side.num_gpus for side in sides_of(run)}


def test_shared_gpus_are_paid_for_once() -> None:
    run = shared_run()
    assert gpus_of(run) == {"shared": 8}
    assert PaidGpus.of(run).dollars_per_second == pytest.approx(8 * H800.price / 3600)
    fewer = shared_run(trainer__data_parallel=1)
    assert gpus_of(fewer) == {"shared": 4, "rollout": 4}
    assert PaidGpus.of(fewer).dollars_per_second == pytest.approx(8 * H800.price / 3600)
    more = shared_run(rollout__replicas=3)
    assert gpus_of(more) == {"shared": 3, "trainer": 5}
    assert PaidGpus.of(more).dollars_per_second == pytest.approx(8 * H800.price / 3600)


def colocated(replicas: int, trainer_gpus: int, **changes: object) -> HandTrace:
    """Return a trace of a run that trains on as many of the GPUs that generate, or more."""
    return HandTrace(
        replicas,
        policies__system="colocated",
        trainer__pipeline_parallel=trainer_gpus,
        **changes,
    )


def test_shared_gpus_generate_then_train_and_count_once() -> None:
    hand = colocated(2, 2, algorithm__prompts_per_step=2, algorithm__steps=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(10.0, 0, run_time=10.0, prefill_time=2.0)
    hand.generated(30.0, 1, run_time=30.0)
    hand.command(30.0, Score((0, 1), 0))
    hand.at(33.0, Scored((0, 1), 0))
    hand.train(33.0, 40.0, 1, 0, 1)
    hand.command(40.0, PushWeights(1, 0))
    hand.draw(40.0, 2, 2)
    hand.at(44.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=True), LoadWeights(1, 1, drain=True))
    hand.at(45.0, WeightsLoaded(0, 1, 1.0), Generate(2, 0, 0))
    hand.at(45.0, WeightsLoaded(1, 1, 1.0), Generate(3, 1, 0))
    hand.generated(50.0, 2, run_time=5.0, version=1)
    hand.generated(50.0, 3, run_time=5.0, version=1)
    hand.train(50.0, 60.0, 2, 2, 3)
    assert gpu_seconds(hand) == {
        "prefill": 2,
        "decode": 8 + 30 + 2 * 5,
        "score": 2 * 3,
        "train": 2 * (7 + 10),
        "sync": 2 * 5,  # push and load
        "skew": 20,  # the first replica, while the second goes on
    }
    assert attribute(hand.trace).gpu_seconds == 2 * 60


@pytest.mark.parametrize(
    ("replicas", "trainer_gpus", "pipeline"), [(3, 2, 6), (2, 3, 10), (2, 2, 0)]
)
def test_gpus_that_only_one_side_has_wait_for_the_other(
    replicas: int, trainer_gpus: int, pipeline: float
) -> None:
    hand = colocated(replicas, trainer_gpus, algorithm__prompts_per_step=replicas)
    hand.begin()
    hand.draw(0.0, 1, replicas)
    for replica in range(replicas):
        hand.generate(0.0, replica, replica=replica)
    for rollout in range(replicas):
        hand.generated(10.0, rollout, run_time=10.0)
    hand.train(10.0, 16.0, 1, *range(replicas))
    shares = gpu_seconds(hand)
    assert shares.pop("pipeline", 0) == pipeline
    assert shares == {"decode": 10 * replicas, "train": 6 * trainer_gpus}


def test_a_replica_that_is_replaced_while_its_gpu_trains_costs_nothing() -> None:
    hand = colocated(2, 2, algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(10.0, 0, run_time=10.0)
    hand.generated(10.0, 1, run_time=10.0)
    hand.command(10.0, Train((0, 1), 0))
    hand.at(12.0, ReplicaLost(0, "gone"), StartReplica(2, 0))
    hand.at(15.0, ReplicaStarted(2, 0))
    hand.at(20.0, Trained((0, 1), 0))
    assert gpu_seconds(hand) == {"decode": 20, "train": 20}


def test_an_aborted_rollout_that_outlasts_its_group_takes_its_gpu_from_training() -> None:
    hand = colocated(2, 2, algorithm__prompts_per_step=1)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, replica=0)
    hand.generate(0.0, 1, replica=1)
    hand.generated(10.0, 0, run_time=10.0)
    hand.command(10.0, Abort(1, 0), Drop(1, "failed 3 times"), Train((0,), 0))
    hand.at(12.0, Generated(1, 50, "aborted", 0, 12.0, 0.0))
    hand.at(20.0, Trained((0,), 0))
    assert gpu_seconds(hand) == {"decode": 10 + 12, "train": 2 * 10 - 2}

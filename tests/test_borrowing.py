"""GPUs of replicas that train while nothing is left to generate: when they join, what that takes, and what may fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Event,
    Lend,
    Lent,
    ReplicaLost,
    ResizeTrainer,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    TakeBack,
    TakenBack,
    Train,
    TrainerLost,
    TrainerResized,
    WeightsPushed,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace
from streamrl.executor.launchers.placement import PlacedRoles, Placement
from streamrl.executor.world import RealWorld
from streamrl.record.attribution import attribute_sides
from streamrl.record.charges import read_paid
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.lending import planned_borrowing
from streamrl.sim.steady_state import measure_steady
from streamrl.targets.execute_limits import check_back_end_of
from tests.runs import call_at, checked_world, lose_replica_at, lose_trainer_at, of, small_run
from tests.test_elastic import elastic_run, execute
from tests.test_execute import execute as execute_scripted
from tests.test_faults import fault
from tests.traces import (
    check_whole,
    counted,
)

SYSTEMS = ("disaggregated", "stream-sync", "one-step-async", "stream-async", "fully-async")
BORROWS = {
    "algorithm.steps": 6,
    "algorithm.prompts_per_step": 16,
    "cluster.pools.near.nodes": 2,
    "rollout.pool": "near",
    "rollout.replicas": 4,
    "trainer.zero": 0,
    "trainer.borrows": True,
    "costs.training_factor": 0.01,
}
"""Four replicas of one GPU suffice for one more rank of four GPUs. Training takes far longer than generation."""


def borrowing_run(**changes: Any) -> Run:
    return small_run({**BORROWS, **{k.replace("__", "."): v for k, v in changes.items()}})


def simulate(run: Run) -> Trace:
    trace = checked_world(run).run()
    check_whole(trace)
    return trace


def story(trace: Trace, *kinds: type) -> list[Any]:
    """Return the events and commands of some kinds, in order, each command after its event."""
    told = (each for entry in trace.entries for each in (entry.event, *entry.commands))
    return [each for each in told if isinstance(each, kinds)]


# When GPUs change sides ---------------------------------------------------------------------------


def test_gpus_of_replicas_join_before_a_step_and_leave_after_it() -> None:
    trace = simulate(borrowing_run(policies__system="disaggregated", algorithm__steps=2))
    kinds = (TakeBack, ResizeTrainer, Train, Step, Lend, WeightsPushed)
    names = [name for name, _ in groupby(type(each).__name__ for each in story(trace, *kinds))]
    before, after = ["TakeBack", "ResizeTrainer", "Train", "Step"], ["ResizeTrainer", "Lend"]
    assert [name for name in names if name != "WeightsPushed"][:6] == before + after
    assert names.index("WeightsPushed") < names.index("Lend")
    assert [each.data_parallel for each in story(trace, ResizeTrainer)][:2] == [2, 1]
    assert {each.version for each in story(trace, Lend)} == {1}, "they wake up with the new weights"


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_borrows_and_returns_without_losing_a_rollout(system: str) -> None:
    trace = simulate(borrowing_run(policies__system=system, execute__checkpoint_every=2))
    counts = counted(trace)
    assert counts[TakenBack] >= counts[Lent] > 0
    assert counts[TrainerResized] > 2
    assert measure(trace).num_steps == 6


def test_ranks_join_in_the_middle_of_a_step_but_never_leave_there() -> None:
    trace = simulate(borrowing_run(policies__system="stream-async"))
    begun, joined_within = False, 0
    for each in story(trace, Train, Stepped, ResizeTrainer):
        if isinstance(each, ResizeTrainer):
            joined_within += begun and each.data_parallel == 2
            assert each.data_parallel == 2 or not begun
        else:
            begun = isinstance(each, Train)
    assert joined_within


def test_borrowing_saves_half_of_the_passes_less_both_switches() -> None:
    changes = {"policies__system": "disaggregated", "algorithm__prompts_per_step": 64}
    times, busy = {}, 0.0
    for borrows in (False, True):
        trace = simulate(borrowing_run(**changes, trainer__borrows=borrows))
        stepped = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
        times[borrows] = (stepped[-1] - stepped[0]) / (len(stepped) - 1)
        busy = busy or measure(trace).busy["train"]
    run = borrowing_run(**changes)
    resizing = Costs.load(run).resizing
    assert resizing is not None
    switches = resizing.time(1, 2) + resizing.time(2, 1)
    training = busy * 8 * times[False] / run.trainer.num_gpus
    saved = times[False] - times[True] + switches
    assert 0.4 * training < saved < 0.5 * training, "the update of the weights takes as long"


def test_a_trainer_with_short_steps_borrows_nothing_after_it_has_learnt_that() -> None:
    short = {"costs__training_factor": 1.0, "algorithm__steps": 8}
    trace = simulate(borrowing_run(policies__system="disaggregated", **short))
    taken_at = [entry.time for entry in trace.entries if of(TakeBack, list(entry.commands))]
    stepped_at = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    assert taken_at and not any(time > stepped_at[1] for time in taken_at)


def test_gpus_that_train_count_as_the_trainers_and_cost_nothing_more() -> None:
    run = borrowing_run(policies__system="disaggregated")
    trace = simulate(run)
    sides = attribute_sides(trace)
    for found in (sides.whole, *sides.sides.values()):
        assert sum(found.busy.values()) + sum(found.idle.values()) == pytest.approx(1)
    end = trace.entries[-1].time
    assert sides.whole.gpu_seconds == pytest.approx(run.num_gpus * end)
    borrowed = (sides.sides["trainer"].gpu_seconds - run.trainer.num_gpus * end) / 4
    metrics = measure(trace)
    assert metrics.borrowing is not None and metrics.borrowing.num_borrowed > 0
    assert not metrics.resizes
    assert 0 < borrowed < end
    assert sides.sides["trainer"].idle["resize"] > 0
    assert sum(read_paid(trace, 0.0, end).used.values()) == pytest.approx(run.num_gpus)


# What may fail ------------------------------------------------------------------------------------


def test_a_replica_that_dies_while_its_gpus_train_is_replaced_after_the_step() -> None:
    run = borrowing_run(policies__system="disaggregated")
    world = checked_world(run)
    first = simulate(run)
    joined = next(e.time for e in first.entries if isinstance(e.event, TrainerResized))
    call_at(world, joined + 0.5, lambda: world.lose(1, "pulled the plug"))
    trace = world.run()
    check_whole(trace)
    kinds = (ReplicaLost, StartReplica, Stepped, TrainerResized)
    names = [type(each).__name__ for each in story(trace, *kinds)]
    after = names[names.index("ReplicaLost") :]
    assert after[:4] == ["ReplicaLost", "Stepped", "TrainerResized", "StartReplica"]
    assert measure(trace).num_steps == 6


@settings(max_examples=15, deadline=None)
@given(
    system=st.sampled_from(SYSTEMS),
    seed=st.integers(0, 99),
    replicas=st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(0, 3)), max_size=3),
    trainers=st.lists(st.floats(0.0, 60.0), max_size=2),
)
def test_nothing_is_lost_whatever_dies_when(
    system: str, seed: int, replicas: list[tuple[float, int]], trainers: list[float]
) -> None:
    run = borrowing_run(
        policies__system=system,
        seed=seed,
        policies__max_restarts=9,
        execute__checkpoint_every=2,
        algorithm__prompts_per_step=4,
    )
    world = checked_world(run)
    for time, which in replicas:
        lose_replica_at(world, time, which)
    for time in trainers:
        lose_trainer_at(world, time, 0)
    trace = world.run()
    check_whole(trace)
    assert measure(trace).num_steps == 6


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("trainer-dies-lending", TrainerLost), ("replica-dies-returning", ReplicaLost)],
)
@pytest.mark.parametrize("system", ["disaggregated", "stream-async"])
def test_a_simulated_run_survives_a_death_at_each_switch(
    system: str, kind: str, lost: type
) -> None:
    trace = simulate(borrowing_run(policies__system=system, faults=[fault(kind, step=1)]))
    assert counted(trace)[lost] == 1
    assert measure(trace).num_steps == 6


# Executed, with roles that compute nothing --------------------------------------------------------


def executed_run(directory: Path, **changes: Any) -> Run:
    keys = {"trainer__borrows": True, "rollout__pool": "near", "algorithm__steps": 4, **changes}
    return elastic_run(directory, **keys)


@pytest.mark.parametrize("system", ["disaggregated", "stream-async"])
def test_an_executed_run_borrows_and_replays(tmp_path: Path, system: str) -> None:
    run = executed_run(tmp_path, policies__system=system, algorithm__prompts_per_step=6)
    trace, _ = execute(run, slowest=0.02, generation_time=0.001)
    counts = counted(trace)
    assert counts[TakenBack] >= counts[Lent] > 0
    assert measure(trace).num_steps == 4


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("trainer-dies-lending", TrainerLost), ("replica-dies-returning", ReplicaLost)],
)
def test_an_executed_run_survives_a_death_at_each_switch(
    tmp_path: Path, kind: str, lost: type
) -> None:
    changes = {"policies__system": "disaggregated", "execute__checkpoint_every": 2}
    run = executed_run(tmp_path, faults=[fault(kind, step=1)], **changes)
    trace, _ = execute(run, is_local=True)
    assert counted(trace)[lost] == 1
    assert measure(trace).num_steps == 4


def test_a_run_that_ends_while_gpus_are_borrowed_is_resumed(tmp_path: Path) -> None:
    changes = {"policies__system": "disaggregated", "execute__checkpoint_every": 1}
    run = executed_run(tmp_path, **changes)

    def end(world: RealWorld, event: Event, state: State) -> None:
        if state.leader.version == 2 and state.leader.has_borrowed:
            world.interrupt("a test ends it")

    with pytest.raises(RuntimeError, match="a test ends it"):
        execute(run, end)
    trace = execute_scripted(run, resume=True)
    check_whole(trace)
    assert [each.version for each in story(trace, Stepped)] == [3, 4]
    assert story(trace, StartTrainer)[0] == StartTrainer(0, 2), "with its own ranks"


def test_borrowed_ranks_are_placed_on_the_gpus_of_replicas(tmp_path: Path) -> None:
    run = executed_run(tmp_path, cluster__pools__near__gpu="cpu")
    placement = Placement(PlacedRoles.of(run))
    replicas = [placement.replica(number).gpus for number in range(run.rollout.num_replicas)]
    own = run.trainer.num_gpus
    assert [place.gpus for place in placement.trainers[0][own:]] == replicas


# What is refused, and what a plan says ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__pool": "far"}, "rollout.pool must be 'near' with trainer.borrows"),
        ({"rollout__replicas": 3}, "rollout.replicas must have a multiple of 4 GPUs"),
        ({"trainer__zero": 3, "trainer__data_parallel": 2}, "trainer.zero must be 0 with trainer"),
        ({"lending": {}}, r"trainer.borrows does not work with \[lending\]"),
        ({"policies__system": "colocated"}, "trainer.borrows does not work with policies.system"),
        (
            {"trainer__resize": [{"step": 2, "data_parallel": 2}]},
            "trainer.resize does not work with trainer.borrows",
        ),
        ({"policies__resize": "adjust"}, "policies.resize must be 'keep' with trainer.borrows"),
    ],
)
def test_what_cannot_be_borrowed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        borrowing_run(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer__backend": "deepspeed"}, "trainer.backend must be 'torch'"),
        ({"trainer__tensor_parallel": 4, "rollout__replicas": 4}, "tensor_parallel must be 1"),
        ({"execute__launcher": "ray"}, "execute.launcher must be 'local'"),
    ],
)
def test_ranks_that_cannot_join_are_refused_before_anything_starts(
    changes: dict[str, Any], words: str
) -> None:
    run = borrowing_run(**{"trainer__tensor_parallel": 1, **changes})
    with pytest.raises(RunError, match=words) as refused:
        check_back_end_of(run, 0)
    assert "or remove trainer.borrows" in str(refused.value)


def test_a_plan_borrows_where_a_step_becomes_faster() -> None:
    long = {"policies__system": "disaggregated", "algorithm__prompts_per_step": 64}
    run = borrowing_run(trainer__borrows=False, **long)
    alone = measure_steady(run).step_time
    with ThreadPoolExecutor(1) as pool:
        found = planned_borrowing(run, True, alone, pool)
        short = borrowing_run(trainer__borrows=False, costs__training_factor=1.0)
        none = planned_borrowing(short, True, measure_steady(short).step_time, pool)
        far = planned_borrowing(small_run(), True, 1.0, pool)
    assert found is not None and found.is_taken and found.step_time_lent < 0.9 * alone
    assert none is not None and not none.is_taken
    assert far is not None and "trainer.zero must be 0" in far.reason

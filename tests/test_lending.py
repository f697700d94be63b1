"""GPUs of the trainer that generate while it would wait: when they change sides, what that takes, and what may fail."""

from __future__ import annotations

import asyncio
import contextlib
import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from streamrl.cli.watch_run import RunWatch
from streamrl.engine.messages import (
    Abort,
    Generate,
    Generated,
    Lend,
    Lent,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    Stepped,
    TakeBack,
    TakenBack,
    Train,
    TrainerLost,
)
from streamrl.engine.policies.lending import STEP_DOWN, STEP_UP, LendTrainer
from streamrl.engine.trace import Trace
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import attribute_sides
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.colocation import LendingCosts, PhaseChange
from streamrl.sim.costs.corrections import own_switch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.replica import GIVE_UP_SHARE
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import (
    Script,
    checked_world,
    done,
    generated,
    lose_replica_at,
    lose_trainer_at,
    of,
    small_run,
)
from tests.scripted import make_world
from tests.test_execute import execute, real_run
from tests.test_faults import fault
from tests.traces import (
    check_whole,
    counted,
)

SYSTEMS = ("disaggregated", "stream-sync", "stream-async", "fully-async")
LENDING: dict[str, Any] = {"lending": {"share": 1.0, "replicas": 1}}
BOUND_BY_GENERATION = {
    "algorithm.steps": 6,
    "algorithm.prompts_per_step": 64,
    "algorithm.group_size": 8,
    "rollout.replicas": 2,
    "rollout.max_running": 256,
    "rollout.max_tokens": 4096,
    "workload.lengths.scale": 0.2,
    "trainer.data_parallel": 2,
    "framework": {},
}
"""Two replicas beside a trainer of eight GPUs."""
NUM_LENT = 8
"""Replicas of one GPU each on those of the trainer."""
HANDLING_TIME = 0.001


def lent_run(**changes: Any) -> Run:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run({"algorithm.steps": 5, "execute.checkpoint_every": 2, "lending": {}, **keys})


def simulate(run: Run) -> Trace:
    world = checked_world(fill_policies(run, Costs.load(run)))
    trace = world.run()
    check_whole(trace)
    return trace


# When GPUs change sides ---------------------------------------------------------------------------


def begun(**changes: Any) -> tuple[Script, list[Any]]:
    """Return a script in which one replica on the trainer's GPUs has started, and the last commands."""
    s = Script(small_run({"algorithm.steps": 4, **LENDING, **changes}))
    s.draw(s.begin())
    return s, s.tell(ReplicaStarted(2, 0))


def test_replicas_on_trainer_gpus_start_once_the_trainer_is_up_and_are_lent_its_gpus() -> None:
    s, commands = begun()
    assert of(Lend, commands) == [Lend(2, 0)]
    assert s.state.leader.is_lent and not s.state.leader.is_free


def test_a_lent_replica_gets_rollouts_that_others_got_last() -> None:
    s, commands = begun(**{"algorithm.prompts_per_step": 6})
    moved = of(Abort, commands)
    assert moved and {abort.replica for abort in moved} <= {0, 1}
    s.tell(Lent(2, 0, 0.1))
    got = [c for abort in moved for c in s.tell(aborted(abort.rollout)) if isinstance(c, Generate)]
    assert {each.replica for each in got} == {2}


def aborted(rollout: int) -> Generated:
    return generated(rollout, tokens=1, finish="aborted")


def test_gpus_go_back_when_the_share_of_a_step_is_ready_and_then_the_trainer_trains() -> None:
    s, _ = begun(
        **{"lending": {**LENDING["lending"], "until": 0.5}, "policies.system": "stream-sync"}
    )
    s.tell(Lent(2, 0, 0.1))
    assert not of(TakeBack, s.finish(0))
    commands = s.finish(1)
    assert of(TakeBack, commands) == [TakeBack(2)] and not of(Train, commands)
    assert not s.state.fleet.replicas[2].is_serving
    assert of(Train, s.tell(TakenBack(2, 0.1))) == [Train((0, 1), 0)]


def test_rollouts_on_gpus_that_go_back_are_aborted_first_and_go_on_elsewhere() -> None:
    s, commands = begun(
        **{"algorithm.prompts_per_step": 6, "lending": {**LENDING["lending"], "until": 0.2}}
    )
    s.tell(Lent(2, 0, 0.1))
    for abort in of(Abort, commands):
        s.tell(aborted(abort.rollout))
    there = set(s.state.fleet.replicas[2].rollouts)
    own = [r for r in s.state.rollouts if r not in there][:4]
    commands = s.finish(*own)
    assert {abort.rollout for abort in of(Abort, commands)} == there
    places = [type(c) for c in commands if isinstance(c, Abort | TakeBack)]
    assert places == [Abort] * len(there) + [TakeBack]
    (again,) = of(Generate, s.tell(aborted(min(there))))
    assert again.replica != 2 and again.prefix == 1


def test_gpus_are_lent_only_after_the_newest_weights_were_pushed() -> None:
    always = {**LENDING["lending"], "until": 1.0}
    s, _ = begun(**{"policies.system": "stream-sync", "lending": always})
    s.tell(Lent(2, 0, 0.1))
    s.finish(0, 1, 2, 3)
    s.tell(TakenBack(2, 0.1))
    commands = s.draw(s.step(1))
    assert not of(Lend, commands) and s.state.pushing == 1
    commands = s.tell(done(PushWeights(1, 0)))
    assert of(Lend, commands) == [Lend(2, 1)] and of(LoadWeights, commands)
    assert {each.replica for each in of(Generate, commands)} == {0, 1, 2}


def test_the_share_rises_while_the_trainer_waits_and_falls_while_it_does_not() -> None:
    s, _ = begun()
    policy = LendTrainer(0.6, 2, adapts=True)
    for has_waited, change in ((True, 0.0), (True, STEP_UP), (False, 0.0), (False, -STEP_DOWN)):
        before = policy.until
        policy._adapt(s.state, has_waited=has_waited)
        assert policy.until - before == pytest.approx(change)


def test_a_run_shows_rollouts_of_lent_replicas_and_no_sleeping_replica_as_starting() -> None:
    s, _ = begun(**{"policies.system": "stream-sync"})
    run, console = s.run, Console(file=io.StringIO())
    watch = RunWatch(4, [kind.max_running for kind in run.replica_kinds], console)
    watch.see(Lent(2, 0, 0.1), s.state, 1.0)
    assert "1 of 3 replicas start" in watch._facts
    s.tell(Lent(2, 0, 0.1))
    s.finish(0, 1)
    s.tell(TakenBack(2, 0.1))
    watch.see(TakenBack(2, 0.1), s.state, 2.0)
    assert s.state.fleet.asleep and "start" not in watch._facts


# What it takes ------------------------------------------------------------------------------------


def test_both_switches_take_what_a_colocated_system_takes_to_change_sides() -> None:
    run = lent_run(framework={})
    alone = resolve(run.of_kind(run.rollout.num_kinds))
    own = own_switch(run.framework, alone.trainer.pool.gpu)
    change = PhaseChange.of(alone.replica, alone.trainer, own)
    costs = LendingCosts.of(alone.replica, alone.trainer, own)
    assert costs.lend_time > own.seconds > 0
    assert costs.lend_time + costs.return_time == pytest.approx(change.push_time + change.wake_time)
    assert Costs.load(run).lending == costs


def test_gpu_seconds_of_switches_are_a_cause_of_their_own() -> None:
    run = lent_run(lending={"until": 1.0}, algorithm__prompts_per_step=16)
    trace, lending = simulate(run), Costs.load(run).lending
    assert lending is not None and run.lent is not None
    found, counts = attribute_sides(trace), counted(trace)
    switched = counts[Lent] * lending.lend_time + counts[TakenBack] * lending.return_time
    trainer = found.sides["trainer"]
    gpus = run.lent.gpus_per_replica
    assert trainer.idle["switch"] * trainer.gpu_seconds == pytest.approx(switched * gpus)
    assert trainer.gpu_seconds == pytest.approx(run.trainer.num_gpus * trace.entries[-1].time)
    assert sum({**found.whole.busy, **found.whole.idle}.values()) == pytest.approx(1)
    generating = sum(trainer.busy[each] for each in ("prefill", "decode", "underfilled"))
    assert generating > 0
    every = (1, run.algorithm.steps)
    lent = measure(trace, every).lending
    stepped_at = [0.0, *(e.time for e in trace.entries if isinstance(e.event, Stepped))]
    lent_at = [e.time for e in trace.entries if of(Lend, e.commands)]
    steps = [any(a <= at < b for at in lent_at) for a, b in pairwise(stepped_at)]
    assert lent is not None and (lent.steps, lent.num_lent) == (5, sum(steps))
    assert lent.generating > 0 and lent.switching > 0
    assert measure(simulate(lent_run(lending=None)), every).lending is None


def returns(most_running: int) -> list[tuple[float, int]]:
    """Simulate a run with lending, where a rollout takes the controller `HANDLING_TIME`; return each return's seconds and aborts."""
    run = small_run(
        {
            **BOUND_BY_GENERATION,
            "policies.system": "stream-sync",
            "lending": {"tensor_parallel": 1, "memory_utilization": 0.6},
            "rollout.max_running": most_running,
        }
    )
    costs = replace(Costs.load(run), handling_time=HANDLING_TIME)
    trace = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run()
    asked: dict[int, tuple[float, int]] = {}
    found: list[tuple[float, int]] = []
    for time, event, commands in trace.entries:
        if isinstance(event, TakenBack):
            since, num_aborted = asked.pop(event.replica)
            found.append((time - since, num_aborted))
        for command in of(TakeBack, commands):
            own = [each for each in of(Abort, commands) if each.replica == command.replica]
            asked[command.replica] = time, len(own)
    return found


def test_gpus_return_after_the_controller_has_handled_each_aborted_rollout() -> None:
    found = returns(most_running=64)
    assert max(num for _, num in found) > 5
    assert all(wait >= GIVE_UP_SHARE * HANDLING_TIME * num for wait, num in found)


def test_aborted_rollouts_that_wait_in_the_queue_take_the_controller_no_time() -> None:
    found = returns(most_running=2)
    most_begun = 2 * NUM_LENT
    assert max(num for _, num in found) > most_begun
    assert all(wait <= GIVE_UP_SHARE * HANDLING_TIME * (most_begun + 1) for wait, _ in found)


@pytest.mark.parametrize("system", ["stream-sync", "stream-async"])
def test_a_run_whose_trainer_waits_for_rollouts_is_faster(system: str) -> None:
    runs = (
        small_run({**BOUND_BY_GENERATION, "policies.system": system, **lending})
        for lending in ({}, {"lending": {"tensor_parallel": 1, "memory_utilization": 0.6}})
    )
    without, with_lending = (
        SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run().entries[-1].time
        for run in runs
        for costs in (Costs.load(run),)
    )
    assert with_lending < 0.8 * without


def test_a_trainer_that_never_waits_lends_nothing_after_it_has_learnt_that() -> None:
    slow = {"costs.training_factor": 0.05, "algorithm.steps": 8, "policies.system": "stream-async"}
    trace = simulate(lent_run(**{key.replace(".", "__"): value for key, value in slow.items()}))
    lent_at = [entry.time for entry in trace.entries if of(Lend, entry.commands)]
    stepped_at = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    assert not any(time > stepped_at[3] for time in lent_at)


# What may fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_lends_and_takes_back_without_losing_a_rollout(system: str) -> None:
    trace = simulate(lent_run(policies__system=system, algorithm__prompts_per_step=6))
    counts = counted(trace)
    assert counts[Lent] == counts[TakenBack] > 0
    assert measure(trace).num_steps == 5


@settings(max_examples=20, deadline=None)
@given(
    system=st.sampled_from(SYSTEMS),
    seed=st.integers(0, 99),
    until=st.sampled_from([0.1, 0.5, 1.0]),
    replicas=st.lists(st.tuples(st.floats(0.0, 12.0), st.integers(0, 3)), max_size=3),
    trainers=st.lists(st.floats(0.0, 12.0), max_size=2),
)
def test_nothing_is_lost_whatever_dies_when(
    system: str,
    seed: int,
    until: float,
    replicas: list[tuple[float, int]],
    trainers: list[float],
) -> None:
    run = lent_run(
        policies__system=system,
        seed=seed,
        lending={"until": until},
        algorithm__prompts_per_step=4,
        policies__max_restarts=9,
    )
    world = checked_world(fill_policies(run, Costs.load(run)))
    for time, which in replicas:
        lose_replica_at(world, time, which)
    for time in trainers:
        lose_trainer_at(world, time, 0)
    trace = world.run()
    check_whole(trace)
    assert measure(trace).num_steps == 5


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("trainer-dies-lending", TrainerLost), ("replica-dies-returning", ReplicaLost)],
)
@pytest.mark.parametrize(
    ("system", "step"), [("stream-sync", 1), ("stream-sync", 3), ("stream-async", 1)]
)
def test_a_simulated_run_survives_a_death_at_each_switch(
    system: str, step: int, kind: str, lost: type
) -> None:
    trace = simulate(lent_run(policies__system=system, faults=[fault(kind, step=step)]))
    assert counted(trace)[lost] == 1
    assert measure(trace).num_steps == 5


@pytest.mark.parametrize("system", ["stream-sync", "stream-async"])
def test_an_executed_run_lends_and_replays(tmp_path: Path, system: str) -> None:
    run = real_run(tmp_path, policies__system=system, **LENDING, algorithm__prompts_per_step=6)
    trace = execute(run, generation_time=0.03)
    check_whole(trace)
    assert counted(trace)[Lent] == counted(trace)[TakenBack] > 0


def execute_in_processes(run: Run) -> Trace:
    """Execute a run whose scripted roles, in processes of their own, take long enough to lend in the first step."""

    async def go() -> Trace:
        world = make_world(run, {"is_local": True, "slowest": 0.02, "generation_time": 0.2})
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("trainer-dies-lending", TrainerLost), ("replica-dies-returning", ReplicaLost)],
)
def test_an_executed_run_survives_a_death_at_each_switch(
    tmp_path: Path, kind: str, lost: type
) -> None:
    changes = {
        "algorithm__steps": 3,
        "execute__checkpoint_every": 2,
        "faults": [fault(kind, step=1)],
    }
    trace = execute_in_processes(real_run(tmp_path, **LENDING, **changes))
    check_whole(trace)
    assert counted(trace)[lost] == 1
    assert measure(trace).num_steps == 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"policies__system": "colocated"},
            r"policies\.system 'colocated' does not work with \[lending\]",
        ),
        (
            {"policies__system": "one-step-async"},
            r"set it to 'stream-async', or remove \[lending\]",
        ),
        (
            {"policies__system": "fully-async", "policies__weight_sync": "barrier"},
            r"set policies\.weight_sync to 'drain-then-load', or policies\.max_staleness to 0",
        ),
        (
            {"policies__system": "disaggregated", "policies__max_staleness": 1},
            r"'barrier' does not work with \[lending\] if rollouts may be stale",
        ),
        ({"policies__migration": "consolidate"}, r"set it to 'none', or remove \[lending\]"),
        ({"lending": {"replicas": 9}}, r"lending\.replicas=9: .* the trainer has only 4; lower it"),
        ({"lending": {"until": 0.0}}, r"lending\.until must be in \(0, 1\], got 0"),
    ],
)
def test_what_cannot_be_lent_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RunError, match=line):
        lent_run(**changes)


def test_faults_of_switches_need_a_run_that_lends() -> None:
    with pytest.raises(RunError, match=r"faults\.0\.kind .* add the section \[lending\]"):
        small_run({"faults": [fault("trainer-dies-lending", step=1)]})

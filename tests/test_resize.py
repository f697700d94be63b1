"""More replicas, and fewer: when, how many, and that no rollout notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.estimates import StepTimer, StepTimes
from streamrl.engine.fleet import Fleet
from streamrl.engine.messages import (
    Abort,
    Command,
    Failed,
    Generate,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Resize,
    StartReplica,
    StopReplica,
    Verified,
    Woke,
)
from streamrl.engine.trace import Trace, replay
from streamrl.executor.launchers.handles import Handle
from streamrl.record.attribution import attribute
from streamrl.record.charges import read_replicas
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from tests.runs import (
    Script,
    checked_world,
    done,
    generated,
    lose_replica_at,
    of,
    singles,
    small_run,
)
from tests.scripted import REPLICA, TRAINER, ScriptedLauncher, make_world
from tests.test_execute import real_run
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
    staleness_of,
)

LINEAR = [[1, 1.0], [2, 2.0]]
"""Seconds of a decode step in proportion to the batch: twice the replicas take half the time."""
FLAT = [[1, 1.0], [256, 1.0]]
"""More replicas take nothing off: any lag is worth one."""


def adjusted(**changes: Any) -> Script:
    """Return a run of four rollouts a step on two replicas that come and go in twos."""
    return singles(
        4,
        algorithm__steps=20,
        **{
            "policies__system": "disaggregated",
            "policies__resize": "adjust",
            "policies__resize_unit": 2,
            "policies__resize_window": 1,
            "policies__latency": LINEAR,
            **changes,
        },
    )


class Steps:
    """Plays one step after the other, each as long as it is told to be."""

    def __init__(self, s: Script) -> None:
        self.s = s
        self._settle(s.begin())

    def play(self, generation_time: float, training_time: float) -> list[Command]:
        """Let what was sent be generated, trained on and loaded; return what the step led to."""
        s = self.s
        ended_at = self.began_at + generation_time
        for rollout in list(s.state.rollouts):
            s.now = ended_at - 1
            s.tell(generated(rollout, version=s.state.leader.version))
        commands = s.tell(*(Verified(rollout, 1.0) for rollout in list(s.state.rollouts)))
        version = s.state.leader.version
        while s.state.leader.version == version:
            assert s.state.leader.command is not None, "the trainer has nothing to do"
            s.now += training_time / 2 - 1  # once for the gradient, once for the step
            commands = s.tell(done(s.state.leader.command))
        self._settle(commands)
        return commands

    def come_up(self) -> None:
        """Let every replica that starts serve, and load the newest weights."""
        fleet = self.s.state.fleet
        starting = [r for r in fleet.replicas.values() if not r.is_serving]
        self._settle([c for r in starting for c in self.s.tell(ReplicaStarted(r.id, r.version))])

    def _settle(self, commands: list[Command]) -> None:
        """Answer whatever is asked of the workload and the weights, until rollouts are generated."""
        while commands:
            if of(Generate, commands):
                self.began_at = self.s.now
            asked = [c for c in commands if isinstance(c, PushWeights | LoadWeights)]
            commands = self.s.draw(commands) + self.s.tell(*map(done, asked))


# When ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("training_time", "grows"), [(49.0, True), (51.0, False), (120.0, False)])
def test_a_unit_is_added_where_generation_lags_by_at_least_what_it_takes_off(
    training_time: float, grows: bool
) -> None:
    steps = Steps(adjusted())
    commands = steps.play(100.0, training_time)  # two more replicas take off half of 100 s
    assert steps.s.state.leader.pace.last == StepTimes(
        1, 100.0, training_time, 2, update_time=training_time / 2
    )
    assert of(Resize, commands) == ([Resize(4)] if grows else [])
    assert of(StartReplica, commands) == ([StartReplica(2, 0), StartReplica(3, 0)] if grows else [])


def test_the_median_of_the_last_steps_decides_once_there_are_as_many() -> None:
    steps = Steps(adjusted(policies__resize_window=3))
    for training_time in (10.0, 90.0, 90.0, 10.0):  # of three in a row one or two lag by enough
        grown = of(Resize, steps.play(100.0, training_time))
        assert not grown
    assert of(Resize, steps.play(100.0, 10.0)) == [Resize(4)]


def test_the_next_decision_waits_for_a_step_that_the_new_replicas_were_there_for() -> None:
    steps = Steps(adjusted())
    assert of(Resize, steps.play(100.0, 10.0)) == [Resize(4)]
    assert not of(Resize, steps.play(100.0, 10.0))  # they are still coming up
    steps.come_up()
    assert steps.s.state.fleet.num_up == 4
    assert not of(Resize, steps.play(100.0, 10.0))  # its rollouts were sent before
    assert of(Resize, steps.play(100.0, 10.0)) == [Resize(6)]


def test_no_more_replicas_are_added_than_there_may_be() -> None:
    steps = Steps(adjusted(policies__max_replicas=4))
    assert of(Resize, steps.play(100.0, 10.0)) == [Resize(4)]
    steps.come_up()
    assert not of(Resize, steps.play(100.0, 10.0))


def test_a_unit_is_given_back_after_so_many_steps_in_which_training_was_slower_without_it_too() -> (
    None
):
    shrinks = {"rollout__replicas": 4, "policies__shrink_after": 2}
    steps = Steps(adjusted(**shrinks))
    assert not of(Resize, steps.play(100.0, 201.0))
    commands = steps.play(100.0, 201.0)  # with half the replicas generation would take 200 s
    assert of(Resize, commands) == [Resize(2)]
    assert of(StopReplica, commands) == [StopReplica(3), StopReplica(2)]
    steps = Steps(adjusted(**shrinks))
    for _ in range(4):
        assert not of(Resize, steps.play(100.0, 199.0))


def test_nothing_is_given_back_unless_it_was_asked_for() -> None:
    steps = Steps(adjusted(rollout__replicas=4))
    for _ in range(5):
        assert not of(Resize, steps.play(1.0, 100.0))


# How ----------------------------------------------------------------------------------------------


def test_a_replica_ends_only_once_it_is_idle() -> None:
    s = singles(2, policies__resize="adjust", policies__resize_unit=1, policies__latency=FLAT)
    s.draw(s.begin())
    s.engine.state.commit(Resize(1))
    (first, second) = s.state.fleet.replicas.values()
    busy = list(second.rollouts)
    assert not of(StopReplica, s.tell(generated(busy[0])))
    assert of(StopReplica, s.tell(generated(busy[1]))) == [StopReplica(second.id)]
    assert second.id not in s.state.fleet.replicas
    assert not s.state.is_finished
    s.tell(ReplicaStopped(second.id))
    assert not s.state.fleet.stopping
    assert s.state.fleet.num_lost == 0
    assert first.rollouts


def test_a_replica_that_dies_while_it_ends_is_not_replaced() -> None:
    s = singles(1, policies__resize="adjust", policies__resize_unit=1, policies__latency=FLAT)
    s.begin()
    s.engine.state.commit(Resize(1))
    (stop,) = of(StopReplica, s.tell(Woke(0.0)))
    assert not of(StartReplica, s.tell(Failed(stop, "gone")))
    assert not s.state.fleet.stopping


def test_a_replica_that_was_added_and_lost_is_replaced() -> None:
    steps = Steps(adjusted())
    steps.play(100.0, 10.0)
    steps.come_up()
    commands = steps.s.tell(ReplicaLost(3, "gone"))
    assert of(StartReplica, commands) == [StartReplica(4, steps.s.state.pushed_version)]


def test_where_steps_overlap_generation_works_for_the_older_one_first() -> None:
    pace, fleet, found = StepTimer(), Fleet(), list[StepTimes]()
    for step, began_at in ((1, 0.0), (2, 0.0), (3, 60.0)):
        pace.begin_generation(step, began_at, fleet)
    for step, ended_at in ((1, 50.0), (2, 80.0), (3, 100.0)):
        pace.end_generation(step, ended_at)
        pace.begin_work(ended_at)
        pace.end_generation(step - 1, ended_at + 1.0)  # dropped meanwhile: of no step any more
        pace.end_step(step, ended_at + 5.0)
        assert pace.last is not None
        found.append(pace.last)
    assert [step.generation_time for step in found] == [50.0, 30.0, 20.0]
    assert [step.training_time for step in found] == [5.0, 5.0, 5.0]
    assert not pace._begun and not pace._ended_at


def test_training_time_counts_what_the_trainer_works_and_generation_time_what_lies_between() -> (
    None
):
    steps = Steps(adjusted())
    for generation_time, training_time in ((70.0, 30.0), (50.0, 20.0)):
        steps.play(generation_time, training_time)
        last = steps.s.state.leader.pace.last
        assert last is not None
        assert (last.generation_time, last.training_time) == (generation_time, training_time)


# Run files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"policies.max_replicas": 9}, "between rollout.replicas=2 and 8"),
        ({"policies.max_replicas": 1}, "between rollout.replicas=2 and 8"),
        ({"policies.resize": "adjust", "rollout.replicas": 8}, "adds 8 replicas at once"),
        ({"policies.resize_window": 0}, "policies.resize_window must be at least 1"),
        ({"policies.shrink_after": 0}, "policies.shrink_after must be at least 1"),
    ],
)
def test_what_cannot_be_resized_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        small_run(changes)


# Whole runs ---------------------------------------------------------------------------------------


@st.composite
def resized_runs(draw: st.DrawFn) -> Run:
    """Runs whose replicas come and go for the least reason."""
    changes: dict[str, Any] = {
        "seed": draw(st.integers(0, 999)),
        "policies.system": draw(st.sampled_from(["stream-sync", "stream-async", "fully-async"])),
        "policies.resize": "adjust",
        "policies.resize_unit": draw(st.integers(1, 3)),
        "policies.resize_window": draw(st.integers(1, 2)),
        "policies.latency": draw(st.sampled_from([FLAT, LINEAR])),
        "policies.shrink_after": draw(st.sampled_from([None, 1, 2])),
        "rollout.replicas": draw(st.integers(1, 4)),
        "rollout.start_time": draw(st.sampled_from(["0 s", "700 ms"])),
        "algorithm.steps": 8,
        "algorithm.prompts_per_step": draw(st.integers(1, 5)),
        "workload.lengths.scale_to": draw(st.sampled_from([0.001, 0.05])),
        "costs.training_factor": draw(st.sampled_from([1.0, 0.05, 0.01])),
        "verifier.time": draw(st.sampled_from(["0 s", "2 s"])),
    }
    return small_run(changes)


many_seeds = settings(max_examples=30, deadline=None)


@many_seeds
@given(resized_runs(), st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 3)), max_size=3))
def test_no_rollout_is_lost_or_too_stale_when_replicas_come_and_go(
    run: Run, lost: list[tuple[float, int]]
) -> None:
    world = checked_world(run)
    for time, which in lost:
        lose_replica_at(world, time, which)
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    bound = {"stream-sync": 0, "stream-async": 1, "fully-async": 2}[run.policies.system]
    assert all(0 <= each <= bound for each in staleness_of(trace).values())
    assert replay(trace) is None
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)


def resizes(trace: Trace) -> list[int]:
    return [c.num_replicas for entry in trace.entries for c in of(Resize, entry.commands)]


@many_seeds
@given(resized_runs())
def test_gpu_seconds_and_dollars_count_each_replica_from_its_start_to_its_end(run: Run) -> None:
    trace = checked_world(run).run()
    end = trace.entries[-1].time
    began: dict[int, float] = {}
    seconds = 0.0
    for entry in trace.entries:
        began.update({c.replica: entry.time for c in of(StartReplica, entry.commands)})
        if isinstance(entry.event, ReplicaStopped):
            seconds += entry.time - began.pop(entry.event.replica)
    seconds += sum(end - start for start in began.values())
    assert attribute(trace).gpu_seconds == pytest.approx(seconds + run.trainer.num_gpus * end)
    assert read_replicas(trace).mean(0.0, end) == pytest.approx(seconds / end)


def test_replicas_that_are_added_get_rollouts_without_a_break_for_the_others() -> None:
    run = small_run(
        {
            "policies.resize": "adjust",
            "policies.resize_unit": 1,
            "policies.resize_window": 1,
            "policies.latency": FLAT,
            "algorithm.steps": 14,
        }
    )
    trace = checked_world(run).run()
    wanted = resizes(trace)
    assert wanted == list(range(3, 3 + len(wanted)))
    used = {c.replica for entry in trace.entries for c in of(Generate, entry.commands)}
    assert used >= set(range(4))
    assert not any(of(Abort, entry.commands) for entry in trace.entries)


# For real -----------------------------------------------------------------------------------------


class Uneven(ScriptedLauncher):
    """Makes one side slow."""

    slow_role = REPLICA

    async def _start(self, role: str, number: int) -> Handle:
        self._options = {"slowest": 0.05 if role == self.slow_role else 0.001}
        return await super()._start(role, number)


class SlowTrainer(Uneven):
    """Makes the other side slow."""

    slow_role = TRAINER


@pytest.mark.parametrize(
    ("launcher_class", "replicas", "grows"), [(Uneven, 1, True), (SlowTrainer, 4, False)]
)
def test_a_real_run_adds_replicas_or_gives_them_back(
    tmp_path: Path, launcher_class: type[ScriptedLauncher], replicas: int, grows: bool
) -> None:
    run = real_run(
        tmp_path,
        algorithm__steps=8,
        rollout__replicas=replicas,
        policies__resize="adjust",
        policies__resize_unit=1,
        policies__resize_window=1,
        policies__shrink_after=2,
        policies__latency=FLAT,
    )

    async def go() -> tuple[Trace, int]:
        world = make_world(run, {}, launcher_class=launcher_class)
        trace = await world.run()
        return trace, len(world._replicas)

    trace, num_left = asyncio.run(asyncio.wait_for(go(), timeout=60))
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    assert max(staleness_of(trace).values()) <= 1
    assert measure(trace).num_steps == 8
    wanted = resizes(trace)
    assert wanted[-1] > replicas if grows else wanted[-1] < replicas
    assert num_left == wanted[-1]

"""Fault plans: what may be planned, when it strikes, and that a simulated run mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import simpy

from streamrl.engine.fault_plan import STRUCK, FaultPlan
from streamrl.engine.messages import (
    Event,
    Failed,
    Generate,
    Generated,
    PushWeights,
    ReplicaLost,
    SaveCheckpoint,
    Stepped,
    Stop,
    Train,
    TrainerLost,
    Verified,
    Verify,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import ROLLED_BACK
from streamrl.executor.faults import StruckFault, say_unstruck
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, write_run
from streamrl.runfile.simulation_config import OF_LENDING, OF_REWARD_MODEL, FaultKind
from streamrl.sim.checkup.rehearsal import rehearse
from streamrl.sim.steady_state import simulate_steady
from streamrl.sim.world import SimWorld
from tests.command_line import streamrl
from tests.runs import checked_world, done, of, script, small_run
from tests.test_plan import SMALL, few, planned
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

SAID: dict[str, dict[str, Any]] = {
    "link-slows": {"factor": 50.0, "duration": "30 s"},
    "verifier-stalls": {"duration": "30 s"},
}
REWARDED: dict[str, Any] = {
    "cluster.pools.third": {"gpu": "h20"},
    "verifier.reward": [{"scorer": "reward-model", "model": "hf://nobody/knows"}],
    "verifier.pool": "third",
    "verifier.gpus_per_worker": 1,
    "verifier.time": "100 ms",
}
"""A reward model, for what strikes one."""
SIMULATED = sorted({*get_args(FaultKind)} - {"driver-dies", *OF_LENDING})
STEPS = 6


def fault(kind: str, **moment: Any) -> dict[str, Any]:
    """Return a fault as a run file has it, with all that its kind needs."""
    return {"kind": kind, **SAID.get(kind, {}), **moment}


def faulty(*faults: dict[str, Any], **changes: Any) -> Run:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    if any(each["kind"] in OF_REWARD_MODEL for each in faults):
        keys = {**REWARDED, **keys}
    table = {"algorithm.steps": STEPS, "execute.checkpoint_every": 2, "faults": [*faults], **keys}
    return small_run(table)


def simulate(run: Run) -> tuple[Trace, SimWorld]:
    """Simulate with an engine that checks itself, and look at the books."""
    world = checked_world(run)
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    return trace, world


def events(trace: Trace, kind: type[Event]) -> list[Any]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, kind)]


# What may be planned ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"kind": "replica-sleeps", "step": 1}, r"faults\.0\.kind must be one of replica-dies, "),
        ({"kind": "replica-dies"}, r"faults\.0 \(replica-dies\) needs exactly one .* got none"),
        (fault("link-drops", step=1, count=2), r"exactly one of step, time and count, got step, c"),
        (fault("replica-dies", step=0), r"faults\.0\.step must be at least 1, got 0"),
        (fault("replica-dies", step=7), r"step must be at most 6 of algorithm\.steps=6, got 7"),
        (fault("link-drops", step=6), r"at most 5 .* \(the last version is not pushed\), got 6"),
        (fault("replica-dies", time=3), r"faults\.0\.time: 3 needs a unit"),
        (fault("replica-dies", count=0), r"faults\.0\.count must be in \[1, 1000\], got 0"),
        (fault("replica-dies", step=1, seed=3), r"faults\.0\.seed=3 .* set faults\.0\.count"),
        (
            fault("disk-full", step=1, duration="3 s"),
            r"duration=3\.0 applies only to link-slows and verif",
        ),
        ({"kind": "link-slows", "step": 1, "factor": 2.0}, r"faults\.0\.duration is missing"),
        (fault("link-slows", step=1) | {"factor": 1.0}, r"faults\.0\.factor must be in \(1, 1"),
        ({**fault("disk-full", step=1), "at": 3}, r"faults\.0\.at is not a key of a run file"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_by_key_and_value(
    wrong: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        faulty(wrong)


def test_faults_are_written_as_they_were_read(tmp_path: Path) -> None:
    run = faulty(fault("link-slows", time="90 s"), fault("replica-dies", count=2, seed=7))
    write_run(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml").faults == run.faults


def test_a_fault_that_only_a_real_run_can_have_is_not_simulated(tmp_path: Path) -> None:
    write_run(faulty(fault("driver-dies", step=2)), tmp_path / "run.toml")
    refused = streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "out")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "faults.0.kind 'driver-dies' can be executed but not simulated" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_plan_is_chosen_and_a_run_is_rehearsed_without_faults() -> None:
    run = faulty(fault("driver-dies", step=2), fault("replica-hangs", count=3))
    assert rehearse(run).problem == "" and rehearse(run).refusal == ""
    calm = planned(few(SMALL))
    beside = planned(few({**SMALL, "faults": [fault("driver-dies", step=1)]}))
    assert beside.run == calm.run and beside.plan.allocation == calm.plan.allocation


@pytest.mark.parametrize("step", [1, 13, 40])
def test_what_a_fault_takes_is_in_the_whole_run_once_whichever_step_it_strikes(step: int) -> None:
    stall = {**fault("verifier-stalls", step=step), "duration": "1 h"}
    keys = {"algorithm.steps": 40, "policies.system": "stream-sync"}
    calm, stalled = (
        measure(simulate_steady(faulty(**{**keys, "faults": each}))).whole_run
        for each in ([fault("replica-garbles", time="30 d")], [stall])
    )
    assert stalled.seconds - calm.seconds == pytest.approx(3600, rel=0.01)
    assert stalled.seconds_interval is None


@pytest.mark.parametrize("hang_time", [0.0, 5.0])
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_what_a_replica_has_made_when_it_dies_is_not_made_again(
    system: str, hang_time: float
) -> None:
    calm, _ = simulate(faulty(policies__system=system))
    longest = max((e for e in events(calm, Generated)[:4]), key=lambda event: event.run_time)
    link = calm.run.cluster.links[0]
    asked_at = 3 * link.latency  # started, told of, then asked for the first rollouts
    dies_at = asked_at + longest.run_time / 2
    world = checked_world(faulty(policies__system=system))

    def die() -> Iterator[simpy.Event]:
        yield world.env.timeout(dies_at)
        if hang_time:
            for replica in world.replicas.values():
                replica.stop()
            yield world.env.timeout(hang_time)
        for replica_id in list(world.replicas):
            world.lose(replica_id, "it died")

    world.env.process(die())
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    sent: dict[int, int] = {}
    made: Counter[int] = Counter()
    broken_off: dict[int, Generated] = {}
    for time, event, commands in trace.entries:
        if isinstance(event, Generated):
            made[event.rollout] += event.tokens - sent.pop(event.rollout)
            assert made[event.rollout] == event.tokens
            if event.finish == "aborted":
                broken_off[event.rollout] = event
                assert time == pytest.approx(dies_at + hang_time)
        sent.update({c.rollout: c.prefix for c in commands if isinstance(c, Generate)})
    half = broken_off[longest.rollout].tokens / longest.tokens
    assert 0.4 < half < 0.6
    assert made[longest.rollout] == longest.tokens


def test_a_fault_that_comes_too_late_is_told() -> None:
    note = measure(simulate_steady(faulty(fault("replica-dies", time="30 d")))).note
    assert "faults.0 never struck: the run was over before its time" in note
    struck = measure(simulate_steady(faulty(fault("replica-dies", step=2)))).note
    assert "faults are planned" in struck and "never struck" not in struck


def test_all_steps_are_simulated_where_faults_are_planned_or_the_run_is_refused(
    tmp_path: Path,
) -> None:
    write_run(faulty(fault("replica-dies", step=2), algorithm__steps=50), tmp_path / "run.toml")
    refused = streamrl("simulate", tmp_path / "run.toml", "--set", "simulate.max_steps=20")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "simulate.max_steps must be at least 50 where faults are planned" in refused.stderr


# When they strike ---------------------------------------------------------------------------------


def test_random_moments_are_those_of_the_seed_and_lie_within_the_run() -> None:
    def drawn(kind: str, **keys: Any) -> list[tuple[int, int]]:
        plan = FaultPlan.of(faulty(fault(kind, count=40, **keys)))
        return [(each.step, each.num_spared) for each in plan.faults]

    assert drawn("replica-dies") == drawn("replica-dies", seed=0) != drawn("replica-dies", seed=1)
    for kind in SIMULATED:
        found = drawn(kind)
        last = STEPS - 1 if STRUCK[kind] is PushWeights else STEPS  # type: ignore[index]
        assert {step for step, _ in found} == set(range(1, last + 1))
        is_generation = kind.startswith(("replica", "verifier", "reward"))
        assert {spared for _, spared in found} == (set(range(4)) if is_generation else {0})


def test_a_fault_strikes_once_with_the_work_of_its_step_or_the_first_after_its_time() -> None:
    plan = FaultPlan.of(
        faulty(fault("replica-dies", step=2), fault("trainer-dies-training", time="9 s"))
    )
    found = [
        plan.strike(Generate(3, 0, 0), 0, 0.0),  # of step 1
        plan.strike(Train((0, 1), 0), 0, 8.9),
        plan.strike(Generate(4, 0, 0), 0, 9.0),
        plan.strike(Generate(5, 0, 0), 0, 9.0),
        plan.strike(Train((2, 3), 1), 0, 9.0),  # of a trainer that follows
        plan.strike(Train((2, 3), 0), 0, 9.0),
    ]
    numbers = [None if each is None else each.number for each in found]
    assert numbers == [None, None, 0, None, None, 1] and not plan.faults


def test_what_has_struck_before_a_resume_does_not_strike_again() -> None:
    run = faulty(fault("driver-dies", step=2), fault("driver-dies", count=2))
    assert [each.number for each in FaultPlan.of(run, {0, 2}).faults] == [1]


def test_without_faults_a_run_is_byte_for_byte_what_it_was_and_far_ones_change_no_event() -> None:
    calm = simulate(faulty(**{key.replace(".", "__"): value for key, value in REWARDED.items()}))[0]
    far = simulate(faulty(*(fault(kind, time="20 d") for kind in SIMULATED)))[0]
    assert far.entries == calm.entries


# How they are mended ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIMULATED)
@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_a_simulated_run_has_all_its_steps_whatever_strikes_when(system: str, kind: str) -> None:
    for seed in range(3):
        run = faulty(fault(kind, count=2), seed=seed, policies__system=system)
        trace, world = simulate(run)
        assert measure(trace).num_steps == STEPS
        assert world.faults is not None and world.faults.strikes
        assert not any(of(Stop, entry.commands) for entry in trace.entries)


def seconds_lost(kind: str, **changes: Any) -> float:
    """Return by how much a fault at step 3 lengthens a run."""
    calm, struck = (
        simulate(faulty(*faults, **changes))[0] for faults in ((), (fault(kind, step=3),))
    )
    return struck.entries[-1].time - calm.entries[-1].time


def struck(kind: str, **changes: Any) -> tuple[Trace, float]:
    """Return the trace of a run with a fault at step 3, and when it struck."""
    trace, world = simulate(faulty(fault(kind, step=3), **changes))
    assert world.faults is not None
    ((_, time),) = world.faults.strikes
    return trace, time


def test_a_replica_that_dies_is_lost_at_once_and_one_that_hangs_after_its_patience() -> None:
    for kind, patience in (("replica-dies", 0.0), ("replica-hangs", 45.0)):
        trace, struck_at = struck(kind, execute__patience="45 s")
        (lost,) = (entry for entry in trace.entries if isinstance(entry.event, ReplicaLost))
        assert lost.time - struck_at == patience
        assert any(isinstance(event.command, Generate) for event in events(trace, Failed))
    assert seconds_lost("replica-hangs", execute__patience="45 s") > 40


@pytest.mark.parametrize(
    ("kind", "patience"), [("reward-model-dies", 0.0), ("reward-model-hangs", 45.0)]
)
def test_what_a_lost_reward_model_was_scoring_fails_and_is_scored_again(
    kind: str, patience: float
) -> None:
    trace, struck_at = struck(kind, execute__patience="45 s")
    lost = [entry for entry in trace.entries if isinstance(entry.event, Failed)]
    assert lost and {entry.time - struck_at for entry in lost} == {patience}
    assert all(isinstance(each.command, Verify) for each in events(trace, Failed))
    scored = {event.rollout for event in events(trace, Verified)}
    assert {each.command.rollout for each in events(trace, Failed)} <= scored
    assert len(events(trace, Stepped)) == STEPS


def test_what_strikes_a_reward_model_needs_one() -> None:
    plan = fault("reward-model-dies", step=1)
    with pytest.raises(ValueError, match=r"faults\.0\.kind 'reward-model-dies' needs a reward mo"):
        small_run({"algorithm.steps": STEPS, "faults": [plan]})


def test_an_answer_that_is_none_is_asked_for_again() -> None:
    trace, _ = struck("replica-garbles")
    (failed,) = events(trace, Failed)
    assert isinstance(failed.command, Generate) and not events(trace, ReplicaLost)
    sent = [c for e in trace.entries for c in of(Generate, e.commands)]
    assert [c.rollout for c in sent].count(failed.command.rollout) == 2


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("trainer-dies-training", Train),
        ("trainer-dies-pushing", PushWeights),
        ("trainer-dies-saving", SaveCheckpoint),
    ],
)
def test_a_trainer_that_dies_makes_the_steps_after_its_checkpoint_again(
    kind: str, at: type
) -> None:
    trace, _ = struck(kind)
    assert len(events(trace, TrainerLost)) == 1
    assert any(isinstance(event.command, at) for event in events(trace, Failed))
    made = [event.version for event in events(trace, Stepped)]
    again = {
        "trainer-dies-training": [],
        "trainer-dies-pushing": [3],
        "trainer-dies-saving": [3, 4],
    }
    assert sorted(made) == sorted([*range(1, STEPS + 1), *again[kind]])
    assert measure(trace).dropped.get(ROLLED_BACK, 0) >= 4 * len(again[kind])


def test_a_trainer_that_dies_in_its_last_checkpoint_makes_the_last_steps_again() -> None:
    trace, world = simulate(faulty(fault("trainer-dies-saving", step=STEPS)))
    made = [event.version for event in events(trace, Stepped)]
    assert made == [1, 2, 3, 4, 5, 6, 5, 6]
    assert world.engine.has_all_steps


@pytest.mark.parametrize(
    ("kind", "command"), [("link-drops", PushWeights), ("disk-full", SaveCheckpoint)]
)
def test_a_push_or_a_checkpoint_that_is_lost_is_made_again(kind: str, command: type) -> None:
    trace, _ = struck(kind, policies__system="stream-sync")
    (failed,) = events(trace, Failed)
    assert isinstance(failed.command, command)
    again = [c for e in trace.entries for c in of(command, e.commands)]
    assert again.count(failed.command) == 2
    assert len(events(trace, Stepped)) == STEPS


def test_a_slow_link_takes_as_many_times_as_long_and_a_stall_as_long_as_it_lasts() -> None:
    push_time = checked_world(faulty()).costs.sync
    alone = push_time.fill_time + push_time.wire_time + push_time.drain_time
    slow = {"policies__system": "stream-sync"}
    assert seconds_lost("link-slows", **slow) >= 49 * alone * 0.99
    for verifier_time in ("0 s", "100 ms"):
        lost = seconds_lost("verifier-stalls", verifier__time=verifier_time, **slow)
        assert 25 < lost <= 30


# What no retry mends ------------------------------------------------------------------------------


def test_a_push_that_fails_every_time_stops_the_run_and_says_why() -> None:
    s = script(policies__max_attempts=2)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    (push,) = of(PushWeights, s.step(1))
    assert of(PushWeights, s.tell(Failed(push, "no route"))) == [push]
    (stop,) = of(Stop, s.tell(Failed(push, "no route")))
    assert "failed 2 times in a row" in stop.reason and "PushWeights: no route" in stop.reason


def test_failed_pushes_count_in_a_row() -> None:
    s = script(policies__max_attempts=2, algorithm__steps=9, policies__system="stream-sync")
    draws, groups = s.begin(), 0
    for version in (1, 2, 3):
        s.draw(draws)
        s.finish(*range(groups, groups + 4), version=version - 1)
        groups += 4
        draws = s.step(version)
        (push,) = of(PushWeights, draws)
        assert of(PushWeights, s.tell(Failed(push, "no route"))) == [push]
        draws += s.tell(*map(done, s.tell(done(push))))


def test_a_checkpoint_that_fails_every_time_stops_the_run_and_leaves_the_one_before() -> None:
    s = script(policies__max_attempts=2, execute__checkpoint_every=1)
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    (save,) = of(SaveCheckpoint, s.step(1))
    assert of(SaveCheckpoint, s.tell(Failed(save, "disk full"))) == [save]
    (stop,) = of(Stop, again := s.tell(Failed(save, "disk full")))
    assert "SaveCheckpoint: disk full" in stop.reason and not of(SaveCheckpoint, again)
    assert s.state.leader.checkpoint_version == 0


def test_a_plan_remembers_no_more_steps_than_it_has_faults() -> None:
    plan = FaultPlan.of(faulty(fault("verifier-stalls", step=STEPS), fault("replica-dies", step=3)))
    for rollout in range(10_000):
        plan.strike(Generate(rollout, 0, 0), 0, 0.0)
    assert len(plan.faults) == 1 and len(plan._num_seen) <= 2


def test_planned_faults_that_never_struck_are_counted() -> None:
    run = faulty(fault("link-drops", step=1), fault("replica-dies", count=3))
    told = {"step": 1, "leg": 0, "time": 0.0, "unix_time": 0.0}
    struck = [StruckFault(fault=place, kind="replica-dies", **told) for place in (1, 2, 2)]
    assert say_unstruck(run.faults, struck) == (
        "2 of 4 planned faults did not strike, because their moment never came: 1 x link-drops, 1 x replica-dies"
    )
    struck += [StruckFault(fault=3, kind="replica-dies", **told)]
    struck += [StruckFault(fault=0, kind="link-drops", **told)]
    assert say_unstruck(run.faults, struck) == ""

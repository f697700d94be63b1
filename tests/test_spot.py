"""Spot machines: replicas are told in time, are emptied and stopped, and get a replacement; nothing is lost or trained twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.engine.messages import (
    Abort,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    MachineReplaced,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    StartReplica,
    StopReplica,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.engine.trace import Trace, replay
from streamrl.record.attribution import attribute
from streamrl.record.charges import read_paid, read_replicas
from streamrl.record.metrics import measure
from streamrl.record.rollout_flow import read_flow
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import (
    expected_losses,
    notices_per_gpu_day,
    replica_gpu_failures_per_day,
)
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim import faults
from streamrl.sim.faults import replacement_time
from streamrl.sim.planner.plan import SpotSavings
from streamrl.sim.planner.spot_savings import spot_savings
from streamrl.sim.world import SimWorld
from tests.random_runs import FaultyWorld, has_stopped_early, losses, runs
from tests.runs import (
    Script,
    call_at,
    checked_world,
    generated,
    lose_replica_at,
    lose_trainer_at,
    of,
    singles,
    small_run,
)
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
)

SPOT: dict[str, Any] = {
    "cluster.pools.far.spot_failures_per_gpu_day": 1.0,
    "cluster.pools.far.spot_warning": "2 s",
}


EPISODES = {
    "max_turns": 4,
    "max_context": 4096,
    "turns": "mean 3, p95 4",
    "observation_tokens": "mean 20, p95 40",
    "action_time": "mean 1 s, p95 2 s",
    "start_time": "mean 1 s, p95 2 s",
}


def check(trace: Trace) -> None:
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)


# What a notice leads to ---------------------------------------------------------------------------


def begun(num_prompts: int = 4, **changes: Any) -> Script:
    """Return a script whose two replicas each generate two rollouts."""
    s = singles(num_prompts, **{"policies__system": "stream-sync", **changes})
    s.draw(s.begin())
    assert [len(replica.rollouts) for replica in s.state.fleet.replicas.values()] == [2, 2]
    return s


def on(s: Script, replica: int) -> list[int]:
    return list(s.state.fleet.replicas[replica].rollouts)


def test_rollouts_run_on_until_shortly_before_the_machine_goes_and_then_move_with_their_tokens() -> (
    None
):
    s = begun()
    first, second = on(s, 0)
    (wake,) = of(WakeAt, s.tell(ReplicaLeaving(0, 100.0)))
    assert wake.time == s.now + 95.0
    assert not of(Abort, s.tell(generated(first)))  # it finishes in time
    s.now = wake.time - 1.0
    assert of(Abort, s.tell(Woke(wake.time))) == [Abort(second, 0)]
    commands = s.tell(Generated(second, 7, "aborted", 0, 1.0, 0.1))
    assert of(StopReplica, commands) == [StopReplica(0)]
    assert [(c.rollout, c.replica, c.prefix) for c in of(Generate, commands)] == [(second, 1, 7)]


def test_a_short_warning_leaves_a_quarter_of_it_for_the_move() -> None:
    s = begun()
    (wake,) = of(WakeAt, s.tell(ReplicaLeaving(0, 8.0)))
    assert wake.time == s.now + 6.0


def test_an_idle_replica_stops_at_once_and_gets_no_replacement_before_there_is_a_machine() -> None:
    s = begun()
    for rollout in on(s, 0):
        s.tell(generated(rollout))
    commands = s.tell(ReplicaLeaving(0, 100.0))
    assert of(StopReplica, commands) == [StopReplica(0)]
    assert not of(StartReplica, s.tell(ReplicaStopped(0)))
    assert of(StartReplica, s.tell(MachineReplaced(0))) == [StartReplica(2, 0)]


def test_a_replacement_may_start_before_the_old_machine_goes() -> None:
    s = begun()
    s.tell(ReplicaLeaving(0, 100.0))
    assert of(StartReplica, s.tell(MachineReplaced(0))) == [StartReplica(2, 0)]
    assert not of(StopReplica, s.tell(ReplicaStarted(2, 0)))


def test_the_earliest_of_several_notices_counts_and_one_machine_replaces_it() -> None:
    s = begun()
    s.tell(ReplicaLeaving(0, 1000.0))
    (wake,) = of(WakeAt, s.tell(ReplicaLeaving(0, 100.0)))
    until = s.state.fleet.replicas[0].empty_at
    s.tell(ReplicaLeaving(0, 500.0))
    assert s.state.fleet.replicas[0].empty_at == until == wake.time
    s.tell(ReplicaLost(0, "gone"))
    s.tell(*(Failed(Generate(rollout, 0, 0), "gone") for rollout in (0, 2)))
    assert len(of(StartReplica, s.tell(MachineReplaced(0)))) == 1
    assert not of(StartReplica, s.tell(MachineReplaced(0), ReplicaLeaving(0, 9.0)))


def test_a_machine_that_goes_early_takes_nothing_from_the_limits_of_restarts_and_attempts() -> None:
    s = begun(policies__max_restarts=0, policies__max_attempts=1)
    rollouts = on(s, 0)
    s.tell(ReplicaLeaving(0, 100.0), ReplicaLost(0, "gone"))
    commands = s.tell(*(Failed(Generate(rollout, 0, 0), "gone") for rollout in rollouts))
    assert {c.rollout for c in of(Generate, commands)} == set(rollouts)
    assert of(StartReplica, s.tell(MachineReplaced(0))) == [StartReplica(2, 0)]
    assert s.state.stop_reason is None


def test_a_replica_that_starts_meanwhile_stops_as_soon_as_it_is_up() -> None:
    s = begun()
    s.tell(ReplicaLost(1, "gone"))
    assert not of(StopReplica, s.tell(ReplicaLeaving(2, 100.0)))
    commands = s.tell(ReplicaStarted(2, 0))
    assert of(StopReplica, commands) == [StopReplica(2)]
    assert not of(Generate, commands)


def test_a_replica_that_loads_meanwhile_ends_that_first() -> None:
    s = begun()
    s.finish(*on(s, 0), *on(s, 1))
    s.draw(s.step(1))
    commands = s.tell(WeightsPushed(1, 1))
    assert LoadWeights(0, 1, drain=True) in commands
    assert not of(StopReplica, s.tell(ReplicaLeaving(0, 100.0)))
    for rollout in on(s, 0):
        s.tell(generated(rollout))
    assert of(StopReplica, s.tell(WeightsLoaded(0, 1, 1.0))) == [StopReplica(0)]


def test_newer_weights_on_other_replicas_end_the_drain() -> None:
    s = begun()
    s.tell(ReplicaLeaving(0, 1e6))
    rollouts = on(s, 0)
    s.finish(*on(s, 1))
    kept = on(s, 0)
    assert kept == rollouts
    fleet = s.state.fleet
    s.state.pushed_version = 1  # as after a push, which on-policy training makes later
    commands = list(of(Abort, s.tell(Woke(0.0))))
    assert commands == [Abort(rollout, 0) for rollout in rollouts]
    assert not fleet.outdated


def test_all_machines_may_leave_at_once() -> None:
    s = begun()
    rollouts = on(s, 0) + on(s, 1)
    s.tell(ReplicaLeaving(0, 10.0), ReplicaLeaving(1, 10.0))
    s.tell(ReplicaLost(0, "gone"), ReplicaLost(1, "gone"))
    where = [(r, replica) for r in rollouts for replica in (r % 2,)]
    commands = s.tell(*(Failed(Generate(r, replica, 0), "gone") for r, replica in where))
    assert not of(Generate, commands)
    assert of(StartReplica, s.tell(MachineReplaced(1))) == [StartReplica(2, 0)]
    commands = s.tell(ReplicaStarted(2, 0))
    assert {c.rollout for c in of(Generate, commands)} == set(rollouts)


# Simulated runs -----------------------------------------------------------------------------------

notices = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(0, 3), st.floats(0.0, 3.0)), min_size=1, max_size=8
)
"""Seconds at which a replica gets a notice, which of those that start or serve then, and the warning in seconds."""


def notice_at(world: SimWorld, time: float, which: int, warning: float) -> None:
    def tell() -> None:
        kinds = world.run_file.rollout.num_kinds
        own = [number for number, kind in world._kinds.items() if kind < kinds]
        if own:
            world.give_notice(own[which % len(own)], warning)

    call_at(world, time, tell)


@settings(max_examples=25, deadline=None)
@given(runs(consumption=None, late=True), notices, losses, st.floats(0.0, 5.0))
def test_nothing_is_lost_or_trained_twice_whenever_machines_leave(
    run: Run, given_notices: list[tuple[float, int, float]], lost: Any, replaced_after: float
) -> None:
    if run.policies.shares_gpus:
        return  # the trainer's machines cannot leave
    run = with_pool(run, spot_replacement_time=replaced_after, spot_replacement_variation=0.5)
    world = FaultyWorld(run)
    for each in given_notices:
        notice_at(world, *each)
    for time, which in lost[:2]:
        lose_replica_at(world, time, which)
    lose_trainer_at(world, 7.0, 0)
    trace = world.run()
    check(trace)


def with_pool(run: Run, **changes: Any) -> Run:
    from msgspec.structs import replace

    pools = {name: replace(pool, **changes) for name, pool in run.cluster.pools.items()}
    found: Run = replace(run, cluster=replace(run.cluster, pools=pools))
    return found


def spot_run(**changes: Any) -> Run:
    """Return a run whose replicas lose their machines about once a step."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run(
        {
            **SPOT,
            "cluster.pools.far.spot_failures_per_gpu_day": SECONDS_PER_DAY / 4,
            "cluster.pools.far.spot_replacement_time": "1 s",
            "algorithm.steps": 12,
            **keys,
        }
    )


def told(trace: Trace, kind: type) -> list[Any]:
    return [entry.event for entry in trace.entries if isinstance(entry.event, kind)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policies__system": "stream-sync"},
        {"policies__system": "disaggregated", "policies__weight_sync": "barrier"},
        {"rollout__start_time": "3 s"},
        {"lending": {"share": 1.0, "replicas": 1}, "policies__system": "stream-sync"},
        {"evaluation": {"every": 1, "num_prompts": 4}},
        {"environment": EPISODES},
        {
            "execute__checkpoint_every": 1,
            "failures__per_gpu_day": 3000.0,
            "policies__max_restarts": 999,
        },
    ],
)
def test_random_notices_in_runs_of_every_kind_lose_nothing(changes: dict[str, Any]) -> None:
    trace = checked_world(spot_run(**changes)).run()
    check(trace)
    assert len(told(trace, ReplicaLeaving)) >= 3
    assert not has_stopped_early(trace)


def test_a_machine_that_is_away_is_not_paid_for() -> None:
    run = spot_run(cluster__pools__far__spot_replacement_time="20 s")
    trace = checked_world(run).run()
    end = trace.entries[-1].time
    replicas = read_replicas(trace)
    seconds, began = 0.0, {}
    for entry in trace.entries:
        began.update({c.replica: entry.time for c in of(StartReplica, entry.commands)})
        if isinstance(entry.event, ReplicaStopped | ReplicaLost):
            seconds += entry.time - began.pop(entry.event.replica)
        if isinstance(entry.event, MachineReplaced) and not of(StartReplica, entry.commands):
            seconds += end - entry.time  # the run ends, so nothing starts on it
    seconds += sum(end - start for start in began.values())
    paid = replicas.mean(0.0, end) - sum(replicas.mean_away(0.0, end).values())
    assert paid == pytest.approx(seconds / end)
    num_gpus = run.rollout.gpus_per_replica
    expected = seconds * num_gpus + end * run.trainer.num_gpus
    assert attribute(trace).gpu_seconds == pytest.approx(expected)


def test_seconds_and_dollars_of_a_whole_run_are_those_of_the_same_steps() -> None:
    away = spot_run(cluster__pools__far__spot_replacement_time="600 s", algorithm__steps=40)
    trace = checked_world(replace(away, simulate=replace(away.simulate, max_steps=40))).run()
    metrics = measure(trace, (3, 40))
    first, last = (read_flow(trace).leader.window(*steps) for steps in ((1, 2), (3, 40)))
    seconds = [ended - began for began, ended in (first, last)]
    whole = metrics.whole_run
    assert whole is not None and whole.seconds == pytest.approx(sum(seconds))
    paid = [read_paid(trace, *window).used["far"] for window in (first, last)]
    assert paid[0] > 2 * paid[1], "machines leave and seldom come back"
    hours = sum(gpus * time for gpus, time in zip(paid, seconds, strict=True)) / 3600
    assert whole.pools["far"].gpu_hours == pytest.approx(hours)


def test_replacements_take_their_mean_time() -> None:
    pool = spot_run(cluster__pools__far__spot_replacement_time="600 s").cluster.pools["far"]
    times = [replacement_time(pool, 1, replica) for replica in range(4000)]
    mean = sum(times) / len(times)
    variance = sum((time - mean) ** 2 for time in times) / len(times)
    assert mean == pytest.approx(600, rel=0.05)
    assert variance**0.5 == pytest.approx(600, rel=0.15)


def test_announced_losses_do_not_count_as_failures() -> None:
    run = small_run(SPOT)
    far = run.cluster.pools["far"]
    assert replica_gpu_failures_per_day(run.failures, far) == 0
    assert notices_per_gpu_day(far) == 1
    assert expected_losses(run, SECONDS_PER_DAY).mean == 0


def test_an_early_notice_is_kept_until_the_replica_must_be_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "DRAIN_TIME", 1.0)

    def first_told(warning: str) -> tuple[float, float]:
        changes = {"cluster.pools.far.spot_failures_per_gpu_day": SECONDS_PER_DAY / 8}
        run = small_run({**SPOT, **changes, "cluster.pools.far.spot_warning": warning})
        trace = checked_world(run).run()
        check(trace)
        events = ((e.time, e.event) for e in trace.entries)
        return next((at, each.warning) for at, each in events if isinstance(each, ReplicaLeaving))

    at_once, own = first_told("1 s")
    later, kept = first_told("1.5 s")
    assert own == kept == 1.0
    assert later == pytest.approx(at_once + 0.5)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"cluster.pools.far.spot_warning": "30 s"},
            "cluster.pools.far.spot_warning applies to spot machines; set cluster.pools.far.spot_failures_per_gpu_day",
        ),
        (
            {
                "cluster.pools.far.spot_failures_per_gpu_day": 1.0,
                "cluster.pools.far.spot_replacement_time": "600 s",
            },
            "cluster.pools.far.spot_replacement_time=10 min applies to machines with a notice; "
            "set cluster.pools.far.spot_warning",
        ),
        (
            {"cluster.pools.far.on_demand_price": 2.0},
            "cluster.pools.far.on_demand_price applies to spot machines",
        ),
        ({**SPOT, "policies.system": "colocated"}, "share their machines with the trainer"),
    ],
)
def test_keys_of_spot_machines_are_refused_where_they_do_nothing(
    changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        small_run(changes)


# Savings ------------------------------------------------------------------------------------------


def savings(**changes: Any) -> SpotSavings:
    prices = {
        "cluster__pools__far__price": 1.0,
        "cluster__pools__far__on_demand_price": 3.0,
        "cluster__pools__near__price": 0.0,
        "simulate__max_steps": 30,
        "algorithm__steps": 20,
    }
    with ThreadPoolExecutor(1) as pool:
        found = spot_savings(spot_run(**{**prices, **changes}), pool, num_seeds=2)
    assert found is not None
    return found


def test_machines_that_never_leave_save_the_difference_of_the_prices() -> None:
    found = savings(cluster__pools__far__spot_failures_per_gpu_day=1e-9)
    assert [found.share, *found.interval] == pytest.approx([2 / 3] * 3)
    assert found.dollars_on_demand == pytest.approx(3 * found.dollars)
    assert found.seconds == found.seconds_on_demand


def test_a_run_on_machines_that_leave_takes_longer_and_pays_only_for_those_that_are_there() -> None:
    found = savings(cluster__pools__far__spot_replacement_time="0 s", rollout__start_time="1 s")
    assert found.interval[0] < found.share < found.interval[1]
    assert found.seconds > found.seconds_on_demand
    a_second = found.dollars / found.seconds
    assert a_second < found.dollars_on_demand / found.seconds_on_demand / 3
    assert found.num_notices == pytest.approx(0.5 * found.seconds)  # two GPUs, each 1 / 4 s

"""Over a link commands and events take its latency, in order, and of a lost replica nothing stays in the air."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import simpy

from streamrl.engine.messages import (
    Abort,
    Event,
    Generate,
    Generated,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    Stepped,
    Woke,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace, replay
from streamrl.sim.network_latency import DelayedChannel
from streamrl.sim.world import simulate
from tests.runs import checked_world, small_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

FAR = sorted(SYSTEMS.keys() - {"colocated"})


def link(latency: str) -> dict[str, Any]:
    return {
        "cluster.links": [{"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": latency}]
    }


def times(trace: Trace, kind: type[Event]) -> list[float]:
    return [entry.time for entry in trace.entries if isinstance(entry.event, kind)]


def test_what_is_sent_first_arrives_first_and_each_way_takes_as_long() -> None:
    env = simpy.Environment()
    told: list[tuple[float, object]] = []
    way = DelayedChannel(env, 0.5, lambda event: told.append((env.now, event)))
    load, generate = LoadWeights(0, 1, drain=False), Generate(7, 0, 0)

    def talk() -> Iterator[simpy.Event]:
        way.send(load, lambda command: told.append((env.now, command)))
        way.send(generate, lambda command: told.append((env.now, command)))
        yield env.timeout(0.25)
        way.emit(Woke(1.0))

    env.process(talk())
    env.run()
    assert told == [(0.5, load), (0.5, generate), (0.75, Woke(1.0))]


def test_what_a_lost_replica_had_sent_arrives_and_what_it_was_sent_is_lost() -> None:
    env = simpy.Environment()
    told: list[object] = []
    way = DelayedChannel(env, 1.0, told.append)
    generate = Generate(7, 0, 0)
    way.send(generate, told.append)
    way.send(Abort(7, 0), told.append)
    way.emit(Woke(1.0))
    way.bring_back()
    assert told == [Woke(1.0)]
    assert way.cut() == [generate], "an abort has no event of its own"
    env.run()
    assert told == [Woke(1.0)]


def test_a_synchronous_step_waits_for_three_ways_over_the_link() -> None:
    """Weights arrive, the load and the rollouts that start under it go there together, and the last rollout comes back."""
    steps: dict[str, float] = {}
    for latency in ("0 s", "1 s"):
        trace = simulate(small_run({"policies.system": "disaggregated", **link(latency)}))
        stepped = times(trace, Stepped)
        steps[latency] = stepped[-1] - stepped[-2]
    assert steps["1 s"] - steps["0 s"] == pytest.approx(3.0, abs=1e-6)


def test_a_replica_starts_a_link_away_and_is_told_of_a_link_later() -> None:
    trace = simulate(small_run({**link("2 s")}))
    asked = [e.time for e in trace.entries for c in e.commands if isinstance(c, StartReplica)]
    assert times(trace, ReplicaStarted)[0] - asked[0] == pytest.approx(4.0)


def test_replicas_beside_the_trainer_hear_at_once() -> None:
    near = {"rollout.pool": "near", "cluster.pools.near.nodes": 2, "rollout.replicas": 2}
    slow, fast = (simulate(small_run({**near, **link(latency)})) for latency in ("5 s", "0 s"))
    assert [entry.time for entry in slow.entries] == [entry.time for entry in fast.entries]


@pytest.mark.parametrize("system", FAR)
@pytest.mark.parametrize("dies_at", [0.5, 1.7, 3.1])
def test_a_replica_that_dies_while_messages_are_under_way_loses_no_rollout(
    system: str, dies_at: float
) -> None:
    run = small_run({"policies.system": system, **link("300 ms"), "policies.max_restarts": 9})
    world = checked_world(run)

    def die() -> Iterator[simpy.Event]:
        yield world.env.timeout(dies_at)
        for replica_id in list(world.replicas):
            world.lose(replica_id, "it died")

    world.env.process(die())
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    assert times(trace, Generated)

"""Batches that do not mix on a replica."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.engine.messages import (
    Failed,
    Generate,
    Generated,
    LoadWeights,
    PromptsDrawn,
    PushWeights,
    ReplicaLost,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace
from streamrl.sim.world import simulate
from tests.runs import Script, of, script, small_run

AT_BOUNDARIES = {
    "policies.weight_sync": "between-batches",
    "policies.system": "stream-async",
    "algorithm.steps": 6,
}


def begun(**changes: Any) -> tuple[Script, dict[int, list[int]]]:
    """Two replicas with the first batch dealt and the second one drawn; return also what each replica has."""
    s = script(policies__weight_sync="between-batches", policies__dispatch="random", **changes)
    sent = of(Generate, s.draw(s.begin()))
    return s, {replica: [c.rollout for c in sent if c.replica == replica] for replica in (0, 1)}


def test_a_replica_begins_its_share_of_the_next_batch_when_its_own_is_done() -> None:
    s, shares = begun()
    assert sorted(len(share) for share in shares.values()) == [2, 2]
    assert not of(Generate, s.finish(shares[0][0]))
    sent = of(Generate, s.finish(shares[0][1]))
    assert len(sent) == 3 and {c.replica for c in sent} == {0}  # the other still has two to do
    assert all(s.state.rollouts[c.rollout].group.step == 2 for c in sent)


def test_an_idle_replica_loads_before_it_begins_and_a_busy_one_when_it_is_done() -> None:
    s, shares = begun(algorithm__steps=4)
    s.finish(*shares[0])
    later = [c.rollout for c in of(Generate, s.finish(*shares[1]))]  # step 2's shares
    s.draw(s.step(1))
    loads = s.tell(WeightsPushed(1, 1))
    assert not of(LoadWeights, loads)  # both run step 2's
    mine = [r for r in s.state.rollouts if (p := s.state.rollouts[r].replica) and p.id == 1]
    assert set(later) <= set(mine)
    commands = s.finish(*mine)
    assert of(LoadWeights, commands) == [LoadWeights(1, 1, drain=True)]
    assert not of(Generate, commands)
    assert {c.replica for c in of(Generate, s.tell(WeightsLoaded(1, 1, 1.0)))} == {1}


def test_what_a_lost_replica_had_is_dealt_to_those_that_are_there() -> None:
    s, shares = begun()
    s.tell(ReplicaLost(0, "gone"))
    for rollout in shares[0]:
        s.tell(Failed(Generate(rollout, 0, 0), "gone"))
    sent = of(Generate, s.finish(*shares[1]))
    assert {c.replica for c in sent} == {1} and set(shares[0]) <= {c.rollout for c in sent}


def by_replica(trace: Trace) -> dict[int, list[tuple[str, int]]]:
    """Return what each replica was sent, loaded and finished: (what, step or version), in order."""
    steps: dict[int, int] = {}
    places: dict[int, int] = {}
    found: dict[int, list[tuple[str, int]]] = {}
    for entry in trace.entries:
        match entry.event:
            case PromptsDrawn(step, _, groups):
                steps |= {rollout: step for group in groups for rollout in group.rollouts}
            case Generated(rollout):
                found[places[rollout]].append(("ended", steps[rollout]))
            case _:
                pass
        for command in entry.commands:
            match command:
                case Generate(rollout, replica):
                    places[rollout] = replica
                    found.setdefault(replica, []).append(("sent", steps[rollout]))
                case LoadWeights(replica, version):
                    found.setdefault(replica, []).append(("load", version))
                case _:
                    pass
    return found


@pytest.mark.parametrize("dispatch", ["least-loaded", "round-robin", "random", "skewness-aware"])
@pytest.mark.parametrize("placement", ["split", "together"])
def test_no_replica_ever_has_two_batches_or_loads_with_one_on_its_hands(
    dispatch: str, placement: str
) -> None:
    changes = {"policies.dispatch": dispatch, "policies.group_placement": placement}
    trace = simulate(small_run({**AT_BOUNDARIES, **changes}))
    loads = 0
    for history in by_replica(trace).values():
        running: list[int] = []
        for what, number in history:
            if what == "load":
                assert not running
                loads += 1
            elif what == "sent":
                running.append(number)
            else:
                running.remove(number)
            assert len(set(running)) <= 1
    assert loads >= 2


def test_new_weights_are_pushed_at_once() -> None:
    s, shares = begun()
    s.finish(*shares[0], *shares[1])
    assert PushWeights(1, 0) in s.step(1)


def test_replicas_with_older_weights_are_dealt_their_share_too() -> None:
    s, shares = begun()
    seconds = of(Generate, s.finish(*shares[0], *shares[1]))
    of_two = [c.rollout for c in seconds if c.replica == 0]
    draws = s.step(1)
    s.tell(WeightsPushed(1, 1))
    s.finish(*of_two)  # replica 0 is done with step 2, replica 1 in the midst of it with version 0
    s.draw(draws)
    begins = of(Generate, s.tell(WeightsLoaded(0, 1, 1.0)))
    assert {c.replica for c in begins} == {0} and len(begins) < 4

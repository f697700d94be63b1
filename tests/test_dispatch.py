"""Which replica gets which rollout, and when."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.entities import Group, Rollout
from streamrl.engine.fleet import Fleet
from streamrl.engine.messages import (
    Failed,
    Generate,
    LoadWeights,
    ReplicaLost,
    ReplicaStarted,
    RunStarted,
    StartReplica,
    StartTrainer,
    TrainerStarted,
    WeightsPushed,
)
from streamrl.engine.policies.dispatch import FirstInFirstOut, LongestFirst
from tests.runs import of, script, singles

# Coming up ----------------------------------------------------------------------------------------


def test_a_run_brings_up_its_trainer_and_every_replica() -> None:
    assert script().tell(RunStarted(0, 0)) == [
        StartTrainer(0, 0),
        StartReplica(0, 0),
        StartReplica(1, 0),
    ]


def test_nothing_is_sent_before_every_replica_has_come_up() -> None:
    s = script()
    s.tell(RunStarted(0, 0))
    draws = s.tell(TrainerStarted(0, 0), ReplicaStarted(0, 0))
    assert not of(Generate, s.draw(draws))
    assert {c.replica for c in of(Generate, s.tell(ReplicaStarted(1, 0)))} == {0, 1}


# Dispatch -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_least_loaded_is_what_a_search_of_every_replica_finds(seed: int) -> None:
    fleet, model = Fleet(), dict[int, list[int]]()  # replica: [promised version, load]
    rng, running, pushed = Random(seed), list[Rollout](), 0
    for number in range(300):
        action = rng.choice(["start", "load", "lose", "end", "end", *["send"] * 5])
        replica = rng.choice(sorted(model)) if model else None
        if action == "start" or replica is None:
            fleet.start(fleet.num_started, pushed)
            fleet.serve(fleet.num_started - 1, pushed, pushed)
            model[fleet.num_started - 1] = [pushed, 0]
        elif action == "send":
            running.append(Rollout(number, Group(number, 1, 0, 1), 1))
            fleet.assign(running[-1], replica, 0.0)
            model[replica][1] += 1
        elif action == "end" and running:
            rollout = running.pop(rng.randrange(len(running)))
            assert rollout.replica is not None
            if rollout.replica.id in model:
                model[rollout.replica.id][1] -= 1
            fleet.release(rollout)
        elif action == "load":
            pushed += rng.choice([0, 1])
            fleet.load(replica, pushed)
            model[replica][0] = pushed
        elif action == "lose":
            fleet.lose(replica)
            del model[replica]
        oldest = rng.randint(max(0, pushed - 2), pushed)
        fresh = [(load, r) for r, (promised, load) in model.items() if promised >= oldest]
        found = fleet.least_loaded(oldest)
        assert (found and found.id) == (min(fresh)[1] if fresh else None)
        assert [r.id for r in fleet.fresh(oldest)] == sorted(r for _, r in fresh)
        busiest = min((-load, r) for r, (_, load) in model.items()) if model else (0, None)
        most = fleet.most_loaded()
        assert (most and most.id) == busiest[1]


def test_round_robin_sends_to_replicas_in_turn_and_passes_over_those_too_old() -> None:
    s = script(
        policies__dispatch="round-robin", policies__system="stream-sync", rollout__replicas=3
    )
    sent = of(Generate, s.draw(s.begin()))
    assert [c.replica for c in sent] == [0, 1, 2, 0]
    s.finish(0, 1, 2, 3)
    draws = s.step(1)
    s.tell(WeightsPushed(1, 1))
    s.tell(ReplicaLost(1, "gone"))  # its replacement comes up later
    assert [c.replica for c in of(Generate, s.draw(draws))] == [2, 0, 2, 0]


def test_random_dispatch_gives_equal_shares_that_only_the_seed_decides() -> None:
    def places(seed: int) -> list[int]:
        s = singles(40, policies__dispatch="random", rollout__replicas=4, seed=seed)
        return [c.replica for c in of(Generate, s.draw(s.begin()))[:40]]

    first = places(1)
    assert first == places(1) != places(2)
    assert [first.count(replica) for replica in range(4)] == [10] * 4
    assert first != sorted(first) and first != [i % 4 for i in range(40)]


def test_a_rollout_that_comes_back_is_dealt_again() -> None:
    s = singles(8, policies__dispatch="random")
    s.draw(s.begin())
    s.finish(*[rollout for rollout in range(8) if s.state.rollouts[rollout].replica is None])
    lost = s.state.rollouts[3].replica
    assert lost is not None
    sent = s.tell(ReplicaLost(lost.id, "gone"), Failed(Generate(3, lost.id, 0), "gone"))
    assert [(c.rollout, c.replica) for c in of(Generate, sent)] == [(3, 1 - lost.id)]


@pytest.mark.parametrize("dispatch", ["least-loaded", "round-robin", "random", "skewness-aware"])
@pytest.mark.parametrize("placement", ["split", "together"])
def test_siblings_share_a_replica_only_where_groups_are_placed_together(
    dispatch: str, placement: str
) -> None:
    s = script(
        policies__dispatch=dispatch,
        policies__group_placement=placement,
        policies__latency=[[1, 0.01], [4, 0.02]],
        algorithm__group_size=4,
    )
    sent = of(Generate, s.draw(s.begin()))
    used = [{c.replica for c in sent if c.rollout // 4 == group} for group in range(4)]
    if placement == "together":
        assert [len(replicas) for replicas in used] == [1] * 4
        assert len(set.union(*used)) == 2
    else:
        assert max(map(len, used)) == 2


def test_rollouts_do_not_follow_siblings_to_a_lost_replica() -> None:
    s = script(policies__group_placement="together", policies__system="stream-sync")
    places = {c.rollout: c.replica for c in of(Generate, s.draw(s.begin()))}
    lost = places[0]
    s.tell(ReplicaLost(lost, "gone"))
    for rollout in (0, 1):
        (again,) = of(Generate, s.tell(Failed(Generate(rollout, lost, 0), "gone")))
        assert again.replica == 1 - lost


def test_a_rollout_waits_while_every_replica_promises_too_old_a_version() -> None:
    s = script(policies__system="stream-sync")
    s.draw(s.begin())
    s.finish(0, 1, 2, 3)
    assert not of(Generate, s.draw(s.step(1)))  # version 1 exists but no replica will have it yet
    sent = s.tell(WeightsPushed(1, 1))
    assert [type(c) for c in sent] == [LoadWeights] * 2 + [Generate] * 4


def test_longest_first_starts_older_steps_first_and_then_longer_rollouts() -> None:
    def place(order: FirstInFirstOut | LongestFirst, step: int, expected: int, id: int) -> int:
        return order.priority(Rollout(id, Group(0, step, 0, 1), expected))

    longest, fifo = LongestFirst(), FirstInFirstOut()
    assert place(longest, 1, 900, 5) < place(longest, 1, 100, 4)
    assert place(longest, 1, 1, 5) < place(longest, 2, 10**6, 4)
    assert place(fifo, 2, 1, 4) < place(fifo, 1, 900, 5)

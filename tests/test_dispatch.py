"""Which replica gets which rollout, and when."""

from __future__ import annotations

from random import Random
from typing import Any

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
from streamrl.runfile.dispatch_choice import DISPATCH
from streamrl.sim.batch_generation import Distribution, DrawnBatch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import of, script, singles, small_run
from tests.test_replica_kinds import WIDE

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


# The first batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_sync", ["drain-then-load", "between-batches"])
@pytest.mark.parametrize("placement", ["split", "together"])
@pytest.mark.parametrize("others", [[], [{**WIDE, "share": 1.7}], [{**WIDE, "share": 0.3}]])
@pytest.mark.parametrize("dispatch", sorted(DISPATCH.own))
def test_policies_deal_a_batch_to_idle_replicas_as_they_send_it(
    dispatch: str, others: list[dict[str, Any]], placement: str, weight_sync: str
) -> None:
    changes = {
        "policies.dispatch": dispatch,
        "policies.group_placement": placement,
        "policies.order": "longest-first",
        "algorithm.prompts_per_step": 48,
        "workload.lengths.ranker": "recall",
    }
    changes |= {"policies.system": "stream-async", "policies.weight_sync": weight_sync}
    run = small_run({**changes, "rollout.others": others})
    run = fill_policies(run, Costs.load(run))
    distribution = Distribution(run, DrawnBatch(SimulatedWorkload(run).draw(0, 48)))
    dealt, sent = list(distribution.dealt()), distribution.sent_by_engine()
    assert len(dealt) == run.algorithm.rollouts_per_step
    assert sorted(dealt, key=_of_rollout) == sorted(sent, key=_of_rollout)
    for replica in range(run.rollout.num_replicas):
        first, second = ([c.rollout for c in cs if c.replica == replica] for cs in (dealt, sent))
        assert first == second


@pytest.mark.parametrize(
    "changes", [{"learns_from_siblings": True}, {"concurrency": "kv-pressure"}], ids=str
)
def test_a_policy_that_waits_for_room_is_asked_for_each_rollout(changes: dict[str, Any]) -> None:
    changes = {f"policies.{key}": value for key, value in changes.items()}
    run = small_run({**changes, "policies.order": "longest-first", "algorithm.prompts_per_step": 8})
    distribution = Distribution(run, DrawnBatch(SimulatedWorkload(run).draw(0, 8)))
    assert not list(distribution.dealt())
    assert distribution.commands() == distribution.sent_by_engine() != []


def _of_rollout(command: Generate) -> int:
    return command.rollout


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

"""Rollouts that outgrow what the others were expected to take: when they move to the tail's replicas."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from streamrl.engine.messages import (
    Abort,
    DrawnGroup,
    DrawPrompts,
    Generate,
    PromptsDrawn,
    ReplicaLost,
    ReplicaStarted,
    Woke,
)
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import Script, generated, of, singles, small_run
from tests.test_skew import BATCH

STEEP = [[1, 0.01], [2, 0.05], [8, 0.2]]
EXPECTED = [10, 10, 10, 10, 10, 10, 10, 10, 100]
"""Of which skewness-aware dispatch gives the last a replica of its own."""
RECENT = [10, 20, 30, 40, 50, 60, 70, 100, 5000]
"""Lengths of the step before: a fifth were of 100 tokens and more."""
SKEW: dict[str, Any] = {
    "policies__dispatch": "skewness-aware",
    "policies__skew_objective": "max",
    "policies__migration": "overrun",
    "policies__latency": STEEP,
    "policies__context_time": 1e-6,
}


def begun(knows: bool = True, **changes: Any) -> Script:
    """Return a script whose replicas generate rollouts of the expected lengths: the tail on one, the others on the other."""
    s = singles(len(EXPECTED), policies__system="stream-sync", **{**SKEW, **changes})
    draw = of(DrawPrompts, s.begin())[0]
    groups = tuple(DrawnGroup(g, (g,), 40, (tokens,)) for g, tokens in enumerate(EXPECTED))
    sent = of(Generate, s.tell(PromptsDrawn(draw.step, draw.oldest_version, groups)))
    (tail,) = {c.replica for c in sent if c.rollout == 8}
    assert {c.rollout for c in sent if c.replica == tail} == {8}
    for tokens in RECENT if knows else []:
        s.state.recent.add(tokens)
    return s


def replica_of(s: Script, rollout: int) -> int:
    found = s.state.rollouts[rollout].replica
    assert found is not None
    return found.id


def test_a_rollout_longer_than_the_tails_shortest_goes_on_beside_it() -> None:
    s = begun()
    tail, rest = replica_of(s, 8), replica_of(s, 1)
    s.now += 15  # seconds: too few for 100 tokens in steps of 0.2
    assert not of(Abort, s.tell(generated(0)))
    s.now += 30
    (abort,) = of(Abort, s.tell(generated(1)))
    assert abort.replica == rest
    sent = of(Generate, s.tell(generated(abort.rollout, tokens=130, finish="aborted")))
    assert [(c.rollout, c.replica, c.prefix) for c in sent] == [(abort.rollout, tail, 130)]


def test_what_waits_in_a_replicas_queue_does_not_grow() -> None:
    s = begun(rollout__max_running=3, policies__latency=[[1, 0.01], [2, 0.05], [3, 0.2]])
    s.tell(generated(0))  # 1, 2 and 3 run
    s.now += 45
    (abort,) = of(Abort, s.tell(Woke(s.now)))
    assert abort.rollout == 1
    moved = of(Abort, s.tell(generated(1, tokens=130), generated(8)))
    assert [c.rollout for c in moved] == [2]
    begun_now = s.tell(generated(2, tokens=130), generated(3, tokens=130), Woke(s.now))
    assert not of(Abort, begun_now)  # 4, 5 and 6


@pytest.mark.parametrize(
    "changes",
    [
        {"policies__migration": "none"},
        {"policies__context_time": 1000.0},
        {"policies__latency": [[1, 0.2], [8, 0.2]]},
    ],
)
def test_nothing_moves_that_would_not_gain(changes: dict[str, Any]) -> None:
    s = begun(**changes)
    s.now += 60
    assert not of(Abort, s.tell(generated(0), generated(1)))


def test_nothing_moves_before_anybody_knows_how_long_rollouts_are() -> None:
    s = begun(knows=False)
    s.now += 60
    assert not of(Abort, s.tell(generated(0), generated(1)))


def test_nothing_moves_to_a_tail_that_is_lost() -> None:
    s = begun()
    tail = replica_of(s, 8)
    s.tell(ReplicaLost(tail, "gone"))
    s.now += 60
    assert not of(Abort, s.tell(ReplicaStarted(tail + 1, 0), generated(0)))


def test_it_is_refused_without_a_tail_of_its_own() -> None:
    with pytest.raises(RunError, match=r"'overrun' .* policies.dispatch 'skewness-aware', got"):
        small_run({"policies.migration": "overrun", "policies.dispatch": "random"})


def test_what_a_bad_ranker_misses_costs_less_where_it_moves() -> None:
    def time(migration: str, seed: int) -> float:
        run = small_run(
            {
                **BATCH,
                "seed": seed,
                "algorithm.steps": 4,
                "policies.migration": migration,
                "policies.dispatch": "skewness-aware",
                "policies.skew_objective": "max",
                "workload.lengths.ranker": "recall",
                "workload.lengths.ranker_recall": 0.3,
                "rollout.max_running": 64,
            }
        )
        costs = Costs.load(run)
        trace = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run()
        return trace.entries[-1].time

    seeds = range(4)
    assert mean(time("overrun", s) for s in seeds) < 0.99 * mean(time("none", s) for s in seeds)

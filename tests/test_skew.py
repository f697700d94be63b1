"""Skewness-aware dispatch and longest-first order: who decodes with whom, and what that is worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engine.estimates import Latency, RecentLengths, quantile
from streamrl.engine.messages import (
    DrawnGroup,
    DrawPrompts,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaLost,
)
from streamrl.engine.policies.skew import drain_time
from streamrl.engine.systems import build_engine
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import (
    SINGLE,
    Script,
    of,
    singles,
    small_run,
)

FLAT = [[1, 0.01], [64, 0.01]]
STEEP = [[1, 0.01], [8, 0.05]]


def sent(s: Script, expected: list[int]) -> dict[int, int]:
    """Answer the first draw with rollouts of these expected lengths; return the replica of each."""
    draw = of(DrawPrompts, s.begin())[0]
    groups = tuple(DrawnGroup(g, (g,), 40, (tokens,)) for g, tokens in enumerate(expected))
    commands = s.tell(PromptsDrawn(draw.step, draw.oldest_version, groups))
    return {c.rollout: c.replica for c in of(Generate, commands)}


def skewed(num_prompts: int, **changes: Any) -> Script:
    """Return a script of skewness-aware dispatch over groups of one rollout."""
    chosen = {
        "policies__dispatch": "skewness-aware",
        "policies__skew_objective": "max",
        "policies__latency": FLAT,
        **changes,
    }
    return singles(num_prompts, policies__system="stream-sync", **chosen)


# The partition ------------------------------------------------------------------------------------


def test_the_longest_rollouts_have_replicas_of_their_own() -> None:
    places = sent(
        skewed(20, rollout__replicas=4), [100] * 8 + [900] * 2 + [90, 800, 80, 700] + [50] * 6
    )
    tail = {places[r] for r in (8, 9, 11, 13)}
    assert not tail & {replica for r, replica in places.items() if r not in (8, 9, 11, 13)}
    assert set(places.values()) == {0, 1, 2, 3}


def test_the_split_is_the_cheapest_of_all_by_the_papers_equations() -> None:
    expected = [10 * (r + 1) for r in range(40)]
    for latency, objective in ((STEEP, "max"), (STEEP, "sum"), (FLAT, "max"), (FLAT, "sum")):
        places = sent(
            skewed(
                40,
                rollout__replicas=6,
                policies__latency=latency,
                policies__skew_objective=objective,
            ),
            expected,
        )
        model = Latency([(batch, seconds) for batch, seconds in latency])
        long, middle = quantile(sorted(expected), 0.9), quantile(sorted(expected), 0.5)
        costs = [
            (max if objective == "max" else lambda *parts: sum(parts))(
                model.time(8, long, n), model.time(32, middle, 6 - n)
            )
            for n in range(1, 6)
        ]
        num_tail = len({places[r] for r in range(32, 40)})
        assert costs[num_tail - 1] == pytest.approx(min(costs)), (latency, objective)


def test_the_share_of_the_tail_is_a_parameter() -> None:
    places = sent(skewed(10, policies__tail_share=0.5), [10 * (r + 1) for r in range(10)])
    assert {places[r] for r in range(5, 10)} == {0}
    assert {places[r] for r in range(5)} == {1}


@pytest.mark.parametrize("expected", [[100] * 8, [100, 200, 300, 400]])
def test_where_nothing_stands_out_or_one_replica_is_all_there_is_loads_are_even(
    expected: list[int],
) -> None:
    num_replicas = 4 if len(set(expected)) == 1 else 1
    s = skewed(len(expected), rollout__replicas=num_replicas)
    places = list(sent(s, expected).values())
    assert [places.count(r) for r in range(num_replicas)] == [len(expected) // num_replicas] * (
        num_replicas
    )


def test_a_rollout_that_comes_back_joins_its_own_part() -> None:
    s = skewed(10, rollout__replicas=4)
    places = sent(s, [900, 800] + [100] * 8)
    for rollout in (1, 5):
        lost = places[rollout]
        command = Failed(Generate(rollout, lost, 0), "broken")
        (again,) = of(Generate, s.tell(command))
        tail = {places[0], places[1]}
        assert (again.replica in tail) == (rollout == 1)


def test_rollouts_of_a_lost_tail_replica_go_where_there_is_room() -> None:
    s = skewed(10, rollout__replicas=2)
    places = sent(s, [900, 800] + [100] * 8)
    tail = places[0]
    s.tell(ReplicaLost(tail, "gone"))
    (again,) = of(Generate, s.tell(Failed(Generate(0, tail, 0), "gone")))
    assert again.replica == 1 - tail


def test_a_step_draws_on_the_lengths_of_rollouts_that_finished_lately() -> None:
    recent = RecentLengths(enough=3)
    for tokens in (50, 10, 40):
        assert not recent.is_full
        recent.add(tokens)
    assert recent.is_full and recent.ordered == [10, 40, 50]
    for tokens in (7, 8, 9, 60):
        recent.add(tokens)
    assert recent.ordered == [7, 8, 9, 10, 40, 60]  # 50 came first and is forgotten
    assert (quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 1.0)) == (3, 4)


def test_the_split_follows_the_lengths_that_finished_lately() -> None:
    def tail_replicas(recent: list[int]) -> int:
        s = skewed(40, rollout__replicas=8, policies__latency=STEEP)
        for tokens in recent:
            s.state.recent.add(tokens)
        places = sent(s, [100 + r for r in range(40)])
        return len({places[r] for r in range(32, 40)})

    even, long_tail = [100] * 40, [100] * 35 + [5000] * 5
    assert tail_replicas(even) == tail_replicas([]) < tail_replicas(long_tail)
    assert tail_replicas(long_tail[:35]) == tail_replicas([])  # too few speak for the short ones


@given(st.lists(st.integers(1, 99), min_size=1, max_size=60), st.integers(0, 120))
def test_what_a_rollout_has_ahead_is_the_median_of_those_that_got_further(
    lengths: list[int], done: int
) -> None:
    recent = RecentLengths(enough=5)
    for tokens in lengths:
        recent.add(tokens)
    kept = lengths[-10:]
    assert recent.ordered == sorted(kept)
    further = sorted(tokens for tokens in kept if tokens > done)
    assert recent.expected_rest(done) == (further[len(further) // 2] - done if further else 0)


def test_it_refuses_to_reckon_without_a_latency() -> None:
    with pytest.raises(ValueError, match=r"policies.latency is missing: policies.dispatch 'skew"):
        build_engine(small_run({"policies.dispatch": "skewness-aware"}))


# Draining batches ---------------------------------------------------------------------------------


def test_a_batch_of_equal_rollouts_drains_in_their_length_times_its_step() -> None:
    latency = Latency([(1, 0.01), (8, 0.08)])
    assert drain_time(latency, [100] * 8, 2) == pytest.approx(100 * 0.04)
    assert drain_time(latency, [100] * 32, 2) == pytest.approx(100 * 0.08 * 2)


def test_a_batch_drains_faster_as_it_shrinks() -> None:
    latency = Latency([(1, 0.01), (2, 0.02)])
    assert drain_time(latency, [100, 300], 1) == pytest.approx(100 * 0.02 + 200 * 0.01, rel=0.02)


# In a simulation ----------------------------------------------------------------------------------

BATCH = {
    **SINGLE,
    "algorithm.prompts_per_step": 256,
    "algorithm.steps": 1,
    "rollout.max_tokens": 20000,
    "rollout.replicas": 8,
    "workload.lengths.scale": 1.0,
    "policies.system": "stream-sync",
}


class Ran(NamedTuple):
    """What a simulated step showed."""

    makespan: float
    lengths: list[int]


def simulate_batch(**changes: Any) -> Ran:
    """Generate one batch of 256 rollouts on eight replicas."""
    run = small_run({**BATCH, **{key.replace("__", "."): v for key, v in changes.items()}})
    costs = Costs.load(run)
    trace = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run()
    drawn = next(e.time for e in trace.entries if isinstance(e.event, PromptsDrawn))
    ends = [e for e in trace.entries if isinstance(e.event, Generated)]
    lengths = [e.event.tokens for e in ends if isinstance(e.event, Generated)]
    return Ran(ends[-1].time - drawn, lengths)

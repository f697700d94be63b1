"""Which rollouts a simulated replica lets in: by what they have, or by the longest that they may become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import Generated
from streamrl.engine.trace import replay
from streamrl.hardware.memory import kv_capacity, most_running
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import latency_points
from streamrl.sim.fidelity.paper import Case, make_case
from streamrl.sim.world import simulate
from tests.runs import checked_world, run_with_capacity, small_run
from tests.test_sim import Bench, Job
from tests.traces import check_every_rollout_is_accounted_for

RESERVE: dict[str, Any] = {"rollout.admission": "reserve", "rollout.max_running": 64}


def fullest(run: Run, siblings: int, prompt_tokens: int = 40) -> int:
    """Return how many of equally long rollouts a replica takes in at once."""
    bench = Bench(run, Costs.load(run))
    for rollout in range(80):
        bench.send(Job(0.0, rollout, rollout // siblings, rollout, prompt_tokens, 200))
    while not bench.replica._running:
        bench.env.step()
    return len(bench.replica._running)


@pytest.mark.parametrize(("size", "batch"), [("7B", 51), ("32B", 16), ("72B", 23)])
def test_the_longest_rollouts_of_the_paper_fit_its_replicas_this_often(
    size: str, batch: int
) -> None:
    run = make_case(Case(size, "20K", "sync"))
    replica = resolve(run).replica
    assert most_running(replica) == batch == kv_capacity(replica) // 20_400
    assert batch < run.rollout.max_running
    assert latency_points(replica, Costs.load(run))[-1][0] == batch
    assert fullest(run, siblings=1, prompt_tokens=400) == batch


@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("siblings", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [2400, 4000, 5001])
def test_a_replica_takes_in_as_many_as_the_closed_form_says(
    tokens: int, siblings: int, shares_prefixes: bool
) -> None:
    changes = {
        **RESERVE,
        "algorithm.group_size": siblings,
        "algorithm.name": "reinforce++",
        "rollout.shares_prefixes": shares_prefixes,
    }
    run = run_with_capacity(tokens, changes)
    replica = resolve(run).replica
    most = most_running(replica)
    prompts = -(-most // siblings) if shares_prefixes else most
    assert prompts * 40 + most * 256 <= kv_capacity(replica)
    assert fullest(run, siblings) == most


def test_max_running_bounds_a_replica_that_reserves_too() -> None:
    run = small_run({**RESERVE, "rollout.max_running": 5})
    assert most_running(resolve(run).replica) == fullest(run, siblings=1) == 5


def test_a_replica_that_lets_in_on_demand_takes_in_more_than_may_grow_long() -> None:
    reserving = run_with_capacity(2400, RESERVE)
    on_demand = run_with_capacity(2400, {**RESERVE, "rollout.admission": "on-demand"})
    most = most_running(resolve(on_demand).replica)
    assert fullest(reserving, 1) < fullest(on_demand, 1) <= most == 64


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    system=st.sampled_from(["stream-sync", "stream-async", "fully-async", "colocated"]),
    siblings=st.integers(1, 4),
)
def test_no_run_that_reserves_preempts_and_each_decides_alike_when_replayed(
    seed: int, system: str, siblings: int
) -> None:
    changes = {
        **RESERVE,
        "seed": seed,
        "policies.system": system,
        "algorithm.name": "reinforce++",
        "algorithm.group_size": siblings,
        "algorithm.prompts_per_step": 12,
        "workload.max_prompt_tokens": 64,
    }
    world = checked_world(run_with_capacity(900, changes))
    most = most_running(resolve(world.run_file).replica)
    trace = world.run()
    check_every_rollout_is_accounted_for(trace)
    assert not any(replica.num_preempted for replica in world.replicas.values())
    assert replay(trace) is None
    assert most < 12 * siblings
    assert most_at_once(trace.entries) <= most * world.run_file.rollout.replicas


def most_at_once(entries: list[Any]) -> int:
    """Return the most rollouts that decoded at one instant, from what each says of its own time."""
    ends = [(t, e.run_time) for t, e, _ in entries if isinstance(e, Generated) and e.run_time]
    changes = sorted([(t - lasted, 1) for t, lasted in ends] + [(t - 1e-9, -1) for t, _ in ends])
    now = most = 0
    for _, by in changes:
        now += by
        most = max(most, now)
    return most


def test_memory_that_holds_all_reserves_nothing_away() -> None:
    changes = {"rollout.max_running": 4, "seed": 3}
    reserving = simulate(small_run({**changes, "rollout.admission": "reserve"}))
    assert [e[:2] for e in reserving.entries] == [
        e[:2] for e in simulate(small_run(changes)).entries
    ]

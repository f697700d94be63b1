"""How many rollouts a replica may have where that follows the pressure on its KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.concurrency import (
    BACKOFF,
    GROWTH,
    LEAST_OVERCOMMIT,
    ConcurrencyLimit,
    FinalLengths,
)
from streamrl.engine.messages import Generate, Generated, ReplicaStarted
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.roles import CacheState
from streamrl.executor.rollout.vllm_engine import CacheWatch
from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.world import SimWorld, simulate
from tests.runs import SINGLE, checked_world, of, run_with_capacity, script, small_run
from tests.scripted import make_world
from tests.test_execute import real_run
from tests.test_sim import COSTS, RUN, Bench, equal_jobs
from tests.traces import check_every_rollout_is_accounted_for

KV = {"policies.concurrency": "kv-pressure"}
CROWDED: dict[str, Any] = {
    **SINGLE,
    "algorithm.prompts_per_step": 64,
    "algorithm.steps": 4,
    "rollout.max_running": 64,
    "workload.max_prompt_tokens": 64,
    "rollout.shares_prefixes": False,
}
"""As many rollouts as nothing but memory keeps from running at once."""


# The law ------------------------------------------------------------------------------------------


def opened(
    capacity: int | None = 1000, expected: float = 100.0, most: int = 64
) -> ConcurrencyLimit:
    places = ConcurrencyLimit(most)
    places.open(capacity, expected)
    return places


def turn(
    places: ConcurrencyLimit, use: float = 0.5, num_left: int | None = None, put_off: int = 0
) -> None:
    """Let as many rollouts end as there are places, and some be put off meanwhile."""
    for number in range(places.limit):
        left = places.limit - 1 if num_left is None else num_left
        places.see(use, put_off if number == 0 else 0, left, 100.0)


@pytest.mark.parametrize(
    ("capacity", "expected", "limit"), [(1000, 100.0, 10), (1000, 3000.0, 1), (10**6, 100.0, 64)]
)
def test_a_replica_begins_with_as_many_as_fit_at_their_ends(
    capacity: int, expected: float, limit: int
) -> None:
    assert opened(capacity, expected).limit == limit


def test_where_nobody_tells_of_a_cache_there_are_all_places() -> None:
    places = opened(capacity=None)
    places.see(0.99, 7, 3, 100.0)
    assert places.limit == 64


def test_a_turn_that_went_well_adds_a_little_and_one_with_nothing_to_gain_adds_nothing() -> None:
    grown, full, idle = opened(), opened(), opened()
    turn(grown)
    turn(full, use=0.99)
    turn(idle, num_left=3)
    assert grown.overcommit == pytest.approx(GROWTH)
    assert full.overcommit == idle.overcommit == 1.0
    turn(grown)
    assert grown.limit == 11


def test_what_is_put_off_for_each_that_ends_cuts_places_by_the_turn() -> None:
    few, some, many = opened(4000), opened(4000), opened(4000)
    for places, put_off in ((few, 2), (some, 10), (many, 11)):
        turn(places, put_off=put_off)  # of 40 that end
    assert [p.overcommit for p in (few, some, many)] == pytest.approx([GROWTH, 1.0, BACKOFF])
    assert many.limit == 36
    turn(many)
    assert many.overcommit == pytest.approx(
        BACKOFF * GROWTH
    )  # what was put off before is forgotten
    for _ in range(20):
        turn(many, put_off=99)
    assert many.overcommit == LEAST_OVERCOMMIT


def test_before_a_step_has_ended_what_runs_counts_as_the_longest() -> None:
    final = FinalLengths(enough=4, longest=1000)
    assert final.expected(num_running=0) == final.expected(num_running=9) == 1000
    for tokens in (100, 200):
        final.add(tokens)
    assert final.expected(num_running=1) == (100 + 200 + 1000) / 3
    assert final.expected(num_running=9) == (100 + 200 + 2 * 1000) / 4
    for tokens in (300, 400, 500):
        final.add(tokens)
    assert final.expected(num_running=9) == (200 + 300 + 400 + 500) / 4


# The engine ---------------------------------------------------------------------------------------


def told(rollout: int, use: float = 0.5, num_preempted: int = 0) -> Generated:
    return Generated(rollout, 60, "stop", 0, 1.0, 0.1, use, num_preempted)


def test_a_replica_is_sent_no_more_than_it_has_places_and_the_next_one_as_one_is_free() -> None:
    keys = {key.replace(".", "__"): value for key, value in {**SINGLE, **KV}.items()}
    s = script(**keys, algorithm__prompts_per_step=12, rollout__max_running=8, rollout__replicas=2)
    draws = s.begin_with(200, 50_000)
    sent = [(c.replica, c.rollout) for c in of(Generate, s.draw(draws))]
    longest = s.state.fleet.final.longest  # type: ignore[union-attr]
    assert 50_000 // longest > 8 and 200 // longest == 0
    assert [replica for replica, _ in sent].count(0) == 1  # the least that there can be
    assert [replica for replica, _ in sent].count(1) == 8  # rollout.max_running
    (next_one,) = of(Generate, s.tell(told(sent[-1][1])))
    assert next_one.replica == 1
    places = s.state.fleet.replicas[1].places
    assert places is not None and places.overcommit == 1.0
    on_it = [rollout for replica, rollout in sent if replica == 1][:-1]
    s.tell(*(told(rollout, use=1.0, num_preempted=3) for rollout in on_it))
    assert places.overcommit == BACKOFF


# Simulated ----------------------------------------------------------------------------------------


def preempted(world: SimWorld) -> int:
    world.run()
    return sum(replica.num_preempted for replica in world.replicas.values())


def test_a_crowded_replica_preempts_far_less_than_with_all_places() -> None:
    crowded = run_with_capacity(2400, CROWDED)
    fixed, follows = (preempted(checked_world(r)) for r in (crowded, with_kv(crowded)))
    assert fixed > 60 and follows < fixed / 2


def with_kv(run: Run) -> Run:
    policies = msgspec.structs.replace(run.policies, concurrency="kv-pressure")
    return msgspec.structs.replace(run, policies=policies)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    system=st.sampled_from(["stream-sync", "stream-async", "fully-async", "colocated"]),
    tokens=st.integers(400, 3000),
    siblings=st.integers(1, 4),
)
def test_every_run_that_follows_pressure_ends_and_is_decided_alike_when_replayed(
    seed: int, system: str, tokens: int, siblings: int
) -> None:
    changes = {
        **KV,
        "seed": seed,
        "policies.system": system,
        "algorithm.name": "reinforce++",
        "algorithm.group_size": siblings,
        "algorithm.prompts_per_step": 12,
        "workload.max_prompt_tokens": 64,
    }
    trace = checked_world(run_with_capacity(tokens, changes)).run()
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None


def test_traces_say_nothing_of_caches_where_no_policy_asks() -> None:
    for changes, says in (({}, False), (KV, True)):
        encoded = msgspec.json.encode(
            [entry.event for entry in simulate(small_run(changes)).entries]
        )
        assert (b"cache_use" in encoded) == (b"cache_tokens" in encoded) == says


def test_a_simulated_replica_tells_how_much_it_holds_and_what_it_has_put_off() -> None:
    costs = dataclasses.replace(COSTS, kv_capacity=300)
    bench = Bench(with_kv(RUN), costs).run(equal_jobs(6, prompt_tokens=40, length=120))
    uses = [event.cache_use for _, event in bench.events if isinstance(event, Generated)]
    put_off = [event.num_preempted for _, event in bench.events if isinstance(event, Generated)]
    assert all(use is not None and 0 <= use <= 1 for use in uses) and uses[-1] == 0 < max(uses)  # type: ignore[type-var]
    assert sum(put_off) == bench.replica.num_preempted > 0


def test_a_simulated_replica_says_at_its_start_what_it_can_hold() -> None:
    run = with_kv(small_run())
    started = [e.event for e in simulate(run).entries if isinstance(e.event, ReplicaStarted)]
    assert {event.cache_tokens for event in started} == {kv_capacity(resolve(run).replica)}


# Executed -----------------------------------------------------------------------------------------


def executed(run: Run, **options: Any) -> Trace:
    async def go() -> Trace:
        world = make_world(run, options, False)
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


def test_an_executed_run_follows_what_its_engines_tell_and_is_replayed_alike(
    tmp_path: Path,
) -> None:
    keys = {key.replace(".", "__"): value for key, value in {**SINGLE, **KV}.items()}
    changes = {"algorithm__prompts_per_step": 16, "rollout__max_running": 16}
    run = real_run(tmp_path, **{**keys, **changes})
    executed(run, cache_tokens=400)
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace) is None
    events = [entry.event for entry in trace.entries]
    assert {e.cache_tokens for e in events if isinstance(e, ReplicaStarted)} == {400}
    assert all(e.cache_use is not None for e in events if isinstance(e, Generated))


# What cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"policies.dispatch": "round-robin"}, "policies.dispatch"),
        ({"policies.group_placement": "together"}, "policies.group_placement"),
        ({"policies.weight_sync": "between-batches"}, "policies.weight_sync"),
        ({"rollout.others": ({"pool": "far", "replicas": 1},)}, "policies.concurrency"),
    ],
)
def test_policies_that_ask_for_no_place_are_refused_beside_it(
    changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(RunError, match=key) as refused:
        small_run({**KV, **changes})
    assert refused.value.key == key and "kv-pressure" in str(refused.value)


def test_what_vllm_says_of_its_passes_is_kept_until_somebody_asks() -> None:
    watch = CacheWatch()
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=40, block_size=16))
    assert watch(config, engine_index=0) is watch
    for use, num_preempted in ((0.5, 2), (0.9, 1)):
        stats = (
            SimpleNamespace(kv_cache_usage=use),
            SimpleNamespace(num_preempted_reqs=num_preempted),
        )
        watch.record(*stats, mm_cache_stats=None, engine_idx=0)
    watch.record(None, None)
    assert watch.state(config) == CacheState(tokens=640, use=0.9, num_preempted=3)

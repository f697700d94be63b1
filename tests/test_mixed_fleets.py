"""Plans with two kinds of replicas: what a second pool, or other degrees, adds to the best of one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, make_run, write_run
from streamrl.sim.planner.layouts import Degrees, Replicas, mixed_fleets
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Pairs
from streamrl.sim.steady_state import measure_steady
from tests.runs import make_table
from tests.test_plan import Here

POOLS = {
    "h20": {"gpu": "h20", "gpus_per_node": 8, "price": 0.9},
    "h800": {"gpu": "h800", "gpus_per_node": 8, "price": 2.5},
}
TRAINER = Degrees("h800", 2, 2, 1, 1, 8, 1, "full", None, False)
LOCAL = Replicas("h20", 8, 1, 1, 4)
ONE_TRAINER: dict[str, Any] = {
    "trainer_tensor_parallel": [4],
    "pipeline_parallel": [1],
    "micro_batch": [8],
    "sync_modes": ["full"],
}
"""Of which kinds replicas are does not hang on who trains."""


def offer(plan: dict[str, Any] | None = None, **changes: Any) -> Run:
    """Return an offer that trains on half of its only node of H800; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    link = {"between": ["h20", "h800"], "bandwidth": "400 Gbps"}
    section = {"objective": "step-time", "unit": 4, "systems": ["stream-async"], **(plan or {})}
    table = make_table(
        {
            "cluster": {"pools": POOLS, "links": [link]},
            "rollout.pool": "h20",
            "rollout.max_tokens": 4000,
            "rollout.max_running": 256,
            "trainer": {"pool": "h800"},
            "algorithm.prompts_per_step": 32,
            "algorithm.steps": 200,
            "workload.lengths.scale": 0.1,
            "simulate.max_steps": 16,
            **keys,
        }
    )
    return make_run({**table, "plan": section})


def beside_local(run: Run) -> list[Replicas]:
    """Return what may come beside replicas of one kind."""
    replica, pools = resolve(run).replica, run.cluster.pools
    return mixed_fleets(replica, pools, run.plan, [LOCAL], [TRAINER])


def test_what_comes_beside_fits_the_pools_and_is_of_another_kind() -> None:
    run = offer()
    found = beside_local(run)
    pairs = Pairs(run.cluster, found, [TRAINER])
    assert pairs._room.all() and not pairs._unlinked.any()
    assert len(found) == len(set(found))
    for fleet in found:
        first, second = fleet.kinds
        assert (first.pool, first.tensor_parallel) != (second.pool, second.tensor_parallel)
        assert fleet.num_gpus == first.num_gpus + second.num_gpus
    pools = {fleet.pools for fleet in found}
    assert pools == {("h20", "h800"), ("h20",)}


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ({"mixes_replicas": False}, {}),
        ({"rollout_gpus": [4]}, {}),
        ({}, {"policies.migration": "consolidate"}),
    ],
)
def test_nothing_is_mixed_where_the_section_or_a_policy_knows_one_kind(
    plan: dict[str, Any], changes: dict[str, Any]
) -> None:
    keys = {key.replace(".", "__"): value for key, value in changes.items()}
    assert not Search.open(offer(plan, **keys)).mix()


def test_only_pools_and_degrees_that_may_generate_come_beside() -> None:
    found = beside_local(offer({"rollout_pools": ["h20"]}))
    assert found and {kind.pool for fleet in found for kind in fleet.kinds} == {"h20"}
    found = beside_local(offer({"rollout_tensor_parallel": [1]}))
    assert found and {kind.tensor_parallel for fleet in found for kind in fleet.kinds} == {1}


def test_plans_keep_their_indices_when_others_are_opened() -> None:
    search = Search.open(offer())
    space = search.space
    before = [space.candidate(index) for index in range(len(space))]
    bounds, num_plans = search.bounds(), len(space)
    assert search.mix()
    wider = search.space
    assert [wider.candidate(index) for index in range(num_plans)] == before
    assert search.bounds()[:num_plans] == pytest.approx(bounds)
    added = [wider.candidate(index) for index in range(num_plans, len(wider))]
    assert added and all(each.replicas.beside is not None for each in added)
    priced = wider.priced(wider.run.cluster).prices
    assert priced == pytest.approx(wider.prices)
    assert len(search.scores()) == len(search.complexity) == len(wider)


def test_two_kinds_are_bounded_by_what_both_do_a_second() -> None:
    search = Search.open(offer())
    search.mix()
    space, estimates = search.space, search.estimates
    mixed = next(i for i in range(len(space)) if space.candidate(i).replicas.beside is not None)
    fleet, work = space.candidate(mixed).replicas, estimates.least(mixed).work
    rates = []
    for kind in fleet.kinds:
        index = next(i for i in range(len(space)) if space.candidate(i).replicas == kind)
        rates.append(1 / estimates.least(index).work)
    assert 1 / work == pytest.approx(sum(rates))


def test_a_plan_takes_the_gpus_that_training_leaves_to_generate_and_is_what_is_simulated(
    tmp_path: Path,
) -> None:
    run = offer(ONE_TRAINER)
    planned, alike = make_plan(run), make_plan(offer({**ONE_TRAINER, "mixes_replicas": False}))
    fleet = planned.run.rollout
    assert [kind.pool for kind in fleet.kinds] in (["h20", "h800"], ["h800", "h20"])
    assert planned.plan.allocation.rollout.beside is not None
    assert planned.plan.allocation.step_time < 0.95 * alike.plan.allocation.step_time
    assert " and " in planned.plan.allocation.text.partition(" generate")[0]
    write_run(planned.run, tmp_path / "plan.toml", stated=list(planned.plan.allocation.settings))
    again = load_run(tmp_path / "plan.toml")
    assert measure_steady(again).step_time == planned.plan.allocation.step_time
    assert not [finding for finding in diagnose(again) if finding.level != "ok"]
    assert all(change.still_fits for change in planned.plan.sensitivity)


def test_of_plans_that_are_alike_one_kind_of_replica_is_simpler_than_two() -> None:
    search = Search.open(offer())
    search.mix()
    space = search.space
    mixed = next(i for i in range(len(space)) if space.candidate(i).replicas.beside is not None)
    candidate = space.candidate(mixed)
    alone = [
        i
        for i in range(len(space))
        if space.candidate(i) == candidate._replace(replicas=candidate.replicas.kinds[0])
    ]
    assert alone and search.complexity[mixed] > search.complexity[alone[0]]


def test_the_best_of_two_kinds_is_simulated_once_all_of_one_kind_are_ranked() -> None:
    search = Search.open(offer())
    search.run(Here(), lambda: None)
    kinds = {len(search.space.candidate(index).replicas.kinds) for index in search.speeds}
    assert kinds == {1, 2} and search.has_converged
    first = next(iter(search.speeds))
    assert search.space.candidate(first).replicas.beside is None
    assert np.isfinite(search.least_open())


def test_where_all_finalists_lose_their_gpus_a_plan_that_finishes_is_chosen() -> None:
    spot = {**POOLS["h20"], "spot_failures_per_gpu_day": 3000.0}
    pools = {**POOLS, "h20": spot}
    chosen = make_plan(offer(ONE_TRAINER, cluster__pools=pools)).plan.allocation
    assert (chosen.rollout.pool, chosen.rollout.beside) == ("h800", None)

"""The plans that an offer allows: what is open, what is cut and why, what a plan's run file then says."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest

from streamrl.hardware.resolved import resolve
from streamrl.record.charges import PaidGpus
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.layouts import (
    DIVISIBILITY,
    HEADS,
    RECOMPUTES,
    TRAINER_MEMORY,
    ZERO_ALONE,
    ZERO_STAGES,
    Degrees,
    TrainerRange,
    fitting_trainers,
    in_pool,
)
from streamrl.sim.planner.modes import Mode, find_modes
from streamrl.sim.planner.objective import OVER
from streamrl.sim.planner.space import LINK, POOL_SIZE, SHARED, Candidate, Space
from tests.runs import make_table

OFFER: dict[str, Any] = {
    "cluster": {
        "pools": {
            "h20": {"gpu": "h20", "nodes": 2, "price": 2.0},
            "h800": {"gpu": "h800", "nodes": 3, "price": 5.0},
        },
        "links": [{"between": ["h20", "h800"], "bandwidth": "80 Gbps"}],
    },
    "rollout.pool": "h20",
    "rollout.max_tokens": 2000,
    "trainer.pool": "h800",
    "algorithm.prompts_per_step": 64,
}


def offer(changes: dict[str, Any] | None = None, **plan: Any) -> Run:
    """Return an offer of two nodes of H20 and three of H800; keywords go to `[plan]`."""
    changes = copy.deepcopy({**OFFER, **(changes or {})})
    return make_run(make_table({**changes, "plan": plan}))


def candidates(space: Space) -> list[Candidate]:
    return [space.candidate(index) for index in range(len(space))]


# What is open -------------------------------------------------------------------------------------


def splits(run: Run) -> set[tuple[int, int]]:
    """Return the GPUs of both sides of each plan in one pool that fill nodes only together."""
    found = set()
    for replicas, trainer, mode in candidates(Space.open(run)):
        sides = (replicas.num_gpus, trainer.num_gpus)
        if mode.system == "colocated":
            assert not sides[0] % 8
        elif replicas.pools == (trainer.pool,) and any(num_gpus % 8 for num_gpus in sides):
            found.add(sides)
    return found


def test_both_sides_may_share_the_nodes_that_a_plan_rents() -> None:
    found = splits(offer())
    assert {(6, 2), (4, 4), (2, 6), (14, 2), (4, 12)} <= found
    assert {sum(sides) for sides in found} == {8, 16, 24}
    assert not splits(offer({"cluster.pools.h20.unit": 8, "cluster.pools.h800.unit": 8}))
    assert not splits(offer(trainer_pools=["h800"], rollout_pools=["h20"]))
    assert not splits(offer(rollout_gpus=[8, 16], trainer_gpus=[8]))


def test_every_plan_is_a_run_file_that_loads_and_costs_what_the_space_says() -> None:
    space = Space.open(offer())
    assert len(set(candidates(space))) == len(space) > 1000
    rng = np.random.default_rng(0)
    shared = [i for i in range(len(space)) if space.candidate(i).mode.system == "colocated"]
    assert shared
    for index in [*rng.choice(len(space), 60, replace=False), *shared[::50]]:
        run = space.candidate(index).apply(space.run)
        check_run(run)
        assert PaidGpus.of(run).dollars_per_second == pytest.approx(space.prices[index], rel=1e-12)


def test_a_plan_keeps_the_nodes_that_it_rents_and_no_other_pool() -> None:
    space = Space.open(offer(trainer_pools=["h800"], rollout_pools=["h800"], rollout_gpus=[8]))
    run = candidates(space)[0].apply(space.run)
    assert set(run.cluster.pools) == {"h800"} and run.cluster.links == []
    used = run.num_gpus
    assert run.cluster.pools["h800"].nodes == -(-used // 8)


def test_sides_of_one_pool_share_its_nodes_and_those_of_two_need_a_link() -> None:
    space = Space.open(offer())
    for replicas, trainer, mode in candidates(space):
        if mode.system == "colocated":
            assert (replicas.pool, replicas.num_gpus) == (trainer.pool, trainer.num_gpus)
        elif replicas.pool == trainer.pool:
            assert replicas.num_gpus + trainer.num_gpus <= 8 * (2 if trainer.pool == "h20" else 3)
    unlinked = Space.open(
        offer({"cluster": {**OFFER["cluster"], "links": []}, "rollout.pool": "h800"})
    )
    assert all(a.pool == b.pool for a, b, _ in candidates(unlinked))
    assert unlinked.cut[LINK] > 0 == space.cut[LINK]


def test_what_the_section_names_is_all_that_is_open() -> None:
    space = Space.open(
        offer(
            rollout_gpus=[16],
            trainer_gpus=[8],
            rollout_tensor_parallel=[2],
            trainer_tensor_parallel=[4],
            pipeline_parallel=[2],
            micro_batch=[2],
            systems=["stream-async", "stream-sync"],
            max_staleness=[1, 3],
            dispatch=["random"],
            sync_modes=["full"],
        )
    )
    assert {c.replicas[1:3] for c in candidates(space)} == {(8, 2)}
    assert {c.trainer[1:4] for c in candidates(space)} == {(1, 4, 2)}
    assert {c.mode for c in candidates(space)} == {
        Mode("stream-async", 1, "random", None, "full"),
        Mode("stream-async", 3, "random", None, "full"),
        Mode("stream-sync", None, "random", None, "full"),
    }


def test_the_bound_of_a_run_holds_for_every_system_that_generates_ahead() -> None:
    systems = ["fully-async", "one-step-async", "stream-sync"]
    run = offer({"policies": {"system": "stream-async", "max_staleness": 3}}, systems=systems)
    bounds = {mode.system: mode.max_staleness for mode in find_modes(run)}
    assert bounds == {"fully-async": 3, "one-step-async": 3, "stream-sync": None}
    unbound = offer({"policies": {"system": "stream-async"}}, systems=systems)
    assert {mode.max_staleness for mode in find_modes(unbound)} == {None}


def test_what_replaces_parts_of_the_runs_system_stays_with_that_system() -> None:
    run = offer({"policies": {"system": "stream-async", "waits_for_whole_batches": True}})
    space = Space.open(run)
    for system, waits in (("stream-async", True), ("one-step-async", None), ("colocated", None)):
        found = next(c for c in candidates(space) if c.mode.system == system)
        assert found.apply(run).policies.waits_for_whole_batches is waits


def test_a_mixture_opens_expert_parallelism_and_a_dense_model_does_not() -> None:
    dense = Space.open(offer())
    assert {c.replicas.expert_parallel for c in candidates(dense)} == {1}
    assert {c.trainer.expert_parallel for c in candidates(dense)} == {1}
    mixture = Space.open(offer({"model": {"name": "qwen3-30b-a3b"}}, micro_batch=[1]))
    assert {c.replicas.expert_parallel for c in candidates(mixture)} > {1, 2}
    assert {c.trainer.expert_parallel for c in candidates(mixture)} > {1, 2}


# What is cut --------------------------------------------------------------------------------------


def test_reasons_are_counted() -> None:
    space = Space.open(offer({"model": {"name": "qwen2.5-32b"}}, budget_per_hour=100.0))
    assert space.cut[TRAINER_MEMORY] > 0
    assert (
        space.cut[POOL_SIZE] > 0
        and space.cut[SHARED] > 0
        and space.cut[OVER.format("budget_per_hour")] > 0
    )
    assert space.cut[DIVISIBILITY] > 0
    assert (space.prices * SECONDS_PER_HOUR <= 100.0).all()


@pytest.mark.parametrize(
    ("changes", "plan", "part"),
    [
        (
            {"model": {"name": "deepseek-v3"}},
            {"rollout_pipeline_parallel": [1]},
            "no replica can generate .* holds no longest rollout",
        ),
        (
            {"model": {"name": "qwen2.5-72b"}},
            {"trainer_gpus": [8]},
            "no trainer can train .* memory",
        ),
        (
            {},
            {
                "rollout_gpus": [24],
                "trainer_gpus": [24],
                "systems": ["stream-sync"],
                "rollout_pools": ["h800"],
                "trainer_pools": ["h800"],
            },
            "more GPUs than their pool has",
        ),
        (
            {"cluster": {**OFFER["cluster"], "links": []}, "rollout.pool": "h800"},
            {"rollout_pools": ["h20"], "trainer_pools": ["h800"], "systems": ["stream-sync"]},
            "no link between",
        ),
        ({}, {"rollout_gpus": [64]}, "plan names GPUs that no pool has"),
        (
            {},
            {"budget_per_hour": 15.0},
            "budget_per_hour 15: the cheapest plan that fits costs 16.00",
        ),
        ({"costs": {"profile": "here.toml"}}, {}, "costs.profile"),
        ({"policies.resize": "adjust"}, {}, "policies.resize 'adjust'"),
        (
            {"cluster.pools": {"h20": {"gpu": "h20"}, "h800": {"gpu": "h80"}}},
            {},
            r"cluster.pools.h800.gpu: no profile 'h80' in profiles/gpus; there is h800",
        ),
    ],
)
def test_an_empty_space_says_which_constraint_emptied_it(
    changes: dict[str, Any], plan: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        Space.open(offer(changes, **plan))


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ({"systems": []}, "plan.systems is empty"),
        ({"systems": ["sync"]}, r"plan.systems.0 must be one of colocated, .*got 'sync'"),
        ({"rollout_pools": ["a100"]}, "plan.rollout_pools names 'a100'"),
        ({"micro_batch": [0]}, "plan.micro_batch must be at least 1, got 0"),
        ({"budget_per_step": 0.0}, "plan.budget_per_step must be above 0"),
        ({"seeds": 0}, "plan.seeds must be at least 1"),
        ({"budgets": 3.0}, "plan.budgets is not a key of a run file"),
    ],
)
def test_a_section_that_cannot_be_is_refused_by_key_and_value(
    plan: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError, match=part):
        offer(**plan)


def test_attention_heads_go_to_tensor_ranks_whole() -> None:
    space = Space.open(offer({}, rollout_tensor_parallel=[4, 8], trainer_tensor_parallel=[4, 8]))
    degrees = {side.tensor_parallel for side in [*space.replicas, *space.trainers]}
    assert degrees == {4}, "28 heads do not divide over 8"
    assert space.cut[HEADS] > 0


# Optimizers in host memory, and ZeRO 3 ------------------------------------------------------------


def trainers_of_72b(
    *,
    cut: Counter[str],
    host_memory: str = "2 TB",
    num_gpus: int = 16,
    offload_to: str = "host",
    **among: Any,
) -> list[Degrees]:
    """Return the trainers of a model that is alone, 72B with tensor parallelism of eight."""
    changes = {"model.name": "qwen2.5-72b", "trainer.logits": "chunked"}
    changes["trainer.offload_to"] = offload_to
    run = offer({**changes, "cluster.pools.h800.host_memory": host_memory})
    shared: dict[str, Any] = {"tensor_parallel": [8], "micro_batch": [1], "recompute": RECOMPUTES}
    found = TrainerRange(**{**shared, "zero": [1], **among})
    trainer = in_pool(resolve(run).trainer, "h800", run.cluster.pools)
    return list(fitting_trainers(trainer, num_gpus, found, cut))


def test_an_optimizer_waits_on_nvme_with_zero_3_where_host_memory_is_too_small() -> None:
    cut: Counter[str] = Counter()
    small: dict[str, Any] = {"host_memory": "200 GB", "tensor_parallel": [1], "num_gpus": 8}
    assert not trainers_of_72b(**small, zero=[3], cut=cut) and cut[TRAINER_MEMORY]
    found = trainers_of_72b(**small, zero=[3], offload_to="nvme", cut=cut)
    assert found and all(each.offload for each in found)
    assert not trainers_of_72b(**small, zero=[2], offload_to="nvme", cut=cut)


def test_an_optimizer_waits_in_host_memory_where_less_is_made_again_then() -> None:
    resident, offloading = trainers_of_72b(pipeline_parallel=[2], cut=Counter())
    assert resident.split == offloading.split and offloading.offload and not resident.offload
    assert RECOMPUTES.index(offloading.recompute) < RECOMPUTES.index(resident.recompute)
    alike = {"recompute": [resident.recompute], "pipeline_parallel": [2]}
    assert trainers_of_72b(**alike, cut=Counter()) == [resident]
    tight = trainers_of_72b(pipeline_parallel=[2], cut=Counter(), host_memory="100 GB")
    assert tight == [resident]


def test_what_is_not_tried_with_zero_3_is_counted_and_tried_where_it_is_asked_for() -> None:
    cut: Counter[str] = Counter()
    both = trainers_of_72b(zero=[1, 3], pipeline_parallel=[1, 2], cut=cut)
    assert cut[ZERO_STAGES] == 1 and cut[ZERO_ALONE] == 0
    assert not any(each.zero == 3 and each.pipeline_parallel > 1 for each in both)
    asked = trainers_of_72b(zero=[3], pipeline_parallel=[2], cut=cut)
    assert {each.pipeline_parallel for each in asked} == {2} and cut[ZERO_STAGES] == 1
    trainers_of_72b(zero=[1, 3], pipeline_parallel=[1], cut=cut, num_gpus=8)
    assert cut[ZERO_ALONE] == 1

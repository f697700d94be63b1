"""Algorithm 1: stage times are what the simulation takes, and the division is the best of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.engine.messages import Generated
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.sim.batch_generation import DrawnBatch, Finish, generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.fidelity.paper_scaling import read_paces
from streamrl.sim.planner.allocation import (
    TRAINED_BATCHES,
    Generation,
    Objective,
    Stages,
    Training,
    allocate,
    objective_of,
    search,
    step_time,
)
from streamrl.sim.planner.layouts import Degrees
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import make_table

PAPER: dict[str, Any] = {
    "cluster": {"pools": {"h800": {"gpu": "h800", "nodes": 4}}},
    "rollout.pool": "h800",
    "rollout.max_running": 256,
    "rollout.max_tokens": 20000,
    "trainer.pool": "h800",
    "trainer.kernels": "fused",
    "trainer.micro_batch": 4,
    "algorithm.name": "ppo",
    "algorithm.kl_coefficient": 0.001,
    "algorithm.group_size": 1,
    "algorithm.prompts_per_step": 256,
    "workload.lengths.scale": 1.0,
}
FAR_APART = {
    "cluster": {
        "pools": {"h20": {"gpu": "h20", "nodes": 4}, "h800": {"gpu": "h800", "nodes": 2}},
        "links": [{"between": ["h20", "h800"], "bandwidth": "80 Gbps"}],
    },
    "rollout.pool": "h20",
}


def paper_run(changes: dict[str, Any] | None = None, **more: Any) -> Run:
    """Return a run of PPO on four nodes of H800, on a quarter of the paper's batch."""
    keys = {key.replace("__", "."): value for key, value in more.items()}
    return make_run(make_table({**PAPER, **(changes or {}), **keys}))


# Stage times --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_parallel", [1, 4])
@pytest.mark.parametrize("replicas", [3, 4])
@pytest.mark.parametrize("dispatch", ["least-loaded", "random", "skewness-aware"])
def test_generation_takes_as_long_as_the_first_step_of_a_simulation(
    dispatch: str, replicas: int, tensor_parallel: int
) -> None:
    run = paper_run(
        rollout__replicas=replicas,
        rollout__tensor_parallel=tensor_parallel,
        rollout__max_running=40,  # fewer than wait: the order of the queue matters
        algorithm__steps=1,
        policies={"system": "disaggregated", "dispatch": dispatch, "order": "longest-first"},
        workload__lengths__ranker="oracle",
    )
    costs = Costs.load(run)
    batch = DrawnBatch(SimulatedWorkload(run).draw(0, 256))
    finishes = generate_batch(fill_policies(run, costs), costs, batch)
    simulated = [e.time for e in simulate(run).entries if isinstance(e.event, Generated)]
    assert [finish.time for finish in finishes] == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("slower", ["generation", "training"])
def test_the_slower_stage_takes_as_long_as_in_the_steps_of_an_asynchronous_run(slower: str) -> None:
    run = paper_run(
        algorithm__steps=7,
        algorithm__prompts_per_step=1024,
        policies__waits_for_whole_batches=True,
        costs={"training_factor": 0.1 if slower == "training" else 1.0},
    )
    stages = Stages(run, smallest_tensor_parallel=True)
    generation, training = stages.generation(16), stages.training(16)
    assert generation is not None and training is not None
    rollout, trainer = generation.change(run.rollout), training.change(run.trainer)
    steps = read_paces(simulate(replace(run, rollout=rollout, trainer=trainer)))[2:]
    times = [step.generation_time for step in steps]
    if slower == "training":
        times = [step.training_time for step in steps]
    found = generation.time if slower == "generation" else training.time
    assert found == max(generation.time, training.time)
    assert found == pytest.approx(sum(times) / len(times), rel=0.05)


def test_the_trainer_of_a_whole_batch_takes_exactly_its_stage_time() -> None:
    run = paper_run(algorithm__steps=TRAINED_BATCHES, policies__system="disaggregated")
    training = Stages(run).training(16)
    assert training is not None
    trained = replace(run, trainer=training.change(run.trainer))
    times = [step.training_time for step in read_paces(simulate(trained))]
    assert training.time == pytest.approx(sum(times) / len(times), rel=1e-9)


@pytest.mark.parametrize(("model", "degree"), [("7b", 1), ("32b", 2), ("72b", 4)])
def test_the_smallest_tensor_parallelism_that_fits_is_that_of_the_papers_replicas(
    model: str, degree: int
) -> None:
    run = paper_run(
        {"model": {"name": f"qwen2.5-{model}"}, "algorithm.prompts_per_step": 8},
        cluster={"pools": {"h800": {"gpu": "h800", "nodes": 8}}},
    )
    smallest = Stages(run, smallest_tensor_parallel=True).generation(16)
    fastest = Stages(run).generation(16)
    assert smallest is not None and fastest is not None
    assert (smallest.tensor_parallel, smallest.replicas) == (degree, 16 // degree)
    assert fastest.time <= smallest.time


def test_a_trainer_offloads_only_where_its_models_do_not_fit_beside_each_other() -> None:
    stages = Stages(paper_run({"model": {"name": "qwen2.5-32b"}}))
    small, large = stages.training(16), stages.training(64)
    assert small is not None and large is not None
    assert (small.degrees.offload, large.degrees.offload) == (True, False)
    assert stages.training(4) is None


# The division -------------------------------------------------------------------------------------


class Given(Stages):
    """Stages that take what a test says."""

    def __init__(
        self, run: Run, generate: Callable[[int], float], train: Callable[[int], float]
    ) -> None:
        self.run, self.generate, self.train = run, generate, train

    def generation(self, num_gpus: int) -> Generation | None:
        """Take the test's word for it."""
        time = self.generate(num_gpus)
        finishes = (Finish(time, 1),)
        return Generation(
            num_gpus=num_gpus, replicas=num_gpus, tensor_parallel=1, time=time, finishes=finishes
        )

    def training(self, num_gpus: int) -> Training | None:
        """Take the test's word for it."""
        degrees = Degrees("h800", num_gpus, 1, 1, 1, 4, 1, "full", None, offload=False)
        return Training(degrees=degrees, time=self.train(num_gpus))


times = st.lists(st.floats(1.0, 1000.0), min_size=4, max_size=4)


@settings(max_examples=200, deadline=None)
@given(times, times, st.sampled_from(["max", "sum", "overlap"]))
def test_no_division_of_one_pool_is_better_than_the_chosen_one(
    generate: list[float], train: list[float], objective: Objective
) -> None:
    stages = Given(paper_run(), lambda x: generate[x // 8 - 1], lambda y: train[y // 8 - 1])
    found = search(stages, objective=objective)
    pairs = [(x, y) for x in range(4) for y in range(4) if x + y + 2 <= 4]
    assert len(found.table) == len(pairs)
    best = max if objective == "max" else lambda a, b: a + b
    assert found.chosen.step_time == min(best(generate[x], train[y]) for x, y in pairs)


def test_of_two_pools_the_slower_side_stays_whole_and_the_other_gives_its_surplus_back() -> None:
    def chosen(generate: float, train: float) -> tuple[int, int]:
        stages = Given(paper_run(FAR_APART), lambda x: generate / x, lambda y: train / y)
        found = search(stages).chosen
        return found.generation.num_gpus, found.training.num_gpus

    assert chosen(320.0, 320.0) == (16, 16)  # 10 s against 20 s: half of the 32 H20 will do
    assert chosen(3200.0, 320.0) == (32, 8)  # 100 s against 20 s, or 40 s on one node
    assert chosen(320.0, 160.0) == (32, 16)


def test_the_objective_is_that_of_the_runs_system() -> None:
    systems = {"stream-async": "max", "stream-sync": "overlap", "disaggregated": "sum"}
    for system, objective in systems.items():
        assert objective_of(paper_run(policies__system=system).policies) == objective


def test_streamed_training_lasts_until_its_last_rollout_or_until_its_backlog_is_done() -> None:
    training = Given(paper_run(), lambda x: 0.0, lambda y: 8.0).training(8)
    assert training is not None

    def streamed(*finishes: tuple[float, int]) -> float:
        generation = Generation(
            num_gpus=8,
            replicas=8,
            tensor_parallel=1,
            time=finishes[-1][0],
            finishes=tuple(Finish(*finish) for finish in finishes),
        )
        return step_time(generation, training, "overlap")

    assert streamed((10.0, 1), (10.0, 1)) == 18.0  # all at once: nothing overlaps
    assert streamed((1.0, 3), (10.0, 1)) == 12.0  # six of eight seconds are done by then
    assert streamed((1.0, 1), (4.0, 3)) == 10.0


@pytest.mark.parametrize("changes", [{}, FAR_APART])
def test_an_allocated_run_is_valid_and_takes_what_the_search_said(changes: dict[str, Any]) -> None:
    run = paper_run(changes, algorithm__steps=7, policies__waits_for_whole_batches=True)
    found = search(Stages(run)).chosen
    allocated = allocate(run)
    assert allocated.rollout.num_gpus == found.generation.num_gpus
    assert allocated.trainer.num_gpus == found.training.num_gpus
    pools = {run.rollout.pool, run.trainer.pool}
    used = sum(allocated.cluster.pools[name].num_gpus for name in pools)
    assert used == found.num_gpus
    assert measure(simulate(allocated)).step_time == pytest.approx(found.step_time, rel=0.1)


def test_a_pool_keeps_the_nodes_that_replicas_may_be_added_on() -> None:
    changes = {"policies.resize": "adjust", "policies.resize_unit": 8}
    run = paper_run({**FAR_APART, **changes}, costs={"training_factor": 0.1})
    allocated = allocate(run, smallest_tensor_parallel=True)
    assert allocated.rollout.num_gpus < 32
    assert allocated.cluster.pools["h20"].nodes == 4


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": {"name": "deepseek-v3"}}, "fits both sides of the model"),
        ({"policies.system": "colocated"}, "nothing to divide"),
        ({"costs": {"profile": "here.toml"}}, "costs.profile"),
    ],
)
def test_what_cannot_be_allocated_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        allocate(paper_run(changes))


def test_32b_on_64_gpus_is_divided_as_in_the_paper() -> None:
    run = paper_run(
        {"model": {"name": "qwen2.5-32b"}, "policies": {"dispatch": "skewness-aware"}},
        cluster={"pools": {"h800": {"gpu": "h800", "nodes": 8}}},
        algorithm__prompts_per_step=1024,
        workload__lengths__ranker="recall",
        policies__order="longest-first",
        trainer__kernels="fused",
        rollout__admission="reserve",
    )
    chosen = search(Stages(run, smallest_tensor_parallel=True)).chosen
    assert (chosen.generation.num_gpus, chosen.training.num_gpus) == (40, 24)

"""A portion of a huge plan stands for all of it: the same seconds, and the dollars and tokens of the whole."""

from __future__ import annotations

import pytest

from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import Mode
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import (
    PORTION_ROLLOUTS,
    Trial,
    Unfinished,
    portion_of,
    portions_of,
    short_speed_of,
    shortened,
)
from tests.runs import small_run

HUGE = {
    "cluster": {
        "pools": {
            "far": {"gpu": "h20", "nodes": 16, "price": 1.0},
            "near": {"gpu": "h800", "nodes": 16, "price": 3.0},
        },
        "links": [
            {"between": ["far", "near"], "bandwidth": "80 Gbps", "price_per_gb": 0.05},
        ],
    },
    "rollout.replicas": 64,
    "rollout.max_running": 64,
    "trainer.data_parallel": 32,
    "algorithm.prompts_per_step": 512,
    "algorithm.group_size": 16,
    "algorithm.steps": 100,
    "simulate.max_steps": 4,
}


def huge_run(**changes: object) -> Run:
    return small_run({**HUGE, **{key.replace("__", "."): v for key, v in changes.items()}})


def candidate_of(run: Run) -> Candidate:
    """Return the plan that a run file has filled in."""
    rollout, trainer = run.rollout, run.trainer
    replicas = Replicas(
        rollout.pool,
        rollout.replicas,
        rollout.tensor_parallel,
        rollout.expert_parallel,
        rollout.max_running,
    )
    degrees = Degrees(*(getattr(trainer, name) for name in Degrees._fields))
    policies = run.policies
    mode = Mode(
        *(policies.system, policies.max_staleness, policies.dispatch, policies.order), run.sync.mode
    )
    return Candidate(replicas, degrees, mode)


def speed_of(run: Run, portions: int) -> Speed:
    base = shortened(run, run.seed)
    speed = short_speed_of(Trial(base, candidate_of(run), portions=portions))
    assert not isinstance(speed, Unfinished)
    return speed


@pytest.mark.parametrize("system", ["stream-async", "disaggregated"])
def test_a_portion_takes_as_long_as_the_whole_and_counts_as_much(system: str) -> None:
    run = huge_run(policies__system=system)
    assert portions_of(run) == 4
    whole, portion = speed_of(run, 1), speed_of(run, 4)
    assert portion.step_time == pytest.approx(whole.step_time, rel=0.04)
    assert portion.goodput == pytest.approx(whole.goodput, rel=0.05)
    assert portion.cost_per_step == pytest.approx(whole.cost_per_step, rel=0.04)
    assert portion.cost_per_million_tokens == pytest.approx(whole.cost_per_million_tokens, rel=0.05)
    assert portion.egress_per_step == pytest.approx(whole.egress_per_step, rel=0.3)
    assert portion.mean_staleness == pytest.approx(whole.mean_staleness, abs=0.1)


def test_a_portion_has_the_memory_and_the_collectives_of_the_whole() -> None:
    run = huge_run()
    part = portion_of(run, 4)
    assert (part.rollout.replicas, part.trainer.data_parallel) == (16, 8)
    assert part.algorithm.rollouts_per_step == run.algorithm.rollouts_per_step // 4
    alone, whole = Costs.load(part).training, Costs.load(run).training
    assert (
        whole.optimizer_time != alone.optimizer_time
    )  # which is why costs are not the portion's own


@pytest.mark.parametrize(
    ("changes", "portions"),
    [
        ({}, 4),
        ({"algorithm__prompts_per_step": 128}, 1),
        ({"algorithm__prompts_per_step": 2 * PORTION_ROLLOUTS // 16}, 2),
        ({"algorithm__prompts_per_step": 514}, 2),
        ({"rollout__replicas": 63}, 1),
        ({"rollout__replicas": 16}, 2),
        ({"trainer__data_parallel": 30}, 2),
        ({"failures": {"per_gpu_day": 0.01}}, 1),
        ({"policies.resize": "adjust", "policies.resize_unit": 8}, 1),
    ],
)
def test_only_what_divides_into_enough_of_each_is_divided(
    changes: dict[str, object], portions: int
) -> None:
    assert portions_of(huge_run(**changes)) == portions

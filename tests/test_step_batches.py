"""What a step generates where groups of one reward are passed over: as it is simulated, and what a plan counts with."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from streamrl.logs.measured_steps import MeasuredStep
from streamrl.sim.batch_generation import step_batches
from streamrl.sim.calibration.simulated_steps import StepwiseWorkload
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import Trial, short_speed_of, shortened
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import checked_world, small_run
from tests.test_dynamic_sampling import DYNAMIC, left_out, steps_of
from tests.test_plan import SMALL, Here, few

HALF = {"algorithm.dynamic_sampling": True, "workload.informative_share": 0.5}
GROUPS = {"algorithm.name": "grpo", "algorithm.group_size": 8, "algorithm.prompts_per_step": 32}


@pytest.mark.parametrize("system", ["stream-sync", "colocated"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 1.0])
def test_steps_are_made_of_the_groups_that_a_simulation_makes_them_of(
    system: str, share: float
) -> None:
    run = small_run({**DYNAMIC, "policies.system": system, "workload.informative_share": share})
    trace = checked_world(run).run()
    batches = list(islice(step_batches(run, SimulatedWorkload(run)), run.algorithm.steps))
    assert [sorted(groups) for groups in steps_of(trace)] == [
        [draw.drawn.group for draw in batch.trained] for batch in batches
    ]
    assert sorted(left_out(trace)) == sorted(set().union(*(b.passed_over for b in batches)))


def test_a_step_costs_no_more_batches_than_it_may() -> None:
    changes = {"algorithm.max_gen_batches": 3, "workload.informative_share": 0.0}
    run = small_run({**DYNAMIC, **changes})
    batches = list(islice(step_batches(run, SimulatedWorkload(run)), 3))
    assert [len(batch.drawn) for batch in batches] == [12, 12, 12]
    assert [len(batch.trained) for batch in batches] == [4, 4, 4]


def test_without_dynamic_sampling_a_step_is_what_is_drawn_for_it() -> None:
    changes = {"algorithm.dynamic_sampling": False, "workload.informative_share": 0.5}
    run = small_run({**DYNAMIC, **changes})
    for number, batch in enumerate(islice(step_batches(run, SimulatedWorkload(run)), 3)):
        assert batch.trained == list(batch.drawn) == SimulatedWorkload(run).draw(4 * number, 4)


@pytest.mark.parametrize(
    ("system", "waits", "within"),
    [
        ("stream-sync", False, 0.2),
        ("one-step-async", True, 0.2),
        ("stream-async", True, 0.2),
        ("stream-async", False, 0.4),
    ],
)
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_estimates_of_plans_go_with_the_groups_that_are_passed_over(
    system: str, waits: bool, within: float, share: float
) -> None:
    changes = {**SMALL, **GROUPS, **HALF, "workload.informative_share": share}
    changes = {**changes, "policies.waits_for_whole_batches": waits}
    search = Search.open(few(changes, systems=[system], rollout_pools=["h20"]))
    run = search.space.run
    search.settle(Here(), [])
    index = int(np.argmin(search.scores()))
    speed = short_speed_of(Trial(shortened(run, run.seed), search.space.candidate(index)))
    estimate = search.estimates.estimate().step[index]
    assert (1 - within) * speed.step_time <= estimate <= 1.1 * speed.step_time
    assert search.estimates.bound()[index] <= speed.step_time


def test_measured_steps_keep_their_lengths_however_many_groups_each_costs() -> None:
    run = small_run({**DYNAMIC, "workload.informative_share": 0.5})
    measured = [MeasuredStep(step=n, output_tokens=200.0 if n % 2 else 20.0) for n in range(8)]
    workload = StepwiseWorkload(run, measured)
    means = [
        np.mean([n for draw in batch.trained for n in draw.lengths])
        for batch in islice(step_batches(run, workload), len(measured))
    ]
    assert means == pytest.approx([step.output_tokens for step in measured], rel=0.5)

"""How far generation is from the best: longest-first order by Graham's bound, skewness-aware dispatch beside chance.

A replica whose decode step takes the same time whatever runs is a row of identical machines, one for each
place of its batch, and rollouts are jobs whose seconds add up: that is what Graham's 4/3 is about. Across
replicas it says nothing, as dispatch shares rollouts out by number before any has begun; nor does it where
a step takes longer in a larger batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from statistics import median
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import DrawnGroup, Generated, PromptsDrawn
from streamrl.sim.batch_generation import DrawnBatch, generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import DecodeCurve
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import Draw, SimulatedWorkload
from tests.runs import SINGLE, small_run
from tests.test_skew import BATCH

# Longest first ------------------------------------------------------------------------------------


class Given:
    """A workload of given lengths, all known beforehand."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return groups of one rollout each."""
        groups = range(first_group, first_group + num_groups)
        return [
            Draw(DrawnGroup(g, (g,), 1, (self._lengths[g],)), (self._lengths[g],)) for g in groups
        ]

    def learn(self, event: Generated) -> None:
        """Learn nothing: all is known."""

    def forget(self, group: int) -> None:
        """Forget nothing."""


class FreePrefill:
    """Prefill that takes no time, and makes the first token."""

    def time(self, *amounts: float) -> float:
        """Return 0 seconds."""
        return 0.0


def ends_on_machines(lengths: list[int], num_places: int, order: str) -> list[tuple[float, int]]:
    """Return when each job ends, and its length, on a replica whose decode step always takes one second."""
    run = small_run(
        {
            **SINGLE,
            "rollout.replicas": 1,
            "rollout.max_running": num_places,
            "rollout.max_tokens": 1 + max(lengths),
            "policies.system": "stream-sync",
            "policies.order": order,
            "algorithm.prompts_per_step": len(lengths),
            "algorithm.steps": 1,
        }
    )
    costs = Costs.load(run)
    flat = DecodeCurve(
        base=[0.0] + [1.0] * num_places,
        per_context_token=[0.0] * (num_places + 1),
        provenance=costs.decode.provenance,
    )
    costs = replace(costs, decode=flat, prefill=FreePrefill(), rides_along=False)  # type: ignore[arg-type]
    costs = replace(costs, refill_passes=0, tokens_per_pass=inf, kv_capacity=inf, message_time=0.0)
    trace = SimWorld(run, costs, Given([length + 1 for length in lengths])).run()  # type: ignore[arg-type]
    drawn = next(e.time for e in trace.entries if isinstance(e.event, PromptsDrawn))
    return [
        (time - drawn, event.tokens - 1)
        for time, event, _ in trace.entries
        if isinstance(event, Generated)
    ]


def machines(lengths: list[int], num_places: int, order: str) -> float:
    """Return the makespan on identical machines."""
    return max(ends_on_machines(lengths, num_places, order))[0]


def best_makespan(lengths: list[int], num_places: int) -> int:
    """Try every assignment; machines are alike, so only their loads count."""
    states = {(0,) * num_places}
    for length in lengths:
        states = {
            tuple(sorted((*loads[:place], loads[place] + length, *loads[place + 1 :])))
            for loads in states
            for place in range(num_places)
        }
    return min(loads[-1] for loads in states)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.integers(2, 4))
def test_longest_first_is_within_grahams_bound_of_the_best(
    lengths: list[int], num_places: int
) -> None:
    best, bound = best_makespan(lengths, num_places), 4 / 3 - 1 / (3 * num_places)
    took = machines(lengths, num_places, "longest-first")
    assert best <= took + 1e-6 <= bound * best + 2e-6


def test_grahams_bound_is_reached() -> None:
    lengths, num_places = [5, 5, 4, 4, 3, 3, 3], 3
    assert best_makespan(lengths, num_places) == 9
    assert machines(lengths, num_places, "longest-first") == pytest.approx(11)  # 9 (4/3 - 1/9)


def lower_bound(lengths: list[int], num_places: int) -> float:
    """Return what no assignment undercuts: the longest rollout, and an even share of the work."""
    return max(max(lengths), sum(lengths) / num_places)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.integers(1, 8),
    st.sampled_from(["longest-first", "fifo"]),
)
def test_no_place_stands_empty_while_a_rollout_waits(
    lengths: list[int], num_places: int, order: str
) -> None:
    """Graham's argument: the rollout that ends last began no later than an even share of the others took."""
    makespan, last = max(ends_on_machines(lengths, num_places, order))
    bound = lower_bound(lengths, num_places)
    assert bound - 1e-6 <= makespan <= (sum(lengths) - last) / num_places + last + 1e-6
    if last <= bound / 3:
        assert makespan <= 4 / 3 * bound + 1e-6


@pytest.mark.parametrize(("num_places", "seed"), product([8, 15, 64, 256], range(3)))
def test_longest_first_is_within_four_thirds_of_the_lower_bound_on_rl_lengths(
    num_places: int, seed: int
) -> None:
    run = small_run({**BATCH, "seed": seed, "algorithm.prompts_per_step": 1024})
    lengths = [length for d in SimulatedWorkload(run).draw(0, 1024) for length in d.lengths]
    bound = lower_bound(lengths, num_places)
    assert machines(lengths, num_places, "longest-first") <= 4 / 3 * bound


def test_first_in_first_out_is_not() -> None:
    lengths = [2, 2, 2, 6]
    assert machines(lengths, 2, "longest-first") == pytest.approx(6)
    assert machines(lengths, 2, "fifo") == pytest.approx(8)
    assert machines(lengths, 1, "fifo") == pytest.approx(sum(lengths))


# Skewness-aware dispatch --------------------------------------------------------------------------

ORACLE = {"policies.order": "longest-first", "workload.lengths.ranker": "oracle"}
SEEDS = range(5)


class Shape(NamedTuple):
    """What is dealt to whom."""

    max_running: int
    replicas: int
    num_rollouts: int
    scale: float = 1.0
    """Of lengths."""


@cache
def generation_times(shape: Shape, dispatch: str) -> list[float]:
    """Return the seconds of a batch by seed, under a skew objective or at random in order of draw."""
    policies: dict[str, Any] = {"policies.dispatch": "random"}
    if dispatch != "random":
        skewed = {"policies.dispatch": "skewness-aware", "policies.skew_objective": dispatch}
        policies = {**skewed, **ORACLE}
    changes = {
        **BATCH,
        "cluster.pools.far.nodes": 3,
        "rollout.max_running": shape.max_running,
        "rollout.replicas": shape.replicas,
        "algorithm.prompts_per_step": shape.num_rollouts,
        "workload.lengths.scale": shape.scale,
        **policies,
    }
    costs = Costs.load(small_run(changes))
    runs = [fill_policies(small_run({**changes, "seed": seed}), costs) for seed in SEEDS]
    batches = [DrawnBatch(SimulatedWorkload(run).draw(0, shape.num_rollouts)) for run in runs]
    return [
        generate_batch(run, costs, batch)[-1].time for run, batch in zip(runs, batches, strict=True)
    ]


def over_random_fifo(objective: str, shape: Shape) -> float:
    """Return the median over seeds of its makespan, as a share of random dispatch's in order of draw."""
    both = (generation_times(shape, dispatch) for dispatch in (objective, "random"))
    return median(ours / theirs for ours, theirs in zip(*both, strict=True))


@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize(
    ("max_running", "replicas", "num_rollouts"),
    [
        *product([8, 256], [2, 20], [64, 256]),
        *product([15, 256], [8, 20], [1024]),
        (15, 20, 256),
        (256, 2, 128),
        (64, 3, 128),
    ],
)
def test_with_oracle_lengths_it_is_no_worse_than_random_fifo(
    max_running: int, replicas: int, num_rollouts: int, scale: float
) -> None:
    assert over_random_fifo("drain", Shape(max_running, replicas, num_rollouts, scale)) <= 1.02


@pytest.mark.parametrize(("replicas", "num_rollouts"), [(8, 256), (20, 256), (20, 1024)])
@pytest.mark.parametrize("max_running", [8, 15])
def test_nor_is_algorithm_2_where_replicas_are_many_and_rollouts_wait(
    max_running: int, replicas: int, num_rollouts: int
) -> None:
    assert over_random_fifo("max", Shape(max_running, replicas, num_rollouts)) <= 1.02


@pytest.mark.parametrize("shape", [Shape(256, 2, 256), Shape(64, 2, 1024), Shape(256, 8, 1024)])
def test_algorithm_2_splits_also_where_even_shares_are_faster_and_drain_does_not(
    shape: Shape,
) -> None:
    assert over_random_fifo("drain", shape) < 1.0 < 1.02 < over_random_fifo("max", shape)


def test_where_rollouts_wait_it_takes_a_quarter_less_than_random_fifo() -> None:
    assert over_random_fifo("drain", Shape(15, 20, 1024)) < 0.75

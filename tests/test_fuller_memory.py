"""A plan says what the room costs that it leaves on its trainer's GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import ROOMY
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.report.plan_report import head_lines
from streamrl.runfile.config import Run
from streamrl.sim.planner.plan_settings import candidate_of, settings_of
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.search import ALIKE
from streamrl.sim.planner.space import Space
from streamrl.sim.planner.trial import Trial, short_speed_of, shortened
from streamrl.sim.steady_state import measure_steady
from tests.test_plan import SMALL, few

FULL: dict[str, Any] = {
    "trainer_gpus": [8, 16],
    "trainer_tensor_parallel": [4],
    "pipeline_parallel": [1],
    "recompute": ["none"],
    "zero": [1],
    "micro_batch": [8],
    "systems": ["stream-async"],
    "rollout_pools": ["h20"],
}
"""Trainers on 8 GPUs, whose optimizer is split over two ranks, fill them more than those on 16."""


def filled() -> Run:
    """Return an offer whose trainers on 8 GPUs fit, with less room than is left."""
    run = few(
        {
            "trainer.logits": "chunked",
            "algorithm.name": "grpo",
            "algorithm.group_size": 2,
            "cluster.pools.h800.host_memory": "1 GB",  # room for no optimizer
        },
        **FULL,
    )
    for tokens in range(8000, 400_000, 1000):
        full = replace(run, trainer=replace(run.trainer, max_tokens_per_pass=tokens))
        if {each.num_gpus for each in Space.open(full).trainers} == {16}:
            return full
    raise AssertionError("no batch fills them")


def test_a_plan_names_the_better_one_that_leaves_less_room() -> None:
    run = filled()
    tight = Space.open(run, tight=True)
    own = resolve(run).trainer
    sides = [trainer_side(trainer.place(own)) for trainer in tight.trainers]
    assert sides and all(ROOMY * side.capacity < side.need <= side.capacity for side in sides)
    planned = make_plan(run)
    tighter, chosen = planned.plan.tighter, planned.plan.allocation
    assert tighter is not None and chosen.trainer.num_gpus == 16
    assert tighter.settings["trainer.data_parallel"] == 2 and ROOMY < tighter.memory <= 1
    ours, theirs = (_simulated(run, settings) for settings in (chosen.settings, tighter.settings))
    assert tighter.gain == pytest.approx(1 - theirs / ours) and tighter.gain > ALIKE
    (line,) = [line for line in head_lines(planned.plan) if "with less room" in line]
    assert tighter.choice in line and f"{tighter.gain:.0%} better" in line


def _simulated(run: Run, settings: dict[str, str | int | bool]) -> float:
    """Return the objective of a plan over the few steps of a search."""
    for tight in (False, True):
        space = Space.open(run, tight=tight)
        for candidate in map(space.candidate, range(len(space))):
            if settings_of(candidate) == settings:
                trial = Trial(shortened(run, run.seed), candidate)
                return short_speed_of(trial).cost_per_million_tokens
    raise AssertionError("no such plan")


def test_no_plan_is_named_that_is_no_better() -> None:
    run = filled()
    dearer = replace(run, plan=replace(run.plan, objective="step-time"))
    plan = make_plan(dearer).plan
    assert plan.allocation.trainer.num_gpus == 16 and plan.tighter is None
    assert not [line for line in head_lines(plan) if "with less room" in line]


def test_the_best_plan_on_parts_of_a_node_is_a_row_of_its_own() -> None:
    run = few(SMALL, systems=["stream-sync"], unit=None)
    plan = make_plan(run).plan
    (parts,) = [option for option in plan.options if "on parts of a node" in option.labels]
    assert parts.choice.rollout.num_gpus < 8 and not parts.is_offered
    assert parts.cost_ratio is not None and parts.cost_ratio < 1 - ALIKE
    alone = measure_steady(candidate_of(parts.choice.settings).apply(run))
    assert alone.cost_per_million_tokens == parts.choice.cost_per_million_tokens
    whole = make_plan(few(SMALL, systems=["stream-sync"])).plan
    assert not any("on parts of a node" in option.labels for option in whole.options)

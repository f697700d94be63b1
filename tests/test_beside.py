"""What stands beside a chosen plan is as well known as it, what is better there is chosen, and what binds shortens a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.planner.bottleneck import besides_arithmetic, find_binding, find_gains
from streamrl.sim.planner.layouts import sizes
from streamrl.sim.planner.objective import value_of
from streamrl.sim.planner.plan_description import PlanDescription
from streamrl.sim.planner.plan_settings import candidate_of, settings_of
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.sensitivity import judge
from streamrl.sim.planner.space import Space, find_trainers
from streamrl.sim.planner.trial import Trial, Unfinished, metrics_of, whole
from tests.test_plan import SMALL, Here, few, planned

CHEAP_H20 = {**SMALL, "cluster.pools.h20.price": 0.5}
"""An offer whose fastest plan costs a little more than its cheapest one."""


def test_what_stands_beside_a_plan_has_the_figures_of_its_own_simulation_as_long() -> None:
    steps = {"algorithm.steps": 30, "simulate.max_steps": 30}
    narrow: dict[str, Any] = {"rollout_tensor_parallel": [1], "trainer_tensor_parallel": [4]}
    run = few({**SMALL, **steps}, **narrow)
    plan = planned(run).plan
    space = Search.open(run).space
    by_settings = {str(settings_of(c)): c for c in map(space.candidate, range(len(space)))}
    others = [option for option in plan.options[1:] if option.is_offered]
    assert others and plan.options[0].choice == plan.allocation
    for option in others:
        assert option.choice.steps > 20
        candidate = by_settings[str(option.choice.settings)]
        assert candidate == candidate_of(option.choice.settings)
        alone = metrics_of(Trial(whole(run, run.seed), candidate))
        assert option.choice.step_time == alone.step_time
        assert option.choice.step_time_interval == alone.step_time_interval is not None
        assert option.whole_run == alone.whole_run and plan.whole_run is not None
        assert option.cost_ratio == pytest.approx(
            option.whole_run.dollars / plan.whole_run.dollars, rel=1e-3
        )
        assert option.ratio_half_width is not None


def test_a_runner_up_of_a_few_steps_stands_in_the_units_of_the_steady_state_of_the_plan() -> None:
    """Its own few steps are other prompts than those of the steady state: only the ratio of both says something of it."""
    search = Search.open(few({**SMALL, "simulate.max_steps": 60}))
    ranking = search.run(Here(), lambda: None)
    race = Race(search)
    chosen = race.settle(Here(), race.run(Here(), lambda: None), lambda: None)
    race._compare(Here(), ranking[:4], lambda: None)
    steady, paired = race.steady[chosen][0], race.finals[chosen][0]
    assert len(steady.step_times) > len(paired.step_times)
    by_settings = {str(settings_of(search.space.candidate(index))): index for index in race.finals}
    groups = PlanDescription(search, race, chosen).runners_up({chosen: 1})
    runners = [each for group in groups for each in (group, *group.variants)]
    finalists = {by_settings.get(str(each.choice.settings)): each.choice for each in runners}
    of_few = {index: choice for index, choice in finalists.items() if index not in race.steady}
    assert len(of_few.keys() & race.finals.keys()) >= 2
    for index in of_few.keys() & race.finals.keys():
        own = race.finals[index][0]
        for key in ("step_time", "median_step_time", "cost_per_step", "cost_per_million_tokens"):
            ratio = getattr(own, key) / getattr(paired, key)
            assert getattr(of_few[index], key) == pytest.approx(getattr(steady, key) * ratio)
        assert of_few[index].step_time != pytest.approx(own.step_time)


def test_what_turns_out_clearly_better_beside_a_plan_is_chosen() -> None:
    search = Search.open(few(SMALL))
    chosen, other, *_ = search.run(Here(), lambda: None)
    race = Race(search)
    race.steady[chosen] = [metrics_of(Trial(search.base, search.space.candidate(chosen)))]
    ours = race.steady[chosen][0]
    for share, better in ((0.9, other), (1 - ALIKE / 2, None), (1.2, None)):
        race.beside[other] = replace(
            ours,
            cost_per_step=share * ours.cost_per_step,
            cost_per_million_tokens=share * ours.cost_per_million_tokens,
        )
        assert race.better_beside(chosen) == better


def test_a_cap_is_named_as_what_binds_only_where_raising_it_shortens_a_step() -> None:
    changes = {"costs": {"generation_factor": 0.005}, "rollout.max_running": 2}
    only: dict[str, Any] = {"max_running": [2], "rollout_gpus": [8]}
    search = Search.open(few(changes, systems=["disaggregated"], **only))
    race = Race(search)
    search.run(Here(), lambda: None)
    chosen = race.run(Here(), lambda: None)
    gains = find_gains(race, chosen, Here())
    assert gains["max_running"] > 0.2 and set(gains) == {"max_running"}
    speed = search.speeds[chosen]
    binding = find_binding(search.estimates, chosen, speed, gains)
    assert binding.resource == "rollout.max_running 2"
    binding = find_binding(search.estimates, chosen, speed, {"max_running": 0.001})
    assert binding.resource == "GPU memory bandwidth"
    binding = find_binding(search.estimates, chosen, speed, {})
    assert binding.resource == "rollout.max_running 2, which nobody tried to raise"
    for stage in ("generation", "training"):
        saved = {"generation": 0.01, "training": 0.01, "max_running": 0.0, stage: 0.08}
        binding = find_binding(search.estimates, chosen, speed, saved)
        assert binding.stage == stage and f"faster {stage} saves 8.0%" in binding.text


def test_what_raising_the_bound_on_staleness_saves_is_told_before_the_longest_rollout() -> None:
    changes = {**SMALL, "policies.waits_for_whole_batches": False}
    search = Search.open(few(changes, systems=["stream-async", "stream-sync"]))
    longest = {"stream-async": 0.0, "stream-sync": 0.0}
    for index in map(int, search.run(Here(), lambda: None)):
        system = search.space.candidate(index).mode.system
        longest[system] = max(longest[system], search.estimates.least(index).longest)
        saved = {"generation": 0.1, "training": 0.0, "max_staleness": 0.2}
        binding = find_binding(search.estimates, index, search.speeds[index], saved)
        bound = (
            "the bound on the age of rollouts (policies.max_staleness 1), which allows 64 at once"
        )
        assert system != "stream-async" or binding.resource.startswith(bound), binding
    assert longest["stream-async"] <= longest["stream-sync"]


def test_a_plan_that_is_faster_for_little_more_is_chosen_over_the_cheapest() -> None:
    run = few(CHEAP_H20, tolerance=0.3)
    plan, cheapest = planned(run).plan, planned(few(CHEAP_H20, tolerance=0.0)).plan
    assert plan.whole_run is not None and cheapest.whole_run is not None
    assert plan.whole_run.dollars <= 1.3 * cheapest.whole_run.dollars
    assert plan.allocation.step_time < 0.98 * cheapest.allocation.step_time
    (other,) = [option for option in plan.options if "cheapest" in option.labels]
    assert other.choice.step_time > plan.allocation.step_time
    assert other.cost_ratio is not None and other.cost_ratio < 1 < other.time_ratio
    assert " % cheaper, takes " in other.relation
    assert "dearer, " in plan.why and " times as fast as " in plan.why
    assert cheapest.options[0].labels[:2] == ["recommended", "cheapest"]


def test_a_plan_that_is_faster_for_little_more_is_chosen_under_a_deadline_too() -> None:
    run = few(CHEAP_H20, tolerance=0.3)
    free = planned(run).plan
    kept = planned(few(CHEAP_H20, tolerance=0.3, deadline="100 d")).plan
    assert kept.allocation == free.allocation
    assert "than the cheapest of those that meet the deadline: " in kept.why
    assert kept.why.replace(" of those that meet the deadline", "") == free.why


def test_the_value_of_an_hour_decides_instead_of_the_tolerance() -> None:
    assert few(SMALL).plan.takes_faster and few(SMALL, deadline="9 d").plan.takes_faster
    for otherwise in ({"value_of_hour": 9.0}, {"tolerance": 0.0}):
        assert not few(SMALL, **otherwise).plan.takes_faster
    assert not few(SMALL, objective="step-time").plan.takes_faster


def test_the_value_of_an_hour_is_added_to_the_cost_of_waiting() -> None:
    search = Search.open(few(SMALL, value_of_hour=3600.0, objective="cost-per-step"))
    chosen, *_ = search.run(Here(), lambda: None)
    speed = search.speeds[chosen]
    assert search.value(chosen) == pytest.approx(speed.cost_per_step + speed.step_time)
    per_million = value_of(replace(search.goal, objective="cost-per-million-tokens"), speed)
    share = 1 + speed.step_time / speed.cost_per_step
    assert per_million == pytest.approx(share * speed.cost_per_million_tokens)
    cheap = Search.open(few(SMALL, objective="cost-per-step"))
    cheapest, *_ = cheap.run(Here(), lambda: None)
    assert speed.step_time < cheap.speeds[cheapest].step_time


def test_a_plan_that_fits_still_fits_where_outputs_are_shorter() -> None:
    """Even where the deadline or the memory of other plans changes with the lengths."""
    run = few(SMALL, micro_batch=[1, 8], trainer_tensor_parallel=[1, 8], deadline="100 d")
    search = Search.open(run)
    index = int(np.random.default_rng(0).choice(len(search.space)))
    search.simulate(Here(), [index], lambda: None)
    verdicts = judge(search, index, search.spend_of(search.speeds[index]), Here()).verdicts
    assert verdicts and all(each.still_fits and not each.breaks for each in verdicts)


def test_the_chosen_trainer_stays_in_a_what_if_even_where_others_are_faster() -> None:
    run = few(SMALL, trainer_tensor_parallel=[1, 2, 4, 8], zero=[1, 3])
    left = {trainer.layout for trainer in Search.open(run, runnable=False).space.trainers}
    slow = [each for each in find_trainers(run, Counter()) if each.layout not in left]
    assert slow
    for trainer in slow[:2]:
        search = Search.open(run, kept=trainer, runnable=False)
        assert trainer.layout in {each.layout for each in search.space.trainers}


def test_a_search_beside_another_has_the_plans_that_a_search_alone_has() -> None:
    search = Search.open(few())
    run = search.space.run
    assert search.space.rules is not None
    fewer = replace(run.plan, systems=["colocated"])
    for plan, is_kept in ((replace(run.plan, micro_batch=[1]), True), (fewer, False)):
        beside = search.beside(plan, runnable=True).space
        alone = Space.open(replace(run, plan=plan), search.estimates.trained_on, runnable=True)
        assert (beside.rules is search.space.rules) == is_kept
        assert beside.replicas == alone.replicas and beside.trainers == alone.trainers
        assert beside.modes == alone.modes and (beside.prices == alone.prices).all()


def test_the_unit_of_a_pool_comes_before_that_of_the_plan() -> None:
    assert sizes(PoolConfig(gpu="h100", nodes=2, unit=4), 8) == [4, 8, 12, 16]
    assert sizes(PoolConfig(gpu="h100", nodes=2), 8) == [8, 16]


def test_a_trainer_of_one_gpu_waits_for_no_other() -> None:
    alone = TrainerConfig(pool="h800")
    assert besides_arithmetic(alone) == "memory traffic of its GPU"
    several = TrainerConfig(pool="h800", data_parallel=2, offload=True)
    assert (
        besides_arithmetic(several) == "offload to host memory and communication between its GPUs"
    )


def test_where_the_cheapest_plan_does_not_finish_the_tolerance_refers_to_the_next() -> None:
    search = Search.open(few(SMALL))
    search.run(Here(), lambda: None)
    race = Race(search)
    cheapest = race.find_cheapest(Here(), lambda: None)
    race.give_up(cheapest, Unfinished("its replicas were lost"))
    spends = {i: search.spend_of(search.speeds[i]).whole for i in search.ranking()}
    next_one = min(spends, key=spends.__getitem__)
    assert race.is_tolerable(next_one) and race.cheapest == next_one

"""The answer of a plan is a few options that differ, and no option is both cheaper and faster than the recommended one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replace_fields
from itertools import combinations
from operator import attrgetter
from typing import Any, cast

import pytest
from msgspec.structs import replace

from streamrl.record.relations import relation_text
from streamrl.record.steady_state import with_costs, with_step_time
from streamrl.report.plan_report import total_lines
from streamrl.runfile.config import Run
from streamrl.sim.planner.layouts import ROLLOUT_MEMORY, TRAINER_MEMORY, Degrees, Replicas
from streamrl.sim.planner.options import (
    FEWEST_ROWS,
    MOST_ROWS,
    Options,
    OtherRows,
    age_text,
)
from streamrl.sim.planner.plan import OptionLabel, Plan, PlanOption
from streamrl.sim.planner.plan_settings import candidate_of, group_of, own_candidate, settings_of
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Candidate, Space
from tests.test_plan import SMALL, Here, few, planned, searched

SEVERAL: dict[str, Any] = {"algorithm.steps": 30, "simulate.max_steps": 30}
SECTIONS = attrgetter("rollout", "trainer", "policies", "sync", "verifier", "environment")
OFFERS: dict[str, Run] = {
    "two pools": few(SMALL | SEVERAL),
    "one pool": few(SMALL | SEVERAL, rollout_pools=["h800"]),
    "fastest": few(SMALL | SEVERAL, objective="step-time"),
    "value of an hour": few(SMALL, value_of_hour=20.0),
}


@pytest.mark.parametrize("name", OFFERS)
def test_an_answer_is_a_few_options_of_which_none_is_cheaper_and_faster_than_the_recommended(
    name: str,
) -> None:
    """One test of four claims, because a plan takes seconds."""
    plan = planned(OFFERS[name]).plan
    _check_that_none_dominates(plan)
    _check_that_options_differ(plan)
    _check_that_runners_up_are_grouped(plan)
    told = " ".join(total_lines(plan))
    assert ("by plan.objective, of which GPU time" in told) == bool(OFFERS[name].plan.value_of_hour)


COMPARED = ("step_time", "cost_per_step")


def _check_that_none_dominates(plan: Plan) -> None:
    for option in plan.options[1:]:
        if option.is_offered and not option.note:
            assert option.cost_ratio is not None
            width = ALIKE if option.ratio_half_width is None else option.ratio_half_width
            assert max(option.cost_ratio, option.time_ratio) >= 1 - width, option.relation
    for runner in plan.runners_up:
        ratios = [getattr(runner.choice, key) / getattr(plan.allocation, key) for key in COMPARED]
        assert max(ratios) >= 1 - ALIKE, runner.choice.text


def _check_that_options_differ(plan: Plan) -> None:
    offered = [option for option in plan.options if option.is_offered]
    assert FEWEST_ROWS <= len(offered) <= MOST_ROWS + 1
    assert [option.number for option in plan.options] == [*range(1, len(plan.options) + 1)]
    assert plan.options[0].labels[0] == "recommended" and plan.options[0].relation == ""
    dollars = [option.whole_run.dollars for option in plan.options[1:]]
    assert dollars == sorted(dollars)
    labels = Counter(label for option in plan.options for label in option.labels)
    assert set(labels.values()) == {1}
    assert {"recommended", "cheapest", "fastest"} <= set(labels)
    assert not any(_is_alike(one, other) for one, other in combinations(offered, 2))


def _is_alike(one: PlanOption, other: PlanOption) -> bool:
    ratios = (
        one.whole_run.dollars / other.whole_run.dollars,
        one.whole_run.seconds / other.whole_run.seconds,
    )
    same = one.choice.settings["policies.system"] == other.choice.settings["policies.system"]
    return same and all(abs(ratio - 1) <= ALIKE for ratio in ratios)


def _check_that_runners_up_are_grouped(plan: Plan) -> None:
    assert len(plan.runners_up) <= 5
    groups = [group_of(candidate_of(each.choice.settings)) for each in plan.runners_up]
    assert len(set(groups)) == len(groups)
    for runner, group in zip(plan.runners_up, groups, strict=True):
        for variant in runner.variants:
            assert group_of(candidate_of(variant.choice.settings)) == group
            assert variant.behind >= runner.behind and not variant.variants
        like = [option.number for option in plan.options if _group(option) == group]
        assert runner.variant_of == (like[0] if like else None)


def _group(option: PlanOption) -> object:
    return group_of(candidate_of(option.choice.settings)) if option.is_offered else None


# What costs just too much, and what nothing runs ----------------------------------------------------


class Ratios:
    """Compares plans by stated ratios of dollars and seconds to the first, which is the cheapest and the chosen one."""

    cheapest = 0

    def __init__(self, *ratios: tuple[float, float]) -> None:
        self._ratios = ratios

    def ratios(self, index: int, other: int) -> tuple[float, float]:
        assert other == 0
        return self._ratios[index]

    def is_tolerable(self, index: int) -> bool:
        return self._ratios[index][0] <= 1.1


def test_a_plan_just_above_the_tolerance_counts_if_it_is_one_and_a_half_times_as_fast() -> None:
    race = Ratios((1.0, 1.0), (1.08, 0.5), (1.11, 0.7), (1.11, 0.66), (1.19, 0.5), (1.21, 0.4))
    search = Search.open(few(SMALL))
    options = Options(search, cast("Race", race), 0)
    assert options._just_dearer(range(6)) == [4, 3]
    without = Search.open(few(SMALL, tolerance=0.0))
    assert Options(without, cast("Race", race), 0)._just_dearer(range(6)) == []


def test_a_better_plan_that_nothing_runs_is_an_option_and_never_recommended() -> None:
    plan = planned(few(SMALL | SEVERAL | {"cluster.pools.h20.price": 0.9}, unit=None)).plan
    assert any(each.can_run for each in plan.carried_by)
    (other,) = (each for each in plan.options if "nothing runs this today" in each.labels)
    assert not other.is_offered and not any(each.can_run for each in other.carried_by)
    assert other.cost_ratio is not None and min(other.cost_ratio, other.time_ratio) < 1 - ALIKE


# The user's own file ------------------------------------------------------------------------------


def test_the_layout_of_the_run_file_is_a_row_with_its_own_figures() -> None:
    run = OFFERS["two pools"]
    plan = planned(run).plan
    (own,) = [option for option in plan.options if "your own file" in option.labels]
    assert candidate_of(own.choice.settings) == own_candidate(*SECTIONS(run))
    assert own.choice.rollout.num_gpus == run.rollout.num_gpus


@pytest.mark.parametrize("other", [{"objective": "step-time"}, {"value_of_hour": 1000.0}])
def test_the_cheapest_row_is_as_cheap_if_time_decides(other: dict[str, Any]) -> None:
    least: dict[str, float] = {}
    offers: dict[str, dict[str, Any]] = {"cost": {}, "time": other}
    for name, plan in offers.items():
        found = planned(few(SMALL, rollout_gpus=[2, 4, 8], trainer_gpus=[2, 4, 8], **plan)).plan
        (cheapest,) = (each for each in found.options if "cheapest" in each.labels)
        least[name] = cheapest.whole_run.dollars
    assert least["time"] <= (1 + ALIKE) * least["cost"]


def test_a_layout_that_cannot_run_is_left_out_with_the_reason() -> None:
    run = few(SMALL)
    own, space = own_candidate(*SECTIONS(run)), Space.open(run)
    assert space.refusal_of(own) == ""
    uneven = own._replace(trainer=own.trainer._replace(tensor_parallel=3))
    assert "tensor_parallel" in space.refusal_of(uneven)
    larger = replace(run, model=replace(run.model, name="qwen2.5-72b"))
    large = replace_fields(space, run=larger)
    assert large.refusal_of(own) == ROLLOUT_MEMORY
    wide = own.replicas._replace(tensor_parallel=8, replicas=1)
    assert large.refusal_of(own._replace(replicas=wide)) == TRAINER_MEMORY


def test_a_plan_on_parts_of_a_node_that_is_dearer_and_slower_has_no_row() -> None:
    search = searched()
    race = Race(search)
    race.settle(Here(), race.run(Here(), lambda: None), lambda: None)
    chosen = next(iter(race.steady))
    plan = search.space.candidate(chosen)
    slower = plan._replace(replicas=plan.replicas._replace(max_running=2))
    labels: list[OptionLabel] = ["on parts of a node", "your own file"]
    rows = {label: OtherRows(race, chosen) for label in labels}
    found = {}
    for label, each in rows.items():
        each.add(label, slower)
        found[label] = list(each.simulate(Here(), lambda: None))
    assert not found["on parts of a node"] and len(found["your own file"]) == 1
    (left_out,) = rows["on parts of a node"].left_out
    assert left_out.label == "on parts of a node" and "dearer and slower" in left_out.reason
    assert not rows["your own file"].left_out

    metrics, other = race.steady[chosen][0], next(i for i in search.speeds if i != chosen)
    race.steady[chosen] = [with_step_time(metrics, 100 * metrics.step_time)]  # it is no rival now
    race.beside[other] = with_step_time(metrics, metrics.step_time)
    third = OtherRows(race, chosen)
    third.add("on parts of a node", slower)
    assert not list(third.simulate(Here(), lambda: None))
    assert "another simulated plan" in third.left_out[0].reason


def test_no_row_that_fills_the_table_is_dearer_and_slower_than_another_row() -> None:
    search = searched()
    race = Race(search)
    race.settle(Here(), race.run(Here(), lambda: None), lambda: None)
    chosen = next(iter(race.steady))
    metrics, tokens = race.steady[chosen][0], 1e6
    stale = [i for i in search.ranking() if search.space.system(i).staleness_bound]
    slow, slower, *_ = (i for i in stale if i != chosen)
    for index, times, dollars in ((slow, 2.0, 0.9), (slower, 2.2, 0.95)):
        longer = with_step_time(metrics, times * metrics.step_time)
        race.beside[index] = with_costs(longer, dollars * metrics.cost_per_step, tokens)
    assert [row.index for row in Options(search, race, chosen).rows([])] == [chosen, slow]
    longer = with_step_time(metrics, 1.9 * metrics.step_time)
    race.beside[slower] = with_costs(longer, 0.95 * metrics.cost_per_step, tokens)
    assert [row.index for row in Options(search, race, chosen).rows([])] == [chosen, slow, slower]


# Settings and words -------------------------------------------------------------------------------


def test_settings_of_a_plan_give_the_plan_back() -> None:
    search = Search.open(few(SMALL))
    for index in range(0, len(search.space), 7):
        candidate = search.space.candidate(index)
        assert candidate_of(settings_of(candidate)) == candidate
        assert search.space.index_of(candidate) == index
    beside = Replicas("h20", 2, 1, 1, 64)
    (replicas, trainer, mode) = candidate
    mixed = Candidate(replicas._replace(beside=beside), Degrees(*trainer), mode)
    assert candidate_of(settings_of(mixed)) == mixed
    assert search.space.index_of(mixed) is None
    assert len(search.space.only([mixed])) == 1


def test_ratios_and_ages_are_said_in_words() -> None:
    assert relation_text(1.115, 1 / 1.8, 0.005) == "11.5 % dearer, 1.8 times as fast"
    assert relation_text(0.91, 2.31, 0.005) == "9.0 % cheaper, takes 2.3 times as long"
    assert relation_text(1.0, 1.08, 0.005) == "costs the same, takes 8.0 % longer"
    assert relation_text(None, 0.93, 0.005) == "takes 7.0 % less time"
    assert relation_text(float("inf"), 0.93, 0.005) == "not free, takes 7.0 % less time"
    assert relation_text(1.115, 1.08, 0.03) == "12 % dearer, takes 8 % longer"
    assert relation_text(1.02, 1.08, 0.03) == "2 % dearer (may be chance), takes 8 % longer"
    assert relation_text(1.115, 1 / 1.8) == "about 12 % dearer, about 1.8 times as fast"
    assert age_text(0.0) == "trains on fresh rollouts"
    assert age_text(1.0) == "trains on rollouts 1 step old"
    assert age_text(0.52) == "trains on rollouts 0.5 steps old"


def test_a_plan_that_is_cheaper_and_faster_by_more_than_chance_takes_the_place_of_a_simpler_one() -> (
    None
):
    search = Search.open(few(SMALL | SEVERAL))
    chosen, other, *_ = search.run(Here(), lambda: None)
    race = Race(search)
    race.settle(Here(), race.run(Here(), lambda: None), lambda: None)
    race.stand_beside(Here(), next(iter(race.steady)), [chosen, other], lambda: None)
    ours = race.as_known(chosen)[0]
    race.steady.clear()
    for share, better in ((0.99, other), (1.0, None)):
        faster = replace(
            ours,
            step_time=share * ours.step_time,
            step_times=[share * seconds for seconds in ours.step_times],
            cost_per_step=share * ours.cost_per_step,
            cost_per_million_tokens=share * ours.cost_per_million_tokens,
        )
        race.beside = {chosen: ours, other: faster}
        assert race.better_beside(chosen) == better
        assert race.dominates(other, chosen) == (better is not None)
    assert not race.dominates(chosen, other) and isinstance(planned(few(SMALL)).plan, Plan)

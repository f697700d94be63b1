"""The rules of a plan's answer: what counts as alike, which ratios are compared, and why a kind of plan has no row."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace as replace_fields
from math import inf
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import bands_of_speed
from streamrl.record.steady_state import Speed
from streamrl.record.whole_run import whole_time, with_bill
from streamrl.report.page.page import make_page, read_report
from streamrl.report.plan_report import head_lines
from streamrl.report.run_tables import time_text
from streamrl.runfile.files import write_run
from streamrl.runfile.formatting import listing, long_time
from streamrl.runfile.plan_config import limit_words
from streamrl.sim.planner.alternatives import NONE_BETTER, find_on_partial_nodes
from streamrl.sim.planner.first_answer import first_answer
from streamrl.sim.planner.first_plan import first_plan_of
from streamrl.sim.planner.model_errors import estimated_error
from streamrl.sim.planner.options import Options
from streamrl.sim.planner.plan import write_plan
from streamrl.sim.planner.plan_description import PlanDescription, objective_band
from streamrl.sim.planner.planner import (
    FASTEST_MIXED,
    NOT_JUDGED,
    _look_for_fastest,
    _Progress,
    _settle,
)
from streamrl.sim.planner.race import MAY_BE_CHANCE, Race, Simulated, ratios_of
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.trial import Unfinished, timed_speed_of
from tests.test_mixed_fleets import ONE_TRAINER
from tests.test_mixed_fleets import offer as mixed_offer
from tests.test_plan import SMALL, Here, few, planned, searched


def scaled(speed: Speed, share: float) -> Speed:
    """Return a simulation whose steps are all longer by a share, and as much dearer."""
    return replace(
        speed,
        step_time=share * speed.step_time,
        step_times=[share * seconds for seconds in speed.step_times],
        cost_per_step=share * speed.cost_per_step,
        cost_per_million_tokens=share * speed.cost_per_million_tokens,
    )


# What is alike ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behind", "is_sure", "is_alike"),
    [
        (ALIKE / 2, True, True),
        (0.04, True, False),
        (0.04, False, True),
        (MAY_BE_CHANCE + 0.01, False, False),
        (0.5, False, False),
    ],
)
def test_a_much_dearer_plan_is_not_alike_even_where_the_difference_may_be_chance(
    behind: float, is_sure: bool, is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = searched()
    race = Race(search)
    first, second = search.ranking()[:2]
    speed = search.speeds[first]
    race.finals = {first: [speed], second: [scaled(speed, 1 + behind)]}
    monkeypatch.setattr("streamrl.sim.planner.race.is_beyond_chance", lambda *_: is_sure)
    assert race.is_alike(second, first) == is_alike


def test_a_named_plan_that_the_search_left_out_is_simulated_by_it_before_it_is_compared() -> None:
    search, pool, progress = searched(), Here(), _Progress(lambda *_: None)
    race = Race(search)
    chosen = race.settle(pool, race.run(pool, lambda: None), lambda: None)
    left_out = next(i for i in range(len(search.space)) if i not in search.speeds)
    named = [search.space.candidate(left_out)]
    _settle(search, race, pool, progress, chosen, NOT_JUDGED, named)
    assert left_out in search.speeds
    race.cheapest = left_out
    assert race.ahead_over_few_steps(chosen) is not None


def test_a_reason_compares_plans_over_all_steps_that_both_have() -> None:
    """A plan that looks 1 % better over a few steps, and is 3 % dearer over more, is no better plan."""
    search, race, chosen = settled()
    other = next(index for index in search.ranking() if index != chosen)
    race.finals[other] = [scaled(race.finals[chosen][0], 0.99)]
    assert " behind the best" in PlanDescription(search, race, chosen).why()
    race.beside[other] = scaled(race.steady[chosen][0], 1.03)  # type: ignore[assignment]
    why = PlanDescription(search, race, chosen).why()
    assert why == "the cheapest of all that were simulated"


def test_a_first_answer_that_differs_in_nothing_that_is_named_recommended_the_same_plan() -> None:
    search, race, chosen = settled()
    own = search.space.candidate(chosen)
    alike = own._replace(replicas=own.replicas._replace(max_running=own.replicas.max_running + 1))
    first = next(iter(first_answer(search.space.run, Here(), 0.0).plans))._replace(candidate=alike)
    found = first_plan_of(search, race, chosen, first, {chosen: 1})
    assert (found.option, found.reason) == (1, "")


def test_a_first_answer_says_which_plans_it_had_no_time_to_simulate() -> None:
    run = few(SMALL, tolerance=0.0)
    found = first_answer(run, Here(), 0.0)
    num = len({plan.candidate for plan in found.plans})
    told = f"time was up: {num} of these {num} plans were not simulated; on a free machine the choice may"
    assert next(found.band_notes()).startswith(told)
    simulated = [plan._replace(simulated_steps=8) for plan in found.plans]
    found = found._replace(plans=simulated)
    assert next(found.band_notes()) == "time was up; on a free machine the choice may differ"
    assert "time was up" not in " ".join(found._replace(is_late=False).notes())


def test_a_first_answer_ends_by_rollouts_and_says_so() -> None:
    run = few(SMALL, tolerance=0.0)
    answers = [first_answer(run, Here(), 600.0, most) for most in (0, 1, inf)]
    simulated = [sum(plan.simulated_steps > 0 for plan in each.plans) for each in answers]
    assert simulated == [0, 0, 3] and not any(each.is_late for each in answers)
    assert "a first answer simulates few rollouts" in next(answers[0].band_notes())
    assert "rollouts" not in " ".join(answers[2].notes())


def test_a_first_answer_that_is_about_as_good_is_not_called_behind() -> None:
    search, race, chosen = settled()
    other = next(index for index in search.ranking() if index != chosen)
    race.beside[other] = scaled(race.steady[chosen][0], 1.001)  # type: ignore[assignment]
    candidate = search.space.candidate(other)
    first = next(iter(first_answer(search.space.run, Here(), 0.0).plans))
    found = first_plan_of(search, race, chosen, first._replace(candidate=candidate), {chosen: 1})
    assert found.reason == "it is about as good by plan.objective, and not simpler"


def settled() -> tuple[Search, Race, int]:
    """Return a search for the cheapest plan, with its longer simulations and the plan that is chosen."""
    search, pool = searched(tolerance=0.0), Here()
    race = Race(search)
    return search, race, race.settle(pool, race.run(pool, lambda: None), lambda: None)


# The fastest plan ---------------------------------------------------------------------------------


def test_the_fastest_row_may_have_two_kinds_of_replicas_even_if_the_search_by_cost_mixed_none() -> (
    None
):
    plan = {**ONE_TRAINER, "objective": "cost-per-million-tokens"}
    search = Search.open(mixed_offer(plan, algorithm__prompts_per_step=64))
    search._converge(Here(), lambda: None)
    _look_for_fastest(search, Here(), _Progress(lambda *_: None))
    seconds = {i: search.spend_of(speed).seconds for i, speed in search.speeds.items()}
    mixed = {i: s for i, s in seconds.items() if search.space.candidate(i).replicas.beside}
    alike = [s for i, s in seconds.items() if i not in mixed]
    assert 0 < len(mixed) <= FASTEST_MIXED and min(mixed.values()) < 0.95 * min(alike)


# Kinds without a row ------------------------------------------------------------------------------


def left_out(search: Search) -> dict[str, str]:
    race = Race(search)
    chosen = search.ranking()[0]
    return {each.label: each.reason for each in Options(search, race, chosen).left_out([])}


def colocated(search: Search) -> list[int]:
    space = search.space
    return [i for i in search.speeds if space.candidate(i).mode.system == "colocated"]


def test_a_kind_of_plan_that_the_offer_lacks_has_no_row() -> None:
    search = searched(systems=["stream-async"])
    for label in ("best colocated", "best synchronous"):
        assert left_out(search)[label] == "the offer and [plan] have none"


def test_a_kind_of_plan_that_exceeds_a_limit_names_it() -> None:
    search = searched()
    shortest = min(search.spend_of(search.speeds[i]).seconds for i in colocated(search))
    others = [i for i in search.speeds if i not in colocated(search)]
    assert min(search.spend_of(search.speeds[i]).seconds for i in others) < 0.99 * shortest
    run = search.space.run
    limited = replace(run, plan=replace(run.plan, deadline=0.99 * shortest))
    search.space = replace_fields(search.space, run=limited)
    search.aim_at(limited.plan)
    told = left_out(search)["best colocated"]
    assert told.startswith("plan.deadline ") and "the fastest plan that was simulated" in told


def test_a_kind_of_plan_that_does_not_finish_says_so() -> None:
    search = searched()
    for index in colocated(search):
        search.give_up(index, Unfinished("its replicas were lost"))
    told = left_out(search)["best colocated"]
    assert told == "a plan that was simulated does not come to its end: its replicas were lost"


def test_a_kind_of_plan_that_was_not_simulated_says_so() -> None:
    search = searched()
    for index in colocated(search):
        del search.speeds[index]
    assert "by their estimates" in left_out(search)["best colocated"]
    search.deadline = 0.0
    assert left_out(search)["best colocated"] == "no time was left to simulate one"


# Parts of a node ----------------------------------------------------------------------------------


def test_a_search_on_parts_of_a_node_that_could_not_open_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched()
    rivals = [search.speeds[search.ranking()[0]]]

    def parts() -> object:
        return find_on_partial_nodes(search, ["h800"], rivals, Here(), lambda: None)

    def refuse(*_: object, **__: object) -> Search:
        raise ValueError("too many plans")

    monkeypatch.setattr(Search, "beside", refuse)
    assert parts() == "they could not be searched: too many plans"
    search.deadline = 0.0
    assert parts() == "no time was left to search for it"


def test_no_plan_on_parts_of_a_node_is_simulated_if_by_estimate_a_rival_beats_them_all() -> None:
    search = searched()
    rival = scaled(search.speeds[search.ranking()[0]], 0.01)
    asked: list[object] = []

    class Listening(Here):
        def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            asked.append(work)
            return super().submit(work, *arguments)

    found = find_on_partial_nodes(search, ["h20", "h800"], [rival], Listening(), lambda: None)
    assert found == NONE_BETTER and timed_speed_of not in asked


def test_a_search_beside_another_asks_for_no_simulation_of_generation_or_training_again() -> None:
    search = searched(unit=None)
    counts = [2, 4, 6, 8]
    plan = replace(search.space.run.plan, rollout_gpus=counts, trainer_gpus=counts)
    other = search.beside(plan, runnable=True)
    both = [
        index for i in search.speeds if (index := other.space.index_of(search.space.candidate(i)))
    ]
    assert both and not other.estimates.asked(both, 1) and not other.estimates.unchecked(both)
    for index in both:
        mine = search.space.index_of(other.space.candidate(index))
        theirs = other.estimates.estimate().step[index]
        assert theirs == pytest.approx(search.estimates.estimate().step[mine])


# Ratios -------------------------------------------------------------------------------------------


def drifting(speed: Speed, num_steps: int, share: float = 1.0) -> Speed:
    """Return a simulation of some steps, each a tenth longer than the one before; all count but the first."""
    seconds = [share * 10 * 1.1**place for place in range(num_steps)]
    mean = sum(seconds[1:]) / (num_steps - 1)
    dollars = speed.cost_per_step / speed.step_time * mean
    return replace(
        speed,
        step_time=mean,
        step_times=seconds,
        step_tokens=[1000] * num_steps,
        counted_steps=(2, num_steps),
        cost_per_step=dollars,
        cost_per_million_tokens=dollars * 1000,
        egress_per_step=0.0,
    )


def billed(search: Search, index: int, speed: Speed) -> Speed:
    run = search.space.candidate(index).apply(search.space.run)
    return with_bill(run.cluster, speed, whole_time(run, speed), PaidGpus.of(run))


def raced(search: Search, **known: Speed) -> tuple[Race, int, int]:
    race, (first, second, *_) = Race(search), search.ranking()
    speeds = {first: known["first"], second: known["second"]}
    race.beside = {i: billed(search, i, speed) for i, speed in speeds.items()}  # type: ignore[misc]
    return race, first, second


@pytest.mark.parametrize("changes", [{}, {"cluster.billing": {"setup_time": "60 s"}}])
def test_plans_with_unequal_numbers_of_steps_are_compared_over_those_of_both(
    changes: dict[str, Any],
) -> None:
    """Later steps are longer, so the plan with more steps would look slower and dearer than it is."""
    search = searched({"algorithm.steps": 40, **changes})
    speed = search.speeds[search.ranking()[0]]
    race, first, second = raced(
        search, first=drifting(speed, 8), second=drifting(speed, 16, share=0.9)
    )
    assert race.behind(second, first) == pytest.approx(-0.1, abs=0.03)
    dollars, seconds = race.ratios(second, first)
    later = 60.0 if changes else 0.0
    own = [1 + 39 * sum(1.1**place for place in range(1, 8)) / 7]
    assert seconds == pytest.approx((later + 9 * own[0]) / (later + 10 * own[0]))
    assert dollars == pytest.approx(seconds) and race.dominates(second, first)
    one, other = (Simulated(search, i, race.as_known(i)) for i in (second, first))
    assert ratios_of(one, other) == (dollars, seconds)


def test_a_reason_says_where_chance_alone_decides_by_the_tolerance() -> None:
    search = searched({"algorithm.steps": 40})
    tolerance = search.space.run.plan.tolerance
    speed = drifting(search.speeds[search.ranking()[0]], 12)
    noisy = [
        seconds * (1.1 if place % 2 else 0.9) for place, seconds in enumerate(speed.step_times)
    ]

    def raced_at(dearer: float, *, is_noisy: bool) -> tuple[Race, int]:
        share = dearer * speed.step_time / (sum(noisy[1:]) / 11) if is_noisy else 1.0
        times = [share * seconds for seconds in noisy] if is_noisy else speed.step_times
        rent = dearer * speed.cost_per_step
        other = replace(speed, step_times=times, cost_per_step=rent)
        race, cheapest, index = raced(search, first=speed, second=other)
        race.cheapest = cheapest
        return race, index

    for dearer, is_noisy, is_near in (
        (1 + tolerance - 0.02, True, True),
        (1 + tolerance - 0.02, False, False),
        (1 + tolerance + 0.02, True, True),
        (1.5, True, False),
    ):
        race, index = raced_at(dearer, is_noisy=is_noisy)
        assert race.is_near_tolerance(index) == is_near, (dearer, is_noisy)
        assert race.just_above_tolerance() == ([index] if is_near and dearer > 1.1 else [])


# Bands and limits ---------------------------------------------------------------------------------


def test_the_band_of_an_objective_has_the_wait_and_the_bill_at_both_of_its_ends() -> None:
    """Within a minimum term only the wait grows with the steps."""
    term = {f"cluster.pools.{pool}.minimum_term": "100 h" for pool in ("h20", "h800")}
    search = searched(term, value_of_hour=3600.0, objective="cost-per-step")
    index = search.ranking()[0]
    speed = search.speeds[index]
    error = estimated_error(search, index)
    step = bands_of_speed(speed, error).step_time_band
    bill = 100 * 3600 * float(search.space.prices[index]) / search.space.run.algorithm.steps
    band = objective_band(search, index, [speed])
    assert (band.low, band.high) == pytest.approx((bill + step.low, bill + step.high))
    longer = scaled(speed, 1.5)
    both = objective_band(search, index, [speed, longer])
    assert both.low == band.low and both.high == pytest.approx(bill + 1.5 * step.high)


def test_limits_that_the_high_end_of_a_band_exceeds_are_named_in_one_line(tmp_path: Path) -> None:
    whole = planned(few(SMALL)).plan.whole_run
    assert whole is not None and whole.wall_time_band is not None
    deadline = (whole.wall_time + whole.wall_time_band.high) / 2
    run = few(SMALL, deadline=f"{deadline} s", budget=1e6)
    made = planned(run)
    assert made.plan.at_worst.startswith("at the high end of its band it takes ")
    assert f", more than {limit_words('deadline', deadline)}; " in made.plan.at_worst
    safe = [
        str(option.number)
        for option in made.plan.options[1:]
        if option.whole_run.wall_time_band is not None
        and option.whole_run.wall_time_band.high <= deadline
    ]
    names = f"option{'s' if len(safe) > 1 else ''} {listing(safe)}"
    assert made.plan.at_worst.split("; ")[1].startswith(names if safe else "no option")
    assert "budget" not in made.plan.at_worst
    assert made.plan.at_worst in head_lines(made.plan)
    assert planned(few(SMALL)).plan.at_worst == ""
    write_plan(made.plan, tmp_path)
    write_run(made.run, tmp_path / "plan.toml")
    page = make_page(read_report([tmp_path]))
    told = page.answer.replace("\xa0", " ")
    for words in (made.plan.at_worst[1:].partition(" for the whole run")[0], names):
        assert words in told


# Time ---------------------------------------------------------------------------------------------


def test_every_time_of_a_whole_run_is_that_until_its_end() -> None:
    billing = {"setup_time": "2 h", "failed_share": 0.5}
    plan = planned(few({**SMALL, "cluster.billing": billing})).plan
    whole = plan.whole_run
    assert whole is not None and whole.wall_time == pytest.approx(7200 + 1.5 * whole.seconds)
    assert whole.wall_time_band is not None and whole.seconds_band is not None
    assert whole.wall_time_band.high == pytest.approx(7200 + 1.5 * whole.seconds_band.high)
    assert long_time(whole.wall_time) in time_text(whole)
    assert plan.to_frame()["hours"][0] == pytest.approx(whole.wall_time / 3600)
    for option in plan.options:
        ratio = option.whole_run.wall_time / whole.wall_time
        assert option.time_ratio == pytest.approx(ratio, rel=0.02)
    assert plan.what_if is not None
    lengths, cap, links = plan.what_if.unchanged
    hours = plan.what_if.plans[0].hours[lengths][cap][links]
    assert hours == pytest.approx(whole.wall_time / 3600, rel=1e-3)

"""A what-if asks the rule of the plan itself which option it would choose after the change."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.record.charges import PaidGpus
from streamrl.report.page.page import make_page, read_report, render_markdown
from streamrl.report.plan_report import why_lines
from streamrl.sim.planner.choice_after import Figures, NewChoice, best_of, choices_after
from streamrl.sim.planner.objective import Spend
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.sensitivity import judge
from tests.report_directories import write_planned
from tests.test_decision_rules import billed, drifting
from tests.test_plan import SMALL, Here, few, planned, searched


def figures(plan: int, dollars: float, seconds: float) -> Figures:
    return Figures(plan, Spend(dollars, dollars, dollars, seconds), dollars)


@pytest.mark.parametrize(
    ("dollars", "seconds", "best"),
    [
        (90.0, 150.0, 1),  # the recommended plan is 11 % dearer than the cheapest
        (92.0, 150.0, 0),  # it is 9 % dearer, and faster
        (108.0, 80.0, 1),  # the other one is 8 % dearer, and faster
        (112.0, 80.0, 0),  # the other one is 12 % dearer
        (100.0, 99.0, 0),  # it is not clearly faster
    ],
)
def test_the_fastest_plan_that_costs_little_more_than_the_cheapest_is_chosen(
    dollars: float, seconds: float, best: int
) -> None:
    plan = replace(few(SMALL).plan, tolerance=0.1)
    found = best_of(plan, [figures(0, 100.0, 100.0), figures(1, dollars, seconds)], 0)
    assert found is not None and found.plan == best


def test_by_another_objective_the_best_plan_that_keeps_the_limits_is_chosen() -> None:
    plan = replace(few(SMALL).plan, objective="cost-per-step", tolerance=0.0)
    own, cheap, slow = figures(0, 100.0, 100.0), figures(1, 97.0, 120.0), figures(2, 99.0, 90.0)
    assert best_of(plan, [own, cheap, slow], 0) == cheap
    assert best_of(plan, [own, slow], 0) == own
    late = replace(plan, deadline=110.0)
    assert best_of(late, [own, cheap, slow], 0) == own
    assert best_of(replace(plan, deadline=10.0), [own, cheap], 0) is None


DEARER = 1.1
"""One more than `plan.tolerance`."""


@cache
def offer() -> tuple[Search, int, int, float]:
    """Return a search, two plans, and by how much more of its rent the second one pays for H20."""
    search = searched({"algorithm.steps": 40})
    shares = {}
    for index in search.ranking():
        run = search.space.candidate(index).apply(search.space.run)
        rents = {
            name: count * (run.cluster.pools[name].price or 0.0)
            for name, count in PaidGpus.of(run).by_pool.items()
        }
        shares[index] = rents.get("h20", 0.0) / sum(rents.values())
    first, second = min(shares, key=lambda i: shares[i]), max(shares, key=lambda i: shares[i])
    return search, first, second, shares[second] - shares[first]


def raced_at(dearer: float) -> tuple[Search, Race, int, int]:
    """Return two long simulations: the second plan is dearer, and twice as fast."""
    search, first, second, _ = offer()
    speed = drifting(search.speeds[first], 12)
    faster = replace(
        drifting(speed, 12, share=0.5),
        **{
            name: dearer * getattr(speed, name)
            for name in ("cost_per_step", "cost_per_million_tokens")
        },
    )
    race = Race(search)
    race.beside = {i: billed(search, i, each) for i, each in ((first, speed), (second, faster))}  # type: ignore[misc]
    return search, race, first, second


def changed(search: Search, race: Race, chosen: int, other: int) -> dict[str, NewChoice]:
    judged = judge(search, chosen, race.spend(chosen), Here())
    prices = [
        each for each in (*judged.verdicts, *judged.idle) if each.what.startswith("price of h20")
    ]
    return choices_after(
        search, race, chosen, judged._replace(verdicts=prices, idle=[]), [other], Here()
    )


def test_a_faster_option_that_a_price_brings_within_the_tolerance_is_chosen_then() -> None:
    *_, more = offer()
    assert more > 0.1
    search, race, first, second = raced_at(DEARER / (1 - 0.1 * more))
    found = changed(search, race, first, second)
    assert list(found) == ["price of h20 -20%"]
    new = found["price of h20 -20%"]
    assert new.plan == second and new.effect.seconds == pytest.approx(0.5)
    assert "2.0 times as fast" in new.relation and "dearer" in new.relation
    assert (
        new.reason
        == f"it is faster, and costs {new.effect.bill - 1:.1%} more than the cheapest then"
    )


def test_a_recommended_plan_that_a_price_takes_beyond_the_tolerance_is_replaced_then() -> None:
    *_, more = offer()
    search, race, first, second = raced_at(DEARER * (1 - 0.1 * more))
    found = changed(search, race, second, first)
    assert list(found) == ["price of h20 +20%"]
    new = found["price of h20 +20%"]
    assert new.plan == first and "takes about 2.0 times as long" in new.relation
    assert new.reason.startswith("the recommended plan costs 1")
    assert new.reason.endswith("more than the cheapest then")


def test_terminal_and_page_name_the_option_that_is_chosen_then(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    second = plan.options[1]
    kept = [replace(change, is_other=False, breaks=[]) for change in plan.sensitivity]
    plan = replace(plan, sensitivity=kept)
    text = " ".join(why_lines(plan))
    assert f"the same rule chooses this plan under each of {len(plan.sensitivity)} what-ifs" in text
    told = {"option": 2, "relation": "about 9 % dearer", "reason": "it is faster then"}
    other = replace(plan.sensitivity[0], is_other=True, choice=second.text, gain=-0.09, **told)
    write_plan(replace(plan, sensitivity=[other, *plan.sensitivity[1:]]), directory)
    name = f"option 2 ({', '.join(second.labels)})"
    line = f"another choice with {other.what}: {name}: about 9 % dearer; it is faster then"
    assert line in list(why_lines(read_plan(directory / "plan.json")))
    page = render_markdown(make_page(read_report([directory]))).replace("\N{NO-BREAK SPACE}", " ")
    assert f"2 · {second.labels[0]}" in page
    assert "about 9 % dearer; it is faster then" in page


@pytest.mark.parametrize("unit", [None, 8])
def test_something_can_run_each_option_that_is_offered(unit: int | None) -> None:
    plan = planned(few(SMALL, unit=unit)).plan
    able = [any(each.can_run for each in option.carried_by) for option in plan.options]
    assert able[0] and plan.carried_by == plan.options[0].carried_by
    for option, is_able in zip(plan.options, able, strict=True):
        assert is_able or not option.is_offered
        assert not (is_able and "nothing runs this today" in option.labels)

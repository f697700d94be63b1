"""Plans under budgets and deadlines of the whole run, among pools that are owned, and links that charge for what crosses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.doctor.idle_gpus import find
from streamrl.record.charges import PaidGpus
from streamrl.record.relations import relation_text
from streamrl.record.run_comparison import is_beyond_chance
from streamrl.record.whole_run import whole_time
from streamrl.report.plan_report import decision_text
from streamrl.runfile.checks import check_run
from streamrl.runfile.files import write_run
from streamrl.runfile.gpu_pools import sides_of
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.planner.objective import (
    Spend,
    aim_of,
    distance_to_front,
    excess,
    keeps_limits,
    spend_of,
    unmet,
)
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.space import Space
from streamrl.sim.planner.trial import Trial, short_speed_of
from tests.command_line import streamrl
from tests.test_plan import SMALL, Here, few, planned
from tests.test_search_space import candidates, offer
from tests.test_whole_run import SPEED

OWNED: dict[str, Any] = {
    "cluster.pools": {
        "h20": {"gpu": "h20", "nodes": 2, "price": 2.0, "owned": True},
        "h800": {"gpu": "h800", "nodes": 3, "price": 5.0},
    }
}
DEAR_LINK: dict[str, Any] = {
    "cluster.links": [{"between": ["h20", "h800"], "bandwidth": "80 Gbps", "price_per_gb": 0.5}]
}
STEPS = {**SMALL, "algorithm.steps": 100}


# Budgets and deadlines ----------------------------------------------------------------------------


def test_a_budget_and_a_deadline_of_the_whole_run_are_kept() -> None:
    free = planned(few(STEPS)).plan.whole_run
    assert free is not None
    faster = planned(few(STEPS, deadline=f"{0.85 * free.seconds} s")).plan.whole_run
    assert faster is not None
    assert faster.seconds <= 0.85 * free.seconds and faster.dollars > free.dollars
    budget = 1.1 * free.dollars
    fast = planned(few(STEPS, objective="step-time")).plan.whole_run
    kept = planned(few(STEPS, objective="step-time", budget=budget)).plan.whole_run
    assert fast is not None and kept is not None
    assert kept.dollars <= budget < fast.dollars and kept.seconds > fast.seconds


def test_a_budget_a_day_bounds_rent_and_what_crosses_links() -> None:
    free = planned(few(SMALL, objective="step-time")).plan.allocation
    day = 0.6 * free.cost_per_step / free.step_time * 86_400
    found = planned(few(SMALL, objective="step-time", budget_per_day=day)).plan.allocation
    assert found.cost_per_step / found.step_time * 86_400 <= day
    assert found.step_time > (1 - ALIKE) * free.step_time


@pytest.mark.parametrize(
    ("limit", "part"),
    [
        ("budget=1", r"plan\.budget 1: the cheapest plan that was simulated costs \d"),
        ("budget_per_day=900", r"plan\.budget_per_day 900: the cheapest plan .* a day$"),
        ("deadline='9 s'", r"plan\.deadline 9\.00 s: the fastest plan .* takes \d.* min"),
    ],
)
def test_limits_that_nobody_keeps_say_in_one_line_what_the_best_takes(
    limit: str, part: str, tmp_path: Path
) -> None:
    write_run(few(STEPS), tmp_path / "offer.toml")
    done = streamrl("plan", tmp_path / "offer.toml", "-o", tmp_path, "--set", f"plan.{limit}")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert re.search(part, done.stderr.rstrip()), done.stderr
    assert not (tmp_path / "plan.toml").exists()


def test_limits_that_none_keeps_together_name_the_cheapest_and_the_fastest() -> None:
    run = few(STEPS, budget=500.0, deadline="900 s")
    slow, fast = (
        replace(SPEED, step_time=seconds, cost_per_step=dollars, counted_steps=(1, 5))
        for seconds, dollars in ((20.0, 3.0), (5.0, 8.0))
    )
    spends = [spend_of(whole_time(run, speed), speed) for speed in (slow, fast)]
    assert not any(keeps_limits(run.plan, spend) for spend in spends)
    text = str(unmet(run.plan, spends))
    assert text.startswith("plan.budget 500 and plan.deadline 15.0 min: no plan")
    assert "the cheapest takes 300 dollars and 33.3 min" in text
    assert "the fastest 800 dollars and 8.33 min" in text
    both = few(STEPS, budget=900.0, deadline="900 s")
    assert keeps_limits(both.plan, spend_of(whole_time(both, fast), fast))
    assert not keeps_limits(both.plan, spend_of(whole_time(both, slow), slow))


def test_the_limit_that_is_broken_most_counts() -> None:
    run = few(STEPS, budget=100.0, deadline="50 s", budget_per_step=10.0)
    ones = np.ones(2)
    spend = Spend(5 * ones, ones, np.array([150.0, 50.0]), np.array([50.0, 200.0]))
    assert list(np.asarray(excess(run.plan, spend))) == [1.5, 4.0]
    assert excess(few().plan, spend) == 0


def test_a_search_that_nothing_can_satisfy_does_not_simulate_everything() -> None:
    search = Search.open(few(STEPS, budget=0.01))
    with pytest.raises(ValueError, match=r"plan\.budget 0\.01"):
        search.run(Here(), lambda: None)
    assert len(search.speeds) <= len(set(search._class_codes)) + 1, "the first look, and no round"


# Owned pools --------------------------------------------------------------------------------------


def test_a_plan_is_charged_all_of_an_owned_pool_and_keeps_all_its_nodes() -> None:
    space, rented = Space.open(offer(OWNED)), Space.open(offer())
    assert len(space) == len(rented)
    whole = 16 * 2.0
    for index in np.linspace(0, len(space) - 1, 60).astype(int):
        candidate = space.candidate(int(index))
        run = candidate.apply(space.run)
        check_run(run)
        assert PaidGpus.of(run).dollars_per_second == pytest.approx(space.prices[index], rel=1e-12)
        assert space.prices[index] * SECONDS_PER_HOUR >= whole
        assert run.cluster.pools["h20"].nodes == 2
    alone = [i for i, c in enumerate(candidates(space)) if "h20" not in (c[0].pool, c[1].pool)]
    run = space.candidate(alone[0]).apply(space.run)
    assert "h20" in run.cluster.pools
    found = find(run.cluster.pools, sides_of(run), run.plan, None)
    assert [text.level for text in found] == ["ok"] * 2


def test_what_is_owned_is_used_where_renting_it_would_not_pay() -> None:
    dear: dict[str, Any] = {"gpu": "h20", "nodes": 2, "price": 40.0}
    pools = {"h20": dear, "h800": {"gpu": "h800", "nodes": 3, "price": 5.0}}
    for owned, pool in ((False, "h800"), (True, "h20")):
        pools["h20"] = {**dear, "owned": owned}
        # sizes of the sides are given, because a node of H800 that both share would cost as little
        found = planned(few({"cluster.pools": pools, **STEPS}, trainer_gpus=[8, 16])).plan
        assert found.allocation.rollout.pool == pool
        assert found.whole_run is not None
        assert ("h20" in found.whole_run.pools) == owned
        told = decision_text(found)
        assert told.startswith("Rent ")
        assert ("use your own 16 H20: " in told) == owned


def test_a_plan_under_a_deadline_says_that_it_is_the_cheapest_that_meets_it() -> None:
    found = planned(few(STEPS, deadline="30 days", tolerance=0.0)).plan
    assert found.why == "the cheapest of all that were simulated and meet the deadline"
    waiting = few(objective="cost-per-step", value_of_hour=2.0).plan
    assert "waiting" in aim_of(waiting) and aim_of(few(objective="step-time").plan) == "the fastest"


# Links --------------------------------------------------------------------------------------------


def test_estimates_charge_for_a_push_what_simulations_do() -> None:
    search = Search.open(few({**DEAR_LINK}, systems=["disaggregated"], sync_modes=["full"]))
    space, egress = search.space, search.estimates.egress(search.estimates.estimate().step)
    crosses = np.array([c.replicas.pool != c.trainer.pool for c in candidates(space)])
    assert crosses.any() and not crosses.all()
    assert (egress[crosses] > 5).all() and (egress[~crosses] == 0).all()
    index = int(np.nonzero(crosses)[0][0])
    speed = short_speed_of(Trial(search.base, space.candidate(index)))
    assert speed.egress_per_step == pytest.approx(egress[index])


def test_a_link_that_charges_makes_one_pool_the_better_plan() -> None:
    cheap = {**OWNED["cluster.pools"]["h20"], "owned": False, "price": 0.5}
    pools = {**OWNED["cluster.pools"], "h20": cheap}
    changes = {**DEAR_LINK, **STEPS, "cluster.pools": pools}
    free = planned(few({"cluster.pools": pools}, sync_modes=["full"])).plan.allocation
    assert free.rollout.pool != free.trainer.pool
    full = planned(few(changes, sync_modes=["full"])).plan.allocation
    assert full.rollout.pool == full.trainer.pool
    pushed = planned(few(changes, sync_modes=["full"], rollout_pools=["h20"])).plan
    assert pushed.whole_run is not None
    per_step = pushed.whole_run.egress / pushed.whole_run.steps
    assert 5 < per_step < pushed.allocation.cost_per_step


# The whole run ------------------------------------------------------------------------------------


def test_a_plan_and_the_simulation_of_its_file_say_the_same_whole_run(tmp_path: Path) -> None:
    changes = {**STEPS, **OWNED, **DEAR_LINK, "framework.checkpoint_time": "20 s"}
    made = make_plan(few(changes, staleness_cost=5.0, systems=["one-step-async"]))
    whole = made.plan.whole_run
    assert whole is not None and whole.steps > 100 and whole.checkpoint_time > 0
    write_run(made.run, tmp_path / "plan.toml", (), made.plan.allocation.settings)
    found = json.loads(streamrl("simulate", tmp_path / "plan.toml", "--json").stdout)
    assert next(iter(found)) == "whole_run"
    assert found["whole_run"]["seconds"] == whole.seconds
    assert found["whole_run"]["dollars"] == whole.dollars
    assert found["whole_run"]["pools"]["h20"]["num_gpus"] == 16


def test_a_plan_begins_with_its_whole_run(tmp_path: Path) -> None:
    write_run(few(STEPS), tmp_path / "offer.toml")
    done = streamrl("plan", tmp_path / "offer.toml", "-o", tmp_path / "plan", "--force")
    head = done.stdout.partition("\n\n")[0]
    assert head.startswith("Rent ") and "\n  whole run: 100 steps take " in head
    assert next(iter(json.loads((tmp_path / "plan" / "plan.json").read_text()))) == "whole_run"
    assert "# whole run: 100 steps take" in (tmp_path / "plan" / "plan.toml").read_text()


# Free GPUs and the shortest outputs ---------------------------------------------------------------


@pytest.mark.parametrize("h800", [0.0, 5.0])
def test_the_fastest_plan_is_found_among_gpus_without_a_price(h800: float) -> None:
    pools = {
        "h20": {"gpu": "h20", "nodes": 2, "price": 0.0},
        "h800": {"gpu": "h800", "nodes": 3, "price": h800},
    }
    found = planned(few({**SMALL, "cluster.pools": pools}, objective="step-time")).plan
    for runner in found.runners_up:
        dollars, prices = runner.choice.cost_per_step, runner.choice.dollars_per_hour
        assert dollars == pytest.approx(
            prices * runner.choice.step_time / SECONDS_PER_HOUR, rel=0.05
        )


def test_outputs_of_one_token_are_planned_although_they_need_no_decode_step() -> None:
    found = planned(few({**SMALL, "rollout.max_tokens": 1})).plan
    assert found.whole_run is not None
    assert found.whole_run.tokens == 4 * 32


def test_a_free_plan_is_as_dear_as_another_free_one() -> None:
    far = distance_to_front(np.array([1.0, 2.0, 2.0]), np.array([0.0, 0.0, 3.0]))
    assert far.tolist() == [1.0, 1.0, 2.0]


def test_a_free_plan_beats_one_that_costs_something_by_more_than_chance() -> None:
    steps = replace(SPEED, step_times=[1.0, 1.1] * 20, counted_steps=(1, 40))
    others = replace(steps, step_times=[1.1, 1.05] * 20)
    assert is_beyond_chance(steps, others, 0.0) is True
    assert relation_text(0.0, 1.0, 0.1) == "100 % cheaper, as fast"

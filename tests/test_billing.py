"""What a run is billed: units of time, minimum terms, set-up, failed attempts and storage, by pencil and paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.record.billing import adds_nothing, bill_of, billed_time, billing_ratios, uncounted
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure
from streamrl.record.whole_run import whole_dollars, whole_time
from streamrl.report.run_tables import facts
from streamrl.runfile.cluster_config import BillingConfig, ClusterConfig, LinkConfig, PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.runfile.units import Bandwidth, Duration, Size
from streamrl.sim.planner.first_answer import first_answer, run_table_of
from streamrl.sim.planner.objective import value_of
from streamrl.sim.planner.plan_description import PlanDescription
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import Trial, short_speed_of
from tests.runs import small_run
from tests.test_metrics import two_steps
from tests.test_plan import Here, few, planned
from tests.test_plan_limits import STEPS
from tests.test_question import SMALL
from tests.test_whole_run import measured

HOUR = 3600.0
CLUSTER = ClusterConfig(
    pools={
        "near": PoolConfig(gpu="h800", billing_unit=Duration(HOUR)),
        "far": PoolConfig(gpu="h20", minimum_term=Duration(24 * HOUR)),
    },
    links=[LinkConfig(between=("near", "far"), bandwidth=Bandwidth(1e9), price_per_gb=0.1)],
    billing=BillingConfig(
        setup_time=Duration(2 * HOUR), failed_share=0.1, storage=Size(2e12), storage_price=0.073
    ),
)
RENTS = {"near": 40 / HOUR, "far": 10 / HOUR}
BILLED: dict[str, Any] = {
    "cluster.billing": {
        "setup_time": "2 h",
        "failed_share": 0.1,
        "storage": "2 TB",
        "storage_price": 0.073,
    },
    "cluster.pools.near.billing_unit": "1 h",
    "cluster.pools.far.minimum_term": "24 h",
}


# By hand ------------------------------------------------------------------------------------------


def test_a_rental_is_rounded_up_to_whole_units_and_to_its_minimum_term() -> None:
    hourly, daily = CLUSTER.pools.values()
    assert [billed_time(hourly, hours * HOUR) / HOUR for hours in (0.1, 3.0, 3.01)] == [1, 3, 4]
    assert billed_time(daily, 5 * HOUR) == 24 * HOUR and billed_time(daily, 25 * HOUR) == 25 * HOUR
    assert billed_time(PoolConfig(gpu="h20"), 5.5) == 5.5


def test_a_bill_by_hand() -> None:
    bill = bill_of(CLUSTER, RENTS, 50.0, 10 * HOUR)  # rented for 2 + 10 x 1.1 = 13 h
    assert bill.pools == pytest.approx({"near": 13 * 40, "far": 24 * 10})
    assert bill.egress == pytest.approx(55)
    assert bill.storage == pytest.approx(2000 * 0.073 * 13 / 730)
    assert bill.total == pytest.approx(520 + 240 + 55 + 2.6)


def test_without_keys_the_bill_is_the_rent_and_the_egress() -> None:
    plain = ClusterConfig(pools={"near": PoolConfig(gpu="h800"), "far": PoolConfig(gpu="h20")})
    assert bill_of(plain, RENTS, 7.0, 10 * HOUR).total == pytest.approx(507)
    assert adds_nothing(plain) and not adds_nothing(CLUSTER) and uncounted(CLUSTER) == []
    assert uncounted(plain) == [
        *("set-up", "failed attempts", "storage"),
        *("egress", "billing units", "minimum terms"),
    ]
    pools = {name: PoolConfig(gpu="h20", owned=True) for name in ("near", "far")}
    assert uncounted(ClusterConfig(pools=pools)) == uncounted(plain)[:4]


def test_many_runs_are_billed_as_each_alone() -> None:
    seconds = np.array([0.5, 10.0, 30.0]) * HOUR
    rents = {"near": np.array([1.0, 2.0, 0.0]), "far": np.array([0.0, 1.0, 3.0])}
    ratios = billing_ratios(CLUSTER, rents, np.full(3, 5.0), seconds)
    for place, each in enumerate(seconds):
        own = {name: float(rent[place]) for name, rent in rents.items()}
        plain = sum(own.values()) * each + 5.0
        total = bill_of(CLUSTER, own, 5.0, float(each)).total
        assert ratios[place] == pytest.approx(total / plain)


# In a run -----------------------------------------------------------------------------------------


def test_a_simulation_is_billed_and_its_parts_make_the_total() -> None:
    free, metrics = measured(), measured(BILLED)
    whole, plain = metrics.whole_run, free.whole_run
    assert metrics.step_times == free.step_times and whole.seconds == plain.seconds
    assert whole.setup_time == 2 * HOUR and whole.failed_time == pytest.approx(0.1 * whole.seconds)
    near, far = whole.pools["near"], whole.pools["far"]
    assert near.gpu_hours == 3 * near.num_gpus and far.gpu_hours == 24 * far.num_gpus
    parts = sum(pool.dollars for pool in whole.pools.values()) + whole.egress + whole.storage
    assert whole.dollars == pytest.approx(parts)
    assert metrics.cost_per_step == free.cost_per_step
    run = small_run(BILLED)
    assert whole_dollars(metrics, whole_time(run, metrics)) == pytest.approx(whole.dollars)
    assert metrics.billing_ratio == pytest.approx(whole.dollars / plain.dollars)
    rows = {name.strip(): (figure, note) for name, figure, note in facts(whole)}
    assert "2.00 h for set-up" in rows["GPU-hours"][1] and rows["storage"][0].startswith("$0.")
    assert rows["not counted"][1].startswith("egress (cluster.billing")


def test_an_executed_run_is_billed_as_its_simulation_is() -> None:
    trace = two_steps()
    trace.run = replace(trace.run, cluster=replace(small_run(BILLED).cluster, links=[]))
    totals = []
    for world in ("simulated", "real"):
        trace.world = world  # type: ignore[assignment]  # both are worlds
        totals.append(measure(trace).whole_run)
    assert totals[0] is not None and totals[1] is not None
    assert totals[0].seconds == 26 and totals[0].dollars == totals[1].dollars
    rents = PaidGpus.of(trace.run).rents
    hours = {"near": 3, "far": 24}
    expected = sum(rents[name] * hours[name] * HOUR for name in rents)
    assert totals[1].dollars == pytest.approx(expected + totals[1].storage)


# In a plan ----------------------------------------------------------------------------------------


def test_a_minimum_term_of_a_pool_moves_a_short_run_to_another_pool() -> None:
    pools = []
    for terms in ({}, {"cluster.pools.h20.minimum_term": "24 h"}):
        plan: dict[str, Any] = {"tolerance": 0.0, "trainer_pools": ["h20", "h800"]}
        run = few({**STEPS, **terms}, rollout_tensor_parallel=[1], **plan)
        search = Search.open(run)
        best = search.run(Here(), lambda: None)[0]
        pools.append(search.space.candidate(best).pools)
        spends = [search.spend_of(speed).whole for speed in search.speeds.values()]
        assert search.spend_of(search.speeds[best]).whole <= 1.02 * min(spends)
        assert search.value(best) == value_of(run.plan, search.speeds[best])
    assert pools == [{"h20"}, {"h800"}]


def test_a_plan_counts_keys_of_pools_and_links_that_it_does_not_use() -> None:
    term = {"cluster.pools.h800.minimum_term": "1 min", "cluster.billing": {"setup_time": "1 min"}}
    run = few({**STEPS, **term}, systems=["stream-sync"], rollout_pools=["h20"])
    run = replace(run, plan=replace(run.plan, trainer_pools=["h20"], time_limit=Duration(5.0)))
    link = replace(run.cluster.links[0], price_per_gb=0.1)
    plan = planned(replace(run, cluster=replace(run.cluster, links=[link]))).plan
    assert plan.whole_run is not None and list(plan.whole_run.pools) == ["h20"]
    for whole in (plan.whole_run, *(option.whole_run for option in plan.options)):
        assert whole.uncounted == ["failed attempts", "storage", "billing units"]


def test_a_term_of_a_year_is_billed() -> None:
    run = small_run({"cluster.pools.far.minimum_term": "1 year"})
    assert run.cluster.pools["far"].minimum_term == 365 * 24 * HOUR
    with pytest.raises(
        RunError, match=r"minimum_term must be in \[0 s, 3650 days\], got 7300 days$"
    ):
        small_run({"cluster.pools.far.minimum_term": "20 years"})


def test_an_estimate_is_billed_as_its_simulation() -> None:
    run = few({**STEPS, "cluster.billing": {"setup_time": "10 h", "failed_share": 0.2}})
    search = Search.open(run)
    index = int(np.argmin(search.space.prices))
    speed = short_speed_of(Trial(search.base, search.space.candidate(index)))
    steps = np.full(len(search.space), speed.step_time)
    ratios = search.estimates.billed(steps, np.zeros(len(steps)), run.plan)
    assert np.asarray(ratios)[index] == pytest.approx(speed.billing_ratio, rel=0.05)
    assert search.spend_of(speed).seconds > 10 * HOUR


def test_a_first_answer_is_billed_at_both_ends_of_its_band_of_time() -> None:
    run = make_run(run_table_of(SMALL))
    pools = {
        name: replace(pool, minimum_term=Duration(24 * HOUR))
        for name, pool in run.cluster.pools.items()
    }
    run = replace(run, cluster=replace(run.cluster, pools=pools))
    plan = first_answer(run, Here(), 0.0).recommended
    rents = PaidGpus.of(plan.candidate.apply(run)).rents
    assert plan.dollars == pytest.approx(sum(rents.values()) * 24 * HOUR)
    assert plan.dollars_band.low == plan.dollars_band.high == plan.dollars
    assert plan.seconds_band.low < plan.seconds < plan.seconds_band.high < 24 * HOUR


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"cluster.billing": {"failed_share": 1.5}}, "cluster.billing.failed_share must be in"),
        ({"cluster.billing": {"setup_time": 3}}, "cluster.billing.setup_time"),
        (
            {"cluster.pools.far.owned": True, "cluster.pools.far.minimum_term": "1 h"},
            "cluster.pools.far.minimum_term=1 h applies to rented GPUs",
        ),
    ],
)
def test_what_cannot_be_billed_is_refused_by_key(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        small_run(changes)


# The objective -----------------------------------------------------------------------------------

TERM: dict[str, Any] = {
    "cluster.pools.h20.minimum_term": "24 h",
    "cluster.pools.h800.minimum_term": "24 h",
}


def test_the_objective_of_a_run_within_its_minimum_term_is_the_bill_for_each_token() -> None:
    """Its first steps are longer than the mean, so the bill must not be spread over its seconds."""
    search = Search.open(few({**STEPS, **TERM}))
    index = search.run(Here(), lambda: None)[0]
    speed = search.speeds[index]
    rent = float(search.space.prices[index])
    tokens = speed.cost_per_step / speed.cost_per_million_tokens * 1e6
    steps = search.space.run.algorithm.steps
    assert search.value(index) == pytest.approx(24 * HOUR * rent / steps / tokens * 1e6)
    bounds = search.bounds()
    assert all(bounds[i] <= search.value(i) * (1 + 1e-9) for i in search.speeds)


def test_no_bound_is_above_the_value_of_a_plan_within_its_minimum_term() -> None:
    plan = planned(few({**STEPS, **TERM})).plan
    assert 0 < plan.lower_bound <= plan.own_bound <= plan.objective.value and plan.gap >= 0


def test_time_that_failed_attempts_and_set_up_take_is_waited_for() -> None:
    billing = {"setup_time": "10 h", "failed_share": 0.25}
    run = few({**STEPS, "cluster.billing": billing}, value_of_hour=36.0, objective="cost-per-step")
    search = Search.open(run)
    index = int(np.argmin(search.space.prices))
    speed = short_speed_of(Trial(search.base, search.space.candidate(index)))
    steps = run.algorithm.steps
    waited = 1.25 * speed.step_time + 10 * HOUR / steps
    free = replace(run.plan, value_of_hour=0.0)
    assert value_of(run.plan, speed) - value_of(free, speed) == pytest.approx(0.01 * waited)
    seconds, lags = np.full(len(search.space), speed.step_time), np.zeros(len(search.space))
    estimates = search.estimates
    more = estimates.values(seconds, lags, run.plan) - estimates.values(seconds, lags, free)
    assert more[index] == pytest.approx(0.01 * waited)


def test_the_front_is_of_time_and_dollars_of_the_whole_run() -> None:
    """A pool with a minimum term is dear, however little its steps cost."""
    changes = {**STEPS, "cluster.pools.h20.minimum_term": "400 h"}
    search = Search.open(few(changes, objective="pareto", trainer_pools=["h20", "h800"]))
    search.run(Here(), lambda: None)
    race, (best, *_) = Race(search), search.ranking()
    race.steady[best] = [search.speeds[best]]  # type: ignore[list-item]  # as short as the search
    front = PlanDescription(search, race, best).on_front()
    spends = {i: search.spend_of(search.speeds[i]) for i in search.ranking()}
    for index in front:
        assert not any(
            each.whole < spends[index].whole and each.seconds < spends[index].seconds
            for each in spends.values()
        )
    assert min(spends, key=lambda index: spends[index].whole) in front
    estimated = search._spends(search._least_steps(search.estimates.estimate()))
    assert search.scores()[int(estimated.whole.argmin())] <= 1.01

"""The whole run by pencil and paper: its seconds, its dollars by pool, its energy, in the same words everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.resolved import resolve
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure
from streamrl.record.steady_state import Speed
from streamrl.record.whole_run import WholeRun, whole_dollars, whole_time
from streamrl.report.run_tables import dollars_text, facts, headline, time_text
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import (
    replica_gpu_failures_per_day,
    trainer_gpu_failures_per_day,
)
from streamrl.runfile.files import write_run
from streamrl.runfile.formatting import long_dollars, long_time
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.costs.weight_sync import SyncCosts
from streamrl.sim.faults import TRAINER_STREAM, time_to_failure
from streamrl.sim.steady_state import simulate_steady
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_metrics import two_steps

SPEED = Speed(
    step_time=10.0,
    step_time_interval=(9.0, 11.0),
    median_step_time=10.0,
    step_times=[30.0, 12.0, 10.0, 10.0, 10.0],
    counted_steps=(3, 5),
    note="",
    throughput=100.0,
    goodput=100.0,
    samples_per_second=1.0,
    cost_per_step=7.0,
    egress_per_step=2.0,
    cost_per_million_tokens=7000.0,
    mean_staleness=1.0,
)
H100_POOLS = {"far": {"gpu": "h100"}, "near": {"gpu": "h100"}}


def run_of(steps: int, changes: dict[str, Any] | None = None) -> Run:
    return small_run({"algorithm.steps": steps, **(changes or {})})


def whole_of(changes: dict[str, Any] | None = None) -> WholeRun:
    return measured(changes).whole_run


def measured(changes: dict[str, Any] | None = None) -> Any:
    return measure(simulate_steady(small_run({"simulate.max_steps": 12, **(changes or {})})))


# Time and dollars ---------------------------------------------------------------------------------


def test_the_start_is_as_it_was_and_all_other_steps_are_mean_ones_with_their_interval() -> None:
    time = whole_time(run_of(100), SPEED)
    assert time.seconds == 30 + 12 + 98 * 10
    assert time.interval == (42 + 98 * 9, 42 + 98 * 11)
    assert time.start_time == 42 - 2 * 10
    assert whole_time(run_of(1), SPEED).seconds == 30, "shorter than the start"
    assert whole_time(run_of(1), SPEED).interval == (30, 30)


def test_a_start_is_as_long_as_its_steps_are_longer_and_never_less_than_nothing() -> None:
    fast = replace(SPEED, step_times=[15.0, 4.0, 10.5, 10.0, 10.0], counted_steps=(4, 5))
    time = whole_time(run_of(100), fast)
    assert time.seconds == 15 + 4 + 10.5 + 97 * 10
    assert (time.start_time, time.start_interval) == (5, (4, 6))
    even = replace(fast, step_times=[10.0, 9.0, 10.0, 10.0, 10.0])
    assert whole_time(run_of(100), even).start_time == 0
    assert whole_time(run_of(100), replace(fast, step_time_interval=None)).start_interval is None


def test_dollars_are_gpus_by_the_second_and_egress_by_the_step() -> None:
    time = whole_time(run_of(100), SPEED)
    assert whole_dollars(SPEED, time) == pytest.approx(1022 * 0.5 + 100 * 2)


def test_steps_of_a_real_run_took_what_they_took() -> None:
    assert whole_time(run_of(5), SPEED, is_recorded=True).seconds == 72
    assert whole_time(run_of(5), SPEED, is_recorded=True).interval == (72, 72)
    assert whole_time(run_of(7), SPEED, is_recorded=True).interval == (90, 94)


def test_checkpoints_hold_a_simulated_run_up() -> None:
    saving = {"framework.checkpoint_time": "3 s", "execute.checkpoint_every": 40}
    time = whole_time(run_of(100, saving), SPEED)
    assert (time.checkpoint_time, time.seconds) == (9, 1022 + 9)
    assert time.interval == (42 + 98 * 9 + 9, 42 + 98 * 11 + 9)
    assert whole_time(run_of(100, saving), SPEED, is_recorded=True).checkpoint_time == 0


def test_staleness_that_costs_progress_adds_steps() -> None:
    costly = {"plan.staleness_cost": 10.0}
    assert whole_time(run_of(100, costly), SPEED).steps == 110
    assert whole_time(run_of(100, costly), replace(SPEED, mean_staleness=0.52)).steps == 106
    assert whole_time(run_of(100), SPEED).steps == 100


def test_a_whole_run_by_hand_has_hours_and_dollars_by_pool() -> None:
    trace = two_steps()  # of 16 and 10 s; the second counts
    whole = measure(trace).whole_run
    assert (whole.steps, whole.seconds, whole.seconds_interval) == (2, 26, None)
    assert set(whole.pools) == {"far", "near"}
    far = whole.pools["far"]
    assert (far.gpu, far.num_gpus, far.is_owned) == ("h20", 1, False)
    assert far.gpu_hours == pytest.approx(26 / 3600)
    assert far.dollars == pytest.approx(26 / 3600 * 1.85)
    assert whole.dollars == pytest.approx(26 * PaidGpus.of(trace.run).dollars_per_second)
    assert whole.dollars == pytest.approx(sum(pool.dollars for pool in whole.pools.values()))
    assert (whole.tokens, whole.rollouts) == (400, 2)


# Owned pools and links ----------------------------------------------------------------------------


def test_all_of_an_owned_pool_is_charged_and_of_a_rented_one_what_is_used() -> None:
    run = small_run({"cluster.pools.near.owned": True, "cluster.pools.near.nodes": 3})
    assert PaidGpus.of(small_run()).by_pool == {"far": 2, "near": 4}
    assert PaidGpus.of(run).by_pool == {"far": 2, "near": 24}
    spare = {"gpu": "a100", "owned": True}
    assert PaidGpus.of(small_run({"cluster.pools.spare": spare})).by_pool == {
        "far": 2,
        "near": 4,
        "spare": 8,
    }
    rented, owned = measured(), measured({"cluster.pools.near.owned": True})
    more = 4 * load_gpu("h800").price / 3600
    assert owned.step_time == rented.step_time
    assert owned.cost_per_step - rented.cost_per_step == pytest.approx(more * rented.step_time)
    assert owned.whole_run.pools["near"].is_owned and owned.whole_run.pools["near"].num_gpus == 8
    assert owned.whole_run.dollars == pytest.approx(
        sum(pool.dollars for pool in owned.whole_run.pools.values())
    )


def test_a_push_over_a_link_is_charged_by_its_bytes_each_step() -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "price_per_gb": 0.02}
    free, priced = (
        measured({"cluster.links": [{**link, "price_per_gb": price}]}) for price in (0.0, 0.02)
    )
    dollars = SyncCosts.load(resolve(small_run())).wire_bytes / 1e9 * 0.02
    assert dollars > 0.2 and free.egress_per_step == free.whole_run.egress == 0
    assert priced.egress_per_step == pytest.approx(dollars)
    assert priced.cost_per_step == pytest.approx(free.cost_per_step + dollars)
    tokens = priced.cost_per_step / priced.cost_per_million_tokens
    assert tokens == pytest.approx(free.cost_per_step / free.cost_per_million_tokens)
    assert priced.whole_run.egress == pytest.approx(3 * dollars)
    assert priced.whole_run.dollars == pytest.approx(free.whole_run.dollars + 3 * dollars)


def test_only_pushes_of_the_steps_that_count_are_charged_to_them() -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "price_per_gb": 0.02}
    trace = simulate_steady(small_run({"simulate.max_steps": 12, "cluster.links": [link]}))
    dollars = SyncCosts.load(resolve(small_run())).wire_bytes / 1e9 * 0.02
    assert measure(trace, (5, 8)).egress_per_step == pytest.approx(dollars)


def test_nothing_is_charged_for_weights_that_stay_within_a_pool() -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "price_per_gb": 9.0}
    assert measured({"cluster.links": [link], "trainer.pool": "far"}).egress_per_step == 0


# Spot pools ---------------------------------------------------------------------------------------


def test_gpus_of_a_spot_pool_fail_beside_all_others_and_trainers_too() -> None:
    run = small_run(
        {"failures.per_gpu_day": 1.0, "cluster.pools.near.spot_failures_per_gpu_day": 2.0}
    )
    kept, spot = (run.cluster.pools[side.pool] for side in (run.rollout, run.trainer))
    assert replica_gpu_failures_per_day(run.failures, kept) == 1
    assert trainer_gpu_failures_per_day(run.failures, spot) == 2
    assert trainer_gpu_failures_per_day(replace(run.failures, trainers=True), spot) == 3
    mean = sum(time_to_failure(2.0, run.seed, TRAINER_STREAM, n) for n in range(4000)) / 4000
    assert mean == pytest.approx(SECONDS_PER_DAY / 2, rel=0.07)


def test_a_spot_trainer_is_lost_and_its_run_takes_longer() -> None:
    often = {"policies.max_restarts": 10_000, "execute.checkpoint_every": 1}
    often |= {"trainer.start_time": "2 s"}
    rate = {"cluster.pools.near.spot_failures_per_gpu_day": SECONDS_PER_DAY / 5}
    calm, spot = measured(often), measured({**often, **rate})
    assert calm.idle["failure"] == 0 < spot.idle["failure"]


# Energy -------------------------------------------------------------------------------------------


def test_energy_is_what_gpus_do_by_the_watts_of_their_kind() -> None:
    metrics = measured({"cluster.pools": H100_POOLS})
    power, whole = load_gpu("h100").power, metrics.whole_run
    assert power is not None and whole.kwh is not None and whole.unknown_power == []
    watts = {"rollout": power.generating, "trainer": power.training}
    total = 0.0
    for name, count in (("rollout", 2), ("trainer", 4)):
        side = metrics.sides[name]
        busy, idle = sum(side.busy.values()), sum(side.idle.values())
        total += count * (busy * (watts[name] or 0) + idle * (power.idle or 0))
    assert whole.kwh == pytest.approx(total * whole.seconds / 3.6e6)
    assert 105 * 6 < whole.kwh * 3.6e6 / whole.seconds < 595 * 6


def test_gpus_that_are_owned_and_unused_draw_what_idle_ones_do() -> None:
    pools: dict[str, Any] = {**H100_POOLS, "spare": {"gpu": "h100", "owned": True}}
    whole = whole_of({"cluster.pools": pools})
    assert whole.pools["spare"].kwh == pytest.approx(8 * 105 * whole.seconds / 3.6e6)


def test_a_gpu_whose_watts_nobody_measured_is_named_and_no_energy_told() -> None:
    whole = whole_of({"cluster.pools": {**H100_POOLS, "far": {"gpu": "h20"}}})
    assert whole.kwh is None and whole.unknown_power == ["h20"]
    assert whole.pools["far"].kwh is None and whole.pools["near"].kwh is not None
    rows = {name.strip(): (figure, note) for name, figure, note in facts(whole)}
    assert rows["energy"][0] == "not known" and "no measured watts of h20" in rows["energy"][1]


# Words --------------------------------------------------------------------------------------------


def test_a_figure_has_as_many_digits_as_its_interval_leaves_sure() -> None:
    assert long_dollars(892.714, (884.8, 900.6)) == "$892.7 ± 7.9"
    assert long_dollars(12_345.6, (12_000.0, 12_700.0)) == "$12,346 ± 350"
    assert long_dollars(12.3456) == "$12.3" and long_dollars(1234.5) == "$1,234"
    assert long_time(56_440.0, (55_940.0, 56_940.0)) == "15.68 h ± 0.14"
    assert long_time(864_000.0, (860_000.0, 868_000.0)) == "10.000 d ± 0.046 (240.0 h)"
    assert (long_time(90.0), long_time(0.5)) == ("1.50 min", "0.500 s")


def test_the_first_thing_said_is_the_total_and_every_command_says_the_same(tmp_path: Path) -> None:
    write_run(small_run({"simulate.max_steps": 12}), tmp_path / "run.toml")
    done = streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "run")
    figures = json.loads(streamrl("simulate", tmp_path / "run.toml", "--json").stdout)
    assert next(iter(figures)) == "whole_run"
    metrics = measured()
    whole, error = metrics.whole_run, metrics.model_error
    assert figures["whole_run"]["dollars"] == whole.dollars
    assert done.stdout.splitlines()[0].startswith("whole run")
    assert dollars_text(whole) in done.stdout.splitlines()[0]
    page = streamrl("report", tmp_path / "run", "--markdown", tmp_path / "page.md")
    assert page.stdout.startswith(f"{whole.steps} steps take {time_text(whole)} and cost")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert next(line for line in lines if line.startswith("**")).startswith(
        f"**{headline(whole, error)}. With"
    )
    found = json.loads(streamrl("report", tmp_path / "run", "--json").stdout)
    assert found["whole_run"] == figures["whole_run"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"cluster.pools.far.spot_failures_per_gpu_day": -1.0},
            "cluster.pools.far.spot_failures_per_gpu_day must be at least 0, got -1",
        ),
        (
            {
                "cluster.pools.far.owned": True,
                "cluster.pools.far.spot_failures_per_gpu_day": 1.0,
            },
            "cluster.pools.far.spot_failures_per_gpu_day=1 applies to rented GPUs",
        ),
        (
            {
                "cluster.links": [
                    {"between": ["far", "near"], "bandwidth": "1 GB/s", "price_per_gb": -1.0}
                ]
            },
            "cluster.links.0.price_per_gb must be in \\[0, 1000000\\], got -1",
        ),
        ({"plan.budget": 0.0}, "plan.budget must be above 0, got 0"),
        ({"plan.budget_per_day": -3.0}, "plan.budget_per_day must be above 0, got -3"),
        ({"plan.deadline": "0 d"}, "plan.deadline must be above 0 s, got 0 s"),
        ({"plan.deadline": 3}, "plan.deadline"),
        ({"framework.checkpoint_time": "9 y"}, "units are ns, us, ms, s, min, h, d"),
        ({"cluster.pools.far.owned": "yes"}, "cluster.pools.far.owned"),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        small_run(changes)


def test_a_deadline_may_be_given_in_days() -> None:
    assert small_run({"plan.deadline": "1.5 d"}).plan.deadline == 129_600

"""What `plan`, `simulate`, `doctor` and `report` say of one plan is one and the same."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import encode
from msgspec.structs import replace
from rich.console import Console

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.memory import ROOMY
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.report.page.details import of_plan
from streamrl.report.page.page import make_page, read_report, render_markdown
from streamrl.report.plan_report import decision_text, head_lines, plan_report
from streamrl.runfile.files import load_run, write_run
from streamrl.runfile.formatting import format_dollars, format_step_time
from streamrl.sim.planner.bottleneck import find_binding
from streamrl.sim.planner.layouts import TIGHT
from streamrl.sim.planner.plan import Plan, PlannedSide, read_plan, write_plan
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.sensitivity import PROPORTIONAL, UNUSED, is_ahead
from streamrl.sim.planner.shifts import shifts
from streamrl.sim.planner.space import Space, find_trainers
from streamrl.sim.studies.comparison import compare_runs
from streamrl.workload.replica_batch import replica_batch
from tests.command_line import streamrl
from tests.report_directories import write_planned
from tests.test_plan import SMALL, Here, few, planned

NBSP = "\N{NO-BREAK SPACE}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of three seeds."""
    return write_planned(tmp_path_factory.mktemp("agreement") / "plan", seeds=3)


def test_all_commands_have_one_step_time_and_one_cost(directory: Path) -> None:
    plan = read_plan(directory / "plan.json")
    simulated = json.loads(streamrl("simulate", directory / "plan.toml", "--json").stdout)
    chosen, *others = json.loads(streamrl("report", directory, "--json").stdout)["options"]
    for key in ("step_time", "cost_per_step", "cost_per_million_tokens"):
        assert getattr(plan.allocation, key) == simulated[key] == chosen[key]
    runners = [other for other in others if other["kind"] == "runner-up"]
    for runner, shown in zip(plan.runners_up, runners, strict=True):
        assert shown["step_time"] == runner.choice.step_time
        assert shown["cost_per_million_tokens"] == runner.choice.cost_per_million_tokens
        # the value is over the steps that both plans have, and the figures are over the runner's own
        assert runner.value == pytest.approx(runner.choice.cost_per_million_tokens, rel=0.03)


def test_reports_of_a_plan_and_of_its_simulation_have_one_range_of_cost(tmp_path: Path) -> None:
    plan, run = tmp_path / "plan", tmp_path / "run"
    found = planned(few({**SMALL, "simulate.max_steps": 30}, seeds=1))
    plan.mkdir()
    write_plan(found.plan, plan)
    write_run(found.run, plan / "plan.toml", ["a plan"], found.plan.allocation.settings)
    assert read_plan(plan / "plan.json").allocation.step_time_interval is not None
    assert streamrl("simulate", plan / "plan.toml", "-o", run).returncode == 0
    ranges = [read_report([each]).options[0].cost_range for each in (plan, run)]
    assert ranges[0] == pytest.approx(ranges[1], rel=1e-12) and ranges[0][0] < ranges[0][1]


def test_all_commands_write_them_with_the_same_digits(directory: Path) -> None:
    plan = read_plan(directory / "plan.json")
    step = format_step_time(plan.allocation.step_time, plan.allocation.step_time_interval)
    dollars = format_dollars(plan.allocation.cost_per_million_tokens)
    page = render_markdown(make_page(read_report([directory]))).replace(NBSP, " ")
    for text in ("\n".join(head_lines(plan)), page):
        assert step in text and dollars in text
    table = streamrl("simulate", directory / "plan.toml").stdout
    assert step in table and dollars in table


def test_doctor_has_nothing_to_say_against_a_plan(directory: Path) -> None:
    done = streamrl("doctor", directory / "plan.toml", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert not [each for each in found["findings"] if each["level"] != "ok"]


def test_a_part_of_a_node_that_is_rented_is_no_idle_node(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan", unit=2, rollout_gpus=[4], trainer_gpus=[4])
    run = load_run(directory / "plan.toml")
    assert any(pool.num_gpus == 8 for pool in run.cluster.pools.values())
    assert run.plan.rollout_gpus == [4] and run.plan.trainer_gpus == [4]
    bad = [each.name for each in diagnose(run) if each.level != "ok"]
    assert not [name for name in bad if name.startswith("pool-")]


# GPUs ---------------------------------------------------------------------------------------------


def test_terminal_page_and_json_count_all_gpus_of_a_plan_with_two_kinds_of_replicas(
    directory: Path, tmp_path: Path
) -> None:
    plan = read_plan(directory / "plan.json")
    degrees = {"replicas": 3, "tensor_parallel": 2}
    near = PlannedSide(pool="h20", gpu="h20", num_gpus=6, degrees=degrees)
    far = PlannedSide(pool="h800", gpu="h800", num_gpus=2, degrees=degrees, beside=near)
    own = PlannedSide(pool="h800", gpu="h800", num_gpus=4, degrees={"data_parallel": 4, "zero": 3})
    settings = {**plan.allocation.settings, "policies.system": "one-step-async"}
    chosen = replace(plan.allocation, rollout=far, trainer=own, settings=settings, gpus_by_pool={})
    assert json.loads(encode(chosen))["gpus_by_pool"] == {"h800": 6, "h20": 6}
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    write_plan(replace(plan, allocation=chosen), tmp_path)
    plan = read_plan(tmp_path / "plan.json")
    page = make_page(read_report([tmp_path]))
    duties = "2 H800 and 6 H20 to generate, and 4 H800 to train, one-step-async"
    assert decision_text(plan).startswith(f"Rent 6 H800 and 6 H20: {duties}")
    assert page.title.replace(NBSP, " ").startswith("Rent 6 H800 and 6 H20 for ")
    assert page.answer.replace(NBSP, " ").startswith(duties)
    text = render_markdown(page)
    assert "rollout-2" not in text
    assert "2 H800 (3 x TP2) and 6 H20 (3 x TP2) generate, 4 H800 (DP4 TP1 ZeRO 3) train" in text


# Room and what binds ------------------------------------------------------------------------------


def test_a_plan_leaves_its_trainer_the_room_that_doctor_asks_for() -> None:
    space = Space.open(few())
    own = resolve(space.run).trainer
    sides = [trainer_side(trainer.place(own)) for trainer in space.trainers]
    assert all(side.need <= ROOMY * side.capacity for side in sides)


def test_trainers_without_room_are_taken_where_there_are_no_others() -> None:
    only: dict[str, Any] = {
        "trainer_gpus": [8],
        "trainer_tensor_parallel": [4],
        "pipeline_parallel": [1],
        "recompute": ["none"],
        "zero": [1],
        "micro_batch": [8],
    }
    run = few(
        {
            "trainer.logits": "chunked",
            "algorithm.name": "grpo",
            "algorithm.group_size": 2,
            "cluster.pools.h800.host_memory": "1 GB",
        },
        **only,
    )
    (roomy,) = find_trainers(run, Counter())
    for tokens in range(8000, 400_000, 1000):
        trainer = replace(roomy.change(run.trainer), max_tokens_per_pass=tokens)
        side = trainer_side(resolve(replace(run, trainer=trainer)).trainer)
        if side.need > ROOMY * side.capacity:
            break
    assert side.need < side.capacity
    cut: Counter[str] = Counter()
    full = replace(run, trainer=replace(run.trainer, max_tokens_per_pass=tokens))
    assert find_trainers(full, cut) == [roomy] and cut[TIGHT] == 1
    wider = replace(full.plan, trainer_gpus=[8, 16])
    assert {each.num_gpus for each in find_trainers(replace(full, plan=wider), Counter())} == {16}


def test_what_binds_generation_is_what_limits_a_replicas_batch() -> None:
    changes = {"costs": {"generation_factor": 0.005}}
    cap = "rollout.max_running 2, which nobody tried to raise"
    for most, resource in ((2, cap), (64, "GPU memory bandwidth")):
        run = few(
            {**changes, "rollout.max_running": most},
            systems=["disaggregated"],
            max_running=[most],
            rollout_gpus=[8],
        )
        search = Search.open(run)
        chosen = search.run(Here(), lambda: None)[0]
        batch = replica_batch(resolve(search.space.candidate(chosen).apply(run)))
        assert batch is not None and batch.limit == ("max_running" if most == 2 else "share")
        binding = find_binding(search.estimates, chosen, search.speeds[chosen])
        assert binding.stage == "generation"
        assert binding.resource in (resource, "the longest rollout, token by token")
        assert most != 2 or binding.resource == resource


# What would change it -----------------------------------------------------------------------------


def test_a_price_or_a_link_that_no_plan_uses_is_left_out_with_the_reason() -> None:
    run = few(SMALL, systems=["colocated"], rollout_pools=["h800"], trainer_pools=["h800"])
    plan = planned(run).plan
    assert plan.not_varied == {
        "price of h800": PROPORTIONAL,
        "price of h20": UNUSED,
        "bandwidth of links": UNUSED,
    }
    assert {shift.what[:-5] for shift in shifts(run)} > {c.what[:-5] for c in plan.sensitivity}
    text = " ".join(printed(plan).split())
    assert f"bandwidth of links, price of h20 ({UNUSED})" in text
    found = of_plan(plan, "plan", "plan.json")
    assert found.missing == [] and PROPORTIONAL in found.left_out
    assert {swing.what for swing in found.swings} == {"lengths", "speed of training (MFU)"}


def test_a_plan_on_two_pools_uses_both_prices() -> None:
    plan = planned(few(SMALL, systems=["stream-async"], rollout_pools=["h20"])).plan
    assert all(change.is_used for change in plan.sensitivity)
    named = {change.what for change in plan.sensitivity}
    assert {f"price of {pool} {sign}20%" for pool in ("h20", "h800") for sign in "+-"} <= named


def test_a_price_changes_the_cost_by_the_share_of_its_gpus() -> None:
    found = planned(few(SMALL, systems=["one-step-async"], rollout_pools=["h20"]))
    rent = {name: pool.num_gpus * pool.price for name, pool in found.run.cluster.pools.items()}
    values = {change.what: change.value for change in found.plan.sensitivity}
    for pool, dollars in rent.items():
        share = values[f"price of {pool} +20%"] / found.plan.objective.value - 1
        assert share == pytest.approx(0.2 * dollars / sum(rent.values()))


def test_another_plan_is_named_only_where_it_is_clearly_better() -> None:
    assert is_ahead(0.97, 1.0) and not is_ahead(0.985, 1.0) and not is_ahead(1.0, 1.0)
    for run in (few(SMALL), few(objective="step-time")):
        for change in planned(run).plan.sensitivity:
            is_clear = change.gain >= ALIKE * 0.999 or bool(change.reason) or not change.still_fits
            assert not change.is_other or is_clear


# What the page says -------------------------------------------------------------------------------


def test_a_page_says_why_and_shows_each_option_with_its_staleness(directory: Path) -> None:
    plan = read_plan(directory / "plan.json")
    text = render_markdown(make_page(read_report([directory]))).replace(NBSP, " ")
    assert f"It was chosen as {plan.why}." in text
    for option in plan.options:
        label = ", ".join(option.labels)
        words = option.text.replace("h800", "H800").replace("h20", "H20")
        assert f"{label[0].upper()}{label[1:]} ({words})" in text
    assert "none of the plans that were not simulated is better by more than 1 %" in text
    assert "staleness is taken to cost no progress" in text


def test_an_open_search_and_a_cost_of_staleness_are_said(directory: Path, tmp_path: Path) -> None:
    plan = read_plan(directory / "plan.json")
    (tmp_path / "plan.toml").write_bytes((directory / "plan.toml").read_bytes())
    lagging = replace(plan.allocation, mean_staleness=0.5)
    changed = replace(
        plan,
        open_gap=0.07,
        time_limit=12.0,
        staleness_cost=4.0,
        staleness_model="a line",
        allocation=lagging,
    )
    write_plan(changed, tmp_path)
    text = render_markdown(make_page(read_report([tmp_path]))).replace(NBSP, " ")
    assert "stopped at `plan.time_limit`, 12 s" in text and "may be up to 7 % better" in text
    assert "took 4 % more steps" in text and "for the chosen plan's 0.5 updates 2.0 % more" in text
    assert "(plan.staleness_cost, from a line)" in text.replace("`", "")
    assert "with 4 % charged for each version of lag" in printed(changed)
    assert "as a line" in printed(changed)


def test_a_charge_for_staleness_is_in_no_dollars_that_simulate_has(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan", staleness_cost=5.0, systems=["stream-async"])
    plan = read_plan(directory / "plan.json")
    simulated = json.loads(streamrl("simulate", directory / "plan.toml", "--json").stdout)
    (chosen, *_) = json.loads(streamrl("report", directory, "--json").stdout)["options"]
    assert chosen["cost_per_million_tokens"] == simulated["cost_per_million_tokens"]
    lag = plan.allocation.mean_staleness
    assert lag > 0.5
    assert plan.objective.value == pytest.approx(
        simulated["cost_per_million_tokens"] * (1 + 0.05 * lag)
    )


def test_variants_of_a_plan_are_one_row_that_names_their_differences() -> None:
    top_p = {"rollout.top_p": 0.9}  # logits are sorted, so that generation is slow
    plan = planned(few(SMALL | top_p, max_running=[64, 128])).plan
    (runner, *_) = plan.runners_up
    base = replace(runner, choice=plan.allocation, behind=0.01, variant_of=None, variants=[])
    other = replace(plan.allocation.trainer, degrees={"tensor_parallel": 8})
    settings = plan.allocation.settings | {"rollout.max_running": 7}
    twin = replace(base, choice=replace(plan.allocation, settings=settings), behind=0.02)
    split = replace(base, choice=replace(plan.allocation, trainer=other), behind=0.03)
    text = printed(replace(plan, runners_up=[replace(base, variants=[twin, split])]))
    assert f"2 more to +3.0%: max_running 7; {other.num_gpus} {other.pool} (TP8)" in text


def test_the_front_has_the_chosen_plan_as_it_was_simulated() -> None:
    plan = planned(few(objective="pareto")).plan
    assert plan.allocation in plan.pareto
    of_runners = {runner.choice.text: runner.choice.step_time for runner in plan.runners_up}
    for choice in plan.pareto:
        assert of_runners.get(choice.text, choice.step_time) == choice.step_time


def printed(plan: Plan) -> str:
    """Return a plan as a terminal has it, on one long line each."""
    console = Console(width=400, file=StringIO())
    console.print(plan_report(plan, details=True))
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


def test_two_clusters_compare_alike_as_plans_and_against_each_other_however_long_the_training() -> (
    None
):
    many = {**SMALL, "simulate.max_steps": 40, "simulate.interval": 0.02}
    degrees: dict[str, Any] = {"rollout_tensor_parallel": [1], "trainer_tensor_parallel": [4]}
    degrees["trainer_gpus"] = [8, 16, 24]
    answers = []
    for steps in (6, 500):
        plans = [
            planned(few({**many, "algorithm.steps": steps}, rollout_pools=[pool], **degrees))
            for pool in ("h20", "h800")
        ]
        near, far = (each.plan.objective for each in plans)
        against = compare_runs(plans[0].run, plans[1].run)
        answers.append((near.value, far.value, against.cost_ratio, against.outcome))
        assert against.cost_ratio.interval is not None
        least, most = against.cost_ratio.interval
        assert least - (most - least) < near.value / far.value < most + (most - least)
    assert answers[0] == answers[1]

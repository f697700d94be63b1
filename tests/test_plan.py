"""The planner: the choice is the best of all plans, its run file simulates to the figure it was chosen for."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.record.metrics import measure
from streamrl.report.page.page import make_page, read_report
from streamrl.report.plan_report import head_lines
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import decode_run, encode_run, load_run, write_run
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.runfile.roles_config import SecondaryTrainerConfig
from streamrl.runfile.units import Bandwidth
from streamrl.sim.fidelity.paper import Case, make_case
from streamrl.sim.planner.objective import front, value_of
from streamrl.sim.planner.options import MOST_OPTIONS
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.sim.planner.plan_settings import candidate_of, settings_of
from streamrl.sim.planner.planner import Planned, make_plan
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import ALIKE, Search
from streamrl.sim.planner.sensitivity import judge
from streamrl.sim.planner.shifts import SHARE, shifts
from streamrl.sim.planner.trial import Trial, metrics_of, short_speed_of, shortened, whole
from streamrl.sim.steady_state import simulate_steady
from tests.command_line import streamrl
from tests.test_search_space import offer

FEW: dict[str, Any] = {
    "rollout.max_tokens": 8000,
    "rollout.max_running": 64,
    "workload.lengths.scale": 0.4,
    "algorithm.steps": 4,
    "simulate.max_steps": 4,
    "algorithm.prompts_per_step": 64,
    "algorithm.group_size": 1,
    "algorithm.name": "ppo",
    "policies": {"system": "stream-async", "waits_for_whole_batches": True},
}
FEW_PLANS: dict[str, Any] = {
    "mixes_replicas": False,
    "micro_batch": [2],
    "sync_modes": ["full"],
    "trainer_tensor_parallel": [2, 4],
    "rollout_tensor_parallel": [1, 4],
    "trainer_pools": ["h800"],
    "seeds": 1,
    "unit": 8,
}
"""The unit is the GPUs of a node, so plans on parts of nodes are not searched too; tests of those set it to None."""
SMALL = {"algorithm.prompts_per_step": 32}


def few(changes: dict[str, Any] | None = None, **plan: Any) -> Run:
    """Return an offer with a few dozen plans, of 64 rollouts a step."""
    return offer({**FEW, **(changes or {})}, **{**FEW_PLANS, **plan})


def planned(run: Run) -> Planned:
    """Plan a run, once however many ask."""
    return _planned(encode_run(run))


@cache
def _planned(run: bytes) -> Planned:
    return make_plan(decode_run(run))


def searched(changes: dict[str, Any] | None = None, **plan: Any) -> Search:
    """Return a finished search of a few plans; it is run once, and each caller has a copy."""
    return deepcopy(_searched(encode_run(few({**SMALL, **(changes or {})}, **plan))))


@cache
def _searched(run: bytes) -> Search:
    search = Search.open(decode_run(run))
    search.run(Here(), lambda: None)
    return search


class Here(Executor):
    """Works at once, in this process."""

    def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Do it now."""
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


def test_a_run_of_several_trainers_is_refused_in_one_line() -> None:
    run = few()
    second = SecondaryTrainerConfig(name="second", pool=run.trainer.pool, tensor_parallel=4)
    with pytest.raises(RunError, match=r"^plan chooses for one trainer, the run file has 2$") as it:
        make_plan(replace(run, followers=(second,)))
    assert it.value.key == "trainer" and it.value.value == 2


# The choice ---------------------------------------------------------------------------------------


def test_no_plan_is_better_than_the_chosen_one_by_more_than_two_percent() -> None:
    open_keys: dict[str, Any] = {"rollout_tensor_parallel": [1], "trainer_tensor_parallel": [4]}
    search = Search.open(few(SMALL, **open_keys))
    speeds = [
        short_speed_of(Trial(search.base, search.space.candidate(index)))
        for index in range(len(search.space))
    ]
    assert len(speeds) > 40
    objectives: list[ObjectiveName] = ["cost-per-million-tokens", "cost-per-step", "step-time"]
    for objective in objectives:
        search = Search.open(few(SMALL, objective=objective, **open_keys))
        values = [value_of(search.space.run.plan, speed) for speed in speeds]
        chosen = search.run(Here(), lambda: None)[0]
        assert search.value(chosen) == values[chosen] <= 1.02 * min(values)
        assert search.has_converged and len(search.speeds) < len(values) / 2


def test_finalists_are_judged_by_the_median_of_their_seeds() -> None:
    run = few(seeds=3, finalists=2)
    search = Search.open(run)
    ranking = search.run(Here(), lambda: None)
    race = Race(search)
    chosen = race.run(Here(), lambda: None)
    assert ranking[0] in race.finals and len(race.finals) <= 3
    assert {len(speeds) for speeds in race.finals.values()} == {3}
    costs = sorted(speed.cost_per_million_tokens for speed in race.finals[chosen])
    assert race.value(chosen) == costs[1] <= (1 + ALIKE) * min(map(race.value, race.finals))
    assert race.settle(Here(), chosen, lambda: None) == chosen
    third = whole(run, run.seed + 2)
    assert metrics_of(Trial(third, search.space.candidate(chosen))) == race.steady[chosen][2]
    assert msgspec.json.decode(third)["seed"] == run.seed + 2


def test_a_budget_an_hour_bounds_the_rent_and_one_a_step_its_cost() -> None:
    free = planned(few(objective="step-time")).plan
    hour = 0.6 * free.allocation.dollars_per_hour
    found = planned(few(objective="step-time", budget_per_hour=hour)).plan
    assert found.allocation.dollars_per_hour <= hour
    assert found.objective.value > (1 - ALIKE) * free.objective.value
    step = 0.8 * free.allocation.cost_per_step
    found = planned(few(objective="step-time", budget_per_step=step)).plan
    assert found.allocation.cost_per_step <= 1.02 * step
    assert all(runner.choice.cost_per_step <= 1.05 * step for runner in found.runners_up)
    assert found.objective.value >= (1 - ALIKE) * free.objective.value


def test_a_budget_that_nobody_meets_says_what_the_cheapest_plan_costs() -> None:
    cheapest = planned(few(objective="cost-per-step")).plan.allocation.cost_per_step
    with pytest.raises(ValueError, match=r"the cheapest plan .* costs 0\.\d+ dollars a step") as it:
        planned(few(objective="step-time", budget_per_step=0.5 * cheapest))
    assert float(str(it.value).split()[-4]) == pytest.approx(cheapest, rel=0.05)


def test_none_beats_a_plan_of_the_pareto_set_in_both_time_and_cost() -> None:
    sides: dict[str, Any] = {"rollout_gpus": [8, 16, 24], "trainer_gpus": [8, 16]}
    plan = planned(few(objective="pareto", **sides)).plan
    points = [(choice.step_time, choice.cost_per_step) for choice in plan.pareto]
    assert len(points) > 2 and points == sorted(points)
    assert [cost for _, cost in points] == sorted((cost for _, cost in points), reverse=True)
    fastest = planned(few(objective="step-time", **sides)).plan.objective.value
    cheapest = planned(few(objective="cost-per-step", **sides)).plan.objective.value
    assert points[0][0] <= 1.02 * fastest and points[-1][1] <= 1.02 * cheapest
    chosen = plan.allocation
    assert chosen.step_time * chosen.cost_per_step == pytest.approx(
        min(a * b for a, b in points), rel=2 * ALIKE
    )


def test_the_front_holds_what_nothing_is_below() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.5), (3.0, 3.0), (1.0, 4.0)]
    assert front(points) == [1, 2, 0]


# What it says -------------------------------------------------------------------------------------


def test_a_plan_says_what_was_cut_what_binds_and_how_far_the_bound_is() -> None:
    plan = planned(few(seeds=3)).plan
    assert plan.candidates == len(Search.open(few()).space)
    assert plan.infeasible and all(count > 0 for count in plan.infeasible.values())
    assert 0 < plan.lower_bound <= plan.own_bound <= plan.objective.value
    assert plan.gap == pytest.approx(plan.objective.value / plan.lower_bound - 1)
    assert 0 < plan.ruled_out < plan.candidates
    assert plan.allocation.least <= plan.objective.value <= plan.allocation.most
    assert sum(plan.tiers.values()) == pytest.approx(1.0)
    assert all(runner.behind > -0.02 for runner in plan.runners_up)


def test_a_plan_says_what_was_not_looked_at() -> None:
    plan = planned(few(seeds=3, unit=None)).plan
    told = "\n".join(head_lines(plan))
    assert "not fully-async" in told and plan.systems
    named = replace(plan, systems=["fully-async"])
    assert "fully-async, whose" not in "\n".join(head_lines(named))
    assert plan.whole_nodes == ["h20", "h800"]
    assert "plans rent whole nodes of h20 and h800" in told
    told = "\n".join(head_lines(planned(few()).plan))
    assert "whole nodes" not in told, "the run file says how they are divided"


def test_what_binds_is_the_stage_that_is_made_slow() -> None:
    for section, stage in (("training_factor", "training"), ("generation_factor", "generation")):
        degrees = {"rollout_tensor_parallel": [1], "trainer_tensor_parallel": [4]}
        slow = {"costs": {section: 0.005}}
        run = few(slow, systems=["stream-async"], objective="step-time", **degrees)
        found = planned(run).plan.binding
        assert found.stage == stage
        error = (
            0.25 if stage == "training" else 0.1
        )  # it takes 64 rollouts to be alike for all ranks
        assert found.seconds[stage] == pytest.approx(found.seconds["step"], rel=error)
    slow = {"cluster.links": [{"between": ["h20", "h800"], "bandwidth": "1 Gbps"}]}
    run = few(slow, systems=["stream-sync"], rollout_pools=["h20"])
    found = planned(run).plan.binding
    assert (found.stage, found.resource) == ("sync", "the link between both pools")


def test_a_choice_changes_with_the_price_that_it_hangs_on_and_stays_where_it_does_not() -> None:
    run = few(systems=["stream-async"], rollout_gpus=[8], trainer_gpus=[8])
    search = Search.open(run)
    chosen = search.run(Here(), lambda: None)[0]
    judged = judge(search, chosen, search.spend_of(search.speeds[chosen]), Here())
    verdicts = {verdict.what: verdict for verdict in judged.verdicts}
    assert set(verdicts) == {s.what for s in shifts(run) if s.thing not in judged.left_out}
    pool = search.space.candidate(chosen).replicas.pool
    dearer, cheaper = (verdicts[f"price of {pool} {sign}{SHARE:.0%}"] for sign in "+-")
    assert cheaper.value < 1 < dearer.value
    for verdict in verdicts.values():
        assert (verdict.other is None) == (verdict.other_value == verdict.value)
    shifted = {shift.what: shift.run for shift in shifts(run)}
    longer = shifted["lengths +20%"]
    assert longer.rollout.max_tokens == run.rollout.max_tokens
    assert longer.workload.lengths is not None and run.workload.lengths is not None
    assert longer.workload.lengths.scale == pytest.approx(1.2 * run.workload.lengths.scale)
    assert shifted["bandwidth of links -20%"].cluster.links[0].bandwidth == pytest.approx(8e9)


def test_a_slower_trainer_costs_what_a_simulation_of_it_says() -> None:
    run = few(systems=["disaggregated"], rollout_gpus=[8], trainer_gpus=[8])
    search = Search.open(run)
    chosen = search.run(Here(), lambda: None)[0]
    verdicts = {
        verdict.what: verdict
        for verdict in judge(
            search, chosen, search.spend_of(search.speeds[chosen]), Here()
        ).verdicts
    }
    plan = search.space.candidate(chosen)
    shifted = {shift.what: shift.run for shift in shifts(run)}
    for sign, factor in (("-", 0.8), ("+", 1.2)):
        name = f"speed of training (MFU) {sign}20%"
        assert shifted[name].costs.training_factor == pytest.approx(factor)
        trial = Trial(shortened(shifted[name], run.seed), plan)
        simulated = value_of(run.plan, short_speed_of(trial)) / search.value(chosen)
        assert verdicts[name].value == pytest.approx(simulated, rel=0.03)
    assert verdicts["speed of training (MFU) -20%"].value > 1


def test_a_plan_that_longer_outputs_no_longer_fit_says_so() -> None:
    run = offer(
        {
            **FEW,
            "rollout.max_tokens": 110_000,
            "workload.lengths.scale": 1.0,
            "trainer.logits": "fused",
        },
        **{**FEW_PLANS, "rollout_tensor_parallel": [1, 8], "zero": [1]},
        rollout_pools=["h20"],
    )
    search = Search.open(run, runnable=False)
    small = next(
        index
        for index in range(len(search.space))
        if search.space.candidate(index).mode.system == "stream-async"
    )
    search.simulate(Here(), [small], lambda: None)
    longer = next(
        v
        for v in judge(search, small, search.spend_of(search.speeds[small]), Here()).verdicts
        if v.what == "lengths +20%"
    )
    shifted = next(s.run for s in shifts(run) if s.what == "lengths +20%")
    fits = Search.open(shifted, runnable=False).space.find(search.space.candidate(small))
    assert longer.still_fits == (fits is not None)


# The run file -------------------------------------------------------------------------------------


def test_the_planned_run_file_loads_and_simulates_to_the_figure_it_was_chosen_for(
    tmp_path: Path,
) -> None:
    run, plan = planned(few({"cluster.links": OFF_GRID}))
    path = tmp_path / "plans" / "plan.toml"
    path.parent.mkdir()
    write_run(run, path, ["two", "notes"], plan.allocation.settings)
    assert path.read_text().startswith("# two\n# notes\n")
    loaded = load_run(path)
    assert Path(loaded.execute.output) == path.parent / "runs" / "run"
    assert replace(loaded, execute=run.execute) == run
    metrics = measure(simulate_steady(loaded))
    assert metrics.cost_per_million_tokens == plan.objective.value
    assert metrics.step_time == plan.allocation.step_time
    assert metrics.step_time_interval == plan.allocation.step_time_interval
    assert metrics.median_step_time == plan.allocation.median_step_time
    stated = path.read_text()
    assert all(key.split(".")[1] in stated for key in plan.allocation.settings)


OFF_GRID = [{"between": ["h20", "h800"], "bandwidth": "77.7 Gbps", "latency": "3.3 ms"}]


def test_quantities_and_paths_survive_being_written(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("output_tokens\n10\n20\n")
    run = few({"cluster.links": OFF_GRID, "workload.lengths.kind": "empirical"})
    assert run.workload.lengths is not None
    run = replace(
        run,
        workload=replace(run.workload, lengths=replace(run.workload.lengths, source=str(lengths))),
        sync=replace(run.sync, bucket_size=type(run.sync.bucket_size)(123456789.25)),
    )
    write_run(run, tmp_path / "deep" / "run.toml")
    assert 'source = "../lengths.csv"' in (tmp_path / "deep" / "run.toml").read_text()
    kept = replace(run, execute=replace(run.execute, output=str(tmp_path / "kept")))
    write_run(kept, tmp_path / "deep" / "kept.toml")
    assert load_run(tmp_path / "deep" / "kept.toml").execute == kept.execute
    loaded = load_run(tmp_path / "deep" / "run.toml")
    assert loaded.workload == run.workload and loaded.sync == run.sync
    assert loaded.cluster == run.cluster and loaded.plan == run.plan
    assert isinstance(loaded.cluster.links[0].bandwidth, Bandwidth)


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    plan = planned(few(seeds=3)).plan
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match=r"nothing\.json: not a plan"):
        read_plan(tmp_path / "nothing.json")


def test_settings_name_what_set_would_be_given() -> None:
    run = few()
    search = Search.open(run)
    candidate = search.space.candidate(7)
    settings = settings_of(candidate)
    applied = candidate.apply(run)
    for key, value in settings.items():
        section, name = key.split(".")
        assert getattr(getattr(applied, section), name) == value


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offer") / "offer.toml"
    write_run(few(), path)
    return path


def test_an_option_is_taken_from_a_plan_without_planning_again(
    written: Path, tmp_path: Path
) -> None:
    few_plans = ["--set", "plan.systems=['colocated','stream-sync']", "-o", tmp_path]
    streamrl("plan", written, *few_plans)
    plan = read_plan(tmp_path / "plan.json")
    first = load_run(tmp_path / "plan.toml")
    assert plan.taken == 1 and len(plan.options) > 1
    taken = streamrl("plan", written, *few_plans, "--take", 2)
    assert (
        taken.returncode == 0 and "option 2 (" in taken.stdout and "simulating" not in taken.stderr
    )
    assert read_plan(tmp_path / "plan.json").taken == 2
    run, option = load_run(tmp_path / "plan.toml"), plan.options[1]
    assert run == candidate_of(option.choice.settings).apply(first_offer(written, run))
    simulated = json.loads(streamrl("simulate", tmp_path / "plan.toml", "--json").stdout)
    assert simulated["cost_per_step"] == option.choice.cost_per_step
    first_step, *_ = make_page(read_report([tmp_path])).steps
    assert first_step.text.startswith(f"plan.toml holds option 2, {', '.join(option.labels)}: ")
    streamrl("plan", written, *few_plans, "--take", 1)
    assert load_run(tmp_path / "plan.toml") == first
    other = streamrl("plan", written, "-o", tmp_path, "--take", 2)
    assert other.returncode == 2 and "is not a plan of this run file" in other.stderr
    none = streamrl("plan", written, "-o", tmp_path / "new", "--take", 0)
    assert none.returncode == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [MOST_OPTIONS, MOST_OPTIONS + 1])
def test_an_option_that_a_plan_does_not_have_replaces_no_file(
    number: int, written: Path, tmp_path: Path
) -> None:
    few_plans = ["--set", "plan.systems=['colocated']", "-o", tmp_path]
    new = streamrl("plan", written, *few_plans, "--take", number)
    assert new.returncode == 2 and [*tmp_path.iterdir()] == []
    earlier = {tmp_path / name: f"earlier {name}" for name in ("plan.toml", "plan.json")}
    for path, text in earlier.items():
        path.write_text(text)
    done = streamrl("plan", written, *few_plans, "--force", "--take", number)
    assert done.returncode == 2 and "--take" in done.stderr and done.stderr.count("\n") == 1
    assert {path: path.read_text() for path in earlier} == earlier
    assert ("whole run" in done.stdout) == (number <= MOST_OPTIONS)  # else nothing is planned


def first_offer(path: Path, run: Run) -> Run:
    """Return the offer in a file, with the output directory and restarts of a planned run."""
    return replace(load_run(path), execute=run.execute, policies=run.policies)


def test_plan_prints_what_scripts_rely_on_and_never_replaces_a_plan_unasked(
    written: Path, tmp_path: Path
) -> None:
    done = streamrl("plan", written, "--json", "-o", tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    for key in ("allocation", "objective", "candidates", "seconds", "binding", "options"):
        assert found[key]
    assert found == json.loads((tmp_path / "plan.json").read_text())
    again = streamrl("plan", written, "-o", tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr
    simulated = streamrl("simulate", tmp_path / "plan.toml", "--json")
    figures = json.loads(simulated.stdout)
    assert figures["cost_per_million_tokens"] == found["objective"]["value"]
    forced = streamrl("plan", written, "-o", tmp_path, "--force", "--set", "plan.finalists=1")
    assert forced.returncode == 0 and forced.stdout.startswith("Rent ")


def test_a_plan_of_a_framework_says_what_it_left_out_and_is_exported_beside_it(
    written: Path, tmp_path: Path
) -> None:
    setting = ("--set", "framework.name=verl")
    done = streamrl("plan", written, *setting, "--export", "verl", "-o", tmp_path)
    assert done.returncode == 0 and f"written to {tmp_path / 'verl.sh'}" in done.stdout
    planned, run = read_plan(tmp_path / "plan.json"), load_run(tmp_path / "plan.toml")
    assert planned.framework is not None and planned.framework.name == "verl"
    assert any("none of megatron" in each for each in planned.framework.left_out)
    assert any("old_log_probs = trainer" in each for each in planned.framework.facts)
    assert planned.allocation.settings["policies.system"] in ("colocated", "fully-async")
    assert run.framework.optimizer_steps == 4 and run.algorithm.old_log_probs == "trainer"
    assert (tmp_path / "verl.sh").read_text() == launch_script(find_arguments(run, "verl"))
    again = streamrl("plan", written, *setting, "--export", "verl", "-o", tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("plan.budget_per_hour=1", "the cheapest plan that fits costs"),
        ("plan.trainer_gpus=[1000]", "no trainer can train in pools h800"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_status_two(
    written: Path, tmp_path: Path, setting: str, part: str
) -> None:
    done = streamrl("plan", written, "-o", tmp_path, "--set", setting)
    assert done.returncode == 2 and done.stdout == ""
    assert part in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "plan.toml").exists()


# The paper ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "split"), [("32B", (40, 24)), ("72B", (80, 48))])
def test_the_papers_pools_are_split_as_in_the_paper(size: str, split: tuple[int, int]) -> None:
    run = make_case(Case(size, "20K", "async"))
    options: dict[str, Any] = {"objective": "step-time", "systems": ["stream-async"], "seeds": 1}
    options["mixes_replicas"] = False
    few_steps = replace(run.simulate, max_steps=4)
    search = Search.open(replace(run, plan=replace(run.plan, **options), simulate=few_steps))
    best = search.run(Here(), lambda: None)[0]
    chosen = search.space.candidate(best)
    sides = (chosen.replicas.num_gpus, chosen.trainer.num_gpus)
    assert max(abs(ours - papers) for ours, papers in zip(sides, split, strict=True)) <= 8


def test_7b_is_cheaper_on_h20_and_h800_than_on_h800_alone() -> None:
    link = {"between": ["h20", "h800"], "bandwidth": "80 Gbps", "latency": "10 ms"}
    far = {
        "cluster.pools.h20": {"gpu": "h20", "nodes": 4, "transport": "tcp"},
        "cluster.links": [link],
    }
    costs: list[float] = []
    for changes, pool, generate in ((far, "h20", 32), ({}, "h800", 16)):
        run = make_case(Case("7B", "20K", "async"), changes=changes)
        options: dict[str, Any] = {
            "rollout_pools": [pool],
            "trainer_pools": ["h800"],
            "rollout_gpus": [generate],
            "trainer_gpus": [16],
            "rollout_tensor_parallel": [1],
            "systems": ["stream-async"],
        }
        plan = replace(run.plan, seeds=1, **options)
        search = Search.open(replace(run, plan=plan, simulate=replace(run.simulate, max_steps=4)))
        costs.append(search.value(search.run(Here(), lambda: None)[0]))
    assert costs[1] / costs[0] > 1.1

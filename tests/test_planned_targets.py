"""Plans for a target: everything that is searched is something that the target runs, by its own checks."""

from __future__ import annotations

import json
import random
from collections import Counter
from operator import ge
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.executor import execute
from streamrl.executor.launchers import placement
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, make_run, write_run
from streamrl.runfile.plan_config import TargetName
from streamrl.sim.planner.modes import find_modes, keep_to_framework
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Space, find_trainers
from streamrl.sim.planner.target_rules import OneTarget
from streamrl.targets.execute_limits import check_back_ends
from streamrl.targets.verdicts import TARGETS, check_target, verdict_of
from tests.command_line import streamrl
from tests.patients import local_table
from tests.runs import small_run
from tests.target_offers import OFFERS, offer_for

SMALL = "1.5b, single GPUs"


def planned_space(run: Run) -> Space:
    """Return the plans that a run file leaves open, of trainers with micro-batches of one size."""
    return Space.open(keep_to_framework(run).run)


def sample(space: Space, num: int) -> list[Run]:
    """Return the run files of a few plans."""
    places = random.Random(0).sample(range(len(space)), min(num, len(space)))
    return [space.candidate(place).apply(space.run) for place in places]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_every_plan_that_is_searched_for_it(target: TargetName) -> None:
    space = planned_space(offer_for(SMALL, target, micro_batch=[2]))
    for run in sample(space, 40):
        check_target(run, target)


@pytest.mark.parametrize("target", ["execute", "slime"])
def test_a_target_runs_every_plan_of_a_mixture(target: TargetName) -> None:
    offer = offer_for("16b mixture, 27 layers", target, micro_batch=[2], recompute=["full"])
    for run in sample(planned_space(offer), 40):
        check_target(run, target)


@pytest.mark.parametrize("offer", [SMALL, "7b, two pools"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_says_of_a_trainer_depends_on_no_trainer_that_was_asked_before(
    target: TargetName, offer: str
) -> None:
    run = keep_to_framework(offer_for(offer, None)).run
    modes, trainers = find_modes(run), find_trainers(run, Counter())
    known = OneTarget(run, target)
    known.judge_modes(modes)
    for trainer in random.Random(0).sample(trainers, 60):
        alone = OneTarget(run, target)
        alone.judge_modes(modes)
        for shares in (False, True):
            assert known.of_trainer(trainer, shares) == alone.of_trainer(trainer, shares), trainer


@pytest.mark.parametrize("offer", [SMALL, "7b, two pools", "16b mixture, 27 layers"])
def test_a_search_without_a_target_has_only_plans_that_some_target_runs(offer: str) -> None:
    space = planned_space(offer_for(offer, None, micro_batch=[2], recompute=["full"]))
    able = [able_to_run(run) for run in sample(space, 60)]
    assert all(able)
    assert len(set.union(*able)) > 1 and not set.intersection(*able)


def able_to_run(run: Run) -> set[str]:
    """Return the names of the targets that can run a plan."""
    return {name for name in TARGETS if verdict_of(run, name).can_run}


@pytest.mark.parametrize("offer", [SMALL, "7b, two pools"])
def test_a_search_leaves_out_only_what_no_target_runs(offer: str) -> None:
    run = keep_to_framework(offer_for(offer, None, micro_batch=[2], zero=[0, 1, 2, 3])).run
    every, space = Space.open(run, runnable=False), Space.open(run)
    places = random.Random(1).sample(range(len(every)), 150)
    kept = {place: space.index_of(every.candidate(place)) is not None for place in places}
    able = {place: bool(able_to_run(every.candidate(place).apply(run))) for place in places}
    assert kept == able
    assert 0 < sum(kept.values()) < len(kept)


def test_trainers_of_every_ability_stay_among_the_fast_ones() -> None:
    run = keep_to_framework(offer_for("7b, one node", None, trainer_gpus=[4])).run
    whole, space = Space.open(run), Search.open(run).space
    assert whole.rules is not None and len(space.trainers) < len(whole.trainers)
    kept = {whole.rules.ability(each) for each in space.trainers}
    for trainer in whole.trainers:
        able = whole.rules.ability(trainer)
        assert any(all(map(ge, other, able)) for other in kept)


def test_plans_of_a_named_framework_are_those_that_it_runs() -> None:
    table = OFFERS[SMALL] | {"framework": {"name": "verl"}}
    space = planned_space(make_run(table))
    assert space.rules is not None and space.rules.targets == ("verl",)
    for run in sample(space, 40):
        check_target(run, "verl")


def test_all_plans_are_searched_if_a_setting_keeps_every_target_from_all_of_them() -> None:
    episodes = {"max_turns": 2, "max_context": 40_000, "turns": "2", "observation_tokens": "9"}
    episodes |= {"action_time": "1 s"}
    run = small_run({"environment": episodes, "rollout.chunked_prefill": False})
    space = planned_space(run)
    assert space.rules is None
    assert not any(able_to_run(each) for each in sample(space, 40))
    with pytest.raises(RunError):
        Space.open(run, runnable=True)


def test_a_budget_that_only_plans_keep_that_nothing_runs_is_an_error() -> None:
    run = offer_for(SMALL, None, micro_batch=[2])
    with pytest.raises(ValueError, match=r"^plan\.budget_per_hour 0\.01: the cheapest plan"):
        planned_space(replace(run, plan=replace(run.plan, budget_per_hour=0.01)))


def test_what_a_target_does_not_run_is_counted_by_its_key() -> None:
    space = planned_space(offer_for(SMALL, "execute", micro_batch=[2]))
    assert space.cut["not run by execute: trainer.zero"] > 0
    space = planned_space(offer_for(SMALL, "slime", micro_batch=[2]))
    assert space.cut["not run by slime: rollout.replicas"] > 0


def test_trainers_of_execute_have_back_ends_that_shard_as_planned() -> None:
    space = planned_space(offer_for(SMALL, "execute", micro_batch=[2]))
    found = {(run.trainer.zero, run.trainer.backend) for run in sample(space, len(space))}
    assert {(0, "torch"), (2, "deepspeed"), (3, "fsdp2")} <= found
    assert {backend for zero, backend in found if zero == 2} == {"deepspeed"}
    assert {backend for zero, backend in found if zero == 3} == {"fsdp2"}


@pytest.mark.parametrize("target", ["openrlhf", "trl"])
def test_deepspeed_offloads_the_optimizer_with_zero_only(target: TargetName) -> None:
    space = planned_space(offer_for("7b, one node", target, micro_batch=[2], trainer_gpus=[2, 4]))
    trainers = {(each.zero, each.offload) for each in space.trainers}
    assert (3, True) in trainers and (0, True) not in trainers
    (run, *_) = (run for run in sample(space, len(space)) if run.trainer.offload)
    assert verdict_of(run, target).can_run
    without = replace(run, trainer=replace(run.trainer, zero=0))
    assert verdict_of(without, target).broken == "trainer.zero=0"


def test_a_target_plans_with_the_costs_of_its_framework() -> None:
    run = offer_for(SMALL, "verl")
    assert run.framework.name == "verl" and run.framework.optimizer_steps == 4
    assert offer_for(SMALL, "execute").framework.name == "streamrl"
    assert offer_for(SMALL, None).framework.name is None


def test_execute_is_searched_in_the_usual_systems_and_verl_in_its_own() -> None:
    systems = {
        target: {
            mode.system for mode in find_modes(keep_to_framework(offer_for(SMALL, target)).run)
        }
        for target in ("execute", "verl")
    }
    assert "fully-async" not in systems["execute"] and "stream-async" in systems["execute"]
    assert systems["verl"] == {"colocated", "fully-async"}


def test_costs_of_one_framework_say_nothing_of_another() -> None:
    with pytest.raises(RunError, match=r"framework\.name is 'slime', and plan\.target 'verl'"):
        small_run({"framework.name": "slime", "plan.target": "verl"})


def test_a_run_file_that_execute_refuses_in_every_mode_names_the_key() -> None:
    run = offer_for(SMALL, "execute")
    table = {"rollout.admission": "reserve", "plan.target": "execute"}
    with pytest.raises(
        RunError, match=r"plan\.target 'execute' can run no plan .*rollout\.admission"
    ):
        planned_space(small_run(table))
    assert run.rollout.admission == "on-demand"


def test_a_target_that_no_layout_fits_says_what_was_left_out() -> None:
    run = offer_for("7b, two pools", "trl", zero=[1], trainer_gpus=[1])
    with pytest.raises(ValueError, match=r"without plan\.target = 'trl', other plans may fit"):
        planned_space(run)


def test_a_plan_for_execute_is_written_as_execute_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    own = offer_for(SMALL, None, time_limit="3 s", trainer_gpus=[2], rollout_gpus=[2])
    write_run(own, path)
    done = streamrl("plan", path, "--for", "execute", "-o", tmp_path / "plan")
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "plan" / "plan.toml")
    check_back_ends(run)
    assert run.rollout.backend == "vllm" and run.plan.target is None
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    for option in found["options"]:
        by_name = {each["name"]: each for each in option["carried_by"]}
        assert by_name["execute"]["can_run"] and by_name["execute"]["settings"] == {}
        assert option["choice"]["settings"]["rollout.backend"] == "vllm"
    assert found["carried_by"] == found["options"][0]["carried_by"]
    command = f"streamrl plan {path} --for execute -o {tmp_path / 'plan'}`:"
    assert command in (tmp_path / "plan" / "plan.toml").read_text()
    *_, command = (line for line in done.stdout.splitlines() if line.startswith("next:"))
    assert command.startswith(
        f"next: streamrl execute {tmp_path / 'plan' / 'plan.toml'} --set model"
    )


@pytest.mark.parametrize(("offer", "launcher"), [(SMALL, "local"), ("7b, two pools", "ray")])
def test_only_gpus_and_packages_are_missing_to_execute_a_plan_with_weights_and_prompts(
    offer: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "check_installed", lambda modules, extra: None)
    monkeypatch.setattr(placement, "find_gpus", list)
    table = local_table(tmp_path, {})
    prompts, model = table["workload"]["prompts"], table["model"]["path"]
    inputs = [f"model.path={model}", f"workload.prompts={prompts}", "verifier.scorer=exact"]
    inputs += ["rollout.max_tokens=1024"]  # the small model has few positions
    plans = sample(planned_space(offer_for(offer, "execute", micro_batch=[2])), 8)
    assert launcher in {run.execute.launcher for run in plans}
    for run in plans:
        write_run(run, tmp_path / "plan.toml")
        planned = load_run(tmp_path / "plan.toml", inputs)
        if run.execute.launcher == "ray":  # whose cluster is asked for GPUs later
            execute.check_executable(planned)
            continue
        with pytest.raises(ValueError, match=r"needs \d GPUs of this machine"):
            execute.check_executable(planned)


def test_the_layout_of_a_run_file_that_a_target_cannot_run_is_no_option() -> None:
    run = offer_for(SMALL, "execute", micro_batch=[2])
    split = {"pipeline_parallel": 2, "data_parallel": 1, "zero": 1}
    space = planned_space(run)
    candidate = space.candidate(0)
    assert space.refusal_of(candidate) == ""
    other = candidate._replace(trainer=candidate.trainer._replace(**split))
    assert space.refusal_of(other).startswith("trainer.pipeline_parallel must be 1 for backend")


def test_an_unknown_target_is_one_line_and_status_two(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    write_run(offer_for(SMALL, None), path)
    done = streamrl("plan", path, "--for", "areal", "-o", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        "--for must be one of execute, verl, nemo-rl, slime, openrlhf, trl, got 'areal'"
        in done.stderr
    )

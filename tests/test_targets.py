"""What can run a plan: `streamrl execute` and other frameworks, by the rules that these check themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.report.next_steps import (
    execute_command,
    next_lines,
    option_lines,
    placeholders_text,
    runners_text,
    verdict_lines,
)
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run
from streamrl.runfile.plan_config import TargetName
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.sim.planner.plan import PlannedSide, plan_text
from streamrl.targets.back_ends import for_target
from streamrl.targets.execute_limits import check_back_ends
from streamrl.targets.framework_rules import check_framework
from streamrl.targets.verdicts import TARGETS, Verdict, verdict_of
from tests.command_line import streamrl
from tests.runs import small_run

EXAMPLES = Path(__file__).parent.parent / "examples"

ALONE = {"trainer.tensor_parallel": 1, "rollout.tensor_parallel": 1}
SHARDED = {**ALONE, "trainer.data_parallel": 4, "trainer.zero": 3}
COLOCATED: dict[str, Any] = {
    "policies.system": "colocated",
    "rollout.pool": "near",
    "rollout.replicas": 4,
    "trainer.data_parallel": 4,
    "trainer.tensor_parallel": 1,
    "trainer.zero": 0,
}


def verdicts_of(changes: dict[str, Any]) -> list[Verdict]:
    """Return what can run a small run."""
    run = small_run(changes)
    return [verdict_of(run, name) for name in TARGETS]


def plan_of(verdicts: list[Verdict], framework: FrameworkName | None = None) -> Any:
    """Return what the last lines of a plan need."""
    named = None if framework is None else SimpleNamespace(name=framework)
    return SimpleNamespace(carried_by=verdicts, framework=named, taken=1)


def broken(changes: dict[str, Any], name: TargetName) -> str:
    """Return the first setting that keeps a target from a small run; "" if it can run it."""
    found = verdict_of(small_run(changes), name)
    return "" if found.can_run else found.broken


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (SHARDED, ""),
        ({**SHARDED, "trainer.zero": 1}, "trainer.zero=1"),
        ({**SHARDED, "trainer.zero": 0}, ""),
        ({"trainer.tensor_parallel": 4}, ""),
        ({"trainer.pipeline_parallel": 2}, "trainer.pipeline_parallel=2"),
        ({**ALONE, "rollout.pipeline_parallel": 2}, "rollout.pipeline_parallel=2"),
        ({**ALONE, "framework.name": "slime"}, "framework.name=slime"),
        (COLOCATED, ""),
        ({**COLOCATED, "trainer.zero": 3}, ""),
        ({**COLOCATED, "trainer.zero": 2}, "trainer.backend=deepspeed"),
    ],
)
def test_execute_runs_what_its_back_ends_can_split(changes: dict[str, Any], setting: str) -> None:
    assert broken(changes, "execute") == setting


def test_the_settings_of_a_verdict_are_those_that_execute_then_accepts() -> None:
    run = small_run({**SHARDED, "rollout.tensor_parallel": 2})
    with pytest.raises(RunError):
        check_back_ends(run)
    found = verdict_of(run, "execute")
    assert found.settings == {
        "rollout.backend": "vllm",
        "trainer.backend": "fsdp2",
        "execute.launcher": "ray",
    }
    assert found.missing == ["model.path", "workload.prompts", "verifier.scorer"]
    check_back_ends(for_target(run, "execute"))


def test_a_run_with_episodes_misses_its_environment_and_no_scorer(tmp_path: Path) -> None:
    episodes = {"max_turns": 2, "max_context": 40_000, "turns": "2", "observation_tokens": "9"}
    episodes |= {"action_time": "1 s"}
    found = verdict_of(small_run({**SHARDED, "environment": episodes}), "execute")
    assert "environment.implementation" in found.missing
    assert "verifier.scorer" not in found.missing
    command = execute_command(found, tmp_path / "plan.toml")
    assert "--set environment.implementation=CLASS" in command
    assert "CLASS by your environment" in placeholders_text(command)


def test_only_targets_that_run_episodes_are_named_for_a_plan_with_episodes() -> None:
    found = Verdict(name="execute", can_run=False, key="trainer.zero", value="1")
    other = Verdict(name="verl", can_run=False, key="environment", value="")
    (line,) = next_lines(plan_of([found, other]), Path("plan.toml"))
    assert line.startswith("next: add --for execute: it names the setting of your file")


@pytest.mark.parametrize(
    ("changes", "name", "setting"),
    [
        ({}, "verl", "policies.system=stream-async"),
        ({"policies.system": "fully-async"}, "verl", ""),
        ({"policies.system": "one-step-async"}, "slime", ""),
        ({"policies.system": "one-step-async", "sync.mode": "lora"}, "slime", "sync.mode=lora"),
        ({"policies.system": "disaggregated"}, "trl", "trainer.tensor_parallel=4"),
        ({**SHARDED, "policies.system": "disaggregated"}, "trl", ""),
        (
            {**SHARDED, "policies.system": "disaggregated", "rollout.pipeline_parallel": 2},
            "trl",
            "rollout.pipeline_parallel=2",
        ),
        (
            {"policies.system": "disaggregated", "rollout.pipeline_parallel": 2},
            "openrlhf",
            "rollout.pipeline_parallel=2",
        ),
    ],
)
def test_a_framework_runs_what_it_has_a_system_and_a_layout_for(
    changes: dict[str, Any], name: TargetName, setting: str
) -> None:
    assert broken(changes, name) == setting


def test_a_framework_is_refused_what_its_script_is_refused_for() -> None:
    uneven = {"policies.system": "disaggregated", "rollout.replicas": 3}
    run = small_run(uneven)
    with pytest.raises(RunError) as script:
        launch_script(find_arguments(run, "nemo-rl"))
    with pytest.raises(RunError) as verdict:
        check_framework(run, "nemo-rl")
    assert str(verdict.value) == str(script.value)


def test_no_framework_is_given_episodes_of_several_turns(tmp_path: Path) -> None:
    run = load_run(EXAMPLES / "agentic-swe.toml")
    assert {verdict_of(run, name).broken for name in TARGETS if name != "execute"} == {
        "[environment]"
    }
    done = streamrl("export", EXAMPLES / "agentic-swe.toml", "--framework", "verl")
    assert done.returncode == 2 and "[environment] cannot be exported" in done.stderr


def test_lines_name_what_can_run_a_plan_and_its_commands() -> None:
    verdicts = verdicts_of({**SHARDED, "policies.system": "one-step-async"})
    able, other = verdict_lines(verdicts)
    assert able == "can be run by: execute (vllm, fsdp2, ray), openrlhf"
    assert "verl, trl (policies.system=one-step-async)" in other
    execute, replaced, export = next_lines(plan_of(verdicts), Path("plans/plan.toml"))
    assert execute.startswith("next: streamrl execute plans/plan.toml --set rollout.backend=vllm")
    assert execute.endswith(
        "--set model.path=DIR --set workload.prompts=FILE --set verifier.scorer=NAME"
    )
    words = "DIR by the directory of your model, FILE by your prompts and NAME by your scorer"
    assert replaced.strip() == f"Replace {words}."
    assert export == (
        "or:   streamrl export plans/plan.toml --framework openrlhf -o plans/openrlhf.sh"
    )


def test_the_script_is_that_of_the_framework_that_a_plan_was_made_for() -> None:
    changes = {"policies.system": "disaggregated", "trainer.zero": 1, "rollout.replicas": 4}
    verdicts = verdicts_of({**changes, "cluster.pools.far": {"gpu": "h20", "gpus_per_node": 4}})
    able = {each.name for each in verdicts if each.can_run}
    assert able == {"execute", "nemo-rl", "slime", "openrlhf"}
    for framework in ("nemo-rl", "slime", "openrlhf"):
        *_, line = next_lines(plan_of(verdicts, framework), Path("plan.toml"))
        assert f"--framework {framework} " in line


def test_no_script_of_another_framework_is_named_for_a_plan_for_trl() -> None:
    verdicts = verdicts_of({**SHARDED, "policies.system": "disaggregated"})
    *_, last = lines = list(next_lines(plan_of(verdicts, "trl"), Path("plan.toml")))
    assert not any("streamrl export" in line for line in lines)
    assert last.endswith("no launch script is written for trl")


def test_an_option_is_named_if_it_can_be_run_by_more_than_the_one_of_the_plan_file() -> None:
    systems = ("one-step-async", "stream-async", "disaggregated")
    changes = [{**SHARDED, "policies.system": system} for system in systems]
    options = [
        SimpleNamespace(number=number, carried_by=verdicts_of(each), is_offered=number < 3)
        for number, each in enumerate(changes, start=1)
    ]
    first: Any = SimpleNamespace(carried_by=options[0].carried_by, options=options)
    excluded = "trl (your file excludes this option)"
    assert list(option_lines(first)) == [f"option 3 can also be run by: {excluded}"]
    none: Any = SimpleNamespace(carried_by=[], options=options[2:], taken=1)
    (line,) = option_lines(none)
    assert line.startswith("option 3 can be run by: ") and line.endswith(f", {excluded}")
    assert "option 3" in runners_text(none) and "could run it" in runners_text(none)
    third: Any = SimpleNamespace(carried_by=options[2].carried_by, options=options)
    assert list(option_lines(third)) == []


def test_a_plan_that_nothing_can_run_has_a_way_out_instead_of_a_command() -> None:
    verdicts = verdicts_of({"rollout.pipeline_parallel": 2, "rollout.tensor_parallel": 2})
    assert not any(each.can_run for each in verdicts)
    (line,) = next_lines(plan_of(verdicts), Path("plan.toml"))
    assert line.startswith("next: add --for execute or --for verl")
    plan = plan_of(verdicts)
    plan.taken, able = 3, [Verdict(name="verl", can_run=True)]
    plan.options = [SimpleNamespace(number=number, carried_by=able) for number in (1, 2)]
    (line,) = next_lines(plan, Path("plan.toml"))
    assert line.startswith("next: leave out --take 3 to write option 1")
    told = "Nothing here can run option 3, which was taken. Option 1 can be run by verl."
    assert runners_text(plan) == told
    assert [line.partition(":")[0] for line in verdict_lines(verdicts)] == ["not by"]


def test_a_line_names_the_zero_stage_that_is_not_the_usual_one() -> None:
    def text(zero: int, ranks: int) -> str:
        degrees = {"data_parallel": ranks, "tensor_parallel": 1, "zero": zero}
        side = PlannedSide(pool="a", gpu="h100", num_gpus=ranks, degrees=degrees)
        return plan_text(side, side, {"policies.system": "stream-async", "sync.mode": "full"})

    assert "4 a (DP4 TP1 ZeRO 2) train" in text(2, 4) and "4 a (DP4 TP1 ZeRO 0) train" in text(0, 4)
    assert "4 a (DP4 TP1) train" in text(1, 4) and "1 a train" in text(0, 1)

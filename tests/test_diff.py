"""What differs between two run files or plans, on a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.report.diff_report import PlannedPair, _planned_totals, _ratios
from streamrl.report.run_tables import dollars_text
from streamrl.report.words import change
from streamrl.sim.planner.plan import read_plan, read_taken, write_plan
from tests.command_line import streamrl

RUN = """
[model]
name = "Qwen/Qwen3-0.6B"
[cluster.pools.h100]
gpu = "H100-SXM"
price = 2
[rollout]
pool = "h100"
replicas = 4
max_tokens = "1k"
[trainer]
pool = "h100"
data_parallel = 4
[algorithm]
steps = 8
prompts_per_step = 16
group_size = 4
[workload.lengths]
kind = "histogram"
source = "streamrl-codemath-20k"
scale = 0.05
[policies]
system = "stream-async"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two run files that differ in the number of replicas; B is the plan of a directory."""
    a, b = tmp_path / "a.toml", tmp_path / "b" / "plan.toml"
    b.parent.mkdir()
    a.write_text(RUN)
    b.write_text(RUN.replace("replicas = 4", "replicas = 2"))
    return a, b.parent


def test_a_diff_names_the_changed_keys_and_what_they_cost(files: tuple[Path, Path]) -> None:
    done = streamrl("diff", *files)
    assert done.returncode == 0, done.stderr
    assert "rollout.replicas  4  2" in done.stdout
    for told in ("$ a step", "whole training", "  idle", "A costs"):
        assert told in done.stdout
    assert "trainer.data_parallel" not in done.stdout


def test_a_diff_has_the_same_figures_as_markdown_and_json(files: tuple[Path, Path]) -> None:
    told = json.loads(streamrl("diff", *files, "--json").stdout)
    assert told["changes"] == [{"key": "rollout.replicas", "a": 4, "b": 2}]
    assert told["figures"]["a"]["cost_per_step"] > told["figures"]["b"]["cost_per_step"]
    lines = streamrl("diff", *files, "--markdown").stdout.splitlines()
    assert "| `rollout.replicas` | 4 | 2 |" in lines
    dollars = f"${told['figures']['a']['whole_run']['dollars']:.3g}"
    assert any(line.startswith("| $ | ") and dollars in line for line in lines)
    assert all(line.count("|") in (4, 5) for line in lines if line.startswith("|"))


def test_runs_that_are_the_same_or_do_other_work_have_no_figures(files: tuple[Path, Path]) -> None:
    a, b = files
    assert streamrl("diff", a, a).stdout == "A and B are the same run.\n"
    (b / "plan.toml").write_text(RUN.replace("group_size = 4", "group_size = 2"))
    done = streamrl("diff", a, b)
    assert done.returncode == 0
    assert (
        "dollars and hours are not compared: algorithm.group_size is 4 in A and 2 in B"
        in done.stdout
    )


def test_runs_of_two_frameworks_are_compared(files: tuple[Path, Path]) -> None:
    a, b = files
    of_verl = "[framework]\nname = 'verl'\noptimizer_steps = 4\n"
    (b / "plan.toml").write_text(RUN.replace("[policies]", f"{of_verl}[policies]"))
    found = json.loads(streamrl("diff", a, b, "--json").stdout)
    assert found["figures"] is not None, found["no_figures"]
    assert {"framework.name", "framework.optimizer_steps"} <= {
        each["key"] for each in found["changes"]
    }


def test_a_run_without_a_price_has_no_figures(files: tuple[Path, Path]) -> None:
    a, b = files
    text = RUN.replace("price = 2", "price = 0")
    (b / "plan.toml").write_text(text)
    done = streamrl("diff", a, b)
    assert done.returncode == 0, done.stderr
    assert "not compared: cluster.pools.h100.price is 0" in done.stdout


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_run_that_cannot_be_simulated_is_an_error(
    files: tuple[Path, Path], order: tuple[int, int]
) -> None:
    (files[1] / "plan.toml").write_text(RUN.replace("H100-SXM", "H101"))
    done = streamrl("diff", *(files[place] for place in order))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and "h101" in done.stderr


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    done = streamrl("diff", tmp_path / "a.toml", tmp_path)
    assert done.returncode == 2 and "no such run file" in done.stderr


def test_a_pool_that_one_side_lacks_is_one_row(files: tuple[Path, Path]) -> None:
    a, b = files
    more = '[cluster.pools.h20]\ngpu = "H20"\nprice = 1\nnodes = 2\n[[cluster.links]]\n'
    more += 'between = ["h100", "h20"]\nbandwidth = "80 Gbps"\n[rollout]'
    (b / "plan.toml").write_text(RUN.replace("[rollout]", more))
    lines = streamrl("diff", a, b, "--markdown").stdout.splitlines()
    assert "| `cluster.pools.h20` | absent | 16 h20 at $1 |" in lines
    assert "| `cluster.links` | none | h100 to h20: 80 Gbps |" in lines
    assert sum("cluster.pools" in line for line in lines) == 1


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two plans of the same work: options 1 and 2 of one question."""
    parent = tmp_path_factory.mktemp("plans")
    question = [
        "--model",
        "Qwen/Qwen3-0.6B",
        "--gpus",
        "4xH100@2/1",
        "--prompts",
        "16",
        "--group",
        "4",
    ]
    question += ["--mean-tokens", "500", "--max-tokens", "1k", "--steps", "8"]
    done = streamrl("plan", *question, "-o", parent / "a")
    assert done.returncode == 0, done.stderr
    shutil.copytree(parent / "a", parent / "b")
    assert streamrl("plan", *question, "-o", parent / "b", "--take", "2").returncode == 0
    return parent / "a", parent / "b"


def test_a_diff_of_two_plans_takes_their_figures_from_plan_json(
    plans: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.cli.diff.compare", None)  # it simulates
    monkeypatch.setenv("COLUMNS", "120")
    plan = read_plan(plans[0] / "plan.json")
    ours, theirs = plan.options[:2]
    done = streamrl("diff", *plans)
    assert done.returncode == 0, done.stderr
    assert "from plan.json of both" in done.stdout and "±" not in done.stdout
    assert all(dollars_text(each.whole_run) in done.stdout for each in (ours, theirs))
    assert "A compared with B: " in done.stdout
    told = json.loads(streamrl("diff", *plans, "--json").stdout)
    assert told["figures"] is None and told["from_plans"]["b"]["number"] == 2
    assert "from plan.json of both" in streamrl("diff", *plans, "--markdown").stdout


def test_a_diff_of_two_plans_compares_the_times_that_it_shows(plans: tuple[Path, Path]) -> None:
    a, b = read_plan(plans[0] / "plan.json").options[:2]
    later = replace(a, whole_run=replace(a.whole_run, setup_time=9 * a.whole_run.seconds))
    told = list(_planned_totals(PlannedPair(later, a)))
    assert told[0][0].startswith("whole training") and told[0][-1] == change(9.0)
    assert _ratios(PlannedPair(a, b))[1] == a.whole_run.wall_time / b.whole_run.wall_time


def test_a_plan_that_was_edited_or_made_by_another_version_is_simulated(
    plans: tuple[Path, Path], tmp_path: Path
) -> None:
    assert read_taken(plans[1]) is not None
    edited, older = tmp_path / "edited", tmp_path / "older"
    shutil.copytree(plans[1], edited)
    with (edited / "plan.toml").open("a") as file:
        file.write("# edited\n")
    shutil.copytree(plans[1], older)
    write_plan(replace(read_plan(older / "plan.json"), version="0.0.1"), older)
    assert read_taken(edited) is None and read_taken(older) is None
    assert read_taken(tmp_path) is None
    done = streamrl("diff", plans[0], edited)
    assert done.returncode == 0 and "  idle" in done.stdout and "plan.json" not in done.stdout

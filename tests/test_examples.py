"""`streamrl examples`: what it lists, and what it copies."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from streamrl.executor.environment.registry import find_class
from streamrl.runfile.examples import describe_example, example_names
from streamrl.runfile.files import load_run
from streamrl.runfile.jobs_file import load_jobs
from tests.command_line import streamrl


def test_every_run_file_is_listed_with_a_sentence() -> None:
    listed = json.loads(streamrl("examples", "list", "--json").stdout)
    stored = Path(__file__).parents[1] / "examples"
    folders = ("", "layouts/", "studies/", "clusters/")
    files = [path for folder in folders for path in stored.glob(f"{folder}*.toml")]
    assert set(listed) == {str(path.relative_to(stored).with_suffix("")) for path in files}
    assert all(listed.values())
    assert describe_example("plan-7b") == "Which GPUs for Qwen2.5-7B?"


RUN_FILES = [name for name in example_names() if not name.startswith(("studies/", "clusters/"))]


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_copied_run_file_loads(name: str, tmp_path: Path) -> None:
    result = streamrl("examples", "copy", name, "-o", tmp_path / "mine")
    assert result.returncode == 0, result.stderr
    copied = tmp_path / "mine" / f"{name}.toml"
    assert f"written to {copied}" in result.stdout
    assert "#:schema" not in copied.read_text()
    assert load_run(copied).algorithm.steps > 0


def test_files_that_an_example_names_are_copied_too(tmp_path: Path) -> None:
    streamrl("examples", "copy", "quickstart", "-o", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "make_quickstart.py",
        "quickstart.toml",
    ]
    streamrl("examples", "copy", "studies/bandwidth", "-o", tmp_path)
    assert (tmp_path / "studies" / "bandwidth.toml").is_file()
    assert (tmp_path / "h20-h800.toml").is_file()


def test_the_template_for_own_data_brings_a_reward_function_that_scores(tmp_path: Path) -> None:
    streamrl("examples", "copy", "own-data", "-o", tmp_path)
    run = load_run(tmp_path / "own-data.toml")
    (reward,) = run.verifier.reward
    file, _, name = reward.scorer.removeprefix("python:").partition(":")
    score = runpy.run_path(str(tmp_path / file))[name]
    record = {"ground_truth": "-12"}
    assert [score(text, record) for text in ("5-17=-12", "so 12", "none")] == [1.0, 0.1, 0.0]


def test_the_template_for_an_own_environment_brings_tools_and_a_reward(tmp_path: Path) -> None:
    result = streamrl("examples", "copy", "own-environment", "-o", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "own-environment.toml",
        "own_environment.py",
        "make_agent.py",
        "make_quickstart.py",  # which make_agent.py imports
    }, result.stderr
    config = load_run(tmp_path / "own-environment.toml").environment
    assert config is not None and config.implementation is not None
    environment = find_class(config.implementation)(**config.arguments)
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "subtract"]
    call = '<tool_call>{"name": "subtract", "arguments": {"a": 5, "b": %s}}</tool_call>'
    environment.reset({"prompt": "5-17=", "answer": "-12"})
    result = {"role": "tool", "name": "subtract", "content": "-12"}
    assert environment.step(call % "17") == ([result], 0.0, False)
    (failed,), penalty, is_over = environment.step(call % '"x"')
    assert failed["content"].startswith("Error:") and penalty == -0.1 and not is_over
    rewards = [environment.step(answer)[1:] for answer in ("so it is -12", "12", "none")]
    assert rewards == [(1.0, True), (0.0, True), (0.0, True)]


def test_a_copied_cluster_file_loads_with_the_run_files_of_its_jobs(tmp_path: Path) -> None:
    streamrl("examples", "copy", "clusters/two-jobs", "-o", tmp_path)
    jobs = load_jobs(tmp_path / "clusters" / "two-jobs.toml")
    assert [job.config.name for job in jobs.jobs] == ["math", "code"]
    assert describe_example("clusters/two-jobs").startswith("Two trainings of Qwen2.5-7B")


def test_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "h20-h800.toml"
    mine.write_text("mine")
    result = streamrl("examples", "copy", "studies/bandwidth", "-o", tmp_path)
    assert (result.returncode, mine.read_text()) == (2, "mine")
    assert f"{mine} is already there" in result.stderr
    assert not (tmp_path / "studies").exists()


def test_two_examples_may_name_the_same_file(tmp_path: Path) -> None:
    for name in ("studies/bandwidth", "h20-h800", "h20-h800"):
        assert streamrl("examples", "copy", name, "-o", tmp_path).returncode == 0


def test_an_unknown_example_names_the_nearest(tmp_path: Path) -> None:
    result = streamrl("examples", "copy", "plan7b", "-o", tmp_path / "new")
    assert result.returncode == 2
    assert "did you mean plan-7b?" in result.stderr
    assert not (tmp_path / "new").exists()

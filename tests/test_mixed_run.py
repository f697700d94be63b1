"""A whole real run on a mixture of data sets with several rewards, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.record.run_directory import read_metrics, read_rollouts
from tests.command_line import streamrl
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.tiny_model import save_tiny_model

MIXTURE = """
max_prompt_tokens = 24
order = "file"
[[workload.source]]
prompts = "sums.jsonl"
name = "sums"
weight = 3.0
fields = { prompt = "question", answer = "meta.gold" }
template = { system = "+", user = "{{ prompt }} =" }
[[workload.source]]
prompts = "twos.jsonl"
name = "twos"
[verifier]
workers = 2
[[verifier.reward]]
scorer = "exact"
families = ["sums"]
[[verifier.reward]]
scorer = "python:rewards/mine.py:twos"
weight = 0.5
bounds = [-1.0, 1.0]
[[verifier.reward]]
scorer = "length-penalty"
beyond = 4
until = 12
"""
MINE = """
def twos(completion: str, record: dict) -> float:
    return 1.0 if "2" in completion else -1.0
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    save_tiny_model(path / "model", SYMBOLS)
    (path / "rewards").mkdir()
    (path / "rewards" / "mine.py").write_text(MINE)
    sums = [{"question": f"{n}+{n}", "meta": {"gold": str(2 * n)}} for n in range(3)]
    twos = [{"prompt": f"{n}="} for n in range(2)]
    for name, rows in (("sums", sums), ("twos", twos)):
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = RUN_FILE.replace('[verifier]\nscorer = "exact"\n', "")
    text = text.replace('prompts = "prompts.jsonl"\nmax_prompt_tokens = 16\n', MIXTURE)
    (path / "run.toml").write_text(text)
    return path


def test_a_run_on_a_mixture_scores_each_family_by_its_rewards_and_resumes(project: Path) -> None:
    done = streamrl("execute", project / "run.toml", "--set", "algorithm.steps=2")
    assert done.returncode == 0, done.stderr
    resumed = streamrl("execute", project / "run.toml", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    rollouts = read_rollouts(project / "run")
    first = {rollout["group"]: rollout["line"] for rollout in rollouts}
    assert [first[group] for group in range(10)] == [0, 1, 3, 2, 0, 1, 2, 4, 0, 1]
    for rollout in rollouts:
        scores = rollout["rewards"]
        is_sum = rollout["line"] < 3
        assert set(scores) == {"twos", "length-penalty", *(["exact"] if is_sum else [])}
        assert scores["twos"] == (1.0 if "2" in rollout["text"] else -1.0)
        assert scores["length-penalty"] == -max(0, rollout["num_tokens"] - 4) / 8
        total = scores.get("exact", 0.0) + 0.5 * scores["twos"] + scores["length-penalty"]
        assert rollout["reward"] == pytest.approx(total)
    for step in read_metrics(project / "run"):
        assert -1.0 <= step["reward/twos"] <= 1.0 and -1.0 <= step["reward/length-penalty"] <= 0.0


def test_other_weights_or_another_order_resume_no_run(project: Path) -> None:
    text = (project / "run.toml").read_text()
    for old, new, key in (
        ("weight = 3.0", "weight = 2.0", "workload.source.0.weight"),
        ('order = "file"', 'order = "shuffled"', "workload.order"),
    ):
        (project / "other.toml").write_text(text.replace(old, new))
        done = streamrl("execute", project / "other.toml", "--resume", "--set", "algorithm.steps=9")
        assert done.returncode == 2 and f"streamrl: {key} is " in done.stderr


def test_a_report_of_it_draws_what_each_scorer_gave(project: Path) -> None:
    done = streamrl("report", project / "run", "--json")
    assert done.returncode == 0, done.stderr
    page = (project / "run" / "report.html").read_text()
    assert "What scorers gave" in page and "length-penalty" in page

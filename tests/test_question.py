"""A plan without a run file: the first answer, the files that it writes, and what is refused before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace as replace_fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl import api
from streamrl.report.plan_report import why_lines
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, make_run
from streamrl.sim.planner import answers
from streamrl.sim.planner.first_answer import Question, assumptions_of, first_answer, run_table_of
from streamrl.sim.planner.objective import decide
from streamrl.sim.planner.plan import FirstPlan
from streamrl.sim.planner.planner import make_plan
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import SEMAPHORE, full_disk, on_terminal, streamrl
from tests.patients import local_table
from tests.test_plan import SMALL as PLANNED
from tests.test_plan import Here, few, planned

SMALL = Question(
    **{
        "model": "Qwen/Qwen3-0.6B",
        "gpus": "4xH100@2,2xH20@1",
        "prompts": 8,
        "group": 4,
        "steps": 3,
    },
    mean_tokens=300,
    max_tokens=900,
)
FLAGS = [
    *("--model", "Qwen/Qwen3-0.6B", "--gpus", "4xH100@2", "--prompts", "8", "--group", "4"),
    *("--mean-tokens", "0.3k", "--max-tokens", "900", "--steps", "3"),
]


def test_the_lengths_of_a_question_have_its_mean_under_its_cap() -> None:
    run = make_run(run_table_of(SMALL))
    lengths = [n for draw in SimulatedWorkload(run).draw(0, 400) for n in draw.lengths]
    capped = np.minimum(lengths, run.rollout.max_tokens)
    assert max(capped) == 900
    assert float(np.mean(capped)) == pytest.approx(300, rel=0.1)


def test_a_first_answer_names_three_plans_and_simulates_them() -> None:
    run = make_run(run_table_of(SMALL))
    answer = first_answer(run, Here(), 600.0)
    cheapest, faster, fastest = answer.plans
    assert cheapest.dollars <= faster.dollars <= 1.1 * cheapest.dollars
    assert fastest.seconds <= faster.seconds <= cheapest.seconds
    assert all(plan.simulated_steps for plan in answer.plans)
    assert answer.recommended == faster


def test_a_first_answer_recommends_by_the_rule_of_plan() -> None:
    plain = make_run(run_table_of(SMALL))
    by_time = replace(plain, plan=replace(plain.plan, objective="step-time"))
    answer = first_answer(by_time, Here(), 0.0)
    _, recommended, fastest = answer.plans
    assert recommended.candidate == fastest.candidate and "the fastest" in answer.rule
    by_cost = replace(plain, plan=replace(plain.plan, tolerance=0.0))
    cheapest, recommended, _ = first_answer(by_cost, Here(), 0.0).plans
    assert recommended.candidate == cheapest.candidate
    in_time = replace(plain, plan=replace(plain.plan, deadline=1e9))
    answer = first_answer(in_time, Here(), 0.0)
    assert answer.recommended.candidate == first_answer(plain, Here(), 0.0).recommended.candidate
    assert "more than the cheapest, of those that meet the deadline" in answer.rule


def test_nothing_is_simulated_where_there_is_no_time() -> None:
    answer = first_answer(make_run(run_table_of(SMALL)), Here(), 0.0)
    assert not any(plan.simulated_steps for plan in answer.plans)
    assert all(plan.dollars > 0 for plan in answer.plans)


LONG = Question(model="Qwen/Qwen3-8B", gpus="4xH100/1@2.2", mean_tokens=6000, max_tokens=32_768)


@pytest.mark.parametrize("most_rollouts", [5_000, 20_000])
def test_an_answer_that_ends_early_names_no_plan_by_a_lower_bound_alone(most_rollouts: int) -> None:
    run = make_run(run_table_of(LONG))
    early, whole = first_answer(run, Here(), 600.0, most_rollouts), first_answer(run, Here(), 600.0)
    for ours, theirs in zip(early.plans, whole.plans, strict=True):
        assert ours.dollars > 0.95 * theirs.dollars


@pytest.mark.parametrize("question", [SMALL, LONG])
def test_a_larger_offer_has_no_dearer_cheapest_plan(question: Question) -> None:
    sizes = (2, 4, 6, 8)  # tensor ranks divide the GPUs of a node, so a node of 3 has other plans
    offers = [replace_fields(question, gpus=f"{n}xH100/1@2") for n in sizes]
    runs = [make_run(run_table_of(offer)) for offer in offers]
    dollars = [first_answer(run, Here(), 600.0).plans[0].dollars for run in runs]
    assert all(larger <= smaller for smaller, larger in pairwise(dollars)), dollars


def test_the_fastest_plan_that_costs_little_more_is_told_from_cheapest_and_fastest() -> None:
    seconds, dollars = np.array([9.0, 5.0, 3.0, 1.0]), np.array([10.0, 10.9, 11.2, 30.0])
    assert decide(seconds, dollars, 0.1) == (0, 1, 3)
    assert decide(seconds, dollars, 0.0) == (0, 0, 3)
    assert decide(seconds, dollars, 9.0) == (0, 3, 3)


def test_a_plan_needs_no_run_file(tmp_path: Path) -> None:
    done = streamrl("plan", *FLAGS, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("First answer: ")
    for told in (
        "cheapest",
        "recommended: the fastest plan that costs at most 10% more than the cheapest",
        "streamrl-codemath-20k",
        "assumed: grpo",
    ):
        assert told in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["whole_run"]["steps"] == 3
    planned = load_run(tmp_path / "plan.toml")
    assert (planned.model.name, planned.rollout.max_tokens) == ("qwen3-0.6b", 900)


def test_a_plan_without_a_run_file_and_a_directory_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = streamrl("plan", *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stdout and not [*tmp_path.iterdir()]


def test_init_keeps_limits_and_settings_and_makes_directories(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.toml"
    limits = ("--deadline", "3 days", "--budget", "$1,000", "--set", "plan.tolerance=0.3")
    done = streamrl("init", path, *FLAGS, *limits)
    assert done.returncode == 0, done.stderr
    plan = load_run(path).plan
    assert (plan.deadline, plan.budget, plan.tolerance) == (3 * 86_400, 1000, 0.3)
    assert plan.rollout_gpus is plan.trainer_gpus is None


def test_a_question_may_have_owned_gpus_set_up_and_a_minimum_term(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    offer = ["--gpus", "4xH100@owned,2xH20@1", *FLAGS[4:]]
    bill = ["--setup-time", "90 min", "--minimum-term", "1 year"]
    done = streamrl("init", path, *FLAGS[:2], *offer, *bill)
    assert done.returncode == 0, done.stderr
    run = load_run(path)
    own, rented = run.cluster.pools["h100"], run.cluster.pools["h20"]
    assert (own.owned, own.price, own.minimum_term) == (True, None, 0)
    assert (rented.owned, rented.minimum_term) == (False, 365 * 86_400)
    assert run.cluster.billing.setup_time == 5400
    assert 'setup_time = "90 min"' in path.read_text()
    assert 'minimum_term = "365 days"' in path.read_text()
    assert "your own h100 count as $2.99 per GPU-hour each, used or not" in done.stdout
    assert "not counted: failed attempts, storage, egress and billing units" in done.stdout


def test_a_question_with_own_gpus_alone_is_planned_by_time() -> None:
    own = replace_fields(SMALL, gpus="4xH100@owned", budget=5.0)
    run = make_run(run_table_of(own))
    assert run.plan.objective == "step-time" and run.plan.budget == 5
    answer = first_answer(run, Here(), 0.0)
    assert len({plan.candidate for plan in answer.plans}) == 1
    assert all(plan.dollars == 0 for plan in answer.plans)
    (line,) = [line for line in assumptions_of(own, set()) if "no price" in line]
    assert "compared by time" in line
    priced = replace_fields(own, gpus="4xH100@owned@0.50")
    assert make_run(run_table_of(priced)).plan.objective == "cost-per-million-tokens"


def test_own_gpus_for_nothing_are_refused_where_plans_on_them_alone_cost_nothing() -> None:
    run = make_run(run_table_of(replace_fields(SMALL, gpus="4xH100@owned@0,2xH20@1")))
    for ask in (lambda: first_answer(run, Here(), 0.0), lambda: make_plan(run)):
        with pytest.raises(RunError, match=r"cluster\.pools\.h100\.price is 0, and plans on your"):
            ask()
    apart = replace(run.plan, rollout_pools=["h20"], trainer_pools=["h100"], time_limit=5.0)
    plan = make_plan(replace(run, plan=apart), shows_own=False).plan
    assert plan.whole_run is not None and plan.whole_run.dollars > 0
    assert plan.whole_run.pools["h100"].dollars == 0


def test_limits_that_no_plan_keeps_are_said_beside_a_first_answer(tmp_path: Path) -> None:
    done = streamrl("init", tmp_path / "run.toml", *FLAGS, "--deadline", "1 ms")
    assert "by estimate no plan keeps the deadline" in done.stdout


def test_init_writes_a_run_file_with_comments_that_keeps_the_offer(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    done = streamrl("init", path, *FLAGS[:2], "--gpus", "16xH100@2,8xH20@1", *FLAGS[4:])
    assert done.returncode == 0, done.stderr
    run = load_run(path)
    assert {name: pool.num_gpus for name, pool in run.cluster.pools.items()} == {
        "h100": 16,
        "h20": 8,
    }
    text = path.read_text()
    assert "# What you may rent" in text and "# Training." in text
    again = streamrl("init", path, *FLAGS)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert path.read_text() == text
    done = streamrl("simulate", path, "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_model_may_be_a_directory_with_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absolute: bool
) -> None:
    local_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model" if is_absolute else Path("model")
    done = streamrl("init", "new/run.toml", "--model", model, *FLAGS[2:])
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "new" / "run.toml")
    assert (run.model.name, Path(run.model.path or "").resolve()) == (None, tmp_path / "model")
    question = answers.question_of({"model": str(model), "gpus": "4xH100@2"})
    assert answers.run_of(question, ()).model.path == str(model)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"^--model: {model} has no config\.json$"):
        answers.question_of({"model": str(model), "gpus": "4xH100@2"})


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a" * 300 + ".toml", "File name too long"),
        (".", "Is a directory"),
        ("file/x.toml", "Not a directory"),
    ],
)
@pytest.mark.parametrize("command", ["init", "plan"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    command: str, path: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "plan.toml").mkdir()  # where a plan of this directory would be
    output = tmp_path / path
    words = ("init", output) if command == "init" else ("plan", "-o", output)
    done = streamrl(*words, *FLAGS)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("streamrl: --output ") and reason in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "plan.toml"]


@pytest.mark.parametrize("command", ["init", "plan"])
def test_a_full_disk_leaves_no_partial_file(command: str, tmp_path: Path) -> None:
    words = ("init", tmp_path / "run.toml") if command == "init" else ("plan", "-o", tmp_path)
    older = tmp_path / "older.json"
    older.write_text("older")
    with full_disk(SEMAPHORE):
        done = streamrl(*words, *FLAGS, "--gpus", "1xH100@2", "--set", "plan.time_limit=1 s")
    assert done.returncode == 1 and "File too large" in done.stderr
    assert f"streamrl: {tmp_path}/" in done.stderr
    assert list(tmp_path.iterdir()) == [older] and older.read_text() == "older"


def test_init_asks_again_after_a_wrong_answer(tmp_path: Path) -> None:
    """On a pseudo-terminal, which ends the input at the last question."""
    path = tmp_path / "run.toml"
    answers = ["qwen9", "qwen3-0.6b", "12xH100", "4xB900", "4xH100@2", "0", "8", "4", "300"]
    answers += ["200", "900", "many", "\x04"]
    shown = on_terminal(["init", str(path)], answers)
    for told in (
        "--model: no profile 'qwen9'",
        "does not fill nodes of 8",
        "--gpus: no profile 'b900'",
        "--prompts must be at least 1, got 0",
        "--mean-tokens must be from 1 to 95% of --max-tokens (200)",
        "--steps: 'many' must be a whole number",
        "Aborted",
    ):
        assert told in shown, shown
    assert shown.count("Prompts of a step") == 2 and shown.count("Mean output tokens") == 1
    assert not path.exists()


def test_init_checks_what_is_given_before_it_asks(tmp_path: Path) -> None:
    shown = on_terminal(["init", str(tmp_path / "run.toml"), "--gpus", "4xB900"], [])
    assert "no profile 'b900'" in shown and "Model (" not in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--gpus", "8xH100"], "--model is missing"),
        (["--model", "qwen3-8b"], "--gpus is missing"),
        (["--model", "qwen3-8b", "--gpus", "12xH100"], "does not fill nodes"),
        (["--model", "qwen3-8b", "--gpus", "8xB900"], "no profile 'b900'"),
        (["--model", "qwen3-8b", "--gpus", "8xH250"], "h20-3e; the others are a100, "),
        (["--model", "qwen9", "--gpus", "8xH100"], "no profile 'qwen9'"),
        ([*FLAGS, "--mean-tokens", "20k"], "--mean-tokens must be from 1"),
        ([*FLAGS, "--deadline", "3"], "--deadline: '3' needs a unit"),
        (
            [*FLAGS, "--deadline", "tomorrow"],
            "needs a number and a unit: write a duration such as '3 days'",
        ),
        ([*FLAGS, "--deadline", "2026-12-03"], "--deadline: '2026-12-03' is a date"),
        ([*FLAGS, "--prompts", "0"], "--prompts must be at least 1, got 0"),
        ([*FLAGS, "--link", "fast"], "--link: 'fast' needs a number and a unit"),
        ([*FLAGS, "--link", "0 Gbps"], "--link: must be above 0 B/s, got '0 Gbps'"),
        ([*FLAGS, "--deadline", "0 days"], "--deadline: must be above 0 s, got '0 days'"),
        ([*FLAGS, "--setup-time", "2"], "--setup-time: '2' needs a unit"),
        ([*FLAGS, "--minimum-term", "1"], "--minimum-term: '1' needs a unit"),
        ([*FLAGS, "--gpus", "4xH100@owned", "--minimum-term", "1 h"], "applies to rented GPUs"),
        ([*FLAGS, "--budget", "much"], "--budget: 'much' is no number of dollars"),
        ([*FLAGS, "--budget", "$1,5"], "--budget: '$1,5' is no number of dollars"),
        ([*FLAGS, "--steps", "many"], "--steps: 'many' must be a whole number"),
        ([*FLAGS, "--algorithm", "sft"], "algorithm.name must be one of"),
        (["examples/plan-7b.toml", "--steps", "3"], "--steps: a run file says this"),
    ],
)
def test_a_question_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, options: list[str], reason: str
) -> None:
    done = streamrl("plan", *options, "--output", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert not (tmp_path / "out").exists()


# From Python -------------------------------------------------------------------------------------


def test_python_gets_the_first_answer_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_SECONDS", 600.0)  # a busy machine simulates as much
    answer = api.first_answer(
        *("Qwen/Qwen3-0.6B", "2xH100@2"),
        **{"prompts": 8, "group": 4, "mean_tokens": "0.3k", "max_tokens": 900, "steps": 3},
        changes={"execute.output": str(tmp_path / "run")},
    )
    file = tmp_path / "run.toml"
    done = streamrl(
        *("init", file, *FLAGS, "--gpus", "2xH100@2"),
        *("--set", f"execute.output={tmp_path / 'run'}"),
    )
    assert done.returncode == 0, done.stderr
    assert load_run(file) == answer.run
    told = " ".join(done.stdout.split())
    assert all(line in told for line in answer.notes())
    assert list(answer.to_frame()["what"]) == [plan.what for plan in answer.plans]
    assert answer.recommended.choice in repr(answer) and "\n" not in repr(answer)
    assert "assumed: grpo, 400 tokens a prompt" in answer._repr_html_()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompts": 0}, "^prompts must be at least 1, got 0"),
        ({"mean_tokens": 900}, "^mean_tokens must be from 1 to 95% of max_tokens .900., got 900"),
        ({"link": "10"}, "^link: '10' needs a unit"),
        ({"budget": "much"}, "^budget: 'much' is no number of dollars"),
        ({"gpus": "4xFoo"}, "^gpus: no profile 'foo' in profiles/gpus; there is a100"),
    ],
)
def test_a_wrong_answer_in_python_is_named_as_the_argument(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        api.first_answer(**{"model": "qwen3-8b", "gpus": "8xH100", "max_tokens": 900, **wrong})


def test_a_wrong_change_of_a_first_answer_has_its_key() -> None:
    with pytest.raises(RunError) as raised:
        api.first_answer("qwen3-8b", "8xH100", changes={"plan.tolerance": -1})
    assert raised.value.key == "plan.tolerance"


# The final answer ---------------------------------------------------------------------------------


def test_a_plan_says_what_became_of_the_first_answer() -> None:
    run = make_run(run_table_of(SMALL))
    found = first_answer(run, Here(), 0.0)
    recommended = make_plan(run, shows_own=False, first=found.recommended).plan
    assert recommended.first is not None
    assert recommended.first.choice == found.recommended.choice
    assert recommended.first.dollars is not None  # it was simulated whatever became of it
    fastest = found.plans[2]
    assert fastest.dollars > 1.2 * found.plans[0].dollars
    first = make_plan(run, shows_own=False, first=fastest).plan.first
    assert first is not None and first.dollars is not None and first.wall_time is not None
    assert first.estimated_dollars == fastest.dollars
    assert "dearer" in first.relation
    assert " more than the cheapest (plan.tolerance 10%)" in first.reason


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (None, ""),
        (
            FirstPlan(choice="8 a", estimated_dollars=9.0, estimated_wall_time=7200.0, option=1),
            "the first answer recommended the same plan, estimated at $9.00 and 2.00 h",
        ),
        (
            FirstPlan(choice="8 a", estimated_dollars=9.0, estimated_wall_time=7200.0),
            "the first answer recommended 8 a, estimated at $9.00 and 2.00 h; no time was left to simulate it",
        ),
        (
            FirstPlan(
                choice="8 a",
                estimated_dollars=9.0,
                estimated_wall_time=7200.0,
                option=3,
                dollars=12.0,
                wall_time=7200.0,
                relation="20 % dearer, as fast",
                reason="it is slower",
            ),
            "the first answer recommended option 3, estimated at $9.00 and 2.00 h; simulated, it takes $12.0 and "
            "2.00 h: 20 % dearer, as fast. It lost because it is slower",
        ),
    ],
)
def test_one_line_tells_it_on_a_terminal(first: FirstPlan | None, words: str) -> None:
    plan = replace(planned(few(PLANNED)).plan, first=first)
    told = [line for line in why_lines(plan) if line.startswith("the first answer")]
    assert told == ([words] if words else [])

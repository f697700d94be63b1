"""Scores of evaluations on the page of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.record.evaluation import (
    EVALUATED,
    EVALUATIONS,
    EvaluationResult,
    FinalScores,
    difference,
    final_scores,
    read_evaluations,
    scores_of,
)
from streamrl.report.evaluation_table import say_final_scores, sources_table
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.report.pictures.drawing import Dot, Polyline
from streamrl.report.pictures.step_curves import Curve, curves_picture
from streamrl.runfile.evaluation_config import EvaluationConfig
from tests.command_line import streamrl
from tests.test_execute import execute, real_run
from tests.test_report_executed import section_of
from tests.tiny_model import tiny_model

HELD_OUT = {"share": 0.4, "every": 2, "samples": 3}


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """Return the directory of an executed run with evaluations of steps 0, 2 and 4."""
    tiny_model(40).config.save_pretrained(tmp_path)
    execute(real_run(tmp_path, evaluation=HELD_OUT, policies__system="stream-sync"))
    return tmp_path / "run"


def test_the_page_of_a_run_has_each_score_with_its_interval(evaluated: Path) -> None:
    results = read_evaluations(evaluated)
    report = read_report([evaluated])
    page = make_page(report)
    section = section_of(page, "evaluations-1")
    (table,) = section.tables
    assert list(table.head[:4]) == ["step", "avg@3", "pass@1", "pass@3"]
    assert [row[0].text for row in table.rows] == ["0", "2", "4"]
    for row, result in zip(table.rows, results, strict=True):
        for cell, score in zip(row[1:], result.scores.values(), strict=False):
            assert f"{cell.text} ({cell.note})" == str(score)
    (picture,) = section.pictures
    lines = [each for each in picture.drawing.shapes if isinstance(each, Polyline)]
    assert sum(each.css.startswith("spread ") for each in lines) == 9  # versions x scores
    assert sum(each.css.startswith("curve ") for each in lines) == 3
    assert any("from step 0 to 4" in text and "paired" in text for text in section.text)
    assert 'id="evaluations-1' in render_html(page)
    assert str(results[-1].scores["pass@3"]) in render_markdown(page)
    (told,) = msgspec.to_builtins(describe(report)["evaluations"])
    assert [each["step"] for each in told["results"]] == [0, 2, 4]


def test_the_page_and_the_table_have_the_scores_of_each_data_source(evaluated: Path) -> None:
    *lines, last = (evaluated / EVALUATIONS).read_text().splitlines()
    result = json.loads(last)
    names = ["openai/gsm8k", "[bold]<b>"]
    result["sources"] = {name: {"num_prompts": 2, "scores": result["scores"]} for name in names}
    (evaluated / EVALUATIONS).write_text("\n".join([*lines, json.dumps(result), ""]))
    page = make_page(read_report([evaluated]))
    _, table = section_of(page, "evaluations-1").tables
    assert list(table.head) == ["data source", "prompts", "avg@3", "pass@1", "pass@3"]
    assert [[cell.text for cell in row[:2]] for row in table.rows] == [
        [name, "2"] for name in names
    ]
    assert "<b>" not in render_html(page).partition("openai/gsm8k")[2].partition("</table>")[0]
    shown = sources_table(read_evaluations(evaluated)[-1])
    assert list(shown.columns[0].cells) == [names[0], "\\[bold]<b>"]


def test_a_page_without_evaluations_has_no_section_of_scores(evaluated: Path) -> None:
    (evaluated / EVALUATIONS).unlink()
    page = make_page(read_report([evaluated]))
    assert not [each for each in page.sections if each.name.startswith("evaluations")]


def test_intervals_of_curves_are_within_the_picture_and_beside_each_other() -> None:
    nan = float("nan")
    one = Curve("one", [0.5, nan], "s-0", [(-0.5, 1.5), (nan, nan)])
    other = Curve("other", [0.5, 0.6], "s-1 dashed", [(0.4, 0.6), (0.5, 0.7)])
    drawing = curves_picture("c", "Title", [0, 10], [one, other], "{:.1f}".format).drawing
    spreads = [
        each for each in drawing.shapes if isinstance(each, Polyline) and "spread" in each.css
    ]
    assert [each.css for each in spreads] == ["spread s-0", "spread s-1", "spread s-1"]
    ends = [y for each in spreads for _, y in each.points]
    assert min(ends) >= 0 and max(ends) <= drawing.height
    assert spreads[0].points[0][0] < spreads[1].points[0][0]
    dots = [each for each in drawing.shapes if isinstance(each, Dot) and each.css == "point s-1"]
    assert len(dots) == 2


def test_a_diff_of_executed_runs_pairs_their_last_scores_by_prompt(
    evaluated: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    changes = {"policies__system": "stream-sync", "algorithm__steps": 2}
    execute(real_run(other, evaluation=HELD_OUT, **changes))
    shutil.rmtree(evaluated / "inputs", ignore_errors=True)  # nothing is simulated
    told = json.loads(streamrl("diff", evaluated, other / "run", "--json").stdout)
    results = [read_evaluations(each)[-1] for each in (evaluated, other / "run")]
    assert [each.step for each in results] == [4, 2]
    a, b = (each.scores["pass@1"].value for each in results)
    found = told["scores"]["pass@1"]
    assert found["num_prompts"] == 3 and found["difference"]["value"] == pytest.approx(a - b)
    assert {"key": "algorithm.steps", "a": 4, "b": 2} in told["changes"]
    shown = streamrl("diff", evaluated, other / "run").stdout
    markdown = streamrl("diff", evaluated, other / "run", "--markdown").stdout
    for text in (shown, markdown):
        assert "pass@3" in text and "step 4 of A, step 2 of B" in text and "streamrl report" in text


def test_a_difference_of_scores_that_were_made_differently_says_so(
    evaluated: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    changes = {"policies__system": "stream-sync", "algorithm__steps": 2}
    execute(real_run(other, evaluation={**HELD_OUT, "temperature": 0.5}, **changes))
    told = json.loads(streamrl("diff", evaluated, other / "run", "--json").stdout)
    assert told["scored_unlike"] == ["temperature"] and told["scores"]
    for words in ((), ("--markdown",)):
        shown = " ".join(streamrl("diff", evaluated, other / "run", *words).stdout.split())
        assert "scored differently (evaluation.temperature), so the difference is not one" in shown
    same = streamrl("diff", evaluated, evaluated, "--json").stdout
    assert json.loads(same)["scored_unlike"] == []


def test_scores_of_other_prompts_or_of_none_are_not_compared(
    evaluated: Path, tmp_path: Path
) -> None:
    config = EvaluationConfig(**HELD_OUT)
    other = tmp_path / "other"
    shutil.copytree(evaluated, other)
    same = final_scores(evaluated, other, config)
    assert {each.score.value for each in same.differences.values()} == {0.0}
    lines = (other / EVALUATIONS).read_text().splitlines()
    last = json.loads(lines[-1])
    last["rewards"] = {prompt: [2.0, 2.0, 2.0] for prompt in last["rewards"]}
    (other / EVALUATIONS).write_text("\n".join([*lines[:-1], json.dumps(last), ""]))
    found = final_scores(evaluated, other, config).differences["avg@3"]
    assert found.score.value == pytest.approx(same.a.scores["avg@3"].value - 2)
    path = other / EVALUATED
    path.write_text(path.read_text().replace('"prompt":"p', '"prompt":"q'))
    with pytest.raises(ValueError, match="held-out prompt 0 of A is another one"):
        final_scores(evaluated, other, config)
    (other / EVALUATIONS).unlink()
    with pytest.raises(ValueError, match="other has no evaluation"):
        final_scores(evaluated, other, config)


def test_a_difference_over_fewer_prompts_than_a_column_says_so() -> None:
    config = EvaluationConfig(prompts="held-out", samples=2)

    def result(num_prompts: int) -> EvaluationResult:
        rewards = {number: [float(number % 2)] * 2 for number in range(num_prompts)}
        facts: dict[str, Any] = {"time": 1.0, "seconds": 1.0, "samples": 2, "confidence": 0.95}
        facts |= {"mean_tokens": 1.0, "truncated_share": 0.0, "num_prompts": num_prompts}
        return EvaluationResult(step=0, scores=scores_of(rewards, config), rewards=rewards, **facts)

    def said(a: EvaluationResult, b: EvaluationResult) -> str:
        return say_final_scores(FinalScores(a, b, difference(a, b, config)))

    assert "A has 20 prompts and B 10, so it is not the difference" in said(result(20), result(10))
    assert "so it is not the difference" not in said(result(10), result(10))

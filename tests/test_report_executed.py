"""The page of an executed run: measured against predicted, and its faults."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from msgspec.structs import replace

from streamrl.record.incidents import find_incidents
from streamrl.report.page.answer import tiles_of
from streamrl.report.page.measured import Prediction, predict, stage_seconds
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.report.page.parts import Page, PageSection
from streamrl.report.run_tables import is_within_band, measure_first_text
from streamrl.sim.studies.rerun import simulate_as_recorded
from streamrl.sim.world import simulate
from tests.report_directories import as_executed, write_runs
from tests.runs import small_run
from tests.test_elastic import resized

FAULTS = [
    {"kind": "replica-dies", "step": 2},
    {"kind": "trainer-dies-training", "step": 4},
]


def section_of(page: Page, name: str) -> PageSection:
    (found,) = [section for section in page.sections if section.name == name]
    return found


def test_a_simulation_beside_a_run_is_its_prediction(tmp_path: Path) -> None:
    predicted, executed = write_runs(tmp_path, predicted={}, executed={})
    page = make_page(read_report([predicted, as_executed(executed)]))
    section = section_of(page, "measured")
    (table,) = section.tables
    a_step = next(row for row in table.rows if row[0].text == "a step")
    assert a_step[1].text == a_step[2].text and a_step[3].text.startswith("±0")
    assert any("predicted" in tile.note for tile in page.tiles)
    assert page.kind == "Executed run"


def test_a_run_without_a_simulation_is_simulated_where_there_is_a_simulator(tmp_path: Path) -> None:
    (executed,) = write_runs(tmp_path, executed={})
    sources, options = read_report([as_executed(executed)])
    told = predict(options[0], sources.runs, None)
    assert isinstance(told, str) and f"streamrl compare {executed}`" in told
    found = predict(options[0], sources.runs, simulate_as_recorded)
    assert isinstance(found, Prediction) and found.metrics.world == "simulated"
    stages = {
        name: seconds for name, *seconds in stage_seconds(sources.runs[0].metrics, found.metrics)
    }
    ours, theirs = stages["trainer: training"]
    assert 0 < ours < sources.runs[0].metrics.step_time and 0.5 < theirs / ours < 2


def test_a_prediction_of_other_steps_stands_beside_no_total(tmp_path: Path) -> None:
    (executed,) = write_runs(tmp_path, executed={})
    sources, (option, *_) = read_report([as_executed(executed)])
    prediction = predict(option, sources.runs, simulate_as_recorded)
    assert isinstance(prediction, Prediction) and prediction.metrics.whole_run is not None
    predicted = prediction.metrics.whole_run

    def has_prediction(steps: int) -> bool:
        made = dataclasses.replace(option, whole_run=replace(predicted, steps=steps))
        tiles = tiles_of(made, prediction.metrics)
        return any("predicted" in each.note for each in tiles if each.label == "for the whole run")

    assert has_prediction(predicted.steps)
    assert not has_prediction(2 * predicted.steps), "the other half was before a resume"


def test_a_simulation_with_other_ranks_than_an_executed_run_does_not_predict_it(
    tmp_path: Path,
) -> None:
    asked = resized((4, 2), simulate__max_steps=6)
    planned = replace(asked, trainer=replace(asked.trainer, resize=()))
    for name, trace in (("executed", simulate(asked)), ("simulated", simulate(planned))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.jsonl").write_bytes(trace.encode())
    file = as_executed(tmp_path / "executed") / "trace.jsonl"
    header, _, rest = file.read_bytes().partition(b"\n")
    table = json.loads(header)
    table["run"]["trainer"]["resize"] = []  # the user asked for it while the run was executed
    file.write_bytes(json.dumps(table).encode() + b"\n" + rest)
    sources, options = read_report([tmp_path / "executed", tmp_path / "simulated"])
    (option,) = [each for each in options if each.is_executed]
    found = predict(option, sources.runs, simulate_as_recorded)
    assert isinstance(found, Prediction) and found.source.startswith("a simulation with")
    assert isinstance(predict(option, sources.runs, None), str)


def test_page_and_terminal_judge_a_run_by_the_band_and_say_how_to_measure(tmp_path: Path) -> None:
    (executed,) = write_runs(tmp_path, executed={})
    report = read_report([as_executed(executed)])
    page = make_page(report, simulator=simulate_as_recorded)
    section = section_of(page, "measured")
    prediction = predict(report.options[0], report.sources.runs, simulate_as_recorded)
    assert isinstance(prediction, Prediction)
    predicted, measured = prediction.metrics, report.sources.runs[0].metrics
    word = "within" if is_within_band(predicted, measured) else "outside"
    assert section.text[0].endswith(f"The measured step is {word} the band of the prediction.")
    guess = replace(predicted, tiers={"roofline": 0.3, "composed": 0.7})
    told = measure_first_text(guess, "runs/a")
    assert "streamrl compare runs/a --set costs.profile=profile.toml" in told
    assert measure_first_text(replace(predicted, tiers={"composed": 1.0}), "runs/a") == ""
    (hint,) = [text for text in section.notes if text.startswith("The prediction rests on")] or [""]
    assert hint == measure_first_text(predicted, str(executed))


def test_each_fault_has_what_became_of_it(tmp_path: Path) -> None:
    run = small_run(
        {
            "faults": FAULTS,
            "algorithm.steps": 6,
            "execute.checkpoint_every": 2,
            "trainer.start_time": "1 s",
        }
    )
    incidents = find_incidents(simulate(run))
    replica, trainer = (
        next(each for each in incidents if each.what.startswith(what))
        for what in ("replica ", "trainer lost")
    )
    assert replica.step in (1, 2) and "took over after" in replica.outcome
    assert f"{replica.num_failed} rollouts went on elsewhere" in replica.outcome
    assert len(incidents) == 2, "what failed with a replica or a trainer is no incident of its own"
    assert trainer.step == 4 and "restarted from version 2" in trainer.outcome
    assert "1 step repeated" in trainer.outcome


def test_a_failed_push_or_checkpoint_that_was_repeated_is_told_as_done(tmp_path: Path) -> None:
    kinds = [("link-drops", 1), ("link-drops", 3), ("disk-full", 2)]
    faults = [{"kind": kind, "step": step} for kind, step in kinds]
    run = small_run({"faults": faults, "algorithm.steps": 6, "execute.checkpoint_every": 2})
    found = find_incidents(simulate(run))
    assert {each.what for each in found} == {
        "a push of weights failed, and 1 more time",
        "a checkpoint failed",
    }
    assert all(each.outcome.startswith("repeated, done after ") for each in found)


def test_a_reason_of_a_fault_is_escaped(tmp_path: Path) -> None:
    (executed,) = write_runs(tmp_path, executed={"faults": FAULTS[:1], "algorithm.steps": 4})
    file = as_executed(executed) / "trace.jsonl"
    text = file.read_text()
    assert '"type":"ReplicaLost"' in text
    lines = [
        line.replace('"reason":"', '"reason":"<script>alert(1)</script>', 1)
        if '"type":"ReplicaLost"' in line
        else line
        for line in text.splitlines(keepends=True)
    ]
    file.write_text("".join(lines))
    page = make_page(read_report([executed]))
    html = render_html(page)
    assert "&lt;script&gt;alert(1)" in html and "<script>alert" not in html


def test_words_of_an_executed_page_are_explained_in_visible_text_too(tmp_path: Path) -> None:
    (run,) = write_runs(tmp_path, run={})
    html = render_html(make_page(read_report([as_executed(run)])))
    legend = html.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert 'class="term"' in legend, "figures use words too"
    assert "<dt>underfilled</dt>" in html or "<dt>decode</dt>" in html
    for anchor in re.findall(r'<a class="term" href="#(word-\d+)"', html):
        assert html.count(f'<div id="{anchor}"><dt>') == 1

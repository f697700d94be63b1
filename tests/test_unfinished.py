"""A run that stops before its last step: it is said everywhere, and nothing is ranked by it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import write_run
from streamrl.sim.steady_state import UnfinishedError, measure_steady, simulate_steady
from streamrl.sim.studies.comparison import compare_runs
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_plan import few, planned

FAILING: dict[str, Any] = {
    "algorithm.steps": 50,
    "failures.per_gpu_day": 20_000.0,
    "policies.max_restarts": 2,
    "policies.max_attempts": 10_000,
}
"""Some steps are made before the third replica is lost."""
REASON = "2 replicas were restarted and another was lost (policies.max_restarts)"
HOPELESS = 1e7
"""Failures a GPU-day that no step comes between."""


def failing(changes: dict[str, Any] | None = None) -> Run:
    """Return a run that loses too many replicas."""
    return small_run({**FAILING, **(changes or {})})


def written(run: Run, path: Path) -> Path:
    """Write a run file."""
    write_run(run, path, [])
    return path


def test_a_run_that_loses_too_many_replicas_is_unfinished() -> None:
    metrics = measure_steady(failing())
    assert metrics.unfinished == f"stopped after step {metrics.num_steps} of 50: {REASON}"
    assert metrics.note.startswith(f"the run {metrics.unfinished}")
    assert metrics.whole_run is None
    assert measure(simulate_steady(failing())) == metrics


def test_a_run_that_stops_before_its_first_step_is_unfinished() -> None:
    with pytest.raises(UnfinishedError, match=re.escape(f"stopped after step 0 of 50: {REASON}")):
        measure_steady(failing({"failures.per_gpu_day": HOPELESS}))


def test_a_simulation_that_stops_past_the_last_step_is_finished() -> None:
    made = measure_steady(failing()).num_steps
    metrics = measure_steady(failing({"algorithm.steps": made}))
    assert metrics.unfinished == "" and metrics.whole_run is not None


@pytest.mark.parametrize("rate", [FAILING["failures.per_gpu_day"], HOPELESS])
def test_simulate_says_so_and_exits_with_1(tmp_path: Path, rate: float) -> None:
    path = written(failing({"failures.per_gpu_day": rate}), tmp_path / "run.toml")
    done = streamrl("simulate", path)
    assert done.returncode == 1 and "not finished: the run stopped after step" in done.stderr
    assert "whole run" not in done.stdout
    if rate < HOPELESS:
        assert "NOT FINISHED" in done.stdout
        data = streamrl("simulate", path, "--json")
        figures = json.loads(data.stdout)
        assert data.returncode == 1 and figures["unfinished"].endswith(REASON)
        assert figures["whole_run"] is None


def test_a_study_ranks_what_finishes_and_names_what_does_not(tmp_path: Path) -> None:
    path = written(failing({"simulate.max_steps": 60}), tmp_path / "run.toml")
    sweep = ("--sweep", f"failures.per_gpu_day=0.0,20000.0,{HOPELESS}", "--seeds", "1")
    done = streamrl("simulate", path, *sweep, "-o", tmp_path / "study", "--json")
    assert done.returncode == 1
    assert "2 combinations do not finish and are left out" in done.stderr
    found = json.loads(done.stdout)
    assert [row["values"]["failures.per_gpu_day"] for row in found["rows"]] == ["0.0"]
    left_out = {each["values"]["failures.per_gpu_day"] for each in found["unfinished"]}
    assert left_out == {"20000.0", str(HOPELESS)}
    assert all(REASON in each["reason"] for each in found["unfinished"])
    with (tmp_path / "study" / "study.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 1
    page = streamrl("report", tmp_path / "study", "--markdown", tmp_path / "page.md")
    assert page.returncode == 0 and "does not finish" in (tmp_path / "page.md").read_text()


def test_a_study_of_which_nothing_finishes_fails(tmp_path: Path) -> None:
    path = written(failing(), tmp_path / "run.toml")
    done = streamrl("simulate", path, "--sweep", f"failures.per_gpu_day={HOPELESS}")
    assert done.returncode == 1 and "no combination finishes" in done.stderr


def test_an_unfinished_run_is_set_against_nothing() -> None:
    sound = small_run({"algorithm.steps": 50})
    with pytest.raises(RuntimeError, match=r"B does not finish.* stopped after step"):
        compare_runs(sound, failing())


def test_no_plan_is_chosen_that_does_not_finish() -> None:
    lossy = {"policies.max_restarts": 1, "policies.max_attempts": 10_000, "algorithm.steps": 100}
    pools = {
        "cluster.pools": {
            "h20": {"gpu": "h20", "nodes": 2, "price": 0.5, "spot_failures_per_gpu_day": 50.0},
            "h800": {"gpu": "h800", "nodes": 3, "price": 5.0},
        }
    }
    found = planned(few({**lossy, **pools})).plan
    assert found.allocation.rollout.pool == "h800"
    with pytest.raises(
        RuntimeError, match="no plan that was simulated comes to its end: not finished"
    ):
        planned(few({**lossy, "failures.per_gpu_day": HOPELESS}))


def test_a_report_names_an_unfinished_run_and_takes_another_for_its_answer(tmp_path: Path) -> None:
    for name, run in (("lost", failing()), ("sound", small_run({"algorithm.steps": 50}))):
        streamrl("simulate", written(run, tmp_path / f"{name}.toml"), "-o", tmp_path / name)
    alone = streamrl("report", tmp_path / "lost", "--json")
    assert json.loads(alone.stdout)["answer"].startswith("Not finished: the run stopped after step")
    both = json.loads(streamrl("report", tmp_path / "lost", tmp_path / "sound", "--json").stdout)
    assert both["chosen"] == "B"

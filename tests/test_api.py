"""The names for notebooks and scripts: where they are, and that each is imported when it is asked for."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import api
from streamrl.api import plans
from tests.command_line import streamrl
from tests.test_plan import few, planned

ROOT = Path(__file__).parent.parent
RUN_FILE = ROOT / "examples" / "h20-h800.toml"
SMALL = ["algorithm.prompts_per_step=8", "algorithm.steps=2"]
QUICK = ["simulate.max_steps=2", "workload.lengths.scale=0.05"]
IMPORTED = """
import sys
from streamrl import api
dir(api)
print(*sorted(n for n in sys.modules if n.split(".")[0] == "streamrl"))
print(*sorted({"numpy", "msgspec", "rich", "simpy", "matplotlib", "jinja2"} & set(sys.modules)))
api.load_run
print("streamrl.runfile.files" in sys.modules, "numpy" in sys.modules, "streamrl.sim" in sys.modules)
"""


def test_the_api_imports_a_name_when_it_is_asked_for_and_nothing_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["streamrl streamrl.api", "", "True False False"], (
        done.stderr
    )


def typed_places() -> Iterator[tuple[str, str]]:
    """Yield what the api imports for type checkers: its own name, and where it is."""
    for node in ast.walk(ast.parse(Path(api.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamrl"):
            yield from ((a.asname or a.name, f"{node.module}:{a.name}") for a in node.names)


def test_type_checkers_know_every_name_of_the_api_from_where_it_is() -> None:
    assert dict(typed_places()) == api.PLACES
    assert api.__all__ == sorted(api.PLACES)
    assert set(api.PLACES) <= set(dir(api))


@pytest.mark.parametrize("name", api.PLACES)
def test_every_name_of_the_api_is_where_its_table_says(name: str) -> None:
    found = getattr(api, name)
    assert callable(found) and found.__doc__
    assert f"{found.__module__}:{found.__name__}" == api.PLACES[name]


def test_an_unknown_name_of_the_api_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = api.simulat


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("simulate", [api.load_offer(RUN_FILE)], "simulate: run must be a run, .* 'run'$"),
        ("write_run", [api.load_offer(RUN_FILE), "x.toml"], "write_run: run .* Offer; pass its"),
        ("plan", ["run.toml"], "plan: run must be what load_run or load_offer returns, got .* str"),
        ("sweep", [api.load_offer(RUN_FILE), {}], "sweep: run must be a run, the path"),
        ("load_run", [api.load_run(RUN_FILE)], "load_run: source must be the path .* type Run$"),
        ("load_model", ["qwen2.5-7b"], "load_model: model must be the section model of a run"),
        ("load_jobs", [3], "load_jobs: path must be a path or its text, got a value of type int"),
        ("write_run", [api.load_run(RUN_FILE), None], "write_run: path must be a path or its"),
        ("change_run", [api.load_run(RUN_FILE), 5], "change_run: overrides must be texts 'key="),
        ("measure", ["trace.jsonl"], "measure: trace must be a trace, as simulate or read_trace"),
        ("metrics_table", [3], "metrics_table: metrics must be metrics, as measure returns"),
        ("plan_report", ["plan.json"], "plan_report: plan must be a plan, as read_plan returns it"),
        ("plan_jobs", [{}], "plan_jobs: jobs must be jobs, as load_jobs returns them, got .* dict"),
        ("jobs_report", ["x"], "jobs_report: plan must be a plan of jobs, as plan_jobs returns it"),
        ("bubble_table", [[]], "bubble_table: runs must be a list of idle .* one with no items$"),
        ("bubble_figure", [[3]], "bubble_figure: runs must be a list of idle times, .* with int$"),
        ("bubble_notes", [3, 4], "bubble_notes: before must be idle time, as read_bubbles"),
        (
            "generation_notes",
            [[]],
            "generation_notes: curves must be a list of curves, .* no items",
        ),
        ("study_generation", ["qwen", "h20"], "study_generation: model must be a model, as load_"),
        ("operator_efficiency", [1], "operator_efficiency: gpu must be a text, got .* type int$"),
        ("report", [[]], "report: directories must be a path, or a list of them, got .* no items"),
        (
            "report",
            [[3]],
            "report: directories must be a path, or a list of them, got one with int",
        ),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_with_what_it_must_be(
    name: str, arguments: list[Any], error: str
) -> None:
    with pytest.raises(TypeError, match=error):
        getattr(api, name)(*arguments)


def test_a_number_of_seeds_is_a_whole_number() -> None:
    run = api.load_run(RUN_FILE)
    with pytest.raises(TypeError, match="sweep: seeds must be a whole number, got a value of type"):
        api.sweep(run, {"rollout.replicas": [4]}, seeds="3")  # type: ignore[arg-type]  # a wrong type


def test_each_size_of_an_operator_is_a_number_and_named_by_itself() -> None:
    found = api.operator_efficiency("h20", "gemm", [16, 128], n=37888.0, k=3584)
    assert found.places == [16, 128]
    with pytest.raises(
        TypeError, match=r"operator_efficiency: k must be a number, got .* type str"
    ):
        api.operator_efficiency("h20", "gemm", [16], n=37888.0, k="3584")  # type: ignore[arg-type]  # a wrong type


def test_a_cluster_file_is_named_by_a_path_or_its_text() -> None:
    path = Path(RUN_FILE).parent / "clusters" / "two-jobs.toml"
    assert api.load_jobs(str(path)) == api.load_jobs(path)


def test_the_report_of_a_plan_asks_for_the_plan_of_the_result() -> None:
    made = planned(few(systems=["colocated"], rollout_pools=["h20"], trainer_pools=["h20"]))
    with pytest.raises(TypeError, match=r"of type Planned; pass its attribute 'plan'$"):
        api.plan_report(made)  # type: ignore[arg-type]  # a wrong type


def test_a_plan_takes_what_load_offer_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        plans, "make_plan", lambda run, _, shows_own: asked.append((run, shows_own))
    )
    offer = api.load_offer(RUN_FILE)
    replaced = offer._replace(absent=["rollout.replicas"])
    api.plan(offer)
    api.plan(replaced)
    api.plan(replaced, shows_own=True)
    api.plan(run=offer.run)
    assert asked == [(offer.run, has_layout) for has_layout in (True, False, True, True)]


def test_the_api_goes_from_a_run_file_to_its_figures_and_a_report(tmp_path: Path) -> None:
    trace = api.simulate(api.load_run(RUN_FILE, SMALL))
    (tmp_path / "trace.jsonl").write_bytes(trace.encode())
    assert api.measure(api.read_trace(tmp_path / "trace.jsonl")) == api.measure(trace)
    page = api.report([tmp_path])
    assert page.startswith("<!doctype html>") and tmp_path.name in page
    assert api.report(str(tmp_path)) == page


def test_a_sweep_has_the_rows_of_the_command() -> None:
    quick = [*SMALL, *QUICK]
    told: list[tuple[str, int, int]] = []
    found = api.sweep(
        RUN_FILE,
        {"policies.system": ["stream-sync", "stream-async"], "rollout.replicas": [8, 64]},
        changes=quick,
        skip_infeasible=True,
        watch=lambda *what: told.append(what),
    )
    done = streamrl(
        *("simulate", RUN_FILE, *(text for key in quick for text in ("--set", key)), "--json"),
        *("--sweep", "policies.system=stream-sync,stream-async"),
        *("--sweep", "rollout.replicas=8,64", "--skip-infeasible"),
    )
    rows = json.loads(done.stdout)["rows"]
    frame = found.to_frame()
    assert list(frame["step_time"]) == [row["metrics"]["step_time"]["median"] for row in rows]
    assert list(frame["policies.system"]) == ["stream-sync", "stream-async"]
    assert list(frame["rollout.replicas"]) == [8, 8] and frame["step_time"].min() > 0
    assert told[-1] == ("simulating", 2, 2)
    assert "stream-async" in repr(found) and "\n" not in repr(found)
    assert "<td" in found._repr_html_() and "rollout.replicas=64: " in found._repr_html_()


def test_a_wrong_sweep_names_the_combination_and_no_option() -> None:
    run = api.load_run(RUN_FILE, SMALL)
    with pytest.raises(ValueError, match=r"^sweep rollout.replicas=99: .* 32 GPUs"):
        api.sweep(run, {"rollout.replicas": [8, 99]})


def test_a_trace_and_its_timeline_are_frames() -> None:
    trace = api.simulate(api.load_run(RUN_FILE, [*SMALL, *QUICK]))
    events = trace.to_frame()
    assert len(events) == len(trace.entries) and events["event"].iloc[0] == "RunStarted"
    assert events["time"].is_monotonic_increasing
    timeline = api.read_timeline(trace)
    spans = timeline.to_frame()
    assert {"replica 0", "trainer 0", "link"} <= set(spans["resource"])
    assert spans["end"].max() <= timeline.end and (spans["seconds"] >= 0).all()
    for shown in (trace, trace.run, timeline):
        assert "\n" not in repr(shown) and len(repr(shown)) < 200
        assert shown._repr_html_().startswith("<div>")


def test_a_notebook_shows_texts_and_runs_no_html_of_theirs() -> None:
    run = api.load_run(RUN_FILE, {"model.name": None, "model.path": "<script>alert(1)</script>"})
    assert "<script>" not in run._repr_html_() and "&lt;script&gt;" in run._repr_html_()


def test_metrics_are_frames_of_steps_stages_and_figures() -> None:
    metrics = api.measure(api.simulate(api.load_run(RUN_FILE, [*SMALL, *QUICK])))
    steps = metrics.to_frame()
    assert list(steps["seconds"]) == metrics.step_times
    first, last = metrics.counted_steps
    assert list(steps.loc[steps["counts"], "step"]) == [*range(first, last + 1)]
    stages = metrics.to_frame("stages").groupby("side")["share"].sum()
    assert set(stages.index) == {"rollout", "trainer"} and stages.values == pytest.approx(1)
    figures = metrics.to_frame("figures").set_index("figure")
    whole, band = metrics.whole_run, metrics.step_time_band
    assert whole is not None and band is not None
    assert figures.loc["whole_run.dollars", "value"] == whole.dollars
    assert figures.loc["whole_run.wall_time", "value"] == whole.wall_time
    assert list(figures.loc["step_time", ["low", "high"]]) == [band.low, band.high]
    with pytest.raises(ValueError, match="'figures', got 'step'"):
        metrics.to_frame("step")  # type: ignore[arg-type]  # a wrong name


def test_metrics_tell_cost_and_time_with_the_band_of_the_command() -> None:
    changes = [*SMALL, *QUICK]
    metrics = api.measure(api.simulate(api.load_run(RUN_FILE, changes)))
    settings = [text for key in changes for text in ("--set", key)]
    told = " ".join(streamrl("simulate", RUN_FILE, *settings).stdout.split())
    shown = dict(metrics.summary())
    for name in ("cost", "time", "million tokens"):
        assert shown[name] in told and shown[name] in metrics._repr_html_(), name
    assert shown["cost"] in repr(metrics) and "\n" not in repr(metrics)
    error = metrics.model_error
    assert error is not None and error.note in metrics._repr_html_()


def test_two_runs_are_a_frame_of_figures_with_their_difference() -> None:
    run = api.load_run(RUN_FILE, [*SMALL, *QUICK])
    against = api.compare_runs(run, api.change_run(run, {"policies.system": "stream-sync"}))
    frame = against.to_frame().set_index("figure")
    assert frame.loc["step_time", "a"] == against.a.step_time
    difference = frame.loc["step_time", "a"] - frame.loc["step_time", "b"]
    assert frame.loc["step_time", "difference"] == pytest.approx(difference)
    assert repr(against).startswith("<A against B: step time -")
    assert against.outcome in against._repr_html_()


def test_a_rerun_is_a_frame_of_three_runs(tmp_path: Path) -> None:
    trace = api.simulate(api.load_run(RUN_FILE, [*SMALL, *QUICK]))
    file = tmp_path / "trace.jsonl"
    file.write_bytes(trace.encode())
    again = api.rerun(trace, file, ["policies.order=fifo"])
    frame = again.to_frame().set_index("figure")
    assert list(frame.columns) == ["recorded", "as_it_was", "changed"]
    assert frame.loc["step_time", "recorded"] == again.recorded.step_time
    assert "policies.order=fifo" in repr(again) and "<td" in again._repr_html_()

"""What-if studies: how grids are read and checked, what is simulated, and the ready-made ones."""

from __future__ import annotations

import csv
import json
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from streamrl.cli.simulate_sweep import _interruption, make_study, run_study
from streamrl.record.metrics import RATIOS, measure
from streamrl.report.pictures.study_chart import study_picture
from streamrl.report.study_file import Study, is_study, load_study
from streamrl.report.study_report import StudyResult, describe, read_study, write_study
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run, decode_run, encode_run, load_run
from streamrl.runfile.sweep import Axis, Grid, make_grid, parse_axis
from streamrl.sim.parallel import spread_over
from streamrl.sim.steady_state import simulate_steady
from streamrl.sim.studies.finished_jobs import FINISHED, FinishedJobs
from streamrl.sim.studies.results import StudyRow
from streamrl.sim.studies.sweep import SIMULATING, run_sweep
from tests.command_line import streamrl

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN = EXAMPLES / "h20-h800.toml"
LOAD = partial(load_run, RUN)
SMALL = ("algorithm.prompts_per_step=64", "simulate.max_steps=3", "workload.lengths.scale=0.1")
STUDIES = sorted((EXAMPLES / "studies").glob("*.toml"))
QUICK = [argument for key in SMALL for argument in ("--set", key)]


class OneThread(ThreadPoolExecutor):
    """A pool without processes, so that a test may count the jobs that begin."""

    _processes: ClassVar[dict[int, Any]] = {}


# Reading an axis ----------------------------------------------------------------------------------


def test_an_axis_has_a_key_and_the_values_that_set_would_take() -> None:
    axis = parse_axis("cluster.links.0.bandwidth=1 Gbps, 10 Gbps,0.1 Tbps")
    assert axis.keys == ("cluster.links.0.bandwidth",)
    assert axis.points == (("1 Gbps",), ("10 Gbps",), ("0.1 Tbps",))
    assert axis.places == [0.125e9, 1.25e9, 12.5e9]
    assert axis.overrides(1) == ["cluster.links.0.bandwidth=10 Gbps"]


def test_keys_that_change_side_by_side_share_an_axis() -> None:
    axis = parse_axis("rollout.replicas=8,16; trainer.data_parallel=4,2")
    assert axis.overrides(1) == ["rollout.replicas=16", "trainer.data_parallel=2"]
    assert axis.point_labels == ("8 / 4", "16 / 2")
    assert axis.title == "rollout.replicas and trainer.data_parallel"


def test_quotes_and_brackets_keep_their_commas() -> None:
    axis = parse_axis("""a.b="x,y",'z;=',[1,2],plain,"[,'\"""")
    assert [point[0] for point in axis.points] == ['"x,y"', "'z;='", "[1,2]", "plain", '"[,\'"']
    assert axis.point_labels == ("x,y", "z;=", "[1,2]", "plain", "[,'")


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("a=1,2,4", "linear"),
        ("a=1,4,16", "log"),
        ("a=0,4,16", "linear"),
        ("a=4,1,16", "even"),
        ("a=x,y", "even"),
        ("a=1 s,5 min", "log"),
        ("a=true,false", "even"),
    ],
)
def test_an_axis_is_drawn_as_its_values_suggest(text: str, scale: str) -> None:
    assert parse_axis(text).drawn_as == scale


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout.replicas", "'rollout.replicas' must read key=value,value"),
        ("=1,2", "'=1,2' must read key=value,value"),
        ("a=1,,2", "a=1,,2 has an empty value"),
        ("a=", "a= has an empty value"),
        ("a=1,2,1", "has a=1 twice"),
        ("a=1,2; b=1", "got 2 of a and 1 of b"),
        ("a=1,2; a=3,4", "names a twice"),
        ('a="1,2', '" is missing at the end'),
        ("a=[1,2", "] is missing at the end"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_quoted_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_axis(text)
    assert words in str(error.value) and str(error.value).startswith("--sweep")


def test_labels_fit_the_points() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 points"):
        parse_axis("a=1,2", labels=["one"])
    with pytest.raises(ValueError, match="two points have the same label"):
        parse_axis("a=1,2", labels=["one", "one"])


# The grid -----------------------------------------------------------------------------------------


def axes(*texts: str) -> tuple[Axis, ...]:
    return tuple(parse_axis(text) for text in texts)


def test_the_grid_is_the_product_and_each_run_what_set_makes_of_it() -> None:
    grid = make_grid(LOAD, SMALL, axes("rollout.replicas=8,16", "sync.mode=full,lora,delta"))
    assert [cell.place for cell in grid.cells] == [(a, b) for a in (0, 1) for b in (0, 1, 2)]
    for cell in grid.cells:
        changes = [f"{key}={value}" for key, value in grid.values(cell.place).items()]
        assert cell.run == load_run(RUN, [*SMALL, *changes])


def test_an_impossible_combination_is_named_or_kept_apart_with_its_reason() -> None:
    swept = axes("rollout.replicas=16,64", "sync.mode=full,lora")
    with pytest.raises(
        ValueError, match=r"--sweep rollout\.replicas=64, sync.mode=full: pool 'h20' has 32"
    ):
        make_grid(LOAD, SMALL, swept)
    grid = make_grid(LOAD, SMALL, swept, skips=True)
    assert [cell.place for cell in grid.cells] == [(0, 0), (0, 1)]
    assert [refused.place for refused in grid.refused] == [(1, 0), (1, 1)]
    assert all("has 32 GPUs" in refused.reason for refused in grid.refused)


def test_what_only_costs_and_memory_refuse_is_found_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "streamrl.sim.studies.sweep._measure", None
    )  # would be called by a simulation
    grid = make_grid(LOAD, SMALL, axes("model.name=qwen2.5-7b,qwen2.5-72b"))
    assert len(grid.cells) == 2
    with pytest.raises(ValueError, match=r"--sweep model.name=qwen2.5-72b: .*145.4 GB"):
        run_sweep(grid, 1)


def test_ctrl_c_leaves_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def look(run: bytes) -> str:
        looked_at.append(run)
        time.sleep(0.02)
        return ""

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl.sim.studies.sweep._find_fault", look)
    monkeypatch.setattr("streamrl.sim.parallel.ProcessPoolExecutor", lambda **options: OneThread(1))
    grid = make_grid(LOAD, SMALL, axes("rollout.max_running=" + ",".join(map(str, range(1, 41)))))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, 1, watch=interrupt)
    assert len(looked_at) < 10 < len(grid.cells)


def test_skipping_leaves_out_what_memory_refuses_and_stops_where_nothing_is_left() -> None:
    grid = make_grid(LOAD, SMALL, axes("model.name=qwen2.5-7b,qwen2.5-72b"))
    kept, rows = run_sweep(grid, 1, skips=True)
    assert [row.place for row in rows] == [(0,)] == [cell.place for cell in kept.cells]
    assert "145.4 GB" in kept.refused[0].reason
    grid = make_grid(LOAD, SMALL, axes("rollout.replicas=64,128"), skips=True)
    with pytest.raises(
        ValueError, match=r"no combination can be simulated; rollout\.replicas=64: "
    ):
        run_sweep(grid, 1, skips=True)


def test_an_error_of_the_run_file_itself_blames_no_combination() -> None:
    with pytest.raises(ValueError, match=r"^trainer\.pool 'nowhere'"):
        make_grid(LOAD, ["trainer.pool=nowhere"], axes("rollout.replicas=8,16"))


@pytest.mark.parametrize(
    ("overrides", "swept", "words"),
    [
        (["rollout.replicas=4"], ["rollout.replicas=8,16"], "rollout.replicas: --set also sets it"),
        ([], ["sync.mode=full", "sync.mode=lora"], "sync.mode: another --sweep also sets it"),
        ([], ["seed=1,2"], "seeds are not an axis"),
        ([], ["rollout.replicsa=1,2"], "rollout.replicsa=1: rollout.replicsa is not a key"),
        ([], ["cluster.links.0.bandwidth=80"], "bandwidth=80: .*'80 Gbps'"),
    ],
)
def test_a_wrong_key_or_value_is_named(overrides: list[str], swept: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_grid(LOAD, overrides, axes(*swept))


# What is simulated --------------------------------------------------------------------------------


def small_study(*texts: str, num_seeds: int = 2, skips: bool = False) -> StudyResult:
    study = Study(run_file=RUN, title="t", overrides=SMALL, axes=axes(*texts), num_seeds=num_seeds)
    grid = make_grid(LOAD, SMALL, study.axes, skips=skips)
    grid, rows = run_sweep(grid, num_seeds, skips=skips)
    return StudyResult(study, grid, rows)


def test_every_row_is_what_its_run_and_seed_give_alone() -> None:
    report = small_study("policies.system=stream-sync,stream-async", "rollout.replicas=8,16")
    assert [(row.place, row.seed) for row in report.rows] == [
        ((a, b), seed) for a in (0, 1) for b in (0, 1) for seed in (0, 1)
    ]
    for row in report.rows[::3]:
        changes = [f"{key}={value}" for key, value in report.grid.values(row.place).items()]
        alone = measure(simulate_steady(load_run(RUN, [*SMALL, *changes, f"seed={row.seed}"])))
        assert row.figures["step_time"] == alone.step_time
        assert row.figures["cost_per_million_tokens"] == alone.cost_per_million_tokens
        shares = [v for name, v in row.figures.items() if name.startswith(("busy.", "idle."))]
        assert sum(shares) == pytest.approx(1.0)


def test_a_study_leaves_rows_findings_and_a_figure_for_each_metric(tmp_path: Path) -> None:
    report = small_study("rollout.replicas=8,16; trainer.data_parallel=4,2", "sync.mode=full,lora")
    figures = write_study(report, tmp_path)
    with (tmp_path / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert list(rows[0])[:4] == ["rollout.replicas", "trainer.data_parallel", "sync.mode", "seed"]
    assert [float(row["step_time"]) for row in rows] == pytest.approx(
        [row.figures["step_time"] for row in report.rows]
    )
    data = json.loads((tmp_path / "study.json").read_bytes())
    assert data == json.loads(json.dumps(describe(report)))
    assert data["finding"] == data["findings"]["step_time"] == report.finding("step_time")
    found = data["rows"][1]["metrics"]["step_time"]
    assert found["least"] <= found["median"] <= found["most"]
    assert found["band"]["low"] < found["least"] and found["most"] < found["band"]["high"]
    assert [path.name for path in figures] == ["step_time.png", "cost_per_million_tokens.png"]
    assert all(path.stat().st_size > 10_000 for path in figures)


def test_the_report_draws_of_a_study_what_its_figures_show(tmp_path: Path) -> None:
    sweeps = ("rollout.replicas=4,8,64", "sync.mode=full,lora")
    report = small_study(*sweeps, skips=True)
    assert report.grid.refused
    write_study(report, tmp_path)
    recorded = read_study(tmp_path / "study.csv", "study")
    for metric in report.study.metrics:
        assert recorded.table(metric).spreads == report.table(metric).spreads
        drawn, again = (
            study_picture("study", each.table(metric), "title", "") for each in (report, recorded)
        )
        assert drawn == again


# The command --------------------------------------------------------------------------------------


def test_a_sweep_shows_bands_and_sampling_error_only_on_request() -> None:
    sweep = ["--sweep", "rollout.replicas=8,16", "--seeds", "2", *QUICK]
    short = streamrl("simulate", RUN, *sweep, "--set", "simulate.max_steps=12")
    assert short.returncode == 0, short.stderr
    assert "±" not in short.stdout and "brackets hold bands" in short.stdout
    rows = [line for line in short.stdout.splitlines() if re.match(r"(8|16) ", line)]
    for row in rows:
        assert re.fullmatch(
            r"\d+ +[\d.]+ s \([\d.]+ to [\d.]+\) +\$[\d.]+ \([\d.]+ to [\d.]+\)", row
        )
    both = streamrl("simulate", RUN, *sweep, "--set", "simulate.max_steps=12", "--intervals")
    more = [line for line in both.stdout.splitlines() if re.match(r"(8|16) ", line)]
    assert len(rows) == len(more) == 2
    assert all(row.count("±") == 2 and row.count(" to ") == 2 for row in more)


def test_the_command_sweeps_and_prints_what_scripts_rely_on(tmp_path: Path) -> None:
    sweeps = ["--sweep", "rollout.replicas=8,64", "--sweep", "sync.mode=full,lora"]
    options = ["--seeds", "1", "--metric", "goodput", "--skip-infeasible", "--json"]
    done = streamrl("simulate", RUN, *QUICK, *sweeps, *options, "-o", tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert [row["values"] for row in found["rows"]] == [
        {"rollout.replicas": "8", "sync.mode": mode} for mode in ("full", "lora")
    ]
    assert len(found["refused"]) == 2 and list(found["findings"]) == ["goodput"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "goodput.png",
        "results.json",
        "study.csv",
        "study.json",
    ]


STUDY = EXAMPLES / "studies" / "bandwidth.toml"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([RUN, "--sweep", "rollout.replicas=8,64"], ["rollout.replicas=64", "32 GPUs"]),
        ([RUN, "--sweep", "model.name=qwen2.5-72b"], ["model.name=qwen2.5-72b", "145.4 GB"]),
        ([RUN, "--sweep", "rollout.replicas=8", "--metric", "goodputt"], ["goodputt", "goodput"]),
        ([RUN, "--sweep", "rollout.replicas=8", "--seeds", "0"], ["--seeds", "0"]),
        ([RUN, "--seeds", "2"], ["--seeds", "--sweep"]),
        ([RUN, "--seeds", "0"], ["--seeds", "--sweep"]),
        ([RUN, "--skip-infeasible"], ["--skip-infeasible", "--sweep"]),
        (["nowhere.toml", "--sweep", "rollout.replicas=8"], ["nowhere.toml"]),
        ([STUDY, "--sweep", "rollout.replicas=8"], ["rollout.replicas=8", "bandwidth.toml"]),
        ([STUDY, "--set", "sync.mode=full"], ["sync.mode", "--set"]),
    ],
)
def test_wrong_studies_get_one_line_and_exit_status_2_and_write_nothing(
    arguments: list[str | Path], words: list[str], tmp_path: Path
) -> None:
    done = streamrl("simulate", *arguments, "-o", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "out").exists()


# Study files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('titel = "x"', "titel is no key of a study file; did you mean title?"),
        ("seeds = 0", "--seeds must be from 1 to 10,000, got 0"),
        ("seeds = 1_000_000_000", "--seeds must be from 1 to 10,000, got 1000000000"),
        ('metrics = ["speed"]', "'speed' is none"),
        ("metrics = []", "metrics is empty"),
        ('finding = { kind = "worst" }', "worst"),
        ('finding = { kind = "crossover" }', "second axis"),
        ('finding = { kind = "knee", tolerance = 2 }', "tolerance must be in [0, 1), got 2"),
        ('[[axis]]\nsweep = "a"', "'a' must read key=value"),
        ('[[axis]]\nsweep = "a=1"\nlabel = "x"', "label is no key of a study file"),
    ],
)
def test_a_wrong_study_file_is_named_with_its_key(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        f'run = "r.toml"\ntitle = "t"\n{line}\n[[axis]]\nsweep = "rollout.replicas=1,2"\n'
    )
    assert is_study(path)
    with pytest.raises(ValueError) as error:
        load_study(path)
    assert str(error.value).startswith(str(path)) and words in str(error.value)


def test_there_is_a_study_for_each_question() -> None:
    assert {path.stem for path in STUDIES} == {
        *("gpu-split", "generation-gpu", "systems", "bandwidth", "prices", "output-length"),
        *("ranker-recall", "ranker-value", "rollouts-per-step", "failures", "precision", "scale"),
    }


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_ready_made_study_checks_runs_shortened_and_finds_something(
    path: Path, tmp_path: Path
) -> None:
    """Shortened: two points of each axis, two small steps, one seed; all points are checked."""
    study = load_study(path)
    assert study.question.endswith("?")
    assert len(make_grid(partial(load_run, study.run_file), study.overrides, study.axes).cells) > 2
    ends = tuple(_ends(axis) for axis in study.axes)
    quick = (*study.overrides, "simulate.max_steps=2")
    swept = {key for axis in study.axes for key in axis.keys}
    if "algorithm.prompts_per_step" not in swept:
        quick = (*quick, "algorithm.prompts_per_step=64")
    else:
        quick = (*quick, "algorithm.group_size=2")
    grid, rows = run_sweep(make_grid(partial(load_run, study.run_file), quick, ends), 1)
    report = StudyResult(replace(study, axes=ends, num_seeds=1), grid, rows)
    write_study(report, tmp_path)
    for metric in study.metrics:
        assert report.finding(metric).endswith(".")
        assert (tmp_path / f"{metric}.png").stat().st_size > 10_000


def _ends(axis: Axis) -> Axis:
    """Keep the first and the last point, or the second one if steps grow along the axis."""
    last = 1 if "algorithm.prompts_per_step" in axis.keys else -1
    labels = (axis.labels[0], axis.labels[last]) if axis.labels else ()
    return replace(axis, points=(axis.points[0], axis.points[last]), labels=labels)


# Studies that continue ----------------------------------------------------------------------------


def test_a_study_that_was_interrupted_repeats_only_what_had_not_finished(tmp_path: Path) -> None:
    file = tmp_path / FINISHED
    grid = make_grid(LOAD, SMALL, axes("rollout.replicas=8,16"))
    whole = run_sweep(grid, 2, finished=file)[1]
    *kept, cut = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept) + cut[:-9])
    begun: list[tuple[str, int, int]] = []
    continued = run_sweep(grid, 2, watch=lambda *told: begun.append(told), finished=file)[1]
    assert repr(continued) == repr(whole)  # NaN is not equal to itself
    assert [told for told in begun if told[0] == "simulating"] == [("simulating", 1, 1)]
    assert sorted(file.read_bytes().splitlines(keepends=True)) == sorted([*kept, cut])


INPUTS = {
    "lengths.csv": "output_tokens\n100\n200\n",
    "prompts.jsonl": '{"prompt": "p", "answer": "a"}\n',
    "own_dispatch.py": "from own_base import LastReplica\n",
    "own_base.py": """
from streamrl.engine.policies.dispatch import Dispatch

class LastReplica(Dispatch):
    def choose(self, state, rollout):
        return state.fleet.fresh(rollout.group.oldest_version)[-1]
""",
}
"""Files that the run of `study_inputs` names, and one that the code of these imports."""
FIGURES = {**dict.fromkeys(RATIOS, 1.0), "step_time_low": math.nan}
ROW = StudyRow(place=(), seed=0, figures=FIGURES)


@pytest.fixture
def study_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return an encoded run that reads `INPUTS` in `tmp_path`."""
    for name, text in INPUTS.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {
        "workload.lengths": {"kind": "empirical", "source": str(tmp_path / "lengths.csv")},
        "workload.prompts": str(tmp_path / "prompts.jsonl"),
        "verifier.scorer": "exact",
        "policies.dispatch": "own_dispatch:LastReplica",
    }
    return encode_run(LOAD(changes))


def test_finished_simulations_are_reused_for_the_same_run_file_and_code(
    tmp_path: Path, study_inputs: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other, third = (encode_run(replace_seed(study_inputs, seed)) for seed in range(3))
    first = FinishedJobs(tmp_path / FINISHED)
    assert first.missing([run, other, run]) == [run, other]
    first.add(run, ROW)
    first.add(other, "does not finish")
    jobs = FinishedJobs(tmp_path / FINISHED)
    assert jobs.missing([run, other, third]) == [third]
    found = jobs.find(run)
    assert isinstance(found, StudyRow) and math.isnan(found.figures["step_time_low"])
    assert jobs.find(other) == "does not finish"
    monkeypatch.setattr("streamrl.sim.studies.finished_jobs._digest_of_package", lambda: b"")
    assert jobs.missing([run]) == [run]


def replace_seed(run: bytes, seed: int) -> Run:
    return msgspec.structs.replace(decode_run(run), seed=seed)


@pytest.mark.parametrize("name", INPUTS)
def test_simulations_of_changed_input_files_are_done_again(
    name: str, tmp_path: Path, study_inputs: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = FinishedJobs(tmp_path / FINISHED)
    first.missing([study_inputs])
    first.add(study_inputs, ROW)
    assert not FinishedJobs(tmp_path / FINISHED).missing([study_inputs]) and not caplog.text
    (tmp_path / name).write_text(INPUTS[name] + "\n")
    jobs = FinishedJobs(tmp_path / FINISHED)
    assert jobs.missing([study_inputs]) == [study_inputs]
    assert f"1 finished simulations in {tmp_path / FINISHED} had other input files" in caplog.text


def test_an_input_file_that_changes_during_a_study_ends_it(
    tmp_path: Path, study_inputs: bytes
) -> None:
    jobs = FinishedJobs(tmp_path / FINISHED)
    jobs.missing([study_inputs])
    (tmp_path / "lengths.csv").write_text("output_tokens\n300\n")
    with pytest.raises(ValueError, match="changed while it was simulated"):
        jobs.add(study_inputs, ROW)
    assert not (tmp_path / FINISHED).exists()


def test_a_continued_study_has_no_rows_of_other_lengths(tmp_path: Path) -> None:
    file, lengths = tmp_path / FINISHED, tmp_path / "lengths.csv"
    lengths.write_text("output_tokens\n100\n200\n")
    changes = {
        "workload.lengths": {"kind": "empirical", "source": str(lengths)},
        "algorithm.prompts_per_step": 8,
        "simulate.max_steps": 2,
    }
    grid = make_grid(partial(load_with, changes), (), axes("rollout.max_running=8,16"))
    with spread_over(partial(OneThread, 1)):
        run_sweep(grid, 1, finished=file)
        first, _ = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(first)
        lengths.write_text("output_tokens\n600\n1200\n")
        continued = run_sweep(grid, 1, finished=file)[1]
        assert repr(continued) == repr(run_sweep(grid, 1)[1])


def load_with(changes: dict[str, Any], overrides: Sequence[str]) -> Run:
    return change_run(LOAD(changes), overrides)


@pytest.mark.parametrize(
    "line", ["garbage", '["run", "inputs"]', '["run", "inputs", {"seed": 1}]', "[" * 99_999, "\xff"]
)
def test_a_damaged_line_of_finished_simulations_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / FINISHED
    file.write_bytes(b'["run", "inputs", "does not finish"]\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"{file}: line 2 is no finished simulation: .*Remove"):
        FinishedJobs(file)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("step_time", 0.0, "figures.step_time is 0.0: Expected `float` > 0.0"),
        ("step_time", 1e308, "figures.step_time is 1e"),
        ("step_time_low", 1e308, "figures.step_time_low is 1e"),
        ("cost_per_step", math.nan, "figures.cost_per_step is nan"),
        ("num_gpus", -1, "figures.num_gpus is -1: Expected `float` >= 0.0"),
        ("goodput", None, "figures.goodput is missing"),
    ],
)
def test_a_figure_out_of_range_is_no_finished_simulation(
    name: str, value: float | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / FINISHED
    figures = {key: each for key, each in {**FIGURES, name: value}.items() if each is not None}
    row = {"place": [], "seed": 0, "figures": figures}
    file.write_text(json.dumps(["run", "inputs", row]) + "\n")
    with pytest.raises(
        ValueError, match=re.escape(f"{file}: line 1 is no finished simulation: {says}")
    ):
        FinishedJobs(file)


@pytest.mark.parametrize("has_output", [True, False])
def test_an_interrupted_study_says_what_has_finished_and_how_to_go_on(
    has_output: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(grid: Grid, seeds: int, **options: Any) -> None:
        options["watch"]("checking", 2, 2)
        options["watch"](SIMULATING, 3, 8)
        if output is not None:
            output.mkdir()
            (output / FINISHED).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl.cli.simulate_sweep.run_sweep", interrupted)
    study = make_study(RUN, ["rollout.replicas=8,16"], (), None, ())
    output = tmp_path / "out" if has_output else None
    then = "kept in" if has_output else "with --output DIR, an interrupted study keeps"
    with pytest.raises(KeyboardInterrupt, match=f"^3 of 8 simulations were finished; .*{then}"):
        run_study(study, output, None, skips=False, as_json=False, intervals=False)


def test_an_interrupted_study_without_results_says_that_nothing_is_kept(tmp_path: Path) -> None:
    said = _interruption(0, 10, tmp_path / "made" / "finished.jsonl")
    assert said == "0 of 10 simulations were finished; nothing is kept"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_a_signal_ends_says_one_line_with_what_is_kept(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(grid: Grid, seeds: int, **options: Any) -> None:
        options["watch"](SIMULATING, 3, 4)
        (tmp_path / "out" / FINISHED).touch()
        signal.raise_signal(number)

    monkeypatch.setattr("streamrl.cli.simulate_sweep.run_sweep", interrupted)
    words = ("simulate", RUN, *QUICK, "--sweep", "rollout.replicas=8,16")
    done = streamrl(*words, "-o", tmp_path / "out")
    what = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "terminated"}[number]
    assert done.returncode == 128 + number and done.stdout == ""
    assert done.stderr == (
        f"streamrl: {what}: 3 of 4 simulations were finished; they are kept in {tmp_path / 'out' / FINISHED}, "
        "and the same command continues after them\n"
    )

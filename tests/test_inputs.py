"""A directory of a run stands alone: moved, with nothing left where the run was made, it says the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.cli.compare import compare
from streamrl.cli.plan import plan
from streamrl.cli.replay import replay
from streamrl.cli.simulate import simulate as simulate_command
from streamrl.engine.trace import read_trace
from streamrl.hardware.measured_profile import write_measured
from streamrl.record.run_directory import kept_names, read_inputs, with_kept_inputs
from streamrl.report.page.options import make_options
from streamrl.report.page.page import make_page, read_report, render_markdown
from streamrl.report.page.sources import read_sources
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, write_run
from streamrl.runfile.paths import paths_of
from streamrl.runfile.result_files import write_files
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.steady_state import simulate_steady
from tests.command_line import streamrl
from tests.measured_profile import make_profile, measured_run, model_directory
from tests.report_directories import simulate_plan
from tests.test_execute import execute
from tests.test_plan import few

LENGTHS = "output_tokens\n" + "\n".join(str(8 + 5 * n % 40) for n in range(60)) + "\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs are made, with a model, its profile, lengths and prompts; the working directory."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.chdir(path)
    model_directory(path / "small")
    write_measured(make_profile(path / "small"), path / "profile.toml")
    (path / "lengths.csv").write_text(LENGTHS)
    (path / "prompts.jsonl").write_text('{"prompt": "p", "answer": "odd"}\n' * 7)
    return path


def local_run(**changes: object) -> Run:
    """Return a run of relative paths."""
    return measured_run(
        Path("small"),
        Path("profile.toml"),
        workload__lengths__kind="empirical",
        workload__lengths__source="./lengths.csv",
        workload__prompts="prompts.jsonl",
        verifier__scorer="exact",
        execute__output="run",
        **changes,
    )


def moved(home: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move a directory elsewhere and remove all that it was made from."""
    away = home.parent / "away"
    away.mkdir()
    (home / name).rename(away / name)
    monkeypatch.chdir(away)
    shutil.rmtree(home)
    return Path(name)


def told(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what report, replay and compare say of an executed run."""
    page = render_markdown(make_page(read_report([directory])))
    capsys.readouterr()
    replay([directory / "trace.jsonl"], as_json=True)
    replayed = capsys.readouterr().out.partition("events")[2]
    compare(directory, as_json=True)
    return [page, replayed, capsys.readouterr().out]


def test_an_executed_run_says_the_same_where_its_directory_is_moved(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(local_run())
    before = told(Path("run"), capsys)
    assert "post-train small" in before[0] and '"is_identical":true' in before[1]
    assert told(moved(home, "run", monkeypatch), capsys) == before


def test_a_simulation_says_the_same_where_its_directory_is_moved(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(local_run(), Path("run.toml"))
    simulate_command(Path("run.toml"), output=Path("what-if"), as_json=True)
    recorded = Path("what-if/trace.jsonl").read_bytes()
    assert recorded == simulate_steady(load_run(Path("run.toml"))).encode()
    before = render_markdown(make_page(read_report([Path("what-if")])))
    directory = moved(home, "what-if", monkeypatch)
    assert render_markdown(make_page(read_report([directory]))) == before
    trace = read_trace(directory / "trace.jsonl")
    assert simulate_steady(with_kept_inputs(trace.run, directory)).entries == trace.entries


def test_a_plan_and_its_simulation_are_one_option_where_their_directory_is_moved(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {"kind": "empirical", "source": "./lengths.csv"}
    workload = {"lengths": lengths, "prompts": "prompts.jsonl"}
    verifier = {"scorer": "exact"}
    offer = few(
        {
            "model": {"path": "small"},
            "workload": workload,
            "verifier": verifier,
            "simulate.max_steps": 2,
        }
    )
    write_run(offer, Path("offer.toml"))
    plan(Path("offer.toml"), ["plan.finalists=1"], Path("plan"), as_json=True)
    simulate_plan(Path("plan"))
    before = make_page(read_report([Path("plan")]))
    directory = moved(home, "plan", monkeypatch)
    assert [o.kind for o in make_options(read_sources([directory])) if o.run] == ["plan"]
    assert make_page(read_report([directory])).answer == before.answer


def keep_inputs(paths: Mapping[str, str], directory: Path) -> None:
    """Copy the input files of a run into its directory, as each command does that writes one."""
    write_files({directory / name: data for name, data in read_inputs(paths, directory).items()})


def test_what_was_kept_has_the_same_name_wherever_it_is_and_another_where_it_differs(
    home: Path,
) -> None:
    run = local_run()
    for directory in (Path("a"), Path("b")):
        keep_inputs(paths_of(run), directory)
        keep_inputs(
            paths_of(with_kept_inputs(run, directory)), directory
        )  # from itself: nothing to copy
    assert kept_names(paths_of(run), Path("a")) == kept_names(paths_of(run), Path("b"))
    assert set(kept_names(paths_of(run), Path("a"))) == {
        *("model.path", "costs.profile", "workload.lengths.source")
    }
    Path("b/inputs/workload.lengths.source/lengths.csv").write_text(LENGTHS + "9\n")
    names = [kept_names(paths_of(run), Path(name))["workload.lengths.source"] for name in "ab"]
    assert names[0] != names[1] and all(name.startswith("lengths.csv (") for name in names)


def test_a_run_goes_on_with_the_costs_that_it_began_with(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its policies reckon with the same seconds, though another profile may lie where its own did."""
    run = local_run(policies__dispatch="skewness-aware")
    began = fill_policies(run, Costs.load(run)).policies.latency
    keep_inputs(paths_of(run), Path("run"))
    measured = make_profile(home / "small")
    other = [replace(row, seconds=[2 * one for one in row.seconds]) for row in measured.decode]
    write_measured(replace(measured, decode=other), Path("profile.toml"))
    write_run(run, Path("run.toml"))
    seen: list[Run] = []

    def see(run: Run, *others: object) -> None:
        seen.append(run)
        raise RuntimeError("seen")

    monkeypatch.setattr("streamrl.executor.execute.execute", see)
    for how in ((), ("--resume",)):
        assert streamrl("execute", "run.toml", *how).returncode == 1
    anew, on = (run.policies.latency for run in seen)
    assert began is not None and on == began != anew


def test_a_run_that_kept_nothing_is_read_where_it_was(home: Path) -> None:
    run = local_run()
    assert with_kept_inputs(run, Path("nowhere")) == run and not kept_names(
        paths_of(run), Path("nowhere")
    )

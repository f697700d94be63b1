"""The paper's evaluation in simulation: its numbers, its runs, and the page about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.fidelity.cases import BATCH, GPUS, LENGTHS, MODELS, SYSTEMS, Case, make_case
from sim.fidelity.figures import constants
from sim.fidelity.paper import load_paper
from streamrl.cli.main import app
from streamrl.fidelity import Cell, PaperFigure, fidelity_page
from streamrl.memory import check_memory

RUNNER = CliRunner()
FIGURE = PaperFigure(
    name="Figure 0",
    title="two cells",
    unit="samples/s",
    cells=[Cell(label="a", paper=2.0, ours=2.2), Cell(label="b", paper=4.0, ours=2.0)],
    target="mean error at most 15 %",
    is_met=False,
)


def test_the_papers_own_ratios_follow_from_its_throughputs() -> None:
    paper = load_paper()
    colocated, sync, one_step = paper.throughput["20K 72B"][1:]
    _, _, with_streaming, asynchronous = paper.ablation["72B"]
    assert sync / colocated == pytest.approx(with_streaming, abs=0.005)
    assert one_step / colocated == pytest.approx(asynchronous, abs=0.005)
    assert len(paper.throughput) == len(LENGTHS) * len(MODELS)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("size", MODELS)
def test_every_run_of_the_paper_fits_its_gpus(size: str, system: str) -> None:
    run = make_case(Case(size, "20K", system))
    check_memory(run)
    assert run.num_gpus == GPUS[size]
    assert run.algorithm.rollouts_per_step == BATCH


def test_only_the_decode_curve_and_the_lengths_are_calibrated() -> None:
    assert [name for name, _, _ in constants()] == [
        "overhead of a layer",
        "overhead of a rollout",
        "output lengths",
    ]


def test_errors_are_relative_to_the_paper() -> None:
    assert FIGURE.mape == pytest.approx((0.1 + 0.5) / 2)
    assert FIGURE.max_error == pytest.approx(0.5)


def test_the_page_says_what_was_missed_and_shows_both_numbers() -> None:
    page = fidelity_page([FIGURE], [("overhead", "1 us", "Figure 6")], "pictures")
    assert "| Figure 0 | mean error at most 15 % | **missed** | 30.0% | 50.0% |" in page
    assert "| a | 2 | 2.2 | +10.0% |" in page and "| overhead | 1 us | Figure 6 |" in page
    assert "![Figure 0](pictures/figure-0.png)" in page


def test_validate_prints_and_writes_a_figure(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["validate", "--figure", "fig6", "--json", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    figure = json.loads(done.output)["Figure 6"]
    assert figure["is_met"] and figure["max_error"] < 0.1 and len(figure["cells"]) == 10
    assert (tmp_path / "fidelity" / "figure-6.png").stat().st_size > 5_000
    assert "# Fidelity" in (tmp_path / "fidelity.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nobody"], "no paper 'nobody'"), (["--figure", "fig99"], "--figure 'fig99' is none of")],
)
def test_an_unknown_paper_or_figure_is_refused(arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(app, ["validate", *arguments])
    assert isinstance(done.exception, ValueError) and message in str(done.exception)

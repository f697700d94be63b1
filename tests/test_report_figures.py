"""How sure a report is, what would change its answer, and what its drawings show."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from streamrl.hardware.profiles import load_gpu
from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.band import ModelError, StageError
from streamrl.report.page.band import OF_STEP, Band
from streamrl.report.page.details import of_plan, of_run
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.report.page.sources import read_sources
from streamrl.report.pictures.drawing import Rectangle, Text, scale, ticks
from streamrl.report.pictures.range_bars import Bar, Swing, bars_picture, tornado_picture
from streamrl.report.pictures.stacked_bars import RIGHT, WIDTH, shares_picture
from streamrl.report.pictures.step_timeline import typical_step
from streamrl.report.plan_report import plan_report
from streamrl.sim.planner.plan import read_plan, write_plan
from tests.report_directories import write_planned, write_runs
from tests.test_report import PREDICTED

# How sure it is -----------------------------------------------------------------------------------


ERROR = ModelError(
    low=0.8,
    high=1.25,
    datasheet_share=0.3,
    stages={
        "generation": StageError(share=0.7, low=1 / 1.2, high=1.2),
        "train": StageError(share=0.3, low=1 / 1.5, high=1.5),
    },
)


def test_a_band_stretches_the_seeds_by_the_error_of_the_step() -> None:
    band = Band(
        seeds=(0.9, 1.2), num_seeds=3, tiers={"composed": 0.7, "roofline": 0.3}, error=ERROR
    )
    assert band.factors == pytest.approx((0.9 * 0.8, 1.2 * 1.25)) and band.unmeasured == 0.3
    assert list(band.rows()) == [
        ("generation", 0.7, pytest.approx(1 / 1.2), 1.2),
        ("train", 0.3, pytest.approx(1 / 1.5), 1.5),
        (OF_STEP, None, 0.8, 1.25),
    ]


def test_report_and_terminal_have_the_one_error_of_the_step(tmp_path: Path) -> None:
    report = read_report(write_runs(tmp_path, run={}))
    (option,) = report.options
    assert option.run is not None and option.band.error == option.run.metrics.model_error
    error = option.run.metrics.model_error
    assert error is not None and option.band.factors == pytest.approx(
        (option.band.seeds[0] * error.low, option.band.seeds[1] * error.high)
    )
    html = render_html(make_page(report))
    assert f"{error.low:.2f} to {error.high:.2f} times" in html and OF_STEP in html


def test_a_clock_has_no_tier_and_unknown_tiers_have_no_band() -> None:
    timed = Band(tiers={"measured": 1.0}, is_timed=True)
    assert timed.factors == (1.0, 1.0) and timed.is_known
    unknown = Band(seeds=(0.9, 1.1), num_seeds=3)
    assert unknown.factors == (1.0, 1.0) and not unknown.is_known


def test_more_seconds_are_more_dollars_and_fewer_tokens(tmp_path: Path) -> None:
    (option,) = read_report(write_runs(tmp_path, run={})).options
    least, most = option.band.factors
    assert least < 1 < most
    cost = option.cost_per_million_tokens
    assert option.cost_range == pytest.approx((cost * least, cost * most))
    rates = option.goodput / most, option.goodput / least
    assert option.goodput_range == pytest.approx(rates)


def test_the_page_says_which_share_is_unmeasured(tmp_path: Path) -> None:
    (run,) = write_runs(tmp_path, run={"trainer.pool": "far", "rollout.pool": "near"})
    report = read_report([run])
    share = report.options[0].band.unmeasured
    assert share > 0.05
    text = f"{share * 100:.0f}\N{NO-BREAK SPACE}% of the busy seconds of run A are unmeasured"
    assert text in render_html(make_page(report))


# What would change it -----------------------------------------------------------------------------


def test_prices_of_all_pools_move_the_cost_by_as_much_as_they_move(tmp_path: Path) -> None:
    (run,) = read_sources(write_runs(tmp_path, run={})).runs
    swings = of_run(run.trace, "run", "here").swings
    assert [swing.what for swing in swings] == ["price of far", "price of near"]
    assert sum(swing.more or 0 for swing in swings) == pytest.approx(0.2)
    assert all(swing.less == -(swing.more or 0) for swing in swings)
    generating, training = 2 * load_gpu("h20").price, 4 * load_gpu("h800").price
    assert swings[0].more == pytest.approx(0.2 * generating / (generating + training))


def test_a_plans_what_ifs_become_pairs_around_its_own_seed(tmp_path: Path) -> None:
    plan = read_plan(write_planned(tmp_path / "plan") / "plan.json")
    found = of_plan(plan, "plan", "plan.json")
    assert found.by == "20 %"
    named = {swing.what: swing for swing in found.swings}
    assert len(found.swings) == len({c.what.rpartition(" ")[0] for c in plan.sensitivity})
    for change in plan.sensitivity:
        what, _, sign = change.what.rpartition(" ")
        value = named[what].more if sign.startswith("+") else named[what].less
        assert change.cost_ratio is not None and value == pytest.approx(change.cost_ratio - 1)
    assert found.of == "total cost of plan"
    prices = [swing for swing in found.swings if swing.what.startswith("price")]
    assert all(swing.less == pytest.approx(-(swing.more or 0)) for swing in prices)


def test_another_plan_that_would_be_chosen_is_named(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    other = {"choice": "9 x", "gain": 0.25, "relation": "", "reason": ""}
    changed = replace(plan.sensitivity[0], is_other=True, still_fits=True, **other)
    write_plan(replace(plan, sensitivity=[changed, *plan.sensitivity[1:]]), directory)
    text = render_html(make_page(read_report([directory])))
    assert "<span>9 x</span><small>saves 25\N{NO-BREAK SPACE}% then</small></td>" in text
    assert "The chosen plan stays the best" not in text


def test_a_change_is_told_in_dollars_and_hours_of_the_whole_run(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    assert plan.whole_run is not None
    whole = replace(plan.whole_run, seconds=36_000.0, dollars=200.0)
    longer = replace(
        plan.sensitivity[0],
        what="lengths +20%",
        value=plan.objective.value,  # a token costs the same
        time_ratio=1.2,
        cost_ratio=1.25,
        is_estimate=True,
        still_fits=True,
        is_other=False,
    )
    write_plan(replace(plan, whole_run=whole, sensitivity=[longer]), directory)
    page = make_page(read_report([directory]))
    (section,) = [each for each in page.sections if each.name == "sensitivity"]
    (table,) = section.tables
    rows = [[cell.text.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in table.rows]
    assert list(table.head) == ["if", "total cost", "takes", "best then"]
    assert rows[0] == ["nothing changes", "$200", "10 hours", ""]
    assert rows[1] == ["lengths +20%", "$250", "12 hours", "1 · recommended"]
    assert table.rows[1][0].note.startswith("estimate, not simulated; outputs are drawn 0.8 times")
    (*_, line) = [
        line
        for line in printed(plan_report(read_plan(directory / "plan.json"), details=True))
        if "lengths +20%" in line
    ]
    assert "$250 (+25.0%), 12.0 h (+20.0%), an estimate" in line


def test_changes_of_a_plan_of_an_earlier_version_are_told_of_the_figure_that_it_has(
    tmp_path: Path,
) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    old = [replace(each, time_ratio=None, cost_ratio=None) for each in plan.sensitivity]
    found = of_plan(replace(plan, sensitivity=old), "plan", "plan.json")
    assert found.of == f"{plan.objective.unit} of plan"
    for swing in found.swings:
        assert swing.more is not None


def printed(shown: RenderableType) -> list[str]:
    """Return the lines that a terminal shows."""
    console = Console(width=200, file=StringIO(), record=True)
    console.print(shown)
    return console.export_text().splitlines()


# Drawings -----------------------------------------------------------------------------------------


def test_busy_and_idle_fill_the_bar() -> None:
    picture = shares_picture("shares", [("run", PREDICTED)])
    css = {f"c-{name}" for name in (*BUSY, *IDLE)}
    boxes = [shape for shape in picture.drawing.shapes if isinstance(shape, Rectangle)]
    assert sum(box.width for box in boxes if box.css in css) == pytest.approx(WIDTH - RIGHT)
    idle = sum(box.width for box in boxes if box.css == "hatch")
    assert idle == pytest.approx((WIDTH - RIGHT) * sum(PREDICTED.idle.values()))
    assert ("c-skew hatched", "idle: skew") in picture.legend and (
        "c-decode",
        "decode",
    ) in picture.legend


def test_bars_of_a_tornado_that_go_one_way_hide_nothing() -> None:
    swings = [Swing("lengths", 0.1, 0.2), Swing("price", -0.1, 0.1)]
    drawing = tornado_picture("t", "dollars", swings, "20 %", "plan.json").drawing
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Rectangle)]
    assert len(boxes) == 4
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            is_apart_across = (
                one.x + one.width <= other.x + 0.1 or other.x + other.width <= one.x + 0.1
            )
            is_apart_down = one.y + one.height <= other.y or other.y + other.height <= one.y
            assert is_apart_across or is_apart_down
    texts = [shape.text for shape in drawing.shapes if isinstance(shape, Text)]
    assert "less +10\N{NO-BREAK SPACE}%, more +20\N{NO-BREAK SPACE}%" in texts


def test_a_change_without_effect_is_told_beside_the_bar_of_the_other() -> None:
    picture = tornado_picture("t", "cost", [Swing("MFU", 0.11, 0.0)], "20 %", "plan.json")
    assert picture.narrow is not None
    for drawing in (picture.drawing, picture.narrow):
        (bar,) = [shape for shape in drawing.shapes if isinstance(shape, Rectangle)]
        (told,) = [s for s in drawing.shapes if isinstance(s, Text) and "no change" in s.text]
        assert told.text == "20 % more: no change"
        assert told.anchor == "end" and told.x < bar.x


def test_no_note_of_a_bar_is_cut() -> None:
    note = "12 H100 in far and 8 H20 in near to generate, and 4 H100 in far to train"
    bars = [Bar("5 · fastest", note, 1.0, 0.8, 1.2, False), Bar("1 · best", "8 H20", 1, 1, 1, True)]
    drawing = bars_picture("b", "dollars", bars, "${:.2f}".format, "Less").drawing
    texts = [shape for shape in drawing.shapes if isinstance(shape, Text)]
    assert note in " ".join(text.text for text in texts)
    assert not any(text.text.endswith("…") for text in texts)
    assert all(text.y < drawing.height for text in texts)


def test_the_typical_step_is_one_that_counts_and_not_the_last() -> None:
    times = [50.0, 90.0, 100.0, 110.0, 40.0]
    metrics = replace(PREDICTED, num_steps=5, step_times=times, counted_steps=(2, 5))
    assert typical_step(metrics) == 3
    assert typical_step(replace(metrics, counted_steps=(4, 4))) == 4
    one = replace(PREDICTED, num_steps=1, step_times=[5.0], counted_steps=(1, 1))
    assert typical_step(one) == 1


def test_ticks_are_round_few_and_within() -> None:
    for low, high in ((0.0, 1.0), (0.71, 1.6), (18_000.0, 33_123.0), (-0.2, 0.2)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 6 and low <= min(found) and max(found) <= high
        gaps = {round(b - a, 9) for a, b in pairwise(found)}
        assert len(gaps) == 1
    assert scale(0.0, 10.0, 100.0, 200.0)(5.0) == 150.0

"""The report in headless Chromium: it opens, figures show, nothing complains, in light, dark, small and in print."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.sim.studies.rerun import simulate_as_recorded
from tests.chromium import Browser, find_chromium, open_browser
from tests.report_directories import (
    as_executed,
    simulate_plan,
    write_planned,
    write_runs,
    write_study,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no chromium on PATH"),
]
WIDTHS = (1280, 768, 390)  # of a desk, a tablet, a phone
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3: of text against what is behind it
FIGURES = """[...document.querySelectorAll('figure svg.drawing')].filter(one => one.checkVisibility()).map(drawing => {
  const box = drawing.getBoundingClientRect();
  return {name: drawing.parentElement.parentElement.id, width: box.width, height: box.height,
          shapes: [...drawing.querySelectorAll('rect, circle, polyline')].filter(shape => {
            const one = shape.getBoundingClientRect();
            return one.width > 0 && one.height > 0;
          }).length};
})"""
OUTSIDE = """[...document.querySelectorAll('svg.drawing text')].filter(text => {
  const one = text.getBBox(), all = text.ownerSVGElement.viewBox.baseVal;
  return one.x < -1 || one.y < -1 || one.x + one.width > all.width + 1 || one.y + one.height > all.height + 1;
}).map(text => text.ownerSVGElement.parentElement.parentElement.id + ': ' + text.textContent)"""
OVERLAPPING = """[...document.querySelectorAll('svg.drawing')].flatMap(drawing => {
  const texts = [...drawing.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) =>
    p.x + 1 < q.x + q.width && q.x + 1 < p.x + p.width && p.y + 3 < q.y + q.height && q.y + 3 < p.y + p.height
  ).map(([b, q]) => drawing.parentElement.parentElement.id + ': ' + a + ' / ' + b));
})"""
UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
TOO_WIDE = """[document.documentElement, ...document.querySelectorAll('.tile, .next, .command, .section, .fold, table.cards')]
  .filter(one => one.scrollWidth > one.clientWidth || one.getBoundingClientRect().right > document.documentElement.clientWidth)
  .map(one => one.className + ': ' + one.textContent.slice(0, 60))"""
SCROLLED = """[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.closest('section, figure, details').id + ': ' + (one.closest('figure') || one).textContent.trim().slice(0, 40))"""
FIRST_SCREEN = (
    """['h1', '.tile'].map(one => document.querySelector(one).getBoundingClientRect().bottom)"""
)
TILES = """[...document.querySelectorAll('.tile')].map(tile => {
  const {top, bottom, left, right} = tile.getBoundingClientRect();
  return {top, bottom, left, right, hidden: tile.scrollHeight - tile.clientHeight};
})"""
COLOURS = """[...document.querySelectorAll('h1, p, td, th, small, dt, dd, a, button, code, figcaption, svg.drawing text')].map(one => {
  const style = getComputedStyle(one), behind = one.closest('button, .tile, .command, tr.chosen td');
  const paper = getComputedStyle(behind || document.body).backgroundColor;
  return [one.tagName == 'text' ? style.fill : style.color, paper];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a plan, runs of long names, and a study."""
    parent = tmp_path_factory.mktemp("page")
    plan = write_planned(parent / "plan")
    simulate_plan(plan)
    names = {
        "a-run-with-a-name-that-is-much-longer-than-any-figure-has-room-for": {"seed": 1},
        "sync": {"policies.system": "stream-sync", "rollout.replicas": 8},
        "colocated": {
            "policies.system": "colocated",
            "rollout.pool": "near",
            "rollout.replicas": 4,
        },
    }
    directories = [plan, *write_runs(parent, **names), write_study(parent / "study")]
    path = parent / "report.html"
    path.write_text(render_html(make_page(read_report(directories))))
    return path


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of an executed run with a fault."""
    parent = tmp_path_factory.mktemp("executed")
    faults = [{"kind": "replica-dies", "step": 2}]
    (run,) = write_runs(parent, run={"faults": faults, "algorithm.steps": 4})
    path = parent / "report.html"
    read = read_report([as_executed(run)])
    path.write_text(render_html(make_page(read, simulator=simulate_as_recorded)))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_opens_without_complaint_and_its_figures_show(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.complaints() == []
    assert browser.requests() == [page.resolve().as_uri()]
    browser.evaluate(UNFOLD)
    figures: list[dict[str, Any]] = browser.evaluate(FIGURES)
    assert len(figures) >= 10
    for figure in figures:
        assert figure["width"] > 200 and figure["height"] > 40, figure
        assert figure["shapes"] >= 2, figure


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    browser.evaluate(UNFOLD)
    assert browser.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_an_executed_run_fits_the_window_too(
    browser: Browser, executed: Path, width: int
) -> None:
    browser.open(executed, width=width)
    browser.evaluate(UNFOLD)
    assert browser.complaints() == []
    assert browser.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_has_the_decision_and_its_total(
    browser: Browser, page: Path, executed: Path, width: int, height: int
) -> None:
    for each in (page, executed):
        browser.open(each, width=width)
        title, total = browser.evaluate(FIRST_SCREEN)
        assert 0 < title < total < height


@pytest.mark.parametrize("width", [1280, 390])
def test_no_chart_and_no_table_needs_scrolling_sideways(
    browser: Browser, page: Path, executed: Path, width: int
) -> None:
    for each in (page, executed):
        browser.open(each, width=width)
        browser.evaluate(UNFOLD)
        assert [name for name in browser.evaluate(SCROLLED) if "study" not in name] == []


def test_tiles_of_a_row_are_aligned_and_no_value_is_cut(browser: Browser, page: Path) -> None:
    for width in WIDTHS:
        browser.open(page, width=width)
        tiles: list[dict[str, float]] = browser.evaluate(TILES)
        assert len(tiles) >= 4
        for one, other in pairwise(tiles):
            if one["top"] == other["top"]:
                assert one["bottom"] == other["bottom"] and one["right"] < other["left"]
            else:
                assert one["bottom"] < other["top"]
        assert all(tile["hidden"] <= 0 for tile in tiles)


@pytest.mark.parametrize("width", [1280, 390])
def test_texts_of_figures_stay_inside_and_apart(
    browser: Browser, page: Path, executed: Path, width: int
) -> None:
    for each in (page, executed):
        browser.open(each, width=width)
        browser.evaluate(UNFOLD)
        assert browser.evaluate(OUTSIDE) == []
        assert browser.evaluate(OVERLAPPING) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_against_its_background(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.evaluate(UNFOLD)
    pairs = {(text, paper) for text, paper in browser.evaluate(COLOURS)}
    assert len(pairs) >= 4
    for text, paper in pairs:
        assert contrast(text, paper) >= LEAST_CONTRAST, (text, paper)
    assert (
        luminance(browser.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1
    ) == dark


def test_the_page_prints_on_paper_without_cut_figures(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.print_pdf().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    rule = "getComputedStyle(document.querySelector('figure')).breakInside"
    assert browser.evaluate(rule) == "avoid"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_the_decision_and_what_to_do_are_on_the_first_printed_page(
    browser: Browser, page: Path
) -> None:
    width, height = 688, 1001  # of A4 without its margins
    browser.open(page, width=width)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert (
        browser.evaluate("document.querySelector('.next').getBoundingClientRect().bottom") < height
    )
    assert browser.evaluate(SCROLLED) == []
    tops = browser.evaluate("[...document.querySelectorAll('.tile')].map(one => one.offsetTop)")
    assert len(set(tops)) == 1


def luminance(colour: str) -> float:
    """Return the relative luminance of "rgb(r, g, b)" (WCAG 2.2)."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)

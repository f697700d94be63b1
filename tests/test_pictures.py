"""Pictures are shapes with classes: every class has a style, and both renderers put each shape in its place and colour."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from streamrl.record.attribution import BUSY, IDLE
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.report.pictures.canvas import DPI, MARGIN, POINTS, draw
from streamrl.report.pictures.drawing import (
    ACTIVITIES,
    COLOURS,
    Dot,
    Drawing,
    Picture,
    Polyline,
    Rectangle,
    Text,
    rules,
    style_of,
    swatch,
)
from streamrl.report.pictures.study_chart import study_picture
from streamrl.report.study_table import make_table
from streamrl.runfile.sweep import Axis, parse_axis
from streamrl.sim.studies.results import StudyRow
from tests.report_directories import write_runs, write_study

ROOT = Path(__file__).parent.parent
PIXELS = DPI / POINTS  # of a unit


# Classes and colours ------------------------------------------------------------------------------


def test_every_activity_and_cause_has_a_colour_of_its_own() -> None:
    assert set(ACTIVITIES) >= {*BUSY, *IDLE}
    for mode in ("light", "dark"):
        colours = [getattr(ACTIVITIES[name], mode) for name in {*BUSY, *IDLE}]
        assert len(set(colours)) == len(colours)


def test_a_style_names_colours_that_there_are() -> None:
    named = {style_of(css).get(key, "none") for css in ("t", "dot", "front") for key in ("fill",)}
    assert named == {"ink", "bar", "none"}
    for declarations in rules().values():
        assert set(re.findall(r"var\(--([\w-]+)\)", declarations)) <= set(COLOURS)


def test_a_rule_for_more_classes_goes_before_one_for_fewer_as_in_css() -> None:
    assert (
        style_of("dot chosen")["fill"] == "best" and style_of("dot chosen")["stroke_width"] == 1.2
    )
    assert style_of("curve s-1") == {"fill": "none", "stroke": "s-1", "stroke_width": 2}
    assert (
        style_of("point s-1")["fill"] == "s-1" and style_of("c-train level-1")["fill_opacity"] < 1
    )
    assert rules()[".dot.chosen"] == "fill: var(--best); stroke: var(--paper);"
    assert rules()[".dash-dot"] == "stroke-dasharray: 8 3 2 3;"


def test_all_that_a_page_draws_has_a_style_and_can_be_drawn_with_matplotlib(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, one={}, two={"policies.system": "stream-sync"})
    page = make_page(read_report([*runs, write_study(tmp_path / "study")]))
    pictures = [picture for section in page.sections for picture in section.pictures]
    assert len(pictures) >= 7
    for picture in pictures:
        swatches = [shape for css, _ in picture.legend for shape in swatch(css)[1]]
        for shape in (*picture.drawing.shapes, *swatches):
            if shape.css != "hatch":
                css = f"t {shape.css}" if isinstance(shape, Text) else shape.css
                assert {"fill", "stroke"} & set(style_of(css)), css
        assert pixels_of(draw(picture)).shape[1] > picture.drawing.width


def test_the_style_sheet_has_the_styles_and_both_colours(tmp_path: Path) -> None:
    html = render_html(make_page(read_report([write_study(tmp_path / "study")])))
    for selector, declarations in rules().items():
        assert f"{selector} {{ {declarations} }}" in html
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name, colour in COLOURS.items():
        assert f"--{name}: {colour.light};" in light and f"--{name}: {colour.dark};" in dark


# With matplotlib ----------------------------------------------------------------------------------


def test_shapes_are_where_they_belong_in_their_colours() -> None:
    drawing = Drawing("d", "", "", 200.0, 100.0)
    drawing.rectangle(0, 0, 100, 50, "c-train")
    drawing.rectangle(100, 50, 100, 50, "lane")
    drawing.rectangle(20, 20, 20, 20, "best bar chosen")
    drawing.dot(150, 75, 10, "dot")
    drawing.line(100, 25, 200, 25, "axis")
    pixels = pixels_of(draw(Picture(drawing, "")))
    assert pixels.shape[:2] == tuple(int((n + 2 * MARGIN) * PIXELS) for n in (100, 200))
    for (x, y), name in {
        (50, 10): "c-train",
        (30, 30): "best",
        (110, 60): "lane",
        (150, 75): "bar",
        (150, 25): "ink",
        (50, 75): "paper",
    }.items():
        at = pixels[int((y + MARGIN) * PIXELS), int((x + MARGIN) * PIXELS)]
        assert at == pytest.approx(255 * np.array(to_rgb(COLOURS[name].light)), abs=40), (x, y)


def test_hatching_lies_over_a_colour_and_leaves_some_of_it() -> None:
    drawing = Drawing("d", "", "", 100.0, 100.0)
    drawing.rectangle(0, 0, 100, 100, "c-skew")
    drawing.rectangle(0, 0, 100, 100, "hatch")
    inner = pixels_of(draw(Picture(drawing, "")))[60:-60, 60:-60].reshape(-1, 3)
    skew = 255 * np.array(to_rgb(COLOURS["c-skew"].light))
    is_skew = np.abs(inner - skew).max(axis=1) < 3
    assert 0.3 < is_skew.mean() < 0.9 and (inner[~is_skew].mean(axis=0) > skew).all()


def test_a_figure_has_the_title_the_legend_and_the_whole_caption() -> None:
    drawing = Drawing("d", "A title of $1 and $2", "", 300.0, 50.0)
    words = [f"word{n}" for n in range(40)]
    legend = [
        ("c-train hatched", "costs $1_$"),
        ("key s-0 dashed", "a name as long as half"),
        ("", "heading"),
    ]
    figure = draw(Picture(drawing, f"{' '.join(words)}\nlast", legend))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts[:4] == ["A title of $1 and $2", *(name for _, name in legend)]
    assert " ".join(texts[4:]).split() == [*words, "last"] and texts[-1] == "last"
    pixels_of(figure)
    edges = [text.get_window_extent() for axes in figure.axes for text in axes.texts]
    assert max(edge.x1 for edge in edges) < figure.bbox.width
    for index, one in enumerate(edges):
        assert not any(one.overlaps(other) for other in edges[index + 1 :])


def test_no_command_loads_matplotlib_before_it_draws() -> None:
    program = "import streamrl.cli, sys; print(sorted({'matplotlib', 'pandas'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


# A study ------------------------------------------------------------------------------------------


def test_a_number_is_drawn_as_lines_at_its_place_on_the_axis() -> None:
    drawing = study_of("cluster.links.0.bandwidth=1 Gbps,10 Gbps,100 Gbps", "seed=1,2")
    lines = [s for s in drawing.shapes if isinstance(s, Polyline) and "curve" in s.css]
    assert [line.css for line in lines] == ["curve s-0", "curve s-1"]
    (a, *_), (b, *_), (c, *_) = lines[0].points
    assert b - a == pytest.approx(c - b), "logarithmic"
    texts = texts_of(drawing)
    assert {"1", "10", "100"} <= set(texts) and texts[-1] == "cluster.links.0.bandwidth (Gbps) →"
    spreads = [s for s in drawing.shapes if isinstance(s, Polyline) and s.css == "spread s-0"]
    dots = [s for s in drawing.shapes if isinstance(s, Dot) and s.css == "point s-0"]
    assert [line.points[0][0] for line in spreads] == [dot.x for dot in dots]


def test_names_are_drawn_as_groups_of_bars_from_zero() -> None:
    drawing = study_of("policies.system=stream-sync,stream-async", "seed=1,2")
    bars = [s for s in drawing.shapes if isinstance(s, Rectangle)]
    assert [bar.css for bar in bars] == ["s-0", "s-0", "s-1", "s-1"]
    assert len({bar.y + bar.height for bar in bars}) == 1
    heights = [bar.height for bar in bars]
    assert heights[1] / heights[0] == pytest.approx(110 / 100)
    assert bars[0].x + bars[0].width < bars[2].x < bars[2].x + bars[2].width < bars[1].x
    assert {"100 s", "110 s"} <= set(texts_of(drawing))


def test_a_third_axis_is_told_apart_by_dashes_or_by_fill() -> None:
    lines = study_of("rollout.replicas=1,2", "seed=1,2", "sync.mode=full,lora")
    assert [s.css for s in lines.shapes if isinstance(s, Polyline) and "curve" in s.css] == [
        "curve s-0",
        "curve s-0 dashed",
        "curve s-1",
        "curve s-1 dashed",
    ]
    bars = study_of("policies.system=a,b", "seed=1,2", "sync.mode=full,lora")
    assert [s.css for s in bars.shapes if isinstance(s, Rectangle)] == [
        *("s-0", "s-0", "s-0", "hatch", "s-0", "hatch"),
        *("s-1", "s-1", "s-1", "hatch", "s-1", "hatch"),
    ]


def test_shares_on_an_axis_are_written_in_full() -> None:
    axes = [parse_axis("rollout.replicas=1,2")]
    rows = [StudyRow(place=(at,), seed=0, figures={"idle": 0.01 + 0.14 * at}) for at in (0, 1)]
    table = make_table("idle", axes, rows)
    texts = texts_of(study_picture("study", table, "title", "").drawing)
    assert [text for text in texts if text.endswith("%")][:3] == ["0\xa0%", "2.5\xa0%", "5\xa0%"]


@pytest.mark.parametrize("count", [1, 3, 12, 40])
def test_labels_under_a_study_stay_inside_and_apart(count: int) -> None:
    names = ",".join(f"a-rather-long-name-{n}" for n in range(count))
    drawing = study_of(f"policies.system={names}")
    labels = [s for s in drawing.shapes if isinstance(s, Text) and s.text.startswith("a-rather")]
    assert len(labels) == count and max(label.y for label in labels) < drawing.height
    figure = draw(Picture(drawing, ""))
    pixels_of(figure)
    boxes = [text.get_window_extent() for axes in figure.axes for text in axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    for index, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[index + 1 :])


def study_of(*sweeps: str) -> Drawing:
    """Draw step times of 100 s and up over some axes, two seeds each."""
    axes: list[Axis] = [parse_axis(text) for text in sweeps]
    places = np.ndindex(*(len(axis.points) for axis in axes))
    rows = [
        StudyRow(
            place=place, seed=seed, figures={"step_time": 100.0 + 10 * place[0] + 20 * (seed - 0.5)}
        )
        for place in places
        for seed in (0, 1)
    ]
    return study_picture("study", make_table("step_time", axes, rows), "title", "").drawing


def texts_of(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


def pixels_of(figure: Figure) -> NDArray[np.float64]:
    """Render a figure, and return its pixels from 0 to 255."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba(), dtype=float)[..., :3]

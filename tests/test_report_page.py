"""The report says what its directories hold, stands alone, and says how sure it is."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace as replace_fields
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from msgspec.structs import replace

from streamrl.hardware.profiles import load_model
from streamrl.record.assumed import Assumed
from streamrl.record.attribution import IDLE
from streamrl.report.next_steps import just_dearer_text, runners_text
from streamrl.report.page.answer import chosen_of
from streamrl.report.page.assumptions import assumptions_of
from streamrl.report.page.explorer import estimate_note
from streamrl.report.page.options import Option, make_options
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.report.page.parts import Page
from streamrl.report.page.rental import link_lines, rental_table
from streamrl.report.page.sources import read_sources
from streamrl.report.page.terms import Terms
from streamrl.report.pictures.cost_time import PlanPoint, cost_time_picture
from streamrl.report.pictures.drawing import (
    Polyline,
    Text,
    covers,
    line_box,
    text_box,
    width_of,
)
from streamrl.report.pictures.scatter import Point, front_of, scatter_picture, stairs
from streamrl.report.plan_report import head_lines, not_offered_text, plan_report, total_lines
from streamrl.report.words import NBSP, SYSTEMS
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.targets.verdicts import Verdict
from tests.command_line import streamrl
from tests.report_directories import (
    simulate_plan,
    write_plan_of,
    write_planned,
    write_runs,
    write_study,
)
from tests.runs import small_run
from tests.test_plan import few, planned
from tests.test_report_figures import printed

VOID = {"meta", "link", "line", "br"}
ASKS_FOR = re.compile(r"""(?:src|href|srcset|data)\s*=|url\(|@import|<script|<iframe|<object""")
HARMLESS = re.compile(
    r"""href="#[\w-]+"|href="data:,"|url\(#\w+\)|name="color-scheme"|lang="|<script>|<script type="application/json" id="""
)
POLICY = re.compile(
    r"""default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-([\w+/=]+)'"""
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plan with its simulation, two runs of other work, and a study; names have what HTML would take for tags."""
    parent = tmp_path_factory.mktemp("report")
    plan = write_planned(parent / "plan")
    simulate_plan(plan)
    runs = write_runs(
        parent,
        **{
            "<b>sync & co": {"policies.system": "stream-sync"},
            "colocated": {
                "policies.system": "colocated",
                "rollout.pool": "near",
                "rollout.replicas": 4,
            },
        },
    )
    return [plan, *runs, write_study(parent / "study")]


@pytest.fixture(scope="module")
def html(directories: list[Path]) -> str:
    return render_html(make_page(read_report(directories)))


class Outline(HTMLParser):
    """Collects ids and headings, and checks that tags close in the order in which they open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for key, value in attrs if key == "id" and value]
        if tag not in VOID or "line" in tag:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for key, value in attrs if key == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


# The page -----------------------------------------------------------------------------------------


def test_the_page_asks_for_nothing_beside_itself(html: str) -> None:
    for match in ASKS_FOR.finditer(html):
        around = html[max(0, match.start() - 12) : match.end() + 40]
        assert HARMLESS.search(around), around
    (policy,) = POLICY.findall(html)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert policy == base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_tags_are_balanced_and_ids_are_unique(html: str) -> None:
    outline = Outline(html)
    assert len(outline.ids) == len(set(outline.ids))
    links = re.findall(r'href="#([\w-]+)"', html)
    assert links and set(links) <= set(outline.ids)


def test_a_page_of_everything_has_every_section(html: str) -> None:
    assert Outline(html).headings == [
        "What to rent, and where",
        "What to do next",
        "Options that differ",
        "What if? ",
        "Why this plan",
        "What if: How long may outputs be?",
        "Idle by cause",
        "What would change the total",
        "How sure this is",
        "The whole run",
        "Plan against alternatives",
        "Speed against cost",
        "What was trained on, of what was generated",
        "One step",
        "How the options differ",
        "Assumptions and sources (1 · recommended)",
    ]


def test_every_figure_is_a_drawing_with_title_description_and_caption(html: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        drawing = re.search(r'<svg class="drawing.*?</svg>', figure, re.DOTALL)
        assert drawing is not None
        tree = ElementTree.fromstring(drawing[0])
        named = {each.get("id"): each.text for each in tree if each.tag in ("title", "desc")}
        assert list(named) == tree.get("aria-labelledby", "").split()
        assert all(text and text.strip() for text in named.values())
        assert re.search(r"<figcaption>[^<\s]", figure)
        _, _, width, height = map(float, tree.get("viewBox", "").split())
        assert width > 100 and height > 40
        for shape in tree.iter("rect"):
            assert float(shape.get("width", "-1")) >= 0, drawing[0][:200]


def test_names_and_texts_are_escaped(html: str, directories: list[Path]) -> None:
    assert "&lt;b&gt;sync &amp; co" in html and "&lt;i&gt;length&lt;/i&gt;" in html
    markdown = render_markdown(make_page(read_report(directories)))
    for text in (html, markdown):
        assert "<b>sync" not in text and "<i>length" not in text


def test_rows_of_a_markdown_table_have_as_many_cells_as_its_head(directories: list[Path]) -> None:
    markdown = render_markdown(make_page(read_report(directories)))
    tables = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    assert len(tables) >= 8
    for table in tables:
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(counts) == 1, table


def test_a_pipe_in_a_name_ends_no_cell(tmp_path: Path) -> None:
    (run,) = write_runs(tmp_path, **{"a|b": {}})
    assert "| a\\|b (" in render_markdown(make_page(read_report([run])))


# Words --------------------------------------------------------------------------------------------


def test_a_word_is_explained_once_in_visible_text_and_linked_from_each_part() -> None:
    terms = Terms()
    first = terms.mark(Markup("TP2 and TP4 of <code>TP8</code>, band"))
    assert first == (
        '<a class="term" href="#word-1">TP2</a> and TP4 of <code>TP8</code>, '
        '<a class="term" href="#word-2">band</a>'
    )
    assert [(term.anchor, term.word) for term in terms.take()] == [
        ("word-1", "TP2"),
        ("word-2", "band"),
    ]
    assert terms.mark(Markup("TP4")) == '<a class="term" href="#word-1">TP4</a>'
    assert terms.take() == []


def test_no_word_is_explained_in_a_key_or_where_its_meaning_stands() -> None:
    terms = Terms()
    for text in (
        "trainer.offload=True",
        "policies.system=colocated",
        "non-stale, bandwidth",
        f"stream-async ({SYSTEMS['stream-async']})".replace("rollouts", "ones"),
        f"colocated ({SYSTEMS['colocated']})",
    ):
        found = terms.mark(Markup.escape(text))
        assert found == text or text.startswith("stream-async ("), text
    assert [term.word for term in terms.take()] == ["stream-async"]


def test_a_page_has_no_word_that_only_a_pointer_explains(html: str) -> None:
    assert "<abbr" not in html and 'class="term" title' not in html
    anchors = re.findall(r'<a class="term" href="#(word-\d+)"', html)
    told = re.findall(r'<div id="(word-\d+)"><dt>', html)
    assert anchors and sorted(set(anchors)) == sorted(told)
    for each in told:  # no meaning stands before its word
        assert html.index(f'href="#{each}"') < html.index(f'id="{each}"')


def test_markdown_ends_with_the_words_that_it_has(directories: list[Path]) -> None:
    text = render_markdown(make_page(read_report(directories)))
    words = text[text.index("## Words") :]
    assert "- **band**: the range in which" in words and "- **MFU**" in words
    assert "**KL**" not in words


# What to rent -------------------------------------------------------------------------------------


def test_a_plan_says_where_to_rent_what_at_whose_price(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    page = make_page(read_report([directory]))
    assert page.rental is not None
    (table,) = page.rental.tables
    (made,) = read_report([directory]).sources.plans
    used = made.plan.allocation.gpus_by_pool
    rows = {row[0].text: row for row in table.rows}
    assert list(rows) == sorted(used)
    for pool, count in used.items():
        _, rent, _, nodes, price, source = rows[pool]
        assert rent.text.startswith(f"{count}\N{NO-BREAK SPACE}") and "node" in nodes.text
        assert price.text.startswith("$") and price.text.endswith("a GPU-hour")
        assert source.text == "from the run file"
    assert page.tiles[0].note.endswith("prices from the run file")
    links = [note for note in page.rental.notes if note.startswith("Link between")]
    assert len(links) == (len(used) > 1)
    html = render_html(page)
    assert html.index("What to rent, and where") < html.index("What to do next")


def test_own_gpus_are_used_and_not_rented(tmp_path: Path) -> None:
    titles = {}
    for owned in ((), ("h20",), ("h20", "h800")):
        pools = {
            name: {"gpu": name, "nodes": 1, "price": 2.0, "owned": name in owned}
            for name in ("h20", "h800")
        }
        sides: dict[str, Any] = {"rollout_pools": ["h20"], "rollout_gpus": [4], "trainer_gpus": [8]}
        run = few({"cluster.pools": pools}, systems=["stream-sync"], **sides)
        page = make_page(read_report([write_plan_of(run, tmp_path / str(len(owned)))]))
        assert page.rental is not None
        titles[owned] = (page.rental.title, page.rental.tables[0].head[1])
        assert any("Rent all GPUs" in note for note in page.rental.notes) == (len(owned) < 2)
        prices = {row[0].text: row[4].note for row in page.rental.tables[0].rows}
        assert not owned or prices["h20"] == "$16.00 an hour"
    assert titles[()] == ("What to rent, and where", "rent")
    assert titles["h20",] == ("What to rent, and what to use of your own", "GPUs")
    assert titles["h20", "h800"] == ("Which of your own GPUs to use", "GPUs")


def test_a_page_of_own_gpus_without_a_price_has_time_and_no_dollars(tmp_path: Path) -> None:
    own = {"gpu": "h800", "nodes": 1, "price": 0.0, "owned": True}
    offer = {"cluster.pools": {"h800": own}, "cluster.links": [], "rollout.pool": "h800"}
    run = few({**offer, "trainer.pool": "h800"}, objective="step-time", trainer_gpus=[4], unit=None)
    report = read_report([write_plan_of(run, tmp_path / "plan")])
    plan = planned(run).plan
    assert plan.whole_run is not None and plan.whole_run.dollars == 0
    whole, chosen = plan.whole_run, report.options[0]
    assert chosen.goodput == pytest.approx(whole.tokens / 4 / chosen.step_time)
    html = render_html(make_page(report))
    assert "Which of your own GPUs to use" in html and "total for 4 steps" not in html
    assert not any("an hour" in line for line in total_lines(plan))


def test_a_plan_names_its_limits_in_words_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    run = few(systems=["stream-sync"], deadline="30 days", budget=5000.0, rollout_gpus=[8])
    page = make_page(read_report([write_plan_of(run, tmp_path / "plan")]))
    kept = "It keeps the deadline of 30 days and the budget of $5,000 for the whole run."
    assert kept in page.answer and "plan." not in page.answer
    assert "budget $5,000" in page.tiles[0].note and f"deadline 30{NBSP}days" in page.tiles[1].note
    lines = list(total_lines(planned(run).plan))
    deadline, budget = "the deadline of 30 days (plan.deadline)", "the budget of $5,000 for the "
    assert f"within {deadline} and {budget}whole run (plan.budget)" in lines
    assert not any(
        line.startswith("within") for line in total_lines(replace(planned(run).plan, limits={}))
    )


def test_the_lead_says_once_that_a_plan_may_miss_its_deadline(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    limit = "the deadline of 12 h (plan.deadline)"
    told = f"at the high end of its band it takes 26.1 h for the whole run, more than {limit}"
    write_plan(replace(plan, limits={"deadline": 12 * 3600.0}, at_worst=told), directory)
    answer = make_page(read_report([directory])).answer
    assert "takes 26.1 hours for the whole run, more than the deadline of 12 hours." in answer
    assert "It keeps" not in answer and "plan." not in answer


def test_a_pool_that_is_named_after_its_gpu_is_written_like_the_gpu(tmp_path: Path) -> None:
    pools = {name: {"gpu": name, "nodes": 1, "price": 4.0} for name in ("h20", "h800")}
    sides: dict[str, Any] = {"rollout_pools": ["h20"], "rollout_gpus": [4], "trainer_gpus": [8]}
    link = {"between": ["h20", "h800"], "bandwidth": "100 Gbps"}
    changes = {"cluster.pools": pools, "cluster.links": [link]}
    run = few({**changes, "rollout.pool": "h20", "trainer.pool": "h800"}, **sides)
    page = make_page(read_report([write_plan_of(run, tmp_path / "plan")]))
    html = re.sub("<style>.*?</style>|<code>.*?</code>", "", render_html(page), flags=re.DOTALL)
    grid = json.loads(page.explorer or "{}")
    words = re.compile(r"(?<![\w.=/\"-])h20(?![\w=/\"-]|\.\w)")
    assert words.findall(re.sub("<script.*?</script>|<[^>]*>", "", html, flags=re.DOTALL)) == []
    assert "price of H20" in html and "cluster.pools.h20.price" in html
    assert grid["plans"] and all("H20" in plan["choice"] for plan in grid["plans"])
    assert words.findall(render_markdown(page).replace("`h20`", "")) == []


def test_each_share_of_a_plan_has_one_rounding(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    stale = "42 % of the busy seconds come from datasheets alone, so this is a guess"
    first, second, *rest = plan.options
    second = replace(
        second,
        tiers={"composed": 0.57, "roofline": 0.43},
        choice=replace(second.choice, note=f"few steps; {stale}"),
        cost_ratio=1.0846,
        ratio_half_width=0.03,
        relation="8 % dearer, as fast",
    )
    write_plan(replace(plan, options=[first, second, *rest]), directory)
    report = read_report([directory])
    assert report.options[1].note == f"few steps; {stale.replace('42', '43')}"
    assert report.options[1].against == "+8 %"
    text = render_html(make_page(report))
    assert f"few steps; 43{NBSP}%" in text and ">+8\N{NO-BREAK SPACE}%<" in text
    aside = "<(style|script|code|svg|button)[^>]*>.*?</\\1>"
    assert not re.search(r"\d ?%", re.sub(aside, "", text, flags=re.DOTALL))


def test_the_page_says_how_far_the_sliders_are_from_a_simulation_of_long_outputs(
    tmp_path: Path,
) -> None:
    plan = read_plan(write_planned(tmp_path / "plan") / "plan.json")
    grid, (longer, *_) = plan.what_if, [c for c in plan.sensitivity if c.what == "lengths +20%"]
    assert grid is not None
    hours = [[[10.0 * factor] * len(grid.links) for _ in grid.caps] for factor in grid.lengths]
    grid = replace(grid, plans=[replace(grid.plans[0], hours=hours), *grid.plans[1:]])
    told = [
        estimate_note(
            replace(
                plan,
                what_if=grid,
                sensitivity=[replace(longer, time_ratio=ratio, is_estimate=guess)],
            )
        )
        for ratio, guess in ((1.44, False), (1.1, False), (1.21, False), (1.44, True))
    ]
    assert re.search(r"option 1 took 4\d.% more time. The sliders estimate 20.%. Where", told[0])
    assert told[1].endswith("The sliders estimate 20\N{NO-BREAK SPACE}%.")
    assert told[2:] == ["", ""]


def test_a_plan_on_a_part_of_a_node_says_so_once_unless_a_unit_was_chosen(tmp_path: Path) -> None:
    pool = {"gpu": "h800", "nodes": 1, "price": 5.0}
    found = []
    for unit in ({}, {"unit": 4}):
        changes = {"cluster.pools": {"h800": {**pool, **unit}}, "cluster.links": []}
        sides: dict[str, Any] = {"rollout_gpus": [4], "trainer_gpus": [4], "systems": ["colocated"]}
        own = {**changes, "rollout.pool": "h800", "trainer.pool": "h800"}
        run = few(own, **sides, unit=None)
        page = make_page(read_report([write_plan_of(run, tmp_path / str(len(found)))]))
        assert page.rental is not None
        lines = [*page.rental.notes, *head_lines(planned(run).plan)]
        found.append([line for line in lines if "of the 8 GPUs of a node of h800; " in line])
    assert [len(lines) for lines in found] == [2, 0]
    assert all(line[1:].startswith("art of a node: 4 of the 8 ") for line in found[0])
    assert "--set cluster.pools.h800.unit=8" in found[0][0]


def test_a_link_between_the_pools_of_a_plan_has_its_speed_and_its_source(tmp_path: Path) -> None:
    (made,) = read_report([write_planned(tmp_path / "plan")]).sources.plans
    apart = next(each.choice for each in made.plan.options if len(each.choice.gpus_by_pool) == 2)
    offer = few()
    made = replace_fields(made, run=offer, plan=replace(made.plan, allocation=apart))
    (line,) = link_lines(made)
    (link,) = offer.cluster.links
    assert line.startswith(f"Link between {' and '.join(link.between)}: ")
    assert f"{link.bandwidth * 8 / 1e9:g} Gbit/s each way" in line and "(run file)" in line
    used = apart.gpus_by_pool
    table = rental_table(made)
    assert [row[0].text for row in table.rows] == sorted(used)


def test_a_price_has_the_source_that_states_it(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    assert plan.whole_run is not None
    pool = plan.allocation.trainer.pool
    own = Assumed(key=f"cluster.pools.{pool}.price", text="", source="list price (2025)")
    write_plan(replace(plan, whole_run=replace(plan.whole_run, assumed=[own])), directory)
    page = make_page(read_report([directory]))
    assert page.rental is not None
    sources = {row[0].text: row[-1].text for row in page.rental.tables[0].rows}
    assert sources[pool] == "assumed from the profile (list price (2025))"
    assert "prices assumed from the profile" in page.tiles[0].note
    write_plan(plan, directory)
    file = directory / "plan.toml"
    file.write_text(f"# Chosen by `streamrl plan --model m --gpus 4xH20@1`:\n{file.read_text()}")
    assert (
        make_page(read_report([directory])).tiles[0].note.endswith("prices as given in the command")
    )


# What is compared ---------------------------------------------------------------------------------


def test_a_run_of_the_plan_is_the_plan_and_lends_it_its_trace(directories: list[Path]) -> None:
    report = read_report(directories)
    plan, *others = report.options
    assert plan.kind == "plan" and plan.run is not None and plan.run.name == "plan"
    assert [o.name for o in others if o.kind == "run"] == ["<b>sync & co", "colocated"]
    plans = [option.mark for option in report.options if option.kind != "run"]
    assert plans == [str(number + 1) for number in range(len(plans))]
    assert [option.mark for option in report.options if option.kind == "run"] == ["A", "B"]


def test_a_plan_has_one_name_everywhere_on_the_page(directories: list[Path]) -> None:
    plan = read_plan(directories[0] / "plan.json")
    options = read_report(directories[:1]).options
    for option, of_plan in zip(options, plan.options, strict=False):
        assert option.title == f"{of_plan.number} · {of_plan.labels[0]}"
        assert option.whole_run == of_plan.whole_run
    html = render_html(make_page(read_report(directories[:1])))
    text = re.sub("<[^>]*>", " ", html)
    assert "the plan" not in [option.name for option in options]
    assert "runner-up" not in text and "A · " not in text
    assert f"Assumptions and sources ({options[0].title})" in text
    assert text.count("1 · recommended") >= 4


def test_another_option_in_the_plan_file_is_named_by_its_number(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    write_plan(replace(plan, taken=2), directory)
    text = render_html(make_page(read_report([directory])))
    assert f"plan.toml holds option 2, {plan.options[1].labels[0]}" in text


def test_a_run_file_that_was_edited_after_its_plan_is_told_first(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    file, plan = directory / "plan.toml", read_plan(directory / "plan.json")
    write_plan(replace(plan, run_file=hashlib.sha256(file.read_bytes()).hexdigest()), directory)
    assert "was edited" not in make_page(read_report([directory])).answer
    file.write_text(file.read_text().replace("scale = 0.4", "scale = 0.3"))
    report = read_report([directory])
    told = "plan/plan.toml was edited after it was planned: times and costs of this plan are those before"
    assert make_page(report).answer.startswith(told)
    assert str(describe(report)["answer"]).startswith(told)


def test_a_run_of_other_lengths_is_not_the_plan(tmp_path: Path) -> None:
    plan = write_planned(tmp_path / "plan")
    text = (plan / "plan.toml").read_text()
    (plan / "plan.toml").write_text(text.replace("scale = 0.4", "scale = 0.3"))
    simulate_plan(plan)
    (plan / "plan.toml").write_text(text)
    assert "run" in [option.kind for option in read_report([plan]).options]


def test_a_plan_costs_what_it_was_chosen_for(directories: list[Path]) -> None:
    plan = read_plan(directories[0] / "plan.json")
    options = read_report(directories).options
    assert options[0].cost_per_million_tokens == plan.allocation.cost_per_million_tokens
    assert options[0].cost_per_million_tokens == pytest.approx(plan.objective.value)
    runners = [option for option in options if option.kind == "runner-up"]
    for option, runner in zip(runners, plan.runners_up, strict=True):
        paired = options[0].cost_per_million_tokens * (1 + runner.behind)
        assert option.cost_per_million_tokens == pytest.approx(paired, rel=0.025)  # of common steps
        assert option.step_time == runner.choice.step_time
        assert option.goodput * option.cost_per_million_tokens == pytest.approx(
            runner.choice.dollars_per_hour / 3600 * 1e6
        )


def test_runs_that_differ_in_their_seed_are_one_option_with_a_spread(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, one={}, two={"seed": 7}, other={"policies.system": "stream-sync"})
    report = read_report(runs)
    first, other = report.options
    costs = [run.metrics.cost_per_million_tokens for run in report.sources.runs[:2]]
    assert costs[0] != costs[1] and first.band.num_seeds == 2 and other.band.num_seeds == 1
    least, most = report.sources.runs[0].metrics.spread  # few steps count, so they have no interval
    ratios = [cost / costs[0] for cost in costs]
    assert first.band.seeds == (min(least, *ratios), max(most, *ratios))


def test_the_cheapest_run_is_the_answer(tmp_path: Path) -> None:
    runs = write_runs(
        tmp_path,
        dear={"cluster.pools.far.price": 9.0},
        cheap={"cluster.pools.far.price": 0.5},
    )
    answer = make_page(read_report(runs)).answer
    assert "Of the 2 ways compared, cheap trains Qwen2.5-7B at the least cost" in answer
    assert "dear, the next, costs" in answer


def test_options_that_do_other_work_are_not_compared_by_the_step(tmp_path: Path) -> None:
    same = write_runs(tmp_path, a={}, b={"policies.system": "stream-sync"})
    other = write_runs(tmp_path, c={"algorithm.prompts_per_step": 4})
    note = "Not all options do the same work"
    assert note not in render_html(make_page(read_report(same)))
    text = render_html(make_page(read_report([*same, *other])))
    assert note in text and "differ in algorithm.prompts_per_step. Compare" in text


def test_the_front_has_what_none_beats_in_both() -> None:
    figures = {"a": (10, 1.0), "b": (20, 2.0), "c": (15, 2.0), "d": (20, 2.5), "e": (5, 1.0)}
    points = [Point(name, name, *figure, False) for name, figure in figures.items()]
    assert [point.mark for point in front_of(points)] == ["b", "a"]


def test_the_line_of_the_front_encloses_what_is_beaten() -> None:
    fast, cheap = (200.0, 40.0), (100.0, 90.0)  # of a drawing: right is fast, low is cheap
    assert stairs([fast, cheap]) == [fast, (100.0, 40.0), cheap]


# The command --------------------------------------------------------------------------------------


def test_the_command_writes_into_the_first_directory_and_prints_figures(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, a={}, b={"policies.system": "stream-sync"})
    done = streamrl("report", *runs, "--json", "--markdown", tmp_path / "new" / "report.md")
    assert done.returncode == 0 and done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["html"] == str(runs[0] / "report.html")
    assert "<!doctype html>" in (runs[0] / "report.html").read_text()
    assert (tmp_path / "new" / "report.md").read_text().startswith("# What it costs")
    assert found["answer"] == make_page(read_report(runs)).answer
    assert [option["name"] for option in found["options"]] == ["a", "b"]
    assert set(found["options"][0]["idle"]) == set(IDLE)


def test_the_same_directories_give_the_same_page(directories: list[Path], html: str) -> None:
    assert render_html(make_page(read_report(directories))) == html


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "is not a directory"),
        ({}, "neither trace.jsonl nor plan.json nor study.csv"),
        ({"plan.json": "{}"}, "plan.toml"),
        ({"trace.jsonl": "{}"}, "trace.jsonl:1"),
        ({"study.csv": ""}, "study.json: No such file"),
        ({"study.csv": "a", "study.json": "{}"}, "study.json: not a study"),
    ],
)
def test_wrong_input_is_one_line_and_exit_status_2(
    tmp_path: Path, content: dict[str, str] | None, wrong: str
) -> None:
    directory = tmp_path / "dir"
    if content is not None:
        directory.mkdir()
        for name, text in content.items():
            (directory / name).write_text(text)
    done = streamrl("report", directory)
    assert done.returncode == 2 and done.stdout == ""
    assert wrong in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (directory / "report.html").exists()


def test_a_directory_is_named_once(tmp_path: Path) -> None:
    (run,) = write_runs(tmp_path, run={})
    with pytest.raises(ValueError, match="named twice"):
        read_report([run, run / ".." / "run"])


def test_directories_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [*write_runs(tmp_path / "x", run={}), *write_runs(tmp_path / "y", run={"seed": 3})]
    assert [run.name for run in read_sources(runs).runs] == ["x/run", "y/run"]


def test_a_study_alone_is_a_report_of_its_finding(tmp_path: Path) -> None:
    report = read_report([write_study(tmp_path / "study")])
    page = make_page(report)
    assert page.answer == "Async costs less throughout." and page.tiles == []
    text = re.sub(r"<a [^>]*>|</a>", "", render_html(page))
    assert "75\N{NO-BREAK SPACE}% composed, 25\N{NO-BREAK SPACE}% unmeasured" in text
    assert "9 does not fit" in text
    assert describe(report)["chosen"] is None
    (study,) = report.sources.studies
    series = study.table("cost_per_million_tokens").series()
    assert {s.label: [each.median for each in s.spreads.values()] for s in series} == {
        "sync": [2.0, 3.0],
        "async": [1.5, 2.5],
    }


@pytest.mark.parametrize("place", [[0], [0, 2], [-1, 0]])
def test_a_study_with_a_row_beside_its_axes_is_refused(tmp_path: Path, place: list[int]) -> None:
    file = write_study(tmp_path / "study") / "study.json"
    found = json.loads(file.read_text())
    found["rows"][0]["place"] = place
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"row '1, sync' is outside the axes|`int` >= 0"):
        read_report([tmp_path / "study"])


def test_an_executed_run_is_timed_and_never_taken_for_a_simulation(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, predicted={}, executed={})
    file = runs[1] / "trace.jsonl"
    header, _, rest = file.read_bytes().partition(b"\n")
    changed = {**json.loads(header), "world": "real", "facts": {"host": "x86_64", "python": "3"}}
    file.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
    options: list[Option] = make_options(read_sources(runs))
    assert [option.world for option in options] == ["simulated", "executed"]
    assert options[1].band.is_timed and options[1].cost_range[0] == options[1].cost_range[1]
    chosen = chosen_of(options)
    assert chosen is options[1] and chosen.is_complete
    text = render_html(make_page(read_report([runs[1]])))
    assert "taken from a clock" in text and "x86_64" in text
    assert small_run().policies.system in text


def test_the_network_of_a_pool_is_an_assumption_with_the_key_that_says_another() -> None:
    def networks(**changes: object) -> dict[str, tuple[str, str]]:
        run = small_run({key.replace("__", "."): value for key, value in changes.items()})
        found = assumptions_of(run, load_model(run.model), None, None)
        return {a.what: (a.value, a.source) for a in found if a.what.startswith("network of")}

    key = "cluster.pools.far.node_bandwidth"
    known = networks()
    assert known["network of pool far"] == (
        "1600 Gbit/s a node",
        f"assumed, as usual for NVIDIA H20 96 GB: {key} says another",
    )
    stated = networks(cluster__pools__far__node_bandwidth="400 Gbps")
    assert stated["network of pool far"] == ("400 Gbit/s a node", f"run file: {key}")
    assert stated["network of pool near"] == known["network of pool near"]


def test_an_option_on_parts_of_a_node_names_the_pools_that_are_rented_by_the_node() -> None:
    plan = planned(few()).plan
    first = plan.options[0]
    pool = first.choice.trainer.pool
    part = replace(first, labels=["on parts of a node"], is_offered=False)
    assert not_offered_text(plan, first) == ""
    by_node = replace(plan, whole_nodes=[pool, "elsewhere"])
    assert not_offered_text(by_node, part) == f"not offered: {pool} are rented by the node here"
    own = replace(part, labels=["your own file"])
    assert "keys of [plan]" in not_offered_text(by_node, own)


def test_a_plan_that_is_just_dearer_and_much_faster_is_in_the_second_line_of_page_and_terminal(
    tmp_path: Path,
) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    first, second, *others = plan.options
    faster = replace(second, relation="11 % dearer, 1.8 times as fast")
    changed = replace(plan, options=[first, faster, *others], just_dearer=2)
    write_plan(changed, directory)
    told = "11 % dearer and 1.8 times as fast: option 2"
    assert printed(plan_report(changed))[1].strip() == told
    assert f" {told}. " in make_page(read_report([directory])).answer
    assert told in list(head_lines(changed))
    assert just_dearer_text(replace(changed, just_dearer=None)) == ""


def test_an_option_that_nothing_runs_says_so_with_the_settings() -> None:
    plan = planned(few()).plan
    able, refused = (
        Verdict(name="verl", can_run=True),
        Verdict(name="verl", can_run=False, key="trainer.zero", value="1"),
    )
    first = replace(plan.options[0], carried_by=[able])
    label = "nothing runs this today"
    other = replace(first, number=2, labels=[label], is_offered=False, carried_by=[refused])
    changed = replace(plan, options=[first, other], carried_by=[able])
    assert not_offered_text(changed, other) == "not run by verl (trainer.zero=1)"
    own = replace(other, labels=["your own file"])
    assert not_offered_text(changed, own) == f"{label}: verl (trainer.zero=1)"
    own = replace(own, carried_by=[able])
    assert "keys of [plan]" in not_offered_text(changed, own)


def test_page_and_terminal_say_first_what_can_run_a_plan_or_that_nothing_can(
    tmp_path: Path,
) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    refused = Verdict(name="verl", can_run=False, key="policies.system", value="stream-async")
    able = Verdict(name="verl", can_run=True)

    def page_of(own: Verdict, *others: Verdict) -> Page:
        first, *rest = plan.options
        options = [replace(first, carried_by=[own])]
        options += [replace(each, carried_by=list(others)) for each in rest]
        changed = replace(plan, carried_by=[own], options=options, just_dearer=None)
        write_plan(changed, directory)
        page = make_page(read_report([directory]))
        told = runners_text(changed)
        assert page.answer.endswith(told)
        head = " ".join(" ".join(printed(plan_report(changed))[:4]).split())
        assert f". {told} whole run: ".replace("\N{NO-BREAK SPACE}", " ") in head
        return page

    assert "It can be run by verl." in page_of(able).answer
    assert "Your file excludes option 2: verl could run it." in page_of(refused, able).answer
    page = page_of(refused)
    assert page.answer.endswith("can run a plan that your file allows, as it is.")
    assert any("verl not in the mode stream-async" in step.text for step in page.steps)


def test_a_plan_on_datasheets_has_the_command_that_measures(tmp_path: Path) -> None:
    directory = write_planned(tmp_path / "plan")
    plan = read_plan(directory / "plan.json")
    found = []
    for share in (0.6, 0.0):
        write_plan(replace(plan, tiers={"composed": 1 - share, "roofline": share}), directory)
        page = make_page(read_report([directory]))
        found.append([s.command for s in page.steps if s.command.startswith("streamrl profile")])
    guess, measured = found
    gpu = plan.allocation.trainer.gpu
    assert f"streamrl profile MODELDIR --gpu {gpu} --backend vllm -o {gpu}.toml" in guess
    assert measured == []


def test_no_line_of_a_chart_goes_through_a_mark() -> None:
    figures = [(4890, 0.375), (9010, 0.407), (5190, 0.471), (8310, 0.589), (14700, 0.832)]
    points = [
        Point(str(mark), "", speed, cost, mark == 1)
        for mark, (speed, cost) in enumerate(figures, start=1)
    ]
    picture = scatter_picture("pareto", points)
    assert picture.narrow is not None
    for drawing in (picture.drawing, picture.narrow):
        lines = [
            line_box(*ends)
            for shape in drawing.shapes
            if isinstance(shape, Polyline) and shape.css == "front"
            for ends in pairwise(shape.points)
        ]
        marks = [s for s in drawing.shapes if isinstance(s, Text) and s.css == "strong"]
        assert len(marks) == 5 and len(lines) == 4
        for mark in marks:
            left = mark.x - 10 if mark.anchor == "end" else mark.x
            assert not covers(text_box(left, left + 10, mark.y), lines), mark.text


def test_no_line_of_a_chart_goes_through_a_name() -> None:
    points = [
        PlanPoint("1 · recommended", "", 11.68, 77.1, is_chosen=True),
        PlanPoint("2 · on parts of a node", "", 6.31, 83.2),
        PlanPoint("3 · best synchronous", "", 10.9, 96.1),
        PlanPoint("4 · faster", "", 6.86, 121.0),
        PlanPoint("5 · fastest", "", 3.88, 171.0),
    ]
    shapes = cost_time_picture("chart", points, deadline=12.0).drawing.shapes
    lines = [
        line_box(*ends)
        for shape in shapes
        if isinstance(shape, Polyline) and shape.css in ("front", "limit")
        for ends in pairwise(shape.points)
    ]
    names = [shape for shape in shapes if isinstance(shape, Text) and " · " in shape.text]
    assert len(names) == 5 and len(lines) >= 5
    for name in names:
        wide = width_of(name.text, 13)
        left = name.x - wide if name.anchor == "end" else name.x
        assert not covers(text_box(left, left + wide, name.y), lines), name.text


def test_a_chart_has_lines_at_the_limits_and_marks_the_plans_beyond() -> None:
    points = [PlanPoint(f"{n} plan", "", float(n), 10.0 * n) for n in (2, 4, 6)]
    picture = cost_time_picture("chart", points, 5.0, 55.0)
    kinds = [shape.css for shape in picture.drawing.shapes if hasattr(shape, "radius")]
    lines = [shape for shape in picture.drawing.shapes if shape.css == "limit"]
    assert kinds.count("dot beyond") == 1 and len(lines) == 2
    assert not any(shape.css == "limit" for shape in cost_time_picture("c", points).drawing.shapes)


def test_replicas_and_their_degree_are_explained_where_a_plan_has_them_first(
    tmp_path: Path,
) -> None:
    directory = write_planned(tmp_path / "plan")
    html = render_html(make_page(read_report([directory])))
    (word,) = set(re.findall(r"<dt>(\d+ x TP\d+)</dt>", html))
    text = read_plan(directory / "plan.json").allocation.text
    assert word in text and "copies of the model that generate, times the GPUs" in html

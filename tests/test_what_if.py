"""What-if estimates: the grid of a plan, the rule on it, and the same rule in the page."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.report.page.plan_command import command_words, directory_of, plan_command
from streamrl.report.page.what_if_command import changes_of, note_of
from streamrl.report.words import pool_words, with_pool_words
from streamrl.runfile.files import load_run
from streamrl.sim.planner.plan import GpuShare, Plan, WhatIf, WhatIfPlan, read_plan, write_plan
from streamrl.sim.planner.what_if import (
    WhatIfQuestion,
    _agreeing,
    priced_plans,
    recommend,
    unchanged_question,
)
from tests.chromium import Browser, find_chromium, open_browser
from tests.report_directories import write_planned
from tests.test_docs_commands import parse

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium on PATH")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_planned(tmp_path_factory.mktemp("what-if") / "plan")


@pytest.fixture(scope="module")
def plan(directory: Path) -> Plan:
    return read_plan(directory / "plan.json")


@pytest.fixture(scope="module")
def grid(plan: Plan) -> WhatIf:
    assert plan.what_if is not None
    return plan.what_if


def small_plan(gpus: int, hours: float | None) -> WhatIfPlan:
    return WhatIfPlan(
        choice=f"{gpus} GPUs",
        settings={"policies.system": "colocated"},
        generate=[GpuShare(pool="a", num_gpus=gpus)],
        rollout_gpus=gpus,
        trainer_gpus=gpus,
        paid={"a": float(gpus)},
        mean_staleness=0.0,
        other_dollars=0.0,
        is_simulated=True,
        hours=[[[hours]]],
    )


def small_grid(*plans: WhatIfPlan) -> WhatIf:
    return WhatIf(
        lengths=[1.0],
        caps=[100],
        links=[1.0],
        unchanged=(0, 0, 0),
        mean_tokens=[[50.0]],
        bandwidth=None,
        gpus={"a": "h20"},
        prices={"a": 1.0},
        objective="cost-per-million-tokens",
        tolerance=0.1,
        value_of_hour=0.0,
        deadline=None,
        plans=list(plans),
    )


def questions(grid: WhatIf, count: int) -> Iterator[WhatIfQuestion]:
    """Yield positions of all sliders, at random from a seed."""
    draw = random.Random(7)
    hours = [h for plan in grid.plans for rows in plan.hours for row in rows for h in row if h]
    for _ in range(count):
        yield WhatIfQuestion(
            lengths=draw.randrange(len(grid.lengths)),
            cap=draw.randrange(len(grid.caps)),
            links=draw.randrange(len(grid.links)),
            prices={
                pool: round(price * draw.uniform(0.2, 3), 2) for pool, price in grid.prices.items()
            },
            value_of_hour=draw.choice([0.0, 0.0, draw.uniform(0, 500)]),
            deadline=draw.choice([None, None, draw.uniform(0.8 * min(hours), max(hours))]),
            most_rollout=draw.choice([None, *{plan.rollout_gpus for plan in grid.plans}]),
            most_trainer=draw.choice([None, *{plan.trainer_gpus for plan in grid.plans}]),
        )


# The rule -----------------------------------------------------------------------------------------


def test_the_rule_is_that_of_the_plan() -> None:
    grid = small_grid(small_plan(1, 100.0), small_plan(2, 54.0), small_plan(8, 30.0))
    asked = unchanged_question(grid)  # dollars: 100, 108, 240

    def choose(question: WhatIfQuestion) -> int:
        found = recommend(grid, question)
        assert found is not None
        return found.place

    assert choose(asked) == 1
    assert choose(asked._replace(deadline=40.0)) == 2
    assert choose(asked._replace(deadline=60.0)) == 1
    assert choose(asked._replace(deadline=110.0)) == 1, "8 % dearer than the cheapest in time"
    assert choose(asked._replace(deadline=1.0)) == 2, "none keeps it, so the fastest"
    assert choose(asked._replace(value_of_hour=10.0)) == 2
    assert choose(asked._replace(value_of_hour=0.1)) == 0
    assert choose(asked._replace(most_rollout=1)) == 0
    assert choose(asked._replace(prices={"a": 5.0})) == 1


def test_where_no_plan_fits_there_is_no_recommendation() -> None:
    grid = small_grid(small_plan(1, None))
    assert recommend(grid, unchanged_question(grid)) is None


# The grid -----------------------------------------------------------------------------------------


def test_without_a_change_the_grid_recommends_the_plan_at_its_own_total(
    plan: Plan, grid: WhatIf
) -> None:
    assert plan.whole_run is not None
    best = recommend(grid, unchanged_question(grid))
    assert best is not None and best.place == 0
    assert grid.plans[0].choice == plan.allocation.text
    assert best.dollars == pytest.approx(plan.whole_run.dollars, rel=1e-3)
    assert best.hours == pytest.approx(plan.whole_run.seconds / 3600, rel=1e-3)


def test_the_grid_has_options_at_their_own_totals_and_no_row_contradicts_a_label(
    plan: Plan, grid: WhatIf
) -> None:
    priced = priced_plans(grid, unchanged_question(grid))
    by_settings = {str(sorted(grid.plans[p.place].settings.items())): p for p in priced}
    found = {}
    for option in plan.options:
        row = by_settings.get(str(sorted(option.choice.settings.items())))
        if row is not None:
            assert row.hours == pytest.approx(option.whole_run.seconds / 3600, rel=1e-4)
            assert row.dollars == pytest.approx(option.whole_run.dollars, rel=2e-3)
            found |= dict.fromkeys(option.labels, row)
    assert found["fastest"].hours == min(each.hours for each in priced)
    # In a run this short, an option can be cheaper as a whole than the plan that has the cheapest steps. The grid leaves it out.
    assert found.get("cheapest", priced[0]).dollars == min(each.dollars for each in priced)


def test_an_estimate_that_beats_the_fastest_or_the_cheapest_option_is_left_out() -> None:
    options = [
        replace(small_plan(n, h), has_total=True) for n, h in ((2, 40.0), (1, 90.0), (4, 30.0))
    ]
    estimates = [
        replace(small_plan(n, h), is_simulated=False) for n, h in ((3, 29.0), (1, 70.0), (3, 35.0))
    ]
    kept = _agreeing(small_grid(*options, *estimates)).plans
    assert kept == [*options, estimates[2]]
    late = replace(small_grid(*options, *estimates), deadline=60.0)
    assert _agreeing(late).plans == [*options, *estimates[1:]], "70 hours break no label then"
    assert _agreeing(small_grid(*estimates)).plans == estimates


def test_longer_outputs_take_longer_and_a_dearer_pool_costs_more(grid: WhatIf) -> None:
    asked = unchanged_question(grid)
    longest = asked._replace(lengths=len(grid.lengths) - 1)
    dear = asked._replace(prices={pool: 2 * price for pool, price in grid.prices.items()})
    hours = {p.place: p for p in priced_plans(grid, asked)}
    for plan in priced_plans(grid, longest):
        assert plan.hours > hours[plan.place].hours
    for plan in priced_plans(grid, dear):
        assert plan.dollars == pytest.approx(2 * hours[plan.place].dollars, rel=0.01)
    means = [row[grid.unchanged[1]] for row in grid.mean_tokens]
    assert means == sorted(means)


def test_a_plan_file_without_a_grid_has_a_page_without_it(directory: Path, tmp_path: Path) -> None:
    for name in ("plan.json", "plan.toml"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    table = json.loads((tmp_path / "plan.json").read_text())
    del table["what_if"]
    (tmp_path / "plan.json").write_text(json.dumps(table))
    page = make_page(read_report([tmp_path]))
    assert page.explorer is None and 'id="what-if-grid"' not in render_html(page)


def test_the_command_of_a_plan_repeats_the_question_and_quotes_it(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((directory / "plan.json").read_bytes())
    comment = "# Option 2 of `streamrl plan --model m --gpus '4xH20; rm x'`: cheapest\n"
    (tmp_path / "plan.toml").write_text(comment + (directory / "plan.toml").read_text())
    (made,) = read_report([tmp_path]).sources.plans
    command = plan_command(made, ["--set", "plan.unit=1"], "parts")
    assert command == (
        f"streamrl plan --model m --gpus '4xH20; rm x' --set plan.unit=1 -o {tmp_path}-parts"
    )


def test_every_command_of_a_page_is_for_the_folder_of_the_first_command(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "plans" / "mine"
    here.mkdir(parents=True)
    plan = read_plan(directory / "plan.json")
    first, *rest = plan.options
    first = replace(first, carried_by=[])
    parts = replace(first, number=2, labels=["on parts of a node"], cost_ratio=0.9)
    rest = [replace(option, number=number) for number, option in enumerate(rest, start=3)]
    tiers = {"composed": 0.5, "roofline": 0.5}
    write_plan(replace(plan, options=[first, parts, *rest], carried_by=[], tiers=tiers), here)
    words = "# Chosen by `streamrl plan 'offers/run file.toml' --set seed=1 -o plans/mine`:\n"
    (here / "plan.toml").write_text(words + (directory / "plan.toml").read_text())
    found = {}
    for folder, path in ((tmp_path, Path("plans/mine")), (here, Path())):
        monkeypatch.chdir(folder)
        page = make_page(read_report([path]))
        found[folder] = [step.command for step in page.steps if step.command]
        assert page.explorer is not None
        shared = json.loads(page.explorer)["command"]
        assert shared["directory"] == "plans/mine"
        assert shared["changed_directory"] == "plans/mine-changed"
        assert shared["words"] == ["offers/run file.toml", "--set", "seed=1"]
    commands = found[tmp_path]
    assert commands == found[here]
    again = "streamrl plan 'offers/run file.toml' --set seed=1"
    assert f"{again} --for verl -o plans/mine-verl" in commands
    assert f"{again} --set plan.unit=1 -o plans/mine-parts" in commands
    assert "streamrl simulate plans/mine/plan.toml -o plans/mine" in commands
    for command in commands:
        parse(shlex.split(command)[1:])
    (measuring, *_) = (step for step in page.steps if step.command.startswith("streamrl profile"))
    assert measuring.text.endswith(" Replace MODELDIR by the directory of your model.")


def test_a_plan_that_was_moved_has_commands_for_its_present_place(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((directory / "plan.json").read_bytes())
    for words in ("run.toml -o plans/elsewhere", "run.toml", "run.toml -o ."):
        text = f"# Chosen by `streamrl plan {words}`:\n{(directory / 'plan.toml').read_text()}"
        (tmp_path / "plan.toml").write_text(text)
        (made,) = read_report([tmp_path]).sources.plans
        assert directory_of(made) == str(tmp_path)
        assert command_words(made) == ["run.toml"]


# In the page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(directory: Path) -> Path:
    path = directory / "report.html"
    path.write_text(render_html(make_page(read_report([directory]))))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.browser
@needs_chromium
def test_the_page_chooses_as_the_planner_does(browser: Browser, page: Path, grid: WhatIf) -> None:
    browser.open(page)
    chosen = set()
    for asked in questions(grid, 60):
        table = {
            "lengths": asked.lengths,
            "cap": asked.cap,
            "links": asked.links,
            "prices": asked.prices,
            "worth": asked.value_of_hour,
            "deadline": asked.deadline,
            "rollout": asked.most_rollout,
            "trainer": asked.most_trainer,
        }
        theirs = browser.evaluate(f"whatIf.recommend({json.dumps(table)})")
        ours = recommend(grid, asked)
        assert (theirs is None) == (ours is None), asked
        if ours is not None:
            chosen.add(ours.place)
            assert theirs == {
                "place": ours.place,
                "hours": ours.hours,
                "dollars": pytest.approx(ours.dollars),
            }
    assert len(chosen) > 1, "the questions tell rules apart"


@pytest.mark.browser
@needs_chromium
def test_a_moved_slider_is_in_the_address_and_survives_a_reload(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    before = browser.evaluate("document.querySelector('.result').textContent")
    browser.evaluate(
        "(() => { const one = document.querySelector('.slider input'); one.value = one.max;"
        " one.dispatchEvent(new Event('input')); })()"
    )
    moved = browser.evaluate("document.querySelector('.result').textContent")
    assert moved != before and browser.evaluate("location.hash").startswith("#what-if?len=")
    browser.evaluate("window.isOld = true; setTimeout(() => location.reload(), 200)")
    browser.wait_for("!window.isOld && document.readyState == 'complete'")
    assert browser.evaluate("document.querySelector('.slider.moved') !== null")
    assert browser.evaluate("document.querySelector('.result').textContent") == moved
    assert browser.complaints() == []


ROWS = """[...document.querySelectorAll('.ranked tbody tr')].map(row =>
  [...row.cells].map(cell => cell.firstChild ? cell.firstChild.textContent : ''))"""
MOVE = """(() => { const one = document.querySelector('.slider input'); one.value = one.max;
  one.dispatchEvent(new Event('input')); })()"""


@pytest.mark.browser
@needs_chromium
def test_each_row_has_the_name_of_its_option_and_says_whether_it_is_an_estimate(
    browser: Browser, page: Path, plan: Plan
) -> None:
    names = [f"{each.number} \N{MIDDLE DOT} {each.labels[0]}" for each in plan.options]
    browser.open(page)
    rows = browser.evaluate(ROWS)
    assert {names[0], names[-1]} <= {row[0] for row in rows}, "both ends are listed"
    places = {str(option.choice.settings) for option in plan.options}
    assert plan.what_if is not None
    options = [each for each in plan.what_if.plans if str(each.settings) in places]
    assert sum(row[0] in names for row in rows) == len(options) and len(rows) <= 8
    for name, _, _, basis, *_ in rows:
        assert name in names or "generate" in name, "a plan without a number is named by its GPUs"
        assert basis == "simulated" if name in names else basis.startswith("estimate")
    browser.evaluate(MOVE)
    moved = browser.evaluate(ROWS)
    assert all(row[3].startswith("estimate") for row in moved)
    assert not {row[0] for row in moved}.intersection(names), "a label holds without a change"
    assert "recommended" not in [row[-1] for row in moved]


@pytest.mark.browser
@needs_chromium
def test_a_front_of_many_plans_leaves_no_option_out(
    browser: Browser, page: Path, directory: Path, tmp_path: Path, plan: Plan, grid: WhatIf
) -> None:
    names = {f"{each.number} \N{MIDDLE DOT} {each.labels[0]}" for each in plan.options}
    browser.open(page)
    before = {row[0] for row in browser.evaluate(ROWS)} & names
    shutil.copytree(directory, tmp_path / "plan")
    first, others = grid.plans[0], [between(grid, number / 13) for number in range(1, 13)]
    many = replace(grid, plans=[first, *others, *grid.plans[1:]])
    write_plan(replace(plan, what_if=many), tmp_path / "plan")
    path = tmp_path / "report.html"
    path.write_text(render_html(make_page(read_report([tmp_path / "plan"]))))
    browser.open(path)
    rows = browser.evaluate(ROWS)
    assert len(rows) == 8 and {row[0] for row in rows} & names == before


def between(grid: WhatIf, share: float) -> WhatIfPlan:
    """Return a plan that is faster than the recommended one and a little dearer, for a full front."""
    first, asked = grid.plans[0], unchanged_question(grid)
    ours = priced_plans(grid, asked)[0]
    rent = sum(count * asked.prices[pool] for pool, count in first.paid.items())
    hours = ours.hours * (1 - 0.01 * share)
    return replace(
        first,
        choice=f"between {share:.2f}",
        settings={**first.settings, "seed": share},
        has_total=False,
        other_dollars=ours.dollars * (1 + 0.2 * share) - rent * hours,
        hours=[[[hours] * len(links) for links in caps] for caps in first.hours],
    )


@pytest.mark.browser
@needs_chromium
def test_a_click_on_a_point_shows_that_plan_with_its_command(
    browser: Browser, page: Path, grid: WhatIf
) -> None:
    browser.open(page)
    browser.evaluate(
        "document.querySelector('.spot:not(.chosen)').dispatchEvent(new Event('click', {bubbles: true}))"
    )
    shown = browser.evaluate("document.querySelector('.result .plan').textContent")
    choice = browser.evaluate("document.querySelector('.result .choice').textContent")
    words = pool_words(grid.gpus)
    choices = {with_pool_words(plan.choice, words) for plan in grid.plans[1:]}
    assert choice in choices and not shown.startswith("1 ")
    command = browser.evaluate("document.querySelector('.result [data-copy]').dataset.copy")
    assert command.startswith("streamrl plan ")
    assert "--take " in command or "plan.trainer_gpus=" in command


QUESTION = (
    "--model m --gpus '8xH800@2.20/8,8xH20@1.10' --mean-tokens 4000 --max-tokens 512 "
    "--deadline '12 hours' --set plan.value_of_hour=2"
)


@pytest.fixture
def asked_page(directory: Path, tmp_path: Path, plan: Plan, grid: WhatIf) -> Path:
    """Return the page of a plan that was made from answers."""
    shutil.copytree(directory, tmp_path / "plan")
    first, second = list(grid.prices)
    pools = {"gpus": {"h800": "h800", "h20": "h20"}, "prices": {"h800": 2.2, "h20": 1.1}}
    names = {first: "h800", second: "h20"}
    plans = [
        replace(each, paid={names[pool]: count for pool, count in each.paid.items()})
        for each in grid.plans
    ]
    asked = replace(grid, deadline=12.0, value_of_hour=2.0, plans=plans, **pools)
    write_plan(replace(plan, what_if=asked), tmp_path / "plan")
    toml = tmp_path / "plan" / "plan.toml"
    toml.write_text(f"# Chosen by `streamrl plan {QUESTION}`:\n{toml.read_text()}")
    path = tmp_path / "report.html"
    path.write_text(render_html(make_page(read_report([tmp_path / "plan"]))))
    return path


def words_of(browser: Browser, place: int = 0, change: str = "") -> list[str]:
    """Return the words of the command for a plan after a change of the sliders."""
    browser.evaluate(f"{change}; update()")
    return shlex.split(browser.evaluate(f"commandOf({place})"))


@pytest.mark.browser
@needs_chromium
def test_the_copied_command_has_the_values_of_all_sliders(
    browser: Browser, asked_page: Path, grid: WhatIf
) -> None:
    browser.open(asked_page)
    own = ["-o", str(asked_page.parent / "plan"), "--take", "1"]
    before = words_of(browser)
    assert before == ["streamrl", "plan", *shlex.split(QUESTION), *own]
    dear = words_of(browser, change="asked.prices.h800 = 0.55")
    assert dear[dear.index("--gpus") + 1] == "8xH800/8@0.55,8xH20@1.10"
    assert "--take" not in dear and dear[dear.index("--deadline") + 1] == "12 hours"
    late = words_of(browser, change="asked.deadline = 24; asked.worth = 50")
    assert late[late.index("--deadline") + 1] == "24 hours"
    assert "plan.value_of_hour=50" in late and "plan.value_of_hour=2" not in late
    open_end = words_of(browser, change="asked.deadline = null")
    assert "--deadline" not in open_end
    longer = words_of(browser, change="asked.lengths = 4; asked.cap = 2")
    assert longer[longer.index("--max-tokens") + 1] == str(grid.caps[2])
    mean = int(longer[longer.index("--mean-tokens") + 1])
    assert mean == browser.evaluate("grid.command.mean_tokens[4][2]") != 4000
    label = browser.evaluate("document.querySelector('.slider output').textContent")
    assert label == f"{mean:,} tokens"


@pytest.mark.browser
@needs_chromium
def test_the_command_of_a_plan_from_a_run_file_sets_keys(
    browser: Browser, page: Path, directory: Path, grid: WhatIf
) -> None:
    browser.open(page)
    pool = next(iter(grid.prices))
    words = words_of(
        browser, change=f"asked.prices.{pool} = 9; asked.deadline = 3; asked.lengths = 0"
    )
    assert {f"cluster.pools.{pool}.price=9", "plan.deadline=3 h"} <= set(words)
    lengths = load_run(directory / "plan.toml").workload.lengths
    assert lengths is not None
    (scale,) = (word for word in words if word.startswith("workload.lengths.scale="))
    assert float(scale.partition("=")[2]) == pytest.approx(lengths.scale / 2)


def test_commands_tell_apart_plans_with_two_kinds_of_replicas(grid: WhatIf) -> None:
    first = grid.plans[0]
    (own,) = first.generate
    found = []
    for pool, num_gpus in (("near", 1), ("near", 3), ("near", 4), (own.pool, 4)):
        mixed = replace(first, generate=[own, replace(own, pool=pool, num_gpus=num_gpus)])
        found.append(changes_of(mixed))
        assert "plan.rollout_gpus" not in found[-1], "[plan] then has replicas of one kind only"
        assert note_of(mixed) and not note_of(first)
    assert len({str(each) for each in found}) == len(found)
    assert changes_of(first)["plan.rollout_gpus"] == f"[{first.rollout_gpus}]"


def test_a_hostile_name_ends_neither_the_data_nor_the_script(
    directory: Path, tmp_path: Path
) -> None:
    hostile = "\u202e</script><script>alert(1)</script>"
    plan = read_plan(directory / "plan.json")
    assert plan.what_if is not None
    first, *others = plan.what_if.plans
    changed = replace(plan.what_if, plans=[replace(first, choice=hostile), *others])
    for name in ("plan.json", "plan.toml"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    table = json.loads((tmp_path / "plan.json").read_text())
    table["what_if"]["plans"][0]["choice"] = changed.plans[0].choice
    (tmp_path / "plan.json").write_text(json.dumps(table))
    html = render_html(make_page(read_report([tmp_path])))
    assert hostile[1:] not in html and hostile[0] not in html


@pytest.mark.browser
@needs_chromium
def test_a_plan_that_misses_the_deadline_says_so(
    browser: Browser, asked_page: Path, grid: WhatIf
) -> None:
    browser.open(asked_page)
    hours = sorted(each.hours for each in priced_plans(grid, unchanged_question(grid)))
    middle = (hours[0] + hours[-1]) / 2
    browser.evaluate(f"asked.deadline = {middle}; asked.worth = 50; update()")
    notes = [row[-1] for row in browser.evaluate(ROWS)]
    assert "misses the deadline" in notes and "best for these values" in notes
    assert browser.evaluate("document.querySelectorAll('.chart .beyond').length") == sum(
        each > middle for each in hours
    )
    chart = browser.evaluate("document.querySelector('.chart').textContent")
    assert "deadline" in chart
    assert " waiting = $" in browser.evaluate("document.querySelector('.result').textContent")
    browser.evaluate(f"asked.deadline = {hours[0] / 2}; update()")
    assert "fastest, misses the deadline" in [row[-1] for row in browser.evaluate(ROWS)]


@pytest.mark.browser
@needs_chromium
def test_a_plan_that_no_longer_fits_says_why(browser: Browser, asked_page: Path) -> None:
    browser.open(asked_page)
    browser.evaluate(
        "grid.plans[0].hours[4] = grid.plans[0].hours[4].map(row => row.map(() => null))"
    )
    browser.evaluate("asked.lengths = 4; update()")
    told = browser.evaluate("document.querySelector('.result').textContent")
    assert "Option 1 does not fit: with outputs this long it needs more GPU memory" in told
    assert "plans need more GPU memory for outputs this long" in told

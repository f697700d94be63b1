"""Numbers in recorded files are checked for their range: one line, never a traceback."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from streamrl.cli.report import blaming_figures
from streamrl.hardware.calibration_file import Calibration
from streamrl.record.run_comparison import Against
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.report.study_report import Combination
from streamrl.sim.planner.plan import Plan, read_plan
from tests.command_line import streamrl
from tests.fuzzing import EXAMPLES
from tests.report_directories import write_planned

VALUES = (0, 1e308, -1)
EACH_PAGE = 2 if EXAMPLES else 100
"""A page is made for one accepted number in so many. `make fuzz` makes more."""


def numbers(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each number in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]  # or a list
    for key, each in items:
        if isinstance(each, dict | list):
            yield from numbers(each, (*path, key))
        elif type(each) in (int, float):
            yield (*path, key)


def changed(value: Any, path: tuple[str | int, ...], number: float) -> Any:
    """Return JSON with another number at a path."""
    copied = place = copy.deepcopy(value)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = number
    return copied


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a plan that does not list its results, as if somebody had made plan.json."""
    path = write_planned(tmp_path_factory.mktemp("plan") / "made")
    (path / "results.json").unlink()
    return path


def test_each_number_of_a_plan_is_in_range_or_refused(plan: Path) -> None:
    whole = json.loads((plan / "plan.json").read_bytes())
    seen: dict[tuple[str, ...], tuple[str | int, ...]] = {}
    for path in numbers(whole):  # one for each kind of number
        seen.setdefault(tuple("*" if isinstance(each, int) else each for each in path[-2:]), path)
    num_accepted, refused = 0, []
    for path in seen.values():
        for value in VALUES:
            (plan / "plan.json").write_text(json.dumps(changed(whole, path, value)))
            try:
                read_plan(plan / "plan.json")
            except ValueError as error:
                assert "\n" not in str(error) and "plan.json: not a plan" in str(error)
                refused.append((path[-1], value))
                continue
            num_accepted += 1
            if num_accepted % EACH_PAGE == 0:
                _report(plan)
    (plan / "plan.json").write_text(json.dumps(whole))
    assert {("step_time", value) for value in VALUES} <= {*refused}
    assert not {key for key, value in refused if value == 1e308} ^ {
        path[-1] for path in seen.values()
    }
    done = streamrl("report", plan)
    assert done.returncode == 0, done.stderr


def _report(directory: Path) -> None:
    try:
        with blaming_figures([directory]):
            found = read_report([directory])
            page = make_page(found)
            shown = render_html(page) + render_markdown(page) + json.dumps(str(describe(found)))
    except ValueError as error:
        assert "\n" not in str(error) and str(directory) in str(error)
    else:
        assert not re.search(r"[\s>$](nan|-?inf)[\s<%]", shown)


def test_the_command_says_in_one_line_that_a_number_is_out_of_range(plan: Path) -> None:
    whole = json.loads((plan / "plan.json").read_bytes())
    for number in ("-1", "NaN", "1e999"):
        text = json.dumps(changed(whole, ("allocation", "step_time"), 12345.5))
        (plan / "plan.json").write_text(text.replace("12345.5", number))
        done = streamrl("report", plan)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "plan.json" in done.stderr
    (plan / "plan.json").write_text(json.dumps(changed(whole, ("taken",), 99)))
    done = streamrl("report", plan)
    assert done.returncode == 2 and "it names option 99" in done.stderr
    (plan / "plan.json").write_text(json.dumps(whole))


def unlimited(kind: Any, place: str, seen: set[type]) -> Iterator[str]:
    """Yield the place of each number in a type that has no range."""
    if isinstance(kind, inspect.FloatType | inspect.IntType):
        if kind.le is None or (kind.ge is None and kind.gt is None):
            yield place
    elif isinstance(kind, inspect.StructType):
        fields = kind.fields if kind.cls not in seen else ()
        seen.add(kind.cls)
        for field in fields:
            yield from unlimited(field.type, f"{kind.cls.__name__}.{field.encode_name}", seen)
    else:
        parts = [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
        parts += [
            getattr(kind, name) for name in ("item_type", "value_type") if hasattr(kind, name)
        ]
        for part in parts:
            yield from unlimited(part, place, seen)


@pytest.mark.parametrize("kind", [Plan, Against, Combination, Calibration])
def test_each_number_of_a_recorded_file_has_a_range(kind: type) -> None:
    assert not [*unlimited(inspect.type_info(kind), "", set())]

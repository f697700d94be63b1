"""Options of exported scripts against those that NeMo-RL and slime publish, whose parsers are in no package that installs here.

tests/published_options has the options of each, read at the commit in its first line.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from streamrl.export.launch_file import Argument, find_arguments
from streamrl.export.option_table import ExportName, load_options
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.frameworks import Value, load_framework
from streamrl.sim.planner.modes import keep_to_framework
from streamrl.sim.planner.space import Space
from tests.runs import small_run
from tests.target_offers import offer_for
from tests.test_export_parsers import FILES, MIXTURE

FOLDER = Path(__file__).parent / "published_options"
NAMES: tuple[ExportName, ...] = ("nemo-rl", "slime")
TYPES: dict[str, type | tuple[type, ...]] = {
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "list": str,
    "flag": bool,
}
"""Types of values by the kind of a published option; any other kind takes any value."""


@cache
def published(name: ExportName) -> dict[str, str]:
    """Return the published options of a framework, with the kind of their values."""
    head, *lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    assert load_framework(name).commit[:7] in head
    return dict(line.split("\t") for line in lines)


def takes(kind: str, value: Value) -> bool:
    """Return whether an option of a kind takes a value."""
    if kind == "value":
        return not isinstance(value, bool)
    if kind in ("int", "float") and isinstance(value, bool):
        return False
    return isinstance(value, TYPES.get(kind, object))


def arguments(name: ExportName) -> list[Argument]:
    """Return the arguments of many scripts: of run files, and of plans for the framework."""
    sharded = "trainer.zero=3"
    files = [
        (path, settings) for path, settings in FILES if name != "slime" or sharded not in settings
    ]
    runs: list[Run] = [load_run(Path(path), settings) for path, settings in files]
    plain = {"rollout.data_parallel": 1, "rollout.expert_parallel": 4, "rollout.replicas": 2}
    runs.append(small_run({**MIXTURE, **plain}))
    space = Space.open(keep_to_framework(offer_for("1.5b, single GPUs", name, micro_batch=[2])).run)
    runs += [space.candidate(place).apply(space.run) for place in range(0, len(space), 7)]
    return [argument for run in runs for argument in find_arguments(run, name).arguments]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_published(name: ExportName) -> None:
    known = published(name)
    added = {option.name for option in load_options(name).options if option.name not in known}
    assert added == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_of_the_type_that_is_published(name: ExportName) -> None:
    known = published(name)
    wrong = {
        (each.option.name, each.value)
        for each in arguments(name)
        if not takes(known[each.option.name], each.value)
    }
    assert wrong == set()


def test_a_value_of_another_type_is_found() -> None:
    assert not takes("flag", 4) and not takes("value", True) and not takes("int", True)
    assert not takes("int", "four") and takes("float", 1) and takes("null", "four")

"""Runs and changes that Python code gives as dicts: the same run and the same errors as a file and `--set`."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import change_run, load_run
from streamrl.runfile.sweep import axes_of

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN_FILE = EXAMPLES / "h20-h800.toml"
TABLE: dict[str, Any] = tomllib.loads(RUN_FILE.read_text())


def test_a_dict_is_the_run_of_the_file_that_it_came_from() -> None:
    output = {"execute.output": ExecuteConfig().output}  # a file's is beside the file
    assert load_run(TABLE, output) == change_run(load_run(RUN_FILE), output)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_run_without_changes_stays_as_it_is(path: Path) -> None:
    run = load_run(path)
    assert change_run(run, {}) == run


def test_a_run_does_not_change_the_dict_that_it_was_made_from() -> None:
    before = tomllib.loads(RUN_FILE.read_text())
    load_run(TABLE, {"rollout.max_tokens": "16k", "cluster.pools.h20.gpu": "NVIDIA H20"})
    assert before == TABLE


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"rollout.replicas": 16}, ["rollout.replicas=16"]),
        ({"rollout": {"replicas": 16, "max_tokens": "16k"}}, ["rollout.replicas=16", "rollout.max_tokens=16k"]),
        ({"plan.systems": ("stream-sync",)}, ["plan.systems=['stream-sync']"]),
        ({"rollout.replicas": np.int64(16)}, ["rollout.replicas=16"]),
        ({"plan.rollout_gpus": np.array([8, 16])}, ["plan.rollout_gpus=[8, 16]"]),
        ({"costs.profile": Path("a.toml")}, ["costs.profile=a.toml"]),
        ({"cluster.links.0.bandwidth": "10 Gbps"}, ["cluster.links.0.bandwidth=10 Gbps"]),
        ("rollout.replicas=16", ["rollout.replicas=16"]),
        ({}, []),
    ],
)  # fmt: skip
def test_a_change_by_value_is_the_change_by_text(changes: Any, texts: list[str]) -> None:
    run = load_run(RUN_FILE)
    assert change_run(run, changes) == change_run(run, texts)
    assert load_run(RUN_FILE, changes) == load_run(RUN_FILE, texts)


def test_none_is_an_absent_key() -> None:
    run = load_run(RUN_FILE, {"plan.deadline": "3 d", "plan.budget": 500})
    assert run.plan.deadline == 3 * 86_400
    kept = change_run(run, {"plan.deadline": None}).plan
    assert (kept.deadline, kept.budget) == (None, 500)
    assert load_run({**TABLE, "verifier": None, "plan": {"budget": None}}).plan.budget is None


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"rollout.replicas": -1}, ["rollout.replicas=-1"]),
        ({"rollout.replikas": 8}, ["rollout.replikas=8"]),
        ({"rollout.replicas": 2.5}, ["rollout.replicas=2.5"]),
        ({"rollout.replicas": float("nan")}, ["rollout.replicas=nan"]),
        ({"trainer.pool": "nowhere"}, ["trainer.pool=nowhere"]),
        ({"cluster.links.0.bandwidth": 80}, ["cluster.links.0.bandwidth=80"]),
    ],
)
def test_a_wrong_value_is_refused_as_in_a_file(changes: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(RunError) as by_text:
        load_run(RUN_FILE, texts)
    for make in (lambda: load_run(TABLE, changes), lambda: change_run(load_run(RUN_FILE), changes)):
        with pytest.raises(RunError) as by_value:
            make()
        assert str(by_value.value) == str(by_text.value)
        assert by_value.value.key == by_text.value.key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": date(2026, 1, 1)}, "seed is a date, got datetime.date(2026, 1, 1); a run file holds"),
        ({"plan.systems": ["stream-sync", {1}]}, "plan.systems.1 is a set, got {1}"),
        ({"rollout..replicas": 8}, "'rollout..replicas' is no key of a run file; write a dotted key"),
        ({8: 8}, "8 is no key of a run file"),
        ({"model": {"name": {"x": 1}}}, "model.name: 'qwen2.5-7b' is not a table"),
    ],
)  # fmt: skip
def test_what_no_run_file_holds_is_refused_by_its_key(changes: Any, words: str) -> None:
    with pytest.raises(RunError) as raised:
        change_run(load_run(RUN_FILE), changes)
    assert words in str(raised.value)


def test_a_table_that_is_no_run_file_is_refused_by_its_key() -> None:
    with pytest.raises(RunError, match=r"rollout: 1 is no key; keys are texts"):
        load_run({**TABLE, "rollout": {1: 2}})
    with pytest.raises(RunError, match="cluster is missing"):
        load_run({"model": {"name": "qwen2.5-7b"}})


def test_a_dict_that_contains_itself_is_refused_by_its_key() -> None:
    table: dict[str, Any] = {}
    table["rollout"] = table
    values: list[Any] = []
    values.append(values)
    for source, changes in ((table, {}), (TABLE, table), (TABLE, {"rollout.stop": values})):
        with pytest.raises(RunError, match=r"^rollout is nested more than 64 times"):
            load_run(source, changes)


def test_swept_values_are_written_as_set_takes_them() -> None:
    (axis,) = axes_of({"plan.systems": ["a b", "8", 8, 0.5, True, [1, 2], ["x", "ü"]]})
    texts = ["a b", '"8"', "8", "0.5", "true", "[1, 2]", '["x", "ü"]']
    assert [point[0] for point in axis.points] == texts
    (axis,) = axes_of({("rollout.replicas", "trainer.data_parallel"): [(8, 4), (16, 2)]})
    assert axis.overrides(1) == ["rollout.replicas=16", "trainer.data_parallel=2"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no key is given"),
        ({"rollout.replicas": []}, "rollout.replicas: the list is empty"),
        ({"rollout.replicas": 8}, "rollout.replicas: 8 must be a list of values"),
        ({"policies.system": "stream-sync"}, "'stream-sync' must be a list of values"),
        ({"rollout.replicas": [8, 8]}, "rollout.replicas=8 twice"),
        ({("a", "b"): [(1, 2), 3]}, "a, b: 3 must have a value of each of 2 keys"),
        ({"rollout": [{"replicas": 8}]}, "rollout is a table"),
    ],
)
def test_values_that_cannot_be_swept_are_refused(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"^.*$") as raised:
        axes_of(values)
    assert words in str(raised.value)

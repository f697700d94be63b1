"""docs/tested.md and `doctor` tell the same of what was run where, and each named test and check exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from benchmarks.gpu_checks import PARTS
from streamrl.executor.checkup import tested_paths
from streamrl.executor.checkup.tested_paths import NEVER, PATHS, RunPath
from streamrl.runfile.backend_choice import ENGINES, TRAINING_BACKENDS
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.files import make_run
from tests import tested_page as page
from tests.patients import NOWHERE, local_table

HERE = Path(__file__).parent
MARKS = {
    "test-vllm": "vllm",
    "test-deepspeed": "deepspeed",
    "test-fsdp2": "fsdp2",
    "test-ray": "ray",
    "test-trl": "trl",
}
"""Marks of the tests of make targets with a selection of their own."""


def test_the_page_has_what_doctor_says() -> None:
    assert (HERE.parent / "docs" / "tested.md").read_text() == page.tested_page()


def test_each_path_names_a_test_that_exists_and_a_part_of_make_gpu() -> None:
    targets = set(re.findall(r"^([a-z0-9 -]+):", (HERE.parent / "Makefile").read_text(), re.M))
    known = {target for line in targets for target in line.split()}
    for path in PATHS:
        assert not path.check or path.check in PARTS, path
        if not path.test:
            continue
        assert path.command in known, path
        file, _, name = path.test.partition("::")
        text = (HERE / file).read_text()
        names = {
            node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
        }
        assert name in names, path
        mark = MARKS.get(path.command, "")
        assert mark in text or mark in (HERE / "engines.py").read_text(), path


def test_every_choice_of_a_run_file_has_its_row() -> None:
    choices = {f"{each.key} = {name}" for each in (ENGINES, TRAINING_BACKENDS) for name in each.own}
    launchers = get_args(get_type_hints(ExecuteConfig)["launcher"])
    choices |= {f"execute.launcher = {name}" for name in launchers}
    assert choices <= {path.path for path in PATHS}


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("rollout.top_p", {"rollout.top_p": 0.9}),
        ("rollout.max_running > 7", {"rollout.max_running": 8}),
        ("sync.mode = lora", {"sync.mode": "lora"}),
        ("execute.checkpoints.export", {"execute.checkpoints.export": "there"}),
        ("evaluation", {"evaluation.share": 0.5, "evaluation.every": 1}),
    ],
)
def test_doctor_names_a_path_that_its_key_chooses(
    path: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RunPath("Topic", path, "test", "test_x.py::x")
    monkeypatch.setattr(tested_paths, "PATHS", (*PATHS, own))
    for settings, is_chosen in (({"rollout.max_running": 7}, False), (changes, True)):
        found = tested_paths.find(make_run(local_table(tmp_path, settings), NOWHERE.parent))
        assert any(path in finding.text for finding in found) == is_chosen


def test_doctor_warns_of_paths_that_were_never_run_and_of_no_other(tmp_path: Path) -> None:
    here = list(tested_paths.find(make_run(local_table(tmp_path), NOWHERE.parent)))
    assert [finding.level for finding in here] == ["ok"]
    assert "on a CPU before: rollout.backend = transformers, " in here[0].text
    changes = {"execute.device": "cuda", "sync.mode": "lora"}
    (there,) = tested_paths.find(make_run(local_table(tmp_path, changes), NOWHERE.parent))
    assert there.level == "warning"
    assert there.text.startswith("never run on a GPU by this project: ")
    assert "sync.mode = lora" in there.text
    assert "rollout.backend" not in there.text
    assert {path.path: path.ran_on for path in PATHS}["sync.mode = lora"] == NEVER

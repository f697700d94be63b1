"""docs/running.md and `doctor` tell the same of what was run where."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

from streamrl.executor.checkup import tested_backends as where_run
from streamrl.executor.checkup.tested_backends import NEVER, RAN
from streamrl.runfile.backend_choice import ENGINES, TRAINING_BACKENDS
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.files import make_run
from tests.patients import NOWHERE, local_table

PAGE = Path(__file__).parents[1] / "docs" / "running.md"


def test_the_page_has_what_doctor_says() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    rows = [row for row in rows if len(row) == 3 and any(sign in row[0] for sign in "=>")]
    rows = [row for row in rows if not row[0].startswith("`")]  # those of another table
    assert [tuple(row) for row in rows] == [tuple(ran) for ran in RAN.values()]


def test_every_choice_of_a_run_file_has_its_row() -> None:
    choices = {f"{each.key} = {name}" for each in (ENGINES, TRAINING_BACKENDS) for name in each.own}
    launchers = get_args(get_type_hints(ExecuteConfig)["launcher"])
    choices |= {f"execute.launcher = {name}" for name in launchers}
    assert choices <= set(RAN)


def test_doctor_warns_of_a_path_that_was_never_run_and_of_no_other(tmp_path: Path) -> None:
    here = list(where_run.find(make_run(local_table(tmp_path), NOWHERE.parent)))
    assert [finding.level for finding in here] == ["ok"]
    assert "rollout.backend = transformers on a CPU by every test" in here[0].text
    changes = {"execute.device": "cuda", "execute.launcher": "in-process"}
    there = list(where_run.find(make_run(local_table(tmp_path, changes), NOWHERE.parent)))
    texts = [finding.text for finding in there if finding.level == "warning"]
    assert any("execute.launcher = in-process on a GPU was never run" in text for text in texts)
    assert not any("rollout.backend = vllm" in text for text in texts)
    assert RAN["execute.launcher = in-process"].on_gpu == NEVER

"""What `execute` refuses because its back ends would do less than the run file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor.checkup import readiness
from executor.execute import execute
from streamrl.runfile.reading import make_run
from tests.patients import NOWHERE, bad, local_table

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sync.mode": "delta", "model.dtype": "bfloat16"}, "sync.mode=full"),
    ({"sync.mode": "lora"}, "sync.mode=full"),
    ({"model.dtype": "float16"}, "model.dtype=bfloat16"),
    ({"rollout.temperature": 0.0}, "rollout.temperature=1.0"),
    ({"rollout.temperature": float("nan")}, "rollout.temperature=1.0"),
    ({"algorithm.learning_rate": -1e-6}, "algorithm.learning_rate=1e-06"),
    ({"algorithm.max_grad_norm": 0.0}, "algorithm.max_grad_norm=1.0"),
    ({"algorithm.name": "ppo"}, "algorithm.name=grpo algorithm.group_size=8"),
]


@pytest.mark.parametrize(("changes", "fix"), REFUSED)
def test_what_would_be_executed_as_less_than_it_says_is_refused_before_anything_is_written(
    changes: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    run = make_run(local_table(tmp_path, changes), NOWHERE.parent)
    key, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=rf"^{key} must be .*, got {value!r}") as refusal:
        execute(run)
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()
    finding = bad(list(readiness.find(run)))["back-end"]
    assert finding.level == "error" and finding.fix == f"set {fix}"


@pytest.mark.parametrize("mode", ["delta", "lora"])
def test_a_plan_that_asks_for_another_sync_says_how_to_execute_it_with_full_weights(
    mode: str, tmp_path: Path
) -> None:
    changes = {"sync.mode": mode, "model.dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"--set sync\.mode=full executes the run with full"):
        execute(make_run(local_table(tmp_path, changes)))

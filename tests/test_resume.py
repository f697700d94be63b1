"""Resuming: what a finished run's directory holds stays as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from executor.checkup import run_paths
from executor.execute import execute as execute_for_real
from streamrl.runfile.reading import make_run
from tests.patients import bad, local_table
from tests.test_execute import execute, real_run


def digests(directory: Path) -> dict[str, str]:
    """Return a hash of every file by its path inside the directory."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("steps", [3, 2])
def test_resuming_a_run_that_has_all_its_steps_is_refused_and_changes_no_file(
    steps: int, tmp_path: Path
) -> None:
    execute(real_run(tmp_path, algorithm__steps=3))
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=r"has all its steps.*step 3; --set algorithm\.steps=6"):
        execute(real_run(tmp_path, algorithm__steps=steps), resume=True)
    assert digests(tmp_path) == before
    assert len(execute(real_run(tmp_path, algorithm__steps=6), resume=True).entries) > 10


def test_a_finished_run_is_refused_before_its_prompts_are_read(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path, {"algorithm.steps": 7}))
    checkpoint = tmp_path / "run" / "checkpoints" / "v000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "trace.jsonl").touch()
    (checkpoint / "position.json").write_text('{"version": 7, "groups_done": 14}')
    before = digests(tmp_path)
    with pytest.raises(ValueError, match="has all its steps"):
        execute_for_real(run, resume=True)
    assert digests(tmp_path) == before
    finding = bad(list(run_paths.find(run)))["output"]
    assert "leaves nothing to do" in finding.text and "algorithm.steps is above 7" in finding.fix

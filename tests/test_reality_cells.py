"""The run files of `make bench-reality`: each can be executed, none is the quickstart, and they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reality_cells import CELLS, LONG, MAX_PROMPT, Cell, make_run, with_expectations
from streamrl.engine.presets import choose_system
from streamrl.runfile.files import load_run
from streamrl.targets.execute_limits import check_back_ends
from streamrl.workload.prompt_records import EXPECTED
from tests.measured_profile import model_directory

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"


@pytest.mark.parametrize("one", CELLS, ids=lambda one: one.name)
def test_a_run_file_of_the_benchmark_can_be_executed_within_the_profiles_limits(
    one: Cell, tmp_path: Path
) -> None:
    (tmp_path / one.model).mkdir()
    model_directory(tmp_path / one.model / "model")
    run, tuned = make_run(one, tmp_path, tmp_path / "run"), load_run(QUICKSTART)
    check_back_ends(run)
    assert run.rollout.max_tokens <= LONG and run.workload.max_prompt_tokens <= MAX_PROMPT
    assert run.rollout.max_running <= 64
    assert (
        run.policies,
        run.algorithm.group_size,
        run.rollout.replicas,
        run.rollout.max_tokens,
    ) != (
        *(tuned.policies, tuned.algorithm.group_size),
        *(tuned.rollout.replicas, tuned.rollout.max_tokens),
    )


def test_the_run_files_cover_what_they_are_to_tell_apart(tmp_path: Path) -> None:
    runs = [make_run(one, tmp_path, tmp_path / "run") for one in CELLS]
    assert len({one.name for one in CELLS}) == len(CELLS) == 12
    assert {one.model for one in CELLS} == {"first", "second"}
    assert {run.rollout.replicas for run in runs} == {1, 2, 3}
    assert len({run.policies.system for run in runs}) == 6
    chosen = [choose_system(run.policies) for run in runs]
    assert len({system.dispatch for system in chosen}) == 4
    assert len({run.algorithm.group_size for run in runs}) >= 4
    assert len({run.rollout.max_tokens for run in runs}) >= 4


def test_prompts_say_what_to_expect_of_them() -> None:
    record = {"prompt": "a1+b2=", "entry": {"metadata": {"num_terms": 2}}}
    (line,) = with_expectations([json.dumps(record)])
    assert json.loads(line) == {**record, EXPECTED: 26} and line.endswith("\n")

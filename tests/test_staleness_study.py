"""A figure of what staleness costs, from a study: the line, what is refused, and that a run file is planned with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.staleness import studied
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import decode_run, encode_run, load_run, make_run, write_run
from streamrl.runfile.staleness_study import read_staleness_model
from tests.runs import make_table


def run_of(staleness: int, lag: float, steps: int | None, correction: str = "token-tis") -> Any:
    return {
        "staleness": staleness,
        "correction": correction,
        "seed": 0,
        "lag": lag,
        "steps": steps,
    }


RUNS = [run_of(0, 0.0, 20), run_of(2, 1.0, 21), run_of(2, 1.0, 23), run_of(8, 4.0, 28)]


def write_study(directory: Path, runs: list[Any] = RUNS) -> str:
    path = directory / "study.json"
    path.write_text(json.dumps({"task": "sums", "target_reward": 0.8, "runs": runs}))
    return str(path)


def test_the_line_goes_through_the_least_lag_and_fits_the_others(tmp_path: Path) -> None:
    """Of (1, 0.05), (1, 0.15) and (4, 0.4): slope (0.05 + 0.15 + 1.6) / 18."""
    model = read_staleness_model(write_study(tmp_path), "token-tis")
    assert model.percent == pytest.approx(10.0) and model.base_steps == 20
    assert model.error == pytest.approx(100 * ((2 * 0.05**2) / 2 / 18) ** 0.5)
    told = str(model)
    assert "steps to a reward of 0.8 = 20 x (1 + (10 +- 1.2) % x (lag - 0))" in told
    assert told.startswith("study.json (sums, 4 runs with token-tis)")


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run_of(0, 0.0, 20, "none")], "no runs with algorithm.correction 'token-tis': none"),
        ([*RUNS, run_of(8, 4.0, None)], "1 of 5 runs with token-tis never reached a reward of 0.8"),
        ([run_of(0, 0.0, 20), run_of(2, 0.0, 22)], "have equal lags"),
        ([{"lag": 1}], "not a study of staleness"),
    ],
)
def test_a_study_that_says_nothing_of_the_cost_is_refused_in_a_line(
    tmp_path: Path, runs: list[Any], words: str
) -> None:
    changes = {"plan": {"staleness_study": write_study(tmp_path, runs)}}
    with pytest.raises(ValueError, match=words) as refusal:
        make_run(make_table(changes))
    assert "plan.staleness_study" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_run_file_that_names_a_study_has_its_cost_wherever_it_goes(tmp_path: Path) -> None:
    write_study(tmp_path)
    run = make_run(make_table({"plan": {"staleness_study": "study.json"}}), tmp_path)
    assert run.plan.staleness_cost == pytest.approx(10.0)
    elsewhere = tmp_path / "plans"
    elsewhere.mkdir()
    write_run(run, elsewhere / "plan.toml")
    assert load_run(elsewhere / "plan.toml").plan == run.plan
    (tmp_path / "study.json").unlink()
    assert decode_run(encode_run(run)).plan.staleness_cost == pytest.approx(10.0)
    with pytest.raises(ValueError, match=r"plan\.staleness_study .*: cannot be read: No such file"):
        load_run(elsewhere / "plan.toml")


def test_a_cost_of_your_own_beside_a_study_is_refused(tmp_path: Path) -> None:
    plan = {"staleness_study": write_study(tmp_path), "staleness_cost": 3.0}
    with pytest.raises(
        RunError, match=r"must be absent where plan\.staleness_study says it \(10\)"
    ):
        make_run(make_table({"plan": plan}))


def test_the_steps_to_a_reward_are_those_of_a_mean_over_five() -> None:
    rewards = [0.0, 0.9, 0.1, 0.5, 0.5, 0.8, 0.9, 0.9]
    lines: list[Any] = [
        {"step": n, "reward": r, "time": 2.0 * n, "staleness_mean": 1.5}
        for n, r in enumerate(rewards, start=1)
    ]
    found = studied(lines, 2, "none", 0, target=0.55)
    assert (found.steps, found.seconds, found.lag) == (6, 12.0, 1.5)
    assert studied(lines, 2, "none", 0, target=0.9).steps is None

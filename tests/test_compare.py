"""`streamrl compare`: a prediction against what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.cli.compare import compare
from streamrl.record.metrics import measure
from streamrl.report.run_tables import most_different_cause
from streamrl.sim.world import simulate
from tests.runs import small_run


def write_trace(directory: Path, world: str) -> Path:
    """Write a simulation, or the same as if it had been executed; a KL term trains on every rollout."""
    encoded = simulate(small_run({"algorithm.kl_coefficient": 0.1})).encode()
    directory.mkdir()
    marked = encoded.replace(b'"world":"simulated"', f'"world":"{world}"'.encode(), 1)
    (directory / "trace.jsonl").write_bytes(marked)
    return directory


@pytest.mark.parametrize("is_given", [False, True])
def test_an_executed_run_is_compared_with_its_simulation(
    is_given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = write_trace(tmp_path / "simulated", "simulated") if is_given else None
    compare(write_trace(tmp_path / "run", "real"), predicted, as_json=True)
    assert abs(json.loads(capsys.readouterr().out)["step_time"]["error"]) < 1e-9


def test_a_simulation_is_not_compared_with_itself(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "what-if", "simulated")
    with pytest.raises(ValueError, match=r"what-if: .*executed run.*streamrl execute"):
        compare(path)


def test_what_was_executed_predicts_nothing(tmp_path: Path) -> None:
    measured, other = (write_trace(tmp_path / name, "real") for name in ("run", "other"))
    with pytest.raises(ValueError, match=r"other: .*a simulation here, got an executed run"):
        compare(measured, other)


def test_what_is_simulated_for_a_run_can_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, given = (
        write_trace(tmp_path / "run", "real"),
        write_trace(tmp_path / "s", "simulated"),
    )
    predicted = []
    for seconds in (100, 200):
        compare(measured, overrides=[f"framework.step_time={seconds} s"], as_json=True)
        predicted.append(json.loads(capsys.readouterr().out)["step_time"]["predicted"])
    assert predicted[1] == pytest.approx(predicted[0] + 100)
    with pytest.raises(ValueError, match="--set changes what is simulated now"):
        compare(measured, given, overrides=["framework.step_time=100 s"])


@pytest.mark.parametrize(
    "change",
    ["rollout.max_tokens=8", "algorithm.prompts_per_step=4", "model.name=llama-3.1-8b"],
)
def test_a_run_is_not_compared_with_a_simulation_of_other_work(change: str, tmp_path: Path) -> None:
    measured = write_trace(tmp_path / "run", "real")
    key = change.partition("=")[0]
    with pytest.raises(ValueError, match=rf"{key} is .* with --set and .* in the recorded run"):
        compare(measured, overrides=[change])


def test_the_cause_of_idle_time_that_was_predicted_worst_is_named_with_its_keys() -> None:
    predicted = measure(simulate(small_run()))
    idle = {**predicted.idle, "verifier": predicted.idle.get("verifier", 0.0) + 0.38}
    told = most_different_cause(predicted, replace(predicted, idle=idle))
    assert told.startswith("Predicted worst: idle for verifier, ")
    assert told.endswith("38.0% measured; set verifier.time and verifier.workers.")
    assert most_different_cause(predicted, predicted) == ""

"""A prediction of a recorded run depends on its manifest and workload, and on nothing that was measured."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from streamrl.engine.trace import Trace, read_trace
from streamrl.logs.measured_steps import SECONDS, MeasuredStep, StepLengths
from streamrl.record.recorded_inputs import RecordedInputs, recorded_inputs
from streamrl.sim.calibration.simulated_steps import simulate_steps
from streamrl.sim.studies.rerun import simulate_as_recorded
from streamrl.sim.world import simulate
from streamrl.workload.workload import RecordedLengths
from tests.runs import small_run

SOME: dict[str, Any] = {"algorithm.prompts_per_step": 8, "algorithm.steps": 6}
SLOWER = 7.0
"""Factor by which all seconds of a record are changed."""


def change_seconds(value: Any) -> Any:
    """Return a message of a trace with other seconds."""
    if isinstance(value, list):
        return [change_seconds(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: each * SLOWER if key.endswith("_time") else change_seconds(each)
        for key, each in value.items()
    }


def slowed(file: Path, into: Path) -> Path:
    """Write a trace with the same work and other outcomes."""
    header, *entries = file.read_text().splitlines()
    made = {**json.loads(header), "decode": None, "other_decodes": []}
    lines = [json.dumps(made)]
    for time, event, commands in map(json.loads, entries):
        lines.append(json.dumps([time * SLOWER, change_seconds(event), change_seconds(commands)]))
    into.mkdir()
    (into / "trace.jsonl").write_text("\n".join(lines) + "\n")
    return into / "trace.jsonl"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the trace file of a small run."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(simulate(small_run(SOME)).encode())
    return path


def predicted(path: Path) -> list[tuple[float, str]]:
    """Return the times and events of the prediction of a recorded run."""
    trace = simulate_as_recorded(recorded_inputs(read_trace(path), path), 6)
    return [(time, type(event).__name__) for time, event, _ in trace.entries]


def test_a_prediction_does_not_depend_on_what_was_measured(file: Path, tmp_path: Path) -> None:
    other = slowed(file, tmp_path / "slowed")
    assert read_trace(other).entries[-1].time == pytest.approx(
        SLOWER * read_trace(file).entries[-1].time
    )
    assert predicted(other) == predicted(file)


def test_a_prediction_depends_on_recorded_lengths(file: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.mkdir()
    text = file.read_text().replace('"tokens":', '"tokens":1')
    (longer / "trace.jsonl").write_text(text)
    assert predicted(longer / "trace.jsonl") != predicted(file)


PREDICTORS: list[Callable[..., object]] = [simulate_as_recorded, simulate_steps]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_predictor_takes_no_outcomes(predictor: Callable[..., object]) -> None:
    hints = get_type_hints(predictor)
    taken = [str(hints[name]) for name in inspect.signature(predictor).parameters]
    for outcome in (Trace, MeasuredStep):
        assert not any(outcome.__name__ in each for each in taken)


def test_what_a_predictor_reads_has_no_seconds() -> None:
    fields = {*StepLengths._fields, *RecordedLengths._fields, *RecordedInputs.__struct_fields__}
    assert not fields & {*SECONDS, "entries", "steps", "outcomes"}
    step = MeasuredStep(step=3, step_time=20.0, output_tokens=80.0, tokens_per_second=5.0)
    assert step.lengths == (3, 80.0, None)


def test_the_manifest_says_what_ran_and_with_which_versions(file: Path) -> None:
    trace = read_trace(file)
    manifest = recorded_inputs(trace, file).manifest
    assert manifest.run == trace.run and manifest.world == "simulated"
    assert manifest.versions == trace.facts and manifest.num_starts == 1

"""Two published runs that were badly tuned are recognised, and published runs that were not are normal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.diagnose import _stated_steps
from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.report.diagnosis_table import diagnosis_lines
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run, make_run, write_run
from streamrl.sim.diagnosis.diagnosis import diagnose, mean_step
from streamrl.sim.diagnosis.result import Diagnosis
from streamrl.sim.fidelity.rl_steps import load_published
from tests.command_line import streamrl
from tests.runs import small_run

LENGTHS = {"kind": "histogram", "source": "streamrl-codemath-20k", "scale": 0.3}


def _colocated(model: str, **sections: dict[str, Any]) -> Run:
    """Return a colocated run on 8 H800."""
    table: dict[str, Any] = {
        "model": {"name": model},
        "cluster": {"pools": {"h800": {"gpu": "h800", "nodes": 1}}},
        "policies": {"system": "colocated"},
        **sections,
    }
    for role in ("rollout", "trainer"):
        table[role] = {"pool": "h800", **table[role]}
    return make_run(table)


def _verl() -> Run:
    return _colocated(
        "qwen3-8b",
        framework={"name": "verl"},
        rollout={
            "replicas": 1,
            "tensor_parallel": 8,
            "max_tokens": 2048,
            "memory_utilization": 0.35,
        },
        trainer={
            "data_parallel": 4,
            "tensor_parallel": 2,
            "packing": "padded",
            "max_tokens_per_pass": 4096,
            "offload": True,
        },
        algorithm={
            "name": "grpo",
            "steps": 10,
            "prompts_per_step": 32,
            "group_size": 5,
            "old_log_probs": "trainer",
            "kl_coefficient": 0.001,
        },
        workload={"lengths": {**LENGTHS, "prompt_tokens": 600}},
        costs={"engine": "sglang-0.5"},
    )


def _slime() -> Run:
    return _colocated(
        "qwen3-1.7b",
        framework={"name": "slime"},
        rollout={"replicas": 8, "max_tokens": 4096},
        trainer={"data_parallel": 8, "offload": True},
        algorithm={"name": "grpo", "steps": 10, "prompts_per_step": 128, "group_size": 32},
        workload={"lengths": {**LENGTHS, "prompt_tokens": 200}},
    )


TRAINING_KEYS = {"trainer.offload", "trainer.kernels", "trainer.recompute"}
VERL = (
    *("rollout=29", "old-log-probs=84", "reference=82"),
    *("train=91", "sync=3.5", "step=290"),
)


def _verdicts(found: Diagnosis) -> dict[str, str]:
    return {stage.name: stage.verdict for stage in found.stages}


@pytest.fixture(scope="module")
def verl() -> Diagnosis:
    return diagnose(_verl(), _stated_steps(VERL))


def test_a_padded_run_of_small_passes_is_slow_in_training_and_log_probs(verl: Diagnosis) -> None:
    assert not verl.is_normal
    verdicts = _verdicts(verl)
    del verdicts["generation"]  # at the end of its range
    assert verdicts == {"score": "slow", "train": "slow", "sync": "normal"}
    assert verl.binds == "score"
    assert all("packing" in text and "tokens in a pass" in text for text in verl.causes)


def test_its_generation_is_not_the_problem(verl: Diagnosis) -> None:
    assert [text.partition(":")[0] for text in verl.not_the_problem] == ["generation", "sync"]


def test_its_packing_its_passes_and_the_parallelism_of_its_rollouts_are_doubtful(
    verl: Diagnosis,
) -> None:
    keys = [text.partition(" is ")[0] for text in verl.doubtful]
    wanted = {"trainer.packing", "trainer.max_tokens_per_pass", "rollout.tensor_parallel"}
    assert wanted <= set(keys)


def test_at_most_three_changes_are_named_and_the_best_is_first(verl: Diagnosis) -> None:
    gains = [each.seconds for each in verl.advice]
    assert 1 <= len(gains) <= 3 and gains == sorted(gains, reverse=True)


def test_a_gain_counts_a_slow_stage_up_to_the_end_of_its_range(verl: Diagnosis) -> None:
    most = sum(stage.band.high for stage in verl.stages if stage.verdict == "slow")
    assert all(each.settings.keys() <= TRAINING_KEYS for each in verl.advice)
    assert all(each.seconds < most for each in verl.advice)


def test_a_step_without_stages_names_the_engine_first() -> None:
    found = diagnose(_slime(), _stated_steps(["step=600"]))
    (cause,) = found.causes
    assert not found.is_normal and not found.has_stages and found.binds == "generation"
    assert cause.index("concurrency") < cause.index("memory share") < cause.index("CUDA graphs")
    assert found.step.predicted / 600 <= 150 / 600  # about a quarter, or less
    assert set(_verdicts(found).values()) == {"unknown"} and not found.not_the_problem
    assert any("no stage was measured" in note for note in found.notes)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("pick", [0, -1])
def test_published_runs_that_are_well_tuned_are_normal(place: int, pick: int) -> None:
    """Each with the least and the most of what its source does not state."""
    published = load_published()[place]
    run = make_run(published.table)
    run = change_run(run, {key: values[pick] for key, values in published.opens.items()})
    found = diagnose(run, _measured(published.mean_tokens, published.stages))
    assert found.is_normal and not found.causes
    assert {"generation", "train"} <= {text.split(":")[0] for text in found.not_the_problem}


def _measured(tokens: float, stages: dict[str, tuple[float, float]]) -> MeasuredSteps:
    seconds = {name: stages[name][0] for name in ("generation", "score", "train")}
    step = MeasuredStep(step=1, step_time=stages["step"][0], output_tokens=tokens, **seconds)
    return MeasuredSteps(source="published", framework="csv", steps=(step,))


def test_the_first_of_many_steps_does_not_count() -> None:
    rows = [MeasuredStep(step=n, step_time=6000 if n == 1 else 60) for n in range(1, 6)]
    measured = MeasuredSteps(source="log", framework="csv", steps=tuple(rows))
    assert mean_step(measured).step_time == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either LOG or --stage"),
        (("--stage", "rolout=3"), "got 'rolout'"),
        (("--stage", "train=-3"), "seconds above 0"),
        (("--stage", "step=9", "--model", "qwen3-8b"), "a run file says this"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_run(_verl(), tmp_path / "run.toml")
    done = streamrl("diagnose", "--run", tmp_path / "run.toml", *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_a_log_of_other_work_is_refused(tmp_path: Path) -> None:
    write_run(_verl(), tmp_path / "run.toml")
    (tmp_path / "steps.csv").write_text("step,train,rollouts\n1,9,999\n")
    done = streamrl("diagnose", tmp_path / "steps.csv", "--run", tmp_path / "run.toml")
    assert done.returncode == 2 and "algorithm.prompts_per_step" in done.stderr


def test_a_log_is_judged_and_printed_as_one_json_object(tmp_path: Path) -> None:
    write_run(_verl(), tmp_path / "run.toml")
    (tmp_path / "steps.csv").write_text("step,step_time,train,score\n1,290,91,166\n")
    done = streamrl("diagnose", tmp_path / "steps.csv", "--run", tmp_path / "run.toml", "--json")
    assert done.returncode == 0 and '"is_normal":false' in done.stdout


@pytest.mark.parametrize(
    ("stages", "part"),
    [
        (["train=10", "train=20"], "--stage train=20: it has the seconds of --stage train already"),
        (
            ["rollout=29", "generation=50"],
            "--stage generation=50: it has the seconds of --stage rollout",
        ),
        (["reference=9", "score=5"], "--stage score=5: it has the seconds of --stage reference"),
        (
            ["score=5", "old-log-probs=7"],
            "--stage old-log-probs=7: it has the seconds of --stage score",
        ),
        (["step=10", "train=100"], "--stage step=10: train takes 100 s"),
        (["reference=6", "old-log-probs=6", "step=10"], "--stage step=10: score takes 12 s"),
        (["score=6", "train=6", "step=10"], "--stage step=10: score and train follow each other"),
    ],
)
def test_stages_that_cannot_be_of_one_step_are_one_line(
    stages: list[str], part: str, tmp_path: Path
) -> None:
    write_run(small_run(), tmp_path / "run.toml")
    options = [text for stage in stages for text in ("--stage", stage)]
    done = streamrl("diagnose", "--run", tmp_path / "run.toml", *options)
    assert done.returncode == 2 and part in done.stderr and done.stderr.count("\n") == 1


def test_a_step_much_faster_than_its_run_file_is_not_normal() -> None:
    step = MeasuredStep(step=1, step_time=1e-6)
    found = diagnose(small_run(), MeasuredSteps(source="log", framework="csv", steps=(step,)))
    assert not found.is_normal
    assert "times as fast as this run file should be" in next(diagnosis_lines(found))


def test_a_stage_that_cannot_be_of_the_run_file_is_not_normal() -> None:
    found = diagnose(_verl(), _stated_steps(["train=0.001"]))
    assert not found.is_normal and {each.name for each in found.stages} > {"train"}
    first = next(diagnosis_lines(found))
    assert "train is" in first and "times as fast as this run file should be" in first


def test_a_stage_that_was_not_measured_counts_as_predicted() -> None:
    found = diagnose(_verl(), _stated_steps(["sync=0.5", "step=70"]))
    longest = max(found.stages, key=lambda each: each.measured or each.predicted)
    assert found.binds == longest.name != "sync" and longest.measured is None
    assert f"longest stage (predicted): {longest.name}" in diagnosis_lines(found)


def test_a_run_directory_is_judged_by_the_run_file_that_it_has(tmp_path: Path) -> None:
    write_run(small_run(), tmp_path / "run.toml")
    assert streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "made").returncode == 0
    done = streamrl("diagnose", tmp_path / "made", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_normal"] and not any("layout" in note for note in found["notes"])


def test_other_tokens_of_prompts_are_a_note_and_the_measured_ones_are_simulated() -> None:
    steps = MeasuredSteps(
        source="made",
        framework="csv",
        steps=(MeasuredStep(step=1, step_time=290.0, train=91.0, prompt_tokens=40.0),),
    )
    found = diagnose(_verl(), steps)
    (note,) = (each for each in found.notes if "prompt_tokens" in each)
    assert note.endswith("The measured tokens are simulated") and "but 40 were measured" in note
    few = change_run(_verl(), {"workload.lengths.prompt_tokens": 40})
    assert found.step.predicted == diagnose(few, steps).step.predicted

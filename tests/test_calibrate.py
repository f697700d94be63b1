"""Factors that are fitted to measured steps: found again where they are known, and refused where a run file is wrong."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.hardware.calibration_file import Calibration, write_calibration
from streamrl.hardware.profiles import read_profile
from streamrl.logs.measured_steps import SECONDS, MeasuredStep, MeasuredSteps, write_steps
from streamrl.runfile.config import Run
from streamrl.runfile.files import write_run
from streamrl.sim.calibration.calibrate import Calibrated, calibrate_steps
from streamrl.sim.calibration.disagreement import find_differences, find_disagreements, mean_tokens
from streamrl.sim.calibration.simulated_steps import simulate_steps
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import streamrl
from tests.made_logs import MADE
from tests.runs import small_run

TRUTH = """
source = "made"
date = 2026-11-24
model = "qwen2.5-7b"
system = "disaggregated"
generation = { gpu = "h20", factor = 0.5 }
score = { gpu = "h800", factor = 0.8 }
train = { gpu = "h800", factor = 0.7 }
sync = { gpu = "h20", factor = 0.25 }
overhead = { seconds = 4.0 }
"""
BOUND = TRUTH.replace("factor = 0.5", "factor = 0.1").replace("factor = 0.25", "factor = 1.0")
"""Of a cluster whose generation is so slow that all else waits for it."""
KEYS: dict[str, Any] = {
    "policies.system": "disaggregated",
    "algorithm.old_log_probs": "trainer",
    "algorithm.prompts_per_step": 16,
    "framework": {},
}
AT_ONCE: dict[str, Any] = {
    "cluster.links": [{"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "0 s"}]
}
"""Nothing of a step but its stages and what the framework takes."""
TOKENS = [50.0 + step for step in range(11)]


def measured(
    changes: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    num: int = 11,
    truth: str = TRUTH,
) -> tuple[Run, MeasuredSteps]:
    """Return a run file, and steps of a cluster that is slower by `truth`, less some columns."""
    keys = {**KEYS, **(changes or {})}
    steps = [
        replace(step, step=number, **dict.fromkeys(without))
        for number, step in enumerate(slow_steps(json.dumps(keys), num, truth), start=1)
    ]
    return small_run(keys), MeasuredSteps(source="steps.csv", framework="csv", steps=tuple(steps))


@cache
def slow_steps(keys: str, num: int, truth: str) -> list[MeasuredStep]:
    """Simulate steps of growing lengths with a calibration."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "truth.toml"
        path.write_text(truth)
        slow = small_run({**json.loads(keys), "costs.calibration": str(path)})
        wanted = [MeasuredStep(step=1, output_tokens=each) for each in TOKENS[:num]]
        return simulate_steps(slow, wanted).steps


def factors(found: Calibrated) -> dict[str, float]:
    stages = ("generation", "score", "train", "sync")
    made = found.calibration
    return {name: stage.factor for name in stages if (stage := getattr(made, name)) is not None}


def test_factors_and_overhead_of_stages_that_follow_each_other_are_found_again() -> None:
    found = calibrate_steps(*measured(AT_ONCE))
    assert factors(found) == pytest.approx(
        {"generation": 0.5, "score": 0.8, "train": 0.7, "sync": 0.25}, rel=0.05
    )
    made = found.calibration
    assert made.overhead is not None and made.overhead.seconds == pytest.approx(4.0, abs=0.01)
    assert made.step.before is not None and made.step.before > 0.5
    assert made.step.after is not None and made.step.after < 0.03
    assert made.step.held_out is not None and made.step.held_out < 0.05
    assert made.fitted_steps == (2, 7) and made.held_out_steps == (8, 11)
    assert not found.notes


def test_the_interval_of_a_factor_holds_it_and_is_that_of_scatter() -> None:
    run, steps = measured()
    noisy = tuple(
        replace(step, train=(step.train or 0.0) * (1.1 if step.step % 2 else 0.9))
        for step in steps.steps
    )
    calm = calibrate_steps(run, steps).calibration.train
    loud = calibrate_steps(run, replace(steps, steps=noisy)).calibration.train
    assert calm is not None and calm.interval is not None and loud is not None
    assert calm.interval[1] / calm.interval[0] < 1.01
    assert loud.interval is not None and loud.interval[0] < 0.7 < loud.interval[1]
    assert loud.interval[1] / loud.interval[0] > 1.1


def test_few_steps_have_no_interval_and_none_is_held_out() -> None:
    found = calibrate_steps(*measured(num=2)).calibration
    assert found.train is not None and found.train.interval is None
    assert found.held_out_steps is None and found.train.errors.held_out is None


@pytest.mark.parametrize("system", ["stream-async", "one-step-async"])
def test_rollouts_tell_how_fast_generation_is_beside_training(system: str) -> None:
    changes = {"policies.system": system}
    found = calibrate_steps(*measured(changes, without=["generation", "busy"]))
    assert factors(found)["generation"] == pytest.approx(0.5, rel=0.1)


def test_waiting_is_no_generation_but_steps_that_wait_tell_of_it() -> None:
    link = {"between": ["far", "near"], "bandwidth": "144 Gbps", "latency": "10 ms"}
    changes = {"policies.system": "stream-async", "cluster.links": [link]}
    without = ["generation", "busy", "rollout_time"]
    run, steps = measured(changes, without, truth=BOUND)
    waits = tuple(replace(step, wait=(step.step_time or 0.0) / 2) for step in steps.steps)
    slow = replace(steps, steps=waits, is_asynchronous=True)
    found = calibrate_steps(run, slow)
    assert factors(found).get("generation") == pytest.approx(0.1, rel=0.1), found.notes
    assert "waiting time is not decoding time" in found.notes[0]
    busy = tuple(replace(step, wait=0.0) for step in steps.steps)
    unknown = calibrate_steps(run, replace(slow, steps=busy))
    assert "generation" not in factors(unknown)
    assert "unknown, because the trainer waits for it less than 5%" in unknown.notes[0]


def test_what_has_no_seconds_of_its_own_is_what_whole_steps_have_beside_the_others() -> None:
    changes = {"framework": {"step_time": "4 s"}}
    run, steps = measured(changes, without=["train", "busy", "rollout_time"])
    found = calibrate_steps(run, steps)
    assert factors(found)["train"] == pytest.approx(0.7, rel=0.05)
    alone = dict.fromkeys(("generation", "score", "train", "sync", "rollout_time"))
    whole = replace(steps, steps=tuple(replace(step, **alone) for step in steps.steps))
    one = calibrate_steps(run, whole)
    assert len(set(factors(one).values())) == 1 and set(factors(one)) == {
        "generation",
        "score",
        "train",
    }
    assert "generation, score and train: one factor for all" in one.notes[0]
    assert one.calibration.step.after is not None and one.calibration.step.after < 0.1


@pytest.mark.parametrize(("unit", "said"), [(1e3, "milliseconds"), (1 / 60, "minutes or hours")])
@pytest.mark.parametrize("system", ["disaggregated", "stream-async"])
def test_a_log_in_another_unit_is_refused(system: str, unit: float, said: str) -> None:
    run, steps = measured({"policies.system": system})
    seconds = [
        {name: unit * value for name in SECONDS if (value := getattr(step, name)) is not None}
        for step in steps.steps
    ]
    others = tuple(replace(step, **each) for step, each in zip(steps.steps, seconds, strict=True))
    with pytest.raises(
        ValueError, match=rf"steps.csv: every stage took .* in {said}; convert it to seconds"
    ):
        calibrate_steps(run, replace(steps, steps=others))


def test_a_calibration_that_a_run_file_names_is_left_out_of_account(tmp_path: Path) -> None:
    run, steps = measured()
    (tmp_path / "truth.toml").write_text(TRUTH)
    named = replace(run, costs=replace(run.costs, calibration=str(tmp_path / "truth.toml")))
    assert calibrate_steps(named, steps) == calibrate_steps(run, steps)


def test_a_factor_beyond_what_hardware_differs_by_is_doubted() -> None:
    run, steps = measured()
    slower = tuple(
        replace(step, train=(step.train or 0.0) * 20, step_time=(step.step_time or 0.0) + 8.0)
        for step in steps.steps
    )
    found = calibrate_steps(run, replace(steps, steps=slower))
    assert any(note.startswith("train: ") and "trainer.recompute" in note for note in found.notes)


# Disagreements ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("workload.lengths", {"output_tokens": 500.0}, "500 were measured"),
        (
            "algorithm.prompts_per_step",
            {"rollouts": 64.0},
            "32 rollouts a step, but 64 were measured (2 times",
        ),
        (
            "algorithm.prompts_per_step",
            {"rollouts": 16.0},
            "the measured number may count prompts",
        ),
        (
            "workload.lengths.prompt_tokens",
            {"prompt_tokens": 90.0},
            "40 tokens a prompt, but 90",
        ),
        ("rollout.max_tokens", {"longest_output": 900.0}, "at most 256 output tokens, but 900"),
        (
            "rollout.replicas, trainer.data_parallel",
            {"gpus": 12.0},
            "6 GPUs by their degrees, but 12",
        ),
        (
            "algorithm.kl_coefficient",
            {"reference": 2.0},
            "0 needs no reference model, but its passes took 2 s",
        ),
    ],
)
def test_a_wrong_run_file_is_refused_with_the_key_and_by_how_much(
    key: str, change: dict[str, float], said: str
) -> None:
    run, steps = measured(num=2)
    wrong = replace(steps, steps=tuple(replace(step, **change) for step in steps.steps))
    assert find_disagreements(run, steps) == []
    assert [found.key for found in find_disagreements(run, wrong)] == [key]
    with pytest.raises(ValueError, match="a factor would hide the difference") as error:
        calibrate_steps(run, wrong)
    assert key in str(error.value) and said in str(error.value)


def test_gpus_and_rollouts_are_counted_by_tokens_where_a_log_has_those_alone() -> None:
    run, steps = measured(without=["rollouts"], num=2)
    seen = [
        replace(step, tokens_per_gpu_second=step.total_tokens / step.step_time / 6)
        for step in steps.steps
    ]  # type: ignore[operator]
    assert find_disagreements(run, replace(steps, steps=tuple(seen))) == []
    fewer = [replace(step, tokens_per_gpu_second=step.tokens_per_gpu_second * 2) for step in seen]  # type: ignore[operator]
    (found,) = find_disagreements(run, replace(steps, steps=tuple(fewer)))
    assert "6 GPUs by their degrees, but 3 were measured" in found.text
    more = [replace(step, total_tokens=step.total_tokens * 2) for step in steps.steps]  # type: ignore[operator]
    (found,) = find_disagreements(run, replace(steps, steps=tuple(more)))
    assert found.key == "algorithm.prompts_per_step" and "2 times" in found.text


def test_a_log_of_another_mode_or_of_passes_that_a_run_file_lacks_is_refused() -> None:
    run, steps = measured(num=2)
    beside = replace(steps, is_asynchronous=True)
    assert [found.key for found in find_disagreements(run, beside)] == ["policies.system"]
    without = small_run({**KEYS, "algorithm.old_log_probs": "engine"})
    (found,) = find_disagreements(without, steps)
    assert found.key == "algorithm.old_log_probs"


def test_stages_that_are_longer_than_their_step_were_not_in_turns() -> None:
    run, steps = measured()
    halved = tuple(replace(step, step_time=(step.step_time or 0) / 2) for step in steps.steps)
    (found,) = find_disagreements(run, replace(steps, steps=halved))
    assert found.key == "policies.system" and "some of them overlapped" in found.text
    assert not find_disagreements(run, steps)


def test_whole_steps_that_factors_leave_off_are_doubted() -> None:
    run, steps = measured(AT_ONCE)
    assert not calibrate_steps(run, steps).notes
    slower = tuple(replace(step, step_time=2 * (step.step_time or 0)) for step in steps.steps)
    ahead = small_run({**KEYS, **AT_ONCE, "policies.system": "one-step-async"})
    notes = calibrate_steps(ahead, replace(steps, steps=slower)).notes
    assert any(
        "whole steps still have an error of" in note and "policies.system" in note for note in notes
    )


def test_a_stated_step_time_that_was_not_measured_is_refused() -> None:
    _, steps = measured(AT_ONCE)
    stated = small_run({**KEYS, **AT_ONCE, "framework": {"step_time": "30 s"}})
    with pytest.raises(ValueError, match=r"framework\.step_time: 30 s .* but 4 s were measured"):
        calibrate_steps(stated, steps)
    right = small_run({**KEYS, **AT_ONCE, "framework": {"step_time": "4 s"}})
    assert calibrate_steps(right, steps).calibration.overhead is None


def test_a_recorded_run_differs_in_what_its_seconds_depend_on_and_in_nothing_else() -> None:
    run = small_run()
    assert (
        find_differences(
            run,
            small_run(
                {"algorithm.steps": 9, "execute.output": "b", "cluster.pools.far.price": 0.0}
            ),
        )
        == []
    )
    other = small_run({"rollout.replicas": 4, "policies.system": "fully-async"})
    found = {each.key: each.text for each in find_differences(run, other)}
    assert set(found) == {"rollout.replicas", "policies.system"}
    assert found["rollout.replicas"] == "2 in the run file, 4 in the recorded run"


# Rates --------------------------------------------------------------------------------------------

PACE = {"generation": 100.0, "output_tokens": 500.0, "outputs_per_gpu_second": 160.0}
"""32 rollouts on each GPU that generates."""


@pytest.mark.parametrize(("prompts", "is_right"), [(8, False), (16, True), (17, True), (32, False)])
def test_a_rate_of_tokens_tells_the_rollouts_of_a_gpu(prompts: int, is_right: bool) -> None:
    run = small_run({**KEYS, "algorithm.prompts_per_step": prompts, "algorithm.group_size": 4})
    measured = MeasuredSteps(source="", framework="x", steps=(MeasuredStep(step=1, **PACE),))
    found = {each.key: each.text for each in find_disagreements(run, measured)}
    key = "algorithm.prompts_per_step, rollout.replicas"
    assert (key not in found) is is_right
    assert is_right or "/ 500 tokens are 32 a GPU" in found[key]


@pytest.mark.parametrize(("rollouts", "is_right"), [(16, True), (64, True), (128, False)])
def test_a_throughput_limits_the_rollouts_of_a_step(rollouts: int, is_right: bool) -> None:
    run = small_run(
        {**KEYS, "algorithm.prompts_per_step": rollouts // 4, "algorithm.group_size": 4}
    )
    step = MeasuredStep(step=1, step_time=10.0, tokens_per_rollout=100.0, tokens_per_second=640.0)
    measured = MeasuredSteps(source="", framework="x", steps=(step,))
    found = {each.key: each.text for each in find_disagreements(run, measured)}
    assert ("algorithm.prompts_per_step" not in found) is is_right
    assert "workload.lengths" in found, "prompt and output tokens are compared together"


# Logs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_log_of_each_framework_calibrates_a_run_file_of_its_work(
    name: str, tmp_path: Path
) -> None:
    file, text, steps = MADE[name]
    (tmp_path / file).write_text(text)
    assert streamrl("import", tmp_path / file, "-o", tmp_path / "out").returncode == 0
    keys = {
        **KEYS,
        "workload": tomllib.loads((tmp_path / "out" / "workload.toml").read_text())["workload"],
        "rollout.max_tokens": round(max(step.longest_output or 2048 for step in steps)),
        "rollout.max_running": 256,
        "algorithm.prompts_per_step": 32,
        "algorithm.kl_coefficient": 0.1 if steps[0].reference else 0.0,
    }
    if name == "verl":  # whose tokens a second and GPU say how many there are
        keys["rollout.replicas"] = 4
    if name in ("prime-rl", "torchforge"):  # which tell that generation is a step ahead
        keys["policies.system"] = "stream-async"
    if name == "torchforge":  # whose reference is a part of its rollouts
        keys["algorithm.old_log_probs"] = "engine"
    write_run(small_run(keys), tmp_path / "run.toml")
    done = streamrl("calibrate", tmp_path / "run.toml", tmp_path / file, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for stage in ("generation", "train"):
        assert told[stage]["errors"]["after"] < told[stage]["errors"]["before"]
    assert (told.get("sync") is None) == (steps[0].sync is None)


# The command --------------------------------------------------------------------------------------


def test_the_command_writes_what_later_simulations_use(tmp_path: Path) -> None:
    run, steps = measured()
    write_run(run, tmp_path / "run.toml")
    (tmp_path / "steps.csv").write_text(write_steps(steps.steps, "made"))
    file = tmp_path / "calibration.toml"
    done = streamrl(
        "calibrate", tmp_path / "run.toml", tmp_path / "steps.csv", "-o", file, "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["generation"]["factor"] == pytest.approx(0.5, rel=0.05)
    written = read_profile(file, Calibration)
    assert written.train is not None and written.train.factor == pytest.approx(0.7, rel=0.01)
    keys = {**KEYS, "costs.calibration": str(file)}
    ours = simulate_steps(small_run(keys), [steps.steps[-1]]).steps[0]
    assert ours.step_time == pytest.approx(steps.steps[-1].step_time, rel=0.02)
    shown = streamrl("calibrate", tmp_path / "run.toml", tmp_path / "steps.csv")
    assert "whole step" in shown.stdout and "held out" in shown.stdout


def test_a_simulated_run_that_was_recorded_calibrates_to_itself(tmp_path: Path) -> None:
    run = small_run({**KEYS, "algorithm.prompts_per_step": 4, "simulate.max_steps": 10})
    write_run(run, tmp_path / "run.toml")
    assert streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "made").returncode == 0
    done = streamrl("calibrate", tmp_path / "run.toml", tmp_path / "made", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for stage in ("generation", "score", "train", "sync"):
        assert told[stage]["factor"] == pytest.approx(1.0, rel=1e-3)
    other = streamrl(
        "calibrate", tmp_path / "run.toml", tmp_path / "made", "--set", "rollout.replicas=1"
    )
    assert other.returncode == 2 and "rollout.replicas: 1 in the run file, 2" in other.stderr


def test_the_steps_of_a_run_calibrate_as_the_run_itself(tmp_path: Path) -> None:
    share = {"algorithm.kl_coefficient": 0.0, "workload.informative_share": 0.4}
    small = {"algorithm.prompts_per_step": 4, "simulate.max_steps": 10}
    file, steps = tmp_path / "run.toml", tmp_path / "out" / "steps.csv"
    write_run(small_run({**KEYS, **small, **share}), file)
    assert streamrl("simulate", file, "-o", tmp_path / "made").returncode == 0
    assert streamrl("import", tmp_path / "made", "-o", tmp_path / "out").returncode == 0
    assert "informative_share = 0.4" in (tmp_path / "out" / "workload.toml").read_text()
    whole, apart = (
        json.loads(streamrl("calibrate", file, measured, "--json").stdout)
        for measured in (tmp_path / "made", steps)
    )
    assert apart["train"]["factor"] == pytest.approx(whole["train"]["factor"], rel=0.1)
    other = streamrl("calibrate", file, steps, "--set", "workload.informative_share=1")
    assert other.returncode == 2 and "but 0.4 were measured" in other.stderr, other.stderr


def test_an_extreme_factor_of_one_stage_names_it() -> None:
    run, steps = measured()
    fast = tuple(replace(step, sync=1e-6 * (step.sync or 1.0)) for step in steps.steps)
    with pytest.raises(
        ValueError, match=r"steps.csv: sync took .* times as long .* check its unit"
    ):
        calibrate_steps(run, replace(steps, steps=fast))


@pytest.mark.parametrize("output", ["run.toml", "steps.csv"])
def test_an_output_that_is_an_input_is_refused(output: str, tmp_path: Path) -> None:
    write_run(small_run(KEYS), tmp_path / "run.toml")
    (tmp_path / "steps.csv").write_text("step,step_time\n1,20\n2,20\n")
    before = (tmp_path / output).read_bytes()
    files = [tmp_path / "run.toml", tmp_path / "steps.csv"]
    done = streamrl("calibrate", *files, "-o", tmp_path / output)
    assert done.returncode == 2 and "is an input of this command" in done.stderr
    assert (tmp_path / output).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("steps.csv", "--held-out", "1"), "--held-out must be a share"),
        (("no.log",), "no.log: no such file"),
        (("made.csv",), "unknown column 'b'"),
        (("zero.csv",), "zero.csv: nothing can be fitted to it"),
        (
            ("steps.csv", "--format", "vrl"),
            "no format 'vrl' in profiles/logs; the formats are areal, nemo-rl",
        ),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(small_run(KEYS), tmp_path / "run.toml")
    (tmp_path / "steps.csv").write_text("step,train\n1,2\n")
    (tmp_path / "made.csv").write_text("train,b\n1,2\n")
    zeros = "".join(f"{step},0,0\n" for step in range(1, 7))
    (tmp_path / "zero.csv").write_text(f"step,generation,train\n{zeros}")
    done = streamrl("calibrate", "run.toml", *arguments, "-o", "out/calibration.toml")
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1 and not Path("out").exists()


def test_a_written_calibration_leaves_out_what_is_not_known() -> None:
    run = small_run(KEYS)
    mean, prompt = mean_tokens(SimulatedWorkload(run))
    assert 40 < mean < 60 and prompt == 40
    steps = MeasuredSteps(source="x", framework="csv", steps=(MeasuredStep(step=1, train=2.0),))
    found = calibrate_steps(run, steps)
    text = write_calibration(found.calibration)
    assert "[train]" in text and "generation" not in text and "overhead" not in text
    assert found.notes[0].startswith("generation and score: unknown")

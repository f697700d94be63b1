"""Logs of every framework, made as its logging source makes them, and what is read of them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.hardware.profiles import PROFILES
from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.log_formats import known_formats, load_format
from streamrl.logs.measured_steps import MeasuredStep, parse_steps, read_run_steps, write_steps
from streamrl.logs.printed_values import read_dict, read_number
from streamrl.record.steady_state import read_steps
from streamrl.record.timeline import read_timeline
from streamrl.sim.calibration.calibrate import measured_steps
from streamrl.sim.costs.costs import Costs
from streamrl.sim.fidelity.rl_steps import phase_seconds
from streamrl.sim.world import simulate
from tests.made_logs import MADE, VERL_LINE
from tests.runs import small_run

NEMO_STEP = "========================= Step 1/10 =========================\n"


def read(tmp_path: Path, name: str, text: str, log_format: str | None = None) -> list[MeasuredStep]:
    (tmp_path / name).write_text(text)
    return list(read_measured_file(tmp_path / name, log_format).steps)


@pytest.mark.parametrize("name", known_formats())
def test_a_log_of_each_framework_is_found_out_and_read(name: str, tmp_path: Path) -> None:
    file, text, expected = MADE[name]
    (tmp_path / file).write_text(text)
    found = read_measured_file(tmp_path / file)
    log = load_format(name)
    assert found.framework == log.name and log.commit[:9] in found.source
    assert list(found.steps) == expected
    assert found.steps == read_measured_file(tmp_path / file, name).steps


def test_the_parts_of_a_real_line_of_verl_sum_up_to_its_step(tmp_path: Path) -> None:
    (step,) = read(tmp_path, "verl.log", VERL_LINE)
    parts = (step.generation, step.score, step.train, step.sync, step.other)
    assert sum(part or 0.0 for part in parts) == pytest.approx(1163.6, abs=0.1)
    assert step.score == pytest.approx(72.41 + 72.03) and step.reference == 72.03


@pytest.mark.parametrize("mark", ["separate_async/switch/idle:0.1", "timing_s/switch_wait:2.0"])
def test_what_verl_calls_gen_is_waiting_in_its_asynchronous_modes(
    mark: str, tmp_path: Path
) -> None:
    (step,) = read(tmp_path, "verl.log", f"{VERL_LINE} - {mark}")
    assert step.generation is None and step.wait == 541.19
    told = read_measured_file(tmp_path / "verl.log")
    assert told.is_asynchronous and not told.notes


def test_a_mode_that_left_no_mark_is_read_as_who_knows_says(tmp_path: Path) -> None:
    (tmp_path / "verl.log").write_text(VERL_LINE)
    silent = read_measured_file(tmp_path / "verl.log")
    assert silent.is_asynchronous is None and "taking turns" in silent.notes[0]
    told = read_measured_file(tmp_path / "verl.log", is_asynchronous=True)
    assert told.steps[0].wait == 541.19 and told.steps[0].generation is None


def test_an_overlapped_rollout_of_slime_is_generation_and_its_wait_is_not(tmp_path: Path) -> None:
    (tmp_path / "slime.log").write_text(MADE["slime"][1])
    (step, *_) = read_measured_file(tmp_path / "slime.log", is_asynchronous=True).steps
    assert (step.generation, step.wait) == (58.0, 60.0)


def test_the_sum_of_parts_that_openrlhf_calls_a_step_is_none(tmp_path: Path) -> None:
    (step, *_) = read(tmp_path, "log.txt", MADE["openrlhf"][1])
    assert step.step_time is None
    (step, *_) = read_measured_file(tmp_path / "log.txt", is_asynchronous=True).steps
    assert step.step_time == 48.0


def test_rows_of_json_and_of_a_table_of_wandb_are_read_by_the_same_keys(tmp_path: Path) -> None:
    figures = {"timing_s/step": 9.0, "timing_s/gen": 5.0, "timing_s/update_actor": 3.0}
    lines = [json.dumps({"step": step, "data": figures}) for step in (4, 5)]
    of_lines = read(tmp_path, "verl.jsonl", "\n".join(lines))
    header = ",".join(
        ["Step", *(f"my-run - {key}" for key in figures), "my-run - timing_s/gen__MIN"]
    )
    of_table = read(tmp_path, "export.csv", f"{header}\n4,9.0,5.0,3.0,1.0\n5,9.0,5.0,3.0,1.0\n")
    state = {"log_history": [{"step": 7, "step_time": "2.5", "completions/mean_length": 80}]}
    (of_trl,) = read(tmp_path, "trainer_state.json", json.dumps(state))
    assert of_lines[0] == MeasuredStep(step=4, step_time=9.0, generation=5.0, train=3.0)
    assert [(step.step, step.train) for step in of_table] == [(4, 3.0), (5, 3.0)]
    assert of_trl == MeasuredStep(step=7, step_time=2.5, output_tokens=80.0)


def test_a_table_of_two_runs_of_wandb_is_refused(tmp_path: Path) -> None:
    text = "Step,a - timing_s/step,b - timing_s/step,b - x\n1,100,10,0\n2,101,,0\n"
    with pytest.raises(ValueError, match=r"row 1: columns of two runs, 'a' and 'b'; export one"):
        read(tmp_path, "export.csv", text)
    without = text.replace(",10,", ",,")
    assert [step.step_time for step in read(tmp_path, "export.csv", without)] == [100, 101]


def test_rows_of_every_framework_may_have_the_step_of_wandb() -> None:
    for name in known_formats():
        assert {"_step", "Step"} <= {*load_format(name).step_keys}, name


def test_a_stage_that_takes_longer_than_its_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(
        "step,step_time,train,rollout_time\n1,10,300,50\n2,20,3,50\n"
    )
    found = read_measured_file(tmp_path / "steps.csv")
    assert found.notes == ("steps.csv: train takes 151.5 s of a step of 15 s; check their units",)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "no.csv",
            "step,generaton,step_time\n1,2,3\n",
            "unknown column 'generaton'; the columns are step, step_time",
        ),
        (
            "no.csv",
            "step,step_time\n1,fast\n",
            "row 1: step_time must be a number of at least 0, got 'fast'",
        ),
        (
            "no.csv",
            "step,step_time\n1,-2\n",
            "row 1: step_time must be a number of at least 0, got '-2'",
        ),
        ("no.csv", "a,b\n1,2\n", "its format is unknown; choose one of csv, areal"),
        ("no.log", "nothing of a step\n", "its format is unknown"),
        (
            "no.log",
            "step:1 - reward:0.5 - response_length/mean:80\n",
            "has no seconds of a step under verl's names; it needs one of timing_s/step",
        ),
        ("no.log", "step:1 - timing_s/step:-3\n", "step 1: step_time must not be -3 s"),
        (
            "no.log",
            "x\nstep:1 - timing_s/step:-3\n",
            "no.log:2: step 1: step_time must not be -3 s (timing_s/step)",
        ),
        (
            "no.log",
            "step:1 - timing_s/step:fast - timing_s/gen:2.0\n",
            "no.log:1: timing_s/step must be a finite number, got 'fast'",
        ),
        (
            "no.log",
            "step:1 - timing_s/step:nan - timing_s/gen:2.0\n",
            "no.log:1: timing_s/step must be a finite number, got 'nan'",
        ),
        (
            "no.log",
            f"{NEMO_STEP}  • Total step time: soon\n",
            "no.log:2: Total step time must be a finite number, got 'soon'",
        ),
        (
            "no.jsonl",
            '{"step": 1, "data": {}}\n{"step": 2, "data": {"timing_s/step": NaN}}\n',
            "no.jsonl:2: timing_s/step must be a finite number, got nan",
        ),
        (
            "no.jsonl",
            '{"step": 1, "data": {"timing_s/step": 2}}\n{"step": 2, "da\n{"step": 3}\n',
            "no.jsonl:2: not JSON: ",
        ),
        (
            "no.jsonl",
            '{"step": 1, "timing_s/step": 2}\n{"step": 2, "timing_s/step": 2, "timing_s/step": 3}\n',
            "no.jsonl:2: the key 'timing_s/step' appears twice in one object",
        ),
        (
            "no.json",
            '[{"step": 1, "timing_s/step": 2, "timing_s/step": 3}]',
            "no.json: the key 'timing_s/step' appears twice in one object",
        ),
        (
            "no.csv",
            "step,timing_s/step\n1,2.5\n2,n/a\n",
            "no.csv: row 2: timing_s/step must be a finite number, got 'n/a'",
        ),
        (
            "no.csv",
            "step,step_time\n4,2\n5,3\n4,2\n",
            "no.csv: step 4 appears twice: in row 1, then in row 3",
        ),
        (
            "no.log",
            "step:4 - timing_s/step:2\nstep:4 - timing_s/step:3\n",
            "no.log:2: step 4 is logged twice: timing_s/step is 2 s, then 3 s",
        ),
    ],
)
def test_what_is_no_log_is_said_in_one_line(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no.*: ") as error:
        read(tmp_path, name, text)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "whole", "part", "said"),
    [
        (
            "cut.jsonl",
            '{"step": 1, "data": {"timing_s/step": 2.0}}\n',
            '{"step": 2, "data": {"timing_s/st',
            "the last line",
        ),
        (
            "cut.log",
            "step:1 - timing_s/step:2.0\n",
            "step:2 - timing_s/step:2.0 - timing_s/gen:-",
            "timing_s/gen of the last line",
        ),
    ],
)
def test_a_last_line_that_was_cut_off_is_left_out_and_said(
    name: str, whole: str, part: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(whole + part)
    found = read_measured_file(tmp_path / name)
    assert found.steps[0].step_time == 2.0
    assert f"{name}: {said} is cut off and was skipped" in found.notes


def test_a_last_value_without_an_end_of_its_line_is_no_other_number(tmp_path: Path) -> None:
    steps = read(tmp_path, "prime.log", MADE["prime-rl"][1].partition("03.0 tokens")[0])
    assert [(step.step, step.tokens_per_rollout) for step in steps] == [(28, 650.2), (29, None)]
    only = MADE["prime-rl"][1].partition("Step 29")[0].partition("1.50s")[0]
    with pytest.raises(ValueError, match=r"prime\.log: .*Time of the last line is cut off"):
        read(tmp_path, "prime.log", only)


def _labelled(label: str) -> Callable[[str], str]:
    return lambda text: "".join(f"{label}{line}\n" for line in text.splitlines())


AS_PRINTED: dict[str, Callable[[str], str | bytes]] = {
    "srun": _labelled("0: "),
    "torchrun": _labelled("[rank0]: "),
    "Compose": _labelled("trainer-1  | "),
    "Kubernetes": _labelled("2026-08-01T10:00:00.123456789Z stdout F "),
    "Ray twice": _labelled("(Runner pid=12, ip=10.0.0.1) "),
    "repeated": lambda text: text.replace("\n", " [repeated 8x across cluster]\n"),
    "cursor": lambda text: text.replace("\n", "\x1b[?25h\n"),
    "links": lambda text: text.replace("\n", "\x1b]8;;http://x\x1b\\\x1b]8;;\x1b\\\n"),
    "PowerShell": lambda text: text.encode("utf-16"),
}


@pytest.mark.parametrize("how", AS_PRINTED)
@pytest.mark.parametrize("name", known_formats())
def test_what_launchers_and_terminals_add_to_lines_does_not_count(
    name: str, how: str, tmp_path: Path
) -> None:
    file, text, expected = MADE[name]
    shown = AS_PRINTED[how](text)
    (tmp_path / file).write_bytes(shown if isinstance(shown, bytes) else shown.encode())
    assert list(read_measured_file(tmp_path / file).steps) == expected


def test_a_line_of_another_worker_does_not_continue_a_line_of_verl(tmp_path: Path) -> None:
    other = "(Worker pid=99) INFO loads weights from - https://host:8000 now\n"
    text = "".join(f"{line}\n{other}" for line in MADE["verl"][1].splitlines())
    assert read(tmp_path, "verl.log", text) == MADE["verl"][2]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("prime-rl", "41.50s -> nan", "Time must be a finite number"),
        ("prime-rl", "41.50s -> 41 ms", "Time must be a finite number, got ' 41 ms'"),
        ("prime-rl", "41.50s -> 41 ms/step", "Time must be a finite number, got ' 41 ms/step'"),
        ("prime-rl", "40.5 tokens/s -> 40.5 ktokens/s", "Throughput must be a finite number"),
        ("prime-rl", "40.5 tokens/s -> 40.5 tokens/min", "Throughput must be a finite number"),
        ("nemo-rl", "112.00s -> 112.00 ms", "Total step time must be a finite number"),
        ("nemo-rl", "58.00s (51 -> 58.00 min (51", "generation must be a finite number"),
        ("verl", "timing_s/step:35.0 -> timing_s/step:3_5", "must be a finite number, got '3_5'"),
        ("prime-rl", "1,040.5 tokens/s -> 10,40.5 tokens/s", "Throughput must be a finite number"),
        ("areal", "4.1500e+01 -> N/A", "timeperf/rollout must be a finite number, got 'N/A'"),
        ("areal", "4.1500e+01 -> ", "timeperf/rollout must be a finite number"),
    ],
)
def test_a_value_that_is_no_number_is_not_left_out(
    name: str, value: str, said: str, tmp_path: Path
) -> None:
    file, text, _ = MADE[name]
    (tmp_path / file).write_text(text.replace(*value.split(" -> "), 1))
    with pytest.raises(ValueError, match=said):
        read_measured_file(tmp_path / file)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("timing_s/step:35.0 -> timing_s/step:0.0", "step_time must be above 0 s, got 0 s"),
        ("timing_s/step:35.0 -> timing_s/step:1e300", "step_time must be from 0 to 1e+07 s"),
        ("np.float64(812.5) -> 0.0", "output_tokens must be above 0 and below 1e+09, got 0"),
        ("np.float64(812.5) -> 1e300", "output_tokens must be above 0 and below 1e+09"),
        ("prompt_length/mean:150.0 -> prompt_length/mean:0", "prompt_tokens must be above 0"),
        ("length/max:2048 -> length/max:800", "a mean of 812.5, but longest_output is 800"),
    ],
)
def test_a_step_with_impossible_figures_is_refused(value: str, said: str, tmp_path: Path) -> None:
    text = MADE["verl"][1].replace(*value.split(" -> "), 1)
    with pytest.raises(ValueError, match=f"verl.log: step 1: .*{re.escape(said)}"):
        read(tmp_path, "verl.log", text)


def test_two_runs_of_trl_are_refused_and_a_line_that_was_printed_twice_is_one_step(
    tmp_path: Path,
) -> None:
    text = MADE["trl"][1]
    twice = "".join(f"{line}\n{line}\n" for line in text.splitlines())
    assert read(tmp_path, "trl.log", twice) == MADE["trl"][2]
    with pytest.raises(ValueError, match=r"num_tokens falls from 123200 to 61600.*split it"):
        read(tmp_path, "trl.log", text + text)


def test_what_two_handlers_wrote_alike_is_one_step(tmp_path: Path) -> None:
    line = "step:1 - timing_s/step:2.0\n"
    assert read(tmp_path, "twice.log", line * 2) == [MeasuredStep(step=1, step_time=2.0)]


def test_a_dict_that_is_no_literal_is_named_by_its_line_and_nothing_is_run(tmp_path: Path) -> None:
    text = "Global step 1: {'timing/generation': __import__('os').mkdir('here')}"
    for named in ("openrlhf", None):
        with pytest.raises(ValueError, match=r"log:1: not a literal: .*is not a literal"):
            read(tmp_path, "o.log", text, named)
    assert not Path("here").exists()


def test_literals_are_read_with_the_names_that_numbers_print_under() -> None:
    text = "{'a': np.float64(1.5), 'b': -2, 'c': nan, 'd': [1, inf], 'e': tensor(3., device='cuda:0'), 'f': 'x'}"
    found = read_dict(text)
    assert (found["a"], found["b"], found["e"], found["f"]) == (1.5, -2, 3.0, "x")
    assert read_number("np.float32(0.25)") == 0.25 and read_number("1e-3") == 1e-3
    assert read_number(" 7 ") == 7 and read_number("Infinity") == inf
    for expression in ("0x10", "7 # x", "(12)", "1_024", "[3]", "-(2)", "1+2j"):
        assert read_number(expression) is None
    assert read_number(True) is None and read_number("fast") is None
    for bad in ("[1]", "{'a': open('x')}", "{**{}}", "{'a': 1", "", "{'a': (lambda: 1)()}"):
        with pytest.raises(ValueError, match="not a"):
            read_dict(bad)


@settings(max_examples=60)
@given(st.sampled_from(sorted(MADE)), st.data())
def test_a_damaged_log_is_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    file, text, _ = MADE[name]
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, len(text)))
    filler = data.draw(
        st.sampled_from(["", "1e999", "nan", "-", "{", "}", "'", "9" * 400, "\n", "\x00"])
    )
    with TemporaryDirectory() as directory:
        path = Path(directory) / file
        path.write_text(text[:first] + filler + text[last:])
        for log_format in (None, name):
            try:
                found = read_measured_file(path, log_format)
            except ValueError as error:
                assert "\n" not in str(error) and str(path) in str(error)
            else:
                assert all(0 <= value < 1e7 for value in found.values("step_time"))


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_whatever_a_dict_is_said_to_be_it_is_read_or_refused(text: str) -> None:
    for said in (text, "{" + text + "}"):
        try:
            assert isinstance(read_dict(said), dict)
        except ValueError as error:
            assert str(error).startswith("not a")
    read_number(text)


def test_steps_that_are_written_are_read_again(tmp_path: Path) -> None:
    steps = [
        MeasuredStep(step=3, step_time=2.5, train=1.0, output_tokens=80.25),
        MeasuredStep(step=4, step_time=2.75, rollouts=16.0),
    ]
    assert read(tmp_path, "steps.csv", write_steps(steps, "a\nlog")) == steps
    assert parse_steps("x", [{"step_time": "1", "train": ""}])[0].train is None


@pytest.mark.parametrize(
    ("column", "seconds"),
    [
        ("step_time", 90.0),
        ("step_time_s", 90.0),
        ("step_time_min", 5400.0),
        ("step_time (minutes)", 5400.0),
        ("step_time [ms]", 0.09),
        ("step_time_Hours", 324_000.0),
    ],
)
def test_a_column_of_times_may_name_its_unit(column: str, seconds: float, tmp_path: Path) -> None:
    text = f"step,{column},output_tokens\n1,90,7\n"
    (step,) = read(tmp_path, "steps.csv", text)
    assert step.step_time == pytest.approx(seconds) and step.output_tokens == 7


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("step_time,step_time_min", "step_time and step_time_min are both step_time; remove one"),
        ("step_time,train_weeks", "unknown column 'train_weeks'.* may end with a unit"),
        ("step_time,output_tokens_min", "unknown column 'output_tokens_min'"),
    ],
)
def test_units_that_are_unknown_or_twice_are_refused(
    header: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "steps.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(ValueError, match=said):
        read_measured_file(tmp_path / "steps.csv")


def test_every_format_says_which_source_at_which_commit() -> None:
    for name in known_formats():
        log = load_format(name)
        assert len(log.commit) == 40 and ":" in log.source and log.lines
    assert known_formats() == sorted(path.stem for path in (PROFILES / "logs").iterdir())


# Frameworks whose lines have traps -----------------------------------------------------------------

TIMER = "2026-08-21 10:00:00.000 | INFO     | skyrl.train.trainer:train:{} - {}\n"


def skyrl_timers(*names: str) -> str:
    """Return the lines of SkyRL's timers, each with a second more than the one before."""
    lines = [TIMER.format(1, "Finished: 'sync_weights', time cost: 9.00s")]
    for number, name in enumerate(names, start=1):
        start = TIMER.format(number, f"Started: '{name}'")
        end = TIMER.format(number, f"Finished: '{name}', time cost: {number}.00s")
        lines.append(start if name == "step" else start + end)
    return "".join(lines)


def test_timers_of_skyrl_are_read_without_its_console_tracker(tmp_path: Path) -> None:
    once = ("step", "generate", "fwd_logprobs_values_reward", "train_critic_and_policy")
    first, second = read(tmp_path, "skyrl.log", skyrl_timers(*once, *once))
    assert first == MeasuredStep(step=1, generation=2.0, score=3.0, train=4.0)
    assert second == MeasuredStep(step=2, generation=6.0, score=7.0, train=8.0)


def test_a_run_of_skyrl_that_was_started_again_adds_nothing_to_the_step_before(
    tmp_path: Path,
) -> None:
    crashed = skyrl_timers("step", "generate")
    start = TIMER.format(9, "Started: 'init_weight_sync_state'")
    again = skyrl_timers("step", "generate", "train_critic_and_policy")
    first, second = read(tmp_path, "skyrl.log", crashed + start + again)
    assert first == MeasuredStep(step=1, generation=2.0)
    assert second == MeasuredStep(step=2, generation=2.0, train=3.0)


def test_a_step_of_skyrl_that_samples_again_is_one_step(tmp_path: Path) -> None:
    text = skyrl_timers("step", "generate", "step", "generate", "train_critic_and_policy")
    assert read(tmp_path, "skyrl.log", text) == [MeasuredStep(step=1, generation=6.0, train=5.0)]


def test_what_skyrl_waits_for_a_buffer_is_no_generation(tmp_path: Path) -> None:
    row = {"trainer/global_step": 3, "timing/step": 20.0, "timing/wait_for_generation_buffer": 5.0}
    (tmp_path / "skyrl.jsonl").write_text(json.dumps(row) + "\n")
    found = read_measured_file(tmp_path / "skyrl.jsonl")
    assert found.is_asynchronous and found.steps[0].step == 3
    assert (found.steps[0].wait, found.steps[0].generation) == (5.0, None)


@pytest.mark.parametrize("name", ["areal", "roll"])
def test_a_call_for_a_batch_is_waiting_in_asynchronous_modes(name: str, tmp_path: Path) -> None:
    file, text, expected = MADE[name]
    (tmp_path / file).write_text(text)
    silent = read_measured_file(tmp_path / file)
    assert silent.is_asynchronous is None and "taking turns" in silent.notes[-1]
    told = read_measured_file(tmp_path / file, is_asynchronous=True)
    assert told.steps[0].generation is None and told.steps[0].wait == expected[0].generation


def test_the_agentic_pipeline_of_roll_writes_the_seconds_of_its_own_step(tmp_path: Path) -> None:
    figures = '{"time/step_total": 60.0, "time/step_rollout": 30.0, "time/step_train": 9.0}'
    lines = [f'x metrics_tag: {{"step": {step}, "metrics": {figures}}}\n' for step in (0, 1)]
    steps = read(tmp_path, "roll.log", "".join(lines))
    assert [(step.step, step.step_time, step.generation) for step in steps] == [
        (0, 60.0, 30.0),
        (1, 60.0, 30.0),
    ]


def test_the_stages_of_torchforge_sum_up_to_its_step(tmp_path: Path) -> None:
    (tmp_path / "forge.log").write_text(MADE["torchforge"][1])
    found = read_measured_file(tmp_path / "forge.log")
    (step,) = found.steps
    parts = (step.wait, step.train, step.sync, step.other)
    assert found.is_asynchronous and step.step_time is not None
    assert sum(part or 0.0 for part in parts) == pytest.approx(step.step_time, abs=0.5)


def test_a_compressed_log_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "verl.log.gz"
    path.write_bytes(gzip.compress(MADE["verl"][1].encode()))
    assert list(read_measured_file(path).steps) == MADE["verl"][2]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"verl\.log\.gz: Compressed file ended"):
        read_measured_file(path)


def test_colours_of_a_terminal_and_names_of_ray_are_no_part_of_a_line(tmp_path: Path) -> None:
    lines = MADE["torchforge"][1].splitlines()
    shown = [f"\x1b[36m(Controller pid=7, ip=10.0.0.2)\x1b[0m {line}" for line in lines]
    assert read(tmp_path, "forge.log", "\n".join(shown) + "\n") == MADE["torchforge"][2]


def test_a_brace_in_a_text_swallows_no_lines_after_it(tmp_path: Path) -> None:
    text = MADE["slime"][1]
    assert read(tmp_path, "slime.log", f"prompt: {{ x\n{text}answer: }}\n") == MADE["slime"][2]


# Cut, resumed and mixed logs ------------------------------------------------------------------------


def two_steps(text: str, first: str, second: str) -> str:
    """Return a log and the same log of the next step."""
    return text + text.replace(first, second)


CUT = {
    "areal": ("Train step 3/", "Train step 4/"),
    "skyrl": ("Step 4:", "Step 5:"),
    "torchforge": ("STEP 3 ", "STEP 4 "),
}


@pytest.mark.parametrize("name", CUT)
def test_a_step_that_was_cut_off_has_no_wrong_figures(name: str, tmp_path: Path) -> None:
    file, text, (expected,) = MADE[name]
    both = two_steps(text.replace("'trainer/global_step': 4,", "'x': 4,"), *CUT[name])
    for end in range(len(text), len(both), 7):
        (tmp_path / file).write_text(both[:end])
        first, *rest = read_measured_file(tmp_path / file, name).steps
        assert first == expected
        assert all(replace(step, step=expected.step) == expected for step in rest)


def test_a_step_without_its_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    file, text, expected = MADE["torchforge"]
    cut = two_steps(text, *CUT["torchforge"]).rpartition("  main_perf")[0]
    (tmp_path / file).write_text(cut)
    found = read_measured_file(tmp_path / file)
    assert list(found.steps) == expected
    assert "forge.log: step 4 is cut off and was skipped" in found.notes
    (tmp_path / file).write_text(text.rpartition("  main_perf")[0])
    with pytest.raises(ValueError, match=r"no seconds .*; forge.log: step 3 is cut off"):
        read_measured_file(tmp_path / file, "torchforge")


def test_a_number_that_was_cut_off_is_no_other_number(tmp_path: Path) -> None:
    line = "step:{} - timing_s/gen:20.5 - timing_s/step:35.0"
    text = line.format(1) + "\n" + line.format(2)
    (tmp_path / "verl.log").write_text(text.removesuffix(" - timing_s/step:35.0")[:-2])
    found = read_measured_file(tmp_path / "verl.log")
    assert [step.step for step in found.steps] == [1]
    assert "verl.log: step 2 is cut off and was skipped" in found.notes


def test_two_runs_in_a_log_are_refused_with_what_to_do(tmp_path: Path) -> None:
    text = MADE["torchforge"][1]
    (tmp_path / "forge.log").write_text(text + text.replace("224.75", "220.0"))
    with pytest.raises(ValueError, match=r"step 3 is logged twice: .* split it$"):
        read_measured_file(tmp_path / "forge.log", "torchforge")


def test_a_resumed_run_of_roll_has_no_step_of_zero_seconds(tmp_path: Path) -> None:
    file, text, expected = MADE["roll"]
    resumed = text.replace('"time/step_total": 98.5', '"time/step_total": 0')
    found = read(tmp_path, file, resumed)
    assert found == [replace(expected[0], step_time=None), expected[1]]


def test_the_state_that_roll_keeps_is_read_as_its_log(tmp_path: Path) -> None:
    rows = re.findall(r'"metrics": (\{.*\})\}', MADE["roll"][1])
    state = {"step": 6, "log_history": [json.loads(row) for row in rows]}
    found = read(tmp_path, "state.json", json.dumps(state))
    assert found == MADE["roll"][2]


def test_seconds_of_no_step_before_are_none(tmp_path: Path) -> None:
    first, second = read(tmp_path, "roll.csv", "Step,time/step_total\n0,0\n1,98.5\n2,97\n")
    assert (first.step_time, second.step_time) == (98.5, 97)


def test_other_lines_inside_a_table_or_a_dict_change_no_figure(tmp_path: Path) -> None:
    for name in ("areal", "skyrl"):
        file, text, expected = MADE[name]
        lines = text.splitlines()
        for place in range(6, len(lines) - 1):
            mixed = [*lines[:place], "INFO: 12 of 64 done", *lines[place:]]
            (tmp_path / file).write_text("\n".join(mixed) + "\n")
            try:
                assert list(read_measured_file(tmp_path / file, name).steps) == expected
            except ValueError as error:
                assert "not a literal" in str(error)


def test_timers_of_skyrl_that_a_terminal_wrapped_are_read(tmp_path: Path) -> None:
    text = skyrl_timers("step", "generate", "fwd_logprobs_values_reward", "train_critic_and_policy")
    for width in range(50, 120, 3):
        for strips in (False, True):
            lines = [wrapped(line, width, strips=strips) for line in text.splitlines()]
            found = read(tmp_path, "skyrl.log", "\n".join(lines) + "\n")
            assert found == [MeasuredStep(step=1, generation=2.0, score=3.0, train=4.0)]


# Documentation -------------------------------------------------------------------------------------


def documented_columns() -> dict[str, set[str]]:
    """Return the columns that docs/calibration.md names for each format."""
    text = (Path(__file__).parents[1] / "docs" / "calibration.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    cells = {row[0].strip("| `"): " ".join(row[2:4]) for row in rows if len(row) == 5}
    return {name: set(re.findall(r"`(\w+)`", text)) for name, text in cells.items()}


def test_the_table_of_formats_names_what_each_one_reads() -> None:
    told = documented_columns()
    for name in known_formats():
        log = load_format(name)
        assert told[name] == {*log.columns, *log.synchronous, *log.asynchronous}


# Terminals ----------------------------------------------------------------------------------------


def wrapped(line: str, width: int, *, strips: bool = False) -> str:
    """Return a line as a terminal wraps it; copying from one may lose white space at the ends."""
    pieces = [line[at : at + width] for at in range(0, len(line), width)]
    return "\n".join(piece.strip() if strips else piece for piece in pieces)


@pytest.mark.parametrize("name", [name for name in sorted(MADE) if name != "nemo-rl"])
@pytest.mark.parametrize("width", [80, 97, 120, 233])
@pytest.mark.parametrize("strips", [False, True])
def test_a_log_that_a_terminal_wrapped_is_read_as_it_was(
    name: str, width: int, strips: bool, tmp_path: Path
) -> None:
    file, text, expected = MADE[name]
    lines = [wrapped(line, width, strips=strips) for line in text.splitlines()]
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    found = read_measured_file(tmp_path / file)
    assert found.framework == load_format(name).name
    assert list(found.steps) == expected


def test_lines_between_steps_are_no_parts_of_them(tmp_path: Path) -> None:
    lines = VERL_LINE, "INFO saved - checkpoint: 3 s", "{'a': {", VERL_LINE.replace("12", "13", 1)
    first, second = read(tmp_path, "verl.log", "\n".join(lines) + "\n")
    assert (first.step, second.step) == (12, 13) and first.sync == second.sync == 5.83


BAR = "  0%|    | {}/1000 [04:41<78:02:42, {}s/it]\n"
OLD_TRL = "{'loss': -0.0, 'completion_length': 827.9, 'reward': 0.03}\n"


def test_the_seconds_of_a_progress_bar_count_if_there_are_no_others(tmp_path: Path) -> None:
    text = OLD_TRL + BAR.format(1, 281.24) + OLD_TRL + BAR.format(2, 270.5)
    (tmp_path / "trl.log").write_text(text)
    found = read_measured_file(tmp_path / "trl.log")
    assert [(step.step_time, step.output_tokens) for step in found.steps] == [
        (281.24, 827.9),
        (270.5, 827.9),
    ]
    assert any("those of the progress bar are used" in note for note in found.notes)
    own = OLD_TRL.replace("}", ", 'step_time': 12.5}") + BAR.format(1, 281.24)
    assert read(tmp_path, "own.log", own)[0].step_time == 12.5


EVALUATION = "\r  0%|   | 0/4 [00:00<?, ?it/s]\r 75%|## | 3/4 [00:06<00:02,  2.1s/it]\r"
NAMED = "Fetching 4 files: 100%|###| 4/4 [00:00<00:00, 9.9it/s]\n"


@pytest.mark.parametrize("between", [EVALUATION, EVALUATION * 2, NAMED], ids=len)
def test_bars_of_evaluations_and_downloads_are_no_steps(tmp_path: Path, between: str) -> None:
    steps = [OLD_TRL + BAR.format(number, 281.24) for number in range(1, 5)]
    start = "  0%|    | 0/1000 [00:00<?, ?it/s]\n"
    (tmp_path / "trl.log").write_text(start + between + between.join(steps))
    found = read_measured_file(tmp_path / "trl.log")
    assert [step.step_time for step in found.steps] == [281.24] * 4


def test_bars_that_cannot_be_told_from_those_of_training_are_refused(tmp_path: Path) -> None:
    same = EVALUATION.replace("/4 ", "/1000 ")
    steps = [OLD_TRL + BAR.format(number, 281.24) for number in range(1, 5)]
    (tmp_path / "trl.log").write_text((same * 2).join(steps))
    with pytest.raises(ValueError, match="has no seconds of a step"):
        read_measured_file(tmp_path / "trl.log")


def test_a_bar_alone_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "bar.log").write_text(BAR.format(1, 281.24))
    with pytest.raises(ValueError, match=r"its format is unknown; .+ or write the steps as a CSV"):
        read_measured_file(tmp_path / "bar.log")


@pytest.mark.parametrize(("level", "is_asynchronous"), [(1, True), (0, False)])
def test_the_level_of_asynchrony_is_read(level: int, is_asynchronous: bool, tmp_path: Path) -> None:
    file, text, _ = MADE["prime-rl"]
    (tmp_path / file).write_text(text.replace("Async Level: 1", f"Async Level: {level}"))
    found = read_measured_file(tmp_path / file)
    assert found.is_asynchronous is is_asynchronous
    assert any(f"up to {level} steps ahead" in note for note in found.notes)


# Traces -------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_the_stages_that_follow_each_other_in_it() -> None:
    keys = {"policies.system": "colocated", "algorithm.old_log_probs": "trainer"}
    trace = simulate(small_run({**keys, "cluster.links": [], "rollout.pool": "near"}))
    mean, steps = phase_seconds(trace), read_run_steps(trace, takes_turns=True)[1:]
    for column, expected in (
        ("generation", mean.generation),
        ("score", mean.score),
        ("train", mean.train),
        ("step_time", mean.step),
    ):
        values = [getattr(step, column) for step in steps]
        assert sum(values) / len(values) == pytest.approx(expected)
    assert [step.rollouts for step in steps] == [4, 4]


def test_the_overhead_of_a_simulated_step_is_no_training() -> None:
    run = small_run({"framework": {"step_time": "5 s"}})
    trace, costs = simulate(run), Costs.load(run)
    plain = read_run_steps(trace)
    less = read_run_steps(trace, costs.training.overhead_time)
    for one, other in zip(plain, less, strict=True):
        assert one.train is not None and other.train is not None
        assert one.train - other.train == pytest.approx(5.0)


def test_busy_seconds_of_steps_are_those_in_which_replicas_generate() -> None:
    trace = simulate(small_run({"policies.system": "fully-async", "algorithm.steps": 4}))
    steps, timeline = read_run_steps(trace), read_timeline(trace)
    end = sum(step.step_time or 0.0 for step in steps)
    spans = [span for of_one in timeline.replicas.values() for span in of_one]
    generated = [
        min(s.end, end) - s.start for s in spans if s.activity == "generate" and s.start < end
    ]
    assert sum(step.busy or 0.0 for step in steps) == pytest.approx(sum(generated) / 2)
    assert all(0 < (step.busy or 0.0) <= (step.step_time or 0.0) + 1e-9 for step in steps)


def test_a_run_whose_trainer_was_restarted_has_each_step_once() -> None:
    keys = {"algorithm.steps": 6, "execute.checkpoint_every": 3}
    fault = {"kind": "trainer-dies-training", "step": 6}
    trace = simulate(small_run({**keys, "faults": [fault]}))
    measured = measured_steps(trace, "run")
    assert [step.step for step in measured.steps] == [1, 2, 3, 5, 6]
    assert [step.rollouts for step in measured.steps] == [4] * 5
    assert measured.notes == ("step 4 is left out: the trainer was restarted in it",)
    lasted = read_steps(trace).durations().tolist()
    times = [step.step_time for step in measured.steps]
    assert times == pytest.approx([*lasted[:3], *lasted[4:]])


def test_evaluations_for_which_training_waits_are_in_no_measured_step() -> None:
    keys = {"algorithm.steps": 4, "evaluation.num_prompts": 8, "evaluation.every": 1}
    trace = simulate(small_run(keys))
    steps, found = measured_steps(trace, "run").steps, read_steps(trace)
    assert len(found.held) == 4 and min(found.held) > 0
    times = [step.step_time for step in steps]
    assert times == pytest.approx(found.durations().tolist())
    assert all((step.rollout_time or 0.0) <= (step.step_time or 0.0) for step in steps)

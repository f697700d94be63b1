"""What an executed run shows of itself: its last steps while it goes on, and what it learned in its report."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamrl.cli.watch_run import NUM_ROWS, RunWatch, line_of
from streamrl.engine.entities import Group, Replica, Rollout
from streamrl.engine.messages import Generated, Verified
from streamrl.engine.systems import build_state
from streamrl.engine.trace import LineFile, read_trace
from streamrl.executor.execute import price_local_cores_at_zero
from streamrl.executor.record import RunDirectory
from streamrl.record.metrics import measure
from streamrl.record.run_directory import ROLLED_BACK_TO, SAMPLES
from streamrl.record.samples import most_varied_group, read_completions, shortened, spread_over
from streamrl.report.page.learning import PANELS
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.report.pictures.drawing import Dot, Polyline
from streamrl.report.pictures.step_curves import MOST_POINTS, Curve, curves_picture
from streamrl.report.run_tables import metrics_table
from streamrl.runfile.config import Run
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_execute import real_run
from tests.test_monitoring import execute
from tests.tiny_model import tiny_model


def step_line(step: int, seconds: float, **more: float) -> dict[str, Any]:
    figures = {"reward": 0.5, "reward_std": 0.25, "uniform_groups": 0.125, "output_tokens": 640}
    lengths = {"length_mean": 20.0, "length_max": 64, "cut_off": 0.0625}
    return {"step": step, "step_time": seconds, **figures, **lengths, **more}


# While it goes on ---------------------------------------------------------------------------------


def terminal(width: int = 160, kind: str = "xterm") -> Console:
    environment = {"TERM": kind}
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ=environment)


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return plain.splitlines()


def test_a_terminal_shows_the_last_steps_and_what_they_took() -> None:
    console = terminal()
    with RunWatch(40, console=console) as watch:
        for step in range(1, NUM_ROWS + 3):
            watch.take(step_line(step, 2.0, loss=-0.125))
    last = [line.split() for line in shown(console)[-NUM_ROWS - 4 :]]
    steps = [int(words[0]) for words in last if words and words[0].isdigit()]
    assert steps == list(range(3, NUM_ROWS + 3))
    row = next(words for words in last if words and words[0] == "12")
    assert row == [
        "12",
        "2.0",
        "0.500",
        "±",
        "0.250",
        *["20", "to", "64", "6%", "12%", "-0.125", "320"],
    ]


def test_under_the_table_stands_when_it_ends_and_where_its_rollouts_are(run: Run) -> None:
    console = terminal()
    with RunWatch(40, [2], console=console) as watch:
        state = build_state(run)
        replica = state.fleet.replicas[0] = Replica(0, 0, is_serving=True)
        for number in range(11):
            group = Group(number, 1, 0, 10)
            rollout = Rollout(number, group, 10)
            state.rollouts[number] = rollout
            if number < 5:
                rollout.phase = "generating"
                replica.rollouts[number] = rollout
            elif number < 8:
                rollout.phase = "ready"
            elif number < 9:
                rollout.phase = "verifying"
        state.leader.batch.in_gradient = [state.rollouts[7]]
        watch.see(Verified(7, 0.25), state, 1.0)
        watch.take(step_line(1, 30.0))
        watch.take(step_line(2, 10.0))
        watch.see(Verified(6, 0.75), state, 41.0)
    *_, bar, facts = shown(console)
    assert "380 s left, until about " in bar  # 38 steps of 10 s; the first one waited for replicas
    where = "2 running, 5 waiting, 1 to be scored, 2 buffered, 1 trained"
    assert facts.startswith(f"reward 0.500; rollouts: {where}; ")


def test_turns_of_an_episode_count_their_new_tokens_once() -> None:
    console = terminal()
    with RunWatch(40, [2], console=console) as watch:
        state = build_state(small_run({"environment": {"max_turns": 4, "max_context": 4096}}))
        for number in range(5):
            rollout = Rollout(number, Group(number, 1, 0, 10), 10, phase="acting")
            state.rollouts[number] = rollout
        state.rollouts[4].phase = "queued"
        for tokens in (100, 250, 400, 60):  # it starts over after its third turn
            watch.see(Generated(3, tokens, "stop", 0, 1.0, 0.1), state, 1.0)
        watch.see(Verified(3, 0.5), state, 10.0)
    *_, facts = shown(console)
    assert "4 in environments, 1 wait for environments" in facts
    assert facts.endswith("; 46 tokens/s")


def test_the_expected_end_is_a_range_that_unequal_steps_hardly_move(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with RunWatch(200, console=Console(file=io.StringIO())) as watch:
        watch.take(step_line(1, 60.0))
        for step in range(2, 101):
            watch.take(step_line(step, 2.0 if step % 3 else 8.0))
    lines = capfd.readouterr().err.splitlines()
    left = [
        int(found[1]) for line in lines if (found := re.search(r" (\d+) s to (\d+) s left", line))
    ]
    *_, last = lines
    low, high = map(int, re.search(r" (\d+) s to (\d+) s left", last).groups())
    assert low < 100 * 4.0 < high  # 100 steps of 4 s on average
    assert all(abs(one - other) < 30 for one, other in pairwise(left[-20:]))


def test_while_replicas_come_up_it_says_so(run: Run) -> None:
    console = terminal()
    with RunWatch(40, [2], console=console) as watch:
        state = build_state(run)
        state.fleet.replicas[0] = Replica(0, 0)
        watch.see(Verified(7, 0.25), state, 1.0)
    wanted = state.fleet.num_wanted
    assert shown(console)[-1].startswith(f"1 of {wanted} replicas start; reward 0.250; ")


def test_the_kl_from_the_initial_policy_is_told_beside_that_from_the_one_that_sampled() -> None:
    line = line_of(step_line(3, 2.0, kl_k3=1.5e-3, reference_kl=2.2e-2))
    assert "KL 1.5e-03, KL ref 2.2e-02" in line
    assert "KL ref" not in line_of(step_line(3, 2.0, kl_k3=1.5e-3))
    assert {"kl_k3", "reference_kl"} <= {key for panel in PANELS for key, _ in panel.keys}


def test_rollouts_without_a_score_are_counted_where_there_are_any() -> None:
    heads = []
    for unscored in (0, 3):
        console = terminal()
        with RunWatch(40, console=console) as watch:
            watch.take(step_line(1, 2.0, unscored=unscored))
        heads.append(next(line for line in shown(console) if "seconds" in line))
    assert ["unscored" in head for head in heads] == [False, True]


def test_a_narrow_terminal_shows_whole_columns() -> None:
    console = terminal(width=60)
    with RunWatch(40, console=console) as watch:
        watch.take(step_line(1, 2.0, loss=-0.125, entropy=0.5, grad_norm=0.25))
    heads = next(line for line in shown(console)[-9:] if "seconds" in line)
    assert heads.split() == ["step", "seconds", "reward", "tokens", "cut", "off", "uniform"]
    assert all(len(line) <= 60 and "…" not in line for line in shown(console))


def test_steps_that_are_taken_back_leave_the_table() -> None:
    console = terminal()
    with RunWatch(40, console=console) as watch:
        for step in range(1, 6):
            watch.take(step_line(step, 1.0))
        watch.take({ROLLED_BACK_TO: 2, "time": 7.0})
        watch.take(step_line(3, 1.5))
    last = [line.split() for line in shown(console)[-8:]]
    rows = [words[:2] for words in last if words and words[0].isdigit()]
    assert rows == [["1", "1.0"], ["2", "1.0"], ["3", "1.5"]]


@pytest.mark.parametrize("kind", ["a pipe", "a dumb terminal"])
def test_elsewhere_each_step_is_a_line(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    console = terminal(kind="dumb") if kind == "a dumb terminal" else Console(file=io.StringIO())
    with RunWatch(3, console=console) as watch:
        watch.take(step_line(1, 4.0, entropy=0.5))
        watch.take({ROLLED_BACK_TO: 0})
        watch.take(step_line(1, 2.0))
        watch.take(step_line(3, 3.0))
    first, second, last = capfd.readouterr().err.splitlines()
    figures = "reward 0.500 ± 0.250, tokens 20 to 64, cut off 6%, uniform 12%"
    assert first == f"step 1 of 3: seconds 4.0, {figures}, entropy 0.500, tokens/s 160"
    assert re.match(r"step 1 of 3, 4 s left, until about \d\d:\d\d: seconds 2\.0, ", second)
    assert "entropy" not in second
    assert last == f"step 3 of 3: seconds 3.0, {figures}, tokens/s 213"
    assert "\x1b" not in first and shown(console) == []


def test_what_is_said_meanwhile_stands_above_the_table() -> None:
    console = terminal()
    with RunWatch(40, console=console) as watch:
        watch.take(step_line(1, 2.0))
        print("streamrl: something is wrong", file=sys.stderr)
    lines = shown(console)
    said, row = lines.index("streamrl: something is wrong"), len(lines) - 1
    while lines[row].split()[:1] != ["1"]:
        row -= 1
    assert said < row


def test_colours_are_left_out_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, environment in {"colours": {}, "none": {"NO_COLOR": "1"}}.items():
        monkeypatch.delenv("NO_COLOR", raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("TERM", "xterm-256color")
        console = Console(file=io.StringIO(), force_terminal=True, width=160)
        with RunWatch(40, console=console) as watch:
            watch.take(step_line(1, 2.0))
        assert isinstance(console.file, io.StringIO)
        found[name] = re.findall(r"\x1b\[(?:3|9)\d(?:;\d+)*m", console.file.getvalue())
    assert found["colours"] and not found["none"]


class GoneStream(io.StringIO):
    """What nothing can be written to."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "a terminal that is gone")


def test_a_terminal_that_is_gone_costs_the_run_nothing(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EPIPE, "Broken pipe")

    console = terminal()
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    with RunWatch(40, console=console) as watch:
        console.file = GoneStream()
        time.sleep(0.5)  # until it was drawn, in vain
        watch.take(step_line(1, 1.0))
        watch.see(Verified(0, 0.5), build_state(run), 1.0)
    with RunWatch(40, console=Console(file=GoneStream(), force_terminal=True)) as watch:
        watch.take(step_line(1, 1.0))
    monkeypatch.setattr(os, "write", write)
    with RunWatch(40, console=Console(file=io.StringIO())) as watch:
        watch.take(step_line(1, 1.0))


def test_what_the_executor_has_to_say_costs_the_run_nothing_where_nobody_hears_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", GoneStream())

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("streamrl.executor.monitoring.open_tracker", fail)
    monkeypatch.setattr("streamrl.executor.trainer.trainer.step_samples", fail)
    assert len(execute(real_run(tmp_path, execute__trackers=["wandb"]))) == 4


# In its report ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return real_run(tmp_path)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run of scripted roles, with prompts of its own."""
    run = real_run(tmp_path, policies__system="stream-async", algorithm__steps=6)
    tiny_model(40).config.save_pretrained(tmp_path)
    execute(run)
    return Path(run.execute.output)


def test_the_headline_of_an_executed_run_has_what_was_measured(run_directory: Path) -> None:
    page = make_page(read_report([run_directory]))
    assert page.title.startswith("What it cost to post-train ")
    assert page.answer.startswith("6 steps took ") and " took " in page.answer[20:]
    for name in ("trace.jsonl", "metrics.jsonl"):
        path = run_directory / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: 2 * len(lines) // 3]))
    assert make_page(read_report([run_directory])).title.endswith(" has cost so far")


def test_a_report_draws_what_a_run_learned_and_quotes_what_it_wrote(run_directory: Path) -> None:
    report = read_report([run_directory])
    page = make_page(report)
    section = next(each for each in page.sections if each.name == "learning-1")
    titles = [picture.drawing.title for picture in section.pictures]
    assert titles[0] == "Reward" and titles[-1].startswith("Seconds of a step")
    assert {"Output tokens of a rollout", "Shares", "Versions behind"} < set(titles)
    (told,) = describe(report)["learning"]  # type: ignore[misc]
    assert [line["step"] for line in told["steps"]] == list(range(1, 7))
    assert [group.step for group in told["samples"]] == [1, 4, 6]
    (details,) = [each for each in page.sections if each.name == "steps-1"]
    steps, *tables = details.tables
    assert details.is_folded and not section.is_folded
    assert [row[0].text for row in steps.rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row[steps.head.index("tokens")].text for row in steps.rows] == [
        f"{line['length_mean']:.3g}" for line in told["steps"]
    ]
    assert "step took" in steps.head and "Figures of its steps" in steps.caption
    for group, table in zip(told["samples"], tables, strict=True):
        rewards = [each.reward for each in group.rollouts]
        assert rewards == sorted(rewards, reverse=True) and len(rewards) > 1
        assert table.caption.startswith(f"Step {group.step}, ") and group.prompt in table.caption
        assert [row[-1].text for row in table.rows] == [each.text for each in group.rollouts]
        assert {row[3].text for row in table.rows} <= {"ended by itself", "cut off"}
    assert section.title in render_html(page) and section.title in render_markdown(page)


def test_a_run_under_way_and_one_that_died_can_be_reported(run_directory: Path) -> None:
    for name in ("trace.jsonl", "metrics.jsonl", "rollouts.jsonl", "samples.jsonl"):
        path = run_directory / name
        data = path.read_bytes()
        path.write_bytes(data[: 2 * len(data) // 3])
    page = make_page(read_report([run_directory]))
    section = next(each for each in page.sections if each.name == "learning-1")
    assert re.match(
        r"Not at its end: [345] of 6 steps are made\. At their rate 6 steps", page.answer
    )
    assert re.match(r"[345] of 6 steps are made\. From step 1 to step [345] ", section.text[0])


def test_a_long_run_is_told_by_some_of_its_steps(run_directory: Path) -> None:
    lines = (run_directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    figures = json.loads(lines[0])
    many = [json.dumps({**figures, "step": step}) + "\n" for step in range(1, 1001)]
    (run_directory / "metrics.jsonl").write_text("".join(many))
    page = make_page(read_report([run_directory]))
    table = next(each for each in page.sections if each.name == "steps-1").tables[0]
    steps = [row[0].text for row in table.rows]
    assert len(steps) == 12 and (steps[0], steps[-1]) == ("1", "1,000")


def test_samples_are_of_the_group_with_most_to_learn_from_and_as_it_was_trained_on(
    run_directory: Path,
) -> None:
    lines = [json.loads(line) for line in (run_directory / "rollouts.jsonl").open()]
    by_rollout = {line["rollout"]: line for line in lines}
    prompts = [
        json.loads(line)["prompt"] for line in (run_directory.parent / "prompts.jsonl").open()
    ]
    spreads = []
    for group in read_completions(run_directory):
        first = by_rollout[group.rollouts[0].rollout]
        siblings = [line for line in lines if line["group"] == first["group"]]
        rewards = [line["reward"] for line in siblings]
        assert group.prompt == prompts[first["line"]] and group.size == len(rewards)
        assert group.mean_reward == pytest.approx(sum(rewards) / len(rewards))
        assert group.rollouts[0].reward == max(rewards)
        assert group.rollouts[-1].reward == min(rewards)
        assert len({each.rollout for each in group.rollouts}) == min(3, len(rewards))
        for each in group.rollouts:
            line = by_rollout[each.rollout]
            assert (each.text, each.reward) == (line["text"], line["reward"])
            assert each.num_tokens == line["num_tokens"] and each.version == line["versions"][0][0]
            assert each.finish == ("length" if each.num_tokens >= 256 else "stop")
            assert (each.advantage > 0) == (each.reward > group.mean_reward)
        spreads.append(max(rewards) - min(rewards))
    assert max(spreads) == 1.0


def test_steps_that_were_rolled_back_are_not_quoted_twice(run_directory: Path) -> None:
    path = run_directory / SAMPLES
    first, second, third, *_ = path.read_bytes().splitlines(keepends=True)
    mark = b'{"rolled_back_to":1,"time":2.5}\n'
    again = second.replace(b'"size":', b'"mean_reward":0.125,"size":')
    path.write_bytes(first + second + third + mark + again + third[:40])
    assert [group.step for group in read_completions(run_directory)] == [1, 2]
    assert read_completions(run_directory)[1].mean_reward == 0.125


def test_as_many_are_quoted_as_the_run_file_says(tmp_path: Path) -> None:
    for count, expected in ((0, []), (1, [1] * 4)):
        directory = tmp_path / str(count)
        directory.mkdir()
        execute(real_run(directory, execute__samples_per_step=count))
        groups = read_completions(directory / "run")
        assert [len(group.rollouts) for group in groups] == expected
    with pytest.raises(ValueError, match=r"execute\.samples_per_step"):
        real_run(tmp_path, execute__samples_per_step=-1)


def test_which_rollouts_of_a_group_are_shown() -> None:
    rewards = [0.0, 1.0, 0.5, 0.25, 1.0]
    assert spread_over(rewards, 1) == [1]
    assert spread_over(rewards, 2) == [1, 0]
    assert spread_over(rewards, 3) == [1, 2, 0]
    assert spread_over(rewards, 9) == [1, 4, 2, 3, 0]
    assert most_varied_group([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]) == 1
    assert most_varied_group([[1.0, 1.0], [0.0, 0.0]]) == 0


def test_samples_that_cannot_be_written_cost_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("streamrl.executor.trainer.trainer.step_samples", fail)
    run = real_run(tmp_path)
    assert len(execute(run)) == run.algorithm.steps
    assert caplog.text.count("samples.jsonl is no longer written: OSError") == 1


def test_a_disk_that_takes_half_a_line_of_samples_gets_no_more_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[: len(data) // 2])

    directory = RunDirectory(tmp_path)
    full = Full()
    directory._samples = LineFile(full)
    for _ in range(2):
        directory.write_samples(lambda: {"step": 1})
    assert full.getvalue() == b""
    assert caplog.text.count("No space left on device") == 1


def test_long_texts_are_shown_by_their_ends() -> None:
    assert shortened("x" * 600, 600) == "x" * 600
    text = shortened("a" * 1000 + "b" * 1000, 600)
    assert text.startswith("aaa") and text.endswith("bbb") and "1,400 characters" in text


# On the command line ------------------------------------------------------------------------------


def test_the_newest_samples_can_be_read_while_the_run_goes_on(run_directory: Path) -> None:
    with (run_directory / SAMPLES).open("ab") as file:
        file.write(b'{"step": 7, "prom')
    shown = streamrl("samples", run_directory).stdout
    *_, newest = read_completions(run_directory)
    head, prompt, *_ = shown.splitlines()
    assert head.startswith(f"step 6: {len(newest.rollouts)} of the {newest.size} rollouts")
    assert prompt == f"  | {newest.prompt}"
    for each in newest.rollouts:
        assert (
            f"rollout {each.rollout}: reward {each.reward:.3g}, advantage {each.advantage:+.3g}"
            in shown
        )
        assert f"  | {each.text}" in shown
    told = json.loads(
        streamrl("samples", run_directory, "--step", "2", "--step", "1", "--json").stdout
    )
    assert [group["step"] for group in told["samples"]] == [2, 1]


def test_what_a_model_wrote_does_not_steer_the_terminal(run_directory: Path) -> None:
    path = run_directory / SAMPLES
    group = read_completions(run_directory)[0]
    rollout = msgspec.structs.replace(group.rollouts[0], text="one\n\x1b[2Jtwo \u00e9")
    path.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(group, rollouts=(rollout,))) + b"\n"
    )
    shown = streamrl("samples", run_directory).stdout
    assert "  | one\n  | \\x1b[2Jtwo \u00e9" in shown and "\x1b" not in shown


def test_a_report_holds_no_control_character_of_what_a_model_wrote(run_directory: Path) -> None:
    groups = read_completions(run_directory)
    rollout = msgspec.structs.replace(groups[0].rollouts[0], text="one\n\x1b[2J\x00two \u00e9")
    told = [msgspec.structs.replace(g, rollouts=(rollout,), prompt="why\x07?") for g in groups]
    (run_directory / SAMPLES).write_bytes(b"".join(msgspec.json.encode(g) + b"\n" for g in told))
    page = make_page(read_report([run_directory]))
    for text in (render_html(page), render_markdown(page)):
        assert "\\x1b[2J\\x00two \u00e9" in text and "why\\x07?" in text
        assert not set(text) & set(map(chr, range(32))) - {"\n", "\t"}


def test_samples_that_are_not_there_are_told_in_a_line(run_directory: Path, tmp_path: Path) -> None:
    done = streamrl("samples", run_directory, "--step", "99")
    assert done.returncode == 2
    assert "--step 99: " in done.stderr and "has samples of 6 steps, 1 to 6" in done.stderr
    (run_directory / SAMPLES).write_bytes(b"")
    assert "no step has ended" in streamrl("samples", run_directory).stderr
    (run_directory / SAMPLES).write_bytes(b'{"step": 1}\n')
    assert "a line is not a sample" in streamrl("samples", run_directory).stderr
    assert streamrl("samples", tmp_path / "nowhere").returncode == 2


def test_a_curve_of_many_steps_is_thinned_out_and_gaps_stay_gaps() -> None:
    steps = list(range(1, 10_001))
    values = [float("nan") if 4000 < step <= 6000 else float(step) for step in steps]
    picture = curves_picture("c", "Title", steps, [Curve("mean", values, "s-0")], str)
    lines = [s for s in picture.drawing.shapes if isinstance(s, Polyline) and "curve" in s.css]
    assert len(lines) == 2 and sum(len(line.points) for line in lines) <= MOST_POINTS
    picture = curves_picture("c", "Title", [7], [Curve("mean", [1.0], "s-0")], str)
    assert any(isinstance(shape, Dot) for shape in picture.drawing.shapes)
    with pytest.raises(ValueError, match="a value for each of 2 steps"):
        curves_picture("c", "Title", [1, 2], [Curve("mean", [1.0], "s-0")], str)


def test_cores_of_this_machine_are_not_rented_unless_they_have_a_price(tmp_path: Path) -> None:
    pools = {"cluster__pools__far__gpu": "cpu", "cluster__pools__near__gpu": "cpu"}
    run = real_run(tmp_path, **pools, cluster__pools__near__price=0.1)
    found = price_local_cores_at_zero(run.cluster).pools
    assert (found["far"].price, found["near"].price) == (0.0, 0.1)
    rented = real_run(tmp_path).cluster
    assert price_local_cores_at_zero(rented) == rented


def test_where_nothing_is_rented_there_is_no_word_of_dollars(tmp_path: Path) -> None:
    pools = {"cluster__pools__far__price": 0.0, "cluster__pools__near__price": 0.0}
    directories = []
    for name, steps in (("short", 4), ("long", 6)):
        (tmp_path / name).mkdir()
        changes = {**pools, "policies__system": "stream-async", "algorithm__steps": steps}
        run = real_run(tmp_path / name, **changes)
        tiny_model(40).config.save_pretrained(tmp_path / name)
        execute(run)
        directories.append(Path(run.execute.output))
    for chosen in (directories[:1], directories):
        page = make_page(read_report(chosen))
        figures = [page.answer, *(f"{tile.value} {tile.note}" for tile in page.tiles)]
        assert not [text for text in figures if "$" in text or "cost" in text]
        names = [p.drawing.name for section in page.sections for p in section.pictures]
        assert "cost" not in names and "speed" in names
        assert "cost" not in page.title
        assert "sensitivity" not in [section.name for section in page.sections]
    table = Console(file=io.StringIO(), width=200)
    table.print(metrics_table(measure(read_trace(directories[0] / "trace.jsonl"))))
    assert isinstance(table.file, io.StringIO) and "$" not in table.file.getvalue()

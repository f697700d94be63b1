"""`streamrl lengths`: statistics and a histogram of output lengths from files, run files, runs and words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.report.length_histogram import WIDTH, histogram_lines
from streamrl.runfile.files import write_run
from streamrl.runfile.length_words import CATALOGUE
from streamrl.sim.world import simulate
from streamrl.workload.length_statistics import NUM_BINS, length_statistics
from tests.command_line import streamrl
from tests.made_logs import MADE
from tests.runs import small_run


def statistics_of(*arguments: str | Path) -> dict[str, float]:
    done = streamrl("lengths", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)["statistics"]
    return found


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 10**6))
def test_every_output_is_in_one_bin(drawn: list[int], cap: int) -> None:
    found = length_statistics(np.array(drawn), cap)
    cut = [min(each, cap) for each in drawn]
    assert found.longest == max(cut) == found.bins[-1].most
    assert found.share_at_cap == sum(each == cap for each in cut) / len(cut)
    assert len(found.bins) <= 1.5 * NUM_BINS + 1
    for each in found.bins:
        inside = [length for length in cut if each.above < length <= each.most]
        assert each.share == pytest.approx(len(inside) / len(cut))


def test_a_long_tail_does_not_hide_the_other_lengths() -> None:
    found = length_statistics(np.array([*range(1, 1001), 100_000]))
    assert len(found.bins) > NUM_BINS / 2 and found.bins[-1].most == 100_000
    assert found.bins[-1].above < 2000


def test_the_longest_bar_has_the_full_width_and_no_bar_is_lost() -> None:
    _, *rows = histogram_lines(length_statistics(np.array([100] * 999 + [1200])))
    assert max(row.count("█") for row in rows) == WIDTH
    assert rows[-1].endswith("▏"), "one output of a thousand is seen"


@pytest.mark.parametrize("words", [*CATALOGUE, "Math Reasoning", "r1-distill-aime", "mean 600"])
def test_words_are_drawn(words: str) -> None:
    done = streamrl("lengths", words)
    assert done.returncode == 0 and "mean " in done.stdout


def test_stated_figures_come_out_again_with_their_cap() -> None:
    found = statistics_of("mean 6k, p95 20k, max 32k")
    assert found["mean"] == pytest.approx(6000, rel=0.02)
    assert found["p95"] == pytest.approx(20_000, rel=0.02)
    assert found["cap"] == 32_000 and 0 < found["share_at_cap"] < 0.05


def test_recorded_rollouts_have_their_own_figures(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.csv"
    file.write_text("group,prompt_tokens,len\n0,10,100\n0,10,300\n1,30,800\n1,30,800\n")
    found = statistics_of(file, "--field", "output_tokens=len")
    assert (found["mean"], found["longest"], found["share_at_cap"]) == (500, 800, 0.5)
    cut = statistics_of(file, "--field", "output_tokens=len", "--max-tokens", "300")
    assert (cut["mean"], cut["cap"], cut["share_at_cap"]) == (250, 300, 0.75)
    shown = streamrl("lengths", file, "--field", "output_tokens=len").stdout
    assert "4 outputs, prompts of 20 tokens" in shown


def test_a_run_file_and_a_run_have_the_lengths_of_their_rollouts(tmp_path: Path) -> None:
    run = small_run({"algorithm.steps": 4})
    write_run(run, tmp_path / "run.toml")
    trace = tmp_path / "run" / "trace.jsonl"
    trace.parent.mkdir()
    trace.write_bytes(simulate(run).encode())
    planned, done = statistics_of(tmp_path / "run.toml"), statistics_of(trace.parent)
    assert planned["cap"] == run.rollout.max_tokens
    assert done["mean"] == pytest.approx(planned["mean"], rel=0.3)
    assert done["rollouts"] == 4 * run.algorithm.rollouts_per_step


def test_a_histogram_that_starts_at_zero_has_no_empty_outputs(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("start,end,density\n0,10,0.1\n")
    found = statistics_of(path)
    assert found["longest"] == 10 and found["mean"] == pytest.approx(5.05, abs=0.05)


def test_spaces_around_the_names_of_columns_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_id, output_tokens \na,5\nb,9\n")
    assert statistics_of(path)["mean"] == 7


def test_columns_are_of_data_sets_only() -> None:
    done = streamrl("lengths", "chat", "--field", "output_tokens=x")
    assert done.returncode == 2 and "--field applies only to data sets" in done.stderr


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a b c", "is no file and no lengths in words"),
        ("mean x", "must be a whole number"),
        ("", "is no file and no lengths in words"),
        (
            "verl.log",
            "which has only means (856 output tokens); `streamrl import` makes a workload",
        ),
        ("empty.csv", "empty.csv is empty"),
        ("header.csv", "header.csv is empty"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("none.jsonl", "has no rollouts: every output_tokens is an empty list"),
        ("cut.jsonl", "cut.jsonl:2: not JSON"),
        ("semicolon.csv", "its header is 'prompt_id;output_tokens'; separate columns with commas"),
    ],
)
def test_what_has_no_lengths_is_said_in_one_line(source: str, said: str, tmp_path: Path) -> None:
    files = {
        "verl.log": MADE["verl"][1],
        "empty.csv": "",
        "header.csv": "output_tokens\n",
        "empty.jsonl": " \n",
        "none.jsonl": '{"output_tokens": []}\n',
        "cut.jsonl": '{"output_tokens": 5}\n{"output_to',
        "semicolon.csv": "prompt_id;output_tokens\na;5\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = tmp_path / source if source in files else source
    done = streamrl("lengths", given)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1

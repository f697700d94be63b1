"""What is recorded becomes a workload that replays it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.logs.framework_logs import read_measured_file
from streamrl.logs.recorded_rollouts import load_columns, parse_fields, read_rollouts
from streamrl.record.prompt_tokens import write_prompt_tokens
from streamrl.runfile.files import make_run, write_run
from streamrl.workload.workload import SimulatedWorkload
from tests.command_line import streamrl
from tests.made_logs import MADE
from tests.runs import make_table, small_run

ROWS = [
    {"prompt": "1+1=", "answer": "2", "response_length": 10, "prompt_length": 5},
    {"prompt": "2+2=", "answer": "4", "response_length": 20, "prompt_length": 7},
    {"prompt": "1+1=", "answer": "2", "response_length": 12, "prompt_length": 5},
    {"prompt": "2+2=", "answer": "4", "response_length": 200, "prompt_length": 7},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(directory: Path, changes: dict[str, Any] | None = None) -> SimulatedWorkload:
    """Return the workload of the small run with the section that an import wrote."""
    table = make_table(
        {"algorithm.prompts_per_step": 2, "algorithm.group_size": 2, **(changes or {})}
    )
    table["workload"] = tomllib.loads((directory / "workload.toml").read_text())["workload"]
    return SimulatedWorkload(make_run(table, directory))


def test_recorded_rollouts_replay_prompt_by_prompt_in_their_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", ROWS)
    done = streamrl("import", tmp_path / "rollouts.jsonl", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["rollouts"], told["prompts"], told["group_size"]) == (4, 2, 2)
    draws = imported(tmp_path / "out").draw(0, 4)
    assert [sorted(draw.lengths) for draw in draws] == [[10, 12], [20, 200]] * 2
    assert [draw.drawn.prompt_tokens for draw in draws] == [5, 7] * 2
    prompts = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").open()]
    assert prompts == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def test_rollouts_of_an_executed_run_have_the_tokens_of_their_prompts(tmp_path: Path) -> None:
    write_prompt_tokens(tmp_path, [np.arange(size, dtype=np.int32) for size in (5, 7)])
    facts = {"text": "", "versions": [[0, 0]], "reward": 1.0}
    rows = [
        {
            "rollout": number,
            "group": number // 2,
            "line": 1 - number // 2,
            "num_tokens": tokens,
            **facts,
        }
        for number, tokens in enumerate((10, 12, 20, 22))
    ]
    back = {"rolled_back_to": 0, "leg": 2, "groups_done": 1, "done_ahead": []}
    again = [{**row, "num_tokens": 30} for row in rows[2:]]
    path = write_lines(tmp_path / "rollouts.jsonl", [*rows, back, *again])
    found = read_rollouts(str(path))
    assert found.groups == [[10, 12], [30, 30]] and found.prompt_tokens == [7, 5]
    assert not found.notes


def test_lists_are_samples_of_a_prompt_or_turns_of_a_rollout(tmp_path: Path) -> None:
    samples = [{"response_length": [3, 4]}, {"response_length": [5, 6, 7]}]
    assert read_rollouts(str(write_lines(tmp_path / "a.jsonl", samples))).groups == [
        [3, 4],
        [5, 6, 7],
    ]
    turns = [{"group": 1, "out_lens": [3, 4], "prompt_len": 9}, {"group": 1, "out_lens": [5]}]
    with pytest.raises(ValueError, match="row 2: prompt_len is missing; it must be a whole number"):
        read_rollouts(str(write_lines(tmp_path / "b.jsonl", turns)))
    turns[1]["prompt_len"] = 9
    found = read_rollouts(str(write_lines(tmp_path / "b.jsonl", turns)))
    assert found.groups == [[7, 5]] and found.prompt_tokens == [9]


def test_lengths_of_no_prompt_are_drawn_independently(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [{"completion_tokens": n} for n in (7, 8, 9)])
    assert streamrl("import", tmp_path / "rollouts.jsonl", "-o", tmp_path / "out").returncode == 0
    lengths = {n for draw in imported(tmp_path / "out").draw(0, 50) for n in draw.lengths}
    assert lengths == {7, 8, 9}


def test_a_table_of_rollouts_with_scores_is_none_of_steps(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("score,output_tokens\n1,10\n0,20\n")
    done = streamrl("import", tmp_path / "scores.csv", "-o", tmp_path / "out", "--json")
    assert json.loads(done.stdout)["format"] == "rollouts"
    (tmp_path / "steps.csv").write_text("step,score,output_tokens\n1,2.5,10\n")
    done = streamrl("import", tmp_path / "steps.csv", "-o", tmp_path / "out", "--json")
    assert json.loads(done.stdout)["format"] == "csv"


def test_parquet_is_read_as_lines_are(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rollouts.parquet")
    of_lines = read_rollouts(str(write_lines(tmp_path / "rollouts.jsonl", ROWS)))
    assert read_rollouts(str(tmp_path / "rollouts.parquet")) == of_lines


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_log_of_each_framework_becomes_a_workload_of_its_mean_and_its_steps(
    name: str, tmp_path: Path
) -> None:
    file, text, steps = MADE[name]
    (tmp_path / file).write_text(text)
    done = streamrl("import", tmp_path / file, "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    both = [step.output_tokens or step.tokens_per_rollout for step in steps]
    means = [mean for mean in both if mean is not None]
    wanted = sum(means) / len(means)
    most = {"rollout.max_tokens": round(max(s.longest_output or 10**5 for s in steps))}
    draws = imported(tmp_path / "out", most).draw(0, 4000)
    lengths = [length for draw in draws for length in draw.lengths]
    assert sum(lengths) / len(lengths) == pytest.approx(wanted, rel=0.03)
    assert read_measured_file(tmp_path / "out" / "steps.csv").steps == tuple(steps)
    assert "shape is assumed" in (tmp_path / "out" / "workload.toml").read_text()


def test_a_recorded_run_replays_itself(tmp_path: Path) -> None:
    write_run(small_run(), tmp_path / "run.toml")
    assert streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "made").returncode == 0
    done = streamrl("import", tmp_path / "made", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    again = imported(tmp_path / "out").draw(0, 6)
    assert [d.lengths for d in again] == [
        d.lengths for d in SimulatedWorkload(small_run()).draw(0, 6)
    ]
    assert read_measured_file(tmp_path / "out" / "steps.csv").steps[2].rollouts == 4


Files = Callable[[Path], tuple[str, ...]]


@pytest.mark.parametrize(
    ("rows", "arguments", "said"),
    [
        ([{"text": "x"}], (), "its format is unknown"),
        (
            [{"text": "x"}],
            ("--format", "rollouts"),
            "no column has the tokens of a rollout; the columns are text",
        ),
        (
            [{"response_length": "x"}],
            (),
            "row 1: response_length must be a whole number of tokens, at least 1, got 'x'",
        ),
        ([{"response_length": 2.5}], (), "must be a whole number of tokens, at least 1, got 2.5"),
        (ROWS, ("--field", "output_tokens=no"), "has no such column; it has prompt, answer"),
        (
            ROWS,
            ("--field", "length=no"),
            "--field must be NAME=COLUMN with a name of output_tokens",
        ),
        (ROWS, ("--format", "verl"), "has no seconds of a step under verl's names"),
        ([{"step": 1, "data": {"timing_s/step": 2.0}}], (), "has no lengths of rollouts"),
        (
            [{"step": 1, "data": {"timing_s/step": 2.0}}],
            (),
            "and a workload needs them: response_length/mean is missing",
        ),
        (
            [{"prompt": "1+1=", "response": "2"}],
            (),
            "no column has the tokens of a rollout; the columns are prompt, response. Name one with --field",
        ),
        (
            [{"prompt": "1+1=", "response_length": None}, {"prompt": "2", "response_length": 3}],
            (),
            "row 1: response_length is missing; it must be a whole number of tokens",
        ),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_line_and_nothing_is_written(
    rows: list[dict[str, Any]], arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", rows)
    done = streamrl("import", path, "-o", tmp_path / "out", *arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_steps_without_lengths_name_the_column_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,step_time\n1,2.5\n")
    done = streamrl("import", tmp_path / "steps.csv", "-o", tmp_path / "out")
    assert done.returncode == 2 and "the column output_tokens is missing" in done.stderr


def test_a_column_of_another_name_is_read_where_it_is_said(tmp_path: Path) -> None:
    rows = [{"usage": {"made": 5}, "p": 1}, {"usage": {"made": 6}, "p": 1}]
    path = write_lines(tmp_path / "in.jsonl", rows)
    named = ("--field", "output_tokens=usage.made", "--field", "prompt_id=p")
    done = streamrl(
        "import", path, "-o", tmp_path / "out", "--format", "rollouts", *named, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["group_size"] == 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"uid": "a", "response_length": 1}, {"uid": None, "response_length": 2}],
            "row 2: uid is missing; fill it in, or choose the prompt's id with --field prompt_id=COLUMN",
        ),
        (
            [{"uid": "a", "response_length": 1}, {"response_length": 2}],
            "row 2: uid is missing",
        ),
        (
            [{"group": "math", "prompt": text, "response_length": 1} for text in ("p", "p", "q")],
            "rows 1 and 3 have the same group ('math'), but prompt is 'p', then 'q'; choose the prompt's id",
        ),
        (
            [{"group_index": 0, "prompt_length": n, "response_length": 1} for n in (100, 200)],
            "rows 1 and 2 have the same group_index (0), but prompt_length is 100, then 200; choose",
        ),
    ],
)
def test_rows_of_different_prompts_do_not_become_one(
    rows: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_rollouts(str(write_lines(tmp_path / "in.jsonl", rows)))


def test_an_id_that_the_user_names_may_have_several_texts(tmp_path: Path) -> None:
    rows = [{"group": "a", "prompt": text, "response_length": 5} for text in ("p", "q")]
    path = str(write_lines(tmp_path / "in.jsonl", rows))
    assert read_rollouts(path, {"prompt_id": "group"}).groups == [[5, 5]]
    assert read_rollouts(path, {"prompt_id": "prompt"}).groups == [[5], [5]]


def test_an_empty_column_of_a_table_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("uid,problem_id,response_length\n,1,5\n,2,6\n")
    assert read_rollouts(str(tmp_path / "in.csv")).groups == [[5], [6]]


def test_a_line_below_the_header_is_no_comment(tmp_path: Path) -> None:
    texts = [f"Do it\n# Part {part}\nnow" for part in "AB"]
    rows = "".join(f'"{text}",{length}\n' for text, length in zip(texts, (5, 6), strict=True))
    (tmp_path / "in.csv").write_text(f"# Rollouts\n# of a run\nprompt,output_tokens\n{rows}#1,7\n")
    found = read_rollouts(str(tmp_path / "in.csv"))
    assert found.groups == [[5], [6], [7]]
    assert [record["prompt"] for record in found.records] == [*texts, "#1"]


def test_a_field_that_is_set_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="--field output_tokens is set twice: a, then b"):
        parse_fields(["output_tokens=a", "output_tokens=b"])


def test_no_name_of_a_column_says_two_things() -> None:
    known = load_columns()
    names = [*known.output_tokens, *known.turns, *known.prompt_id, *known.prompt_tokens]
    assert len(names) == len(set(names))


# Traces and benchmarks of serving -----------------------------------------------------------------

BENCHMARK = {
    "completed": 4,
    "total_output_tokens": 2600,
    "input_lens": [1000, 1000, 1000, 1100],
    "output_lens": [500, 600, 700, 800],
}


def rows_of(directory: Path, *arguments: str) -> tuple[list[int], list[int], dict[str, Any]]:
    """Import `in.*`; return the output tokens and prompt tokens that are drawn, and what was printed."""
    (path,) = directory.glob("in.*")
    done = streamrl("import", path, "-o", directory / "out", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    draws = imported(directory / "out", {"rollout.max_tokens": 10_000}).draw(0, 2000)
    lengths = [length for draw in draws for length in draw.lengths]
    return lengths, [draw.drawn.prompt_tokens for draw in draws], json.loads(done.stdout)


@pytest.mark.parametrize("name", ["in.json", "in.jsonl"])
def test_requests_of_a_benchmark_are_rollouts_of_their_own_prompts(
    name: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / name, [BENCHMARK])
    lengths, prompts, told = rows_of(tmp_path)
    assert (told["rollouts"], told["mean_output_tokens"], told["notes"]) == (4, 650.0, [])
    assert set(lengths) == {500, 600, 700, 800} and set(prompts) == {1000, 1100}
    assert sum(prompt == 1100 for prompt in prompts) == pytest.approx(500, abs=60)


def test_failed_requests_of_a_benchmark_are_left_out_and_counted(tmp_path: Path) -> None:
    failed = {**BENCHMARK, "output_lens": [500, 600, 0, 800], "errors": ["", "", "timeout", ""]}
    write_lines(tmp_path / "in.jsonl", [BENCHMARK, failed])
    _, _, told = rows_of(tmp_path)
    assert told["rollouts"] == 7 and told["notes"] == ["1 failed requests are left out"]


COLUMNS = [
    ("input_len", "output_len"),
    ("input_length", "output_length"),
    ("ContextTokens", "GeneratedTokens"),
    ("Request tokens", "Response tokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize(("prompt", "output"), COLUMNS)
def test_prompt_lengths_of_a_trace_are_kept(
    prompt: str, output: str, ending: str, tmp_path: Path
) -> None:
    rows = [{prompt: 6755, output: 500}, {prompt: 6000, output: 700}]
    if ending == "csv":
        (tmp_path / "in.csv").write_text(f"{prompt},{output}\n6755,500\n6000,700\n")
    else:
        write_lines(tmp_path / "in.jsonl", rows)
    lengths, prompts, _ = rows_of(tmp_path)
    assert set(lengths) == {500, 700} and set(prompts) == {6755, 6000}


def test_prompt_lengths_count_even_if_the_first_row_lacks_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"output_len": 5}, {"output_len": 6, "input_len": 9}])
    done = streamrl("import", tmp_path / "in.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 2 and "row 1: input_len is missing" in done.stderr


def test_unknown_prompt_lengths_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"output_len": 5, "n_context": 9}])
    _, prompts, told = rows_of(tmp_path)
    assert set(prompts) == {400} and "400 are assumed" in told["notes"][0]
    _, prompts, told = rows_of(tmp_path, "--field", "prompt_tokens=n_context")
    assert set(prompts) == {9} and not told["notes"]


def test_shared_beginnings_of_prompts_are_told(tmp_path: Path) -> None:
    rows = [{"input_length": 9, "output_length": 5, "hash_ids": [1, 2]} for _ in range(4)]
    write_lines(tmp_path / "in.jsonl", rows)
    assert "hash_ids: 75% of the prompts' blocks repeat" in rows_of(tmp_path)[2]["notes"][0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"completed": 4, "total_output_tokens": 2600}, "run it with --save-detailed (vLLM)"),
        ({**BENCHMARK, "input_lens": [1]}, "output_lens has 4 requests, but input_lens has 1"),
        (
            {**BENCHMARK, "output_lens": [1, 2, 3, 0]},
            "must be a whole number of tokens, at least 1",
        ),
        ({"output_len": 0}, "at least 1, got 0; correct the row or remove it"),
        ({"output_len": "\uff15"}, "at least 1, got '\uff15'"),
        (
            {"output_len": 5, "input_len": 0},
            "input_len must be a whole number of tokens, at least 1",
        ),
        ({"num_tokens": 9, "response_length": 5}, "choose one with --field output_tokens=COLUMN"),
    ],
)
def test_lengths_that_cannot_be_right_are_refused(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "in.jsonl", [row])
    done = streamrl("import", tmp_path / "in.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_column_that_appears_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table([[5], [6]], names=["output_len", "output_len"])
    parquet.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_text("output_len,output_len\n5,6\n")
    for path in (tmp_path / "in.parquet", tmp_path / "in.csv"):
        done = streamrl("import", path, "-o", tmp_path / "out", "--format", "rollouts")
        assert done.returncode == 2 and "the column 'output_len' appears twice" in done.stderr


@pytest.mark.parametrize("name", ["steps.csv", "lengths.csv"])
def test_an_import_does_not_replace_its_input(name: str, tmp_path: Path) -> None:
    text = {
        "steps.csv": "step,step_time,output_tokens\n1,9,100\n",
        "lengths.csv": "prompt_id,output_tokens\n1,10\n",
    }
    (tmp_path / name).write_text(text[name])
    done = streamrl("import", tmp_path / name, "-o", tmp_path)
    assert done.returncode == 2 and f"{name} is the input; name another" in done.stderr
    assert (tmp_path / name).read_text() == text[name]

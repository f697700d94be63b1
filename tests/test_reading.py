"""Files made to fill memory or time are refused in one line, and a pipe is read once."""

from __future__ import annotations

import gzip
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main as command
from streamrl.cli.shared import holds_run
from streamrl.engine.trace import read_trace
from streamrl.logs.framework_logs import read_measured_file
from streamrl.runfile import reading
from streamrl.runfile.files import load_run
from streamrl.runfile.keys import read_value
from streamrl.runfile.reading import MOST_VALUES, UnreadableError, parse_json, read_bytes
from streamrl.runfile.workload_config import SourceConfig
from streamrl.workload.data_files import read_csv, read_rows
from tests.command_line import streamrl

ROOT = Path(__file__).parent.parent
MANY = 50_000
BOMBS = {
    "a key of many parts": ".".join(["a"] * MANY) + " = 1",
    "a quoted key of many parts": " . ".join(['"a"'] * MANY) + " = 1",
    "a header of many parts": f"[{'.'.join(['a'] * MANY)}]",
    "deep tables": f"x = {'{a=' * MANY}1{'}' * MANY}",
    "deep lists": f"x = {'[' * MANY}{']' * MANY}",
    "a long word": f"{'a' * 2**21} =",
    "many keys": "".join(f"k{number} = 1\n" for number in range(30_000)),
    "more than the limit": "#" * (reading.MOST_TEXT + 1),
    "null characters": "\0" * 1000,
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_run_file_that_would_take_minutes_is_refused(
    tmp_path: Path, bomb: str, packed: bool
) -> None:
    path, data = tmp_path / "run.toml", BOMBS[bomb].encode()
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    began_at = time.monotonic()
    with pytest.raises(ValueError) as found:
        load_run(path)
    assert time.monotonic() - began_at < 10
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


def test_a_value_on_the_command_line_is_as_deep_as_one_in_a_file() -> None:
    text = ".".join(["a"] * MANY) + " = 1"
    assert read_value(f"1\n{text}") == f"1\n{text}"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["lengths.csv", "prompts.jsonl", "train.log"])
def test_data_of_more_than_the_limit_is_refused(
    tmp_path: Path, name: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.read_bytes, "__defaults__", (1000,))
    monkeypatch.setattr(reading.read_text, "__defaults__", (1000,))
    monkeypatch.setattr("streamrl.logs.framework_logs.MOST_LOG", 1000)
    path = tmp_path / f"{name}{suffix}"
    data = b'{"prompt": "a"}\n' * 100
    path.write_bytes(gzip.compress(data) if suffix else data)

    def read() -> Any:
        if name.endswith(".csv"):
            return read_csv(path)
        if name.endswith(".log"):
            return read_measured_file(path)
        return read_rows(SourceConfig(prompts=str(path)), "workload.prompts")

    with pytest.raises(ValueError, match="more than 0 MiB"):
        read()


def test_a_sparse_or_endless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    sparse = tmp_path / "run.toml"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    for path in (sparse, Path("/dev/zero")):
        with pytest.raises(ValueError, match="cannot be read: more than 4 MiB"):
            load_run(path)
        with pytest.raises(ValueError, match=r"not a trace header|must be a file"):
            read_trace(path)


def test_json_of_many_small_values_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(ValueError, match="more than 10,000,000 values"):
        parse_json(f"[{'[],' * (MOST_VALUES // 2 + 1)}[]]")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * MANY + "]" * MANY)


def test_a_table_of_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.workload.data_files.MOST_ROWS", 3)
    path = tmp_path / "lengths.csv"
    path.write_text("a\n1\n2\n3\n")
    assert len(read_csv(path)) == 3
    path.write_text("a\n1\n2\n3\n4\n")
    with pytest.raises(ValueError, match="more than 3 rows"):
        read_csv(path)


def test_a_pipe_is_read_once_for_all_its_readers(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a,b\n1,2\n")
    os.close(writer)
    path = Path(f"/dev/fd/{reader}")
    assert not holds_run(path)
    assert read_csv(path) == read_csv(path) == [{"a": "1", "b": "2"}]
    os.close(reader)


def test_a_pipe_that_nobody_writes_to_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    began_at = time.monotonic()
    for read in (read_bytes, load_run, read_csv, read_trace):
        with pytest.raises(ValueError):
            read(path)
    assert time.monotonic() - began_at < 5
    with pytest.raises(UnreadableError, match="no data came from this pipe"):
        read_bytes(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.parametrize("name", ["run.json", "results.json"])
def test_a_recorded_file_that_has_no_end_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    made = streamrl(
        "simulate",
        ROOT / "examples" / "h20-h800.toml",
        "--set",
        "simulate.max_steps=1",
        "-o",
        tmp_path / "o",
    )
    assert made.returncode == 0, made.stderr
    path = tmp_path / "o" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    done = streamrl("report", tmp_path / "o")
    assert done.returncode == 2 and "no regular file" in done.stderr


DEEP = "[" * 3000 + "]" * 3000
NESTED = {
    "run.toml": (f"x = {DEEP}\n", "simulate {}"),
    "steps.json": (DEEP, "import {} -o {}.out"),
    "steps.jsonl": (f'{{"step": 1, "x": {DEEP}}}\n' * 2, "import {} -o {}.out"),
    "train.log": (f"{{'step_time': {DEEP}}}\n", "calibrate examples/plan-7b.toml {}"),
    "rollouts.jsonl": (f'{{"prompt": {DEEP}, "response_length": 3}}\n', "import {} -o {}.out"),
    "agent.json": (
        f'[{{"role": "user", "content": "u"}}, {{"role": "assistant", "content": {DEEP}}}]',
        "import {} -o {}.out",
    ),
    "trace.jsonl": (f'{{"format": 1, "x": {DEEP}}}\n', "replay {}"),
    "config.json": (f'{{"model_type": "qwen2", "x": {DEEP}}}', "model show {directory}"),
    "run.json": (f'{{"x": {DEEP}}}', "checkpoint list {directory}"),
    "study.json": (DEEP, "report {directory}"),
    "results.json": (DEEP, "report {directory}"),
    "plan.json": (DEEP, "diff {directory} {directory}"),
}
"""By file: its text, and a command that reads it."""


@pytest.mark.parametrize("name", NESTED)
def test_values_nested_too_deeply_are_one_line_that_names_their_file(
    tmp_path: Path, name: str
) -> None:
    text, words = NESTED[name]
    (tmp_path / name).write_text(text)
    if name == "results.json":
        (tmp_path / "trace.jsonl").write_text("{}\n")
    done = streamrl(*words.replace("{}", str(tmp_path / name)).format(directory=tmp_path).split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert str(tmp_path) in done.stderr, done.stderr


def test_a_name_that_is_too_long_is_wrong_input() -> None:
    done = streamrl("lengths", "x" * 5000)
    assert done.returncode == 2 and "File name too long" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_circle_of_links_is_no_run_file(tmp_path: Path) -> None:
    path = tmp_path / "loop.toml"
    path.symlink_to("loop.toml")
    with pytest.raises(ValueError, match="cannot be read: Too many levels"):
        load_run(path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "the memory of this machine does not suffice"),
        (RecursionError("deep"), "the input is nested too deeply"),
        (UnreadableError(27, "too large", "a.csv"), "a.csv: too large"),
    ],
)
def test_what_a_command_cannot_hold_is_one_line_and_status_2(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["streamrl.cli.main"], "app", fail)
    with pytest.raises(SystemExit) as found:
        command()
    assert found.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


OWN = {
    "streamrl/runfile/reading.py",
    "streamrl/runfile/examples.py",
    *(f"sim/fidelity/{name}.py" for name in ("constants", "rl_steps", "ratios")),
    "sim/acceptance/scaled_profiles.py",
}
"""Files that parse TOML: this one, and those that read what the package ships."""


def test_one_module_alone_reads_what_users_give() -> None:
    found = set()
    for package in ("streamrl", "sim", "executor"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if re.search(
                r"tomllib\.load|^import (gzip|zlib|bz2|lzma)\b.*open|json\.load\w*\(\s*[\w/() ]*\.read_",
                text,
                re.M,
            ):
                found.add(str(path.relative_to(ROOT)))
    assert {
        each.replace("streamrl/sim/", "sim/").replace("streamrl/executor/", "executor/")
        for each in found
    } <= OWN

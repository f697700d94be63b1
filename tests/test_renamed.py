"""Keys and values with another name than they had: refused in run files with the new one, replaced in old records."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.doctor.reading import read_leniently
from streamrl.runfile.config import Run
from streamrl.runfile.reading import decode_run, encode_run, make_run
from streamrl.runfile.renamed import RENAMED, upgrade_run
from streamrl.runfile.table_errors import find_errors
from tests.command_line import streamrl
from tests.runs import make_table, small_run

OLD = Path(__file__).parent / "data" / "format-1"
RECORDS = (
    "lossy/trace.jsonl",
    "siblings/trace.jsonl",
    "real/run/trace.1.jsonl",
    "real/run/run.json",
)


def recorded_run(name: str) -> dict[str, Any]:
    """Return the run of an old trace's header, or of an old run.json."""
    first = json.loads((OLD / name).read_text().splitlines()[0])
    run: dict[str, Any] = first["run"] if name.endswith(".jsonl") else first
    return run


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        (
            "workload.verifier",
            "math-verify",
            "workload.verifier was renamed to verifier.scorer, got 'math-verify'",
        ),
        (
            "algorithm.correction",
            "token_tis",
            "algorithm.correction 'token_tis' was renamed to 'token-tis'",
        ),
        (
            "algorithm.correction",
            "seq_tis",
            "algorithm.correction 'seq_tis' was renamed to 'seq-tis'",
        ),
    ],
)
def test_an_old_name_is_refused_in_one_line_with_the_new_one(
    key: str, value: str, line: str
) -> None:
    (error,) = find_errors(make_table({key: value}))
    assert str(error) == line and (error.key, error.value) == (key, value)


def test_every_new_name_is_one_that_a_run_file_takes() -> None:
    for old in RENAMED:
        key, value = (old.now, "exact") if old.value is None else (old.key, old.now)
        assert list(find_errors(make_table({key: value}))) == []


def test_the_command_line_refuses_an_old_key_as_wrong_input() -> None:
    example = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
    done = streamrl("simulate", example, "--set", "workload.verifier=exact")
    assert done.returncode == 2
    assert done.stderr == (
        "streamrl: workload.verifier was renamed to verifier.scorer, got 'exact'\n"
    )


@pytest.mark.parametrize("directory", ["lossy", "siblings", "real"])
def test_doctor_turns_an_old_run_file_into_one_of_today_that_says_the_same(directory: str) -> None:
    base = OLD / directory
    table = tomllib.loads((base / "run.toml").read_text())
    reading = read_leniently(copy.deepcopy(table), base)
    assert reading.findings and reading.run is not None
    if "verifier" in table["workload"]:
        table.setdefault("verifier", {})["scorer"] = table["workload"].pop("verifier")
    if "correction" in table["algorithm"]:
        table["algorithm"]["correction"] = "seq-tis"
    assert reading.run == make_run(table, base)


@pytest.mark.parametrize("record", RECORDS)
def test_old_records_are_read_once_they_are_upgraded_and_not_before(record: str) -> None:
    old = recorded_run(record)
    before = copy.deepcopy(old)
    with pytest.raises(msgspec.MsgspecError):
        decode_run(json.dumps(old).encode())
    run = decode_run(json.dumps(upgrade_run(old)).encode())
    assert old == before
    assert run.verifier.scorer == old["workload"]["verifier"]
    assert run.algorithm.correction == old["algorithm"]["correction"].replace("_", "-")
    assert run.cluster.pools and run.algorithm.steps == old["algorithm"]["steps"]


def test_upgrading_what_is_of_today_changes_nothing() -> None:
    run = small_run({"verifier.scorer": "exact", "algorithm.correction": "seq-tis"})
    table = json.loads(encode_run(run))
    assert upgrade_run(table) == table
    again: Run = decode_run(json.dumps(upgrade_run(table)).encode())
    assert again == run

"""Results are written whole and together, carry one run id, and a mixture of two commands is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from streamrl.cli.lazy_commands import UNTIL_END
from streamrl.cli.main import app
from streamrl.cli.shared import (
    ANY,
    CALIBRATION,
    HTML,
    MARKDOWN,
    PICTURE,
    PROFILE,
    RANKER,
    SCORED,
    FileKind,
    claim_file,
    sole_writer,
)
from streamrl.hardware.calibration_file import Calibration, write_calibration
from streamrl.hardware.measured_profile import write_measured
from streamrl.record.run_directory import read_metrics
from streamrl.runfile.files import encode_run, load_run, write_run
from streamrl.runfile.result_files import (
    RESULTS,
    check_results,
    listed_run_id,
    locked,
    partial_of,
    replacing,
    write_file,
    write_results,
)
from streamrl.sim.steady_state import simulate_steady
from tests.command_line import SEMAPHORE, full_disk, streamrl
from tests.measured_profile import make_profile, model_directory
from tests.runs import small_run

FILES = {"a.bin": b"a" * 10, "b.bin": b"b" * 2000, "in/c.bin": b"c" * 3000}


def contents(directory: Path) -> dict[str, bytes]:
    """Return the data of all files in a directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


# The module ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 100, 2500])
def test_a_disk_that_is_full_at_any_file_leaves_all_older_results(
    tmp_path: Path, size: int
) -> None:
    write_results(tmp_path, dict.fromkeys(FILES, b"older"))
    before = contents(tmp_path)
    with full_disk(size), pytest.raises(OSError, match=r"too large|No space") as error:
        write_results(tmp_path, FILES)
    assert Path(str(error.value.filename)).name in {RESULTS, "b.bin", "c.bin"}
    assert contents(tmp_path) == before
    check_results(tmp_path / "a.bin")


def test_a_file_of_another_command_is_named(tmp_path: Path) -> None:
    write_results(tmp_path, FILES)
    (tmp_path / "b.bin").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"mixes the results of two commands: b\.bin is not of"):
        check_results(tmp_path / "a.bin")
    (tmp_path / "b.bin").unlink()  # what is gone is no mixture
    check_results(tmp_path / "a.bin")


def test_two_commands_may_share_a_directory_and_the_files_of_both(tmp_path: Path) -> None:
    write_results(tmp_path, {"plan.json": b"1", "inputs/x": b"1"})
    write_results(tmp_path, {"trace.jsonl": b"2", "inputs/x": b"2"})
    for name in ("plan.json", "trace.jsonl"):
        check_results(tmp_path / name)
    assert listed_run_id(tmp_path / "plan.json") != listed_run_id(tmp_path / "trace.jsonl")


def test_a_run_id_that_a_file_carries_is_compared(tmp_path: Path) -> None:
    write_results(tmp_path, {"run.json": b"{}", "trace.jsonl": None}, run_id="one")
    write_results(tmp_path, {"timeline.png": b"p"}, run_id="one")
    (tmp_path / "trace.jsonl").write_bytes(b"grows")
    check_results(tmp_path / "trace.jsonl", "one")
    with pytest.raises(ValueError, match=r"trace\.jsonl is not of run one"):
        check_results(tmp_path / "trace.jsonl", "two")


def test_a_list_of_results_that_is_damaged_is_refused_and_replaced(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("[{]")
    with pytest.raises(ValueError, match=r"results\.json: not a list of results"):
        check_results(tmp_path / "a.bin")
    write_results(tmp_path, FILES)
    check_results(tmp_path / "a.bin")


def test_the_target_of_a_link_is_replaced_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    with replacing(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
    with pytest.raises(OSError, match="No space") as error:
        write_file(Path("/dev/full"), "x")
    assert error.value.filename == "/dev/full"


# Commands -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run file and data for commands."""
    path = tmp_path_factory.mktemp("offer")
    write_run(small_run({"simulate.max_steps": 4}), path / "run.toml")
    (path / "rollouts.csv").write_text("prompt_id,output_tokens\n1,10\n2,20\n")
    (path / "steps.csv").write_text("step,sync\n1,9\n")
    (path / "run.json").write_bytes(encode_run(load_run(path / "run.toml")))
    return path


COMMANDS = [
    ("simulate {0}/run.toml -o {1}", ["timeline.png", "chrome_trace.json"]),
    ("simulate {0}/run.toml --sweep rollout.replicas=2 -o {1}", ["study.csv", "study.json"]),
    ("simulate {0}/run.toml --against {0}/run.toml -o {1}", ["against.json"]),
    ("import {0}/rollouts.csv -o {1}", ["lengths.csv", "workload.toml"]),
    ("export {0}/run.toml --framework verl --force -o {1}/verl.sh", ["verl.sh"]),
    ("profile show qwen2.5-7b -o {1}/curve.png", ["curve.png"]),
    ("examples copy quickstart -o {1}", []),
]


@pytest.mark.parametrize(("command", "names"), COMMANDS, ids=lambda value: str(value)[:30])
def test_a_full_disk_leaves_the_older_results_of_a_command(
    offer: Path, tmp_path: Path, command: str, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x89PNG older")
    before = contents(tmp_path)
    with full_disk(SEMAPHORE):
        done = streamrl(*command.format(offer, tmp_path).split())
    assert done.returncode == 1, done
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"streamrl: {tmp_path}/") and "too large" in said, done.stderr
    after = contents(tmp_path)
    after.pop("finished.jsonl", None)  # a study continues after its finished simulations
    assert after == before


@pytest.fixture(scope="module")
def two(offer: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two simulations of different seeds."""
    found = []
    for seed in ("1", "2"):
        path = tmp_path_factory.mktemp("run")
        done = streamrl("simulate", offer / "run.toml", "--set", f"seed={seed}", "-o", path)
        assert done.returncode == 0, done.stderr
        found.append(path)
    return found


def test_readers_refuse_the_files_of_two_runs_and_name_them(
    offer: Path, two: list[Path], tmp_path: Path
) -> None:
    one, other = two
    assert streamrl("replay", one, other).returncode == 0
    for name in ("trace.jsonl", "timeline.png", "chrome_trace.json"):
        mixed = shutil.copytree(one, tmp_path / name)
        shutil.copy(other / name, mixed / name)
        for command in ("report", "compare", "replay"):
            done = streamrl(command, mixed)
            assert done.returncode == 2, command
            assert f"mixes the results of two commands: {name} is not of run" in done.stderr
            assert done.stderr.count("\n") == 1
    assert streamrl("simulate", offer / "run.toml", "-o", mixed).returncode == 0  # the remedy
    assert streamrl("replay", mixed).returncode == 0


def test_lines_of_two_executed_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "run": "a"}\n{"step": 2}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1, "run": "a"}\n{"step": 2, "run": "b"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl mixes two runs: line 2 is not of run a"):
        read_metrics(tmp_path)
    path.write_text('{"step": 1, "run": "a"}\n')
    write_results(tmp_path, {"trace.jsonl": None, "metrics.jsonl": None}, run_id="b")
    with pytest.raises(ValueError, match="line 1 is not of run b"):
        read_metrics(tmp_path)


def test_a_second_command_that_writes_the_same_file_is_refused(offer: Path, tmp_path: Path) -> None:
    output = tmp_path / "verl.sh"
    words = ["export", str(offer / "run.toml"), "--framework", "verl", "-o", str(output)]
    with UNTIL_END:
        claim_file(output, ANY)
        command = [sys.executable, "-c", "from streamrl.cli import main; main()", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and not output.exists()
        assert f"streamrl: {output} is in use by process " in done.stderr
        assert streamrl(*words[:-1], str(tmp_path / "other.sh")).returncode == 0
    assert not [path for path in tmp_path.iterdir() if path.name != "other.sh"]
    assert streamrl(*words).returncode == 0


WRITERS = [
    ("simulate {0}/run.toml -o {1}", False),
    ("plan {0}/run.toml -o {1}", False),
    ("import {0}/rollouts.csv -o {1}", False),
    ("validate serving -o {1}", False),
    ("examples copy quickstart -o {1}", False),
    ("evaluate {0} --prompts {0}/rollouts.csv --scorer exact -o {1}", False),
    ("ranker fit {0}/rollouts.csv -o {1}", True),
    ("ranker score {0}/rollouts.csv --ranker {0}/ranker.npz -o {1}", True),
    ("export {0}/run.toml --framework verl -o {1}", True),
    ("profile show qwen2.5-7b -o {1}", True),
    ("profile {0} -o {1}", True),
    ("calibrate {0}/run.toml {0}/steps.csv -o {1}", True),
    ("report {0} -o {1}", True),
    ("init {1}", True),
]
"""Commands with an output, and whether it is a file."""
FURTHER_WRITERS = [
    ("report {0} --markdown {1}", True),
    ("profile measure {0} -o {1}", True),
    ("profile accept {0}/run.toml -o {1}", False),
    ("checkpoint export {0} -o {1}", False),
]
"""Those whose locks are not tested."""
OTHER = "[mine]\nkept = 1\n"
"""A file of somebody else."""


@pytest.mark.parametrize(("command", "is_file"), WRITERS)
def test_each_command_refuses_an_output_that_another_one_writes(
    offer: Path, tmp_path: Path, command: str, is_file: bool
) -> None:
    output = tmp_path / "output.png"
    with ExitStack() as held:
        if is_file:
            held.enter_context(locked(partial_of(output), os.O_RDWR | os.O_CREAT))
        else:
            held.enter_context(sole_writer(output))
        done = streamrl(*command.format(offer, output).split())
        assert done.returncode == 2, done.stderr
        assert f"streamrl: {output} is in use by process " in done.stderr
        assert output.is_dir() is not is_file and not [*output.glob("*")]


@pytest.mark.parametrize("command", [command for command, _ in (*WRITERS, *FURTHER_WRITERS)])
def test_each_command_refuses_an_output_of_another_kind(
    offer: Path, tmp_path: Path, command: str
) -> None:
    output = tmp_path / "output.png"
    output.write_text(OTHER)
    done = streamrl(*command.format(offer, output).split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert re.search(rf"{output}\b.*(name another|--force)", done.stderr), done.stderr
    assert contents(tmp_path) == {output.name: OTHER.encode()}


def test_the_commands_with_an_output_are_all_tested() -> None:
    tested = {command.split(" {")[0] for command, _ in (*WRITERS, *FURTHER_WRITERS)}
    commands: Any = get_command(app)
    for name in outputs_of("", commands):
        assert any(each.startswith(name) for each in tested), name


def outputs_of(name: str, command: Any) -> Iterator[str]:
    """Yield the names of a command and of those in it that have an option for an output."""
    loaded = command.load() if hasattr(command, "load") else command
    if any("--output" in each.opts for each in loaded.params):
        yield name
    for inner, within in getattr(loaded, "commands", {}).items():
        yield from outputs_of(f"{name} {inner}".strip(), within)


def test_a_command_replaces_what_it_wrote_before(offer: Path, tmp_path: Path) -> None:
    run, page, text = tmp_path / "run", tmp_path / "report.html", tmp_path / "report.md"
    assert streamrl("simulate", offer / "run.toml", "-o", run).returncode == 0
    commands = [
        ("report", run, "-o", page, "--markdown", text),
        ("profile", "show", "qwen2.5-7b", "-o", tmp_path / "curve.png"),
        ("profile", "show", "qwen2.5-7b", "-o", tmp_path / "curve.svg"),
    ]
    for command in [*commands, *commands]:
        done = streamrl(*command)
        assert done.returncode == 0, done.stderr


def test_each_kind_of_file_is_told_from_the_others(tmp_path: Path) -> None:
    path, profile = tmp_path / "file", tmp_path / "profile.toml"
    write_measured(make_profile(model_directory(tmp_path / "model")), profile)
    calibration = Calibration(
        source="a [log]", date=date(2026, 1, 2), model="m", system="s", fitted_steps=(1, 2)
    )
    own: dict[FileKind | None, bytes] = {
        HTML: b"\n<!DOCTYPE html>\n<html>",
        MARKDOWN: b"# A plan\n\nof a run\n\n## Words\n\n- **step**: one",
        PICTURE: b"\x89PNG\r\n",
        CALIBRATION: write_calibration(calibration).encode(),
        PROFILE: profile.read_bytes(),
        RANKER: b"PK\x03\x04",
        SCORED: b'{"prompt": "a", "expected_tokens": 7}\n',
        None: b'[policies]\nsystem = "stream-sync"\n',
    }
    for kind in filter(None, own):
        for other, data in own.items():
            path.write_bytes(data)
            assert kind.is_of(path) is (kind is other), (kind, other)


def test_the_bytes_of_a_trace_do_not_depend_on_how_paths_are_written(
    offer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("output_tokens\n5\n7\n100\n")
    changes = {"workload.lengths.kind": "empirical", "workload.lengths.source": str(lengths)}
    write_run(small_run({"simulate.max_steps": 3, **changes}), tmp_path / "run.toml")
    monkeypatch.chdir(tmp_path)
    spelled = [Path("run.toml"), tmp_path / "run.toml", Path("..", tmp_path.name, "run.toml")]
    traces = {simulate_steady(load_run(path)).encode() for path in spelled}
    assert len(traces) == 1


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "notes", tmp_path / "results.json"
    other.write_text("keep")
    partial_of(path).symlink_to(other)
    write_file(path, "{}")
    assert path.read_text() == "{}" and not path.is_symlink() and other.read_text() == "keep"

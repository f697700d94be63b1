"""`streamrl examples`: what it lists, and what it copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.runfile.examples import describe_example, example_names
from streamrl.runfile.files import load_run
from tests.command_line import streamrl


def test_every_run_file_is_listed_with_a_sentence() -> None:
    listed = json.loads(streamrl("examples", "list", "--json").stdout)
    stored = Path(__file__).parents[1] / "examples"
    files = [*stored.glob("*.toml"), *stored.glob("layouts/*.toml"), *stored.glob("studies/*.toml")]
    assert set(listed) == {str(path.relative_to(stored).with_suffix("")) for path in files}
    assert all(listed.values())
    assert describe_example("plan-7b") == "Which GPUs for Qwen2.5-7B?"


@pytest.mark.parametrize("name", [name for name in example_names() if "studies/" not in name])
def test_a_copied_run_file_loads(name: str, tmp_path: Path) -> None:
    result = streamrl("examples", "copy", name, "-o", tmp_path / "mine")
    assert result.returncode == 0, result.stderr
    copied = tmp_path / "mine" / f"{name}.toml"
    assert f"written to {copied}" in result.stdout
    assert "#:schema" not in copied.read_text()
    assert load_run(copied).algorithm.steps > 0


def test_files_that_an_example_names_are_copied_too(tmp_path: Path) -> None:
    streamrl("examples", "copy", "quickstart", "-o", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "make_quickstart.py",
        "quickstart.toml",
    ]
    streamrl("examples", "copy", "studies/bandwidth", "-o", tmp_path)
    assert (tmp_path / "studies" / "bandwidth.toml").is_file()
    assert (tmp_path / "h20-h800.toml").is_file()


def test_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "h20-h800.toml"
    mine.write_text("mine")
    result = streamrl("examples", "copy", "studies/bandwidth", "-o", tmp_path)
    assert (result.returncode, mine.read_text()) == (2, "mine")
    assert f"{mine} is already there" in result.stderr
    assert not (tmp_path / "studies").exists()


def test_two_examples_may_name_the_same_file(tmp_path: Path) -> None:
    for name in ("studies/bandwidth", "h20-h800", "h20-h800"):
        assert streamrl("examples", "copy", name, "-o", tmp_path).returncode == 0


def test_an_unknown_example_names_the_nearest(tmp_path: Path) -> None:
    result = streamrl("examples", "copy", "plan7b", "-o", tmp_path / "new")
    assert result.returncode == 2
    assert "did you mean plan-7b?" in result.stderr
    assert not (tmp_path / "new").exists()

"""What others may not read stays so in what is made of it, and links of others are not followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.executor.directory_lock import (
    LOCK,
    OWNER,
    PREFIX,
    OwnedDirectory,
    remove_abandoned,
)
from tests.command_line import streamrl

MODES = (0o600, 0o640, 0o644)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_imported_is_as_private_as_its_source(tmp_path: Path, mode: int) -> None:
    source, output = tmp_path / "rollouts.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "a", "output_tokens": 3}\n' * 4)
    source.chmod(mode)
    before = os.umask(0o022)
    try:
        done = streamrl("import", source, "-o", output)
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {mode}
    assert (
        output.stat().st_mode & 0o077 & ~(0o055 if mode & 4 else 0o050 if mode & 0o40 else 0) == 0
    )


def test_links_that_others_made_beside_shared_directories_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    kept.mkdir()
    (kept / OWNER).touch()
    parent = tmp_path / "shm"
    parent.mkdir()
    (parent / f"{PREFIX}link").symlink_to(kept)
    (parent / f"{PREFIX}loop").symlink_to(parent / f"{PREFIX}loop")
    (parent / f"{PREFIX}file").write_text("x")
    abandoned = parent / f"{PREFIX}abandoned"
    abandoned.mkdir()
    (abandoned / OWNER).touch()
    remove_abandoned(parent)
    assert (kept / OWNER).exists()
    assert {path.name.removeprefix(PREFIX) for path in parent.iterdir()} == {"link", "loop", "file"}


def test_a_run_directory_of_any_name_is_never_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    run = tmp_path / f"{PREFIX}run"
    run.mkdir()
    (run / LOCK).touch()  # its run has ended
    OwnedDirectory("verifier", tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == [run.name]

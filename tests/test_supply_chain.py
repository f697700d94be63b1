"""Each shipped table has a source and a licence in NOTICE, and each locked package has a hash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from streamrl.executor.checksums import find_damage, write_checksums
from streamrl.executor.execute import check_executable
from tests.supply_chain import (
    LOCK,
    REPOSITORIES,
    ROOT,
    licence_of,
    notice,
    profile_files,
    repositories_of,
    source_of,
)
from tests.test_execute import real_run
from tests.tiny_model import save_tiny_model


def test_notice_lists_each_file_of_profiles_with_its_source_and_licence() -> None:
    written = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert written == notice(), "write it again: python -m tests.supply_chain notice > NOTICE"
    listed = re.findall(r"^  (profiles/.+)$", written, re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in profile_files())
    assert "not checked" not in written


def test_each_file_of_profiles_has_a_licence_that_somebody_looked_up(tmp_path: Path) -> None:
    """A list of sources needs one for each repository that it names."""
    for path in profile_files():
        assert licence_of(path), path
        assert repositories_of(path) <= REPOSITORIES.keys(), path
    table = tmp_path / "new.csv"
    table.write_text("# source: somebody/something 1.0\nm,n\n")
    with pytest.raises(ValueError, match="add the licence of 'somebody/something"):
        licence_of(table)


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("# source: PyPI aiconfigurator-core 0.12.0", "Apache-2.0 (NVIDIA"),
        ("# source: huggingface/trl: a file", "Apache-2.0"),
        ("# source: one (MIT) and another (Apache-2.0)", "Apache-2.0 and MIT"),
        ("# source: esnet/iperf\n# licence: facts", "facts"),
        ("m,n", "facts; the licences of repositories"),
    ],
)
def test_a_source_and_its_licence_are_read_from_the_file(
    tmp_path: Path, head: str, licence: str
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(f"{head}\nm,n\n1,2\n")
    assert licence_of(table).startswith(licence)
    if head.startswith("#"):
        assert source_of(table) == head.splitlines()[0].removeprefix("# source: ")


def test_each_locked_package_has_hashes_and_no_registry_is_named() -> None:
    text = LOCK.read_text(encoding="utf-8")
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", each) for each in entries)
    names = {each.partition("==")[0] for each in entries}
    assert {
        "torch",
        "numpy",
        "msgspec",
        "transformers",
        "hatchling",
        "editables",
        "pytest",
    } <= names
    assert not re.search(r"https?://|--index|--extra-index|--find-links|file://", text)


def test_the_versions_of_the_lock_are_read_without_hashes(tmp_path: Path) -> None:
    """As the Makefile does for other platforms."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    script = re.search(r"sed -nE '(.+?)' requirements\.lock", makefile)
    assert script is not None
    command = ["sed", "-nE", script[1], str(LOCK)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "msgspec==0.22.0" in found and not [each for each in found if each.startswith("torch==")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", each) for each in found)


def test_weights_that_changed_on_disk_are_refused(tmp_path: Path) -> None:
    run = real_run(tmp_path)
    model = Path(str(run.model.path))
    save_tiny_model(model, "abcd")
    write_checksums(model)
    assert not find_damage(model, reads_all=True)
    weights = next(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        ValueError, match=rf"model\.path: .*{weights.name} has other bytes than were"
    ):
        check_executable(run)

"""Each shipped table has a source and a licence in NOTICE, and each locked package has a hash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from streamrl.executor.checksums import find_damage, write_checksums
from streamrl.executor.execute import check_executable
from tests.supply_chain import LOCK, PROFILES, ROOT, licence_of, notice, source_of
from tests.test_execute import real_run
from tests.tiny_model import save_tiny_model


def test_notice_lists_each_file_of_profiles_with_its_source_and_licence() -> None:
    written = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert written == notice(), "write it again: python -m tests.supply_chain notice > NOTICE"
    listed = re.findall(r"^  (profiles/.+)$", written, re.MULTILINE)
    there = [
        path for path in PROFILES.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in there)


def test_a_source_and_its_licence_are_read_from_the_file(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("# operator: gemm\n# source: PyPI aiconfigurator-core 0.12.0\nm,n\n")
    assert source_of(table) == "PyPI aiconfigurator-core 0.12.0"
    assert licence_of(source_of(table)).startswith("Apache-2.0 (NVIDIA")
    table.write_text("m,n\n1,2\n")
    assert source_of(table) == "each entry names its source"
    assert licence_of("one (MIT) and another (Apache-2.0)") == "Apache-2.0 and MIT"


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

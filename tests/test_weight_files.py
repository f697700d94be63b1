"""Weights that are missing or cut off are found by their headers, before anything loads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamrl.hardware.hugging_face import INDEX, weight_problems


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    return path


def test_whole_weights_have_no_problem(whole: Path) -> None:
    assert list(weight_problems(whole.parent)) == []


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        (0, "its 0 bytes do not begin with a safetensors header"),
        (7, "its 7 bytes do not begin with a safetensors header"),
        (40, "its 40 bytes do not begin with a safetensors header"),
        (-1, "but its header says"),
    ],
)
def test_what_is_cut_off_is_found_wherever_it_was_cut(whole: Path, kept: int, problem: str) -> None:
    whole.write_bytes(whole.read_bytes()[:kept])
    (found,) = weight_problems(whole.parent)
    assert found.startswith("has a damaged model.safetensors: ") and problem in found


@pytest.mark.parametrize("header", [b"[]", b"{]", b'{"a": {}}', b'{"a": {"data_offsets": [0]}}'])
def test_headers_that_are_none_are_no_traceback(whole: Path, header: bytes) -> None:
    whole.write_bytes(len(header).to_bytes(8, "little") + header)
    (found,) = weight_problems(whole.parent)
    assert "its header is not a safetensors header" in found


def test_files_that_an_index_names_must_be_there(whole: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "c": "model-2.safetensors"}}
    (whole.parent / INDEX).write_text(json.dumps(index))
    assert list(weight_problems(whole.parent)) == ["lacks model-2.safetensors"]


def test_a_directory_without_weights_lacks_them(tmp_path: Path) -> None:
    assert list(weight_problems(tmp_path)) == ["lacks weights (*.safetensors)"]

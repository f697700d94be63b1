"""Weights by the names that files have for them, as vLLM takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.executor.rollout.torch_model import named_as_in_files
from tests.test_passes import make_model


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_pushed_weights_are_named_and_cut_as_files_have_them(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, **({"first_k_dense_replace": 1} if kind == "deepseek_v3" else {}))
    model.save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    named = dict(named_as_in_files(str(tmp_path), model.state_dict().items()))
    if kind == "qwen2":
        assert named.keys() == model.state_dict().keys()
    else:
        assert any(".experts.0." in name for name in named)
    named = {name: tensor for name, tensor in named.items() if name in on_disk}
    assert named.keys() == on_disk.keys()
    for name, tensor in on_disk.items():
        torch.testing.assert_close(named[name], tensor, atol=0, rtol=0)

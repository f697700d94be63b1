"""The data in profiles/: every file loads, and what follows from it agrees with what is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config import LengthsConfig, ModelConfig
from streamrl.profile import PROFILES, load_gpu, load_model
from streamrl.workload import load_source


@pytest.mark.parametrize(
    ("name", "published"),
    [("qwen2.5-7b", 7.62e9), ("qwen2.5-32b", 32.8e9), ("qwen2.5-72b", 72.7e9)],
)
def test_a_model_has_the_published_number_of_parameters(name: str, published: float) -> None:
    assert load_model(ModelConfig(name=name)).num_parameters == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "kib"), [("qwen2.5-7b", 56), ("qwen2.5-32b", 256), ("qwen2.5-72b", 320)]
)
def test_a_token_of_context_keeps_keys_and_values_of_every_layer(name: str, kib: int) -> None:
    model = load_model(ModelConfig(name=name))
    assert model.kv_bytes_per_token("bfloat16") == kib * 1024
    assert model.kv_bytes_per_token("float32") == 2 * kib * 1024


def test_a_forward_pass_takes_two_flops_a_parameter_and_four_a_pair_and_channel() -> None:
    model = load_model(ModelConfig(name="qwen2.5-7b"))
    assert model.forward_flops(1, 0) == pytest.approx(2 * 7.07e9, rel=2e-3)
    assert model.forward_flops(0, 1) == 4 * 28 * 3584


def test_every_gpu_loads_with_its_source_and_plausible_figures() -> None:
    for path in sorted((PROFILES / "gpus").glob("*.toml")):
        gpu = load_gpu(path.stem)
        assert gpu.source and gpu.price_source
        assert min(gpu.memory, gpu.memory_bandwidth, gpu.nvlink, gpu.network, gpu.host_link) > 0
        assert gpu.flops["bfloat16"] > 0
        efficiencies = (
            gpu.roofline.compute_efficiency,
            gpu.roofline.training_efficiency,
            gpu.roofline.bandwidth_efficiency,
        )
        assert all(0 < efficiency <= 1 for efficiency in efficiencies)


def test_every_model_loads_with_its_source() -> None:
    for path in sorted((PROFILES / "models").glob("*.toml")):
        model = load_model(ModelConfig(name=path.stem))
        assert model.source
        assert model.num_heads % model.num_kv_heads == 0


def test_every_length_distribution_loads_and_says_where_it_is_from() -> None:
    paths = sorted((PROFILES / "lengths").glob("*.csv"))
    assert paths
    for path in paths:
        text = path.read_text()
        assert "ource" in text.split("\n", 1)[0]
        header = next(line for line in text.splitlines() if not line.startswith("#"))
        kind = "histogram" if "density" in header else "empirical"
        load_source(LengthsConfig(kind=kind, source=path.stem))


def test_a_hugging_face_directory_gives_the_same_shape_as_its_profile(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model(ModelConfig(path=str(tmp_path)))
    assert shape.num_parameters == load_model(ModelConfig(name="qwen2.5-7b")).num_parameters


def test_a_model_of_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"config.json is of type 'mamba'; known: qwen2"):
        load_model(ModelConfig(path=str(tmp_path)))

"""Config.json files of many families: parameters and KV cache of each, or the reason why one is refused.

`model_families.jsonl` has the fields of public files that change a shape. Those of MiniMax-M3, Kimi-K3, Step-3.7,
Nemotron, GLM-5.2 and Qwen3.6 are as AIConfigurator (Apache-2.0) collects them; the others were written after the
hub's. `parameters` are those of transformers' own class on the meta device (5.24.0), where it knows the type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.hardware.hugging_face import ModelDirectory, read_model_directory
from streamrl.hardware.profiles import load_gpu
from streamrl.report.model_report import layer_kinds
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from tests.test_public_models import check_seconds_of_flops

ROWS: dict[str, dict[str, Any]] = {
    row["model"]: row
    for row in map(json.loads, Path(__file__).with_name("model_families.jsonl").open())
}
PUBLISHED = {
    **{"Kimi-K3": 2.8e12, "Nemotron-Super-49B": 49.87e9, "Baichuan2-13B": 13.9e9},
    **{
        "glm-4-9b-chat": 9.4e9,
        "Ling-mini-2.0": 16.26e9,
        "Phi-3.5-MoE": 41.9e9,
        "grok-2": 270e9,
        "grok-1-hf": 314e9,
    },
    **{"Apertus-8B": 8.05e9, "Nemotron-H-8B": 8.1e9, "MiniCPM3-4B": 4.07e9},
    **{"Qwen3.6-27B-NVFP4": 26.9e9, "GLM-5.2-NVFP4": 743e9, "Step-3.7-Flash": 196e9},
}
"""Parameters as model cards say, of models that transformers does not build."""
HEADS = {
    **{"Qwen2-VL-7B": (28, 4, 128), "Qwen2.5-VL-7B": (28, 4, 128), "internlm3-8b": (48, 2, 128)},
    **{"Qwen1.5-MoE-A2.7B": (24, 16, 128), "Yi-1.5-34B": (60, 8, 128), "phi-2": (32, 32, 80)},
    **{"Baichuan2-13B": (40, 40, 128), "glm-4-9b-chat": (40, 2, 128), "grok-2": (64, 8, 128)},
    **{"GLM-4-9B-0414": (40, 2, 128), "Falcon-H1-7B": (44, 2, 128), "Bamba-9B": (3, 8, 128)},
    **{"granite-4.0-h-small": (4, 8, 128), "granite-4.0-h-micro": (4, 8, 64)},
    **{"granite-4.0-micro": (40, 8, 64), "Hunyuan-7B": (32, 8, 128), "Hunyuan-A13B": (32, 8, 128)},
    **{"ERNIE-4.5-21B-A3B": (28, 4, 128), "ERNIE-4.5-0.3B": (18, 2, 128), "dbrx": (40, 8, 128)},
    **{
        "Step-3.5-Flash": (12, 8, 128),
        "Step-3.7-Flash": (12, 8, 128),
        "Ling-mini-2.0": (20, 4, 128),
    },
    **{"Seed-OSS-36B": (64, 8, 128), "dots.llm1": (62, 32, 128), "gemma-7b": (28, 16, 256)},
    **{"LFM2-1.2B": (6, 8, 64), "LFM2-8B-A1B": (6, 8, 64), "EXAONE-4.0-1.2B": (30, 8, 64)},
    **{"SOLAR-10.7B": (48, 8, 128), "starcoder2-7b": (32, 4, 128), "c4ai-command-a": (16, 8, 128)},
    **{"aya-expanse-8b": (32, 8, 128), "c4ai-command-r-plus": (64, 8, 128)},
    **{"grok-1-hf": (64, 8, 128), "OLMoE-1B-7B": (16, 16, 128), "Phi-3.5-MoE": (32, 8, 128)},
    **{"Apertus-8B": (32, 8, 128), "Minitron-8B": (32, 8, 128), "Nemotron-H-8B": (4, 8, 128)},
    **{"SmolLM2-1.7B": (24, 32, 64), "stablelm-2-12b": (40, 8, 160), "pythia-6.9b": (32, 32, 128)},
    **{"Trinity-Mini": (8, 4, 128), "Nemotron-Super-49B": (49, 8, 128)},
    **{"Qwen3.6-27B-NVFP4": (16, 4, 256), "gemma-4-E4B": (7 - 3, 2, 512)},
}
"""Layers whose cache grows, key-value heads, and channels of a head."""
KV_BYTES = {
    **{name: 4 * layers * heads * channels for name, (layers, heads, channels) in HEADS.items()},
    **{"Moonlight-16B-A3B": 27 * 2 * 576, "MiniCPM3-4B": 62 * 2 * 288, "Kimi-K3": 24 * 2 * 576},
    "GLM-5.2-NVFP4": 78 * 2 * 576 + 21 * 132,
    **dict.fromkeys(("MiniMax-M3", "MiniMax-M3-NVFP4"), 60 * 4 * 4 * 128 + 57 * 2 * 128),
}
"""Bytes by which the KV cache grows with each token, in 16 bits."""
REFUSED = {
    "Jamba-v0.1": "attn_layer_offset, .* mamba_dt_rank, .* are not understood; without them",
    "LongCat-Flash-Chat": "expert_ffn_hidden_size, .*zero_expert_num .* are not understood",
    "Ring-mini-linear-2.0": "group_norm_size, layer_group_size .* are not understood",
    "Step3-text": "share_q_dim .* is not understood; without it this would be 320.5B",
    "snowflake-arctic": "parallel_attn_mlp_res, use_residual .* are not understood",
    "solar-pro": "sliding_window = 2047 is not understood without layer_types",
    "falcon-7b": "intermediate_size is missing",
}
CHECKPOINTS = {
    "Kimi-K3": "nvfp4 (routed experts only), by quantization_config in config.json",
    "GLM-5.2-NVFP4": "nvfp4 (linear layers), by quantization_config in config.json",
    "MiniMax-M3-NVFP4": "nvfp4 (routed experts only; other layers in mxfp8), by quantization_config in config.json",
    "Qwen3.6-27B-NVFP4": "nvfp4 (linear layers; other layers in fp8), by quantization_config in config.json",
}


def read(name: str, folder: Path) -> ModelDirectory:
    (folder / "config.json").write_text(json.dumps(ROWS[name]["config.json"]))
    return read_model_directory(folder)


def test_every_family_is_read_or_refused() -> None:
    assert set(ROWS) == set(KV_BYTES) | set(REFUSED)


@pytest.mark.parametrize("name", KV_BYTES)
def test_a_family_has_its_parameters_and_bytes(name: str, tmp_path: Path) -> None:
    shape, counted = read(name, tmp_path).shape, ROWS[name]["parameters"]
    if counted is not None:
        assert shape.num_parameters == pytest.approx(counted, rel=1e-4)
    else:
        assert shape.num_parameters == pytest.approx(PUBLISHED[name], rel=0.01)
    assert shape.kv_bytes_per_token("bfloat16") == KV_BYTES[name]
    assert sum(kind.parameters for kind in layer_kinds(shape, "bfloat16")) == shape.num_parameters


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_without_rules_is_refused_by_the_names_of_its_fields(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=REFUSED[name]):
        read(name, tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_in_several_formats_names_them(name: str, tmp_path: Path) -> None:
    assert str(read(name, tmp_path).checkpoint) == CHECKPOINTS[name]


@pytest.mark.parametrize("name", KV_BYTES)
def test_a_prompt_takes_as_long_as_its_flops(name: str, tmp_path: Path) -> None:
    check_seconds_of_flops(read(name, tmp_path).shape)


def test_a_step_takes_longer_with_layers_that_attend_to_all_tokens(tmp_path: Path) -> None:
    """Three of MiniMax-M3's 60 layers attend to all tokens, the others to 2,048."""
    shape = read("MiniMax-M3", tmp_path).shape
    shard, contexts = Shard(shape, Kernels("h200", "bfloat16"), 4), np.array([65536.0, 131072.0])
    short, long = shard.decode_attention(64, contexts).seconds
    keys = 64 * 65536 * (3 * 4 * 4 * 128 / 4 + 57 * 2 * 128) / load_gpu("h200").memory_bandwidth
    assert long - short == pytest.approx(keys, rel=0.4)
    whole = shape.forward_flops(1.0, 131072.0) - shape.forward_flops(1.0, 65536.0)
    assert whole == pytest.approx(65536 * (3 * 4 * 64 * 128 + 57 * 2 * 4 * 128))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LFM2-1.2B", "convolution over 3 tokens: 2,048 channels"),
        ("Falcon-H1-7B", "linear (mamba-2): 24 heads of 256 x 128, beside attention"),
        (
            "MiniMax-M3",
            "sparse attention: 64 heads, 4 KV heads of 128, 2,048 tokens by an index of 4 heads in 57 layers",
        ),
    ],
)
def test_a_kind_of_layer_has_its_own_name(name: str, kind: str, tmp_path: Path) -> None:
    assert kind in {each.kind for each in layer_kinds(read(name, tmp_path).shape, "bfloat16")}


def test_layers_that_share_a_cache_keep_none_and_a_token_reads_one_row_of_each_table(
    tmp_path: Path,
) -> None:
    """The last 18 of 42 layers share: 15 with a window of 512 tokens, and 3 with full attention."""
    shape = read("gemma-4-E4B", tmp_path).shape
    assert (shape.num_shared_full, shape.num_shared_windowed) == (3, 15)
    assert shape.shard_state_bytes("bfloat16", 1) == (35 - 15) * 512 * 4 * 2 * 256
    table = 262144 * 256 * 42
    assert shape.num_parameters - shape.num_active_parameters == table
    with pytest.raises(RunError, match="num_kv_shared_layers needs layer_types"):
        text = {**ROWS["gemma-7b"]["config.json"], "num_kv_shared_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(text))
        read_model_directory(tmp_path)


@pytest.mark.parametrize(("step", "num_dense"), [(1, 1), (2, 14)])
def test_layers_of_ernie_have_experts_at_an_interval(
    step: int, num_dense: int, tmp_path: Path
) -> None:
    table = {**ROWS["ERNIE-4.5-21B-A3B"]["config.json"], "moe_layer_interval": step}
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_model_directory(tmp_path).shape.num_dense_layers == num_dense


def test_two_names_of_a_field_must_agree(tmp_path: Path) -> None:
    table = {**ROWS["dbrx"]["config.json"], "num_attention_heads": 47}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(RunError, match="n_heads = 48 and num_attention_heads = 47 mean the same"):
        read_model_directory(tmp_path)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("attention", {"replace_with_linear": True}, "replace_with_linear = True in block_configs"),
        ("attention", {"n_heads_in_group": 4}, "one number for n_heads_in_group"),
        ("ffn", {"ffn_mult": "wide"}, "ffn_mult in block_configs must be a positive number"),
    ],
)
def test_a_block_that_is_not_understood_is_refused(
    part: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    table = json.loads(json.dumps(ROWS["Nemotron-Super-49B"]["config.json"]))
    table["block_configs"][0][part].update(changes)
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(RunError, match=message):
        read_model_directory(tmp_path)


def test_a_layer_list_of_different_sizes_is_refused(tmp_path: Path) -> None:
    table = {**ROWS["Hunyuan-A13B"]["config.json"], "moe_topk": [8] * 31 + [4]}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(RunError, match="moe_topk must be one number for all layers"):
        read_model_directory(tmp_path)

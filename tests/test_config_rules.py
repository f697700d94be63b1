"""Read a config.json by its fields: types without an entry of their own, and fields without a rule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.hardware.hugging_face import read_config_json, read_model_directory
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.model_types import EXECUTED_TYPES, MODEL_TYPES
from streamrl.runfile.errors import RunError
from streamrl.targets.execute_limits import check_back_ends
from tests.command_line import streamrl
from tests.patients import local_table
from tests.public_configs import PUBLIC
from tests.runs import make_run

PAGE = Path(__file__).parents[1] / "docs" / "executing.md"
KNOWN = {
    **{"Mistral-7B-v0.3": 7_248_023_552, "Mixtral-8x7B": 46_702_792_704, "Phi-4": 14_659_507_200},
    **{"Phi-3-mini": 3_821_079_552, "Granite-3.3-8B": 8_170_864_640, "OLMo-2-7B": 7_298_617_344},
    **{"DeepSeek-V2-Lite": 15_706_484_224, "Kimi-K2": 1_026_408_232_448},
}
"""Parameters of public models, as published or as transformers builds them."""
REFUSED = {
    "Jamba-v0.1": "attn_layer_offset, attn_layer_period, expert_layer_offset, expert_layer_period, mamba_conv_bias, ",
}
PLAIN: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100},
    **{"num_key_value_heads": 2, "intermediate_size": 128, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "max_position_embeddings": 4096, "model_type": "new"},
}


def write(folder: Path, table: object) -> Path:
    (folder / "config.json").write_text(json.dumps(table))
    return folder / "config.json"


def read(folder: Path, **changes: Any) -> ModelShape:
    table = {key: value for key, value in {**PLAIN, **changes}.items() if value != "absent"}
    return read_config_json(write(folder, table))


@pytest.mark.parametrize("name", KNOWN)
def test_a_public_model_has_its_published_parameters(name: str, tmp_path: Path) -> None:
    assert read_config_json(write(tmp_path, PUBLIC[name])).num_parameters == KNOWN[name]


@pytest.mark.parametrize("name", REFUSED)
def test_fields_without_a_rule_are_named_with_what_would_be_assumed(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=REFUSED[name]) as error:
        read_config_json(write(tmp_path, PUBLIC[name]))
    assert "without them this would be" in str(error.value)


def test_llama_4_has_experts_a_shared_expert_and_chunks(tmp_path: Path) -> None:
    shape = read_config_json(write(tmp_path, PUBLIC["Llama-4-Scout"]))
    assert shape.num_parameters == pytest.approx(107.77e9, rel=1e-3)
    assert shape.num_active_parameters == pytest.approx(16.1e9, rel=0.01)
    assert (shape.num_full_layers, shape.num_windowed_layers) == (12, 36)


def test_sizes_that_a_file_leaves_to_its_config_class_are_noted(tmp_path: Path) -> None:
    """Published Gemma 3 configs state neither heads nor vocabulary if they are the defaults."""
    sizes = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
    own = {"num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024}
    text = {"model_type": "gemma3_text", **sizes, **own}
    write(tmp_path, {"model_type": "gemma3", "text_config": text})
    found = read_model_directory(tmp_path)
    assert (found.shape.head_dim, found.shape.num_windowed_layers) == (256, 40)
    assert found.shape.num_parameters == pytest.approx(11.766e9, rel=1e-3)
    assert found.assumed == [
        "vocab_size = 262208, the default of its model_type",
        "head_dim = 256, the default of its model_type",
    ]


def test_indexers_of_some_layers_count_once(tmp_path: Path) -> None:
    table = {
        **{**PLAIN, "model_type": "glm_moe_dsa", "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 32},
        **{"index_n_heads": 2, "index_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    }
    every = read_config_json(write(tmp_path, table))
    types = ["full", "shared", "full", "shared"]
    some = read_config_json(write(tmp_path, {**table, "indexer_types": types}))
    one = 2 * 8 * 16 + 8 * 64 + 2 * 64 + 2 * 8
    assert every.num_parameters - some.num_parameters == 2 * one
    assert every.kv_bytes_per_token("bfloat16") - some.kv_bytes_per_token("bfloat16") == 2 * 12
    wrong = {**table, "indexer_types": ["full", "none", "full", "full"]}
    with pytest.raises(RunError, match="indexer_types must be full or shared for each of 4"):
        read_config_json(write(tmp_path, wrong))


def test_an_unknown_type_is_read_by_its_fields_and_says_so(tmp_path: Path) -> None:
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert read(tmp_path).num_parameters == 4 * layer + 2 * 64 * 100 + 64
    assert read_model_directory(tmp_path).assumed == [
        "model_type 'new' has no entry of its own: read by its fields alone"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_magic_experts": 4}, "num_magic_experts may change .* is not understood; without it"),
        ({"use_gate_proj": True}, "use_gate_proj may change"),
        ({"new_switch": True}, "new_switch may change"),
        ({"num_attention_heads_per_layer": [4, 2, 4, 4]}, "one number for all layers of a kind"),
        ({"model_type": "laguna", "gating": "per-element"}, "gating must be true or 'per-head'"),
        ({"model_type": "llama", "gating": True}, "gating may change"),
        ({"layer_pattern": "abab"}, "layer_pattern may change"),
        ({"block_sizes": [1, 2]}, "block_sizes may change"),
        ({"side_config": {"hidden_size": 8}}, "side_config may change"),
        ({"sliding_window": 512}, "sliding_window = 512 is not understood without layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .* does not tell whether MLPs have a gate"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2' .* does not tell whether MLPs have a gate"),
        ({"tie_word_embeddings": "absent"}, "tie_word_embeddings is missing"),
        ({"is_encoder_decoder": True}, "only decoders are supported"),
        ({"layer_types": ["full_attention", "rnn"] * 2}, "layer_types must name .* got 'rnn'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must name .* got 3 names"),
        ({"layer_types": ["full_attention", "conv"] * 2}, "layers of conv need conv_L_cache"),
        ({"attn_type_list": [1, 0, 1, 1]}, r"attn_type_list must be 1 \(full attention\) .* got 0"),
        ({"num_experts": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}, "must be equal"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"hidden_size": 10**9 + 1}, "hidden_size must be at most 1,000,000,000"),
        ({"vocab_size": 10**400}, "vocab_size must be at most 1,000,000,000"),
        ({"layer_types": "full_attention"}, "layer_types must be a list, got 'full_attention'"),
        ({"hybrid_layer_pattern": "0111"}, "hybrid_layer_pattern must be a list, got '0111'"),
        ({"attn_type_list": 1}, "attn_type_list must be a list, got 1"),
        ({"linear_attn_config": [1]}, r"linear_attn_config must be an object, got \[1\]"),
        ({"quantization_config": {"quant_method": "new"}}, "quant_method 'new' is not known"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
            "config_groups has no group",
        ),
        ({"hybrid_override_pattern": "M*X-"}, "hybrid_override_pattern must name only .* got 'X'"),
        ({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern must name 4 layers, got 3"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=f"config.json: .*{message}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"sliding_window": 512, "use_sliding_window": False}, (4, 0)),
        ({"sliding_window": 4096}, (4, 0)),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, (2, 2)),
        ({"sliding_window": 512, "sliding_window_pattern": "LLLG"}, (1, 3)),
        ({"sliding_window": 512, "hybrid_layer_pattern": [0, 1, 1, 1]}, (1, 3)),
        ({"sliding_window": 512, "use_sliding_window": True}, (0, 4)),
        ({"model_type": "qwen3", "head_dim": 16, "sliding_window": 8}, (4, 0)),
        (
            {
                **{"model_type": "qwen3", "head_dim": 16, "sliding_window": 8},
                **{"use_sliding_window": True, "max_window_layers": 3},
            },
            (3, 1),
        ),
    ],
)
def test_windows_are_counted_by_any_field_that_tells_their_layers(
    changes: dict[str, Any], layers: tuple[int, int], tmp_path: Path
) -> None:
    shape = read(tmp_path, **changes)
    assert (shape.num_full_layers, shape.num_windowed_layers) == layers


@pytest.mark.parametrize(
    ("changes", "num_dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 2}, 2),
        ({"mlp_only_layers": [3]}, 1),
        ({"decoder_sparse_step": 2}, 2),
        ({"interleave_moe_layer_step": 3}, 3),
        ({"moe_layer_freq": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 1),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, 2),
        ({"moe_layers": [1]}, 3),
    ],
)
def test_layers_with_experts_are_counted_by_any_field_that_tells_them(
    changes: dict[str, Any], num_dense: int, tmp_path: Path
) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = read(tmp_path, **experts, **changes)
    assert shape.num_dense_layers == num_dense
    assert shape.num_expert_layers == 4 - num_dense


def test_an_index_of_other_weights_is_refused(tmp_path: Path) -> None:
    size = 2 * read(tmp_path).num_parameters
    index = tmp_path / "model.safetensors.index.json"
    for factor in (1, 2, 1.01):
        index.write_text(json.dumps({"metadata": {"total_size": round(size * factor)}}))
        assert str(read_model_directory(tmp_path).checked_index).endswith("as the shape says")
    index.write_text(json.dumps({"metadata": {"total_size": round(size * 1.1)}}))
    with pytest.raises(RunError, match=r"says 0\.000\d+ GB; the file and its weights are of"):
        read_model_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4}}},
            },
            "nvfp4",
        ),
    ],
)
def test_formats_of_checkpoints_are_recognised(
    config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    read(tmp_path, quantization_config=config)
    found = read_model_directory(tmp_path).checkpoint
    assert found is not None and found.dtype == dtype


def test_two_files_that_disagree_about_the_format_are_named(tmp_path: Path) -> None:
    read(tmp_path, quantization_config={"quant_method": "fp8"})
    told = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    *_, note = read_model_directory(tmp_path).assumed
    assert (
        note == "the checkpoint is in fp8, by config.json, although hf_quant_config.json says nvfp4"
    )


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"hidden_size": 64, "hidden_size": 128}'),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8", "quant_algo": "NVFP4"}}'),
        ("model.safetensors.index.json", '{"metadata": {"total_size": 1, "total_size": 2}}'),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(file: str, text: str, tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(RunError, match=f"{file}.*: the key '\\w+' appears twice in one object"):
        read_model_directory(tmp_path)


def test_a_small_head_may_be_assumed_and_is_noted(tmp_path: Path) -> None:
    wide = {"tie_word_embeddings": "absent", "intermediate_size": 10**5, "model_type": "new"}
    shape = read(tmp_path, **wide)
    assert not shape.has_tied_embeddings
    notes = read_model_directory(tmp_path).assumed
    assert "no tie_word_embeddings: a separate output head" in notes


def test_the_file_of_modelopt_tells_the_format_too(tmp_path: Path) -> None:
    read(tmp_path)
    assert read_model_directory(tmp_path).checkpoint is None
    told = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    found = read_model_directory(tmp_path).checkpoint
    assert str(found) == "nvfp4 (linear layers), by quant_algo in hf_quant_config.json"


# Where it is used ---------------------------------------------------------------------------------


def test_the_page_on_executing_names_every_type_of_model_that_is_executed() -> None:
    (line,) = (each for each in PAGE.read_text().splitlines() if "`[model] path`" in each)
    named = re.findall(r"`(\w+)`", line.partition("whose `model_type` is")[2].partition(".")[0])
    assert tuple(named) == EXECUTED_TYPES
    assert set(EXECUTED_TYPES) <= set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "smollm3"}, "'smollm3' is not"),
        ({"quantization_config": {"quant_method": "fp8"}}, "this one is in fp8"),
    ],
)
def test_a_model_that_is_only_simulated_is_not_executed(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = make_run(local_table(tmp_path, {}))
    check_back_ends(run)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(RunError, match=f"^model.path must be .* to be executed, .*{message}"):
        check_back_ends(run)


def test_simulate_says_it_in_one_line_and_doctor_among_its_findings(tmp_path: Path) -> None:
    write(tmp_path, PUBLIC["Jamba-v0.1"])
    run = tmp_path / "run.toml"
    text = Path("examples/h20-h800.toml").read_text()
    run.write_text(text.replace('name = "qwen2.5-7b"', f'path = "{tmp_path}"'))
    done = streamrl("simulate", run)
    assert done.returncode == 2 and done.stdout == ""
    said = done.stderr.strip().splitlines()
    assert len(said) == 1 and "attn_layer_offset" in said[0]
    assert "attn_layer_offset" in streamrl("doctor", run, "--json").stdout

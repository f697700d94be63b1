"""Parameters, bytes and FLOPs of a model's shape: against transformers' own models, and in closed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.hardware.hugging_face import read_config_json
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from tests.runs import small_run

DENSE = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
}
QWEN3 = {**DENSE, "head_dim": 16}
QWEN3_MOE = {**QWEN3, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MIXTRAL = {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 2}
DEEPSEEK = {
    **DENSE,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
GLM4_MOE = {
    **{**DENSE, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2},
    **{"topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    "first_k_dense_replace": 1,
}
GLM_DSA = {**DEEPSEEK, "index_topk": 32, "index_n_heads": 4, "index_head_dim": 6}
NEMOTRON = {
    **{**DENSE, "num_hidden_layers": 6, "head_dim": 16, "hybrid_override_pattern": "M-M*EM"},
    **{"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 10, "n_groups": 2},
    **{"conv_kernel": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 40},
}
KIMI_LINEAR = {
    **{
        key: value
        for key, value in DEEPSEEK.items()
        if key not in ("q_lora_rank", "n_routed_experts")
    },
    **{"num_experts": 8, "pad_token_id": 0},
    "linear_attn_config": {
        **{"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 8, "num_heads": 4},
        "short_conv_kernel_size": 3,
    },
}
MIMO_V2 = {
    **{**DENSE, "head_dim": 12, "v_head_dim": 8, "swa_head_dim": 12, "swa_v_head_dim": 8},
    **{"num_key_value_heads": 3, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 6},
    **{"sliding_window": 16},
    **{"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "n_routed_experts": 8},
    **{"moe_intermediate_size": 20, "num_experts_per_tok": 2, "add_swa_attention_sink_bias": True},
}
LAGUNA = {
    **{**QWEN3_MOE, "shared_expert_intermediate_size": 40, "sliding_window": 16, "gating": True},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
GEMMA4 = {
    **{
        **DENSE,
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 16,
    },
    **{"num_global_key_value_heads": 3, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    "num_kv_shared_layers": 0,
}
GPT_OSS = {**MIXTRAL, "head_dim": 10}
QWEN3_NEXT = {
    **QWEN3_MOE,
    "num_hidden_layers": 8,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
GEMMA3 = {**DENSE, "head_dim": 16, "num_hidden_layers": 7}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", DENSE),
    ("qwen2", {**DENSE, "tie_word_embeddings": True}),
    ("qwen2", {**DENSE, "num_key_value_heads": 6, "num_hidden_layers": 1}),
    ("qwen2", {**DENSE, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 7}),
    ("qwen3", QWEN3),
    ("qwen3", {**QWEN3, "head_dim": 6}),
    ("qwen3", {**QWEN3, "tie_word_embeddings": True, "num_key_value_heads": 3}),
    ("llama", DENSE),
    ("llama", {**DENSE, "head_dim": 20}),
    ("llama", {**DENSE, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("llama", {**DENSE, "attention_bias": True}),
    ("mistral", DENSE),
    ("mistral", {**DENSE, "head_dim": 20}),
    ("mistral", {**DENSE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mixtral", MIXTRAL),
    ("mixtral", {**MIXTRAL, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("qwen3_moe", QWEN3_MOE),
    ("qwen3_moe", {**QWEN3_MOE, "head_dim": None}),
    ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [0, 1]}),
    ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 6, "tie_word_embeddings": True}),
    ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    ("glm4_moe", {**GLM4_MOE}),
    ("glm4_moe", {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True}),
    ("glm_moe_dsa", GLM_DSA),
    ("deepseek_v32", {**GLM_DSA, "first_k_dense_replace": 2}),
    ("glm_moe_dsa", {**GLM_DSA, "num_hidden_layers": 9, "index_topk_freq": 4}),
    ("olmo2", DENSE),
    ("olmo3", {**DENSE, "num_hidden_layers": 8, "sliding_window": 16}),
    ("gemma2", {**DENSE, "head_dim": 16, "num_hidden_layers": 4}),
    ("smollm3", {**DENSE, "pad_token_id": 0}),
    ("phi3", {**DENSE, "pad_token_id": 0}),
    ("seed_oss", {**DENSE, "head_dim": 16, "attention_out_bias": False}),
    ("granite", DENSE),
    ("arcee", DENSE),
    ("laguna", LAGUNA),
    ("laguna", {**LAGUNA, "num_attention_heads_per_layer": [6, 4, 4]}),
    ("glm4_moe_lite", {**DEEPSEEK, "n_shared_experts": 1}),
    ("granitemoe", {**MIXTRAL}),
    ("ministral3", {**DENSE, "head_dim": 16}),
    ("minimax_m2", {**MIXTRAL, "head_dim": 16}),
    ("nemotron_h", NEMOTRON),
    ("nemotron_h", {**NEMOTRON, "moe_latent_size": 12}),
    ("kimi_linear", KIMI_LINEAR),
    ("mimo_v2_flash", MIMO_V2),
    (
        "llama4_text",
        {**MIXTRAL, "head_dim": 16, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    ),
    ("gemma4_text", GEMMA4),
    ("gemma4_text", {**GEMMA4, "attention_k_eq_v": False}),
    ("gpt_oss", GPT_OSS),
    ("gpt_oss", {**GPT_OSS, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("qwen3_next", QWEN3_NEXT),
    ("qwen3_next", {**QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention"] * 4}),
    ("gemma3_text", GEMMA3),
    ("gemma3_text", {**GEMMA3, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("deepseek_v3", DEEPSEEK),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None}),
    ("deepseek_v3", {**DEEPSEEK, "n_shared_experts": 3, "first_k_dense_replace": 0}),
    ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 3, "tie_word_embeddings": True}),
]


def shape(name: str) -> ModelShape:
    return load_model(ModelConfig(name=name))


def read(folder: Path, table: object) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(table))
    return read_config_json(folder / "config.json")


def count_of_transformers(config: Any) -> int:
    """Parameters, tied ones once, and the router's bias, which transformers keeps as a buffer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in [*model.parameters(), *biases])


# Against transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "changes"), CONFIGS)
def test_a_config_gives_as_many_parameters_as_transformers_builds(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    given = {key: value for key, value in changes.items() if key != "head_dim" or value}
    config = AutoConfig.for_model(kind, **given)
    config.save_pretrained(tmp_path)
    model = read_config_json(tmp_path / "config.json")
    assert model.num_parameters == count_of_transformers(config)


def test_a_published_config_counts_as_the_one_that_transformers_saves(tmp_path: Path) -> None:
    published = read(tmp_path, {"model_type": "qwen3_moe", **QWEN3_MOE})
    AutoConfig.for_model("qwen3_moe", **QWEN3_MOE).save_pretrained(tmp_path)
    assert "num_local_experts" in (tmp_path / "config.json").read_text()
    assert read_config_json(tmp_path / "config.json") == published


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}, 512),
        ({"model_type": "llama", "sliding_window": 512}, None),
    ],
)
def test_a_sliding_window_is_read_where_the_type_has_one(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, {**DENSE, **changes}).sliding_window == window


def test_rollouts_that_outgrow_a_sliding_window_have_costs_too(tmp_path: Path) -> None:
    read(tmp_path, {**DENSE, "model_type": "mistral", "sliding_window": 2500})
    fits = {"model": {"path": str(tmp_path)}, "rollout.max_tokens": 452}
    whole, beyond = (
        Costs.load(small_run({**fits, "rollout.max_tokens": tokens})).decode.per_context_token[4]
        for tokens in (452, 20000)
    )
    assert beyond < 0.5 * whole  # tokens past the window are not read


@pytest.mark.parametrize(
    ("changes", "full", "windows", "linear"),
    [
        ({"model_type": "gpt_oss", **GPT_OSS, "sliding_window": 8}, 1, 2, 0),
        ({"model_type": "gemma3_text", **GEMMA3, "sliding_window": 8}, 1, 6, 0),
        ({"model_type": "qwen3_next", **QWEN3_NEXT}, 2, 0, 6),
        ({"model_type": "qwen3_next", **QWEN3_NEXT, "full_attention_interval": 2}, 4, 0, 4),
        ({"model_type": "mistral", **DENSE}, 0, 3, 0),
    ],
)
def test_layers_attend_as_their_types_say_or_as_the_type_of_model_has_them(
    changes: dict[str, Any], full: int, windows: int, linear: int, tmp_path: Path
) -> None:
    model = read(tmp_path, changes)
    found = (model.num_full_layers, model.num_windowed_layers, model.num_linear_layers)
    assert found == (full, windows, linear)


def test_a_layer_of_no_known_type_is_refused(tmp_path: Path) -> None:
    table = {"model_type": "gpt_oss", **GPT_OSS, "layer_types": ["full_attention", "other"]}
    with pytest.raises(
        RunError, match=r"layer_types must name full_attention, .* each of 3 layers"
    ):
        read(tmp_path, table)


# Closed form ---------------------------------------------------------------------------------------


def test_a_token_multiplies_with_the_output_head_and_the_chosen_experts_only(
    tmp_path: Path,
) -> None:
    model = read(tmp_path, {"model_type": "qwen3_moe", **QWEN3_MOE, "mlp_only_layers": [0]})
    expert, table, num_mixtures = 3 * 48 * 20, 101 * 48, 2
    assert model.num_parameters - model.num_active_parameters == table + num_mixtures * 4 * expert
    tied = msgspec.structs.replace(model, has_tied_embeddings=True)
    assert tied.num_active_parameters == model.num_active_parameters
    assert tied.num_parameters == model.num_parameters - table


def test_a_forward_pass_takes_two_flops_a_parameter_and_four_a_pair_and_channel() -> None:
    model = shape("qwen2.5-7b")
    assert model.forward_flops(1, 0) == pytest.approx(2 * 7.07e9, rel=2e-3)
    assert model.forward_flops(0, 1) == 4 * 28 * 3584


def test_latent_attention_scores_and_values_of_a_pair_differ_in_size() -> None:
    assert shape("deepseek-v3").forward_flops(0, 1) == 61 * 128 * 2 * ((128 + 64) + 128)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("qwen2.5-7b", 2 * 28 * 4 * 128),
        ("qwen2.5-32b", 2 * 64 * 8 * 128),
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128),
        ("deepseek-v3", 61 * (512 + 64)),
    ],
)
def test_a_token_of_context_keeps_keys_and_values_or_one_latent_vector(
    name: str, values: int
) -> None:
    model = shape(name)
    for dtype, num_bytes in (("fp8", 1), ("bfloat16", 2), ("float32", 4)):
        assert model.kv_bytes_per_token(dtype) == num_bytes * values


def test_gpus_share_key_value_heads_out_until_each_has_one_and_a_latent_vector_never() -> None:
    few_heads, latent = shape("qwen2.5-7b"), shape("deepseek-v3")
    whole = few_heads.kv_bytes_per_token("bfloat16")
    shares = [few_heads.shard_kv_bytes_per_token("bfloat16", degree) for degree in (1, 2, 4, 8)]
    assert shares == [whole, whole / 2, whole / 4, whole / 4]
    assert latent.shard_kv_bytes_per_token("bfloat16", 8) == latent.kv_bytes_per_token("bfloat16")


# Shards --------------------------------------------------------------------------------------------


def test_shards_add_up_to_the_model_and_to_the_copies_of_what_is_not_split() -> None:
    model = shape("llama-3.1-8b")
    norms = (2 * 32 + 1) * 4096
    for degree in (1, 2, 4, 8):
        total = degree * model.shard_parameters(degree)
        assert total == model.num_parameters + (degree - 1) * norms
    doubled_heads = 32 * 2 * 8 * 128 * 4096
    total = 16 * model.shard_parameters(16)
    assert total == model.num_parameters + 15 * norms + doubled_heads


def test_every_gpu_keeps_the_norms_routers_and_what_makes_the_latent_vectors() -> None:
    model = shape("deepseek-v3")
    norms = (2 * 61 + 1) * 7168
    routers = 58 * 256 * (7168 + 1)
    latents = 61 * (1536 * (7168 + 1) + 7168 * (512 + 64) + 512)
    total = 8 * model.shard_parameters(8)
    assert total == pytest.approx(model.num_parameters + 7 * (norms + routers + latents), rel=1e-12)


def test_expert_parallel_gpus_hold_whole_experts_and_change_nothing_else() -> None:
    model = shape("deepseek-v3")
    experts = 58 * 256 * model.expert_parameters
    for degree in (1, 8):
        rest = model.shard_parameters(degree) - experts / degree
        assert model.shard_parameters(degree, expert_parallel=64) == pytest.approx(
            rest + experts / 64, rel=1e-12
        )
    dense = shape("qwen3-8b")
    assert dense.shard_parameters(4, expert_parallel=8) == dense.shard_parameters(4)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((0, 1), "tensor_parallel must be at least 1, got 0"),
        ((1, -2), "expert_parallel must be at least 1, got -2"),
        ((1, 3), "expert_parallel must divide the 256 experts of DeepSeek-V3, got 3"),
    ],
)
def test_impossible_degrees_are_refused(degrees: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape("deepseek-v3").shard_parameters(*degrees)


# config.json ---------------------------------------------------------------------------------------


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
    found, profile = read(tmp_path, config), shape("qwen2.5-7b")
    named = msgspec.structs.replace(found, name=profile.name, source=profile.source)
    assert named == profile


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        *(("qwen2", DENSE), ("qwen3", QWEN3), ("mixtral", MIXTRAL)),
        *(("qwen3_moe", QWEN3_MOE), ("deepseek_v3", DEEPSEEK)),
    ],
)
def test_a_missing_key_is_named_with_its_file(
    kind: str, table: dict[str, Any], tmp_path: Path
) -> None:
    unread = {"n_group", "topk_group"} | (
        {"num_key_value_heads"} if kind == "deepseek_v3" else set()
    )
    unread |= {"head_dim", "intermediate_size"} if kind == "qwen3_moe" else set()
    for key in table.keys() - unread:
        rest = {other: value for other, value in table.items() if other != key}
        with pytest.raises(ValueError, match=rf"model.path: .*config.json: {key} is missing"):
            read(tmp_path, {"model_type": kind, **rest})


def test_only_a_llama_may_leave_its_key_value_heads_out(tmp_path: Path) -> None:
    table = {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}
    assert read(tmp_path, {"model_type": "llama", **table}).num_kv_heads == 6
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        read(tmp_path, {"model_type": "mistral", **table})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2", {"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ("qwen2", {"vocab_size": -5}, "vocab_size must be a whole number of at least 1, got -5"),
        ("qwen2", {"num_hidden_layers": 2.5}, "num_hidden_layers must be .*, got 2.5"),
        ("qwen2", {"intermediate_size": True}, "intermediate_size must be .*, got True"),
        ("qwen2", {"num_key_value_heads": "2"}, "num_key_value_heads must be .*, got '2'"),
        ("qwen2", {"num_key_value_heads": 4}, "num_kv_heads must divide num_heads 6, got 4"),
        ("qwen2", {"hidden_size": 50}, "num_attention_heads must divide hidden_size 50, got 6"),
        ("qwen2", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "experts_per_token must be at most .* 6, got 7"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be .*, got 0"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers must name .*, got \[3\]"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, r"mlp_only_layers must name .*, got \['a'\]"),
        ("qwen3_moe", {"mlp_only_layers": [None, None]}, r"mlp_only_layers must name .*None\]"),
        ("deepseek_v3", {"first_k_dense_replace": 4}, "first_k_dense_replace must be .* 3, got 4"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts must be .* 0, got -1"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            "quantization_config with quant_method None is not known",
        ),
        ("mamba", {}, "tie_word_embeddings is missing, and this model_type is unknown"),
        ("mamba", {"state_size": 16, "tie_word_embeddings": False}, "state_size may change"),
    ],
)
def test_a_value_that_no_model_has_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = {"qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK}.get(kind, DENSE)
    with pytest.raises(ValueError, match=f"model.path: .*config.json: .*{message}"):
        read(tmp_path, {"model_type": kind, **base, **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read: Expecting property name"),
        (b"\xff\xfe", "cannot be read: .*utf-8"),
        (b"[1]", r"must contain a JSON object, got \[1\]"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {message}"):
        load_model(ModelConfig(path=str(tmp_path)))

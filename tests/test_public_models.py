"""Public config.json files as they are: parameters, KV cache and states of each, or the reason why one is refused.

`public_models.jsonl` has the fields of public files on the Hugging Face hub, as AIConfigurator (Apache-2.0) collects
them. Fields without an effect on shapes are left out: class names of remote code, labels, initial deviations, and all
but two entries of lists of unquantised modules. Each model has its own licence.

`PARAMETERS` has a second calculation: the parameters of transformers' own model on the meta device (5.24.0, without
vision tower; Kimi-K2.5 as deepseek_v3 and MiMo-7B as qwen2, whose layers they have).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.hugging_face import ModelDirectory, read_model_directory
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_gpu
from streamrl.hardware.resolved import resolve
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.layer import Layer
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from tests.runs import small_run

ROWS = [json.loads(line) for line in Path(__file__).with_name("public_models.jsonl").open()]
FIT = load_training_profile()
FILES: dict[str, dict[str, Any]] = {row.pop("model"): row for row in ROWS}
PARAMETERS = {
    "DeepSeek-R1": 671_026_419_200,
    "DeepSeek-V3.2": 671_877_944_064,
    **dict.fromkeys(("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-FP8"), 284_332_241_239),
    "GLM-5": 743_911_218_432,
    "GLM-5-FP8": 743_911_218_432,
    "GLM-5.1": 743_911_218_432,
    "GLM-5.1-FP8": 743_911_218_432,
    "Kimi-K2.5": 1_026_408_232_448,
    "Llama-3.1-70B-Instruct-FP8": 70_553_706_496,
    "Llama-4-Maverick-17B-128E-Instruct": 400_711_848_960,
    "Meta-Llama-3.1-405B": 405_853_388_800,
    "Meta-Llama-3.1-70B": 70_553_706_496,
    "Meta-Llama-3.1-8B": 8_030_261_248,
    "MiMo-7B-Base": 7_622_619_136,
    "MiMo-V2-Flash": 308_778_780_864,
    "MiniMax-M2.7": 228_689_764_864,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120_668_707_840,
    "Nemotron-H-56B-Base-8K": 56_324_350_464,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-235B-A22B-FP8": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-30B-A3B-FP8": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-32B-FP8": 32_762_123_264,
    "Qwen3-32B-FP8-Static-PerTensor": 32_762_123_264,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen3-VL-235B-A22B-Instruct": 235_093_634_560,
    "Qwen3-VL-2B-Instruct": 1_720_574_976,
    "Qwen3-VL-30B-A3B-Instruct": 30_532_122_624,
    "Qwen3-VL-4B-Instruct": 4_022_468_096,
    "Qwen3-VL-8B-Instruct": 8_190_735_360,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "gemma-4-26B-A4B": 25_233_141_791,
    "gpt-oss-20b": 20_914_757_184,
}
PUBLISHED = {
    **{"Qwen3.5-35B-A3B": 34.66, "GLM-5": 743.2, "gpt-oss-20b": 20.91, "MiMo-7B-Base": 7.62},
    **{"Meta-Llama-3.1-8B": 8.03, "Meta-Llama-3.1-70B": 70.55, "Meta-Llama-3.1-405B": 405.85},
    **{"Mixtral-8x7B-v0.1": 46.7, "Qwen3-0.6B": 0.596, "Qwen3-8B": 8.19, "Qwen3-32B": 32.76},
    **{"Qwen3-30B-A3B": 30.53, "Qwen3-235B-A22B": 235.09},
}
"""Billions of parameters, as model cards say or summed by hand from config.json."""
ACTIVE = {"Mixtral-8x7B-v0.1": 12.9, "Qwen3-30B-A3B": 3.35, "Qwen3-235B-A22B": 22.19}
"""The same of active parameters, which count the input embedding."""
LATENT = 2 * (512 + 64)
"""Bytes of DeepSeek's latent vector in 16 bits."""
INDEX_KEY = 128 + 4
"""Bytes of DeepSeek's index key: 128 values in fp8, and a scale."""
KV_BYTES = {
    **{"DeepSeek-R1": 61 * LATENT, "DeepSeek-V3.2": 61 * (LATENT + INDEX_KEY)},
    **dict.fromkeys(
        ("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-FP8"),
        21 * (1024 + INDEX_KEY) // 4 + 20 * 1024 // 128,
    ),
    **dict.fromkeys(("GLM-5", "GLM-5-FP8", "GLM-5.1", "GLM-5.1-FP8"), 78 * (LATENT + INDEX_KEY)),
    "Kimi-K2.5": 61 * LATENT,
    "Llama-3.1-70B-Instruct-FP8": 80 * 4 * 8 * 128,
    "Llama-4-Maverick-17B-128E-Instruct": 12 * 4 * 8 * 128,
    **{"Meta-Llama-3.1-405B": 516096, "Meta-Llama-3.1-70B": 327680, "Meta-Llama-3.1-8B": 131072},
    "MiMo-7B-Base": 36 * 4 * 8 * 128,
    "MiMo-V2-Flash": 9 * 2 * 4 * (192 + 128),
    "MiniMax-M2.7": 62 * 4 * 8 * 128,
    **{"Mixtral-8x22B-v0.1": 56 * 4 * 8 * 128, "Mixtral-8x7B-v0.1": 131072},
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 6 * 4 * 2 * 128,
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 8 * 4 * 2 * 128,
    "Nemotron-H-56B-Base-8K": 10 * 4 * 8 * 128,
    **{"Qwen3-0.6B": 114688, "Qwen3-1.7B": 28 * 4 * 8 * 128, "Qwen3-8B": 147456},
    **dict.fromkeys(("Qwen3-235B-A22B", "Qwen3-235B-A22B-FP8"), 192512),
    **dict.fromkeys(("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8"), 98304),
    **dict.fromkeys(("Qwen3-32B", "Qwen3-32B-FP8", "Qwen3-32B-FP8-Static-PerTensor"), 262144),
    "Qwen3-Coder-480B-A35B-Instruct": 62 * 4 * 8 * 128,
    **{"Qwen3-VL-235B-A22B-Instruct": 192512, "Qwen3-VL-30B-A3B-Instruct": 98304},
    **{"Qwen3-VL-2B-Instruct": 28 * 4 * 8 * 128, "Qwen3-VL-4B-Instruct": 36 * 4 * 8 * 128},
    "Qwen3-VL-8B-Instruct": 36 * 4 * 8 * 128,
    **{"Qwen3.5-122B-A10B": 12 * 4 * 2 * 256, "Qwen3.5-35B-A3B": 20480},
    "gemma-4-26B-A4B": 5 * 4 * 2 * 512,
    "gpt-oss-20b": 12 * 4 * 8 * 64,
}
"""Bytes by which the KV cache grows with each token, in 16 bits."""
COMPRESSORS = 21 * 8 * 2 * 2 * (512 + 128) * 4 + 20 * 128 * 2 * 512 * 4
"""Bytes of the compressors of DeepSeek-V4-Flash: vectors and weights in float32. Sparse layers keep two of each for
the last 8 tokens, for entries and for index keys; dense layers keep one for the last 128 tokens."""
STATES = {
    **dict.fromkeys(("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-FP8"), 43 * 128 * 1024 + COMPRESSORS),
    "Llama-4-Maverick-17B-128E-Instruct": 36 * 8192 * 4 * 8 * 128,
    "MiMo-V2-Flash": 39 * 128 * 2 * 8 * (192 + 128),
    "gemma-4-26B-A4B": 25 * 1024 * 4 * 8 * 256,
    "gpt-oss-20b": 12 * 128 * 4 * 8 * 64,
    "Qwen3.5-35B-A3B": 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    "Qwen3.5-122B-A10B": 36 * (64 * 128 * 128 * 4 + 12288 * 3 * 2),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2),
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 40 * (128 * 64 * 128 * 4 + 10240 * 3 * 2),
    "Nemotron-H-56B-Base-8K": 54 * (256 * 64 * 256 * 4 + 20480 * 3 * 2),
}
"""Bytes of a long rollout that do not grow: full windows, states in float32, and inputs of convolutions."""
CHECKPOINTS = {
    **{"DeepSeek-V4-Flash": "mxfp4", "DeepSeek-V4-Flash-FP8": "fp8"},
    **{"DeepSeek-R1": "fp8", "DeepSeek-V3.2": "fp8", "GLM-5-FP8": "fp8", "GLM-5.1-FP8": "fp8"},
    **{"Kimi-K2.5": "int4", "gpt-oss-20b": "mxfp4", "MiMo-V2-Flash": "fp8", "MiniMax-M2.7": "fp8"},
    **{"Llama-3.1-70B-Instruct-FP8": "fp8", "Qwen3-32B-FP8-Static-PerTensor": "fp8"},
    **{f"Qwen3-{size}-FP8": "fp8" for size in ("30B-A3B", "235B-A22B", "32B")},
}


def directory(name: str, folder: Path) -> Path:
    for file, table in FILES[name].items():
        (folder / file).write_text(json.dumps(table))
    return folder


def read(name: str, folder: Path) -> ModelDirectory:
    return read_model_directory(directory(name, folder))


def test_all_models_are_read() -> None:
    assert len(FILES) == 42 and set(PARAMETERS) == set(KV_BYTES) == set(FILES)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_public_model_has_its_parameters(name: str, tmp_path: Path) -> None:
    found = read(name, tmp_path).shape.num_parameters
    assert found == pytest.approx(PARAMETERS[name], rel=1e-8)
    assert found / 1e9 == pytest.approx(PUBLISHED.get(name, found / 1e9), rel=0.005)


AS_ANOTHER_TYPE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "deepseek_ref": "deepseek_v4"}
"""Types that transformers does not have, and those of the same layers."""


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_transformers_own_model_has_as_many_parameters(name: str, tmp_path: Path) -> None:
    """On the meta device. It counts no correction of router scores, which are buffers there."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    table = FILES[name]["config.json"]
    text = {**table.get("text_config", table)}
    for part in ("quantization_config", "auto_map", "architectures"):
        text.pop(part, None)
    kind = AS_ANOTHER_TYPE.get(text["model_type"], text["model_type"])
    config = transformers.CONFIG_MAPPING[kind].from_dict({**text, "model_type": kind})
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # Qwen3-VL's text models
        model_class = transformers.AutoModel
    else:
        model_class = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(config)
    shape = read(name, tmp_path).shape
    own = sum({id(each): each.numel() for each in model.parameters()}.values())
    if model_class is transformers.AutoModel and not shape.has_tied_embeddings:
        own += shape.num_embedding_parameters  # the output head
    assert shape.num_parameters == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_with_the_embedding_are_those_of_model_cards(
    name: str, tmp_path: Path
) -> None:
    shape = read(name, tmp_path).shape
    found = shape.num_active_parameters + shape.num_embedding_parameters
    assert found / 1e9 == pytest.approx(ACTIVE[name], rel=0.005)


@pytest.mark.parametrize("name", KV_BYTES)
def test_a_public_model_keeps_its_bytes_of_a_token_and_of_a_rollout(
    name: str, tmp_path: Path
) -> None:
    shape = read(name, tmp_path).shape
    assert shape.kv_bytes_per_token("bfloat16") == KV_BYTES[name]
    assert shape.shard_state_bytes("bfloat16", 1) == STATES.get(name, 0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_format_of_a_quantised_checkpoint_is_recognised(name: str, tmp_path: Path) -> None:
    found = read(name, tmp_path).checkpoint
    assert (found and found.dtype) == CHECKPOINTS.get(name)


def test_only_experts_of_three_models_are_narrow(tmp_path: Path) -> None:
    assert {
        name
        for name in CHECKPOINTS
        if (found := read(name, tmp_path).checkpoint) is not None and found.experts_only
    } == {"gpt-oss-20b", "Kimi-K2.5", "DeepSeek-V4-Flash"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [16] * 43}, "compress_ratios must be 0 .*, 4 .*, 128 .* got 16"),
        (
            {"compress_ratios": [4] * 9},
            "compress_ratios must be .* for each of 43 layers, got 9 numbers",
        ),
        ({"compress_ratios": None, "compress_rates": {}}, "compress_ratios is missing"),
        (
            {"layer_types": ["heavily_compressed_attention"]},
            "layer_types must name 43 layers, got 1",
        ),
        ({"o_groups": 7}, "output_groups must divide num_heads 64, got 7"),
    ],
)
def test_compressed_attention_that_is_not_known_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    table = {**FILES["DeepSeek-V4-Flash"]["config.json"], **changes}
    kept = {key: value for key, value in table.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(RunError, match=message):
        read_model_directory(tmp_path)


def test_layer_types_name_the_same_layers_as_ratios(tmp_path: Path) -> None:
    """A saved configuration has `layer_types` and `compress_rates`, and the rotary channels as a share of a head."""
    table = dict(FILES["DeepSeek-V4-Flash"]["config.json"])
    names = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
    table["layer_types"] = [
        f"{names[each]}_attention" for each in table.pop("compress_ratios")[:43]
    ]
    table["compress_rates"] = {names[4] + "_attention": 4, names[128] + "_attention": 128}
    table["mlp_layer_types"] = ["hash_moe"] * 3 + ["moe"] * 40
    table["partial_rotary_factor"] = table.pop("qk_rope_head_dim") / table["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    (tmp_path / "named").mkdir()
    found = read("DeepSeek-V4-Flash", tmp_path / "named").shape
    other = read_model_directory(tmp_path).shape
    assert replace(other, name=found.name, source=found.source) == found


def test_a_token_grows_each_kind_of_compressed_layer_by_its_share_of_an_entry(
    tmp_path: Path,
) -> None:
    """An fp8 vector has 448 bytes, 64 rotary channels in 16 bits, and 8 bytes of scales (vLLM: 584 bytes)."""
    shape = read("DeepSeek-V4-Flash", tmp_path).shape
    assert shape.compressed is not None
    assert shape.compressed.token_bytes(512, 2) == ((1024 + 132) / 4, 1024 / 128)
    assert shape.compressed.token_bytes(512, 1) == ((584 + 132) / 4, 584 / 128)
    assert shape.shard_kv_bytes_per_token("bfloat16", 8) == KV_BYTES["DeepSeek-V4-Flash"]
    assert [shape.splits_over(degree) for degree in (1, 8, 16)] == [True, True, False]


def test_compressed_attention_counts_pairs_with_entries(tmp_path: Path) -> None:
    """A token at 8,192 tokens attends to 128 tokens, and in 21 layers to 512 chosen of 2,048 entries, in 20 to 64."""
    shape = read("DeepSeek-V4-Flash", tmp_path).shape
    pair = 2 * 64 * (512 + 512)
    attended = 43 * 128 * pair + (21 * 512 + 20 * 64) * pair
    scored = 21 * 2048 * 2 * 64 * 128
    plain = 2 * shape.num_active_parameters
    assert shape.forward_flops(1, 8192) == pytest.approx(plain + attended + scored, rel=1e-12)


def test_parameters_of_vision_towers_count_apart(tmp_path: Path) -> None:
    for name, parameters in (
        ("Qwen3-VL-2B-Instruct", 406_957_056),
        ("Qwen3.5-35B-A3B", 446_571_248),
        ("gemma-4-26B-A4B", 572_794_416),
    ):
        found = read(name, tmp_path)
        assert found.shape.num_vision_parameters == pytest.approx(parameters, rel=0.001)
        assert len(found.not_simulated) == 1


# Costs --------------------------------------------------------------------------------------------

PROMPT = 8192.0
"""Tokens of a prompt."""
SLOWEST = 6.0
"""Seconds of a prompt relative to all its FLOPs at the datasheet's peak. Experts and long attention are the slowest."""


def check_seconds_of_flops(shape: ModelShape) -> None:
    """Check that prefill and training of a model take about as long as their FLOPs."""
    kernels, peak = Kernels("h200", "bfloat16"), load_gpu("h200").flops["bfloat16"]
    least = shape.forward_flops(PROMPT, PROMPT**2 / 2) / peak
    shard = Shard(shape, kernels)
    prefill = shard.products(np.array([PROMPT])) + shard.prefill_attention(1, np.array([PROMPT]))
    assert least < float(prefill.seconds[0]) < SLOWEST * least
    head = 2 * shape.num_embedding_parameters * PROMPT / peak
    seconds = layer_of(shape).forward().time(np.array([PROMPT]), np.array([PROMPT**2 / 2]))
    assert least - head < float(seconds[0]) * shape.num_layers < SLOWEST * least


@pytest.mark.parametrize("name", PARAMETERS)
def test_prefill_and_training_take_as_long_as_their_flops(name: str, tmp_path: Path) -> None:
    check_seconds_of_flops(read(name, tmp_path).shape)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_decode_step_takes_as_long_as_the_bytes_that_it_reads(name: str, tmp_path: Path) -> None:
    shape = read(name, tmp_path).shape
    shard, context = Shard(shape, Kernels("h200", "bfloat16")), 32768
    step = shard.products(np.array([64.0]))
    step += shard.decode_attention(64, np.array([float(context)])) + shard.head(np.array([64.0]))
    _, num_bytes = shard.step_work(64, context)
    read_once = num_bytes / load_gpu("h200").memory_bandwidth
    assert 0.7 * read_once < float(step.seconds[0]) < SLOWEST * read_once


def test_a_decode_step_attends_to_the_window_and_to_entries(tmp_path: Path) -> None:
    """At 8,192 tokens, 2 layers read 128 tokens, 21 also 512 chosen entries of 2,048, and 20 also 64 entries."""
    kernels = Kernels("h200", "bfloat16")
    shard = Shard(read("DeepSeek-V4-Flash", tmp_path).shape, kernels, tensor_parallel=4)
    found = shard.decode_attention(64, np.array([8192.0]))
    read_of = {
        tokens: kernels.time(
            "latent_decode_attention", np.array([float(tokens)]), heads=16, batch=64
        ).seconds[0]
        for tokens in (128, 128 + 512, 128 + 64)
    }
    keys = 64 * 2048 * INDEX_KEY / load_gpu("h200").memory_bandwidth / 0.8
    layers = zip((2, 21, 20), read_of.values(), strict=True)
    expected = sum(count * seconds for count, seconds in layers) + 21 * keys
    assert found.seconds[0] == pytest.approx(expected)
    assert found.provenance.shares["composed"] > 0.3


@pytest.mark.parametrize(
    ("heads", "batch", "context", "measured"),
    [
        *((128, 1, 4097, 143e-6), (128, 32, 4097, 191e-6), (128, 128, 2049, 317e-6)),
        *((16, 1, 4097, 85e-6), (16, 32, 2049, 115e-6), (16, 8, 32769, 115e-6)),
    ],
)
def test_a_block_of_sparse_attention_takes_as_long_as_measured(
    heads: int, batch: int, context: int, measured: float, tmp_path: Path
) -> None:
    """Of DeepSeek-V3.2 on an H200, fp8, SGLang 0.5.14 (aiconfigurator-core 0.12.0, dsa_generation_module)."""
    shape = read("DeepSeek-V3.2", tmp_path).shape
    shard = Shard(shape, Kernels("h200", "fp8"), tensor_parallel=128 // heads)
    found = shard._latent_projections(np.array([float(batch)]))
    found += shard._decode_layer(batch, np.array([float(context)]), shape)
    assert found.seconds[0] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("batch", "context", "sparse", "dense"),
    [(64, 4097, 128e-6, 61e-6), (128, 4097, 142e-6, 77e-6), (128, 6145, 146e-6, 77e-6)],
)
def test_a_block_of_compressed_attention_takes_as_long_as_measured(
    batch: int, context: int, sparse: float, dense: float, tmp_path: Path
) -> None:
    """With 8 heads of DeepSeek-V4-Flash on an H200, fp8, vLLM 0.24 (aiconfigurator-core 0.12.0, dsv4_*_generation_module)."""
    shape = read("DeepSeek-V4-Flash", tmp_path).shape
    assert shape.compressed is not None
    tokens, contexts = np.array([float(batch)]), np.array([float(context)])
    for name, measured in (("num_sparse_layers", sparse), ("num_dense_layers", dense)):
        others = {"num_sparse_layers": 0, "num_dense_layers": 0, name: 1}
        alone = replace(
            shape,
            num_layers=1,
            num_window_layers=0,
            compressed=replace(shape.compressed, **others),
        )
        shard = Shard(alone, Kernels("h200", "fp8", cache_dtype="fp8"), tensor_parallel=8)
        products = shard._compressed_projections(tokens, alone.compressed)
        found = products + shard.decode_attention(batch, contexts)
        assert found.seconds[0] == pytest.approx(measured, rel=0.2)


def layer_of(shape: ModelShape) -> Layer:
    """Return a mean layer of a shape in a trainer of one GPU."""
    run = small_run({"trainer": {"pool": "near", "micro_batch": 1}})
    ranks = replace(Ranks.of(resolve(run).trainer), model=shape)
    return Layer(
        ranks=ranks,
        gemm=FIT.gemm[ranks.gpu_name],
        experts=FIT.experts[ranks.gpu_name],
        constants=FIT.constants,
    )

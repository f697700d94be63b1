"""The data in profiles/: every file loads, and what follows from it agrees with what is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.workload import load_source

PUBLISHED = {
    "qwen2.5-0.5b": (0.49, 494_032_768),
    "qwen2.5-1.5b": (1.54, 1_543_714_304),
    "qwen2.5-3b": (3.09, 3_085_938_688),
    "qwen2.5-7b": (7.61, 7_615_616_512),
    "qwen2.5-14b": (14.7, 14_770_033_664),
    "qwen2.5-32b": (32.5, 32_763_876_352),
    "qwen2.5-72b": (72.7, 72_706_203_648),
    "qwen3-0.6b": (0.6, 596_049_920),
    "qwen3-1.7b": (1.7, 1_720_574_976),
    "qwen3-4b": (4.0, 4_022_468_096),
    "qwen3-8b": (8.2, 8_190_735_360),
    "qwen3-14b": (14.8, 14_768_307_200),
    "qwen3-32b": (32.8, 32_762_123_264),
    "qwen3-30b-a3b": (30.5, 30_532_122_624),
    "qwen3-235b-a22b": (235, 235_093_634_560),
    "llama-3.1-8b": (8.03, 8_030_261_248),
    "llama-3.1-70b": (70.6, 70_553_706_496),
    "llama-3.1-405b": (405, 405_853_388_800),
    "llama-2-7b": (6.74, 6_738_415_616),
    "llama-2-13b": (13.0, 13_015_864_320),
    "llama-2-70b": (69.0, 68_976_648_192),
    "r1-distill-qwen-1.5b": (1.78, 1_777_088_000),
    "r1-distill-qwen-7b": (7.62, 7_615_616_512),
    "deepseek-v3": (671, 671_026_419_200),
    "mixtral-8x7b": (46.7, 46_702_792_704),
    "gpt-oss-120b": (116.83, 116_829_156_672),
    "qwen3-next-80b-a3b": (80, 79_674_391_296),
    "moonlight-16b-a3b": (16, 15_960_110_208),
    "kempner-13b": (14.84, 14_840_386_560),
    "bloom-176b": (176, 176_247_228_416),
    "qwen3.5-35b-a3b": (35, 34_660_610_688),
    "qwen3.5-122b-a10b": (122, 122_111_526_912),
    "qwen3.5-397b-a17b": (397, 396_346_350_336),
    "qwen3.5-27b": (27, 26_895_998_464),
    "qwen3-coder-480b-a35b": (480, 480_154_875_392),
    "qwen3-vl-4b": (4.0, 4_022_468_096),
    "qwen3-vl-8b": (8.2, 8_190_735_360),
    "qwen3-vl-30b-a3b": (30.5, 30_532_122_624),
    "glm-4.5-air": (106, 106_852_251_264),
    "glm-4.7": (353, 352_797_829_024),
    "glm-4.7-flash": (30, 29_943_393_920),
    "glm-5": (744, 743_911_218_432),
    "kimi-k2": (1026, 1_026_408_232_448),
    "kimi-k2.5": (1026, 1_026_408_232_448),
    "minimax-m2.7": (229, 228_689_764_864),
    "deepseek-v3.2": (671, 671_877_944_064),
    "deepseek-v4-flash": (284, 284_332_241_239),
    "deepseek-v4-pro": (1573, 1_572_997_202_915),
    "nemotron-3-nano-30b-a3b": (31.6, 31_577_940_288),
    "nemotron-3-super-120b-a12b": (120, 120_668_707_840),
    "nemotron-h-56b": (56, 56_324_350_464),
    "gemma-3-12b": (11.8, 11_766_034_176),
    "gemma-4-26b-a4b": (25.2, 25_233_141_760),
    "llama-4-scout": (108, 107_769_861_120),
    "llama-4-maverick": (400, 400_711_848_960),
    "gpt-oss-20b": (20.91, 20_914_757_184),
    "mixtral-8x22b": (141, 140_620_634_112),
    "mimo-7b": (7.62, 7_622_619_136),
    "mimo-v2-flash": (309, 308_778_780_864),
    "phi-4": (14.7, 14_659_507_200),
    "smollm3-3b": (3.08, 3_075_098_624),
    "gemma-3-4b": (3.88, 3_880_263_168),
    "gemma-3-27b": (27.0, 27_009_346_304),
    "olmo-3-7b": (7, 7_298_011_136),
    "olmo-3-32b": (32, 32_233_522_176),
    "ministral-3-3b": (3.4, 3_429_006_336),
    "ministral-3-8b": (8.4, 8_489_553_920),
    "ministral-3-14b": (13.5, 13_506_073_600),
}
"""Billions as the model card prints them (the R1 distillations and Llama: as the hub does), and the values in
the checkpoint's safetensors files. DeepSeek-V3: without the module for multi-token prediction, which makes it
685 billion on the hub, and with the router's biases. Moonlight's, KempnerForge's and Qwen3-Next's last digits are computed
(the latter's without multi-token prediction). BLOOM: of
the gated MLP that stands for its plain one; its checkpoint has 176,247,271,424. Language models alone: cards count
vision towers too (Gemma 3, Llama 4), and multi-token prediction (GLM-4.7, which prints 355). The last digits of models
from Qwen3.5 on are those of transformers' own model (5.24.0)."""
NON_EMBEDDING = {
    "qwen2.5-0.5b": 0.36,
    "qwen2.5-1.5b": 1.31,
    "qwen2.5-3b": 2.77,
    "qwen2.5-7b": 6.53,
    "qwen2.5-14b": 13.1,
    "qwen2.5-32b": 31.0,
    "qwen2.5-72b": 70.0,
    "qwen3-0.6b": 0.44,
    "qwen3-1.7b": 1.4,
    "qwen3-4b": 3.6,
    "qwen3-8b": 6.95,
    "qwen3-14b": 13.2,
    "qwen3-32b": 31.2,
    "qwen3-30b-a3b": 29.9,
    "qwen3-235b-a22b": 234,
    "moonlight-16b-a3b": 15.29,
    "qwen3-next-80b-a3b": 79,
    "gpt-oss-120b": 115.67,
}
"""Billions without embedding tables, as the model card prints them."""


def shape(name: str) -> ModelShape:
    return load_model(ModelConfig(name=name))


def test_every_model_has_its_published_number_of_parameters() -> None:
    names = {path.stem for path in (PROFILES / "models").glob("*.toml")}
    assert names == PUBLISHED.keys()
    assert {name: shape(name).num_parameters for name in names} == {
        name: count for name, (_, count) in PUBLISHED.items()
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_on_the_model_card_is_the_rounded_one(name: str) -> None:
    """Cards round or cut off after the last digit; that of Qwen2.5-32B prints 32.5 for 32.76 (0.8 % off)."""
    printed, count = PUBLISHED[name][0], shape(name).num_parameters / 1e9
    decimals = len(str(printed).partition(".")[2])
    assert abs(printed - count) < (0.27 if name == "qwen2.5-32b" else 10.0**-decimals)


@pytest.mark.parametrize(("name", "printed"), NON_EMBEDDING.items())
def test_the_count_without_embeddings_is_that_of_the_model_card(name: str, printed: float) -> None:
    """Within 1 %: the cards print two or three digits, and round the larger Qwen2.5 generously."""
    model = shape(name)
    num_tables = 1 if model.has_tied_embeddings else 2
    count = model.num_parameters - num_tables * model.num_embedding_parameters
    assert count / 1e9 == pytest.approx(printed, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "printed", "counts_input"),
    [
        ("qwen3-30b-a3b", 3.3, True),
        ("qwen3-235b-a22b", 22, True),
        ("deepseek-v3", 36.6, False),
        ("gpt-oss-120b", 5.13, False),
    ],
)
def test_a_token_activates_as_many_parameters_as_the_model_card_says(
    name: str, printed: float, counts_input: bool
) -> None:
    """Within 2 %. Qwen counts both embedding tables, DeepSeek (36.6, printed as 37) the output head only."""
    model = shape(name)
    count = model.num_active_parameters + counts_input * model.num_embedding_parameters
    assert count / 1e9 == pytest.approx(printed, rel=2e-2)


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


# GPUs ----------------------------------------------------------------------------------------------


def test_an_eight_gpu_machine_of_h800_costs_as_much_as_2_85_of_h20() -> None:
    assert load_gpu("h800").price / load_gpu("h20").price == pytest.approx(2.85)


@pytest.mark.parametrize("name", ["h20", "h20-3e", "h100", "h200", "h800"])
def test_a_gpu_that_multiplies_fp8_does_it_twice_as_fast_as_bf16(name: str) -> None:
    flops = load_gpu(name).flops
    assert flops["fp8"] == pytest.approx(2 * flops["bfloat16"])


@pytest.mark.parametrize("name", ["a100", "cpu"])
def test_a_gpu_without_units_for_fp8_names_no_peak(name: str) -> None:
    assert "fp8" not in load_gpu(name).flops


def test_a_gpu_of_more_memory_shares_its_sibling_s_compute() -> None:
    for small, large in (("h20", "h20-3e"), ("h100", "h200")):
        assert load_gpu(small).flops == load_gpu(large).flops
        assert load_gpu(large).memory_bandwidth > load_gpu(small).memory_bandwidth
        assert load_gpu(large).price > load_gpu(small).price


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('memory = "97871 MiB"', 'memory = "0 GB"', "memory must be positive and finite, got 0.0"),
        ('nvlink = "450 GB/s"', 'nvlink = "1e999 GB/s"', r"'1e999 GB/s' is more than .*nvlink"),
        ("price = 1.85", "price = 0", "price must be positive and finite, got 0"),
        ("price = 1.85", "price = -1.85", "price must be positive and finite, got -1.85"),
        ("price = 1.85", "price = nan", "price must be positive and finite, got nan"),
        ("fp8 = 2.96e+14", "fp8 = 0", "flops.fp8 must be positive and finite, got 0"),
        ("fp8 = 2.96e+14", "fp8 = inf", "flops.fp8 must be positive and finite, got inf"),
        ("fp8 = 2.96e+14", "fp9 = 1e14", "flops.fp9 is not a known dtype; known: bfloat16"),
        ('"2 ms"', '"0 ms"', r"step_overhead must be .*, got 0.0 - at `\$.roofline`"),
        ("= 0.40", "= 1.4", "training_efficiency must be a share of the peak, at most 1, got 1.4"),
        ("= 0.40", "= -0.4", "training_efficiency must be positive and finite, got -0.4"),
        ("date =", "dat =", "unknown field `dat`"),
        ("[flops]", "[flops", "Expected"),
    ],
)
def test_a_figure_that_no_gpu_has_is_refused_by_file_and_key(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_changed("gpus", "h20", old, new, tmp_path)
    monkeypatch.setattr("streamrl.hardware.profiles.PROFILES", tmp_path)
    with pytest.raises(ValueError, match=rf"gpus.h20\.toml: .*{message}"):
        load_gpu("h20")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size = 7168", "hidden_size = 0", "hidden_size must be positive .*, got 0"),
        ("vocab_size = 129280", "vocab_size = -1", "vocab_size must be positive .*, got -1"),
        ("num_experts = 256", "num_experts = 0", r"num_experts must be .* got 0 - at `\$.experts`"),
        ("num_shared_experts = 1", "num_shared_experts = -1", "num_shared_experts must be finite"),
        ("experts_per_token = 8", "experts_per_token = 257", "must be at most num_experts 256"),
        ("num_dense_layers = 3", "num_dense_layers = 62", "at most num_layers 61, got 62"),
        ("kv_lora_rank = 512", "kv_lora_rank = 0", r"kv_lora_rank .* got 0 - at `\$.latent`"),
        ("head_dim = 192", "head_dim = 128", "with latent attention num_kv_heads, head_dim"),
        ("v_head_dim = 128", "", "missing required field `v_head_dim`"),
    ],
)
def test_a_figure_that_no_model_has_is_refused_by_file_and_key(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_changed("models", "deepseek-v3", old, new, tmp_path)
    monkeypatch.setattr("streamrl.hardware.profiles.PROFILES", tmp_path)
    with pytest.raises(ValueError, match=rf"models.deepseek-v3\.toml: .*{message}"):
        shape("deepseek-v3")


def write_changed(folder: str, name: str, old: str, new: str, root: Path) -> None:
    """Copy a profile to another root, with one text in it replaced."""
    text = (PROFILES / folder / f"{name}.toml").read_text()
    assert old in text
    (root / folder).mkdir()
    (root / folder / f"{name}.toml").write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "closest"), [("h20e", "h20-3e"), ("H100", "h100"), ("a10", "a100"), ("xyz", "h800")]
)
def test_an_unknown_gpu_is_answered_with_the_closest_names(name: str, closest: str) -> None:
    with pytest.raises(
        ValueError, match=f"no profile '{name}' in profiles/gpus; there is .*{closest}"
    ):
        load_gpu(name)

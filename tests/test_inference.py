"""Decode steps and prefill passes composed of operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import PREFILL_CHUNK
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.operator_tables import read_table
from streamrl.hardware.profiles import PROFILES, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import PrefillCurve, compose_decode
from streamrl.sim.costs.experts import dispatched_experts_time
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import TERMS, load_engine
from tests.runs import small_run

ROLLOUTS = np.array([1.0, 16.0, 256.0])


def model(name: str = "qwen2.5-7b") -> ModelShape:
    return load_model(ModelConfig(name=name))


def shard(
    name: str = "qwen2.5-7b",
    gpu: str = "h800",
    tp: int = 1,
    ep: int = 1,
    engine: str = "vllm-0.11",
) -> Shard:
    return Shard(model(name), Kernels(gpu, "bfloat16"), tp, ep, load_engine(engine))


# Decode ------------------------------------------------------------------------------------------


def test_the_papers_decode_curve_is_met_within_ten_percent() -> None:
    measured = {1: 8.4, 2: 8.75, 4: 8.95, 8: 9.0, 16: 9.5, 32: 10.3}
    measured |= {64: 11.7, 128: 15.3, 256: 21.5, 512: 37.0}
    curve = compose_decode(shard(engine="streamrl"), 512, longest=20_400, capacity=1e6)
    for num_running, milliseconds in measured.items():
        seconds = curve.step_time(num_running, num_running * 1500)
        assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.1), num_running


def test_two_constants_are_fitted_to_the_papers_curve_and_no_more() -> None:
    constants = load_engine("streamrl").constants
    given = {name for name in TERMS if getattr(constants, name)}
    assert (given, constants.slowdown) == ({"layer", "request"}, 1.0)


def test_a_step_is_never_faster_than_the_datasheet() -> None:
    for gpu in ("h20", "h20-3e", "h800", "h100", "h200", "a100"):
        one = shard(gpu=gpu)
        curve = compose_decode(one, 256, longest=8192, capacity=5e5)
        for num_running in (1, 64, 256):
            flops, num_bytes = one.step_work(num_running, 2000)
            hardware = one.kernels.gpu
            least = max(flops / hardware.flops["bfloat16"], num_bytes / hardware.memory_bandwidth)
            assert curve.step_time(num_running, num_running * 2000) > least


def test_tensor_parallelism_splits_products_and_adds_collectives() -> None:
    alone, split = shard().products(ROLLOUTS), shard(tp=4).products(ROLLOUTS)
    assert (split.seconds < alone.seconds).all()
    assert (split.seconds > alone.seconds / 4).all()
    assert any("all_reduce" in source for source in split.sources)
    assert not any("all_reduce" in source for source in alone.sources)


def test_a_slower_nvlink_makes_tensor_parallelism_slower() -> None:
    big = np.array([4096.0])
    assert (
        shard(gpu="h800", tp=8).products(big).seconds
        > shard(gpu="h100", tp=8).products(big).seconds
    )


def test_a_mixture_reads_few_experts_for_few_rollouts() -> None:
    mixture, dense = shard("qwen3-30b-a3b"), shard("qwen2.5-32b", tp=2)
    few, many = mixture.products(np.array([1.0, 512.0])).seconds
    assert few < dense.products(np.array([1.0])).seconds[0]
    assert many > 2 * few
    whole = shard("qwen3-235b-a22b", tp=8).products(ROLLOUTS)
    experts = shard("qwen3-235b-a22b", tp=8, ep=8).products(ROLLOUTS)
    assert (experts.seconds != whole.seconds).any()


def test_latent_attention_has_a_table_of_its_own() -> None:
    attention = shard("deepseek-v3", "h800", tp=1).decode_attention(16, np.array([4096.0]))
    assert "latent_decode_attention" in attention.sources[0]
    assert attention.unmeasured[0] == 0


@pytest.mark.parametrize("gpu", ["b200", "b300", "gb200", "gb300", "l40s", "rtx-pro-6000", "h200"])
def test_gated_delta_nets_were_measured_with_an_engine(gpu: str) -> None:
    """Attention of Qwen3.5 is composed of tables; 45 of 60 layers of the 397B have a gated delta net."""
    one, prompts = shard("qwen3.5-397b-a17b", gpu, tp=8), np.array([1024.0])
    for found in (one.decode_attention(64, np.array([4096.0])), one.prefill_attention(4, prompts)):
        linear = [source for source in found.sources if source.startswith("linear_")]
        assert len(linear) == 1 and "sglang 0.5.14" in linear[0]
    table = read_table(PROFILES / "measured" / gpu / "linear_decode.sglang.bfloat16.csv")
    cell = table.seconds[table.rows[:, 0] == 8, table.columns == 1024]
    found = one.kernels.time("linear_decode", np.array([1024.0]), heads=8)
    assert found.seconds == pytest.approx(cell, rel=1e-9) and not found.unmeasured.any()


def test_kimi_delta_attention_has_tables_and_mamba_has_none() -> None:
    one = shard("qwen3-next-80b-a3b", "b200", tp=2)
    assert one.model.linear is not None
    kimi = replace(one.model.linear, kind="kimi-delta", num_key_heads=32)
    one = dataclasses.replace(one, model=replace(one.model, linear=kimi))
    sources = one.decode_attention(16, np.array([2048.0])).sources
    assert any(source.startswith("kimi_decode bfloat16 on NVIDIA B200") for source in sources)
    mamba = shard("nemotron-3-nano-30b-a3b", "b200").decode_attention(16, np.array([2048.0]))
    assert any("roofline" in source and "linear_decode" in source for source in mamba.sources)


def test_more_context_costs_more_in_proportion_once_reads_dominate() -> None:
    curve = compose_decode(shard("qwen2.5-32b", tp=2), 128, longest=20_000, capacity=1e6)
    short, long = (curve.step_time(64, 64 * context) for context in (4000, 16_000))
    assert long - short == pytest.approx(curve.per_context_token[64] * 64 * 12_000)
    exact = shard("qwen2.5-32b", tp=2).decode_attention(64, np.array([4000.0, 16_000.0])).seconds
    assert long - short == pytest.approx(exact[1] - exact[0], rel=0.1)


def test_a_gpu_without_tables_is_unmeasured_throughout() -> None:
    curve = compose_decode(Shard(model(), Kernels("cpu", "float32")), 8, longest=2048, capacity=1e5)
    assert curve.provenance.shares == {"roofline": 1.0}
    assert curve.provenance.tier == "roofline"


def test_a_measured_gpu_is_composed_for_the_most_part_and_says_of_what() -> None:
    curve = compose_decode(shard(gpu="h20"), 256, longest=20_000, capacity=1e6)
    assert curve.provenance.shares["composed"] > 0.8
    assert sum(curve.provenance.shares.values()) == pytest.approx(1.0)
    sources = " ".join(curve.provenance.sources)
    assert "flashinfer" in sources and "H20-3e" in sources and "overheads of vLLM" in sources


def test_another_backends_tables_can_be_asked_for() -> None:
    own = Shard(model(), Kernels("h20-3e", "bfloat16"))
    slow = Shard(model(), Kernels("h20-3e", "bfloat16", "sglang"))
    contexts = np.array([8192.0])
    ratio = (
        slow.decode_attention(128, contexts).seconds / own.decode_attention(128, contexts).seconds
    )
    assert ratio > 2  # that version reads keys and values at a third of the others' speed


def test_a_run_file_chooses_the_backend_whose_tables_count() -> None:
    changes: dict[str, Any] = {"cluster.pools.far": {"gpu": "h20-3e"}, "rollout.max_running": 64}
    changes["rollout.max_tokens"] = 20_000
    own, slow = (
        Costs.load(small_run({**changes, **more})) for more in ({}, {"costs.backend": "sglang"})
    )
    assert "sglang" not in " ".join(s for s in own.decode.provenance.sources if "attention" in s)
    assert slow.decode.per_context_token[64] > 2 * own.decode.per_context_token[64]


def test_an_unknown_backend_names_those_that_were_measured() -> None:
    with pytest.raises(ValueError, match=r"costs\.backend: nothing of 'trt' .* h20-3e; there is "):
        Kernels("h20-3e", "bfloat16", "trt")


def test_a_dtype_that_the_hardware_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A100 .* does not compute in fp8"):
        Kernels("a100", "fp8").time("gemm", ROLLOUTS, n=1024, k=1024)


def test_a_different_memory_bandwidth_shows_where_memory_binds() -> None:
    h20, h20_3e = shard(gpu="h20"), shard(gpu="h20-3e")
    few = h20.products(np.array([1.0])).seconds / h20_3e.products(np.array([1.0])).seconds
    many = h20.products(np.array([4096.0])).seconds / h20_3e.products(np.array([4096.0])).seconds
    assert few == pytest.approx(4.8 / 4.0, rel=0.02)
    assert many == pytest.approx(1.0, rel=0.05)


# Prefill -----------------------------------------------------------------------------------------


def test_a_prefill_beside_decoding_costs_what_it_adds() -> None:
    mixed = PrefillCurve(shard(), 256, is_mixed=True)
    alone = PrefillCurve(shard(), 256, is_mixed=False)
    tokens, pairs = 64, 64 * 32.0
    assert mixed.time(tokens, pairs, 64) < 0.3 * alone.time(tokens, pairs, 64)
    assert mixed.time(tokens, pairs, 0) == alone.time(tokens, pairs, 64)


def test_long_prefills_go_in_chunks_and_take_seconds_in_proportion() -> None:
    curve = PrefillCurve(shard(), 256, is_mixed=True)
    one, four = (curve.time(n * PREFILL_CHUNK, 0.0, 0) for n in (1, 4))
    assert four == pytest.approx(4 * one)
    assert curve.time(PREFILL_CHUNK + 1, 0.0, 0) > one


def test_prefill_comes_near_the_gpus_peak_for_many_tokens() -> None:
    curve = PrefillCurve(shard(), 256, is_mixed=True)
    flops = model().forward_flops(PREFILL_CHUNK, 0)
    mfu = flops / curve.time(PREFILL_CHUNK, 0.0, 0) / 989.5e12
    assert 0.4 < mfu < 0.9


def test_attention_of_a_prefill_grows_with_the_pairs() -> None:
    curve = PrefillCurve(shard(), 256, is_mixed=True)
    length = 4096
    seconds = [curve.time(length, share * length * length / 2, 0) for share in (0.0, 1.0)]
    assert seconds[1] > seconds[0] > 0


def test_heads_of_another_width_count_in_proportion() -> None:
    narrow = msgspec.structs.replace(model(), num_heads=56, num_kv_heads=8, head_dim=64)
    contexts = np.array([4096.0, 16_384.0])
    wide_time = Shard(model(), Kernels("h800", "bfloat16")).decode_attention(64, contexts).seconds
    narrow_time = Shard(narrow, Kernels("h800", "bfloat16")).decode_attention(64, contexts).seconds
    assert narrow_time == pytest.approx(wide_time)


# Formats of mixtures ------------------------------------------------------------------------------------


def products_of(name: str, gpu: str, dtype: str, tp: int = 8) -> float:
    some = Shard(load_model(ModelConfig(name=name)), Kernels(gpu, dtype), tp)
    return float(some._all_projections(np.array([16.0])).seconds[0])


def test_mixtures_in_four_bits_keep_attention_in_sixteen() -> None:
    for name in ("qwen3-235b-a22b", "deepseek-v3"):
        assert products_of(name, "b200", "nvfp4") == products_of(name, "b200", "bfloat16")
        assert products_of(name, "b200", "fp8") != products_of(name, "b200", "bfloat16")
    assert products_of("qwen3-32b", "b200", "nvfp4") != products_of("qwen3-32b", "b200", "bfloat16")


def test_products_around_latent_attention_are_those_of_a_measured_module() -> None:
    model = load_model(ModelConfig(name="deepseek-v3"))
    other = msgspec.structs.replace(model, hidden_size=6144)
    found, apart = (
        Shard(one, Kernels("h200", "fp8"), 8)._all_projections(np.array([16.0, 4096.0]))
        for one in (model, other)
    )
    assert any("latent_projections" in source for source in found.sources)
    assert not any("latent_projections" in source for source in apart.sources)
    few = Kernels("h200", "fp8").time("latent_projections", np.array([16.0]), heads=16.0)
    assert found.seconds[0] == pytest.approx(61 * few.seconds[0])


def test_a_norm_over_all_heads_takes_one_more_all_reduce() -> None:
    model = load_model(ModelConfig(name="minimax-m2.7"))
    without = msgspec.structs.replace(model, qk_norm_spans_heads=False)
    kernels, tokens = Kernels("b200", "fp8"), np.array([16.0])
    both = [Shard(one, kernels, 4).products(tokens).seconds[0] for one in (model, without)]
    one = kernels.time("all_reduce", tokens * 8, gpus=4).seconds[0]
    assert both[0] - both[1] == pytest.approx(62 * one)
    alone = [Shard(one, kernels).products(tokens).seconds[0] for one in (model, without)]
    assert alone[0] == alone[1]


def test_products_after_attention_and_activations_quantise_their_inputs_in_nvfp4() -> None:
    shard, tokens = Shard(model("qwen3-32b"), Kernels("b200", "nvfp4")), np.array([16.0])
    size = {"n": 5120.0, "k": 25600.0}
    after = shard._linear(tokens, **size, follows_norm=False).seconds[0]
    assert after > shard._linear(tokens, **size).seconds[0]
    wide = Shard(model("qwen3-32b"), Kernels("b200", "bfloat16"))
    assert wide._linear(tokens, **size, follows_norm=False) == wide._linear(tokens, **size)


def test_experts_on_many_ranks_are_deepgemms_where_they_were_measured() -> None:
    experts = load_model(ModelConfig(name="deepseek-v3")).experts
    assert experts is not None
    tokens = np.array([64 * 64.0, 64 * 1024.0])
    found = dispatched_experts_time(Kernels("h100", "fp8"), tokens, experts, 7168, 64)
    assert found.seconds[0] < 120e-6 < 1e-3 < found.seconds[1]  # masked, then contiguous
    assert {source.split()[0] for source in found.sources} == {"masked_moe", "contiguous_moe"}
    elsewhere = dispatched_experts_time(Kernels("h800", "fp8"), tokens, experts, 7168, 64)
    assert not any("masked" in source for source in elsewhere.sources)

"""Overheads of inference engines, fitted to published steps: what they reach, and what they may not do."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.fit_decode import FITS, fit, held_out_errors, left_out, rows_of
from streamrl.cli.main import app
from streamrl.hardware.model_shape import Experts
from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.units import Duration
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.experts import num_experts_read
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import TERMS, Overheads, decode_errors, load_engine
from streamrl.sim.fidelity.published_rows import Row, summarise
from streamrl.sim.fidelity.serving import ServingRow, predict, read_serving, serving_rows
from tests.command_line import streamrl
from tests.runs import small_run

RUNNER = CliRunner()
ENGINES = sorted(path.stem for path in (PROFILES / "engines").glob("*.toml"))
NEWEST = CostsConfig().engine


def shard(engine: str = NEWEST, model: str = "qwen3-8b", gpu: str = "h100", tp: int = 1) -> Shard:
    shape = load_model(ModelConfig(name=model))
    return Shard(shape, Kernels(gpu, "bfloat16"), tp, engine=load_engine(engine))


def steps(replica: Shard, batches: list[int], context: float = 2000.0) -> list[float]:
    curve = compose_decode(replica, max(batches), longest=2 * context, capacity=1e7)
    return [curve.step_time(batch, batch * context) for batch in batches]


# What the profiles say ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_where_it_is_from_and_how_well_it_does(engine: str) -> None:
    profile = load_engine(engine)
    assert profile.source and profile.licence and profile.fitted_on
    assert profile.rows > 5 or (profile.rows == 0 and profile.other_versions)
    assert set(profile.spread) <= {*TERMS, "slowdown"}
    assert (profile.held_out is not None) == bool(profile.left_out)
    for term, (least, most) in profile.spread.items():
        fitted = [getattr(constants, term) for constants in profile.left_out.values()]
        assert min(fitted) == pytest.approx(least, rel=1e-3, abs=1e-12)
        assert max(fitted) == pytest.approx(most, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("engine", [NEWEST, "transformers-4.51"])
def test_a_fit_without_a_shape_finds_what_the_profile_says(engine: str) -> None:
    shape = sorted(load_engine(engine).left_out)[-1]
    others = [row for row in rows_of(engine) if row.model != shape]
    assert others and len(others) < len(rows_of(engine))
    found, written = fit(engine, others), load_engine(engine).left_out[shape]
    for term in TERMS:
        expected = pytest.approx(getattr(written, term), rel=1e-3, abs=1e-12)
        assert getattr(found, term) == expected, term


def test_the_errors_that_a_profile_states_are_those_of_its_rows_predicted_without_their_shape() -> (
    None
):
    profile = load_engine(NEWEST)
    errors = [predict(row, profile.left_out[row.model]) / row.value - 1 for row in rows_of(NEWEST)]
    assert profile.held_out is not None
    assert np.median(np.abs(errors)) == pytest.approx(profile.held_out.median, abs=5e-4)
    assert np.quantile(np.abs(errors), 0.9) == pytest.approx(profile.held_out.p90, abs=5e-4)
    assert np.median(errors) == pytest.approx(profile.held_out.bias, abs=5e-4)
    assert profile.held_out.median < 0.08
    assert profile.held_out.p90 < 0.20
    assert abs(profile.held_out.bias) < 0.03


def test_steps_in_fp8_have_an_error_of_their_own_where_they_were_published() -> None:
    profile = load_engine(NEWEST)
    found = [row for row in read_serving() if row.engine == NEWEST and row.dtype == "fp8"]
    errors = [
        predict(row, profile.left_out.get(row.model, profile.constants)) / row.value - 1
        for row in found
        if row.kind == "step"
    ]
    stated = decode_errors(NEWEST, "h800", in_fp8=True)
    assert stated is profile.held_out_fp8 and stated is not None
    assert np.median(np.abs(errors)) == pytest.approx(stated.median, abs=5e-4)
    assert np.median(errors) == pytest.approx(stated.bias, abs=5e-4)
    assert decode_errors(NEWEST, "h20", in_fp8=True) is None


def test_all_published_models_of_one_config_are_left_out_together() -> None:
    shapes = {row.model for row in rows_of(NEWEST)}
    assert shapes == set(load_engine(NEWEST).left_out)
    with (PROFILES / "published" / "serving_mlenergy.csv").open() as file:
        lines = [line for line in file if not line.startswith("#")]
    tasks = {line["output"] for line in csv.DictReader(lines) if line["model"] == "qwen3-30b-a3b"}
    assert len(tasks) > 20  # chat, thinking and code: three published models


def test_rows_that_are_only_predicted_take_no_part_in_a_fit() -> None:
    kinds = {(row.kind, row.dtype) for row in rows_of(NEWEST)}
    assert kinds == {("step", "bfloat16")}
    assert {row.kind for row in read_serving() if row.engine == NEWEST} == {"step", "busy step"}


def test_no_row_is_predicted_by_constants_that_were_fitted_to_its_shape() -> None:
    for engine in FITS:
        fitted = {row.model for row in rows_of(engine)}
        assert len(fitted) > 1 or not FITS[engine].terms, engine
        assert fitted == set(load_engine(engine).left_out), engine


@pytest.mark.parametrize("engine", FITS)
def test_an_engine_answers_for_a_gpu_by_six_rows_or_more(engine: str) -> None:
    counted = Counter(row.gpu for row in rows_of(engine))
    assert load_engine(engine).gpus == sorted(gpu for gpu, num in counted.items() if num > 5)


# Log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize(("requests", "without", "returning"), [(1, 430, 407), (64, 18645, 13583)])
def test_returned_log_probabilities_slow_steps_as_published(
    requests: int, without: float, returning: float
) -> None:
    """Throughput of vLLM pull request 57442: tokens/s of Qwen2.5-0.5B on L20, with logprobs=0 and without."""
    constants = load_engine("vllm-0.11").constants
    found = constants.log_prob_step + requests * constants.log_prob_http
    assert found == pytest.approx(requests / returning - requests / without, rel=0.01)


def test_an_engine_returns_log_probabilities_where_the_loss_or_the_framework_wants_them() -> None:
    constants = load_engine("vllm-0.11").constants
    of_trainer = {"algorithm.old_log_probs": "trainer", "algorithm.correction": "none"}
    plain = Costs.load(small_run(of_trainer)).decode.base[4]
    slower = plain + constants.log_prob_step + 4 * constants.log_prob
    for changes in (
        {},
        {"algorithm.old_log_probs": "trainer", "algorithm.correction": "token-tis"},
        {**of_trainer, "framework.name": "nemo-rl"},
    ):
        assert Costs.load(small_run(changes)).decode.base[4] == pytest.approx(slower), changes
    behind_http = Costs.load(small_run({"framework.name": "prime-rl"})).decode.base[4]
    http = constants.log_prob_step + 4 * constants.log_prob_http
    assert (
        behind_http == pytest.approx(plain + http) and constants.log_prob_http > constants.log_prob
    )
    openrlhf = {**of_trainer, "framework.name": "openrlhf", "framework.optimizer_steps": 1}
    assert Costs.load(small_run(openrlhf)).decode.base[4] == pytest.approx(plain)


# Kernels of an engine -----------------------------------------------------------------------------


def with_choice(replica: Shard, **choices: Any) -> Shard:
    """The replica on an engine without overheads, of which only these kernels are known."""
    engine = msgspec.structs.replace(replica.engine, constants=Overheads(**choices))
    degrees = replica.tensor_parallel, replica.expert_parallel
    return Shard(replica.model, replica.kernels, *degrees, engine)


def in_fp8(model: str, tp: int = 1) -> Shard:
    shape = load_model(ModelConfig(name=model))
    return Shard(shape, Kernels("h100", "fp8"), tp, engine=load_engine(NEWEST))


def test_an_engine_sorts_logits_only_where_the_most_likely_tokens_are_sampled() -> None:
    plain, top_k, top_p = (
        Costs.load(small_run(keys)).decode.base[-1]
        for keys in ({}, {"rollout.top_k": 50}, {"rollout.top_p": 0.9})
    )
    assert plain < top_k == top_p
    assert load_engine().as_sampled(sorts=False, log_probs="none").constants.logit == 0


def test_a_host_that_schedules_while_the_gpu_waits_takes_as_long_as_published() -> None:
    constants = load_engine("vllm-0.9").constants
    assert 5e-3 < constants.step + 256 * constants.request < 6e-3  # vLLM issue 10634


def test_query_heads_that_each_read_their_cache_take_as_long_as_heads_that_share_none() -> None:
    bare = shard(model="llama-2-70b", tp=4)
    contexts = np.array([2048.0])
    apart = with_choice(bare, reads_cache_per_head=True).decode_attention(64, contexts).seconds
    alone = bare.kernels.time("decode_attention", contexts, heads=16, kv_heads=16, batch=64)
    assert apart == pytest.approx(80 * alone.seconds)
    assert apart > 4 * with_choice(bare).decode_attention(64, contexts).seconds
    plain = shard(model="llama-2-7b")
    once, same = (
        with_choice(plain, reads_cache_per_head=flag).decode_attention(64, contexts).seconds
        for flag in (False, True)
    )
    assert once == same


def test_an_engine_without_all_reduces_of_its_own_takes_those_of_nccl() -> None:
    for tp, layers in ((1, 0), (8, 80)):
        bare = shard(model="llama-2-70b", tp=tp)
        tokens = np.array([4.0])
        own, nccl = (
            msgspec.structs.replace(bare.engine, kernels=kernels)
            for kernels in ({}, {"all_reduce": "nccl"})
        )
        own, nccl = (replace(bare, engine=engine).products(tokens) for engine in (own, nccl))
        slower = 2 * layers * (reduced("nccl", tp) - reduced("vllm", tp)) if layers else 0.0
        assert nccl.seconds - own.seconds == pytest.approx(slower)
        assert bool(layers) == (slower > 0) == any("nccl 2." in source for source in nccl.sources)


def reduced(backend: str, tp: int) -> float:
    """Seconds of an all-reduce of 4 tokens of 8,192 channels."""
    message = np.array([4 * 8192 * 2.0])
    return float(
        Kernels("h100", "bfloat16", backend).time("all_reduce", message, gpus=tp).seconds[0]
    )


def test_inputs_of_fp8_products_are_quantised_in_kernels_of_their_own() -> None:
    bare, tokens = in_fp8("llama-3.1-8b"), np.array([8.0])
    fused, apart = (
        with_choice(bare, quantises_apart=flag).products(tokens).seconds for flag in (False, True)
    )
    widths = (4096.0, 4096.0, 4096.0, 14336.0)  # into attention, out of it, into the MLP, out of it
    quantise = sum(bare.kernels.time("quantise", tokens, k=width).seconds for width in widths)
    assert apart - fused == pytest.approx(32 * quantise)
    assert quantise > 4 * 2e-6  # a launch each
    wide = shard(model="llama-3.1-8b")
    assert with_choice(wide, quantises_apart=True).products(tokens).seconds == pytest.approx(
        with_choice(wide).products(tokens).seconds
    )


def test_padded_fp8_experts_cost_by_how_many_a_gpu_holds_rather_than_by_how_many_it_reads() -> None:
    few, many = np.array([1.0]), np.array([64.0])
    for bare, is_padded in (
        (in_fp8("qwen3-235b-a22b"), True),
        (shard(model="qwen3-235b-a22b"), False),
    ):
        plain, padded = (with_choice(bare, pads_experts=on) for on in ((), ("hopper",)))
        slower = [
            float((padded.products(n).seconds / plain.products(n).seconds)[0]) for n in (few, many)
        ]
        assert (slower[0] > 3 and 1 < slower[1] < slower[0]) if is_padded else slower == [1.0, 1.0]


@pytest.mark.parametrize("gpu", ["l40s", "rtx-4090", "rtx-pro-6000", "mi300x"])
def test_experts_are_not_padded_on_gpus_for_which_deepgemm_has_no_kernels(gpu: str) -> None:
    shape = load_model(ModelConfig(name="qwen3-30b-a3b"))
    narrow, wide = (Shard(shape, Kernels(gpu, dtype), 2) for dtype in ("fp8", "bfloat16"))
    one = np.array([1.0])
    assert narrow.products(one).seconds < 1.5 * wide.products(one).seconds
    assert not any("blocks of 128 rows" in source for source in narrow.products(one).sources)


def test_fp8_is_slower_than_bf16_for_a_large_mixture_at_few_rollouts_and_faster_at_many() -> None:
    shape = load_model(ModelConfig(name="qwen3-235b-a22b"))
    narrow, wide = (
        steps(Shard(shape, Kernels("h100", dtype), 8, 8), [8, 12, 32, 64, 128], 820.0)
        for dtype in ("fp8", "bfloat16")
    )
    slower = [low > high for low, high in zip(narrow, wide, strict=True)]
    assert slower == [
        True,
        True,
        False,
        False,
        False,
    ]  # published: 1.22 times at 8, 1.06 at 16, 0.87 at 32
    assert 1.1 < narrow[0] / wide[0] < 1.3
    for place, published in ((0, (24.7, 20.2)), (3, (34.7, 40.3))):  # ms at 8 and 64, ml-energy
        found = 1e3 * narrow[place], 1e3 * wide[place]
        assert found == pytest.approx(published, rel=0.15)


def test_rows_in_fp8_are_met_without_a_constant_of_theirs() -> None:
    errors = []
    for row in read_serving():
        if row.dtype == "fp8":
            engine = load_engine(row.engine)
            constants = engine.left_out.get(row.model, engine.constants)
            errors.append(predict(row, constants) / row.value - 1)
    assert len(errors) == 124
    assert np.median(np.abs(errors)) < 0.12 and abs(np.median(errors)) < 0.05


def test_a_shared_expert_that_is_fused_takes_no_products_of_its_own() -> None:
    shape, tokens = load_model(ModelConfig(name="deepseek-v3")), np.array([8.0])
    for experts, is_cheaper in ((1, True), (8, False)):
        bare = Shard(shape, Kernels("h200", "fp8"), 8, experts, load_engine("sglang-0.5"))
        apart, fused = (
            with_choice(bare, fuses_shared_experts=flag).products(tokens).seconds[0]
            for flag in (False, True)
        )
        alone = msgspec.structs.replace(
            shape, experts=msgspec.structs.replace(shape.experts, num_shared_experts=0)
        )
        routed = with_choice(Shard(alone, bare.kernels, 8, experts, bare.engine))
        assert fused >= routed.products(tokens).seconds[0]  # tables of one rank are read by tokens
        assert (fused < apart) == is_cheaper  # where GPUs hold whole experts, it stays apart


def test_an_engine_may_compose_latent_products_instead_of_another_engines_module() -> None:
    shape, tokens = load_model(ModelConfig(name="deepseek-v3")), np.array([8.0, 64.0])
    bare = Shard(shape, Kernels("h200", "fp8"), 8, engine=load_engine("sglang-0.5"))
    composed, module = (
        with_choice(bare, composes_latent=flag).products(tokens) for flag in (True, False)
    )
    assert bare.engine.constants.composes_latent
    assert (composed.seconds > module.seconds).all()
    assert any("latent_projections" in source for source in module.sources)
    assert not any("latent_projections" in source for source in composed.sources)


def test_a_dtype_may_have_a_table_of_its_own() -> None:
    shape: dict[str, float] = {"hidden": 4096, "intermediate": 1536, "topk": 8, "experts": 128}
    shape |= {"tensor_parallel": 1, "expert_parallel": 8}
    for dtype, kept, backend in (("bfloat16", "int4", "sglang"), ("bfloat16", "bfloat16", "vllm")):
        found = Kernels("h100", dtype, kept=kept).time("moe", np.array([16.0]), **shape)
        assert [f", {backend} " in source for source in found.sources] == [True]
    assert Kernels("h100", "fp8").backend("moe") == "vllm"
    assert Kernels("a100", "float16").backend("quantise") is None


# What a step may not do ---------------------------------------------------------------------------


def physical_rows() -> Iterator[tuple[ServingRow, Shard]]:
    for row in read_serving():
        if row.batch is not None and row.kind == "step":
            model = load_model(ModelConfig(name=row.model))
            kernels = Kernels(row.gpu, row.dtype)
            yield row, Shard(model, kernels, row.tensor_parallel, row.expert_parallel)


def test_no_step_is_faster_than_the_weights_and_caches_that_it_reads() -> None:
    bare = Overheads()
    for row, replica in physical_rows():
        assert row.batch is not None
        batch = max(1, int(row.batch))
        flops, num_bytes = replica.step_work(batch, int(row.context))
        gpu = replica.kernels.gpu
        least = max(flops / gpu.flops[row.dtype], num_bytes / gpu.memory_bandwidth)
        whole = msgspec.structs.replace(row, batch=float(batch))
        assert predict(whole, bare) * 1e-3 > least, row
        assert predict(whole, load_engine(row.engine).constants) * 1e-3 > least, row


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "tp"), [("qwen2.5-0.5b", 1), ("qwen3-30b-a3b", 1), ("llama-3.1-405b", 8)]
)
def test_a_step_is_bound_by_physics_at_every_batch_and_grows_with_batch_and_context(
    engine: str, model: str, tp: int
) -> None:
    replica = shard(engine, model, tp=tp)
    batches = [1, 2, 3, 8, 24, 64, 200, 512]
    short, long = (steps(replica, batches, context) for context in (1000.0, 4000.0))
    for batch, seconds, more in zip(batches, short, long, strict=True):
        _, num_bytes = replica.step_work(batch, 1000)
        assert seconds > num_bytes / 3.35e12
        assert more > seconds
    assert (np.diff(short) >= 0).all() and short[-1] > short[0]


def test_a_step_without_cuda_graphs_is_no_shorter_than_its_launches() -> None:
    eager, graphs = (steps(shard(name), [1])[0] for name in ("transformers-4.51", NEWEST))
    assert eager > 36 * 590e-6 > 2 * graphs
    slow = shard("transformers-4.51", "llama-3.1-70b", "h100", tp=1)
    launches = 80 * load_engine("transformers-4.51").constants.launch
    without = steps(shard("tensorrt-llm-1.0", "llama-3.1-70b"), [64])[0]
    assert without > launches
    assert steps(slow, [64])[0] == pytest.approx(without, rel=0.02)  # they hide behind kernels


def test_overheads_are_what_a_step_takes_on_top() -> None:
    bare = shard()
    constants = Overheads(
        step=Duration(1e-3),
        layer=Duration(1e-5),
        request=Duration(2e-5),
        logit=Duration(1e-10),
    )
    engine = msgspec.structs.replace(bare.engine, constants=constants)
    none = msgspec.structs.replace(bare.engine, constants=Overheads())
    with_, without = (
        steps(Shard(bare.model, bare.kernels, engine=some), [64])[0] for some in (engine, none)
    )
    assert with_ - without == pytest.approx(1e-3 + 36e-5 + 64 * (2e-5 + 151_936e-10))


def test_a_slower_engine_takes_its_kernels_as_many_times() -> None:
    bare = shard()
    none, slow = (
        msgspec.structs.replace(bare.engine, constants=Overheads(slowdown=factor))
        for factor in (1.0, 2.0)
    )
    once, twice = (
        steps(Shard(bare.model, bare.kernels, engine=some), [1, 64]) for some in (none, slow)
    )
    assert twice == pytest.approx([2 * seconds for seconds in once])


# Mixtures -----------------------------------------------------------------------------------------


def test_the_fullest_gpu_reads_more_experts_than_the_mean_and_no_more_than_it_has() -> None:
    experts = Experts(num_experts=128, experts_per_token=8, intermediate_size=768)
    tokens = np.array([1.0, 16.0, 64.0, 4096.0])
    alone = num_experts_read(tokens, experts)
    assert alone == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens))
    shared = num_experts_read(tokens, experts, 8)
    assert (shared[:3] > alone[:3] / 8).all() and (shared <= 16).all()
    assert shared[-1] == pytest.approx(16)


def test_a_few_tokens_cost_a_mixture_the_experts_that_they_choose() -> None:
    replica = shard(model="qwen3-30b-a3b")
    few, some, many = replica.products(np.array([16.0, 64.0, 512.0])).seconds
    assert 0.60 < few / some < 0.80  # 82 and 126 of 128 experts
    assert many < 1.4 * some


# The run file -------------------------------------------------------------------------------------


def test_a_run_chooses_the_engine_and_the_newest_fitted_vllm_is_the_default() -> None:
    releases = {
        name: int(name.rpartition(".")[2])
        for name in ENGINES
        if name.startswith("vllm-0.") and load_engine(name).left_out
    }
    assert CostsConfig().engine == max(releases, key=releases.__getitem__)
    newest, papers = (
        Costs.load(small_run({**changes, "rollout.max_running": 64}))
        for changes in ({}, {"costs.engine": "streamrl"})
    )
    assert papers.decode.base[1] > newest.decode.base[1]
    assert any("vLLM 0.11 and 0.12" in source for source in newest.decode.provenance.sources)
    assert any("Figure 6" in source for source in papers.decode.provenance.sources)


def test_an_unknown_engine_is_refused_in_a_line_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"costs\.engine: no engine 'vllm' in") as caught:
        Costs.load(small_run({"costs.engine": "vllm"}))
    assert all(name in str(caught.value) for name in ENGINES)
    assert "vllm-0.11 (vLLM 0.11 and 0.12)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_refuses_an_unknown_engine_with_exit_status_2() -> None:
    example = Path(__file__).parents[1] / "examples" / "h20-h800.toml"
    done = streamrl("simulate", example, "--set", "costs.engine=vllm-9")
    assert done.returncode == 2
    line = " ".join(done.stderr.split())
    assert "costs.engine: no engine 'vllm-9'" in line and "tensorrt-llm-1.0" in line


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return serving_rows()


def test_every_row_has_its_source_and_a_model_that_is_a_profile(rows: list[Row]) -> None:
    assert len(rows) == len(read_serving()) > 400
    assert all(row.source and load_model(ModelConfig(name=row.shape)) for row in rows)
    assert all(row.predicted[0] <= row.predicted[1] for row in rows)
    assert len({row.group for row in rows}) > 10


def test_rows_that_were_fitted_are_judged_without_their_shape(rows: list[Row]) -> None:
    fitted = [row for row in rows if row.is_fitted]
    assert fitted and all(row.left_out is not None for row in fitted)
    assert any(row.left_out != row.predicted[0] for row in fitted)


def test_steps_of_vllm_are_met_within_eight_percent(rows: list[Row]) -> None:
    group = "vllm 0.11.1 on h100 in bfloat16: step"
    found = summarise([row for row in rows if row.group == group])
    assert (found.median < 0.08, found.p90 < 0.20, abs(found.bias) < 0.03) == (True,) * 3


def test_fp8_steps_of_vllm_are_met_without_a_constant_of_their_own(rows: list[Row]) -> None:
    group = "vllm 0.11.1 on h100 in fp8: step"
    found = summarise([row for row in rows if row.group == group])
    assert found.rows > 30
    assert (found.median < 0.13, found.p90 < 0.24) == (True, True)


def test_all_rows_are_met_within_eight_percent_and_nine_in_ten_within_twenty(
    rows: list[Row],
) -> None:
    found = summarise(rows)
    assert (found.median < 0.08, found.p90 < 0.20, abs(found.bias) < 0.03) == (True,) * 3


def test_a_row_says_where_its_version_is_not_known(rows: list[Row]) -> None:
    unknown = [row for row in rows if "not stated" in row.group]
    assert unknown and all("version not stated: constants of" in row.note for row in unknown)
    assert not any("version not stated" in row.note for row in rows if row not in unknown)


def test_full_load_is_met_without_a_batch_being_published(rows: list[Row]) -> None:
    found = summarise([row for row in rows if row.unit == "tokens/s"])
    assert found.rows > 60
    assert (found.median < 0.08, found.p90 < 0.20) == (True, True)


def test_validate_serving_prints_groups_and_on_demand_rows() -> None:
    done = RUNNER.invoke(app, ["validate", "serving"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "vllm 0.11.1 on h100 in bfloat16: step" in done.output
    assert "Qwen3-8B, h100" not in done.output
    more = RUNNER.invoke(app, ["validate", "serving", "--rows"], env={"COLUMNS": "200"})
    assert "Qwen3-8B, h100 TP1, batch 7.97" in more.output
    assert "batch not published" in more.output


def test_validate_serving_gives_scripts_every_row_and_the_errors_of_each_group() -> None:
    done = RUNNER.invoke(app, ["validate", "serving", "--json"])
    found: dict[str, Any] = json.loads(done.output)["serving"]
    assert len(found["rows"]) == found["rows_total"] == len(read_serving())
    one = found["rows"][0]
    assert {"name", "group", "published", "predicted", "error", "source"} <= one.keys()
    assert sum(group["rows"] for group in found["groups"].values()) == len(found["rows"])
    assert 0 < found["median"] < found["p90"]


def test_the_memory_of_the_largest_published_batch_is_there() -> None:
    """Weights and the assumed context of every published step fit the GPU that it ran on."""
    for row, replica in physical_rows():
        assert row.batch is not None
        weights = replica.model.shard_parameters(row.tensor_parallel, row.expert_parallel)
        weights *= 1 if row.dtype == "fp8" else 2
        cache = replica.model.shard_kv_bytes_per_token("bfloat16", row.tensor_parallel)
        taken = weights + cache * row.batch * row.context
        assert taken < load_gpu(row.gpu).usable_memory, row


def test_constants_of_left_out_shapes_are_shipped_as_found() -> None:
    errors = held_out_errors("transformers-4.51")
    held_out = load_engine("transformers-4.51").held_out
    assert held_out is not None
    assert np.median(np.abs(errors)) == pytest.approx(held_out.median, abs=1e-4)
    assert left_out("transformers-4.51").keys() == load_engine("transformers-4.51").left_out.keys()
    assert set(FITS) | {"streamrl"} == set(ENGINES)


# Versions -----------------------------------------------------------------------------------------------


def test_another_version_of_an_engine_has_at_least_the_error_of_its_neighbours() -> None:
    profile = load_engine(NEWEST)
    assert profile.held_out is not None and profile.other_versions is not None
    assert profile.is_of("0.11.1") and profile.is_of("0.12") and not profile.is_of("0.1")
    for version, expected in (
        (None, profile.held_out),
        ("0.11.2", profile.held_out),
        ("0.24.0", profile.other_versions),
    ):
        assert decode_errors(NEWEST, "h100", version=version) == expected
    changes = {"cluster.pools.far.gpu": "h100", "costs.engine": NEWEST}
    own, other = (
        Costs.load(small_run({**changes, "costs.engine_version": version})).decode.provenance
        for version in ("0.11.1", "0.24.0")
    )
    assert other.error is not None and own.error is not None and other.error > own.error
    assert any("another version" in source for source in other.sources)


def test_an_engine_without_fitted_rows_has_the_errors_of_served_points() -> None:
    profile = load_engine("vllm-0.19")
    assert profile.held_out is None and profile.served["b200"].median < 0.12
    assert decode_errors("vllm-0.19", "b200") == profile.served["b200"]
    assert decode_errors("tensorrt-llm-1.0", "h100") == load_engine("tensorrt-llm-1.0").held_out


def test_overheads_of_tensorrt_grow_with_steps_layers_and_requests() -> None:
    constants = load_engine("tensorrt-llm-1.0").constants
    assert min(constants.step, constants.layer, constants.request) > 0

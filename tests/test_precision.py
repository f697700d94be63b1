"""Formats of weights, KV cache and training apart: bytes, seconds, weight sync, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.doctor.invalid_keys import fix_profile_names
from streamrl.hardware.memory import kv_capacity, replica_memory, trainer_memory, weight_bytes
from streamrl.hardware.precision import (
    FORMATS,
    precision_of,
    quantised_bytes,
    rollout_precision,
    shard_weight_bytes,
    width_of,
)
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import check_precision, resolve
from streamrl.hardware.side_memory import replica_side
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.sim.costs.colocation import PhaseChange
from streamrl.sim.costs.costs import Costs, kernels_of
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.training import TrainingCosts, rates_of
from streamrl.sim.costs.weight_sync import SyncCosts
from streamrl.sim.fidelity.training_steps import is_fitted, read_steps, step_time
from streamrl.targets.execute_limits import check_back_ends
from tests.command_line import streamrl
from tests.patients import local_table
from tests.runs import small_run

FP8 = {"rollout.dtype": "fp8"}
WIDE = {"rollout.dtype": None, "rollout.weight_only": False}
SEVEN = load_model(ModelConfig(name="qwen2.5-7b"))
FP8_REPLICA = precision_of("fp8", None, "bfloat16")


def replica(model: str, gpu: str, dtype: str, tp: int = 1, cache: str | None = None) -> Shard:
    return Shard(
        load_model(ModelConfig(name=model)),
        kernels_of(gpu, precision_of(dtype, cache, "bfloat16")),
        tp,
    )


def step(shard: Shard, batch: int, context: float = 2000.0) -> float:
    return compose_decode(shard, batch, 2 * context, 1e8).step_time(batch, batch * context)


# Bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("bfloat16", 2.0),
        ("fp8", 1 + 4 / 128**2),
        ("mxfp8", 1 + 1 / 32),
        ("int8", 1 + 4 / 1000),
        ("int4", 1 / 2 + 2.5 / 128),
        ("nvfp4", 1 / 2 + 1 / 16),
    ],
)
def test_a_value_takes_its_bits_and_its_share_of_a_scale(dtype: str, width: float) -> None:
    assert width_of(dtype, row=1000) == pytest.approx(width)


def test_linear_layers_are_narrow_while_tables_norms_and_routers_stay_wide() -> None:
    model = load_model(ModelConfig(name="qwen3-30b-a3b"))
    router = 128 * 2048
    wide = 2 * 151936 * 2048 + 48 * (2 * 2048 + router) + 2048
    assert model.num_parameters - model.linear_parameters() == wide
    found = shard_weight_bytes(model, "int4", "bfloat16")
    assert found == pytest.approx(2 * wide + width_of("int4") * model.linear_parameters())
    assert shard_weight_bytes(model, "bfloat16", "bfloat16") == 2 * model.num_parameters


@pytest.mark.parametrize("changes", [FP8, {"rollout.dtype": "int4"}, {"rollout.kv_dtype": "fp8"}])
def test_what_a_format_saves_becomes_kv_cache_and_the_doctor_counts_the_same(
    changes: dict[str, Any],
) -> None:
    plain, narrow = small_run(), small_run(changes)
    saved = (
        replica_memory(resolve(plain).replica)["weights"]
        - replica_memory(resolve(narrow).replica)["weights"]
    )
    per_token = SEVEN.kv_bytes_per_token("fp8" if "rollout.kv_dtype" in changes else "bfloat16")
    room = kv_capacity(resolve(plain).replica) * SEVEN.kv_bytes_per_token("bfloat16") + saved
    assert kv_capacity(resolve(narrow).replica) == pytest.approx(room / per_token, rel=1e-4)
    assert kv_capacity(resolve(narrow).replica) > kv_capacity(resolve(plain).replica)
    side = replica_side(resolve(narrow).replica).parts
    assert {key: replica_memory(resolve(narrow).replica)[key] for key in side} == side


def test_a_model_that_fits_two_gpus_in_fp8_alone_is_refused_in_16_bits() -> None:
    changes = {"model.name": "qwen2.5-72b", "rollout.pool": "near", "rollout.tensor_parallel": 2}
    changes |= {"cluster.pools.near.nodes": 2, "rollout.max_tokens": 40_000}
    with pytest.raises(RunError, match=r"145\.4 GB of weights"):
        kv_capacity(resolve(small_run(changes)).replica)
    assert kv_capacity(resolve(small_run({**changes, **FP8})).replica) > 100_000


# Seconds ------------------------------------------------------------------------------------------


def test_int4_weights_are_read_fast_at_few_rollouts_and_computed_in_16_bits_at_many() -> None:
    narrow, wide = (replica("qwen2.5-32b", "h100", dtype) for dtype in ("int4", "bfloat16"))
    assert 2 < step(wide, 1, 500) / step(narrow, 1, 500) < 4
    ratio = narrow.products(np.array([4096.0])).seconds / wide.products(np.array([4096.0])).seconds
    assert 0.9 < ratio[0] < 1.6
    few = narrow.products(np.array([1.0]))
    assert few.unmeasured[0] == pytest.approx(few.seconds[0], rel=0.01)
    assert any("gemm of int4 weights in bfloat16" in source for source in few.sources)
    _, read = narrow.step_work(1, 0)
    assert few.seconds[0] > 0.9 * read / 3.35e12


def test_experts_that_are_narrow_in_memory_alone_are_as_measured_or_read_as_little() -> None:
    shape = {"hidden": 4096.0, "intermediate": 1536.0, "topk": 8.0, "experts": 128.0}
    shape |= {"tensor_parallel": 1.0, "expert_parallel": 1.0}
    read = 128 * 3 * 4096 * 1536
    for gpu, kept, seconds in (
        ("h100", "int4", 473.4e-6),  # Marlin's, at 16 tokens
        ("h100", "fp8", read * width_of("fp8") / (3.35e12 * 0.8)),
        ("a100", "int4", read * width_of("int4") / (2.039e12 * 0.8)),
    ):
        found = Kernels(gpu, "bfloat16", kept=kept).time("moe", np.array([16.0]), **shape)
        assert found.seconds[0] == pytest.approx(seconds, rel=0.01)
        assert (found.unmeasured[0] == 0) == (gpu == "h100" and kept == "int4")


def test_a_cache_in_fp8_is_read_as_it_was_measured_and_as_fewer_tokens_where_it_was_not() -> None:
    contexts, shape = np.array([4096.0]), {"heads": 32.0, "kv_heads": 8.0, "batch": 8.0}
    for gpu, is_measured in (("h100", True), ("h20", True), ("a100", False)):
        wide = Kernels(gpu, "bfloat16").cached_time("decode_attention", contexts, **shape)
        own = Kernels(gpu, "bfloat16", cache_dtype="fp8")
        narrow = own.cached_time("decode_attention", contexts, **shape)
        half = Kernels(gpu, "bfloat16").cached_time("decode_attention", contexts / 2, **shape)
        assert (narrow.unmeasured[0] == 0) == is_measured
        assert (narrow.seconds[0] == half.seconds[0]) == (not is_measured)
        assert 0.5 < narrow.seconds[0] / wide.seconds[0] < 0.95


def test_int8_inputs_are_quantised_and_products_run_at_the_datasheets_rate() -> None:
    tokens, shape = np.array([4096.0]), {"n": 8192.0, "k": 8192.0}
    found = Kernels("a100", "int8").time("gemm", tokens, **shape)
    assert found.seconds[0] == pytest.approx(2 * 4096 * 8192**2 / (6.24e14 * 0.7))
    own = replica("qwen2.5-7b", "a100", "int8")
    assert any("quantise in int8" in source for source in own.products(tokens).sources)


def test_a_format_without_a_table_is_as_far_from_its_roofline_as_the_nearest_that_has_one() -> None:
    tokens, shape = np.array([16.0, 4096.0]), {"n": 8192.0, "k": 8192.0}
    experts = {"hidden": 2048.0, "intermediate": 768.0, "topk": 8.0, "experts": 128.0}
    experts |= {"tensor_parallel": 1.0, "expert_parallel": 1.0}
    for operator, axes in (("gemm", shape), ("moe", experts)):
        own, other = (
            Kernels("h200", dtype).time(operator, tokens, **axes) for dtype in ("int8", "fp8")
        )
        assert own.seconds == pytest.approx(other.seconds, rel=1e-2)
        assert (own.unmeasured == own.seconds).all() and (other.unmeasured == 0).all()
        assert own.sources[0].endswith(other.sources[0]) and "int8" in own.sources[0]


def test_a_step_has_a_stated_error_where_its_formats_were_checked_alone() -> None:
    on_h800 = {"rollout.pool": "near", "cluster.pools.near.nodes": 2}
    for changes, error in (
        ({}, 0.0371),
        (FP8, 0.0428),
        ({**FP8, "rollout.weight_only": True}, None),
        ({"rollout.dtype": "int4"}, None),
        ({"rollout.kv_dtype": "fp8"}, None),
    ):
        decode = Costs.load(small_run({**on_h800, **changes})).provenance["decode"]
        assert decode.error == (error and pytest.approx(error, abs=2e-3))


# Weight sync --------------------------------------------------------------------------------------


def test_a_push_sends_what_replicas_keep_after_the_trainer_has_quantised_it() -> None:
    wide, narrow = (SyncCosts.load(resolve(small_run(changes))) for changes in ({}, FP8))
    assert (
        narrow.wire_bytes == weight_bytes(resolve(small_run(FP8)).replica) < 0.6 * wide.wire_bytes
    )
    traffic = SEVEN.linear_parameters() * (2 * 2 + width_of("fp8", SEVEN.hidden_size))
    assert quantised_bytes(SEVEN, FP8_REPLICA, "bfloat16") == pytest.approx(traffic)
    split = 4 * load_gpu("h800").memory_bandwidth * 0.8
    assert narrow.fill_time - wide.fill_time == pytest.approx(traffic / split, abs=5e-3)


def test_replicas_that_quantise_are_sent_whole_weights_and_pause_longer() -> None:
    there = small_run({**FP8, "sync.quantise_at": "replica"})
    wide, own, trainers = (
        SyncCosts.load(resolve(run)) for run in (small_run(), there, small_run(FP8))
    )
    assert own.wire_bytes == wide.wire_bytes and own.fill_time == wide.fill_time
    achieved = load_gpu("h20").memory_bandwidth * 0.8
    assert own.load_time - wide.load_time == pytest.approx(
        quantised_bytes(SEVEN, FP8_REPLICA, "bfloat16") / achieved
    )
    assert own.load_time > wide.load_time > trainers.load_time


def test_shared_gpus_make_narrow_weights_anew_beside_those_that_they_train() -> None:
    changes = {"policies.system": "colocated", "trainer.tensor_parallel": 1}
    changes |= {"rollout.replicas": 1, "model.name": "qwen2.5-1.5b"}
    wide, narrow = (PhaseChange.load(resolve(small_run({**changes, **more}))) for more in ({}, FP8))
    assert wide.reshard_time == 0 < narrow.reshard_time
    achieved = load_gpu("h20").memory_bandwidth * 0.8
    replica = resolve(small_run({**changes, **FP8})).replica
    made = 2 * weight_bytes(replica)
    made += quantised_bytes(replica.model, replica.precision, "bfloat16")
    assert narrow.wake_time == pytest.approx(made / achieved)


# Training -----------------------------------------------------------------------------------------


def trained(dtype: str, **changes: Any) -> tuple[TrainingCosts, Run]:
    run = small_run(
        {
            "model.name": "llama-3.1-70b",
            "rollout.tensor_parallel": 4,
            "rollout.replicas": 1,
            "cluster.pools.far.gpus_per_node": 8,
            "cluster.pools.near": {"gpu": "h800", "nodes": 8},
            "trainer": {
                "pool": "near",
                "tensor_parallel": 4,
                "pipeline_parallel": 8,
                "kernels": "fused",
                "recompute": "none",
                "dtype": dtype,
            },
            **changes,
        }
    )
    return TrainingCosts.load(resolve(run)), run


def test_training_in_fp8_is_faster_by_its_products_alone_and_holds_what_16_bits_hold() -> None:
    (narrow, run), (wide, other) = trained("fp8"), trained("bfloat16")
    ratio = wide.train_time([8192] * 32) / narrow.train_time([8192] * 32)
    assert 1.1 < ratio < 1.8
    assert narrow.provenance.tier == "composed" and narrow.provenance.error != wide.provenance.error
    assert trainer_memory(resolve(run).trainer) == trainer_memory(resolve(other).trainer)
    eager = trained("fp8", **{"trainer.kernels": "eager"})[0].stages.forward[0].per_token
    plain = trained("bfloat16", **{"trainer.kernels": "eager"})[0].stages.forward[0].per_token
    gained = wide.stages.forward[0].per_token - narrow.stages.forward[0].per_token
    assert plain - eager < gained  # inputs are quantised by kernels of their own


def test_mixtures_in_fp8_and_gpus_that_nobody_trained_on_are_rooflines() -> None:
    mixture = {"model.name": "qwen3-30b-a3b", "trainer.pipeline_parallel": 2}
    assert trained("fp8", **mixture)[0].provenance.tier == "roofline"
    assert trained("fp8", **{"cluster.pools.near.gpu": "h20"})[0].provenance.tier == "roofline"


def test_published_steps_in_fp8_are_predicted_by_what_16_bits_taught() -> None:
    fit = load_training_profile()
    steps = [own for own in read_steps() if own.dtype == "fp8" and own.model != "llama-3.1-405b"]
    assert len(steps) == 20 and not any(is_fitted(own) for own in steps)
    errors = []
    for own in steps:
        constants = fit.without.get(own.model, fit.constants)
        triton = fit.triton_without.get(own.model, fit.triton_attention)
        errors.append(step_time(own, rates_of(fit, "fp8"), constants, triton) / own.seconds - 1)
    stated = fit.held_out["fp8"]
    assert np.median(np.abs(errors)) == pytest.approx(stated.median, abs=0.01)
    assert stated.median < 0.05 and stated.rows == 20


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {**FP8, "cluster.pools.far.gpu": "a100"},
            r"^rollout\.dtype 'fp8': NVIDIA A100 80 GB SXM does not compute in fp8; "
            r"rollout\.weight_only = true keeps weights in fp8 and multiplies in bfloat16$",
        ),
        ({"rollout.dtype": "nvfp4"}, r"NVIDIA H20 96 GB does not compute in nvfp4"),
        ({"rollout.dtype": "mxfp8"}, r"NVIDIA H20 96 GB does not compute in mxfp8"),
        (
            {"trainer.dtype": "fp8", "cluster.pools.near.gpu": "a100"},
            r"^trainer\.dtype 'fp8': NVIDIA A100 80 GB SXM does not compute in fp8; it does in",
        ),
    ],
)
def test_a_gpu_without_the_units_is_told_in_one_line_and_what_it_could_do(
    changes: dict[str, Any], text: str
) -> None:
    run = small_run(changes)
    for check in (lambda: check_precision(resolve(run)), lambda: Costs.load(run)):
        with pytest.raises(RunError, match=text):
            check()
    mended = fix_profile_names(run)
    assert mended.run is not None and check_precision(resolve(mended.run)) is None
    assert len(mended.findings) == 1


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_any_gpu_keeps_weights_alone_in_any_format(dtype: str) -> None:
    changes = {"rollout.dtype": dtype, "rollout.weight_only": True, "cluster.pools.far.gpu": "a100"}
    run = small_run(changes)
    own = rollout_precision(run.rollout, run.model)
    assert own.is_weight_only and own.compute == "bfloat16"
    assert (
        Costs.load(run).decode.base[1] < Costs.load(small_run({**changes, **WIDE})).decode.base[1]
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"rollout.weight_only": True},
            r"rollout\.weight_only applies only to weights in fp8, .* got .*None",
        ),
        ({**FP8, "sync.mode": "delta"}, r"sync\.mode 'delta' .*rollout\.dtype .*got 'fp8'"),
        ({"rollout.dtype": "fp4"}, r"rollout\.dtype must be one of .*nvfp4.*, got 'fp4'"),
        ({"trainer.dtype": "int8"}, r"trainer\.dtype must be one of .*, got 'int8'"),
    ],
)
def test_formats_that_contradict_a_run_are_refused_by_key_and_value(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        small_run(changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rollout.dtype", "fp8"), ("rollout.kv_dtype", "fp8"), ("trainer.dtype", "bfloat16")],
)
def test_a_run_is_executed_in_one_format_alone(tmp_path: Path, key: str, value: str) -> None:
    check_back_ends(make_run(local_table(tmp_path, {key: "float32"})))
    with pytest.raises(ValueError, match=rf"^{key} must be left out or model\.dtype 'float32'"):
        check_back_ends(make_run(local_table(tmp_path, {key: value})))


def test_a_trainer_that_follows_is_refused_a_format_by_its_own_key(tmp_path: Path) -> None:
    table = local_table(tmp_path)
    pool = table["trainer"]["pool"]
    table["cluster"]["pools"][pool]["gpus_per_node"] = 8
    second = {"name": "second", "pool": pool, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"^trainer\.1\.dtype must be left out"):
        check_back_ends(make_run({**table, "trainer": [table["trainer"], second]}))


def test_the_command_line_shows_formats_and_refuses_in_one_line() -> None:
    shown = streamrl("profile", "show", "qwen2.5-7b", "--dtype", "int4", "--kv-dtype", "fp8")
    assert shown.returncode == 0
    assert "int4 weights, products in bfloat16, KV cache in fp8" in " ".join(shown.stdout.split())
    for options, text in (
        (("--gpu", "a100", "--dtype", "fp8"), "--weight-only keeps weights in fp8"),
        (("--dtype", "fp9"), "--dtype must be one of"),
        (("--weight-only",), "--weight-only needs narrow weights"),
        (("--kv-dtype", "int4"), "--kv-dtype must be one of"),
    ):
        refused = streamrl("profile", "show", "qwen2.5-7b", *options)
        assert refused.returncode == 2 and refused.stdout == ""
        assert text in refused.stderr and refused.stderr.count("\n") == 1


def test_a_wider_cache_takes_longer_to_read() -> None:
    base = {"model.name": "qwen2.5-7b", "rollout.max_tokens": 8192}
    wide, plain = (
        Costs.load(small_run({**base, "rollout.kv_dtype": dtype})).decode.step_time(4, 4 * 8000)
        for dtype in ("float32", "bfloat16")
    )
    assert wide > 1.05 * plain


@pytest.mark.parametrize("gpu", ["h20", "h20-3e"])
@pytest.mark.parametrize(("n", "k"), [(3584.0, 18944.0), (37888.0, 3584.0), (4096.0, 18944.0)])
def test_a_large_product_beyond_the_fp8_table_of_an_h20_does_not_repeat_its_launch(
    gpu: str, n: float, k: float
) -> None:
    rows = np.array([16.0, 32.0, 64.0, 256.0, 8192.0])
    kinds = (Kernels(gpu, dtype) for dtype in ("fp8", "bfloat16"))
    narrow, wide = (kernels.time("gemm", rows, n=n, k=k) for kernels in kinds)
    assert np.all(narrow.unmeasured > 0), "else it is within the table"
    assert np.all(narrow.seconds < wide.seconds)

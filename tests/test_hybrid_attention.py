"""Layers that do not look back at everything: sliding windows and linear attention, in memory, seconds and FLOPs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import kv_capacity, replica_workspace
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.layer import ATTENTION_BACKWARD, LINEAR_BACKWARD, Layer
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.layouts import fitting_replicas, holds_rollouts
from tests.runs import small_run

GPT_OSS = load_model(ModelConfig(name="gpt-oss-120b"))
QWEN3_NEXT = load_model(ModelConfig(name="qwen3-next-80b-a3b"))
FIT = load_training_profile()


def plan(name: str, gpu: str = "h200", **rollout: Any) -> Run:
    """Return a mixture in replicas of one node, trained on eight."""
    return small_run(
        {
            "model.name": name,
            "cluster.pools.far": {"gpu": gpu, "nodes": 2},
            "cluster.pools.near": {"gpu": "h800", "nodes": 8},
            "algorithm.prompts_per_step": 64,
            "trainer": {
                "pool": "near",
                "data_parallel": 8,
                "tensor_parallel": 2,
                "pipeline_parallel": 4,
                "expert_parallel": 16,
                "logits": "chunked",
            },
            "rollout": {
                "pool": "far",
                "replicas": 2,
                "tensor_parallel": 8,
                "max_running": 64,
                "max_tokens": 32768,
                **rollout,
            },
        }
    )


def dense(**changes: Any) -> ModelShape:
    """Return a model of eight layers, changed as the test says."""
    base = load_model(ModelConfig(name="qwen3-8b"))
    return replace(base, num_layers=8, **changes)


# Memory -------------------------------------------------------------------------------------------


def test_a_token_grows_the_cache_of_the_layers_that_look_back_at_everything_alone() -> None:
    assert GPT_OSS.kv_bytes_per_token("bfloat16") == 18 * 2 * 8 * 64 * 2
    assert QWEN3_NEXT.kv_bytes_per_token("bfloat16") == 12 * 2 * 2 * 256 * 2
    window = dense(sliding_window=1000)
    assert window.kv_bytes_per_token("bfloat16") == dense().kv_bytes_per_token("bfloat16")


def test_a_rollout_keeps_its_windows_and_its_states_whatever_its_length() -> None:
    assert GPT_OSS.shard_state_bytes("bfloat16", 1) == 18 * 128 * 2 * 8 * 64 * 2
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert QWEN3_NEXT.shard_state_bytes("bfloat16", 4) == 36 * state / 4
    assert dense().shard_state_bytes("bfloat16", 1) == 0.0


def test_states_of_all_that_may_run_are_kept_free_before_the_cache_gets_the_rest() -> None:
    few, many = (plan("qwen3-next-80b-a3b", max_running=most) for most in (8, 512))
    states = [most * QWEN3_NEXT.shard_state_bytes("bfloat16", 8) for most in (8, 512)]
    assert replica_workspace(resolve(many).replica) >= states[1]
    assert kv_capacity(resolve(few).replica) > kv_capacity(resolve(many).replica) > 512 * 1000


def test_a_window_that_no_rollout_fills_is_none() -> None:
    assert GPT_OSS.seen_by(128).sliding_window is None
    assert GPT_OSS.seen_by(129) is GPT_OSS
    assert GPT_OSS.seen_by(128).num_full_layers == 36


# Seconds of a replica -----------------------------------------------------------------------------


def attention(model: ModelShape, contexts: list[float], gpu: str = "h200") -> Any:
    shard = Shard(model, Kernels(gpu, "bfloat16"))
    return shard.decode_attention(32, np.array(contexts)).seconds


def test_rollouts_that_outgrow_a_window_read_what_is_in_it() -> None:
    mixed = dense(sliding_window=1024, num_window_layers=6)
    full, windowed = attention(dense(), [1024.0, 16384.0]), attention(mixed, [1024.0, 16384.0])
    assert windowed[0] == pytest.approx(full[0])
    assert windowed[1] == pytest.approx(6 / 8 * full[0] + 2 / 8 * full[1])


def test_prefill_past_a_window_has_a_window_of_pairs_for_each_token() -> None:
    kernels = Kernels("h200", "bfloat16")
    every, none = (Shard(dense(**kind), kernels) for kind in ({"sliding_window": 1024}, {}))
    contexts = np.array([1024.0, 4096.0])
    within = none.prefill_attention(1, contexts[:1]).seconds[0]
    found = every.prefill_attention(1, contexts).seconds
    assert found == pytest.approx([within, 7 * within])  # 3.5 windows of 1,024, the first half full
    assert found[1] < none.prefill_attention(1, contexts).seconds[1]


def test_linear_attention_takes_the_measured_kernels_whatever_the_context() -> None:
    linear = replace(QWEN3_NEXT, num_layers=36, experts=None)
    few, many = attention(linear, [512.0, 65536.0], "h20")
    assert few == many == pytest.approx(36 * 81e-6)  # 32 rollouts, from the table of H20
    elsewhere = Shard(linear, Kernels("h200", "bfloat16")).decode_attention(32, np.array([512.0]))
    states = 2 * 4 * 32 * 32 * 128 * 128 / 4.8e12
    assert 36 * states < elsewhere.seconds[0] < 2 * 36 * states
    assert not elsewhere.unmeasured.any()


def test_long_contexts_slow_a_hybrid_down_less_than_a_model_that_looks_back_at_everything() -> None:
    curve, other = (
        Costs.load(plan(name)).decode for name in ("qwen3-next-80b-a3b", "qwen3-30b-a3b")
    )
    # 12 of 48 layers, of two key-value heads of 256 channels instead of four of 128
    assert curve.per_context_token[64] < 0.5 * other.per_context_token[64]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_hybrids_are_simulated_and_what_no_table_has_is_called_a_roofline(name: str) -> None:
    provenance = Costs.load(plan(name)).provenance
    assert provenance["decode"].shares["roofline"] > 0
    assert provenance["train"].tier == "roofline"
    assert any("no training was measured" in source for source in provenance["train"].sources)


def test_the_planner_decodes_fewer_rollouts_where_their_states_need_the_memory() -> None:
    """256 states of Nemotron-H take 234 GB, which leave no room on two H200."""
    run = plan("nemotron-h-56b", replicas=1, tensor_parallel=2, max_running=256, max_tokens=4096)
    replica, cut = resolve(run).replica, Counter[str]()
    assert not holds_rollouts(replica)
    wanted = msgspec.structs.replace(run.plan, rollout_tensor_parallel=[2])
    (found,) = fitting_replicas(replica, wanted, 2, cut)
    assert found.max_running == 128
    plain = load_model(ModelConfig(name="qwen2.5-72b"))
    too_large = replace(replica, model=plain)
    wanted = msgspec.structs.replace(run.plan, rollout_tensor_parallel=[1])
    assert not list(fitting_replicas(too_large, wanted, 1, cut))


# Training -----------------------------------------------------------------------------------------


def layer(model: ModelShape) -> Layer:
    ranks = Ranks.of(resolve(plan("qwen3-235b-a22b")).trainer)
    return Layer(
        ranks=replace(ranks, model=model),
        gemm=FIT.gemm["h800"],
        experts=FIT.experts["h800"],
        constants=FIT.constants,
    )


def test_windows_have_pairs_of_a_window_a_token_in_training() -> None:
    full, mixed = layer(dense()), layer(dense(sliding_window=1024, num_window_layers=6))
    whole, some = full.attention(), mixed.attention()
    assert some.per_pair == pytest.approx(whole.per_pair / 4)
    assert some.per_token == pytest.approx(whole.per_token + 6 / 8 * 1024 * whole.per_pair)


def test_linear_attention_trains_at_the_rate_of_its_measured_kernels_and_its_own_backward_pass() -> (
    None
):
    """16,384 tokens of 16 value heads a tensor rank, between the 8 and the 32 heads that H100's table has."""
    linear = replace(QWEN3_NEXT, experts=None, intermediate_size=5120)
    plain = replace(linear, linear=None)
    least, most = 508e-6 / 8 * 16, 1089e-6 / 32 * 16
    mixed, full = layer(linear), layer(plain)
    found = mixed._linear().per_token * 16384
    assert 36 / 48 * most < found < 36 / 48 * least
    assert full._linear().per_token == 0.0
    assert mixed.attention().per_pair == pytest.approx(full.attention().per_pair / 4)
    silent = replace(mixed, ranks=replace(mixed.ranks, trainer=training(recompute="none")))
    expected = silent._computed() * 2 + silent.attention() * ATTENTION_BACKWARD
    expected = expected + silent._linear() * LINEAR_BACKWARD + silent._reduced() * 1.5
    assert silent.backward().time(4096.0, 0.0) == pytest.approx(expected.time(4096.0, 0.0))
    forward = silent._computed() + silent.attention() + silent._linear() + silent._reduced()
    assert silent.forward().time(4096.0, 0.0) == pytest.approx(forward.time(4096.0, 0.0))


def test_context_ranks_that_deal_heads_out_share_linear_attention_once() -> None:
    ranks = Ranks.of(resolve(plan("qwen3-235b-a22b")).trainer)
    dealt = replace(
        ranks,
        model=QWEN3_NEXT,
        trainer=training(context_parallel=4, context_exchange="all-to-all"),
    )
    one = replace(layer(QWEN3_NEXT), ranks=dealt)
    assert one._linear() == layer(QWEN3_NEXT)._linear()


def training(**changes: Any) -> TrainerConfig:
    found: TrainerConfig = replace(plan("qwen3-235b-a22b").trainer, **changes)
    return found


def test_a_hybrids_long_rollouts_train_in_less_than_those_of_full_attention() -> None:
    def share(name: str) -> float:
        stages = TrainingCosts.load(resolve(plan(name))).stages
        short, long = (stages.rollout_time(tokens) for tokens in (4096, 65536))
        return long / short

    assert 16 < share("qwen3-next-80b-a3b") < 0.85 * share("qwen3-235b-a22b")


def test_flops_count_full_windows_and_what_changes_states() -> None:
    pairs = dense().forward_flops(0, 1)
    mixed = dense(sliding_window=1024, num_window_layers=6)
    assert mixed.forward_flops(0, 1) == pairs / 4
    assert mixed.forward_flops(1, 0) - dense().forward_flops(1, 0) == 6 / 8 * pairs * 1024
    bare = replace(QWEN3_NEXT, linear=None)
    more = QWEN3_NEXT.forward_flops(1, 0) - 2 * QWEN3_NEXT.num_active_parameters
    assert more == 36 * 6 * 32 * 128 * 128
    assert bare.forward_flops(0, 1) == 4 * QWEN3_NEXT.forward_flops(0, 1)


# Kinds of layers of newer models --------------------------------------------------------------------


def test_an_mlp_without_a_gate_has_two_of_three_products() -> None:
    tokens = np.array([8192.0])
    both = [Shard(dense(has_gated_mlp=gate), Kernels("h800", "bfloat16")) for gate in (True, False)]
    gated, plain = (float(shard._mlp(tokens, 12288.0).seconds[0]) for shard in both)
    assert 0.6 < plain / gated < 0.75
    trained = [layer(dense(has_gated_mlp=gate))._mlp(12288).per_token for gate in (True, False)]
    assert 0.6 < trained[1] / trained[0] < 0.75


def test_sparse_attention_reads_the_chosen_tokens_and_the_index_keys_of_all() -> None:
    model = load_model(ModelConfig(name="deepseek-v3.2"))
    full = replace(model, indexer=None)
    short, long = np.array([2048.0]), np.array([65536.0])
    shard = Shard(model, Kernels("h200", "bfloat16"))
    few, many = (float(shard.decode_attention(32, each).seconds[0]) for each in (short, long))
    keys = 61 * 32 * (65536 - 2048) * 132 / (0.8 * 4.8e12)
    assert many - few == pytest.approx(keys)
    whole = Shard(full, Kernels("h200", "bfloat16")).decode_attention(32, long).seconds[0]
    assert many < 0.5 * float(whole)


def test_layers_with_a_window_have_their_own_heads() -> None:
    model = load_model(ModelConfig(name="mimo-v2-flash"))
    alike = replace(model, window_heads=None)
    assert model.windowed.num_kv_heads == 2 * model.num_kv_heads
    own, same = (
        Shard(each, Kernels("h200", "bfloat16")).products(np.array([8192.0])).seconds[0]
        for each in (model, alike)
    )
    more = 2 * 39 * 4096 * 4 * (192 + 128) * 8192 / 989e12
    assert float(own - same) > more

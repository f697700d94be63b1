"""Wide expert parallelism: what tokens take to the experts of other GPUs and back, and what attention ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.parallelism import replica_shards
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence, resolve
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.experts import dispatched_experts_time, experts_time
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import (
    ACHIEVED,
    MOST_DIRECT,
    START_TIME,
    Interconnect,
    all_to_all_time,
    routed_copies,
)
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import load_engine
from tests.runs import small_run

DEEPSEEK = load_model(ModelConfig(name="deepseek-v3"))
EXPERTS = DEEPSEEK.experts
PUBLISHED = {
    8: (77e-6, 114e-6),
    16: (118e-6, 195e-6),
    32: (155e-6, 273e-6),
    64: (173e-6, 314e-6),
    128: (192e-6, 369e-6),
    256: (194e-6, 360e-6),
}
"""Seconds of dispatch in fp8 and of combine, by GPUs, of 128 tokens each (deepseek-ai/DeepEP 0297fc8, docs/legacy.md)."""
H800 = Interconnect(domain=8, nvlink=200e9, network=50e9, latency=5e-6, source="a test", node=8)


def plan(pool: dict[str, Any] | None = None, **rollout: Any) -> Run:
    """Return DeepSeek-V3 on 128 H200, in replicas as the test says."""
    return small_run(
        {
            "model.name": "deepseek-v3",
            "cluster.pools.far": {"gpu": "h200", "nodes": 16, **(pool or {})},
            "cluster.pools.near": {"gpu": "h800", "nodes": 64},
            "trainer": {
                "pool": "near",
                "data_parallel": 8,
                "tensor_parallel": 8,
                "pipeline_parallel": 8,
                "expert_parallel": 64,
            },
            "algorithm.prompts_per_step": 512,
            "rollout": {
                "pool": "far",
                "replicas": 1,
                "max_running": 4096,
                "max_tokens": 8192,
                **rollout,
            },
        }
    )


WIDE = {"data_parallel": 128, "expert_parallel": 128}


@pytest.mark.parametrize("ranks", PUBLISHED)
def test_dispatch_and_combine_take_what_was_published_of_them(ranks: int) -> None:
    assert EXPERTS is not None
    tokens = np.array([128.0])
    both = all_to_all_time(H800, tokens, EXPERTS, 7168, ranks, "fp8").seconds[0]
    assert both == pytest.approx(sum(PUBLISHED[ranks]), rel=0.07)
    combine = all_to_all_time(H800, tokens, EXPERTS, 7168, ranks, "bfloat16").seconds[0] / 2
    assert combine == pytest.approx(PUBLISHED[ranks][1], rel=0.10)


MEASURED = {
    (16, 16): 30 + 46,
    (16, 128): 102 + 186,
    (32, 64): 83 + 152,
    (64, 16): 46 + 60,
    (64, 128): 167 + 305,
    (64, 256): 301 + 580,
}
"""Microseconds of dispatch and combine on H100, by ranks and tokens per GPU (PyPI aiconfigurator-core 0.12.0)."""


@pytest.mark.parametrize(("ranks", "tokens"), MEASURED)
def test_dispatch_and_combine_on_h100_take_what_was_measured(ranks: int, tokens: int) -> None:
    assert EXPERTS is not None
    wires = replace(H800, nvlink=450e9)
    found = all_to_all_time(wires, np.array([tokens * 1.0]), EXPERTS, 7168, ranks, "fp8")
    expected = MEASURED[ranks, tokens] * 1e-6
    assert found.seconds[0] == pytest.approx(expected, rel=0.10 if tokens >= 64 else 0.20)


def test_no_tokens_take_the_start_of_both_and_many_what_the_fuller_wire_takes() -> None:
    assert EXPERTS is not None
    none, many = all_to_all_time(
        H800, np.array([0.0, 200.0]), EXPERTS, 7168, 16, "bfloat16"
    ).seconds
    assert none == pytest.approx(2 * START_TIME)
    bytes_of_a_copy = 200 * 7168 * 2
    outside = 8 * 8 / 16 * bytes_of_a_copy / 50e9 / ACHIEVED
    assert many - none == pytest.approx(2 * outside)


def test_many_tokens_go_to_a_node_once_however_many_of_its_experts_they_chose() -> None:
    assert EXPERTS is not None
    few, many = routed_copies(np.array([MOST_DIRECT, 2.0 * MOST_DIRECT]), EXPERTS, 16, 8)[0]
    assert few == 4.0
    assert many == pytest.approx(2 * (1 - 0.5**8) / 2)


def test_one_domain_of_nvlink_sends_nothing_over_the_network() -> None:
    assert EXPERTS is not None
    outside, inside = routed_copies(np.array([64.0, 4096.0]), EXPERTS, 64, 72)
    assert outside.tolist() == [0.0, 0.0]
    assert inside[0] == pytest.approx(8 * 63 / 64)


def test_experts_are_shared_out_and_attention_is_whole_on_every_rank() -> None:
    wide = replica_shards(DEEPSEEK, plan(**WIDE).rollout)[0]
    rest = DEEPSEEK.num_parameters - 58 * 256 * DEEPSEEK.expert_parameters
    assert wide.parameters == pytest.approx(rest + 58 * 2 * DEEPSEEK.expert_parameters)


def test_attention_ranks_hold_a_latent_cache_each_and_tensor_ranks_the_same_one() -> None:
    wide = kv_capacity(resolve(plan(**WIDE)).replica)
    deep = kv_capacity(resolve(plan(tensor_parallel=16, expert_parallel=16, replicas=8)).replica)
    assert wide > 20 * deep
    assert wide % 128 == 0


def test_a_step_of_attention_ranks_costs_what_each_does_for_its_share() -> None:
    run = plan(**WIDE)
    wide, longest = (
        Costs.load(run).decode,
        longest_sequence(run.rollout, run.workload, run.environment),
    )
    alone = Shard(DEEPSEEK, Kernels("h200", "bfloat16"))
    rank = compose_decode(alone, 4096 // 128, longest, kv_capacity(resolve(run).replica) / 128)
    for running in (256, 1024, 4096):
        share = rank.per_context_token[running // 128]
        assert wide.per_context_token[running] * 128 == pytest.approx(share)
    assert wide.base[128] > 58 * 2 * START_TIME
    # one more of some rank's makes the fullest do twice as much; fewer read fewer experts
    assert wide.base[100] < wide.base[128] < wide.base[129]


def test_a_gpu_that_is_sent_its_own_tokens_does_its_share_of_what_a_node_does() -> None:
    assert EXPERTS is not None
    kernels, tokens = Kernels("h200", "bfloat16"), np.array([1.0, 4096.0])
    node, wide = (
        dispatched_experts_time(kernels, tokens, EXPERTS, 7168, ranks).seconds for ranks in (8, 64)
    )
    assert wide[1] == pytest.approx(node[0] + (node[1] - node[0]) / 8)  # all experts are read
    assert node[0] / 2 < wide[0] <= node[0]
    assert node == pytest.approx(experts_time(kernels, tokens, EXPERTS, 7168, 1, 8).seconds)


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_few_tokens_take_as_long_as_was_measured_of_many_ranks(tokens: int) -> None:
    """Of Qwen3-235B's experts: with few tokens it hardly counts that all of them are on every GPU there."""
    experts = load_model(ModelConfig(name="qwen3-235b-a22b")).experts
    assert experts is not None
    kernels, size = Kernels("h200", "bfloat16"), np.array([float(tokens)])
    for ranks in (16, 32):
        measured = experts_time(kernels, size, experts, 4096, 1, ranks)
        found = dispatched_experts_time(kernels, size, experts, 4096, ranks)
        assert found.seconds == pytest.approx(measured.seconds, rel=0.25)
        assert not measured.unmeasured.any()


def test_wide_experts_generate_faster_than_as_many_gpus_in_tensor_parallel_replicas() -> None:
    wide, deep = plan(**WIDE), plan(tensor_parallel=16, expert_parallel=16, replicas=8)
    rate = 4096 / Costs.load(wide).decode.step_time(4096, 4096 * 3000)
    per_replica = 512 / Costs.load(deep).decode.step_time(512, 512 * 3000)
    assert rate > 1.5 * 8 * per_replica


def test_the_network_between_nodes_is_what_wide_experts_wait_for() -> None:
    narrow = {"node_bandwidth": "400 Gbps"}
    a_port, a_node = (Costs.load(plan(pool, **WIDE)).decode.base[4096] for pool in ({}, narrow))
    copies = 58 * 2 * 32 * 7168 * 2 * 8 * 120 / 128
    wire = copies / ACHIEVED / 0.97
    assert a_node - a_port == pytest.approx(wire / 6.25e9 - wire / 50e9, rel=1e-6)


def test_a_batch_in_two_halves_hides_the_trade_or_what_gpus_compute_whichever_is_less() -> None:
    kernels = Kernels("h800", "bfloat16")
    plain = Shard(DEEPSEEK, kernels, 1, 64, data_parallel=64, wires=H800)
    halves = replace(plain, overlaps_dispatch=True)
    tokens = np.array([1.0, 256.0])
    few, many = halves.products(tokens).seconds
    alone, apart = plain.products(tokens).seconds
    computed = plain._computed(tokens / 2, tokens * 32).seconds[1]
    traded = plain._all_to_all(tokens / 2).seconds[1]
    assert few == alone  # each half would read all weights
    assert many == pytest.approx(2 * max(computed, traded)) and many < 0.9 * apart


def test_published_decoding_of_96_h100_is_met_within_15_per_cent() -> None:
    """22,300 tokens a second of 8 GPUs, fp8, 72 ranks, 256 rollouts of 2,000 tokens each (lmsys.org, 2025-05-05)."""
    wires = Interconnect.of(PoolConfig(gpu="h100", nodes=9))
    shard = Shard(
        *(DEEPSEEK, Kernels("h100", "fp8"), 1, 64, load_engine("sglang-0.5")),
        data_parallel=64,
        overlaps_dispatch=True,
        wires=wires,
    )
    curve = compose_decode(shard, 64 * 256, 4096.0, 1e8)
    rate = 8 * 256 / curve.step_time(64 * 256, 64 * 256 * 2050)
    assert rate == pytest.approx(22300, rel=0.15)  # 19,177, where nothing was fitted


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"data_parallel": 16}, r"rollout\.expert_parallel must be data_parallel x .* = 16"),
        (
            {"data_parallel": 16, "expert_parallel": 16, "pipeline_parallel": 2},
            r"rollout\.pipeline_parallel must be 1 if rollout\.data_parallel is 16",
        ),
    ],
)
def test_attention_ranks_share_all_experts_and_have_no_stages(
    rollout: dict[str, Any], text: str
) -> None:
    with pytest.raises(RunError, match=text):
        plan(**rollout)


def test_a_dense_model_has_no_attention_ranks() -> None:
    run = small_run({"rollout.data_parallel": 2, "rollout.expert_parallel": 2})
    with pytest.raises(
        RunError, match=r"rollout\.data_parallel must be 1, because .* has no experts"
    ):
        Costs.load(run)

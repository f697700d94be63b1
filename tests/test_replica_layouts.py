"""Replicas over several nodes: tensor ranks between NVLink domains, pipeline stages, and the network that a pool names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.parallelism import replica_shards
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import ReplicaHardware, resolve
from streamrl.record.metrics import measure
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.gpu_pools import claims_of, sides_of
from streamrl.sim.costs.cache_transfer import CacheTransfer
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import DecodeCurve, compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import MEASURED, SIZES, TREES, Interconnect, over_trees
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.weight_sync import SyncSide
from streamrl.sim.planner.layouts import (
    DIVISIBILITY,
    EXPERTS,
    Replicas,
    TrainerRange,
    check_attention_ranks,
    fitting_replicas,
    fitting_trainers,
    in_pool,
)
from streamrl.targets.execute_limits import check_back_ends
from tests.runs import checked_world, small_run

LLAMA = load_model(ModelConfig(name="llama-3.1-70b"))
H100 = load_gpu("h100")


def plan(pool: dict[str, Any] | None = None, name: str = "llama-3.1-70b", **rollout: Any) -> Run:
    """Return a large model on four nodes of H100, in replicas as the test says."""
    return small_run(
        {
            "model.name": name,
            "cluster.pools.far": {"gpu": "h100", "nodes": 4, **(pool or {})},
            "cluster.pools.near": {"gpu": "h800", "nodes": 64},
            "trainer": {
                "pool": "near",
                "data_parallel": 4,
                "tensor_parallel": 8,
                "pipeline_parallel": 16,
            },
            "rollout": {
                "pool": "far",
                "replicas": 1,
                "max_running": 64,
                "max_tokens": 8192,
                **rollout,
            },
        }
    )


# The network and NVLink ---------------------------------------------------------------------------


def test_a_pools_network_replaces_its_gpus_for_pushes_training_and_replicas() -> None:
    run = plan({"node_bandwidth": "100 Gbps"})
    pool = run.cluster.pools["far"]
    assert SyncSide.of(run.cluster.pools["far"], 8).node_bandwidth == pytest.approx(0.97 * 12.5e9)
    assert Interconnect.of(pool).network == pytest.approx(0.97 * 12.5e9 / 8)
    trained = small_run({"cluster.pools.near": {"gpu": "h800", "node_bandwidth": "100 Gbps"}})
    assert Ranks.of(resolve(trained).trainer).network == pytest.approx(12.5e9 / 8)
    assert Interconnect.of(PoolConfig(gpu="h100")).network == pytest.approx(0.97 * H100.network)


def test_an_nvlink_domain_of_several_nodes_is_one_node_to_all_that_is_sent_in_it() -> None:
    rack = {"nvlink_domain": 32}
    run = plan(rack)
    assert SyncSide.of(run.cluster.pools["far"], 32).num_nodes == 1
    apart, together = (CacheTransfer.of(resolve(one).replica).token_time for one in (plan(), run))
    assert apart / together == pytest.approx(H100.nvlink / (0.97 * H100.network))
    near = small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4, **rack},
            "trainer": {"pool": "near", "tensor_parallel": 2, "data_parallel": 16},
            "algorithm.prompts_per_step": 64,
        }
    )
    far = small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "trainer": {"pool": "near", "tensor_parallel": 2, "data_parallel": 16},
            "algorithm.prompts_per_step": 64,
        }
    )
    inside, across = (Ranks.of(resolve(one).trainer).ring_time(1e9, 16, 2) for one in (near, far))
    assert across > inside == pytest.approx(15 / 16 * 1e9 / load_gpu("h800").nvlink)


def test_a_domain_that_is_no_whole_nodes_is_refused() -> None:
    with pytest.raises(
        RunError, match=r"nvlink_domain must be a multiple of gpus_per_node=8, got 12"
    ):
        plan({"nvlink_domain": 12})


# Tensor ranks over several nodes ------------------------------------------------------------------


def shard(tensor: int, stages: int = 1, pool: PoolConfig | None = None) -> Shard:
    wires = Interconnect.of(pool or PoolConfig(gpu="h100", nodes=4))
    kernels = Kernels("h100", "bfloat16")
    return Shard(LLAMA, kernels, tensor, pipeline_parallel=stages, wires=wires)


@pytest.mark.parametrize(
    ("tensor", "tokens", "protocol", "reached"),
    [(16, 1.0, 0, 0.7), (16, 4096.0, 1, 0.9), (32, 64.0, 1, 0.6)],
)
def test_ranks_of_several_nodes_reduce_in_the_faster_tree_of_nccl_as_slowly_as_measured(
    tensor: int, tokens: float, protocol: int, reached: float
) -> None:
    num_bytes, rate = tokens * LLAMA.hidden_size * 2, 0.97 * H100.network * 8 / 2
    base, near, far, share, _ = TREES[protocol]
    hops = 2 * (7 * near + {16: 1, 32: 2}[tensor] * far)
    seconds = base + hops + num_bytes / (rate * share * reached)
    seconds *= float(over_trees(np.array([num_bytes]), tensor // 8)[0])
    found = shard(tensor)._all_reduce(np.array([tokens]))
    assert found.seconds == pytest.approx(seconds)
    assert found.unmeasured == pytest.approx(seconds)


@pytest.mark.parametrize("num_bytes", [65536.0, 1048576.0])
def test_the_trees_agree_with_a_measured_node(num_bytes: float) -> None:
    """With one domain there is no hop between nodes, and NVLink carries the bytes."""
    wires = Interconnect(
        domain=8, node=8, nvlink=H100.nvlink, network=H100.nvlink / 8, latency=0.0, source="a test"
    )
    table = Kernels("h100", "bfloat16").of_engine({"all_reduce": "nccl"})
    measured = table.time("all_reduce", np.array([num_bytes]), gpus=8).seconds
    assert wires.in_trees(np.array([num_bytes]), 1) == pytest.approx(measured, rel=0.27)


def test_nodes_of_h100_reduce_in_the_measured_time_and_eight_of_them_nearly() -> None:
    wires, sizes = Interconnect.of(PoolConfig(gpu="h100", nodes=8)), np.array(SIZES)
    for nodes, times in MEASURED.items():
        assert wires.reduced(sizes, nodes).seconds * 1e6 == pytest.approx(times)
    of_eight = [115.7, 143.3, 203.8, 321.0, 373.0, 508.0, 709.0, 1150.0]
    assert wires.reduced(sizes[-8:], 8).seconds * 1e6 == pytest.approx(of_eight, rel=0.25)


def test_ranks_on_several_nodes_of_one_domain_use_nccl_where_the_engine_has_no_other() -> None:
    wires = Interconnect.of(PoolConfig(gpu="gb200", nodes=4, gpus_per_node=4, nvlink_domain=16))
    kernels, tokens = Kernels("gb200", "bfloat16"), np.array([64.0])
    bytes_ = tokens * LLAMA.hidden_size * 2

    def seconds(engine: str, tensor: int) -> float:
        one = Shard(LLAMA, kernels, tensor, engine=load_engine(engine), wires=wires)
        return float(one._all_reduce(tokens).seconds[0])

    def table(backend: str, gpus: int) -> float:
        own = kernels.of_engine({"all_reduce": backend})
        return float(own.time("all_reduce", bytes_, gpus=gpus).seconds[0])

    assert seconds("vllm-0.11", 4) == table("vllm", 4)
    assert seconds("vllm-0.11", 8) == table("nccl", 8)
    assert seconds("tensorrt-llm-1.0", 8) == table("trtllm", 8)


def test_tensor_ranks_between_nodes_make_a_step_slower_than_an_nvlink_domain_does() -> None:
    racks, nodes = (
        Costs.load(plan(pool, tensor_parallel=16)).decode for pool in ({"nvlink_domain": 16}, {})
    )
    assert nodes.base[64] > 1.1 * racks.base[64]


@pytest.mark.parametrize(
    ("degree", "pool", "text"),
    [
        (12, {}, r"must divide the 8 GPUs of a node or be a multiple of them, got 12"),
        (
            24,
            {"nvlink_domain": 16},
            r"must divide the 16 GPUs of an NVLink domain, be a multiple of them or be whole nodes of 8",
        ),
    ],
)
def test_ranks_that_fill_no_whole_domains_are_refused(
    degree: int, pool: dict[str, Any], text: str
) -> None:
    with pytest.raises(RunError, match=text):
        plan(pool, tensor_parallel=degree)
    assert plan(tensor_parallel=32).rollout.num_gpus == 32


# Pipeline stages ----------------------------------------------------------------------------------


def test_stages_take_gpus_and_a_share_of_the_weights_and_of_every_cache() -> None:
    run = plan(tensor_parallel=4, pipeline_parallel=2)
    assert [side.num_gpus for side in sides_of(run) if side.kind == "rollout"] == [8]
    assert (
        next(iter(claims_of(run.rollout.kinds, run.trainers, run.verifier))).keys[-1]
        == "rollout.pipeline_parallel"
    )
    whole = replica_shards(LLAMA, plan(tensor_parallel=4).rollout)[0].parameters
    first, last = replica_shards(LLAMA, run.rollout)
    assert first.parameters == pytest.approx(last.parameters, rel=1e-4)
    assert first.parameters + last.parameters == pytest.approx(whole, rel=1e-3)
    eight = kv_capacity(resolve(plan(tensor_parallel=8)).replica)
    assert kv_capacity(resolve(run).replica) == pytest.approx(eight, rel=0.05)


def test_a_token_of_every_rollout_takes_two_turns_of_the_slower_of_two_stages() -> None:
    longest = resolve(plan()).replica.longest_sequence
    one, two = (compose_decode(shard(4, stages), 64, longest, 1e6) for stages in (1, 2))
    staged, batch = shard(4, 2), np.array([32.0])  # 64 rollouts are two batches
    slowdown = staged.engine.constants.slowdown
    kernels = slowdown * (staged.products(batch) * 0.5 + staged.head(batch)).seconds
    turn = kernels + (staged.overhead(batch, 0.5) + staged.sent_on(batch)).seconds
    attention = compose_attention(one, 32)
    assert two.base[64] == pytest.approx(2 * float(turn[0]) + attention, rel=1e-6)
    assert two.base[1] == pytest.approx(two.base[2], rel=1e-6)  # one batch leaves a stage idle
    assert two.per_context_token[64] * 2 == pytest.approx(one.per_context_token[32], rel=1e-6)


def test_all_stages_wait_for_the_one_that_has_a_layer_more() -> None:
    one, three = (compose_decode(shard(4, stages), 96, 8192.0, 1e7) for stages in (1, 3))
    fullest = 27 / 80  # of three stages of 80 layers
    share = one.per_context_token[32] * 3 * fullest / 3
    assert three.per_context_token[96] == pytest.approx(share, rel=1e-6)


def compose_attention(curve: DecodeCurve, batch: int) -> float:
    """Return what a curve of one stage has of attention beside tokens of context, of all layers."""
    alone, size = shard(4), np.array([float(batch)])
    slowdown = alone.engine.constants.slowdown
    kernels = slowdown * (alone.products(size) + alone.head(size)).seconds
    return curve.base[batch] - float((kernels + alone.overhead(size).seconds)[0])


def test_a_stage_sends_each_token_on_over_nvlink_or_the_network() -> None:
    num_bytes = 32 * LLAMA.hidden_size * 2 / 8
    near, far = (
        shard(8, 2, PoolConfig(gpu="h100", nodes=4, nvlink_domain=domain)).sent_on(np.array([32.0]))
        for domain in (16, 8)
    )
    assert near.seconds == pytest.approx(num_bytes / H100.nvlink)
    assert far.seconds == pytest.approx(num_bytes / (0.97 * H100.network) + 5e-6)


def test_prefill_passes_through_stages_one_behind_the_other() -> None:
    one, two = (
        Costs.load(plan(tensor_parallel=8, pipeline_parallel=stages, chunked_prefill=False)).prefill
        for stages in (1, 2)
    )
    tokens, pairs = 8192, 8192.0**2 / 2
    assert two.time(tokens, pairs, 0) == pytest.approx(one.time(tokens, pairs, 0) / 2)


def test_more_stages_than_layers_are_refused() -> None:
    run = plan({"nodes": 24}, pipeline_parallel=96)
    with pytest.raises(RunError, match=r"rollout\.pipeline_parallel must be at most the 80 layers"):
        kv_capacity(resolve(run).replica)


def test_a_run_of_two_stages_a_replica_counts_all_its_gpus() -> None:
    run = plan(tensor_parallel=4, pipeline_parallel=2, replicas=4, max_tokens=64)
    metrics = measure(checked_world(fill_policies(run, Costs.load(run))).run())
    assert metrics.num_gpus["rollout"] == 32
    assert sum(metrics.busy.values()) + sum(metrics.idle.values()) == pytest.approx(1.0)


# Plans --------------------------------------------------------------------------------------------


def fleets(run: Run, num_gpus: int) -> list[Replicas]:
    return list(fitting_replicas(far(run), run.plan, num_gpus, Counter()))


RACK = {"gpu": "gb200", "gpus_per_node": 4, "nvlink_domain": 72}


def test_a_rack_of_72_gpus_is_planned_with_tensor_ranks_on_whole_nodes_of_it() -> None:
    run = plan({**RACK, "nodes": 18})
    degrees = {one.tensor_parallel for one in fleets(run, 64)}
    assert degrees == {1, 2, 4, 8, 16, 32, 64}
    degrees = {one.tensor_parallel for one in fleets(run, 72)}
    assert degrees == {1, 2, 4, 8}
    among = TrainerRange(micro_batch=[1], zero=[1], recompute=["full"])
    trainer = in_pool(resolve(run).trainer, "far", run.cluster.pools)
    found = list(fitting_trainers(trainer, 64, among, Counter()))
    assert {one.tensor_parallel for one in found} == {1, 2, 4, 8, 16, 32, 64}


def test_tensor_ranks_of_a_plan_are_at_most_as_many_groups_as_racks_hold() -> None:
    run = plan({**RACK, "nodes": 8 * 18})
    assert 64 in {one.tensor_parallel for one in fleets(run, 8 * 64)}
    assert 64 not in {one.tensor_parallel for one in fleets(run, 8 * 72)}, "nine groups in 8 racks"


def far(run: Run) -> ReplicaHardware:
    return in_pool(resolve(run).replica, "far", run.cluster.pools)


def test_a_model_that_fits_no_node_is_planned_in_stages_of_whole_nodes() -> None:
    large = plan(name="llama-3.1-405b", tensor_parallel=8, pipeline_parallel=2)
    unasked = plan(name="llama-3.1-405b", tensor_parallel=8)
    found = fleets(unasked, 16)
    assert {(one.tensor_parallel, one.pipeline_parallel) for one in found} == {(8, 2)}
    assert found[0].change(unasked.rollout) == large.rollout
    assert fleets(unasked, 8) == []


def test_attention_ranks_are_planned_where_the_offer_names_them() -> None:
    run = plan({"nodes": 16}, name="qwen3-235b-a22b", tensor_parallel=8)
    assert {one.data_parallel for one in fleets(run, 64)} == {1}
    asked = small_run_with(run, [1, 8, 16])
    found = fleets(asked, 64)
    assert {one.data_parallel for one in found} == {1, 8, 16}
    wide = next(one for one in found if one.data_parallel == 16 and one.tensor_parallel == 4)
    assert wide.expert_parallel == 64 and wide.num_gpus == 64


def check_ranks(run: Run) -> None:
    check_attention_ranks(run.plan, load_model(run.model))


def test_attention_ranks_that_divide_no_experts_are_refused_and_those_that_fit_rarely_counted() -> (
    None
):
    run = plan({"nodes": 16}, name="qwen3-235b-a22b", tensor_parallel=8)
    told = (
        r"plan\.rollout_data_parallel must divide the experts of .*, which has 128 experts, got 3"
    )
    with pytest.raises(RunError, match=told):
        check_ranks(small_run_with(run, [1, 3]))
    with pytest.raises(RunError, match="which has no experts, got 2"):
        check_ranks(small_run_with(plan(), [2]))
    check_ranks(small_run_with(run, [1, 8]))
    cut: Counter[str] = Counter()
    for ranks, num_gpus, degree in ((64, 128, 4), (32, 256, 8)):
        asked = replace(small_run_with(run, [ranks]).plan, rollout_tensor_parallel=[degree])
        list(fitting_replicas(far(run), asked, num_gpus, cut))
    assert cut[DIVISIBILITY] == 1
    assert cut[EXPERTS] == 1


def small_run_with(run: Run, ranks: list[int]) -> Run:
    return replace(run, plan=replace(run.plan, rollout_data_parallel=ranks))


def test_execute_refuses_stages_and_attention_ranks_in_one_line() -> None:
    for key, changes in (
        ("pipeline_parallel", {"pipeline_parallel": 2}),
        ("data_parallel", {"data_parallel": 2, "expert_parallel": 2}),
    ):
        run = small_run(
            {"execute.launcher": "local", **{f"rollout.{k}": v for k, v in changes.items()}}
        )
        with pytest.raises(ValueError, match=rf"rollout\.{key} must be 1 to be executed, got 2"):
            check_back_ends(run)

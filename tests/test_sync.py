"""Weight synchronisation against closed forms and published timings."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_sync
from streamrl.hardware.memory import weight_bytes
from streamrl.hardware.model_shape import ModelShape, linear_layers, lora_parameters
from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.sync_profiles import (
    load_backend,
    load_delta,
    load_hand_over,
    load_rank_group,
    load_transport,
)
from streamrl.sim.costs.weight_sync import Hop, Payload, SyncCosts, TransferTimes, num_tensors
from tests.runs import small_run

SHARED = Path(__file__).parents[2] / "shared" / "data" / "weight_sync" / "weight_sync_measured.csv"
H20 = load_gpu("h20")
RANKS = ("ranks-gloo", "ranks-nccl")
FITTED = [row for row in bench_sync.read_rows(bench_sync.ROWS) if row.use == "fit"]


def sync(changes: dict[str, Any] | None = None, **link: object) -> SyncCosts:
    """Return the costs of the small run: two replicas on one H20 node, 80 Gbps and 10 ms away."""
    wire = {"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "10 ms", **link}
    return SyncCosts.load(resolve(small_run({"cluster.links": [wire], **(changes or {})})))


UNSPLIT = {
    "trainer.tensor_parallel": 1,
    "cluster.pools.near.gpu": "h200",
    "model.name": "qwen2.5-0.5b",
}
IN_ONE_POOL = {
    "rollout.pool": "near",
    "cluster.pools.near.nodes": 8,
    "trainer.tensor_parallel": 8,
    "trainer.pipeline_parallel": 2,
    "algorithm.prompts_per_step": 8,
}


# Buckets and legs ---------------------------------------------------------------------------------


def test_one_leg_takes_bytes_over_bandwidth_whatever_the_bucket() -> None:
    for bucket_size in (1e6, 7e7, 1e12):
        assert TransferTimes.through([Hop(2e9)], 1e9, bucket_size).total == pytest.approx(0.5)


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_a_pipelined_broadcast_adds_one_bucket_for_each_further_hop(hops: int) -> None:
    passage = TransferTimes.through([Hop(1e9)] * hops, 10e9, 1e9)
    assert passage.total == pytest.approx(10 + (hops - 1) * 1)


def test_a_leg_in_front_of_a_slower_one_costs_one_bucket_of_its_own() -> None:
    passage = TransferTimes.through([Hop(4e9), Hop(1e9), Hop(2e9)], 10e9, 1e9)
    assert passage.fill_time == pytest.approx(0.25)
    assert passage.hold_time == pytest.approx(10)
    assert passage.drain_time == pytest.approx(0.5)


def test_every_bucket_costs_one_message() -> None:
    passage = TransferTimes.through([Hop(1e9, message_latency=0.25)], 10e9, 1e9)
    assert passage.total == pytest.approx(10 + 10 * 0.25)


@given(
    st.lists(st.floats(1e8, 1e11), min_size=1, max_size=6),
    st.floats(1.0, 1e11),
    st.floats(1e6, 1e12),
)
def test_a_pipeline_is_no_faster_than_its_slowest_leg_and_no_slower_than_all_in_turn(
    bandwidths: list[float], num_bytes: float, bucket_size: float
) -> None:
    total = TransferTimes.through([Hop(b) for b in bandwidths], num_bytes, bucket_size).total
    alone = [num_bytes / bandwidth for bandwidth in bandwidths]
    assert max(alone) * (1 - 1e-9) <= total <= sum(alone) * (1 + 1e-9)


# What is sent -------------------------------------------------------------------------------------


def test_adapters_have_rank_times_inputs_and_outputs_of_every_linear_layer() -> None:
    shape = ModelShape(
        name="hand",
        source="made up",
        hidden_size=8,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        intermediate_size=20,
        vocab_size=100,
        has_qkv_bias=False,
        has_tied_embeddings=False,
    )
    query = output = 8 + 8
    keys_values = 2 * (8 + 4)
    mlp = 3 * (8 + 20)
    assert lora_parameters(shape, rank=5) == 5 * 3 * (query + keys_values + output + mlp)


def test_adapters_of_rank_32_are_as_large_as_those_of_a_7b_model_in_use() -> None:
    run = small_run({"sync.mode": "lora", "sync.lora_rank": 32})
    payload = Payload.of(resolve(run).replica, run.sync)
    assert payload.num_bytes == pytest.approx(161e6, rel=0.01)  # 80.7e6 parameters, as peft prints
    assert payload.num_tensors == 28 * 7 * 2


@pytest.mark.parametrize(
    ("name", "published"),
    [("qwen2.5-7b", 339), ("qwen2.5-32b", 771), ("qwen3-30b-a3b", 18867), ("qwen3-8b", 399)],
)
def test_a_checkpoint_has_the_published_number_of_tensors(name: str, published: int) -> None:
    assert num_tensors(load_model(ModelConfig(name=name))) == published


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_linear_layers_hold_nearly_all_parameters_but_the_embeddings(name: str) -> None:
    model = load_model(ModelConfig(name=name))
    in_linear = sum(inner * outer * count for inner, outer, count in linear_layers(model))
    others = model.num_parameters - 2 * model.num_embedding_parameters
    assert in_linear == pytest.approx(others, rel=1e-3)


@pytest.mark.parametrize(("share", "num_bytes"), [(0.03, 5.858e9), (0.05, 9.765e9)])
def test_a_delta_has_the_bytes_that_were_measured(share: float, num_bytes: float) -> None:
    assert 123.6e9 * share * load_delta().bytes_per_value == pytest.approx(num_bytes, rel=1e-3)
    costs = sync({"sync.mode": "delta", "sync.changed_share": share})
    values = load_model(ModelConfig(name="qwen2.5-7b")).num_parameters
    assert costs.wire_bytes == pytest.approx(values * share * 1.58, rel=1e-6)


# A whole push -------------------------------------------------------------------------------------


def test_a_push_to_another_datacenter_takes_its_bytes_over_the_link_its_latency_and_one_bucket() -> (
    None
):
    run = small_run(UNSPLIT)
    costs, link, num_bytes = (
        SyncCosts.load(resolve(run)),
        load_transport("tcp"),
        weight_bytes(resolve(run).replica),
    )
    assert num_bytes < run.sync.bucket_size
    on_the_link = num_bytes / (1e10 * link.efficiency) + link.message_latency
    sent = num_bytes / load_backend("broadcast-tree").sender_bandwidth
    others = 0.01 + num_bytes / H20.nvlink
    assert costs.push_time == pytest.approx(sent + on_the_link + others, rel=1e-12)


def test_72b_over_80_gbps_takes_no_less_than_what_tcp_reaches_of_the_line_rate() -> None:
    changes = {
        "model.name": "qwen2.5-72b",
        "rollout.tensor_parallel": 4,
        "trainer.tensor_parallel": 8,
        "trainer.pipeline_parallel": 2,
        "cluster.pools.near.nodes": 2,
    }
    efficiency = load_transport("tcp").efficiency
    assert 14.5 / efficiency <= sync(changes).push_time <= 14.6 / efficiency + 1


def test_tcp_is_slower_than_rdma_by_the_ratio_of_their_efficiencies() -> None:
    slow, fast = sync(transport="tcp").wire_time, sync(transport="rdma").wire_time
    ratio = load_transport("rdma").efficiency / load_transport("tcp").efficiency
    assert ratio > 1
    assert slow / fast == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("bucket_size", ["10 MB", "1 GB", "1 TB"])
def test_the_latency_of_a_link_counts_once(bucket_size: str) -> None:
    changes = {"sync.bucket_size": bucket_size}
    near, far = sync(changes, latency="10 ms"), sync(changes, latency="110 ms")
    assert far.push_time - near.push_time == pytest.approx(0.1)


def test_one_copy_crosses_to_another_datacenter_however_many_replicas_wait() -> None:
    few, many = sync({"rollout.replicas": 1}), sync({"rollout.replicas": 8})
    assert few.wire_bytes == many.wire_bytes == weight_bytes(resolve(small_run()).replica)
    assert few.push_time == many.push_time


def test_nodes_behind_the_link_cost_one_bucket_each_time_their_number_doubles() -> None:
    def push_time(nodes: int) -> float:
        changes = {"cluster.pools.far.nodes": nodes, "rollout.replicas": 8 * nodes}
        return sync(changes).push_time

    network = load_transport("rdma")
    bucket = weight_bytes(resolve(small_run()).replica) / 16
    hop = bucket / (H20.network * 8 * network.efficiency) + network.message_latency
    assert push_time(2) - push_time(1) == pytest.approx(hop)
    assert push_time(16) - push_time(1) == pytest.approx(4 * hop)


def test_a_push_by_no_named_library_has_the_median_of_the_measured_senders_and_their_range() -> (
    None
):
    slow, middle, fast = sorted(
        load_backend(name).sender_bandwidth
        for name in ("nccl-broadcast", "nccl-buckets", "nccl-packed")
    )
    tree = load_backend("broadcast-tree")
    assert tree.sender_bandwidth == middle
    assert tree.error == pytest.approx((middle / fast, 1, middle / slow), abs=0.005)


def test_the_range_of_senders_widens_a_push_unless_something_slower_is_behind_the_sender() -> None:
    assert sync(IN_ONE_POOL).spread == load_backend("broadcast-tree").error.spread > 1
    assert sync(bandwidth="8 Gbps").spread == 0
    assert sync({**IN_ONE_POOL, "sync.backend": "nccl-packed"}).spread == 0
    costs = Costs.load(resolve(small_run({**IN_ONE_POOL, "cluster.links": []})).run)
    assert costs.provenance["sync"].spread > 1


def test_on_one_node_the_sender_and_nvlink_count() -> None:
    changes = {"rollout.pool": "near", "trainer.tensor_parallel": 4, "rollout.replicas": 4}
    costs = sync({**changes, "sync.bucket_size": "1 TB"})
    sender, nvlink = load_backend("broadcast-tree").sender_bandwidth, load_gpu("h800").nvlink
    num_bytes = weight_bytes(resolve(small_run()).replica)
    assert costs.push_time == pytest.approx(num_bytes * (1 / sender + 1 / nvlink), rel=1e-9)


def test_shards_cross_a_link_once_for_every_replica() -> None:
    changes = {"sync.backend": "nccl-reshard", "cluster.pools.far.nodes": 2}
    one, ten = sync({**changes, "rollout.replicas": 1}), sync({**changes, "rollout.replicas": 10})
    num_bytes, share = (
        weight_bytes(resolve(small_run()).replica),
        load_backend("nccl-reshard").broadcast_share,
    )
    assert ten.wire_bytes - one.wire_bytes == pytest.approx(9 * (1 - share) * num_bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("gpu", "replicas", "degree", "bandwidth", "busiest"),
    [
        ("h20", 1, 1, "8 Tbps", "receiver"),
        ("h20", 1, 4, "8 Tbps", "receiver"),
        ("h100", 8, 1, "8 Tbps", "sender"),
        ("h20", 8, 1, "8 Gbps", "link"),
    ],
)
def test_shards_take_as_long_as_the_busiest_of_receiver_sender_and_link(
    gpu: str, replicas: int, degree: int, bandwidth: str, busiest: str
) -> None:
    changes = {
        "sync.backend": "nccl-reshard",
        "sync.bucket_size": "1 TB",
        "cluster.pools.far.gpu": gpu,
        "rollout.replicas": replicas,
        "rollout.tensor_parallel": degree,
    }
    costs = sync(changes, bandwidth=bandwidth, transport="rdma")
    backend, network = load_backend("nccl-reshard"), load_transport("rdma")
    num_bytes = weight_bytes(resolve(small_run()).replica)
    shards = num_bytes * (1 - backend.broadcast_share)
    line = float(bandwidth.split()[0]) * {"Tbps": 1e12, "Gbps": 1e9}[bandwidth.split()[1]] / 8
    shard_time = {
        "receiver": shards / degree / (load_gpu(gpu).network * network.efficiency),
        "sender": shards * replicas / 4 / (load_gpu("h800").network * network.efficiency),
        "link": shards * replicas / (line * network.efficiency),
    }
    assert shard_time[busiest] == max(shard_time.values())
    slowest = min(backend.sender_bandwidth, line * network.efficiency)
    broadcast_time = num_bytes * backend.broadcast_share / slowest
    assert costs.wire_time == pytest.approx(shard_time[busiest] + broadcast_time, rel=1e-3)


def test_a_delta_pays_for_the_comparison_of_all_weights() -> None:
    costs = sync({"sync.mode": "delta"})
    compare_time = weight_bytes(resolve(small_run()).replica) / load_delta().compare_bandwidth
    codec_time = costs.wire_bytes / load_delta().codec_bandwidth
    assert costs.push_time > compare_time + codec_time
    assert costs.push_time == pytest.approx(compare_time + codec_time, rel=0.1)


# The load -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2])
def test_a_load_copies_the_shard_within_the_gpu_and_over_tcp_from_the_host_first(
    degree: int,
) -> None:
    shard = weight_bytes(resolve(small_run()).replica) / degree
    copy = 2 * shard / (H20.memory_bandwidth * H20.roofline.bandwidth_efficiency)
    changes = {"rollout.tensor_parallel": degree}
    assert sync(changes, transport="rdma").load_time == pytest.approx(copy)
    assert sync(changes, transport="tcp").load_time == pytest.approx(copy + shard / H20.host_link)


def test_a_pool_that_speaks_tcp_loads_through_its_hosts() -> None:
    direct = sync(transport="rdma")
    staged = sync({"cluster.pools.far.transport": "tcp"}, transport="rdma")
    through_host = weight_bytes(resolve(small_run()).replica) / H20.host_link
    assert staged.load_time - direct.load_time == pytest.approx(through_host)


def test_a_delta_is_applied_to_the_whole_shard_and_adapters_only_to_themselves() -> None:
    full = sync(transport="rdma").load_time
    assert sync({"sync.mode": "delta"}, transport="rdma").load_time == full
    lora = {"sync.mode": "lora", "rollout.backend": "vllm"}
    assert sync(lora, transport="rdma").load_time < full / 50
    merged = sync({**lora, "sync.merge_adapters": True}, transport="rdma")
    by_host = weight_bytes(resolve(small_run()).replica) / H20.host_link
    assert merged.load_time == pytest.approx(full + by_host)
    assert sync({"sync.mode": "lora"}, transport="rdma").load_time == merged.load_time
    assert "merging adapters" in " ".join(merged.sources)


# What is known ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tier"),
    [
        ({}, "roofline"),
        ({"sync.backend": "nccl-reshard"}, "composed"),
        (
            {"sync.backend": "nccl-broadcast", "sync.mode": "lora", "rollout.backend": "vllm"},
            "roofline",
        ),
        ({"sync.backend": "nccl-reshard", "cluster.pools.near.transport": "tcp"}, "roofline"),
    ],
)
def test_only_fitted_constants_over_rdma_are_more_than_a_roofline(
    changes: dict[str, Any], tier: str
) -> None:
    costs = sync({**IN_ONE_POOL, **changes})
    assert costs.tier == tier
    assert all((PROFILES.parent / source).is_file() for source in costs.sources)


@pytest.mark.parametrize("row", FITTED, ids=lambda row: row.name)
def test_every_row_that_constants_were_fitted_to_is_met_within_25_percent(
    row: bench_sync.Row,
) -> None:
    assert abs(bench_sync.error(row)) < 0.25


def test_every_row_that_is_missed_says_why() -> None:
    rows = bench_sync.read_rows(bench_sync.ROWS)
    assert all(row.note for row in rows if row.use != "fit")


@pytest.mark.parametrize("backend", sorted(bench_sync.CONSTANTS))
def test_the_constants_in_profiles_are_those_of_the_fit(backend: str) -> None:
    same = bench_sync.group(FITTED)[backend]
    constants = bench_sync.fit(same)
    for row in same:
        fitted = bench_sync.physical_time(row) + float(bench_sync.features(row) @ constants)
        assert bench_sync.predict(row) == pytest.approx(fitted, rel=2e-3)


def test_the_committed_table_has_every_row_of_the_shared_one() -> None:
    if not SHARED.is_file():
        pytest.skip(f"no {SHARED}: the shared measurements are not on this machine")
    with SHARED.open() as file:
        published = sorted(float(row["seconds"]) for row in csv.DictReader(file))
    committed = [row.seconds for row in bench_sync.read_rows(bench_sync.ROWS)]
    assert [seconds for seconds in published if seconds not in committed] == []


def test_every_transport_and_backend_loads_with_its_source() -> None:
    for path in (PROFILES / "transports").glob("*.toml"):
        transport = load_transport(path.stem)
        assert transport.source
        assert 0 < transport.efficiency <= 1
    for path in (PROFILES / "sync").glob("*.toml"):
        others = {"cuda-ipc": load_hand_over, **dict.fromkeys(RANKS, load_rank_group)}
        load = others.get(path.stem, load_backend)
        profile = load_delta() if path.stem == "delta" else load(path.stem)
        assert profile.source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync.mode": "sparse"}, "sync.mode must be one of full, lora, delta, got 'sparse'"),
        ({"sync.backend": "nixl"}, "sync.backend must be one of broadcast-tree, .* got 'nixl'"),
        (
            {"sync.bucket": "1 GB"},
            "sync.bucket is not a key of a run file; did you mean bucket_size",
        ),
        ({"sync.bucket_size": 5}, "sync.bucket_size: 5 needs a unit"),
        ({"sync.bucket_size": "0 GB"}, "sync.bucket_size must be above 0 B, got 0 B"),
        ({"sync.lora_rank": 0}, "sync.lora_rank must be at least 1, got 0"),
        ({"sync.lora_alpha": 0.0}, "sync.lora_alpha must be above 0, got 0"),
        ({"sync.changed_share": 0.0}, r"sync.changed_share must be in \(0, 1\], got 0.0"),
        ({"sync.changed_share": 1.5}, r"sync.changed_share must be in \(0, 1\], got 1.5"),
        ({"sync.changed_share": float("nan")}, r"sync.changed_share must be in \(0, 1\], got nan"),
        ({"sync.mode": "delta", "model.dtype": "float32"}, "sync.mode 'delta' needs .* 16 bits"),
        (
            {"sync.mode": "lora", "sync.backend": "nccl-reshard"},
            "sync.mode must be 'full', got 'lora'",
        ),
        ({"cluster.pools.far.transport": "smoke"}, "cluster.pools.far.transport .*'smoke'"),
    ],
)
def test_a_wrong_sync_section_is_refused_with_key_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small_run(changes)

"""Compute the time to move a rollout's KV cache to another replica; each GPU sends its shard to its counterpart.

    seconds per token  =  bytes of its keys and values on one GPU / bandwidth between two GPUs

Within a node, or another NVLink domain, the bandwidth is that of NVLink. Otherwise it is a GPU's
share of its node's network. If the network ends in host memory, it is the slower of the network and
the host link. In a pool of several nodes every move counts as one between nodes, because the
placement of replicas is not modelled. States of a fixed size (windows, linear attention) are not
counted, nor is waiting for other traffic. `CacheRoute` is for transfers from prefill replicas, which
share the network (`streamrl.sim.kv_transfer`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.gpu_pools import find_link
from streamrl.sim.costs.weight_sync import SyncSide, link_hop


@dataclass(frozen=True)
class CacheTransfer:
    """The time to move a rollout's cache to another replica."""

    token_time: float
    """Seconds per token of context."""
    provenance: Provenance
    """Roofline: line rates come from a datasheet, and no cache transfer was measured."""

    @classmethod
    def of(cls, replica: ReplicaHardware) -> CacheTransfer:
        """Compute the transfer from the pool of the replicas."""
        config = replica.config
        side = SyncSide.of(replica.pool, config.num_gpus)
        num_bytes = replica.longest_model.shard_kv_bytes_per_token(
            replica.precision.cache, config.tensor_parallel
        )
        num_bytes /= config.pipeline_parallel
        return cls(num_bytes / _bandwidth(side), Provenance.of("roofline", _sources(side)))

    def time(self, context: int) -> float:
        """Return the seconds for a rollout with `context` tokens of prompt and output."""
        return context * self.token_time


@dataclass(frozen=True)
class CacheRoute:
    """The way of KV caches from prefill replicas of one kind to decode replicas of another.

    Every GPU of the decode replica reads its shard, and all GPUs of the prefill replica send equal
    parts. So a latent cache, or a head that several GPUs share, crosses once for each of them.
    """

    send_rate: float
    """Tokens per second that a prefill replica sends."""
    receive_rate: float
    """Tokens per second that a decode replica receives."""
    latency: float
    """Seconds before the first byte arrives."""
    provenance: Provenance
    """Roofline, as for `CacheTransfer`."""
    link: tuple[str, str] | None = None
    """The link between their pools, which all transfers share; None within one pool."""
    link_rate: float = inf
    """Tokens per second that cross it."""

    @classmethod
    def of(
        cls, prefill: ReplicaHardware, decode: ReplicaHardware, link: LinkConfig | None
    ) -> CacheRoute:
        """Compute the route between two kinds of replicas; `link` joins their pools if these differ."""
        sender = SyncSide.of(prefill.pool, prefill.config.num_gpus)
        receiver = SyncSide.of(decode.pool, decode.config.num_gpus)
        config, ranks = decode.config, prefill.config.gpus_per_replica
        shard = decode.longest_model.shard_kv_bytes_per_token(
            decode.precision.cache, config.tensor_parallel
        )
        shard /= config.pipeline_parallel
        whole = shard * config.tensor_parallel * config.pipeline_parallel
        one_node = link is None and receiver.pool.num_gpus <= receiver.pool.domain
        sends, receives = _network_bandwidth(sender), _network_bandwidth(receiver)
        if one_node:
            sends, receives = sender.gpu.nvlink, receiver.gpu.nvlink
        sources = tuple(dict.fromkeys((*_sources(sender), *_sources(receiver))))
        route = cls(
            send_rate=sends * ranks / whole,
            receive_rate=receives * config.data_parallel / shard,
            latency=0.0 if one_node else receiver.network.message_latency,
            provenance=Provenance.of("roofline", sources),
        )
        return route if link is None else route.over(link, whole)

    def over(self, link: LinkConfig, num_bytes: float) -> CacheRoute:
        """Return the route over a link between two pools, for tokens of `num_bytes` each."""
        hop = link_hop(link)
        file = f"profiles/transports/{link.transport}.toml"
        return replace(
            self,
            latency=link.latency + hop.message_latency,
            link=link.between,
            link_rate=hop.bandwidth / num_bytes,
            provenance=Provenance.of("roofline", (*self.provenance.sources, file)),
        )

    @classmethod
    def between_kinds(cls, resolved: ResolvedRun) -> dict[tuple[int, int], CacheRoute]:
        """Return the route from each kind of prefill replica to each other kind; none if no kind only prefills."""
        replicas, links = resolved.replicas, resolved.run.cluster.links
        prefill_kinds = resolved.run.rollout.prefill_kinds
        routes = {}
        for source in prefill_kinds:
            for target in (n for n in range(len(replicas)) if n not in prefill_kinds):
                pools = replicas[source].config.pool, replicas[target].config.pool
                index = find_link(links, *pools)
                link = None if index is None else links[index]
                routes[source, target] = cls.of(replicas[source], replicas[target], link)
        return routes


@dataclass(frozen=True)
class HostCache:
    """Host memory of a replica for contexts that its GPUs evict (`rollout.kv_offload`)."""

    capacity: float
    """Tokens that fit."""
    token_time: float
    """Seconds to load a token back. Each GPU of the replica loads its own part over its host link.
    Copies to host memory take no time of the replica: DMA makes them while it computes, as in
    vLLM's OffloadingConnector (docs.vllm.ai, "KV Offloading Usage Guide").
    """

    @classmethod
    def of(cls, replica: ReplicaHardware) -> HostCache | None:
        """Compute the cache of one kind of replica; None without offload."""
        config = replica.config
        if config.kv_offload is None:
            return None
        per_gpu = replica.longest_model.shard_kv_bytes_per_token(
            replica.precision.cache, config.tensor_parallel
        )
        per_gpu /= config.pipeline_parallel
        num_gpus = config.tensor_parallel * config.pipeline_parallel
        return cls(config.kv_offload / (per_gpu * num_gpus), per_gpu / replica.gpu.host_link)


def _bandwidth(side: SyncSide) -> float:
    """Return the bytes per second from a GPU of one replica to a GPU of another."""
    if side.pool.num_gpus <= side.pool.domain:
        return side.gpu.nvlink
    return _network_bandwidth(side)


def _network_bandwidth(side: SyncSide) -> float:
    """Return the bytes per second between one GPU and another node, or another pool."""
    if side.network.is_through_host:
        return min(side.rank_bandwidth, side.gpu.host_link)
    return side.rank_bandwidth


def _sources(side: SyncSide) -> tuple[str, ...]:
    gpu = f"profiles/gpus/{side.pool.gpu}.toml"
    network = f"profiles/transports/{side.pool.transport}.toml"
    return (gpu,) if side.pool.num_gpus <= side.pool.domain else (gpu, network)

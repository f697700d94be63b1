"""Compute the time to move a rollout's KV cache to another replica; each GPU sends its shard to its counterpart.

    seconds per token  =  bytes of its keys and values on one GPU / bandwidth between two GPUs

Within a node, or another NVLink domain, the bandwidth is that of NVLink. Otherwise it is a GPU's
share of its node's network. If the network ends in host memory, it is the slower of the network and
the host link. In a pool of several nodes every move counts as one between nodes, because the
placement of replicas is not modelled. States of a fixed size (windows, linear attention) are not
counted, nor is waiting for other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.resolved import ReplicaHardware
from streamrl.hardware.tiers import Provenance
from streamrl.sim.costs.weight_sync import SyncSide


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
    if side.network.is_through_host:
        return min(side.rank_bandwidth, side.gpu.host_link)
    return side.rank_bandwidth


def _sources(side: SyncSide) -> tuple[str, ...]:
    gpu = f"profiles/gpus/{side.pool.gpu}.toml"
    network = f"profiles/transports/{side.pool.transport}.toml"
    return (gpu,) if side.pool.num_gpus <= side.pool.domain else (gpu, network)

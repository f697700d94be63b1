"""Moving a rollout's KV cache from one replica to another: each GPU sends its shard to its counterpart.

    seconds of a token  =  bytes of its keys and values on one GPU / bandwidth between two GPUs

Within a node, or another NVLink domain, that is NVLink, else a GPU's share of its node's network, or of the way through host memory
where the network ends there and that is slower. In a pool of several nodes every move counts as one between
nodes: which replica stands where is not modelled. What a rollout keeps whatever its length (windows, linear states) is not
counted. Nothing else on the wire is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.resolved import ReplicaHardware
from streamrl.hardware.tiers import Provenance
from streamrl.sim.costs.weight_sync import SyncSide


@dataclass(frozen=True)
class CacheTransfer:
    """Seconds in which a rollout's cache reaches another replica."""

    token_time: float
    """Seconds of each token of context."""
    provenance: Provenance
    """Roofline: line rates are a datasheet's, and no transfer of caches was timed."""

    @classmethod
    def of(cls, replica: ReplicaHardware) -> CacheTransfer:
        """Return what the pool of the replicas allows."""
        config = replica.config
        side = SyncSide.of(replica.pool, config.num_gpus)
        num_bytes = replica.longest_model.shard_kv_bytes_per_token(
            replica.precision.cache, config.tensor_parallel
        )
        num_bytes /= config.pipeline_parallel
        return cls(num_bytes / _bandwidth(side), Provenance.of("roofline", _sources(side)))

    def time(self, context: int) -> float:
        """Return the seconds of a rollout that has `context` tokens of prompt and output."""
        return context * self.token_time


def _bandwidth(side: SyncSide) -> float:
    """Return the bytes a second from a GPU of one replica to one of another."""
    if side.pool.num_gpus <= side.pool.domain:
        return side.gpu.nvlink
    if side.network.is_through_host:
        return min(side.rank_bandwidth, side.gpu.host_link)
    return side.rank_bandwidth


def _sources(side: SyncSide) -> tuple[str, ...]:
    gpu = f"profiles/gpus/{side.pool.gpu}.toml"
    network = f"profiles/transports/{side.pool.transport}.toml"
    return (gpu,) if side.pool.num_gpus <= side.pool.domain else (gpu, network)

"""Compute the seconds and bytes of a weight sync: gather, encode, cross the link, broadcast, load.

    trainer ranks ──gather──► sender ──link──► one node ──tree──► nodes ──NVLink──► GPUs ──load──► weights

The payload is cut into equal buckets that pass the hops one after the other, so n buckets take

    sum of every hop's time for one bucket  +  (n - 1) * the slowest hop's time for one bucket

One copy crosses the link between pools for all replicas. The sender has a measured rate, with its gather (profiles/sync).
A push runs
in parallel to generation, as if replicas had separate receive buffers; only the load pauses a
replica.

A long link adds TCP's slow start, which begins again after each pause. A sender has ten segments
under way at first (RFC 6928), and doubles them with every round trip until the link is full. A
connection that was idle for longer than a retransmission timeout begins again (RFC 5681, section
4.1). This is the case between two pushes of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import assert_never

from streamrl.hardware.memory import draft_parameters, fullest_stage, vision_bytes, weight_bytes
from streamrl.hardware.model_shape import BYTES, ModelShape, linear_layers, lora_parameters
from streamrl.hardware.precision import quantised_bytes
from streamrl.hardware.profiles import Gpu, gpu_of
from streamrl.hardware.resolved import ReplicaHardware, ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import TIERS, Provenance, Tier
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.policies_config import SyncConfig
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.sim.costs.corrections import Corrections
from streamrl.sim.costs.sync_profiles import (
    SyncBackend,
    Transport,
    load_backend,
    load_delta,
    load_transport,
)


@dataclass(frozen=True)
class Payload:
    """One copy of the transferred data."""

    num_bytes: int
    num_tensors: int

    @classmethod
    def of(cls, replica: ReplicaHardware, sync: SyncConfig) -> Payload:
        """Return the payload of a `sync.mode`."""
        model, drafted = replica.model, _sent_draft_parameters(replica)
        match sync.mode:
            case "full":
                num_bytes = _sent_bytes(replica, sync) + drafted * BYTES[replica.precision.wide]
                return cls(num_bytes, num_tensors(model))
            case "lora":
                parameters = lora_parameters(model, sync.lora_rank)
                num_adapted = sum(count for _, _, count in linear_layers(model))
                return cls(parameters * BYTES[replica.adapter_dtype], 2 * num_adapted)
            case "delta":
                changed = (model.num_parameters + drafted) * sync.changed_share
                return cls(round(changed * load_delta().bytes_per_value), num_tensors(model))
            case _:
                assert_never(sync.mode)


def _sent_draft_parameters(replica: ReplicaHardware) -> int:
    """Return the parameters of a draft layer that changes in every step; 0 without one."""
    drafts = replica.config.drafts
    return draft_parameters(replica.model) if drafts is not None and drafts.trained else 0


def _sent_bytes(replica: ReplicaHardware, sync: SyncConfig) -> int:
    """Return the bytes of all weights: in the replicas' format, or in the trainer's if each replica quantises its own."""
    if sync.quantise_at == "trainer":
        return weight_bytes(replica)
    wide = replica.precision.wide
    return replica.model.num_parameters * BYTES[wide] + vision_bytes(replica.model, wide)


def num_tensors(model: ModelShape) -> int:
    """Return the number of tensors in a checkpoint on the hub, counting each expert's projections separately."""
    linear = sum(count for _, _, count in linear_layers(model))
    per_layer = model.num_blocks / model.num_layers + 3 * model.has_qkv_bias
    per_layer += 2 * model.has_qk_norm + 2 * (model.indexer is not None)
    others = 0
    if model.compressed is not None:
        # Norms of latent queries and of vectors, sinks, and products that engines fuse but files do not.
        per_layer += 4
        others += 6 * model.compressed.num_sparse_layers + 3 * model.compressed.num_dense_layers
    if model.hyper_connections is not None:
        others += 3 * (model.num_blocks + 1)
    if model.latent is not None:
        per_layer += 1 if model.latent.q_lora_rank is None else 2
    per_router = 0 if model.experts is None else 1 + model.experts.has_router_bias
    tables = 1 if model.has_tied_embeddings else 2
    return (
        linear
        + round(model.num_layers * per_layer)
        + model.num_expert_layers * per_router
        + tables
        + others
        + 1  # the last norm
    )


INITIAL_WINDOW = 10 * 1448.0
"""Bytes under way at first, in segments of an MTU of 1500."""


def sending_time(num_bytes: float, bandwidth: float, round_trip: float) -> float:
    """Return the seconds until the last byte has left over one idle connection.

    Args:
        num_bytes: bytes to send.
        bandwidth: bytes per second of the link.
        round_trip: seconds to the other end and back.
    """
    seconds, sent, window = 0.0, 0.0, INITIAL_WINDOW
    while sent + window < num_bytes and window < bandwidth * round_trip:
        seconds += round_trip
        sent += window
        window *= 2
    return seconds + (num_bytes - sent) / bandwidth


COPY_TRAFFIC = 2
"""Bytes of memory traffic for each byte copied within a GPU: read once, written once."""


@dataclass(frozen=True)
class Hop:
    """A part of the route that buckets pass one after the other."""

    bandwidth: float
    message_latency: float = 0.0

    def time(self, num_bytes: float) -> float:
        """Return the seconds of one bucket."""
        return num_bytes / self.bandwidth + self.message_latency


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of a payload: until its slowest hop begins, in that hop, and after it."""

    fill_time: float
    hold_time: float
    drain_time: float

    @classmethod
    def through(cls, legs: Sequence[Hop], num_bytes: float, bucket_size: float) -> TransferTimes:
        """Send `num_bytes` through `legs` in equal buckets of at most `bucket_size`."""
        num_buckets = max(1, ceil(num_bytes / bucket_size))
        times = [leg.time(num_bytes / num_buckets) for leg in legs]
        slowest = times.index(max(times))
        return cls(sum(times[:slowest]), num_buckets * times[slowest], sum(times[slowest + 1 :]))

    @property
    def total(self) -> float:
        """Seconds from the first byte sent to the last one received."""
        return self.fill_time + self.hold_time + self.drain_time


@dataclass(frozen=True)
class SyncSide:
    """One side's pool, GPU and network."""

    pool: PoolConfig
    gpu: Gpu
    num_gpus: int
    network: Transport

    @classmethod
    def of(cls, pool: PoolConfig, num_gpus: int) -> SyncSide:
        """Read the hardware of a side from its pool."""
        return cls(pool, gpu_of(pool), num_gpus, load_transport(pool.transport))

    @property
    def num_nodes(self) -> int:
        """Nodes that the side's GPUs fill, or NVLink domains of several nodes."""
        return -(-self.num_gpus // self.pool.domain)

    @property
    def rank_bandwidth(self) -> float:
        """Bytes per second between a GPU of this side and another node."""
        return self.gpu.network * self.network.efficiency

    @property
    def node_bandwidth(self) -> float:
        """Bytes per second between two nodes, with all their network cards."""
        return self.rank_bandwidth * self.pool.domain


@dataclass(frozen=True, kw_only=True)
class SyncCosts:
    """Seconds and bytes of one weight sync."""

    wire_bytes: int
    """Bytes that leave the trainer for the replicas."""
    fill_time: float
    """Seconds of a push before it holds the wire: setup, encoding, the first bucket's way."""
    wire_time: float
    """Seconds for which a push holds the wire."""
    drain_time: float
    """Seconds of the last bucket after the wire, including the link's latency and calls of roles."""
    unpack_time: float = 0.0
    """Seconds after that to decode weights, on host cores that other roles may use."""
    load_time: float
    """Seconds in which a replica loads pushed weights and does not generate."""
    tier: Tier
    sources: tuple[str, ...]
    """Files of profiles/ that the figures come from."""
    spread: float = 0.0
    """By how much the seconds may be off as a share, because rates of senders differ."""

    @property
    def provenance(self) -> Provenance:
        """Return where the seconds come from."""
        return Provenance.of(self.tier, self.sources).with_spread(self.spread)

    @property
    def push_time(self) -> float:
        """Seconds of a push if the wire is free."""
        return self.fill_time + self.wire_time + self.drain_time + self.unpack_time

    def calibrated(self, corrections: Corrections) -> SyncCosts:
        """Return the costs corrected by a calibration, if it has the GPUs of the replicas."""
        source = corrections.sync_source
        if source is None:
            return self
        factor = corrections.sync_factor
        return replace(
            self,
            fill_time=self.fill_time / factor,
            wire_time=self.wire_time / factor,
            drain_time=self.drain_time / factor,
            unpack_time=self.unpack_time / factor,
            load_time=self.load_time / factor,
            sources=(*self.sources, source),
        )

    @classmethod
    def load(cls, resolved: ResolvedRun) -> SyncCosts:
        """Compute the costs of a run's weight sync; the load is that of the first kind of replica.

        Raises:
            ValueError: a profile is missing or wrong.
        """
        run, kinds = resolved.run, resolved.kinds
        alone = [cls.to_one_kind(kind) for kind in kinds]
        if len(alone) == 1:
            return alone[0]
        return _side_by_side(run.rollout, Payload.of(kinds[0].replica, run.sync), run.sync, alone)

    @classmethod
    def to_one_kind(cls, resolved: ResolvedRun) -> SyncCosts:
        """Compute the costs of a push to one kind of replica."""
        run, replica, trainer = resolved.run, resolved.replica, resolved.trainer
        route = _Route(
            replica=replica,
            trainer=trainer,
            sync=run.sync,
            merges_adapters=run.merges_adapters,
            link=resolved.link,
            backend=load_backend(run.sync.backend),
            payload=Payload.of(replica, run.sync),
            sender=SyncSide.of(trainer.pool, trainer.config.num_gpus),
            receiver=SyncSide.of(replica.pool, replica.config.num_gpus),
        )
        return route.costs().calibrated(Corrections.of(resolved))


@dataclass(frozen=True, kw_only=True)
class _Route:
    """The route from a run's trainer to its replicas."""

    replica: ReplicaHardware
    trainer: TrainerHardware
    sync: SyncConfig
    merges_adapters: bool
    """Whether replicas load whole weights with merged adapters."""
    link: LinkConfig | None
    backend: SyncBackend
    payload: Payload
    sender: SyncSide
    receiver: SyncSide

    def costs(self) -> SyncCosts:
        broadcast = self.payload.num_bytes * self.backend.broadcast_share
        sharded = self.payload.num_bytes - broadcast
        hops, sender = self._hops(), Hop(self.backend.sender_bandwidth)
        passage = TransferTimes.through(hops, broadcast, self.sync.bucket_size)
        latency = 0.0 if self.link is None else self.link.latency
        is_sender_slowest = all(sender.bandwidth <= hop.bandwidth for hop in hops)
        return SyncCosts(
            wire_bytes=round(broadcast + sharded * self.replica.config.replicas),
            fill_time=self._fixed_time() + passage.fill_time,
            wire_time=passage.hold_time + self._shard_time(sharded),
            drain_time=passage.drain_time + latency,
            load_time=self._load_time(),
            tier=self._tier(),
            sources=self._sources(),
            spread=self.backend.error.spread * is_sender_slowest,
        )

    @property
    def _is_delta(self) -> bool:
        return self.sync.mode == "delta"

    @property
    def _is_one_node(self) -> bool:
        """Whether trainer and replicas share one node, so that nothing crosses a network."""
        num_gpus = self.sender.num_gpus + self.receiver.num_gpus
        is_one_pool = self.trainer.config.pool == self.replica.config.pool
        return is_one_pool and num_gpus <= self.receiver.pool.domain

    def _fixed_time(self) -> float:
        fixed = self.backend.fixed_time(self.payload.num_bytes, self.payload.num_tensors)
        if self._is_delta:
            fixed += weight_bytes(self.replica) / load_delta().compare_bandwidth
        return fixed + self._quantise_time("trainer")

    def _quantise_time(self, where: str) -> float:
        """Return the seconds in which a side quantises all weights to the replicas' format; each GPU has a share of a copy."""
        if self.sync.mode != "full" or self.sync.quantise_at != where:
            return 0.0
        config, gpu = self.trainer.config, self.sender.gpu
        ways: float = config.tensor_parallel * config.pipeline_parallel
        if where == "replica":
            ways, gpu = weight_ranks(self.replica), self.receiver.gpu
        achieved = gpu.memory_bandwidth * gpu.roofline.bandwidth_efficiency
        replica, trained = self.replica, self.trainer.dtype
        return quantised_bytes(replica.model, replica.precision, trained) / ways / achieved

    def _hops(self) -> list[Hop]:
        """Return all hops of a broadcast bucket, in order."""
        legs = [Hop(load_delta().codec_bandwidth)] if self._is_delta else []
        legs.append(Hop(self.backend.sender_bandwidth))
        if self.link is not None:
            legs.append(link_hop(self.link))
        network = Hop(self.receiver.node_bandwidth, self.receiver.network.message_latency)
        return [*legs, *[network] * self._depth(), Hop(self.receiver.gpu.nvlink)]

    def _depth(self) -> int:
        """Return the number of hops over the receiving pool's network.

        Two complementary binary trees reach n nodes in about log2(n) hops, and each node sends no
        more than it receives (Sanders, Speck, Traeff 2009, doi 10.1016/j.parco.2009.09.001; NCCL's
        double trees).
        """
        if self._is_one_node:
            return 0
        num_nodes = self.receiver.num_nodes + (self.link is None)  # the root is one of them
        return (num_nodes - 1).bit_length()

    def _shard_time(self, num_bytes: float) -> float:
        """Return the seconds in which every GPU of every replica receives its own shard: the busiest of three ends."""
        config, ways = self.replica.config, weight_ranks(self.replica)
        copies = num_bytes * config.replicas
        if self._is_one_node:
            nvlink = self.receiver.gpu.nvlink
            return max(num_bytes / ways, copies / self.sender.num_gpus) / nvlink
        return max(
            num_bytes / ways / self.receiver.rank_bandwidth,
            copies / self.sender.num_gpus / self.sender.rank_bandwidth,
            0.0 if self.link is None else copies / link_hop(self.link).bandwidth,
        )

    def _load_time(self) -> float:
        """Return the seconds to copy the shard within the GPU, and first from host memory if the network ends there.

        A delta passes over the whole shard (vLLM stages a sparse update at the size of the
        weights). Merged adapters become whole weights in host memory. The constants of measured
        backends include the copy from the host.
        """
        gpu, ways = self.receiver.gpu, weight_ranks(self.replica)
        is_whole = self._is_delta or self.merges_adapters
        copied = weight_bytes(self.replica) if is_whole else self.payload.num_bytes
        memory_bandwidth = gpu.memory_bandwidth * gpu.roofline.bandwidth_efficiency
        load_time = COPY_TRAFFIC * copied / ways / memory_bandwidth
        if self.merges_adapters:
            load_time += weight_bytes(self.replica) / ways / gpu.host_link
        elif self._is_through_host and not self.backend.fitted_to:
            load_time += self.payload.num_bytes / ways / gpu.host_link
        return load_time + self._quantise_time("replica")

    @property
    def _is_through_host(self) -> bool:
        """Whether any network on the way to a replica ends in host memory."""
        link = [] if self.link is None else [load_transport(self.link.transport)]
        return any(network.is_through_host for network in [self.receiver.network, *link])

    def _tier(self) -> Tier:
        """Return composed if the constants were fitted to this transfer: all weights, over RDMA."""
        is_fitted = bool(self.backend.fitted_to) and self.sync.mode == "full"
        return "composed" if is_fitted and not self._is_through_host else "roofline"

    def _sources(self) -> tuple[str, ...]:
        names = [self.sender.pool.transport, self.receiver.pool.transport]
        names += [] if self.link is None else [self.link.transport]
        files = [f"sync/{self.sync.backend}"]
        files += [f"transports/{name}" for name in dict.fromkeys(names)]
        files += ["sync/delta"] if self._is_delta else []
        merging = ["merging adapters as if it took nothing"] if self.merges_adapters else []
        return (*(f"profiles/{file}.toml" for file in files), *merging)


def _side_by_side(
    rollout: RolloutConfig, payload: Payload, sync: SyncConfig, kinds: Sequence[SyncCosts]
) -> SyncCosts:
    """Return the costs of a push to several kinds of replicas, from those of each alone.

    All pools receive the weights at the same time over their own routes, and the push ends with the
    slowest. The load is that of the first kind.
    """
    broadcast = payload.num_bytes * load_backend(sync.backend).broadcast_share
    num_pools = len({kind.pool for kind in rollout.kinds})
    copies = (payload.num_bytes - broadcast) * rollout.num_replicas
    return replace(
        kinds[0],
        wire_bytes=round(broadcast * num_pools + copies),
        fill_time=max(kind.fill_time for kind in kinds),
        wire_time=max(kind.wire_time for kind in kinds),
        drain_time=max(kind.drain_time for kind in kinds),
        unpack_time=max(kind.unpack_time for kind in kinds),
        tier=max((kind.tier for kind in kinds), key=TIERS.index),
        spread=max(kind.spread for kind in kinds),
        sources=tuple(dict.fromkeys(source for kind in kinds for source in kind.sources)),
    )


def link_hop(link: LinkConfig) -> Hop:
    """Return the hop of a link, by its transport."""
    transport = load_transport(link.transport)
    return Hop(link.bandwidth * transport.efficiency, transport.message_latency)


def weight_ranks(replica: ReplicaHardware) -> float:
    """Return the number of GPUs that share a replica's weights; with attention ranks, total over the part on one GPU."""
    config = replica.config
    if config.data_parallel == 1:
        return config.tensor_parallel * config.pipeline_parallel
    return weight_bytes(replica) / fullest_stage(replica).weights

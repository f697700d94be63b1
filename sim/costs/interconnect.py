"""Compute seconds of all-reduce and all-to-all between a replica's GPUs, over NVLink domains and networks.

All-reduce. Within an NVLink domain, kernel tables have the collectives. Custom all-reduces of
engines work within one node only. So the tensor ranks of several nodes use NCCL: its table within a
domain, and its trees between domains, with the latencies of NCCL's own tuning model:

    seconds = base + 2 x ((GPUs of a domain - 1) x hop within + log2(domains) x hop between) + bytes / rate

The faster protocol of `TREES` counts. On the 8 H100 of one node, this is within 27 % of NCCL's measured table
for 64 KiB and 1 MiB. Between nodes they take up to 256 KiB as long as was measured within 19 %, and then as little as 0.6 times
as long. `MEASURED` has the seconds of 2 and 4 nodes of H100. So the seconds of the trees count times what was measured over
what the trees take on H100, at the same size and number of domains. That other GPUs and networks differ from the trees
as H100 does is an assumption, and so is that more domains do as 4. The latter is within 25 % of the eight
published latencies of 8 nodes. So it counts as a roofline.

All-to-all: wide expert parallelism sends tokens to the experts of other GPUs and back. Few tokens
go directly to each of their experts (DeepEP's low-latency kernels). Many tokens go once to each
node and GPU that has any of them (its normal kernels). Network and NVLink traffic overlap:

    seconds = start + max(bytes over the network / its bandwidth, bytes over NVLink / its bandwidth) / ACHIEVED

This is within 10 % of the twelve published latencies of 8 to 256 H800. On 16 to 64 H100 it is within 10 %
of those of 64 tokens and more, and within 20 % of those of fewer (tests/test_all_to_all.py). It was not
measured on other networks and in the normal kernels, so it counts as a roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log2
from typing import NamedTuple

import numpy as np

from streamrl.hardware.model_shape import Experts
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import gpu_of
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.sim.costs.experts import MOST_DIRECT
from streamrl.sim.costs.kernels import Estimate, unmeasured
from streamrl.sim.costs.sync_profiles import load_transport


@dataclass(frozen=True)
class Interconnect:
    """A pool's NVLink domains and the network between them."""

    domain: int
    """GPUs in an NVLink domain."""
    node: int
    """GPUs in a node."""
    nvlink: float
    """Bytes per second of a GPU within its domain, one direction."""
    network: float
    """Bytes per second of a GPU to other domains, one direction."""
    latency: float
    """Seconds of a message between domains."""
    source: str

    @classmethod
    def of(cls, pool: PoolConfig) -> Interconnect:
        """Return the interconnect of a pool."""
        gpu, transport = gpu_of(pool), load_transport(pool.transport)
        return cls(
            domain=pool.domain,
            node=pool.gpus_per_node,
            nvlink=gpu.nvlink,
            network=gpu.network * transport.efficiency,
            latency=transport.message_latency,
            source=f"roofline of {gpu.name}: network between nodes",
        )

    def reduced(self, num_bytes: Floats, domains: int) -> Estimate:
        """Return the seconds in which all GPUs of several domains all-reduce `num_bytes` with NCCL."""
        seconds = self.in_trees(num_bytes, domains) * over_trees(num_bytes, domains)
        return unmeasured(seconds, self.source, NETWORK)

    def in_trees(self, num_bytes: Floats, domains: int) -> Floats:
        """Return the seconds of that all-reduce by NCCL's own tuning model."""
        rate, size = self.network * self.domain / 2, np.log2(num_bytes / SMALLEST)
        found = [
            tree.base
            + 2 * ((self.domain - 1) * tree.near + int(log2(domains)) * tree.far)
            + num_bytes
            / (rate * tree.share * np.interp(size, range(len(tree.reached)), tree.reached))
            for tree in TREES
        ]
        return np.minimum(*found)

    def sent_on(self, num_bytes: Floats, num_gpus: int) -> Estimate:
        """Return the seconds in which a GPU sends `num_bytes` to the next stage of a replica of `num_gpus`.

        Stages are in different domains, unless the whole replica is in one domain. Then there is no
        latency.
        """
        if num_gpus <= self.domain:
            return unmeasured(num_bytes / self.nvlink, self.source, STAGES)
        seconds = num_bytes / self.network + self.latency + np.zeros(1)
        return unmeasured(seconds, self.source, STAGES)


class Tree(NamedTuple):
    """A protocol of NCCL's tree."""

    base: float
    """Seconds of an all-reduce without hops and bytes."""
    near: float
    """Seconds of a hop over NVLink."""
    far: float
    """Seconds of a hop over the network."""
    share: float
    """Share of the bandwidth of a domain's ports that data gets."""
    reached: tuple[float, ...]
    """Share of that for messages of `SMALLEST` bytes and each doubling of them."""


SMALLEST = 64
LL = (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)  # fmt: skip
LL128 = (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1)  # fmt: skip
TREES = (
    Tree(base=6.8e-6, near=0.6e-6 * 1.8, far=5.0e-6, share=0.9 / 3.8, reached=LL),
    Tree(base=14.0e-6, near=1.25e-6, far=8.5e-6, share=0.9 * 0.915, reached=LL128),
)
"""NCCL's protocols LL and LL128 (NVIDIA/nccl, src/graph/tuning.cc, since version 2.18)."""
SIZES = tuple(2.0**power for power in (10, 13, *range(16, 28)))
MEASURED = {
    2: (26.7, 31.7, 33.1, 38.1, 46.8, 70.3, 77.3, 85.1, 103.1, 141.0, 193.4, 268.9, 468.0, 750.0),
    4: (37.1, 45.6, 47.6, 55.1, 66.9, 72.8, 87.8, 144.3, 164.0, 229.5, 272.0, 412.5, 594.5, 1028.5),
}
"""Microseconds of an all-reduce of `SIZES` bytes, by nodes of 8 H100 with a 400 Gbps port for each GPU. NCCL 2.26.2, in place;
from 1 MiB, the mean of two clusters, which differ by 29 % at most (NVIDIA/nccl-tests issue 309)."""
NETWORK, STAGES = "all-reduce between nodes", "transfers between pipeline stages"
"""What takes seconds that rest on datasheets."""
START_TIME, NEAR_START_TIME, ACHIEVED = 30e-6, 40e-6, 0.9
"""Seconds of a dispatch or combine without tokens, between domains and within one, and share of line
rate that a large one reaches. Two sources have DeepEP's low-latency kernels with a 400 Gbps port for
each GPU. One has H800 with 128 tokens per GPU (deepseek-ai/DeepEP 0297fc8, docs/legacy.md, MIT). The other has
H100 with 2 to 256 tokens on 1 to 8 nodes (SGLang 0.5.6, PyPI aiconfigurator-core 0.12.0, Apache-2.0).
"""
SCALE = 1 + 4 / 128
"""Bytes of a value that is dispatched in fp8, with a float32 scale for each 128 values."""


@cache
def _measured_over_trees() -> tuple[Floats, ...]:
    """Return what was measured over what trees take, [2 and 4 nodes][SIZES]."""
    wires = Interconnect.of(PoolConfig(gpu="h100", nodes=max(MEASURED)))
    return tuple(
        np.array(times) * 1e-6 / wires.in_trees(np.array(SIZES), nodes)
        for nodes, times in MEASURED.items()
    )


def over_trees(num_bytes: Floats, domains: int) -> Floats:
    """Return how many times as long as in trees an all-reduce of `num_bytes` takes on `domains` nodes of H100."""
    two, four = (
        np.interp(np.log2(num_bytes), np.log2(SIZES), times) for times in _measured_over_trees()
    )
    return two + (four - two) * min(max(log2(domains) - 1, 0.0), 1.0)


def routed_copies(
    tokens: Floats, experts: Experts, ranks: int, domain: int
) -> tuple[Floats, Floats]:
    """Return copies per token that a GPU sends to other domains, and to other GPUs of its own domain.

    Experts are shared by `ranks` GPUs, and each GPU has the same number of `tokens`.
    """
    chosen, near = experts.experts_per_token, min(domain, ranks)
    direct = (chosen * (1 - near / ranks), chosen * (near - 1) / ranks)
    domains = ranks / near
    reached = domains * (1 - (1 - 1 / domains) ** chosen)
    once = (reached * (1 - 1 / domains), (ranks - 1) * (1 - (1 - 1 / ranks) ** chosen))
    is_direct = tokens <= MOST_DIRECT
    outside, inside = (np.where(is_direct, *pair) for pair in zip(direct, once, strict=True))
    return outside, inside


def all_to_all_time(
    wires: Interconnect, tokens: Floats, experts: Experts, hidden_size: int, ranks: int, dtype: str
) -> Estimate:
    """Return the seconds of one layer's dispatch and combine, for `tokens` of each GPU.

    Inputs of fp8 experts are sent in fp8; outputs come back in 16 bits.
    """
    outside, inside = routed_copies(tokens, experts, ranks, wires.domain)
    start = START_TIME if ranks > wires.domain else NEAR_START_TIME
    seconds = np.zeros(len(tokens))
    for width in (SCALE if dtype == "fp8" else 2.0, 2.0):
        num_bytes = tokens * hidden_size * width
        wire = np.maximum(outside / wires.network, inside / wires.nvlink) * num_bytes
        seconds += start + wire / ACHIEVED
    source = f"{wires.source}; dispatch of tokens as DeepEP on H800"
    return unmeasured(seconds, source, "all-to-all between nodes")

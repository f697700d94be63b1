"""What connects the GPUs of a replica, and seconds of what crosses more than one NVLink domain: datasheet rates, marked so.

Within a domain kernel tables have the collectives. Tensor ranks of k domains reduce within each domain, then each GPU its
share between domains over its own network port, then gather within the domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from streamrl.hardware.profiles import gpu_of
from streamrl.hardware.tables import Floats
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.sim.costs.kernels import Estimate, unmeasured
from streamrl.sim.costs.sync_profiles import load_transport


@dataclass(frozen=True)
class Wires:
    """A pool's NVLink domains and the network between them."""

    domain: int
    """GPUs that NVLink joins."""
    nvlink: float
    """Bytes a second of a GPU within its domain, one direction."""
    network: float
    """Bytes a second of a GPU to other domains, one direction."""
    latency: float
    """Seconds of a message between domains."""
    source: str

    @classmethod
    def of(cls, pool: PoolConfig) -> Wires:
        """Return those of a pool."""
        gpu, transport = gpu_of(pool), load_transport(pool.transport)
        return cls(
            domain=pool.domain,
            nvlink=gpu.nvlink,
            network=gpu.network * transport.efficiency,
            latency=transport.message_latency,
            source=f"roofline of {gpu.name}: network between nodes",
        )

    def reduced_between(self, num_bytes: Floats, domains: int) -> Estimate:
        """Return the seconds of an all-reduce of `num_bytes` a GPU between domains, within which it was reduced."""
        wire = 2 * (domains - 1) / domains * num_bytes / self.network
        return unmeasured(wire + 2 * ceil(log2(domains)) * self.latency, self.source)

    def sent_on(self, num_bytes: Floats, num_gpus: int) -> Estimate:
        """Return the seconds in which a GPU sends `num_bytes` to the next stage of a replica of `num_gpus`.

        Stages are in different domains unless all of the replica is in one, where no message is waited for.
        """
        if num_gpus <= self.domain:
            return unmeasured(num_bytes / self.nvlink, self.source)
        return unmeasured(num_bytes / self.network + self.latency + np.zeros(1), self.source)

"""The simulated way of weights from the trainer to the replicas: a link with bandwidth, latency and a queue."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from streamrl.messages import PushWeights, WeightsPushed
from streamrl.profile import load_gpu
from streamrl.run_file import find_link

if TYPE_CHECKING:
    from sim.world import SimWorld


class Link:
    """One process: a transfer holds the wire for its bytes, then travels for the latency."""

    def __init__(self, env: simpy.Environment, bandwidth: float, latency: float) -> None:
        self._env = env
        self._wire = simpy.Resource(env, capacity=1)
        self.bandwidth = bandwidth
        self.latency = latency

    def carry(self, num_bytes: int) -> Generator[simpy.Event, Any, None]:
        """Wait for the wire, send `num_bytes`, and arrive."""
        with self._wire.request() as turn:
            yield turn
            yield self._env.timeout(num_bytes / self.bandwidth)
        yield self._env.timeout(self.latency)


class Transfer:
    """One process: send pushed weights over the link between the pools, then to every node of replicas.

    Across pools one sender ships one copy, and the receiving pool passes it on over its own network.
    """

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._hops = _hops(world)
        self._inbox = simpy.Store(world.env)
        world.env.process(self._run())

    def begin(self, command: PushWeights) -> None:
        """Queue a push."""
        self._inbox.put(command)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            command: PushWeights = yield self._inbox.get()
            num_bytes = self._world.costs.weight_bytes
            for link in self._hops:
                yield from link.carry(num_bytes)
            self._world.emit(WeightsPushed(command.version, num_bytes))


def _hops(world: SimWorld) -> list[Link]:
    """Give the links that weights cross one after the other."""
    run, hops = world.run_file, []
    index = find_link(run)
    if index is not None:
        link = run.cluster.links[index]
        hops.append(Link(world.env, link.bandwidth, link.latency))
    pool = run.cluster.pools[run.rollout.pool]
    gpu = load_gpu(pool.gpu)
    bandwidth = gpu.network * pool.gpus_per_node if pool.nodes > 1 else gpu.nvlink
    hops.append(Link(world.env, bandwidth, 0.0))
    return hops

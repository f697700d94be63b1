"""The simulated way of weights from the trainer to the replicas: a wire with a queue."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from streamrl.engine.messages import PushWeights, WeightsPushed

if TYPE_CHECKING:
    from sim.world import SimWorld


class Link:
    """A wire that carries one transfer at a time."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._wire = simpy.Resource(env, capacity=1)

    def carry(self, wire_time: float) -> Generator[simpy.Event, Any, None]:
        """Wait for the wire and hold it for `wire_time` seconds."""
        with self._wire.request() as turn:
            yield turn
            yield self._env.timeout(wire_time)


class Transfer:
    """One process: prepare a push, send it over the wire, and see its last bucket arrive."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._link = Link(world.env)
        self._inbox = simpy.Store(world.env)
        world.env.process(self._run())

    def begin(self, command: PushWeights) -> None:
        """Queue a push."""
        self._inbox.put(command)

    def _run(self) -> Generator[simpy.Event, Any, None]:
        sync, env = self._world.costs.sync, self._world.env
        while True:
            command: PushWeights = yield self._inbox.get()
            yield env.timeout(sync.fill_time)
            yield from self._link.carry(sync.wire_time)
            yield env.timeout(sync.drain_time)
            self._world.emit(WeightsPushed(command.version, sync.wire_bytes))

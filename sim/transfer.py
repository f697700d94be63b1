"""The simulated transfer of weights from the trainer to the replicas: a wire with a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import simpy

from streamrl.engine.messages import Command, PushWeights, WeightsPushed
from streamrl.sim.world_interface import WorldInterface


class Link:
    """A wire that carries one transfer at a time."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._wire = simpy.Resource(env, capacity=1)

    def carry(self, wire_time: float) -> Generator[simpy.Event, Any, None]:
        """Wait for the wire and occupy it for `wire_time` seconds."""
        with self._wire.request() as turn:
            yield turn
            yield self._env.timeout(wire_time)


class Transfer:
    """One process: prepare a push, send it over the wire, and wait until its last bucket arrives."""

    def __init__(self, around: WorldInterface) -> None:
        self._around = around
        self._link = Link(around.env)
        self._core = around.cores.time_of("handling")
        """Clock of the threads that prepare and unpack a push; they compete with training if the
        host's cores are shared.
        """
        self._inbox = simpy.Store(around.env)
        self._under_way: deque[PushWeights] = deque()
        self._process = around.env.process(self._run())

    def push(self, command: PushWeights) -> None:
        """Send a version to where replicas can load it, after earlier versions."""
        self._under_way.append(command)
        self._inbox.put(command)

    def stop(self) -> list[Command]:
        """Stop the transfers of a lost sender, and return the lost commands."""
        lost: list[Command] = list(self._under_way)
        if lost:
            self._under_way.clear()
            self._inbox = simpy.Store(self._around.env)
            self._process.interrupt("sender lost")
        return lost

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            try:
                yield from self._send((yield self._inbox.get()))
            except simpy.Interrupt:  # this push was stopped: continue with the next one
                self._core.leave()

    def _send(self, command: PushWeights) -> Generator[simpy.Event, Any, None]:
        sync, env = self._around.costs.sync, self._around.env
        slowness = self._around.disruptions.slowness
        yield self._core.work(sync.fill_time * slowness)
        yield from self._link.carry(sync.wire_time * slowness)
        yield env.timeout(sync.drain_time * slowness)
        if sync.unpack_time:
            yield self._core.work(sync.unpack_time * slowness)
        self._under_way.popleft()
        self._around.emit(WeightsPushed(command.version, sync.wire_bytes))

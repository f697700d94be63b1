"""Compute what a run is charged for: GPUs by pool, the replicas that were up, and egress between pools."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from streamrl.engine.messages import (
    Command,
    Event,
    Failed,
    PushWeights,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    StartReplica,
    StopReplica,
    WeightsPushed,
)
from streamrl.engine.trace import Entry, Trace
from streamrl.hardware.profiles import price_of
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.gpu_pools import Side, find_link, sides_of
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.runfile.units import SECONDS_PER_HOUR


class PaidReplicas:
    """Counts them block by block, and keeps how many there were whenever that changed."""

    def __init__(self, wanted: int) -> None:
        """Take how many replicas a run file wants."""
        self._wanted, self._there = wanted, 0
        self._since = [0.0]
        self._paid = [wanted]

    def read(self, entries: Iterable[tuple[float, Event, list[Command]]]) -> None:
        """Take the entries that come after those before."""
        for time, event, commands in entries:
            match event:
                case ReplicaStopped() | ReplicaLost() | Failed(StartReplica() | StopReplica()):
                    self._there -= 1
                case _:
                    pass  # ends no replica
            for command in commands:
                if isinstance(command, StartReplica):
                    self._there += 1
                elif isinstance(command, Resize):
                    self._wanted = command.num_replicas
            paid = max(self._wanted, self._there)
            if paid != self._paid[-1]:
                self._since.append(time)
                self._paid.append(paid)

    def mean(self, start: float, end: float) -> float:
        """Return how many were paid for on average between two instants."""
        first = bisect_right(self._since, start)
        edges = [start, *self._since[first : bisect_right(self._since, end)], end]
        paid = self._paid[first - 1 :]
        stretches = zip(paid, pairwise(edges), strict=False)
        return sum(num * (until - since) for num, (since, until) in stretches) / (end - start)


def read_replicas(trace: Trace) -> PaidReplicas:
    """Count the replicas of a whole trace."""
    found = PaidReplicas(trace.run.rollout.num_replicas)
    found.read(trace.entries)
    return found


BYTES_PER_GB = 1e9


class PaidSide(NamedTuple):
    """A side of a run, and the GPUs that it had on average."""

    side: Side
    num_gpus: float


@dataclass(frozen=True)
class PaidGpus:
    """The GPUs that a run pays for; what replicas and a trainer share counts once."""

    pools: Mapping[str, PoolConfig]
    sides: Sequence[PaidSide]

    @classmethod
    def of(cls, run: Run, num_replicas: float | None = None) -> PaidGpus:
        """Return the GPUs of a run with this mean number of replicas; those of the run file where absent."""
        more = 0.0 if num_replicas is None else num_replicas - run.rollout.num_replicas
        sides = []
        for side in sides_of(run):
            is_resized = side.kind == "rollout" and not side.of_kind
            added = more * run.rollout.gpus_per_replica if is_resized else 0.0
            sides.append(PaidSide(side, side.num_gpus + added))
        return cls(run.cluster.pools, sides)

    @property
    def by_pool(self) -> dict[str, float]:
        """Return the paid GPUs of each pool: all GPUs of an owned pool, of others those that a side uses."""
        paid = dict.fromkeys(self.pools, 0.0)
        for side, num_gpus in self.sides:
            paid[side.pool] += num_gpus
        owned = {name: float(pool.num_gpus) for name, pool in self.pools.items() if pool.owned}
        return {name: count for name, count in {**paid, **owned}.items() if count}

    @property
    def dollars_per_second(self) -> float:
        """Return what all paid GPUs cost a second."""
        prices = (num_gpus * price_of(self.pools[name]) for name, num_gpus in self.by_pool.items())
        return sum(prices) / SECONDS_PER_HOUR


def egress_dollars(
    links: list[LinkConfig], kinds: tuple[RolloutConfig, ...], trainer_pool: str, num_bytes: float
) -> float:
    """Return what it costs to send bytes from the trainer to the replicas, to each pool as many: nothing within one."""
    ways = {own.pool: find_link(links, own.pool, trainer_pool) for own in kinds}
    prices = [0.0 if index is None else links[index].price_per_gb for index in ways.values()]
    return num_bytes / BYTES_PER_GB * sum(prices) / len(prices)


class Pushes:
    """Counts the pushes of a run, all of the same size.

    Caches that migrate stay within the pool of the replicas, and rollouts are small beside weights: neither counts.
    """

    def __init__(self) -> None:
        self._begun_at = array("d")
        self._num_bytes = self._num_done = 0

    def read(self, entries: Iterable[Entry]) -> None:
        """Take the entries that come after those before."""
        for time, event, commands in entries:
            if type(event) is WeightsPushed:
                self._num_bytes += event.num_bytes
                self._num_done += 1
            for command in commands:
                if type(command) is PushWeights:
                    self._begun_at.append(time)

    def num_bytes(self, start: float, end: float) -> float:
        """Return the bytes of the pushes that begin from one instant on and before another."""
        if not self._num_done:
            return 0.0
        count = bisect_left(self._begun_at, end) - bisect_left(self._begun_at, start)
        return count * self._num_bytes / self._num_done

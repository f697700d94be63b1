"""Compute what a run is charged for: GPUs by pool, sandboxes, the replicas that were up, and egress between pools."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from streamrl.engine.messages import (
    Failed,
    MachineReplaced,
    PushWeights,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    StartReplica,
    StopReplica,
    WeightsPushed,
)
from streamrl.engine.trace import Trace
from streamrl.hardware.profiles import price_of
from streamrl.record.billing import SANDBOXES
from streamrl.record.long_column import LongColumn
from streamrl.record.machines_away import MachinesAway
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.trainer_ranks import RankReader
from streamrl.runfile.cluster_config import LinkConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.gpu_pools import Side, find_link, sides_of
from streamrl.runfile.roles_config import RolloutConfig
from streamrl.runfile.units import SECONDS_PER_HOUR


class PaidReplicas(MessageReader):
    """Counts the replicas that are paid for: the wanted number, or the existing number if it is larger.

    Spot machines that were taken away, and are not replaced yet, are counted apart: nobody pays for them.
    """

    def __init__(self, wanted: int, lent: RolloutConfig | None) -> None:
        """Start with the number of replicas in the run file; those of `lent` are on GPUs of the trainer."""
        self._wanted, self._there = wanted, 0 if lent is None else -lent.replicas
        self._since = [0.0]
        self._paid = [wanted]
        self._machines = MachinesAway()
        self._away_since = [0.0]
        self._away = [dict[int, int]()]
        """Machines that are away, by kind of replica, from each instant of `_away_since`."""

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that begins or ends a replica."""
        yield {
            ReplicaStopped: lambda event, time: self._end(event.replica, time),
            ReplicaLost: lambda event, time: self._end(event.replica, time),
            ReplicaLeaving: lambda event, _: self._machines.leave(event.replica),
            MachineReplaced: lambda event, time: self._change(
                self._machines.replace(event.replica), -1, time
            ),
            Failed: self._fail,
            StartReplica: self._start,
            Resize: self._resize,
        }

    def _fail(self, event: Failed, time: float) -> None:
        if isinstance(event.command, StartReplica | StopReplica):
            self._end(event.command.replica, time)

    def _start(self, command: StartReplica, time: float) -> None:
        self._machines.begin(command.replica, command.kind)
        self._add(1, time)

    def _end(self, replica: int, time: float) -> None:
        self._change(self._machines.end(replica), 1, time)
        self._add(-1, time)

    def _change(self, kind: int | None, by: int, time: float) -> None:
        """Count machines of a kind that went away or were replaced; none if `kind` is None."""
        if kind is not None:
            away = self._away[-1]
            self._away_since.append(time)
            self._away.append({**away, kind: away.get(kind, 0) + by})

    def _resize(self, command: Resize, time: float) -> None:
        self._wanted = command.num_replicas
        self._add(0, time)

    def _add(self, num_replicas: int, time: float) -> None:
        self._there += num_replicas
        paid = max(self._wanted, self._there)
        if paid != self._paid[-1]:
            self._since.append(time)
            self._paid.append(paid)

    def mean(self, start: float, end: float) -> float:
        """Return the mean number of paid replicas between two instants in seconds."""
        return _mean(self._since, self._paid, start, end)

    def mean_away(self, start: float, end: float) -> dict[int, float]:
        """Return the mean number of spot machines that are away between two instants, by kind of replica."""
        kinds = sorted(self._away[-1])
        counts = {kind: [away.get(kind, 0) for away in self._away] for kind in kinds}
        return {kind: _mean(self._away_since, counts[kind], start, end) for kind in kinds}


def _mean(since: Sequence[float], counts: Sequence[int], start: float, end: float) -> float:
    """Return the mean of counts that each hold from an instant on, between two instants in seconds."""
    first = bisect_right(since, start)
    edges = [start, *since[first : bisect_right(since, end)], end]
    stretches = zip(counts[first - 1 :], pairwise(edges), strict=False)
    return sum(num * (until - began) for num, (began, until) in stretches) / (end - start)


def read_replicas(trace: Trace) -> PaidReplicas:
    """Return the paid replicas of a whole trace."""
    replicas = PaidReplicas(trace.run.rollout.num_replicas, trace.run.lent)
    replicas.read(trace.entries)
    return replicas


class PaidRanks(RankReader):
    """Counts the data-parallel ranks of the primary trainer that are paid for."""

    def mean(self, start: float, end: float) -> float:
        """Return their mean number between two instants in seconds."""
        if len(self.ranks) == 1:
            return self.ranks[0]  # exactly
        return _mean(self.since, self.ranks, start, end)


def read_paid(trace: Trace, start: float, end: float) -> PaidGpus:
    """Return the paid GPUs of a whole trace, as their mean between two instants in seconds."""
    replicas, ranks = read_replicas(trace), PaidRanks(trace.run.trainer.data_parallel)
    ranks.read(trace.entries)
    mean, away = replicas.mean(start, end), replicas.mean_away(start, end)
    return PaidGpus.of(trace.run, mean, away, ranks.mean(start, end))


BYTES_PER_GB = 1e9


class PaidSide(NamedTuple):
    """A side of a run, and its mean number of GPUs."""

    side: Side
    num_gpus: float


@dataclass(frozen=True)
class PaidGpus:
    """The GPUs that a run pays for. GPUs that replicas and a trainer share count once."""

    pools: Mapping[str, PoolConfig]
    sides: Sequence[PaidSide]
    sandboxes: float = 0.0
    """Dollars per second of all sandboxes of the run's episodes."""

    @classmethod
    def of(
        cls,
        run: Run,
        num_replicas: float | None = None,
        away: Mapping[int, float] = MappingProxyType({}),
        num_ranks: float | None = None,
    ) -> PaidGpus:
        """Return the paid GPUs of a run.

        Args:
            run: the run file.
            num_replicas: mean number of replicas; None for the number in the run file.
            away: mean number of spot machines that are away, by kind of replica.
            num_ranks: mean number of data-parallel ranks of the primary trainer; None for that in the run file.
        """
        more = 0.0 if num_replicas is None else num_replicas - run.rollout.num_replicas
        sides = []
        for side in sides_of(run):
            is_resized = side.kind == "rollout" and not side.of_kind
            added = more * run.rollout.gpus_per_replica if is_resized else 0.0
            if side.kind == "rollout":
                kind = run.rollout.kinds[side.of_kind]
                added -= away.get(side.of_kind, 0.0) * kind.gpus_per_replica
            elif side.trainer or num_ranks is None or run.trainer.borrows:
                pass  # its ranks do not change, or the run pays for all GPUs of them anyway
            elif side.kind == "trainer":
                added = run.trainer.num_gpus * (num_ranks / run.trainer.data_parallel - 1)
            sides.append(PaidSide(side, side.num_gpus + added))
        return cls(run.cluster.pools, sides, sandbox_rent(run.environment))

    def mixed(self, other: PaidGpus, share: float) -> PaidGpus:
        """Return the mean of these GPUs and those of another time of the same run, which lasts a share of all seconds."""
        sides = [
            PaidSide(own.side, share * each.num_gpus + (1 - share) * own.num_gpus)
            for own, each in zip(self.sides, other.sides, strict=True)
        ]
        return replace(self, sides=sides)

    @property
    def used(self) -> dict[str, float]:
        """Return the GPUs of each pool that the run uses, owned or rented."""
        used = dict.fromkeys(self.by_pool, 0.0)
        for side, num_gpus in self.sides:
            used[side.pool] = used.get(side.pool, 0.0) + num_gpus
        return used

    @property
    def by_pool(self) -> dict[str, float]:
        """Return the paid GPUs of each pool: all GPUs of an owned pool, and the used GPUs of a rented one."""
        paid = dict.fromkeys(self.pools, 0.0)
        for side, num_gpus in self.sides:
            paid[side.pool] += num_gpus
        owned = {name: float(pool.num_gpus) for name, pool in self.pools.items() if pool.owned}
        return {name: count for name, count in {**paid, **owned}.items() if count}

    @property
    def rents(self) -> dict[str, float]:
        """Return the dollars per second of the paid GPUs of each pool, and of sandboxes if they cost anything."""
        gpus = {
            name: num_gpus * price_of(self.pools[name]) / SECONDS_PER_HOUR
            for name, num_gpus in self.by_pool.items()
        }
        return gpus | ({SANDBOXES: self.sandboxes} if self.sandboxes else {})

    @property
    def dollars_per_second(self) -> float:
        """Return the dollars per second of all paid GPUs and sandboxes."""
        prices = (num_gpus * price_of(self.pools[name]) for name, num_gpus in self.by_pool.items())
        return sum(prices) / SECONDS_PER_HOUR + self.sandboxes


def sandbox_rent(config: EnvironmentConfig | None) -> float:
    """Return the dollars per second of all sandboxes that a run rents."""
    if config is None or config.sandboxes is None:
        return 0.0
    return config.sandboxes * config.sandbox_price / SECONDS_PER_HOUR


def egress_dollars(
    links: list[LinkConfig], kinds: tuple[RolloutConfig, ...], trainer_pool: str, num_bytes: float
) -> float:
    """Return the dollars of sending bytes from the trainer to all replicas.

    Each pool of replicas receives an equal part. Traffic within a pool is free.
    """
    links_to = {own.pool: find_link(links, own.pool, trainer_pool) for own in kinds}
    prices = [0.0 if index is None else links[index].price_per_gb for index in links_to.values()]
    return num_bytes / BYTES_PER_GB * sum(prices) / len(prices)


class Pushes(MessageReader):
    """Counts the weight pushes of a run, which all have the same size.

    Other traffic does not count. KV caches migrate only within the pool of the replicas, and rollouts
    are small compared with weights.
    """

    def __init__(self) -> None:
        self._begun_at = LongColumn[float]("d")
        self._num_bytes = self._num_done = 0

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handlers of the begin and end of a push."""
        yield {PushWeights: self._begin, WeightsPushed: self._end}

    def _begin(self, _: PushWeights, time: float) -> None:
        self._begun_at.append(time)

    def _end(self, event: WeightsPushed, _: float) -> None:
        self._num_bytes += event.num_bytes
        self._num_done += 1

    def num_bytes(self, start: float, end: float) -> float:
        """Return the bytes of the pushes that begin in the interval [start, end)."""
        if not self._num_done:
            return 0.0
        count = bisect_left(self._begun_at, end) - bisect_left(self._begun_at, start)
        return count * self._num_bytes / self._num_done

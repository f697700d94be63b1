"""How many replicas a run pays for: those that were asked for, and those that have not ended yet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from streamrl.engine.messages import (
    Command,
    Event,
    Failed,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    StartReplica,
    StopReplica,
)
from streamrl.record.trace import Trace


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

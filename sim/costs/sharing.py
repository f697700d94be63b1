"""How much slower roles are that compute at the same time on the cores of one host, as a profile measured it.

Measured are companies: so many replicas that decode, alone or beside a trainer. In a larger one each role has its share
of the cores that the largest measured one had, or of all where that left some idle. Nobody is faster in company than
alone, nor all together than the cores are: what is measured beyond that is the host's changing pace. The process that
decides, and the verifier, are not among them: while they handle a rollout, that is one thread more, and every thread has
as much of the cores as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamrl.hardware.machine_fit import MEDIAN
from streamrl.hardware.machine_profile import Host, SharingRow

RoleKind = Literal["generating", "training", "handling"]
Speeds: TypeAlias = Mapping[RoleKind, float]
"""Of those of each kind that compute, as shares of their speeds alone."""
ALONE: Speeds = {"generating": 1.0, "training": 1.0, "handling": 1.0}


@dataclass(frozen=True)
class CoreSharing:
    """The speeds of roles that share the cores of a host, and of the thread that handles rollouts."""

    measured: Mapping[tuple[int, int], Speeds]
    """By how many generate and how many train."""
    cores: float
    threads: int = 1
    """Of each role that generates or trains."""

    @classmethod
    def of(cls, rows: Sequence[SharingRow], host: Host) -> CoreSharing | None:
        """Return what a profile says; None where it says nothing."""
        if not rows:
            return None
        measured = {(row.generating, row.training): _speeds(row) for row in rows}
        return cls(measured, host.cores, host.threads)

    def speeds(self, generating: int, training: int, handling: int = 0) -> Speeds:
        """Return the speeds while so many of each kind compute; a second trainer counts as a replica."""
        speeds = self._of_roles(generating, training)
        if not handling:
            return speeds
        threads = (generating + training) * self.threads
        share = min(1.0, self.cores / (threads + handling))
        left = share / min(1.0, self.cores / max(1, threads))
        return {**{kind: left * speed for kind, speed in speeds.items()}, "handling": share}

    def _of_roles(self, generating: int, training: int) -> Speeds:
        trains = min(training, 1)
        replicas = generating + training - trains
        known = [count for count, beside in self.measured if beside == trains]
        if not replicas or replicas + trains < 2 or not known:
            return ALONE
        nearest = min(known, key=lambda count: (abs(count - replicas), count))
        left = 1.0
        if replicas > nearest:
            left = min(1.0, max(nearest + trains, self.cores / self.threads) / (replicas + trains))
        found = self.measured[nearest, trains]
        together = nearest * found["generating"] + trains * found["training"]
        left *= min(1.0, self.cores / self.threads / together)
        return {kind: min(1.0, left * speed) for kind, speed in found.items()}


def _speeds(row: SharingRow) -> Speeds:
    training = 1.0 if row.train is None else row.train[MEDIAN]
    return {"generating": row.generation[MEDIAN], "training": training}

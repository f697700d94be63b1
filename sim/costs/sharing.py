"""How much slower roles are that compute at the same time on the cores of one host, as a profile measured it.

Measured are companies: so many replicas that decode, alone or beside a trainer. In a larger one each role has its share
of the cores that the largest measured one had, or of all where that left some idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from streamrl.hardware.machine_fit import MEDIAN
from streamrl.hardware.machine_profile import Host, SharingRow


class Speeds(TypedDict):
    """Of a role that generates and of one that trains, as shares of their speeds alone."""

    generating: float
    training: float


ALONE: Speeds = {"generating": 1.0, "training": 1.0}


@dataclass(frozen=True)
class CoreSharing:
    """The speeds of roles that share the cores of a host."""

    measured: Mapping[tuple[int, int], Speeds]
    """By how many generate and how many train."""
    room: float
    """Roles that have as many cores as threads."""

    @classmethod
    def of(cls, rows: Sequence[SharingRow], host: Host) -> CoreSharing | None:
        """Return what a profile says; None where it says nothing."""
        if not rows:
            return None
        measured = {(row.generating, row.training): _speeds(row) for row in rows}
        return cls(measured, host.cores / host.threads)

    def speeds(self, generating: int, training: int) -> Speeds:
        """Return the speeds of roles while so many of each kind compute; a second trainer counts as a replica."""
        trains = min(training, 1)
        replicas = generating + training - trains
        known = [count for count, beside in self.measured if beside == trains]
        if not replicas or replicas + trains < 2 or not known:
            return ALONE
        nearest = min(known, key=lambda count: (abs(count - replicas), count))
        left = 1.0
        if replicas > nearest:
            left = min(1.0, max(nearest + trains, self.room) / (replicas + trains))
        found = self.measured[nearest, trains]
        return {
            "generating": left * found["generating"],
            "training": left * found["training"],
        }


def _speeds(row: SharingRow) -> Speeds:
    training = 1.0 if row.train is None else row.train[MEDIAN]
    return {"generating": row.generation[MEDIAN], "training": training}

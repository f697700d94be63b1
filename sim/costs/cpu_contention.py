"""How much slower roles are that compute at the same time on the cores of one host, as a profile measured it.

Threads take turns where there are more of them than cores, and each gets as much as any other. What a role loses beyond
its turns is what caches, memory and hardware threads give to those that run meanwhile, as large a share of its seconds
for each of them, and what it finds gone when its turn comes, by how long it waited. These are one figure for every pair
of kinds and one for each kind, fitted to all companies that a profile measured (so many replicas that decode, alone or
beside a trainer). One company by itself says little, as the host's pace changes by more from one minute to the next. The
process that decides, the verifier, and what serves calls in replicas are not among them: while they handle a rollout,
that is one thread more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamrl.hardware.measured_profile import Host, SharingRow
from streamrl.hardware.profile_fit import MEDIAN, fit_positive

RoleKind = Literal["generating", "training", "handling"]
Speeds: TypeAlias = Mapping[RoleKind, float]
"""Of those of each kind that compute, as shares of their speeds alone."""
ALONE: Speeds = {"generating": 1.0, "training": 1.0, "handling": 1.0}


class CoreLosses(NamedTuple):
    """By what share of its seconds work takes longer.

    For each other role that runs beside it all the time, and in turns: were it to wait for them all the time.
    """

    generating_by_generating: float = 0.0
    generating_by_training: float = 0.0
    generating_in_turns: float = 0.0
    training_by_generating: float = 0.0
    training_in_turns: float = 0.0


NO_LOSSES = CoreLosses()


@dataclass(frozen=True)
class CoreSharing:
    """The speeds of roles that share the cores of a host, and of the thread that handles rollouts."""

    cores: float
    threads: int = 1
    """Of each role that generates or trains."""
    losses: CoreLosses = NO_LOSSES

    @classmethod
    def of(cls, rows: Sequence[SharingRow], host: Host) -> CoreSharing | None:
        """Return what a profile says; None where it says nothing."""
        if not rows:
            return None
        turns = cls(host.cores, host.threads)
        return cls(turns.cores, turns.threads, turns._fit(rows))

    def speeds(self, generating: int, training: int, handling: int = 0) -> Speeds:
        """Return the speeds while so many of each kind compute; a second trainer counts as a replica."""
        trains = min(training, 1)
        replicas = generating + training - trains
        share, beside = self._turns(replicas + trains, handling)
        losses = self.losses
        of_replicas = max(0, replicas - 1) * losses.generating_by_generating
        generates = 1 + beside * (of_replicas + trains * losses.generating_by_training)
        generates += (1 - share) * losses.generating_in_turns
        learns = 1 + beside * replicas * losses.training_by_generating
        learns += (1 - share) * losses.training_in_turns
        return {"generating": share / generates, "training": share / learns, "handling": share}

    def _turns(self, roles: int, handling: int) -> tuple[float, float]:
        """Return the share of its time that a thread runs, and that of it for which another role's run beside."""
        own = min(self.threads, self.cores)  # of a role that has more, alone too
        threads = roles * own + handling
        if threads <= self.cores:
            return 1.0, 1.0
        return self.cores / threads, (self.cores - own) / (threads - own)

    def _fit(self, rows: Sequence[SharingRow]) -> CoreLosses:
        """Return the losses that come nearest to what all companies lost beyond their turns; none gains."""
        generates, learns = [], []
        for row in rows:
            share, beside = self._turns(row.generating + row.training, 0)
            others = beside * (row.generating - 1), beside * row.training
            generates.append((*others, 1 - share, share / row.generation[MEDIAN] - 1))
            if row.train is not None:
                lost = share / row.train[MEDIAN] - 1
                learns.append((beside * row.generating, 1 - share, lost))
        return CoreLosses(*_factors(generates, 3), *_factors(learns, 2))


def _factors(rows: Sequence[tuple[float, ...]], num: int) -> list[float]:
    """Return the `num` factors, none below 0, with which the columns but the last add up to about the last."""
    table = np.array(rows, dtype=float).reshape(-1, num + 1)
    return fit_positive(table[:, :-1], table[:, -1], np.ones(len(table)))

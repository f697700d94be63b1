"""Compute how much roles slow each other down on the cores of one host, from a measured profile.

If there are more threads than cores, threads take turns, and each gets the same share. Roles lose
time in two more ways:

- Caches, memory and hardware threads are shared. Each role that runs at the same time costs a fixed
  share.
- After a wait, a role finds its caches cold. This costs a share of the waiting time.

There is one factor for every pair of kinds and one for each kind. They are fitted to all measured
combinations, such as several decoding replicas with or without a trainer. A single combination says
little, because the host's speed changes more from one minute to the next. The controller, the
verifier and the replica servers have no factors. While they handle a rollout, they count as one
more thread.
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
"""Speed of the active roles of each kind, relative to their speed alone."""
ALONE: Speeds = {"generating": 1.0, "training": 1.0, "handling": 1.0}


class CoreLosses(NamedTuple):
    """Relative increase of work time.

    One factor applies to each other role that runs at the same time, the other to time spent
    waiting.
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
    """Threads of each role that generates or trains."""
    losses: CoreLosses = NO_LOSSES

    @classmethod
    def of(cls, rows: Sequence[SharingRow], host: Host) -> CoreSharing | None:
        """Return the sharing that a profile measured; None if it has no data."""
        if not rows:
            return None
        turns = cls(host.cores, host.threads)
        return cls(turns.cores, turns.threads, turns._fit(rows))

    def speeds(self, generating: int, training: int, handling: int = 0) -> Speeds:
        """Return the speeds for this number of active roles by kind; a second trainer counts as a replica."""
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
        """Return the share of time that a thread runs, and the share of that in which another role's thread runs too."""
        own = min(self.threads, self.cores)  # a role with more threads shares cores with itself
        threads = roles * own + handling
        if threads <= self.cores:
            return 1.0, 1.0
        return self.cores / threads, (self.cores - own) / (threads - own)

    def _fit(self, rows: Sequence[SharingRow]) -> CoreLosses:
        """Fit the losses to all measured combinations, beyond the loss by taking turns; no loss is negative."""
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
    """Return the `num` factors >= 0 with which the other columns add up to about the last one."""
    table = np.array(rows, dtype=float).reshape(-1, num + 1)
    return fit_positive(table[:, :-1], table[:, -1], np.ones(len(table)))

"""Compute how much roles slow each other down on the cores of one host, from a measured profile.

If there are more threads than cores, threads take turns, and each gets the same share. Roles lose
time in two more ways:

- Caches, memory and hardware threads are shared. Each role that runs at the same time costs a fixed
  share.
- After a wait, a role finds its caches cold. This costs a share of the waiting time. A replica that waits for environments
  loses more: these wake and sleep often, so it is interrupted more often.

There is one factor for every pair of kinds and one for each kind. They are fitted to all measured
combinations, such as several decoding replicas with or without a trainer. A single combination says
little, because the host's speed changes more from one minute to the next.

Other processes count as threads too: environments that act, and the controller, the verifier and the
replica servers while they handle a rollout. Roles lose time to environments and to the controller that
calls them. These lose some while they wait for a core, relative to environments beside one replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamrl.hardware.measured_profile import Host, SharingRow
from streamrl.hardware.profile_fit import MEDIAN, fit_positive

RoleKind = Literal["generating", "training", "handling", "acting"]
Speeds: TypeAlias = Mapping[RoleKind, float]
"""Speed of the active roles of each kind, relative to their speed alone."""
ALONE: Speeds = {"generating": 1.0, "training": 1.0, "handling": 1.0, "acting": 1.0}


class CoreLosses(NamedTuple):
    """Relative increase of work time.

    One factor applies to each other role that runs at the same time, the other to time spent
    waiting.
    """

    generating_by_generating: float = 0.0
    generating_by_training: float = 0.0
    generating_by_acting: float = 0.0
    generating_in_turns: float = 0.0
    """Its waiting time is that for other roles."""
    generating_after_acting: float = 0.0
    """Its waiting time is that for environments."""
    training_by_generating: float = 0.0
    training_by_acting: float = 0.0
    training_in_turns: float = 0.0
    acting_in_turns: float = 0.0
    """Its waiting time is that beyond the wait beside one replica, where CPU seconds of environments are measured."""


NO_LOSSES = CoreLosses()


@dataclass(frozen=True)
class CoreSharing:
    """The speeds of roles that share the cores of a host, of environments, and of the thread that handles rollouts."""

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

    def speeds(
        self, generating: int, training: int, handling: int = 0, acting: float = 0
    ) -> Speeds:
        """Return the speeds for this number of active roles by kind; a second trainer counts as a replica."""
        trains = min(training, 1)
        replicas = generating + training - trains
        roles = replicas + trains
        share, beside = self._turns(roles, handling + acting)
        for_roles, for_acting = self._waits(share, roles, handling, acting)
        losses = self.losses
        of_replicas = max(0, replicas - 1) * losses.generating_by_generating
        of_trainer = trains * losses.generating_by_training
        of_environments = acting * losses.generating_by_acting
        generates = 1 + beside * (of_replicas + of_trainer + of_environments)
        generates += for_roles * losses.generating_in_turns
        generates += for_acting * losses.generating_after_acting
        of_replicas = replicas * losses.training_by_generating
        learns = 1 + beside * (of_replicas + acting * losses.training_by_acting)
        learns += (1 - share) * losses.training_in_turns
        return {
            "generating": share / generates,
            "training": share / learns,
            "handling": share,
            "acting": share / (1 + self._later(share) * losses.acting_in_turns),
        }

    def _turns(self, roles: int, others: float) -> tuple[float, float]:
        """Return the share of time that a thread runs, and the share of that in which another role's thread runs too."""
        own = min(self.threads, self.cores)  # a role with more threads shares cores with itself
        threads = roles * own + others
        if threads <= self.cores:
            return 1.0, 1.0
        return self.cores / threads, (self.cores - own) / (threads - own)

    def _waits(
        self, share: float, roles: int, handling: float, acting: float
    ) -> tuple[float, float]:
        """Return the share of time that a role waits for other roles and the controller, and for environments."""
        own = min(self.threads, self.cores)
        others = roles * own + handling + acting - own
        for_acting = (1 - share) * acting / others if others > 0 else 0.0
        return 1 - share - for_acting, for_acting

    def _fit(self, rows: Sequence[SharingRow]) -> CoreLosses:
        """Fit the losses to all measured combinations, beyond the loss by taking turns; no loss is negative."""
        generates, learns, acts = [], [], []
        for row in rows:
            roles = row.generating + row.training
            acting = self._threads_of(row.acting, roles)
            share, beside = self._turns(roles, acting)
            others = beside * (row.generating - 1), beside * row.training, beside * acting
            waits = self._waits(share, roles, 0, acting)
            generates.append((*others, *waits, share / row.generation[MEDIAN] - 1))
            if row.train is not None:
                lost = share / row.train[MEDIAN] - 1
                learns.append((beside * row.generating, beside * acting, 1 - share, lost))
            if row.action is not None:
                acts.append((self._later(share), 1 / row.action[MEDIAN] - 1))
        return CoreLosses(*_factors(generates, 5), *_factors(learns, 3), *_factors(acts, 1))

    def _later(self, share: float) -> float:
        """Return how much less of its time an environment runs than beside one replica."""
        beside_one, _ = self._turns(1, 1)
        return max(0.0, beside_one - share)

    def _threads_of(self, cores: float, roles: int) -> float:
        """Return how many threads get so many cores beside `roles`, of which each thread gets the same share."""
        left, own = self.cores - cores, roles * min(self.threads, self.cores)
        return cores if own <= left else own * cores / left


def _factors(rows: Sequence[tuple[float, ...]], num: int) -> list[float]:
    """Return the `num` factors >= 0 with which the other columns add up to about the last one."""
    table = np.array(rows, dtype=float).reshape(-1, num + 1)
    return fit_positive(table[:, :-1], table[:, -1], np.ones(len(table)))
